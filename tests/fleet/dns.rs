//! Discovery by DNS against a real DNS server, whose records change and which is stopped and
//! restarted, and one end-to-end test with discovered engines.

use std::collections::BTreeSet;
use std::net::Ipv4Addr;
use std::process::Command;
use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;
use warmroute::dns::{self, worker_id};
use warmroute_core::worker::{BlockSize, Worker};
use warmroute_metrics::{Metrics, SourceLabel};
use warmroute_server::fleet::discovery::WorkerModel;
use warmroute_server::fleet::discovery::dns::DnsConfig;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::debian::DNSMASQ;
use warmroute_testbed::ports::{FreePort, PATIENCE, ReadyCheck, until, wait_ready};

use crate::support::deployment::{TestDeployment, essay, fast};

/// DNS server for names below `test.`.
struct DnsServer {
    server: Option<ChildProcess>,
    port: u16,
    dir: TempDir,
}

impl DnsServer {
    async fn start(records: &[&str]) -> Self {
        let mut names = Self {
            server: None,
            port: FreePort::find().unwrap().release(),
            dir: tempfile::tempdir().unwrap(),
        };
        names.set_records(records).await;
        names
    }

    /// Restarts the server with other records, each in dnsmasq syntax.
    ///
    /// A resolver sends each query from a random UDP port, which can be the port of the server. If
    /// the server cannot bind its port, it is started again.
    async fn set_records(&mut self, records: &[&str]) {
        self.server = None;
        let command = self.command(records);
        let address = ReadyCheck::Tcp((Ipv4Addr::LOCALHOST, self.port).into());
        let is_ready = until(PATIENCE, async || {
            let server = ChildProcess::spawn("dnsmasq", &command, self.dir.path()).unwrap();
            let server = self.server.insert(server);
            wait_ready(address, PATIENCE, server).await.is_ok()
        })
        .await;
        assert!(is_ready, "dnsmasq does not start, see its log");
    }

    fn command(&self, records: &[&str]) -> Command {
        let mut command = DNSMASQ.command().unwrap();
        command.args([
            "--keep-in-foreground",
            "--no-resolv",
            "--no-hosts",
            "--bind-interfaces",
            "--user=root",
        ]);
        command.args([
            "--conf-file=/dev/null",
            "--pid-file=",
            "--listen-address=127.0.0.1",
            "--local=/test/",
        ]);
        command
            .arg(format!("--port={}", self.port))
            .args(records.iter().map(|record| format!("--{record}")));
        command
    }

