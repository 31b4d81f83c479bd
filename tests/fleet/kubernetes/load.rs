//! End-to-end test under a steady load, with an API server, warmroute, simulated engines, and a
//! real Envoy that is configured by xDS.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{PATIENCE, until};

use super::{pod, pool, ready};
use crate::support::api_server::{ApiServer, OPTIONAL, TOKEN};
use crate::support::deployment::{TestDeployment, essay, fast, with_response_headers};

/// Duration of the API server outage.
const OUTAGE: Duration = Duration::from_secs(30);

/// Clients that send requests until [`ActiveLoad::end`].
struct ActiveLoad {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    failed: Arc<parking_lot::Mutex<Vec<String>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl ActiveLoad {
    fn start(deployment: &TestDeployment, clients: usize) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            answered: Arc::default(),
            failed: Arc::default(),
            tasks: Vec::new(),
        };
        for client in 0..clients {
            let http = deployment.http.clone();
            let url = deployment.url("/v1/completions");
            let stop = load.stop.clone();
            let answered = load.answered.clone();
            let failed = load.failed.clone();
            load.tasks.push(tokio::spawn(async move {
                for round in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let body = json!({"model": MODEL, "prompt": essay(client * 1_000 + round % 50), "max_tokens": 4});
                    let response = async { http.post(&url).json(&body).send().await?.error_for_status()?.bytes().await };
                    match response.await {
                        Ok(_) => _ = answered.fetch_add(1, Ordering::Relaxed),
                        Err(error) => failed.lock().push(format!("{error:?}")),
                    }
                }
            }));
        }
        load
    }

    /// Waits for further responses. Asserts that no request failed.
    async fn assert_progress(&self) {
        let before = self.answered.load(Ordering::Relaxed);
        let more = until(PATIENCE, async || {
            self.answered.load(Ordering::Relaxed) > before + 20
        })
        .await;
        assert!(
            more && self.failed.lock().is_empty(),
            "{:?}",
            self.failed.lock()
        );
    }

    async fn end(self) -> usize {
        self.stop.store(true, Ordering::Relaxed);
        for task in self.tasks {
            task.await.unwrap();
        }
        assert_eq!(self.failed.lock()[..], [""; 0]);
        self.answered.load(Ordering::Relaxed)
    }
}

struct LoadSite {
    deployment: TestDeployment,
    server: ApiServer,
    load: Option<ActiveLoad>,
}

impl LoadSite {
    fn port(&self, engine: usize) -> u16 {
        self.deployment.engines[engine].address.port()
    }

    /// Waits until warmroute and Envoy have exactly these engines. Asserts that no request failed.
    async fn serves(&self, engines: &[usize]) {
        let expected: BTreeSet<String> = engines
            .iter()
            .map(|engine| format!("127.0.0.1:{}", self.port(*engine)))
            .collect();
        let fleet = async || -> BTreeSet<String> {
            let page = self.deployment.debug_page("fleet").await.unwrap();
            let members = page["members"].as_array().unwrap().iter();
            let open = members.filter(|member| member["worker"]["draining"] != true);
            open.map(|member| member["worker"]["endpoint"].as_str().unwrap().to_owned())
                .collect()
        };
        let found = until(PATIENCE, async || fleet().await == expected).await;
        assert!(
            found,
            "{:?}, not {expected:?}\n{}",
            fleet().await,
            self.deployment.router_log()
        );
        let is_known = until(PATIENCE, async || {
            endpoints(&self.deployment).await == expected
        })
        .await;
        assert!(
            is_known,
            "Envoy has {:?}, not {expected:?}",
            endpoints(&self.deployment).await
        );
        if let Some(load) = &self.load {
            load.assert_progress().await;
        }
    }

    /// Returns the number of cached device blocks that these engines report.
    async fn cached(&self, engines: &[usize]) -> u64 {
        let mut blocks = 0;
        for engine in engines {
            let url = self.deployment.engines[*engine].url("/sim/state");
            let state = self.deployment.page(url).await;
            let state: Value = serde_json::from_str(&state).unwrap();
            blocks += state["ranks"][0]["cached"].as_array().unwrap().len() as u64;
        }
        blocks
    }

