//! The whole way under a steady load: the API server, warmroute, a real Envoy that is told by xDS, and engines.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::deployment::{Deployment, PATIENCE, essay, fast, telling};
use crate::server::{ApiServer, OPTIONAL, TOKEN};
use crate::support::ports::until;
use crate::support::stack::MODEL;
use crate::{pod, pool, ready};

/// How long the API server is away.
const AWAY: Duration = Duration::from_secs(30);

/// Requests without end, until it is dropped.
struct Load {
    stop: Arc<AtomicBool>,
    answered: Arc<AtomicUsize>,
    failed: Arc<parking_lot::Mutex<Vec<String>>>,
    tasks: Vec<tokio::task::JoinHandle<()>>,
}

impl Load {
    fn start(deployment: &Deployment, clients: usize) -> Self {
        let mut load = Self {
            stop: Arc::default(),
            answered: Arc::default(),
            failed: Arc::default(),
            tasks: Vec::new(),
        };
        for client in 0..clients {
            let (http, url) = (deployment.http.clone(), deployment.url("/v1/completions"));
            let (stop, answered, failed) = (
                load.stop.clone(),
                load.answered.clone(),
                load.failed.clone(),
            );
            load.tasks.push(tokio::spawn(async move {
                for turn in 0.. {
                    if stop.load(Ordering::Relaxed) {
                        return;
                    }
                    let body = json!({"model": MODEL, "prompt": essay(client * 1_000 + turn % 50), "max_tokens": 4});
                    let answer = async { http.post(&url).json(&body).send().await?.error_for_status()?.bytes().await };
                    match answer.await {
                        Ok(_) => _ = answered.fetch_add(1, Ordering::Relaxed),
                        Err(error) => failed.lock().push(format!("{error:?}")),
                    }
                }
            }));
        }
        load
    }

