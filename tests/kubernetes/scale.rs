//! A thousand pods at once, each with two ranks: how long it takes until all may be chosen and Envoy has all of them, and
//! what that takes of memory, is printed. It is asserted that all of them come, and that none of it takes a minute.

use std::time::Instant;

use serde_json::json;

use crate::deployment::{Deployment, PATIENCE, telling};
use crate::load::endpoints;
use crate::server::{ApiServer, TOKEN};
use crate::support::ports::until;
use crate::support::stack::MODEL;
use crate::{pod, pool};

const PODS: usize = 1_000;
const PORTS: [u16; 2] = [8000, 8001];

/// Resident memory of a process, in MiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_thousand_pods_of_two_ranks_that_come_at_once_are_soon_known_to_envoy() {
    let mut deployment = Deployment::engines(&[]).await;
    let server = ApiServer::start().await;
    let labels = json!({"app": "many"});
    server.put("inferencepools", pool("many", &labels, &PORTS));
    server.put("pods", pod("first", "10.9.0.1", &labels));
    let kubeconfig = deployment.run_dir.join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
    let own = telling(json!({
        "workers_file": null,
        "envoy": {"xds": {}},
        "kubernetes": {"kubeconfig": kubeconfig, "pools": [{"name": "many", "worker": {"model": MODEL}}]},
        // Nobody is there to be asked.
        "learn": {"enabled": false},
        "self_test": {"enabled": false},
    }));
    deployment.start_router(&own).await.unwrap();
    let config = deployment.standalone().config_of("xds", &[]).unwrap();
    deployment.start_envoy(&config).await.unwrap();
    assert!(
        until(PATIENCE, async || endpoints(&deployment).await.len()
            == PORTS.len())
        .await
    );

    let memory = || {
        [deployment.router().unwrap(), deployment.envoy().unwrap()]
            .map(|child| resident(child.pid()))
    };
    let before = memory();
    let began = Instant::now();
    for nth in 1..PODS {
        let ip = format!("10.8.{}.{}", nth / 250, nth % 250 + 1);
        server.put("pods", pod(&format!("many-{nth}"), &ip, &labels));
    }
    let told = began.elapsed();
    let all = PODS * PORTS.len();
    assert!(
        until(PATIENCE, async || endpoints(&deployment).await.len() == all).await,
        "{}",
        endpoints(&deployment).await.len()
    );
    let known = began.elapsed();
    let chosen = async || deployment.metrics().await.sum("workers", &[]) == all as f64;
    assert!(until(PATIENCE, chosen).await);
    println!(
        "{PODS} pods told of after {told:?}; Envoy has {all} endpoints after {known:?}, and all may be chosen after {:?}; \
         MiB of warmroute and Envoy: {:?}, before {before:?}",
        began.elapsed(),
        memory(),
    );
    assert_eq!(server.violations(), [""; 0]);
}
