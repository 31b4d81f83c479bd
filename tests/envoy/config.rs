//! The shipped Envoy configurations in a real Envoy: accepted requests, rejected requests, and the
//! behaviour without warmroute. warmroute itself does not run. Tests that need its replies start a
//! minimal ext_proc server.

mod disaggregated;
mod exchanges;

use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::Path;
use std::sync::Arc;

use axum::Router;
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use envoy_types::pb::google::protobuf::value::Kind;
use envoy_types::pb::google::protobuf::{Struct, Value};
use exchanges::OneEndpoint;
use parking_lot::Mutex;
use proto::external_processor_server::{ExternalProcessor, ExternalProcessorServer};
use proto::processing_request::Request as Message;
use proto::processing_response::Response as Reply;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_stream::{Stream, StreamExt as _};
use warmroute_server::ext_proc::headers::{ResponseHead, ResponseSource};
use warmroute_server::ext_proc::routing_headers::RoutingHeaders;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::envoy::{self, EnvoySetup};
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::modes::worker::{RecordingWorker, received};
use crate::routing::bed::patient;

const MB: usize = 1_000_000;

/// An Envoy with the shipped standalone configuration in its own directory.
struct EnvoyGateway {
    // Fields are dropped in order: Envoy must exit before its directory is removed.
    _envoy: ChildProcess,
    dir: tempfile::TempDir,
    port: u16,
    admin_port: u16,
}

impl EnvoyGateway {
    async fn start(endpoints: &[SocketAddr]) -> Self {
        Self::start_with(endpoints, |config| config).await
    }

    async fn start_with(endpoints: &[SocketAddr], change: impl FnOnce(String) -> String) -> Self {
        let list = |file: &Path| envoy::write_endpoints(file, endpoints).unwrap();
        Self::start_file("standalone", list, change).await
    }

    /// Starts a disaggregated configuration with decode workers and one prefill worker.
    async fn start_disaggregated(file: &str, decode: &[SocketAddr], prefill: SocketAddr) -> Self {
        let endpoint = |(at, role): (&SocketAddr, &str)| {
            let address = json!({"socket_address": {"address": at.ip(), "port_value": at.port()}});
            let labels = json!({"filter_metadata": {"envoy.lb": {"role": role, "worker_id": at.port().to_string()}}});
            json!({"endpoint": {"address": address}, "metadata": labels})
        };
        let all = decode
            .iter()
            .map(|at| (at, "decode"))
            .chain([(&prefill, "prefill")]);
        let resources = json!({"resources": [{
            "@type": "type.googleapis.com/envoy.config.endpoint.v3.ClusterLoadAssignment",
            "cluster_name": "workers",
            "endpoints": [{"lb_endpoints": all.map(endpoint).collect::<Vec<_>>()}],
        }]});
        let list = |file: &Path| fs::write(file, resources.to_string()).unwrap();
        Self::start_file(file, list, |config| config).await
    }

    /// Starts Envoy with longer timeouts than the shipped ones.
    async fn start_file(
        file: &str,
        list: impl FnOnce(&Path),
        change: impl FnOnce(String) -> String,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = FreePort::find().unwrap();
        let admin_port = FreePort::find().unwrap();
        let port = port.release();
        let admin_port = admin_port.release();
        let setup = EnvoySetup {
            run_dir: dir.path(),
            port,
            admin_port,
        };
        list(&setup.endpoint_file());
        let config = change(patient(&setup.shipped_config(file, &[]).unwrap()));
        let envoy = envoy::start(&config, dir.path(), 1).await.unwrap();
        Self {
            _envoy: envoy,
            dir,
            port,
            admin_port,
        }
    }

    fn setup(&self) -> EnvoySetup<'_> {
        EnvoySetup {
            run_dir: self.dir.path(),
            port: self.port,
            admin_port: self.admin_port,
        }
    }

    fn post(&self, path: &str, bytes: usize) -> reqwest::RequestBuilder {
        client()
            .post(self.setup().url(path))
            .body(vec![b'a'; bytes])
    }
}

fn client() -> reqwest::Client {
    warmroute_runtime::tls::http_client_builder()
        .timeout(PATIENCE)
        .build()
        .unwrap()
}

async fn echo(request: reqwest::RequestBuilder) -> serde_json::Value {
    let answer = request.send().await.unwrap();
    assert_eq!(answer.status(), 200);
    answer.json().await.unwrap()
}

#[test]
fn envoy_accepts_every_shipped_configuration() {
    let _endpoints = ShippedEndpointFile::ensure();
    let files = envoy::shipped_configs().unwrap();
    assert!(!files.is_empty());
    for file in files {
        envoy::validate(&file).unwrap();
    }
}

/// Envoy runs the filters in reverse order on responses. With a probe after the main filter, whole
/// response bodies get lost.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn first_token_probe_is_first_http_filter() {
    let mut probes = 0;
    for file in envoy::shipped_configs().unwrap() {
        let config: serde_json::Value =
            serde_saphyr::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
        let filters =
            "/static_resources/listeners/0/filter_chains/0/filters/0/typed_config/http_filters";
        let filters = config.pointer(filters).unwrap().as_array().unwrap().iter();
        let metadata = |filter: &serde_json::Value| {
            filter["typed_config"]["grpc_service"]["initial_metadata"].clone()
        };
        let filter_name = |filter| metadata(filter)[0]["value"].as_str().map(str::to_owned);
        let names: Vec<_> = filters.map(filter_name).collect();
        let probe = Some("probe".to_owned());
        match names
            .iter()
            .position(|filter| *filter == Some("probed".to_owned()))
        {
            None => assert!(!names.contains(&probe), "{}", file.display()),
            Some(probed) => {
                assert_eq!(
                    (names.iter().position(|filter| *filter == probe), probed),
                    (Some(0), 1),
                    "{}",
                    file.display()
                );
                probes += 1;
            }
        }
    }
    assert!(probes >= 3);
}

