//! Discovery by DNS against a real server of names, which is told other things, silenced and restarted; and once the whole
//! way, to engines that nobody listed.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;

use std::collections::BTreeSet;
use std::sync::Arc;

use serde_json::json;
use tempfile::TempDir;
use tokio::sync::watch;
use warmroute::discovery::ServedModel;
use warmroute::discovery::dns::{self, DnsConfig, worker_id};
use warmroute::metrics::{Metrics, SourceLabel};
use warmroute::worker::{BlockSize, Worker};

use deployment::{Deployment, PATIENCE, essay, fast, telling};
use support::child::Child;
use support::debian::DNSMASQ;
use support::ports::{FreePort, until};

/// A server of names that knows those below `test.` and nothing else.
struct Names {
    server: Option<Child>,
    port: u16,
    dir: TempDir,
}

impl Names {
    fn start(records: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let port = FreePort::find().unwrap().release();
        let mut names = Self {
            server: None,
            port,
            dir,
        };
        names.say(records);
        names
    }

    /// Starts it anew with other records, each as dnsmasq writes it.
    fn say(&mut self, records: &[&str]) {
        self.server = None;
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
        self.server = Some(Child::spawn("dnsmasq", &command, self.dir.path()).unwrap());
    }

    fn resolver(&self) -> String {
        format!("127.0.0.1:{}", self.port)
    }
}

/// Follows names in the background.
struct Follows {
    fleets: watch::Receiver<Option<Vec<Worker>>>,
    metrics: Arc<Metrics>,
    task: tokio::task::JoinHandle<()>,
}

impl Drop for Follows {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Follows {
    fn start(names: Vec<DnsConfig>) -> Self {
        let (told, fleets) = watch::channel(None);
        let metrics = Arc::new(Metrics::new());
        let block_size = BlockSize::new(16).unwrap();
        let models = vec![ServedModel {
            name: "m".into(),
            block_size,
            meets: false,
        }];
        let of_task = metrics.clone();
        let task = tokio::spawn(async move {
            dns::watch(names, models, of_task, |fleet| {
                _ = told.send_replace(Some(fleet))
            })
            .await
            .unwrap();
        });
        Self {
            fleets,
            metrics,
            task,
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

    async fn are(&self, endpoints: &[&str]) {
        let found = until(PATIENCE, async || {
            self.endpoints().is_some_and(|found| found == endpoints)
        })
        .await;
        assert!(found, "{:?}, not {endpoints:?}", self.endpoints());
    }

    /// Waits until a source is as it should be.
    async fn up_is(&self, source: &str, up: i64) {
        let label = SourceLabel {
            source: source.to_owned(),
        };
        let is = async || self.metrics.discovery_up.get_or_create(&label).get() == up;
        assert!(until(PATIENCE, is).await, "{source} is not {up}");
    }
}

fn named(text: &str, names: &Names) -> DnsConfig {
    let text = format!("{{{text}, every: 50ms, resolver: '{}'}}", names.resolver());
    serde_saphyr::from_str(&text).unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn addresses_come_and_go_and_silence_changes_nothing() {
    let mut names = Names::start(&[
        "host-record=e.test,10.0.0.1",
        "host-record=e.test,10.0.0.2",
        "host-record=e.test,2001:db8::1",
    ]);
    let follows = Follows::start(vec![named("name: e.test, port: 8000", &names)]);
    follows
        .are(&["10.0.0.1:8000", "10.0.0.2:8000", "[2001:db8::1]:8000"])
        .await;
    follows.up_is("dns e.test", 1).await;
    // A server that is away, and one that answers that it cannot.
    names.server = None;
    follows.up_is("dns e.test", 0).await;
    assert_eq!(follows.endpoints().unwrap().len(), 3);
    names.say(&["host-record=e.test,10.0.0.2"]);
    follows.are(&["10.0.0.2:8000"]).await;
    follows.up_is("dns e.test", 1).await;
    // That nobody is there is an answer.
    names.say(&[]);
    follows.are(&[]).await;
    follows.up_is("dns e.test", 1).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_service_is_its_targets_and_a_refused_name_disturbs_no_other() {
    let records = [
        "srv-host=_http._tcp.e.test,a.test,8001",
        "srv-host=_http._tcp.e.test,b.test,8002",
        "host-record=a.test,10.0.0.1",
        "host-record=b.test,10.0.0.2",
    ];
    let mut names = Names::start(&records);
    let follows = Follows::start(vec![
        named(
            "name: _http._tcp.e.test, record: srv, worker: {role: decode}",
            &names,
        ),
        // The server refuses what is not below `test.`.
        named(
            "name: e.elsewhere, port: 9000, worker: {role: prefill}",
            &names,
        ),
    ]);
    follows.are(&["10.0.0.1:8001", "10.0.0.2:8002"]).await;
    follows.up_is("dns _http._tcp.e.test", 1).await;
    follows.up_is("dns e.elsewhere", 0).await;
    names.say(&[
        "srv-host=_http._tcp.e.test,b.test,8003",
        "host-record=b.test,10.0.0.2",
    ]);
    follows.are(&["10.0.0.2:8003"]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engines_that_only_a_name_knows_are_routed_to() {
    let mut deployment = Deployment::engines(&[fast(1), fast(2)]).await;
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
    let ids: Vec<u64> = deployment
        .engines
        .iter()
        .map(|engine| worker_id(engine.address).0)
        .collect();
    let mut names = Names::start(&[&both[0], &both[2]]);
    let source = json!([{
        "name": "_http._tcp.e.test", "record": "srv", "every": "50ms", "resolver": names.resolver(),
        "worker": {"model": support::stack::MODEL},
    }]);
    // Where they publish their events the engines say themselves.
    let own = telling(json!({"workers_file": null, "dns": source}));
    deployment.start_router(&own).await.unwrap();
    let envoy = deployment.envoy_config();
    deployment.start_envoy(&envoy).await.unwrap();
    let mut number = 0;
    let mut served = async |wanted: usize| {
        let mut served = BTreeSet::new();
        let all = until(PATIENCE, async || {
            number += 1;
            let answered = deployment.complete(&essay(number)).await;
            assert_eq!(answered.status, 200, "{answered:?}");
            served.insert(
                answered
                    .header("x-worker-instance-id")
                    .parse::<u64>()
                    .unwrap(),
            );
            served.len() == wanted
        });
        assert!(all.await, "{served:?}");
        served
    };
    assert_eq!(served(1).await, BTreeSet::from([ids[0]]));
    names.say(&[&both[0], &both[1], &both[2]]);
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
