//! A thousand pods with two ranks each appear at once. The test prints the time until all ranks are
//! candidates and Envoy has their endpoints, and the memory of both processes. It asserts that all
//! ranks appear within the usual timeout.

use std::time::Instant;

use serde_json::json;
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::until;

use super::{pod, pool};
use crate::kubernetes::load::endpoints;
use crate::support::api_server::{ApiServer, TOKEN};
use crate::support::deployment::{PATIENCE, TestDeployment, with_response_headers};

const PODS: usize = 1_000;
const PORTS: [u16; 2] = [8000, 8001];

/// Returns the resident memory of a process in MiB.
fn resident(pid: u32) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .unwrap();
    line.trim().trim_end_matches(" kB").parse::<u64>().unwrap() / 1024
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn thousand_new_pods_reach_envoy_quickly() {
    let mut deployment = TestDeployment::engines(&[]).await;
    let server = ApiServer::start().await;
    let labels = json!({"app": "many"});
    server.put("inferencepools", pool("many", &labels, &PORTS));
    server.put("pods", pod("first", "10.9.0.1", &labels));
    let kubeconfig = deployment.run_dir.join("kubeconfig");
    std::fs::write(&kubeconfig, server.kubeconfig(TOKEN).to_string()).unwrap();
    let own = with_response_headers(json!({
        "workers": {
            "file": null,
            "kubernetes": {
                "kubeconfig": kubeconfig,
                "pools": [{"name": "many", "worker": {"model": MODEL}}],
            },
        },
        "envoy": {"xds": {}},
        // No engine runs at the addresses.
        "engines": {"discovery": {"enabled": false}, "parity_check": {"enabled": false}},
    }));
    deployment.start_router(&own).await.unwrap();
    let config = deployment.envoy_setup().shipped_config("xds", &[]).unwrap();
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
    for number in 1..PODS {
        let ip = format!("10.8.{}.{}", number / 250, number % 250 + 1);
        server.put("pods", pod(&format!("many-{number}"), &ip, &labels));
    }
    let published = began.elapsed();
    let all = PODS * PORTS.len();
    assert!(
        until(PATIENCE, async || endpoints(&deployment).await.len() == all).await,
        "{}",
        endpoints(&deployment).await.len()
    );
    let discovered = began.elapsed();
    let all_candidates = async || deployment.metrics().await.sum("workers", &[]) == all as f64;
    assert!(until(PATIENCE, all_candidates).await);
    println!(
        "{PODS} pods published after {published:?}; Envoy has {all} endpoints after {discovered:?}, and all ranks are candidates after {:?}; \
         MiB of warmroute and Envoy: {:?}, before {before:?}",
        began.elapsed(),
        memory(),
    );
    assert_eq!(server.violations(), [""; 0]);
}
