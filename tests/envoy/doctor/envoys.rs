//! Findings for a real Envoy with each shipped configuration, unmodified and with one fault each.

mod clusters;
mod filters;
mod prefills;
mod routes;

use std::net::SocketAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures_util::{StreamExt as _, stream};
use serde_json::{Value, json};
use tokio::net::UnixListener;
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::{CancellationToken, DropGuard};
use tonic::service::Routes;
use tonic::transport::Server;
use warmroute::cmd::doctor::expected_envoy;
use warmroute_core::worker::Worker;
use warmroute_doctor::envoy::check_envoy;
use warmroute_doctor::envoy::dump::ConfigDump;
use warmroute_doctor::finding::{Finding, FindingLevel};
use warmroute_metrics::Metrics;
use warmroute_server::config::{Config, WorkerSource};
use warmroute_server::fleet::xds::config::EnvoyConfig;
use warmroute_server::fleet::xds::{XdsClients, XdsService};
use warmroute_testbed::envoy::{self, EnvoySetup};
use warmroute_testbed::ports::{FreePort, until};

/// Addresses of workers that do not run, because the checks do not need them.
fn workers() -> [SocketAddr; 3] {
    [18_001, 18_002, 18_003].map(|port| SocketAddr::from(([127, 0, 0, 1], port)))
}

/// Starts warmroute's xDS server. Dropping the guard stops it.
fn serve_xds(
    envoy: &EnvoyConfig,
    workers: &[Worker],
    config: &Config,
) -> (Arc<XdsClients>, DropGuard) {
    let envoys = XdsClients::new(envoy.clusters(), Arc::new(Metrics::new()));
    envoys.publish(workers);
    let closing = CancellationToken::new();
    let routes = XdsService::new(envoys.clone(), closing.clone()).add_to(Routes::default());
    let socket =
        UnixListener::bind(config.listeners.ext_proc.unix_socket.as_ref().unwrap()).unwrap();
    let closed = closing.clone().cancelled_owned();
    let served = Server::builder()
        .add_routes(routes)
        .serve_with_incoming_shutdown(UnixListenerStream::new(socket), closed);
    tokio::spawn(served);
    (envoys, closing.drop_guard())
}

/// Configurations of Envoy and warmroute before Envoy starts.
struct ConfigPair {
    envoy: Value,
    warmroute: Value,
}

impl ConfigPair {
    /// Returns a shipped Envoy file and the warmroute configuration that its header comment
    /// describes.
    fn shipped(name: &str, dir: &Path) -> Self {
        let port = FreePort::find().unwrap();
        let admin_port = FreePort::find().unwrap();
        let port = port.release();
        let admin_port = admin_port.release();
        let setup = EnvoySetup {
            run_dir: dir,
            port,
            admin_port,
        };
        let static_workers = if name == "route-per-header" {
            &workers()[..]
        } else {
            &[]
        };
        let text = setup.shipped_config(name, static_workers).unwrap();
        let listed: Vec<Value> = workers()
            .iter()
            .zip(1..)
            .map(|(at, id)| json!({"id": id, "endpoint": at.to_string()}))
            .collect();
        let mut warmroute = json!({
            "listeners": {"ext_proc": {"unix_socket": setup.ext_proc_socket()}},
            "models": [{"name": "m"}],
            "workers": {"list": listed},
        });
        if text.contains("eds_workers.yaml") {
            warmroute["envoy"] = json!({"endpoints_file": setup.endpoint_file()});
        }
        if name == "xds" {
            warmroute["envoy"] = json!({"xds": {}});
        }
        if let Some(by) = name.strip_prefix("disaggregated-") {
            warmroute["models"][0]["prefill"] = json!({"mode": by});
            for (worker, role) in warmroute["workers"]["list"]
                .as_array_mut()
                .unwrap()
                .iter_mut()
                .zip(["prefill", "decode", "decode"])
            {
                worker["role"] = json!(role);
            }
        }
        if matches!(name, "subset" | "gateway-api" | "original-dst") {
            warmroute["gateway"]["failure"] = json!({"mode": "fail_closed"});
        }
        envoy::write_endpoints(&setup.endpoint_file(), &workers()).unwrap();
        Self {
            envoy: serde_saphyr::from_str(&text).unwrap(),
            warmroute,
        }
    }

    /// Starts Envoy and checks its configuration dump.
    async fn examine(&self, dir: &Path) -> Vec<Finding> {
        let config = Config::parse(
            &dir.join("warmroute.yaml"),
            self.warmroute.to_string().as_bytes(),
        )
        .unwrap();
        let WorkerSource::Fixed(workers) = config.worker_source() else {
            panic!("another source")
        };
        let xds_server = config
            .envoy
            .as_ref()
            .filter(|envoy| envoy.xds.is_some())
            .map(|envoy| serve_xds(envoy, &workers, &config));
        let envoy = envoy::start(&self.envoy.to_string(), dir, 1).await.unwrap();
        let address = std::fs::read_to_string(dir.join("envoy-admin")).unwrap();
        let page = format!("http://{address}/config_dump?include_eds");
        if let Some((envoys, _)) = &xds_server
            && self.envoy.to_string().contains("DELTA_GRPC")
        {
            let has = async || {
                envoys
                    .statuses()
                    .iter()
                    .any(|listener| listener.generation.is_some())
            };
            assert!(
                until(Duration::from_secs(60), has).await,
                "{:?}",
                envoys.statuses()
            );
        }
        let page = reqwest::get(page).await.unwrap().text().await.unwrap();
        drop((envoy, xds_server));
        check_envoy(
            &ConfigDump::parse(&page).unwrap(),
            &expected_envoy(&config, &workers),
        )
    }