    /// Returns the number of indexed blocks of the pod at an engine, or `None` if the index has no
    /// slot for it.
    async fn indexed(&self, engine: usize) -> Option<u64> {
        let fleet = self.deployment.debug_page("fleet").await.unwrap();
        let index = self.deployment.debug_page("index").await.unwrap();
        let endpoint = format!("127.0.0.1:{}", self.port(engine));
        let member = fleet["members"]
            .as_array()
            .unwrap()
            .iter()
            .find(|m| m["worker"]["endpoint"] == endpoint)?
            .clone();
        let held = index["slots"]
            .as_array()
            .unwrap()
            .iter()
            .find(|held| held["slot"] == member["slot"])?;
        held["device"].as_u64()
    }

    /// Waits until the index contains exactly the blocks of these engines. No request may be
    /// active.
    async fn wait_index_matches(&self, engines: &[usize]) {
        let indexed = async || self.deployment.indexed_blocks().await;
        let is_equal = async || indexed().await == self.cached(engines).await;
        let matches = until(PATIENCE, is_equal).await;
        assert!(
            matches,
            "{} blocks indexed, {} cached",
            indexed().await,
            self.cached(engines).await
        );
    }
}

/// Returns the hosts to which Envoy sends requests.
pub(crate) async fn endpoints(deployment: &TestDeployment) -> BTreeSet<String> {
    let url = deployment.envoy_setup().admin_url("/clusters?format=json");
    let page: Value = serde_json::from_str(&deployment.page(url).await).unwrap();
    let workers = page["cluster_statuses"]
        .as_array()
        .unwrap()
        .iter()
        .find(|status| status["name"] == "workers");
    let hosts = workers
        .into_iter()
        .flat_map(|status| status["host_statuses"].as_array().into_iter().flatten());
    let open = hosts.filter(|host| host["health_status"]["eds_health_status"] == "HEALTHY");
    open.map(|host| &host["address"]["socket_address"])
        .map(|at| format!("{}:{}", at["address"].as_str().unwrap(), at["port_value"]))
        .collect()
}

fn engine_pod(name: &str) -> Value {
    pod(name, "127.0.0.1", &json!({"app": name}))
}