/// Endpoint file that the shipped configurations name. It is created if it is missing, and removed
/// afterwards.
struct ShippedEndpointFile {
    made: bool,
    // All processes share the path. The lock prevents one of them from removing the file of
    // another.
    _lock: fs::File,
}

impl ShippedEndpointFile {
    const PATH: &'static str = "/tmp/warmroute/eds_workers.yaml";

    fn ensure() -> Self {
        let lock = fs::File::create("/tmp/warmroute-shipped-endpoint-file.lock").unwrap();
        lock.lock().unwrap();
        let path = Path::new(Self::PATH);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        Self {
            made: fs::File::create_new(path).is_ok(),
            _lock: lock,
        }
    }
}

impl Drop for ShippedEndpointFile {
    fn drop(&mut self) {
        if self.made {
            _ = fs::remove_file(Self::PATH);
            _ = fs::remove_dir(Path::new(Self::PATH).parent().unwrap());
        }
    }
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn envoy_rejects_unknown_configuration_field() {
    let dir = tempfile::tempdir().unwrap();
    let setup = EnvoySetup {
        run_dir: dir.path(),
        port: 10_000,
        admin_port: 9_900,
    };
    envoy::write_endpoints(&setup.endpoint_file(), &[]).unwrap();
    let config = setup.standalone_config().unwrap();
    let file = dir.path().join("envoy.yaml");
    fs::write(&file, &config).unwrap();
    envoy::validate(&file).unwrap();

    fs::write(
        &file,
        config.replace("failure_mode_allow", "failure_mode_permit"),
    )
    .unwrap();
    let refusal = envoy::validate(&file).unwrap_err().to_string();
    assert!(refusal.contains("failure_mode_permit"), "{refusal}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_succeed_without_warmroute() {
    let worker = RecordingWorker::start().await;
    let gateway = EnvoyGateway::start(&[worker.address]).await;
    for (path, bytes) in [
        ("/v1/chat/completions", 1_000),
        ("/v1/completions", 10 * MB),
        ("/health", 0),
    ] {
        let seen = echo(gateway.post(path, bytes)).await;
        assert_eq!(seen["bytes"], bytes, "{path}");
    }
    let stats = client()
        .get(
            gateway
                .setup()
                .admin_url("/stats?filter=failure_mode_allowed"),
        )
        .send()
        .await
        .unwrap();
    let stats = stats.text().await.unwrap();
    assert!(
        stats.contains("http.ingress.ext_proc.failure_mode_allowed: 2"),
        "{stats}"
    );
}

/// Returns an address without a listener.
async fn unused_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0))
        .await
        .unwrap()
        .local_addr()
        .unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn client_routing_headers_never_reach_a_worker() {
    let worker = RecordingWorker::start().await;
    let gateway = EnvoyGateway::start(&[worker.address]).await;
    for path in ["/v1/completions", "/health"] {
        let mut request = gateway
            .post(path, 10)
            .header("x-tenant-id", "kept")
            .header("x-dynamo-session-id", "kept");
        for name in RoutingHeaders::default().reserved_names() {
            request = request.header(name, "1");
        }
        let seen = echo(request).await;
        for name in RoutingHeaders::default().reserved_names() {
            assert_eq!(received(&seen, name), [""; 0], "{path} {name}");
        }
        assert_eq!(received(&seen, "x-tenant-id"), ["kept"]);
        assert_eq!(received(&seen, "x-dynamo-session-id"), ["kept"]);
        assert_eq!(received(&seen, "x-envoy-attempt-count"), ["1"]);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renamed_endpoint_file_is_reloaded() {
    let first = RecordingWorker::start().await;
    let second = RecordingWorker::start().await;
    let gateway = EnvoyGateway::start(&[]).await;
    let file = gateway.setup().endpoint_file();
    // Connections are not reused, so Envoy selects a worker for each request.
    let served_by = async || {
        let answer = gateway.post("/v1/completions", 100).send().await.unwrap();
        let status = answer.status().as_u16();
        let body: Option<serde_json::Value> = answer.json().await.ok();
        (
            status,
            body.map(|body| body["worker"].as_str().unwrap().to_owned()),
        )
    };
    assert_eq!(served_by().await, (503, None));
    for worker in [&first, &second, &first] {
        envoy::write_endpoints(&file, &[worker.address]).unwrap();
        let expected = (200, Some(worker.address.to_string()));
        assert!(
            until(PATIENCE, async || served_by().await == expected).await,
            "{expected:?}"
        );
    }
    envoy::write_endpoints(&file, &[]).unwrap();
    assert!(until(PATIENCE, async || served_by().await.0 == 503).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn bodies_larger_than_32_mib_are_rejected() {
    let worker = RecordingWorker::start().await;
    let gateway = EnvoyGateway::start(&[worker.address]).await;
    let server = OneEndpoint::start(worker.address, &gateway.setup().ext_proc_socket());
    for bytes in [10 * MB, 32 * MB] {
        assert_eq!(
            echo(gateway.post("/v1/completions", bytes)).await["bytes"],
            bytes
        );
    }
    let refused = gateway
        .post("/v1/completions", 40 * MB)
        .send()
        .await
        .unwrap();
    assert_eq!(refused.status(), 413);
    assert_eq!(*server.bodies.lock(), 2);
}