    fn resolver(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

/// Background task that discovers workers by DNS names.
struct DnsFollower {
    fleets: watch::Receiver<Option<Vec<Worker>>>,
    metrics: Arc<Metrics>,
    _task: AbortOnDropHandle<()>,
}

impl DnsFollower {
    fn start(names: Vec<DnsConfig>) -> Self {
        let (fleet_tx, fleets) = watch::channel(None);
        let metrics = Arc::new(Metrics::new());
        let block_size = BlockSize::new(16).unwrap();
        let models = vec![WorkerModel {
            name: "m".into(),
            block_size,
            uses_bootstrap: false,
        }];
        let task_metrics = metrics.clone();
        let task = tokio::spawn(async move {
            dns::watch(names, models, task_metrics, |fleet| {
                _ = fleet_tx.send_replace(Some(fleet))
            })
            .await
            .unwrap();
        });
        Self {
            fleets,
            metrics,
            _task: AbortOnDropHandle::new(task),
        }
    }

    fn endpoints(&self) -> Option<Vec<String>> {
        self.fleets.borrow().as_ref().map(|fleet| {
            fleet
                .iter()
                .map(|worker| worker.endpoint.to_string())
                .collect()
        })
    }

    async fn wait_endpoints(&self, endpoints: &[&str]) {
        let found = until(PATIENCE, async || {
            self.endpoints().is_some_and(|found| found == endpoints)
        })
        .await;
        assert!(found, "{:?}, not {endpoints:?}", self.endpoints());
    }

    /// Waits until the health metric of a source has a value.
    async fn up_is(&self, source: &str, up: i64) {
        let label = SourceLabel {
            source: source.into(),
        };
        let gauge = self.metrics.workers.discovery_up.get_or_create(&label);
        let is_up = async || gauge.get() == up;
        assert!(until(PATIENCE, is_up).await, "{source} is not {up}");
    }
}

fn named(text: &str, names: &DnsServer) -> DnsConfig {
    let text = format!(
        "{{{text}, refresh_interval: 50ms, resolver: '{}'}}",
        names.resolver()
    );
    serde_saphyr::from_str(&text).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dns_failure_keeps_last_addresses() {
    let mut names = DnsServer::start(&[
        "host-record=e.test,10.0.0.1",
        "host-record=e.test,10.0.0.2",
        "host-record=e.test,2001:db8::1",
    ])
    .await;
    let follows = DnsFollower::start(vec![named("name: e.test, port: 8000", &names)]);
    follows
        .wait_endpoints(&["10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::1]:8000"])
        .await;
    follows.up_is("dns e.test", 1).await;
    // The server is stopped, and later responds with an error.
    names.server = None;
    follows.up_is("dns e.test", 0).await;
    assert_eq!(follows.endpoints().unwrap().len(), 3);
    names.set_records(&["host-record=e.test,10.0.0.2"]).await;
    follows.wait_endpoints(&["10.0.0.2:8000"]).await;
    follows.up_is("dns e.test", 1).await;
    // An empty response removes the workers.
    names.set_records(&[]).await;
    follows.wait_endpoints(&[]).await;
    follows.up_is("dns e.test", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn failed_dns_name_does_not_affect_others() {
    let records = [
        "srv-host=_http._tcp.e.test,a.test,8001",
        "srv-host=_http._tcp.e.test,b.test,8002",
        "host-record=a.test,10.0.0.1",
        "host-record=b.test,10.0.0.2",
    ];
    let mut names = DnsServer::start(&records).await;
    let follows = DnsFollower::start(vec![
        named(
            "name: _http._tcp.e.test, record: srv, worker: {role: decode}",
            &names,
        ),
        // The server rejects names that are not below `test.`.
        named(
            "name: e.elsewhere, port: 9000, worker: {role: prefill}",
            &names,
        ),
    ]);
    follows
        .wait_endpoints(&["10.0.0.1:8001", "10.0.0.2:8002"])
        .await;
    follows.up_is("dns _http._tcp.e.test", 1).await;
    follows.up_is("dns e.elsewhere", 0).await;
    names
        .set_records(&[
            "srv-host=_http._tcp.e.test,b.test,8003",
            "host-record=b.test,10.0.0.2",
        ])
        .await;
    follows.wait_endpoints(&["10.0.0.2:8003"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dns_discovered_engines_receive_requests() {
    let mut deployment = TestDeployment::engines(&[fast(1), fast(2)]).await;
    let service = |at: usize| {
        format!(
            "srv-host=_http._tcp.e.test,e.test,{}",
            deployment.engines[at].address.port()
        )
    };
    let both = [
        service(0),
        service(1),
        "host-record=e.test,127.0.0.1".to_owned(),
    ];
    let addresses = deployment.addresses().into_iter();
    let ids: Vec<u64> = addresses.map(|address| worker_id(address).0).collect();
    let mut names = DnsServer::start(&[&both[0], &both[2]]).await;
    let source = json!([{
        "name": "_http._tcp.e.test", "record": "srv", "refresh_interval": "50ms", "resolver": names.resolver(),
        "worker": {"model": warmroute_testbed::deployment::MODEL},
    }]);
    // The event sources are discovered from the engines.
    let own = json!({"workers": {"file": null, "dns": source}});
    deployment.serve(own, str::to_owned).await;
    let mut number = 0;
    let mut served = async |wanted: usize| {
        let mut served = BTreeSet::new();
        let all = until(PATIENCE, async || {
            number += 1;
            let answered = deployment.complete(&essay(number)).await;
            assert_eq!(answered.status, 200, "{answered:?}");
            served.insert(answered.chosen());
            served.len() == wanted
        });
        assert!(all.await, "{served:?}");
        served
    };
    assert_eq!(served(1).await, BTreeSet::from([ids[0]]));
    names.set_records(&[&both[0], &both[1], &both[2]]).await;
    assert_eq!(served(2).await, BTreeSet::from([ids[0], ids[1]]));
    deployment.settle().await;
    let page = deployment.metrics().await;
    assert_eq!(
        page.sum("discovery_up", &[("source", "dns _http._tcp.e.test")]),
        1.0
    );
    assert_eq!(
        page.samples("worker_cached_blocks")
            .filter(|sample| sample.labels["tier"] == "device")
            .count(),
        2
    );
}
