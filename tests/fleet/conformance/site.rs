//! Parts of the conformance fixture: the endpoint picker, the echoing backends, and the gateway.

use std::net::{Ipv4Addr, SocketAddr};
use std::process::Command;

use axum::Router;
use axum::http::{HeaderMap, HeaderName, HeaderValue};
use axum::response::IntoResponse;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tonic::transport::Endpoint;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::envoy::{self, EnvoySetup};
use warmroute_testbed::ports::{FreePort, PATIENCE};

use crate::support::api_server::{ApiServer, TOKEN};
use crate::support::clients;
use crate::support::local_server::LocalServer;

/// Service name that the probes of the fixture query.
pub(crate) const PROBED: &str = "inference-extension";
pub(crate) const POOL: &str = "primary-inference-pool";
const NAMESPACE: &str = "inference";

pub(crate) fn pool(ports: &[u16]) -> Value {
    let ports: Vec<Value> = ports.iter().map(|port| json!({"number": port})).collect();
    json!({
        "apiVersion": "inference.networking.k8s.io/v1", "kind": "InferencePool",
        "metadata": {"name": POOL, "namespace": NAMESPACE, "uid": "uid-of-the-pool"},
        "spec": {
            "selector": {"matchLabels": {"app": "primary"}}, "targetPorts": ports,
            "endpointPickerRef": {"name": "primary-endpoint-picker-svc", "port": {"number": 9002}},
        },
    })
}

pub(crate) fn pod(name: &str, address: Ipv4Addr, app: &str, ready: bool) -> Value {
    let ready = if ready { "True" } else { "False" };
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "uid": format!("uid-of-{name}"), "labels": {"app": app}},
        "spec": {"nodeName": "node-1", "containers": [{"name": "echoserver"}]},
        "status": {
            "phase": "Running", "podIP": address, "podIPs": [{"ip": address}],
            "conditions": [{"type": "Ready", "status": ready}],
        },
    })
}

/// warmroute, started as the fixture starts its endpoint picker.
pub(crate) struct EndpointPicker {
    pub(crate) child: ChildProcess,
    pub(crate) grpc: u16,
    health: u16,
    _dir: TempDir,
}

impl EndpointPicker {
    /// Starts warmroute with the fixture's flags, other ports, and the additional flags. A pod
    /// finds its token and the API server by itself. Here a kubeconfig contains both, with another
    /// namespace than the flags.
    pub(crate) fn start(server: &ApiServer, extra_flags: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut kubeconfig = server.kubeconfig(TOKEN);
        kubeconfig["contexts"][0]["context"]["namespace"] = json!("another");
        let file = dir.path().join("kubeconfig");
        std::fs::write(&file, kubeconfig.to_string()).unwrap();
        let ports = [
            FreePort::find().unwrap(),
            FreePort::find().unwrap(),
            FreePort::find().unwrap(),
        ];
        let [grpc, health, metrics] = ports.map(FreePort::release);
        let mut command = Command::new(env!("CARGO_BIN_EXE_warmroute"));
        command.args([
            "--pool-name",
            POOL,
            "--pool-namespace",
            NAMESPACE,
            "--v",
            "4",
            "--zap-encoder",
            "json",
        ]);
        command.args([
            "--grpc-port",
            &grpc.to_string(),
            "--grpc-health-port",
            &health.to_string(),
        ]);
        // The default port would allow only one process per machine.
        command
            .args(["--metrics-port", &metrics.to_string()])
            .args(extra_flags);
        command
            .current_dir(dir.path())
            .env("KUBECONFIG", file)
            .env_remove("RUST_LOG");
        let child = ChildProcess::spawn("warmroute", &command, dir.path()).unwrap();
        Self {
            child,
            grpc,
            health,
            _dir: dir,
        }
    }

    pub(crate) fn log(&self) -> String {
        std::fs::read_to_string(self.child.log()).unwrap()
    }

    /// Queries the health of a service on the plaintext health port, as kubelets do. Returns `None`
    /// if there is no response.
    pub(crate) async fn health(&self, name: &str) -> Option<ServingStatus> {
        let channel = Endpoint::from_shared(format!("http://127.0.0.1:{}", self.health))
            .unwrap()
            .connect()
            .await
            .ok()?;
        let requested = HealthCheckRequest {
            service: name.to_owned(),
        };
        Some(
            HealthClient::new(channel)
                .check(requested)
                .await
                .ok()?
                .into_inner()
                .status(),
        )
    }

    /// Performs a TLS handshake on the ext_proc port. Returns the ALPN protocol and the number of
    /// certificates.
    pub(crate) async fn handshake(
        &self,
        protocol: &str,
    ) -> std::io::Result<(Option<Vec<u8>>, usize)> {
        let socket = TcpStream::connect((Ipv4Addr::LOCALHOST, self.grpc)).await?;
        let connector = TlsConnector::from(clients::client(None, None, protocol));
        let socket = connector
            .connect(ServerName::try_from("warmroute").unwrap(), socket)
            .await?;
        let (_, session) = socket.get_ref();
        let certificates = session.peer_certificates().map_or(0, <[_]>::len);
        Ok((session.alpn_protocol().map(<[u8]>::to_vec), certificates))
    }
}

/// One port of a backend pod. Responds with its own address and the response header that the
/// request asks for. Stops on drop.
pub(crate) struct ConformanceBackend {
    address: SocketAddr,
    _server: LocalServer,
}