    /// Waits for more answers, and that none is an error.
    async fn goes_on(&self) {
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

struct Site {
    deployment: Deployment,
    server: ApiServer,
    load: Option<Load>,
}

impl Site {
    fn port(&self, engine: usize) -> u16 {
        self.deployment.engines[engine].address.port()
    }

    /// Waits until warmroute has these engines, and Envoy the same; and that nobody noticed.
    async fn serves(&self, engines: &[usize]) {
        let wanted: BTreeSet<String> = engines
            .iter()
            .map(|engine| format!("127.0.0.1:{}", self.port(*engine)))
            .collect();
        let fleet = async || -> BTreeSet<String> {
            let page = self.deployment.debug("fleet").await.unwrap();
            let members = page["members"].as_array().unwrap().iter();
            let open = members.filter(|member| member["worker"]["draining"] != true);
            open.map(|member| member["worker"]["endpoint"].as_str().unwrap().to_owned())
                .collect()
        };
        let found = until(PATIENCE, async || fleet().await == wanted).await;
        assert!(
            found,
            "{:?}, not {wanted:?}\n{}",
            fleet().await,
            self.deployment.router_log()
        );
        let known = until(PATIENCE, async || {
            endpoints(&self.deployment).await == wanted
        })
        .await;
        assert!(
            known,
            "Envoy has {:?}, not {wanted:?}",
            endpoints(&self.deployment).await
        );
        if let Some(load) = &self.load {
            load.goes_on().await;
        }
    }

    /// Blocks on the devices of these engines, by their own account.
    async fn cached(&self, engines: &[usize]) -> u64 {
        let mut blocks = 0;
        for engine in engines {
            let url = self.deployment.engines[*engine].url("/sim/state");
            let state: Value = self
                .deployment
                .http
                .get(url)
                .send()
                .await
                .unwrap()
                .json()
                .await
                .unwrap();
            blocks += state["ranks"][0]["cached"].as_array().unwrap().len() as u64;
        }
        blocks
    }

    /// The blocks of the pod at an engine that the index holds; none where nobody listens to it.
    async fn indexed(&self, engine: usize) -> Option<u64> {
        let (fleet, index) = (
            self.deployment.debug("fleet").await.unwrap(),
            self.deployment.debug("index").await.unwrap(),
        );
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

    /// All that the index holds, which is what these engines hold, now that nothing happens.
    async fn index_is_of(&self, engines: &[usize]) {
        let indexed = async || {
            self.deployment.debug("index").await.unwrap()["total"]["device"]
                .as_u64()
                .unwrap()
        };
        let agree = async || indexed().await == self.cached(engines).await;
        let agreed = until(PATIENCE, agree).await;
        assert!(
            agreed,
            "{} indexed, and {} cached",
            indexed().await,
            self.cached(engines).await
        );
    }
}

/// Envoy's hosts that take requests.
pub(crate) async fn endpoints(deployment: &Deployment) -> BTreeSet<String> {
    let url = deployment.standalone().admin_url("/clusters?format=json");
    let page: Value = deployment
        .http
        .get(url)
        .send()
        .await
        .unwrap()
        .json()
        .await
        .unwrap();
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

async fn site() -> Site {
    let mut deployment = Deployment::engines(&[fast(1), fast(2), fast(3), fast(4)]).await;
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
        let entry = deployment.engines[engine].entry();
        entry["kv_events"]["endpoint"]
            .as_str()
            .unwrap()
            .rsplit(':')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    // That of `b` moves to another engine, whose events are elsewhere: each of the two says where.
    let of = |name: &str| json!({"name": name, "worker": {"model": MODEL}});
    let telling_pool = |name: &str, engine: usize| json!({"name": name, "worker": {"model": MODEL, "kv_events": {"port": events(engine)}}});
    let own = telling(json!({
        "workers_file": null,
        "envoy": {"xds": {}},
        "kubernetes": {"kubeconfig": kubeconfig, "silence": "5s", "pools": [telling_pool("a", 0), of("b"), telling_pool("c", 2)]},
    }));
    deployment.start_router(&own).await.unwrap();
    let config = deployment.standalone().config_of("xds", &[]).unwrap();
    deployment
        .start_envoy(&config.replace(" message_timeout: 1s", " message_timeout: 30s"))
        .await
        .unwrap();
    Site {
        deployment,
        server,
        load: None,
    }
}

/// Pods appear, become ready, change ports, are relabelled, terminate; a pool changes its selector; the API server is away, and
/// comes back without knowing what was before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_steady_load_notices_nothing() {
    let mut site = site().await;
    site.serves(&[0, 1]).await;
    site.load = Some(Load::start(&site.deployment, 6));
    let mut c = engine_pod("c");
    ready(&mut c, false);
    site.server.put("pods", c);
    site.serves(&[0, 1]).await;
    site.server.change("pods", "c", |pod| ready(pod, true));
    site.serves(&[0, 1, 2]).await;
    // What the newcomer has is known, as far as it says so.
    let has_some = until(PATIENCE, async || {
        site.indexed(2).await.is_some_and(|blocks| blocks > 0)
    })
    .await;
    assert!(has_some, "{:?}", site.indexed(2).await);
    // Another port.
    let other = site.port(3);
    site.server.change("inferencepools", "b", |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": other}])
    });
    site.serves(&[0, 3, 2]).await;
    // Out of its pool, and the pool follows it.
    site.server.change("pods", "c", |pod| {
        pod["metadata"]["labels"] = json!({"app": "elsewhere"})
    });
    site.serves(&[0, 3]).await;
    site.server.change("inferencepools", "c", |pool| {
        pool["spec"]["selector"]["matchLabels"] = json!({"app": "elsewhere"})
    });
    site.serves(&[0, 3, 2]).await;
    // It ends in order.
    site.server.change("pods", "a", |pod| {
        pod["metadata"]["deletionTimestamp"] = json!("2026-11-22T10:00:00Z")
    });
    site.serves(&[3, 2]).await;
    site.deployment
        .metrics_show("the one that drains is still there", |page| {
            page.sum("workers", &[]) == 3.0
        })
        .await;
    site.server.delete("pods", "a");
    site.deployment
        .metrics_show("it has left", |page| page.sum("workers", &[]) == 2.0)
        .await;
    assert_eq!(site.indexed(0).await, None);
    // Nobody tells anything, and much happens.
    site.server.stop().await;
    let away = tokio::time::sleep(AWAY);
    site.server.put("pods", engine_pod("a2"));
    site.server.change("pods", "a2", |pod| {
        pod["metadata"]["labels"] = json!({"app": "a"})
    });
    site.server.change("pods", "c", |pod| ready(pod, false));
    site.server.compact();
    let gone = |page: &crate::openmetrics::Page| page.sum("discovery_up", &[]) == 0.0;
    site.deployment
        .metrics_show("that nobody tells anything is shown", gone)
        .await;
    site.serves(&[3, 2]).await;
    away.await;
    site.serves(&[3, 2]).await;
    site.server.resume().await;
    site.serves(&[3, 0]).await;
    site.deployment
        .metrics_show("it is told again", |page| {
            page.sum("discovery_up", &[]) == 3.0
        })
        .await;
    let answered = site.load.take().unwrap().end().await;
    assert!(answered > 500, "{answered}");
    site.deployment.idle().await;
    // Of `a` only what its successor at the same engine has, and told anew.
    assert!(
        site.indexed(0).await.is_some_and(|blocks| blocks > 0) && site.indexed(2).await.is_some()
    );
    site.index_is_of(&[0, 2, 3]).await;
    site.server.delete("pods", "a2");
    site.index_is_of(&[2, 3]).await;
    site.server.delete("pods", "c");
    site.index_is_of(&[3]).await;
    // It asked for what the Role of the conformance fixture grants, and for what need not be there.
    assert_eq!(
        (site.server.violations(), site.server.discoveries()),
        (vec![], 0)
    );
    assert!(OPTIONAL.iter().all(|kind| site.server.refused(kind) > 0));
}