async fn site() -> LoadSite {
    let mut deployment = TestDeployment::engines(&[fast(1), fast(2), fast(3), fast(4)]).await;
    let server = ApiServer::start().await;
    for (name, engine) in [("a", 0), ("b", 1), ("c", 2)] {
        let port = deployment.engines[engine].address.port();
        server.put("inferencepools", pool(name, &json!({"app": name}), &[port]));
    }
    server.put("pods", engine_pod("a"));
    server.put("pods", engine_pod("b"));
    let kubeconfig = deployment.run_dir.join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
    let events = |engine: usize| -> u16 {
        let entry = deployment.engines[engine].worker_entry();
        entry["kv_events"]["endpoint"]
            .as_str()
            .unwrap()
            .rsplit(':')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    // Pool `b` later moves to an engine with another event port. No event port is configured, so
    // both are discovered from the engines.
    let plain_pool = |name: &str| json!({"name": name, "worker": {"model": MODEL}});
    let pool_with_events = |name: &str, engine: usize| json!({"name": name, "worker": {"model": MODEL, "kv_events": {"port": events(engine)}}});
    let own = with_response_headers(json!({
        "workers": {
            "file": null,
            "kubernetes": {
                "kubeconfig": kubeconfig,
                "watch_timeout": "5s",
                "pools": [pool_with_events("a", 0), plain_pool("b"), pool_with_events("c", 2)],
            },
        },
        "envoy": {"xds": {}},
    }));
    deployment.start_router(&own).await.unwrap();
    let config = deployment.envoy_setup().shipped_config("xds", &[]).unwrap();
    deployment
        .start_envoy(&config.replace(" message_timeout: 1s", " message_timeout: 30s"))
        .await
        .unwrap();
    LoadSite {
        deployment,
        server,
        load: None,
    }
}

/// Pods appear, become ready, change ports, are relabelled and terminate. A pool changes its
/// selector. The API server is unavailable, and returns with a compacted history.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn fleet_changes_fail_no_request() {
    let mut site = site().await;
    site.serves(&[0, 1]).await;
    site.load = Some(ActiveLoad::start(&site.deployment, 6));
    let mut c = engine_pod("c");
    ready(&mut c, false);
    site.server.put("pods", c);
    site.serves(&[0, 1]).await;
    site.server.change("pods", "c", |pod| ready(pod, true));
    site.serves(&[0, 1, 2]).await;
    // The index receives the KV events of the new pod.
    let is_indexed = until(PATIENCE, async || {
        site.indexed(2).await.is_some_and(|blocks| blocks > 0)
    })
    .await;
    assert!(is_indexed, "{:?}", site.indexed(2).await);
    change_pools(&site).await;
    terminate_pod(&site).await;
    change_fleet_during_outage(&mut site).await;
    let answered = site.load.take().unwrap().end().await;
    assert!(answered > 500, "{answered}");
    site.deployment.idle().await;
    // In place of pod `a`, the index contains its successor at the same engine, whose events are
    // read from the beginning.
    let has_successor = until(PATIENCE, async || {
        site.indexed(0).await.is_some_and(|blocks| blocks > 0) && site.indexed(2).await.is_some()
    })
    .await;
    assert!(has_successor, "{:?}", site.indexed(0).await);
    site.wait_index_matches(&[0, 2, 3]).await;
    site.server.delete("pods", "a2");
    site.wait_index_matches(&[2, 3]).await;
    site.server.delete("pods", "c");
    site.wait_index_matches(&[3]).await;
    // All requests are within the Role of the conformance fixture, or for optional kinds.
    assert_eq!(
        (site.server.violations(), site.server.discoveries()),
        (vec![], 0)
    );
    assert!(OPTIONAL.iter().all(|kind| site.server.refused(kind) > 0));
}

/// Changes the port of a pool. Then removes the pod from its pool, and changes the pool's selector
/// to match it.
async fn change_pools(site: &LoadSite) {
    let new_port = site.port(3);
    site.server.change("inferencepools", "b", |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": new_port}])
    });
    site.serves(&[0, 3, 2]).await;
    site.server.change("pods", "c", |pod| {
        pod["metadata"]["labels"] = json!({"app": "elsewhere"})
    });
    site.serves(&[0, 3]).await;
    site.server.change("inferencepools", "c", |pool| {
        pool["spec"]["selector"]["matchLabels"] = json!({"app": "elsewhere"})
    });
    site.serves(&[0, 3, 2]).await;
}

/// Terminates a pod gracefully.
async fn terminate_pod(site: &LoadSite) {
    site.server.change("pods", "a", |pod| {
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-22T10:00:00Z")
    });
    site.serves(&[3, 2]).await;
    site.deployment.wait_metric("workers", &[], 3.0).await;
    site.server.delete("pods", "a");
    site.deployment.wait_metric("workers", &[], 2.0).await;
    assert_eq!(site.indexed(0).await, None);
}

/// Changes the fleet while the API server is unavailable.
async fn change_fleet_during_outage(site: &mut LoadSite) {
    site.server.stop().await;
    let outage = tokio::time::sleep(OUTAGE);
    site.server.put("pods", engine_pod("a2"));
    site.server.change("pods", "a2", |pod| {
        pod["metadata"]["labels"] = json!({"app": "a"})
    });
    site.server.change("pods", "c", |pod| ready(pod, false));
    site.server.compact();
    site.deployment.wait_metric("discovery_up", &[], 0.0).await;
    site.serves(&[3, 2]).await;
    outage.await;
    site.serves(&[3, 2]).await;
    site.server.resume().await;
    site.serves(&[3, 0]).await;
    site.deployment.wait_metric("discovery_up", &[], 3.0).await;
}
