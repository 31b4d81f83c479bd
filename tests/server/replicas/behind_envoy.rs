//! Three replicas behind one Envoy under load. One is killed and replaced by another, and NATS is
//! stopped and restarted.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use parking_lot::Mutex;
use serde_json::{Value, json};
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::replicas::NatsServer;
use crate::support::another::SecondRouter;
use crate::support::deployment::{TestDeployment, essay, fast, with_response_headers};

/// Total number of requests.
const REQUESTS: usize = 20_000;
/// Number of clients, each with one request at a time.
const CLIENTS: usize = 24;
/// Duration of the NATS outage.
const AWAY: Duration = Duration::from_secs(4);

/// Starts an additional replica. Only the first one publishes endpoints to Envoy.
async fn start_replica(deployment: &TestDeployment, number: usize) -> SecondRouter {
    SecondRouter::start(deployment, &format!("ext_proc-{number}"), &json!({})).await
}

fn socket(deployment: &TestDeployment, number: usize) -> PathBuf {
    if number == 0 {
        deployment.envoy_setup().ext_proc_socket()
    } else {
        deployment.run_dir.join(format!("ext_proc-{number}.sock"))
    }
}

/// Returns the shipped Envoy configuration with three ext_proc endpoints. Envoy excludes endpoints
/// that do not respond.
fn envoy_config(deployment: &TestDeployment) -> String {
    let endpoint = |number| {
        format!(
            "{{endpoint: {{address: {{pipe: {{path: {}}}}}}}}}",
            socket(deployment, number).display()
        )
    };
    let one = endpoint(0);
    let all = [0, 1, 2].map(endpoint).join(", ");
    let shipped = deployment.envoy_config();
    assert_eq!(shipped.matches(&one).count(), 2, "{one}");
    let check = "timeout: 1s, interval: 0.5s, no_traffic_interval: 0.5s, unhealthy_threshold: 1, healthy_threshold: 1";
    shipped.replace(&one, &all).replace(
        "    load_assignment:\n      cluster_name: ext_proc\n",
        &format!("    health_checks: [{{{check}, grpc_health_check: {{service_name: readiness}}}}]\n    load_assignment:\n      cluster_name: ext_proc\n"),
    )
}

/// Responses that the clients received.
#[derive(Default)]
struct ReplicaAnswers {
    /// Total number of requests to send.
    requests: usize,
    sent: AtomicUsize,
    routed: AtomicUsize,
    failed: Mutex<Vec<String>>,
    by_worker: Mutex<BTreeMap<String, usize>>,
}

async fn client(
    number: usize,
    deployment: (reqwest::Client, String),
    answers: Arc<ReplicaAnswers>,
) {
    let (http, url) = deployment;
    loop {
        let at = answers.sent.fetch_add(1, Ordering::Relaxed);
        if at >= answers.requests {
            return;
        }
        let body = json!({"model": MODEL, "prompt": essay(at % 64), "max_tokens": 2, "user": format!("{number}")});
        let answer = async {
            let answer = http
                .post(&url)
                .json(&body)
                .send()
                .await?
                .error_for_status()?;
            let text = |name: &str| {
                answer
                    .headers()
                    .get(name)
                    .map(|value| value.to_str().unwrap().to_owned())
            };
            let worker = text("x-worker-instance-id");
            let mode = text("x-warmroute-mode");
            answer.bytes().await.map(|_| (worker, mode))
        };
        match answer.await {
            Ok((worker, mode)) => {
                *answers
                    .by_worker
                    .lock()
                    .entry(worker.unwrap_or_default())
                    .or_default() += 1;
                answers
                    .routed
                    .fetch_add(usize::from(mode.is_some()), Ordering::Relaxed);
            }
            Err(error) => answers.failed.lock().push(format!("{error:?}")),
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn requests_survive_replica_kill_start_and_nats_outage() {
    let mut nats = NatsServer::started();
    let mut deployment = TestDeployment::engines(&[fast(1), fast(2), fast(3), fast(4)]).await;
    deployment.write_workers().unwrap();
    let own = with_response_headers(
        json!({"replicas": {"nats": {"servers": [nats.url()]}, "lease": "2s"}}),
    );
    deployment.start_router(&own).await.unwrap();
    let second = start_replica(&deployment, 1).await;
    let mut third = start_replica(&deployment, 2).await;
    let config = envoy_config(&deployment);
    deployment.start_envoy(&config).await.unwrap();

    let answers = Arc::new(ReplicaAnswers {
        requests: REQUESTS,
        ..ReplicaAnswers::default()
    });
    let began = std::time::Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|number| {
            let to = (deployment.http.clone(), deployment.url("/v1/completions"));
            tokio::spawn(client(number, to, answers.clone()))
        })
        .collect();
    let reached = async |part: usize| {
        let wanted = REQUESTS * part / 10;
        until(PATIENCE * 4, async || {
            answers.sent.load(Ordering::Relaxed) >= wanted
        })
        .await
    };
    assert!(reached(2).await);
    third.child.kill9();
    assert!(reached(4).await);
    third = start_replica(&deployment, 2).await;
    assert!(reached(6).await);
    nats.kill();
    tokio::time::sleep(AWAY).await;
    nats.start();
    for client in clients {
        client.await.unwrap();
    }
    let took = began.elapsed();
    let routed = answers.routed.load(Ordering::Relaxed);
    println!(
        "{REQUESTS} requests in {took:?}, {routed} routed; by worker {:?}",
        answers.by_worker.lock()
    );
    assert_eq!(answers.failed.lock()[..], [""; 0]);
    assert!(
        routed * 100 >= REQUESTS * 95,
        "only {routed} of {REQUESTS} were routed"
    );

    let pages = [deployment.admin_url(""), second.url(""), third.url("")];
    for of in &pages {
        wait_no_bookings(&deployment.http, of).await;
        let part = routed_by(&deployment.http, of).await;
        println!("{of}: {part} routed");
        assert!(part > REQUESTS as f64 / 10.0, "{of} routed {part}");
    }
}

/// Waits until a replica counts no booking, neither its own nor of peers.
async fn wait_no_bookings(http: &reqwest::Client, of: &str) {
    let page = async |path: &str| -> Value {
        let page = http.get(format!("{of}{path}")).send().await.unwrap();
        page.json().await.unwrap()
    };
    let rests = async || {
        let load = page("/debug/load").await;
        let replicas = page("/debug/replicas").await;
        let is_idle = |rank: &Value| {
            ["active_requests", "active_blocks", "active_prefill_tokens"]
                .iter()
                .all(|what| rank[*what] == 0)
        };
        let peers = replicas["peers"].as_array().unwrap();
        load.as_array().unwrap().iter().all(is_idle)
            && replicas["connected"] == true
            && peers.len() == 2
            && peers
                .iter()
                .all(|peer| peer["synced"] == true && peer["reservations"] == 0)
    };
    assert!(
        until(PATIENCE, rests).await,
        "{}\n{}",
        page("/debug/load").await,
        page("/debug/replicas").await
    );
}

/// Returns the number of requests that a replica has routed.
async fn routed_by(http: &reqwest::Client, of: &str) -> f64 {
    let page = http.get(format!("{of}/metrics")).send().await.unwrap();
    let text = page.text().await.unwrap();
    let lines = text
        .lines()
        .filter(|line| line.starts_with("warmroute_requests_total{"));
    lines
        .map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap())
        .sum()
}