impl ConformanceBackend {
    pub(crate) async fn start(address: SocketAddr) -> Self {
        let routes = |_| Router::new().fallback(move |headers| echo(address, headers));
        Self {
            address,
            _server: LocalServer::start_at(address, routes).await,
        }
    }
}

async fn echo(address: SocketAddr, headers: HeaderMap) -> impl IntoResponse {
    let mut answer = HeaderMap::new();
    // The format is `name:value`, and the value contains colons.
    let requested = headers
        .get("x-echo-set-header")
        .and_then(|requested| requested.to_str().unwrap().split_once(':'));
    if let Some((name, value)) = requested {
        answer.insert(
            HeaderName::try_from(name).unwrap(),
            HeaderValue::from_str(value).unwrap(),
        );
    }
    let destination = headers
        .get("x-gateway-destination-endpoint")
        .map(|value| value.to_str().unwrap().to_owned());
    let report = json!({"address": address, "destination": destination, "asked": requested.map(|(_, value)| value)});
    (answer, axum::Json(report))
}

/// Response that a client received.
#[derive(Debug)]
pub(crate) struct GatewayAnswer {
    pub(crate) status: u16,
    /// Value of `x-conformance-test-served-endpoint`.
    pub(crate) served: String,
    backend: Value,
}

/// Envoy with the shipped configuration for such gateways: TLS without certificate verification.
pub(crate) struct ConformanceGateway {
    _envoy: ChildProcess,
    url: String,
    http: reqwest::Client,
    _dir: TempDir,
}

impl ConformanceGateway {
    pub(crate) async fn start(grpc: u16, backends: &[ConformanceBackend]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let [port, admin_port] =
            [FreePort::find().unwrap(), FreePort::find().unwrap()].map(FreePort::release);
        let standalone = EnvoySetup {
            run_dir: dir.path(),
            port,
            admin_port,
        };
        let shipped = standalone.shipped_config("gateway-api", &[]).unwrap();
        let shipped = shipped.replace(" message_timeout: 1s", " message_timeout: 30s");
        let mut config: Value = serde_saphyr::from_str(&shipped).unwrap();
        let clusters = config["static_resources"]["clusters"]
            .as_array_mut()
            .unwrap();
        let ext_proc = clusters
            .iter_mut()
            .find(|cluster| cluster["name"] == "ext_proc")
            .unwrap();
        ext_proc["connect_timeout"] = json!("10s");
        ext_proc["load_assignment"]["endpoints"][0]["lb_endpoints"][0]["endpoint"]["address"] =
            json!({"socket_address": {"address": "127.0.0.1", "port_value": grpc}});
        ext_proc["transport_socket"] = json!({
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "common_tls_context": {"alpn_protocols": ["h2"]},
            },
        });
        let all: Vec<SocketAddr> = backends.iter().map(|backend| backend.address).collect();
        envoy::write_endpoints(&standalone.endpoint_file(), &all).unwrap();
        let child = envoy::start(&config.to_string(), dir.path(), 1)
            .await
            .unwrap();
        let http = warmroute_runtime::tls::http_client_builder()
            .timeout(PATIENCE)
            .build()
            .unwrap();
        Self {
            _envoy: child,
            url: standalone.url("/v1/completions"),
            http,
            _dir: dir,
        }
    }

    /// Sends a request as the conformance tests do, optionally with their header that names
    /// endpoints.
    pub(crate) async fn query(&self, selection: Option<&str>) -> GatewayAnswer {
        let body = json!({"model": "conformance-fake-model", "prompt": "Write as if you were a critic: San Francisco"});
        self.answer(self.http.post(&self.url).json(&body), selection)
            .await
    }

    async fn answer(
        &self,
        request: reqwest::RequestBuilder,
        selection: Option<&str>,
    ) -> GatewayAnswer {
        let request = selection.into_iter().fold(request, |request, to| {
            request.header("test-epp-endpoint-selection", to)
        });
        let answer = request.send().await.unwrap();
        let served = answer.headers().get("x-conformance-test-served-endpoint");
        let served = served
            .map(|served| served.to_str().unwrap().to_owned())
            .unwrap_or_default();
        let status = answer.status().as_u16();
        GatewayAnswer {
            status,
            served,
            backend: answer.json().await.unwrap_or_default(),
        }
    }

    /// Asserts that requests with and without a body go only to endpoints in `allowed`, that all
    /// reports of the endpoint agree, and that each endpoint is used.
    pub(crate) async fn probe(&self, selection: Option<&str>, allowed: &[&str]) {
        let mut seen = std::collections::BTreeSet::new();
        for turn in 0..40 {
            let answer = match turn % 4 {
                0 => {
                    self.answer(
                        self.http.get(self.url.replace("completions", "models")),
                        selection,
                    )
                    .await
                }
                _ => self.query(selection).await,
            };
            assert_eq!(answer.status, 200, "{selection:?}: {answer:?}");
            assert!(
                allowed.contains(&&*answer.served),
                "{selection:?}: {answer:?}"
            );
            for report in ["address", "destination", "asked"] {
                assert_eq!(
                    answer.backend[report], answer.served,
                    "{report}, {selection:?}: {answer:?}"
                );
            }
            seen.insert(answer.served);
        }
        assert_eq!(seen.len(), allowed.len(), "{selection:?}: only {seen:?}");
    }
}
