//! The generated configurations, and how a test deploys one.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use crate::deployment::{Deployment, telling};
use crate::support::ports::FreePort;

/// A control plane's data plane: a generated file, its cluster of warmroute and its cluster of workers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Gateway {
    /// `tests/data/gateways/<file>.yaml`.
    pub(crate) file: &'static str,
    pub(crate) picker: &'static str,
    pub(crate) workers: &'static str,
    /// `gateway.assume` and `failure.mode` of warmroute.
    pub(crate) assume: &'static str,
    pub(crate) failure: &'static str,
}

const ISTIO_PICKER: &str = "outbound|9002||warmroute.inference.svc.cluster.local";
const ISTIO_WORKERS: &str = "outbound|54321||vllm-qwen-ip-b7595ee7.inference.svc.cluster.local";
const ROUTE: &str = "httproute/inference/qwen/rule/0";

/// Without EnvoyFilter and without `sni` in the DestinationRule.
pub(crate) const ISTIO_AS_GENERATED: Gateway = Gateway {
    file: "istio-as-generated",
    picker: ISTIO_PICKER,
    workers: ISTIO_WORKERS,
    assume: "full_duplex",
    failure: "fail_closed",
};
/// With an EnvoyFilter that sets the authority.
pub(crate) const ISTIO: Gateway = Gateway { file: "istio", ..ISTIO_AS_GENERATED };
/// With an EnvoyFilter that buffers request bodies.
pub(crate) const ISTIO_BUFFERED: Gateway =
    Gateway { file: "istio-buffered", assume: "buffered", failure: "fail_open", ..ISTIO_AS_GENERATED };
pub(crate) const ENVOY_AI_GATEWAY: Gateway = Gateway {
    file: "envoy-ai-gateway",
    picker: "envoy.clusters.endpointpicker_vllm-qwen_inference_ext_proc",
    workers: ROUTE,
    ..ISTIO_AS_GENERATED
};
pub(crate) const ENVOY_GATEWAY: Gateway = Gateway {
    file: "envoy-gateway",
    picker: "envoyextensionpolicy/inference/warmroute/extproc/0",
    workers: ROUTE,
    ..ISTIO_AS_GENERATED
};

/// An Envoy configuration.
#[derive(Clone, Debug)]
pub(crate) struct EnvoyConfig(pub(crate) Value);

fn socket(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip(), "port_value": address.port()}})
}

pub(crate) fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

impl EnvoyConfig {
    pub(crate) fn cluster(&mut self, name: &str) -> &mut Value {
        let mut clusters = self.0["static_resources"]["clusters"].as_array_mut().unwrap().iter_mut();
        clusters.find(|cluster| cluster["name"] == name).unwrap_or_else(|| panic!("no cluster {name}"))
    }

    /// The HTTP connection manager of the only listener.
    pub(crate) fn manager(&mut self) -> &mut Value {
        let listener = &mut self.0["static_resources"]["listeners"][0];
        let filters = if listener["default_filter_chain"].is_object() {
            &mut listener["default_filter_chain"]["filters"]
        } else {
            &mut listener["filter_chains"][0]["filters"]
        };
        &mut filters[0]["typed_config"]
    }

    /// The ext_proc filter.
    pub(crate) fn filter(&mut self) -> &mut Value {
        let filters = self.manager()["http_filters"].as_array_mut().unwrap();
        let is_ext_proc =
            |filter: &&mut Value| filter["name"].as_str().unwrap().starts_with("envoy.filters.http.ext_proc");
        &mut filters.iter_mut().find(is_ext_proc).unwrap()["typed_config"]
    }

    /// Replaces the addresses of a cluster; what the generated endpoints say beside it stays.
    pub(crate) fn set_endpoints(&mut self, cluster: &str, addresses: &[SocketAddr]) {
        let endpoints = &mut self.cluster(cluster)["load_assignment"]["endpoints"][0]["lb_endpoints"];
        let template = endpoints[0].clone();
        let endpoint = |address: &SocketAddr| {
            let mut endpoint = template.clone();
            endpoint["endpoint"]["address"] = socket(*address);
            endpoint
        };
        *endpoints = addresses.iter().map(endpoint).collect();
    }

    /// Gives a busy machine more time than a second.
    pub(crate) fn patient(mut self) -> Self {
        let timeout = &mut self.filter()["message_timeout"];
        if *timeout == json!("1s") {
            *timeout = json!("30s");
        }
        self
    }
}

impl Gateway {
    pub(crate) fn generated(self) -> EnvoyConfig {
        let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/gateways").join(self.file);
        EnvoyConfig(serde_saphyr::from_str(&fs::read_to_string(file.with_extension("yaml")).unwrap()).unwrap())
    }

    /// warmroute's configuration, with answers that tell every decision.
    pub(crate) fn warmroute(self, port: u16) -> Value {
        telling(json!({
            "listen": {"tcp": local(port), "tls": {"self_signed": true}},
            "gateway": {"assume": self.assume},
            "failure": {"mode": self.failure},
            // A dead worker loses its prefixes with its event stream; here requests still choose it.
            "index_trust": {"stale_credit": 1.0},
        }))
    }

    /// The configuration with the addresses of the deployment, of warmroute and of the workers.
    pub(crate) fn placed(self, mut config: EnvoyConfig, at: &Place<'_>) -> EnvoyConfig {
        config.0["admin"]["address"] = socket(local(at.deployment.standalone().admin_port));
        config.0["static_resources"]["listeners"][0]["address"] = socket(local(at.deployment.standalone().port));
        config.set_endpoints(self.picker, at.pickers);
        // An ORIGINAL_DST cluster has no endpoints.
        if config.cluster(self.workers)["type"] == "STATIC" {
            config.set_endpoints(self.workers, at.workers);
        }
        config
    }
}

/// Where a deployment runs.
pub(crate) struct Place<'a> {
    pub(crate) deployment: &'a Deployment,
    pub(crate) pickers: &'a [SocketAddr],
    pub(crate) workers: &'a [SocketAddr],
}

/// Starts warmroute and Envoy in front of the engines of the deployment.
pub(crate) async fn serve(deployment: &mut Deployment, gateway: Gateway, config: EnvoyConfig) {
    let port = FreePort::find().unwrap().release();
    deployment.write_workers().unwrap();
    let workers: Vec<_> = deployment.engines.iter().map(|engine| engine.address).collect();
    let place = Place { deployment, pickers: &[local(port)], workers: &workers };
    let config = gateway.placed(config, &place).0.to_string();
    deployment.start_router(&gateway.warmroute(port)).await.unwrap();
    deployment.start_envoy(&config).await.unwrap();
}
