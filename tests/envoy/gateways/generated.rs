//! Generated configurations with the addresses and ports of a test.

use std::fs;
use std::net::SocketAddr;
use std::path::Path;

use serde_json::{Value, json};

use crate::support::manifest_set::ManifestSet;

/// The generated configuration of a control plane, and the overlay that belongs to it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct GatewayFixture {
    /// File `tests/data/gateways/<file>.yaml`.
    pub(crate) file: &'static str,
    /// Name of the cluster of warmroute.
    pub(crate) picker: &'static str,
    /// Name of the cluster of the workers.
    pub(crate) workers: &'static str,
    /// Directory in `deploy/overlays`.
    pub(crate) overlay: &'static str,
}

const ROUTE: &str = "httproute/inference/qwen/rule/0";

/// Istio without an EnvoyFilter and without `sni` in the DestinationRule.
pub(crate) const ISTIO_AS_GENERATED: GatewayFixture = GatewayFixture {
    file: "istio-as-generated",
    picker: "outbound|9002||warmroute.inference.svc.cluster.local",
    workers: "outbound|54321||vllm-qwen-ip-b7595ee7.inference.svc.cluster.local",
    overlay: "istio",
};
/// Istio with an EnvoyFilter that sets the authority.
pub(crate) const ISTIO: GatewayFixture = GatewayFixture {
    file: "istio",
    ..ISTIO_AS_GENERATED
};
/// Istio with an EnvoyFilter that buffers request bodies.
pub(crate) const ISTIO_BUFFERED: GatewayFixture = GatewayFixture {
    file: "istio-buffered",
    overlay: "istio-buffered",
    ..ISTIO_AS_GENERATED
};
pub(crate) const ENVOY_AI_GATEWAY: GatewayFixture = GatewayFixture {
    file: "envoy-ai-gateway",
    picker: "envoy.clusters.endpointpicker_vllm-qwen_inference_ext_proc",
    workers: ROUTE,
    overlay: "envoy-ai-gateway",
};
pub(crate) const ENVOY_GATEWAY: GatewayFixture = GatewayFixture {
    file: "envoy-gateway",
    picker: "envoyextensionpolicy/inference/warmroute/extproc/0",
    workers: ROUTE,
    overlay: "envoy-gateway",
};

impl GatewayFixture {
    pub(crate) fn generated(self) -> GeneratedConfig {
        let file = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("tests/data/gateways")
            .join(self.file);
        GeneratedConfig(
            serde_saphyr::from_str(&fs::read_to_string(file.with_extension("yaml")).unwrap())
                .unwrap(),
        )
    }

    pub(crate) fn set(self) -> ManifestSet {
        ManifestSet::of_overlay(self.overlay)
    }

    /// Returns the gateway settings of the ConfigMap.
    pub(crate) fn warmroute(self) -> Value {
        let set = self.set();
        let config: Value =
            serde_saphyr::from_str(set.text("warmroute", "warmroute.yaml")).unwrap();
        json!({
            "listeners": {"ext_proc": {"tls": config["listeners"]["ext_proc"]["tls"]}},
            "gateway": config["gateway"],
        })
    }
}

/// An Envoy configuration.
#[derive(Clone, Debug)]
pub(crate) struct GeneratedConfig(pub(crate) Value);

fn socket(address: SocketAddr) -> Value {
    json!({"socket_address": {"address": address.ip(), "port_value": address.port()}})
}

pub(crate) fn local(port: u16) -> SocketAddr {
    SocketAddr::from(([127, 0, 0, 1], port))
}

impl GeneratedConfig {
    pub(crate) fn clusters(&mut self) -> impl Iterator<Item = &mut Value> {
        self.0["static_resources"]["clusters"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
    }

    pub(crate) fn cluster(&mut self, name: &str) -> &mut Value {
        self.clusters()
            .find(|cluster| cluster["name"] == name)
            .unwrap_or_else(|| panic!("no cluster {name}"))
    }

    /// Returns the HTTP connection manager of the only listener.
    pub(crate) fn manager(&mut self) -> &mut Value {
        let listener = &mut self.0["static_resources"]["listeners"][0];
        let chain = if listener["default_filter_chain"].is_object() {
            &mut listener["default_filter_chain"]
        } else {
            &mut listener["filter_chains"][0]
        };
        &mut chain["filters"][0]["typed_config"]
    }

    /// Returns the HTTP filter whose name has this prefix.
    pub(crate) fn filter(&mut self, name: &str) -> &mut Value {
        let mut filters = self.manager()["http_filters"]
            .as_array_mut()
            .unwrap()
            .iter_mut();
        let found = filters.find(|filter| filter["name"].as_str().unwrap().starts_with(name));
        &mut found.unwrap_or_else(|| panic!("no filter {name}"))["typed_config"]
    }

    pub(crate) fn ext_proc(&mut self) -> &mut Value {
        self.filter("envoy.filters.http.ext_proc")
    }

    pub(crate) fn routes(&mut self) -> impl Iterator<Item = &mut Value> {
        self.manager()["route_config"]["virtual_hosts"][0]["routes"]
            .as_array_mut()
            .unwrap()
            .iter_mut()
    }

    /// Sets the ports of the listener and of Envoy's admin page.
    pub(crate) fn set_ports(&mut self, port: u16, admin_port: u16) {
        self.0["static_resources"]["listeners"][0]["address"] = socket(local(port));
        self.0["admin"]["address"] = socket(local(admin_port));
    }

    /// Replaces the addresses of a cluster. The other fields of the first generated endpoint stay.
    pub(crate) fn set_endpoints(&mut self, cluster: &str, addresses: &[SocketAddr]) {
        let endpoints =
            &mut self.cluster(cluster)["load_assignment"]["endpoints"][0]["lb_endpoints"];
        let template = endpoints[0].clone();
        let endpoint = |address: &SocketAddr| {
            let mut endpoint = template.clone();
            endpoint["endpoint"]["address"] = socket(*address);
            endpoint
        };
        *endpoints = addresses.iter().map(endpoint).collect();
    }

    /// Raises the message timeout of 1 s, which a busy machine may exceed.
    pub(crate) fn patient(mut self) -> Self {
        let timeout = &mut self.ext_proc()["message_timeout"];
        if *timeout == json!("1s") {
            *timeout = json!("30s");
        }
        self
    }
}