    fn listener(&mut self) -> &mut Value {
        &mut self.envoy["static_resources"]["listeners"][0]
    }

    fn manager(&mut self) -> &mut Value {
        &mut self.listener()["filter_chains"][0]["filters"][0]["typed_config"]
    }

    fn filters(&mut self) -> &mut Vec<Value> {
        self.manager()["http_filters"].as_array_mut().unwrap()
    }

    fn filter(&mut self, name: &str) -> &mut Value {
        let found = self
            .filters()
            .iter_mut()
            .find(|filter| filter["name"] == name);
        &mut found.unwrap()["typed_config"]
    }

    fn main(&mut self) -> &mut Value {
        self.filter("envoy.filters.http.ext_proc")
    }

    fn modes(&mut self) -> &mut Value {
        &mut self.main()["processing_mode"]
    }

    fn probe(&mut self) -> &mut Value {
        self.filter("first_token_probe")
    }

    fn host(&mut self) -> &mut Value {
        &mut self.manager()["route_config"]["virtual_hosts"][0]
    }

    fn action(&mut self) -> &mut Value {
        &mut self.host()["routes"][0]["route"]
    }

    fn cluster(&mut self, name: &str) -> &mut Value {
        let clusters = self.envoy["static_resources"]["clusters"]
            .as_array_mut()
            .unwrap();
        clusters
            .iter_mut()
            .find(|cluster| cluster["name"] == name)
            .unwrap()
    }

    fn upstream(&mut self) -> &mut Value {
        let options = &mut self.cluster("workers")["typed_extension_protocol_options"];
        &mut options["envoy.extensions.upstreams.http.v3.HttpProtocolOptions"]
    }

    /// Returns the upstream filter for retries.
    fn retry_filter(&mut self) -> &mut Value {
        &mut self.upstream()["http_filters"][0]["typed_config"]["extension_config"]["typed_config"]
    }

    fn policy(&mut self) -> &mut Value {
        &mut self.cluster("workers")["load_balancing_policy"]["policies"][0]["typed_extension_config"]
            ["typed_config"]
    }

    fn without(object: &mut Value, key: &str) {
        object
            .as_object_mut()
            .unwrap()
            .remove(key)
            .expect("the key exists");
    }
}

/// A fault in one of the configurations, with the expected findings and a part of a fix.
#[derive(Clone, Copy)]
struct EnvoyFault {
    name: &'static str,
    file: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
}

use FindingLevel::{Error, Warning};

const fn standalone(
    name: &'static str,
    plant: fn(&mut ConfigPair),
    expected: &'static [(FindingLevel, &'static str)],
    words: &'static str,
) -> EnvoyFault {
    EnvoyFault {
        name,
        file: "standalone",
        plant,
        expected,
        words,
    }
}

const fn in_file(file: &'static str, fault: EnvoyFault) -> EnvoyFault {
    EnvoyFault { file, ..fault }
}

fn wrong(findings: &[Finding]) -> Vec<(FindingLevel, &str)> {
    let bad = findings
        .iter()
        .filter(|one| matches!(one.level, FindingLevel::Error | FindingLevel::Warning));
    let mut wrong: Vec<_> = bad.map(|one| (one.level, one.check)).collect();
    wrong.sort_unstable();
    wrong
}

async fn assert_faults_found(faults: &[EnvoyFault]) {
    let count = faults.len();
    let examined = stream::iter(faults).map(async |fault| {
        let dir = tempfile::Builder::new()
            .prefix("doctor-")
            .tempdir()
            .unwrap();
        let mut configs = ConfigPair::shipped(fault.file, dir.path());
        (fault.plant)(&mut configs);
        let found = configs.examine(dir.path()).await;
        let mut expected = fault.expected.to_vec();
        expected.sort_unstable();
        assert_eq!(wrong(&found), expected, "{}: {found:#?}", fault.name);
        let fixes: Vec<_> = found.iter().filter_map(|one| one.fix.as_deref()).collect();
        assert!(
            fixes.iter().any(|fix| fix.contains(fault.words)),
            "{}: {fixes:#?}",
            fault.name
        );
    });
    assert_eq!(examined.buffer_unordered(2).count().await, count);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shipped_configurations_have_no_findings() {
    for file in envoy::shipped_configs().unwrap() {
        let name = file.file_stem().unwrap().to_str().unwrap().to_owned();
        let dir = tempfile::Builder::new()
            .prefix("doctor-")
            .tempdir()
            .unwrap();
        let found = ConfigPair::shipped(&name, dir.path())
            .examine(dir.path())
            .await;
        assert!(
            found.iter().all(|one| one.level == FindingLevel::Ok),
            "{name}: {found:#?}"
        );
        assert!(found.len() > 15, "{name}: {found:#?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn filter_faults_are_found_with_fixes() {
    assert_faults_found(filters::FILTER_FAULTS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probe_faults_are_found_with_fixes() {
    assert_faults_found(filters::PROBE_FAULTS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cluster_faults_are_found_with_fixes() {
    assert_faults_found(clusters::CLUSTER_FAULTS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn route_faults_are_found_with_fixes() {
    assert_faults_found(routes::ROUTE_FAULTS).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefill_faults_are_found_with_fixes() {
    assert_faults_found(prefills::PREFILL_FAULTS).await;
}
