//! warmroute as the xDS server: all protocol variants with a real Envoy, several Envoys, restarts
//! of either side, and a client with requests that Envoy never sends.

use std::collections::{BTreeMap, BTreeSet};

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_client::EndpointDiscoveryServiceClient;
use envoy_types::pb::google::rpc::Status;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::envoy::{self, EnvoySetup};
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::shipped::bursts::BurstEngine;
use crate::shipped::configurations::{STANDALONE, XDS};
use crate::support::deployment::{TestDeployment, essay, fast};

/// Returns the EDS configuration source of the cluster in the shipped file.
fn source(config: &mut Value) -> &mut Value {
    config
        .pointer_mut("/static_resources/clusters/0/eds_cluster_config/eds_config")
        .unwrap()
}

fn grpc(kind: &str) -> Value {
    json!({
        "api_type": kind,
        "transport_api_version": "V3",
        "grpc_services": [{"envoy_grpc": {"cluster_name": "xds"}}],
    })
}

/// Returns the shipped file with another variant of the protocol.
fn variant(shipped: &str, kind: &str, aggregated: bool) -> String {
    let mut config: Value = serde_saphyr::from_str(shipped).unwrap();
    let eds = source(&mut config);
    if aggregated {
        *eds = json!({"resource_api_version": "V3", "ads": {}});
        config["dynamic_resources"] = json!({"ads_config": grpc(kind)});
    } else {
        eds["api_config_source"] = grpc(kind);
    }
    config.to_string()
}

/// Returns the endpoints of a cluster in an Envoy: address and EDS health status.
async fn endpoints(
    deployment: &TestDeployment,
    envoy: &EnvoySetup<'_>,
    cluster: &str,
) -> BTreeMap<String, String> {
    let page = deployment.page(envoy.admin_url("/clusters?format=json"));
    let page: Value = serde_json::from_str(&page.await).unwrap();
    let clusters = page["cluster_statuses"].as_array().unwrap();
    let hosts = clusters.iter().filter(|status| status["name"] == cluster);
    let hosts = hosts.flat_map(|status| status["host_statuses"].as_array().into_iter().flatten());
    hosts
        .map(|host| {
            let address = &host["address"]["socket_address"];
            let health = host["health_status"]["eds_health_status"]
                .as_str()
                .unwrap_or("?");
            (
                format!(
                    "{}:{}",
                    address["address"].as_str().unwrap(),
                    address["port_value"]
                ),
                health.to_owned(),
            )
        })
        .collect()
}

/// Waits until Envoy has exactly these workers, with these health statuses.
async fn wait_for_endpoints(deployment: &TestDeployment, expected: &[(&BurstEngine, &str)]) {
    let expected: BTreeMap<String, String> = expected
        .iter()
        .map(|(worker, health)| (worker.address.to_string(), (*health).to_owned()))
        .collect();
    let envoy = deployment.envoy_setup();
    let is_there = async || endpoints(deployment, &envoy, "workers").await == expected;
    let found = until(PATIENCE, is_there).await;
    assert!(
        found,
        "{:?}, not {expected:?}",
        endpoints(deployment, &envoy, "workers").await
    );
}

/// Waits until Envoy has exactly these healthy workers.
async fn wait_for_healthy(deployment: &TestDeployment, workers: &[&BurstEngine]) {
    let healthy: Vec<_> = workers.iter().map(|worker| (*worker, "HEALTHY")).collect();
    wait_for_endpoints(deployment, &healthy).await;
}

fn list_workers(deployment: &TestDeployment, workers: &[&BurstEngine]) {
    deployment.write_worker_entries(&entries(workers)).unwrap();
}

/// Waits until this number of Envoys is connected.
async fn wait_for_envoys(deployment: &TestDeployment, count: usize) {
    let connected = async || {
        let envoys = deployment.debug_page("envoys").await.unwrap();
        envoys.as_array().unwrap().len() == count
    };
    let reached = until(PATIENCE, connected).await;
    assert!(reached, "{}", deployment.router_log());
}

fn entries(workers: &[&BurstEngine]) -> Value {
    workers.iter().map(|worker| worker.entry()).collect()
}

/// Adds, drains and removes workers. Asserts that Envoy receives each change.
async fn assert_envoy_follows(kind: &str, aggregated: bool) {
    let [one, two, three] = [
        BurstEngine::start(1).await,
        BurstEngine::start(2).await,
        BurstEngine::start(3).await,
    ];
    let mut deployment = TestDeployment::engines(&[]).await;
    list_workers(&deployment, &[&one, &two]);
    deployment.start_router(&XDS.warmroute()).await.unwrap();
    let config = variant(&XDS.envoy(&deployment, &[], "30s"), kind, aggregated);
    deployment.start_envoy(&config).await.unwrap();
    wait_for_healthy(&deployment, &[&one, &two]).await;

    list_workers(&deployment, &[&one, &two, &three]);
    wait_for_healthy(&deployment, &[&one, &two, &three]).await;

    let mut drains = entries(&[&one, &three]);
    drains[0]["draining"] = json!(true);
    deployment.write_worker_entries(&drains).unwrap();
    wait_for_endpoints(&deployment, &[(&one, "DRAINING"), (&three, "HEALTHY")]).await;
    one.event_permits.add_permits(1_000);
    three.event_permits.add_permits(1_000);
    for number in 0..10 {
        assert_eq!(deployment.query(&essay(number)).await.engine(), 3);
    }

    assert_envoy_is_listed(&deployment, kind).await;
}

/// Asserts the page and the metrics of the connected Envoy.
async fn assert_envoy_is_listed(deployment: &TestDeployment, kind: &str) {
    let listeners = deployment.debug_page("envoys").await.unwrap();
    let [listener] = &listeners.as_array().unwrap()[..] else {
        panic!("{listeners}")
    };
    assert_eq!(listener["node"], "warmroute-gateway");
    assert_eq!(listener["clusters"], json!(["workers"]));
    assert_eq!(
        listener["variant"],
        if kind == "GRPC" {
            "state_of_the_world"
        } else {
            "delta"
        }
    );
    let page = deployment.metrics().await;
    assert_eq!(
        listener["generation"].as_f64().unwrap(),
        page.sum("xds_generation", &[])
    );
    assert!(
        page.sum("xds_updates_total", &[("outcome", "acked")]) >= 3.0,
        "{}",
        page.text()
    );
    assert_eq!(page.sum("xds_updates_total", &[("outcome", "nacked")]), 0.0);
}

long_tests! {
    sotw_eds_follows_workers: assert_envoy_follows("GRPC", false),
    sotw_ads_follows_workers: assert_envoy_follows("GRPC", true),
    delta_eds_follows_workers: assert_envoy_follows("DELTA_GRPC", false),
    delta_ads_follows_workers: assert_envoy_follows("DELTA_GRPC", true),
}

/// Starts another Envoy for the same deployment, on other ports.
async fn start_another_envoy(
    deployment: &TestDeployment,
    config: &str,
) -> (ChildProcess, u16, u16) {
    let port = FreePort::find().unwrap();
    let admin_port = FreePort::find().unwrap();
    let port = port.release();
    let admin_port = admin_port.release();
    let own = deployment.envoy_setup();
    let config = config
        .replace(
            &format!("port_value: {}}}", own.port),
            &format!("port_value: {port}}}"),
        )
        .replace(
            &format!("port_value: {}}}", own.admin_port),
            &format!("port_value: {admin_port}}}"),
        );
    let dir = deployment.run_dir.join(format!("envoy-{port}"));
    std::fs::create_dir(&dir).unwrap();
    (
        envoy::start(&config, &dir, 1).await.unwrap(),
        port,
        admin_port,
    )
}

/// Returns the shipped configuration with the xDS server at a TCP port.
fn config_with_xds_port(deployment: &TestDeployment, port: u16) -> String {
    let shipped = XDS.envoy(deployment, &[], "30s");
    let (before, after) = shipped.split_once("- name: xds").unwrap();
    let pipe = format!(
        "pipe: {{path: {}}}",
        deployment.envoy_setup().ext_proc_socket().display()
    );
    assert_eq!(after.matches(&pipe).count(), 1);
    let tcp = format!("socket_address: {{address: 127.0.0.1, port_value: {port}}}");
    format!("{before}- name: xds{}", after.replace(&pipe, &tcp))
}

/// A new worker is chosen only after all Envoys have acknowledged it, so no Envoy receives a
/// request for an unknown worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn new_worker_is_chosen_after_all_envoys_acknowledge() {
    let mut deployment = TestDeployment::engines(&[fast(1), fast(2), fast(3)]).await;
    let all: Vec<Value> = deployment
        .engines
        .iter()
        .map(|engine| engine.worker_entry())
        .collect();
    deployment.write_worker_entries(&json!(all[..1])).unwrap();
    let xds = FreePort::find().unwrap().release();
    let mut own = XDS.warmroute();
    own["envoy"]["xds"] = json!({"address": format!("127.0.0.1:{xds}")});
    deployment.start_router(&own).await.unwrap();
    let config = config_with_xds_port(&deployment, xds);
    deployment.start_envoy(&config).await.unwrap();
    let (_second, port, _) = start_another_envoy(&deployment, &config).await;
    wait_for_envoys(&deployment, 2).await;
    let url = format!("http://127.0.0.1:{port}/v1/completions");
    let ready = async || {
        deployment
            .http
            .get(format!("http://127.0.0.1:{port}/"))
            .send()
            .await
            .is_ok()
    };
    assert!(until(PATIENCE, ready).await);
    for known in [2, 3, 1] {
        deployment
            .write_worker_entries(&json!(all[..known]))
            .unwrap();
        let expected: BTreeSet<String> = (1..=known).map(|id| id.to_string()).collect();
        let mut served = BTreeSet::new();
        let mut number = known * 1_000;
        let every = until(PATIENCE, async || {
            number += 1;
            let body = json!({"model": warmroute_testbed::deployment::MODEL, "prompt": essay(number), "max_tokens": 2});
            for url in [url.clone(), deployment.url("/v1/completions")] {
                let answer = deployment.http.post(url).json(&body).send().await.unwrap();
                assert_eq!(answer.status(), 200);
                let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
                // An Envoy that does not know the chosen worker would select another one.
                assert_eq!(header("x-worker-instance-id"), header("x-engine-id"));
                served.insert(header("x-engine-id"));
            }
            // The workers of the previous list serve until warmroute has read the new list.
            if !served.is_subset(&expected) {
                served.clear();
            }
            number > known * 1_000 + 50 && served == expected
        });
        assert!(every.await, "{served:?}");
    }
}

/// Envoy keeps its endpoints while warmroute is down, and receives changes after the restart.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn restart_of_either_side_loses_no_worker() {
    let [one, two] = [BurstEngine::start(1).await, BurstEngine::start(2).await];
    let mut deployment = TestDeployment::engines(&[]).await;
    list_workers(&deployment, &[&one]);
    XDS.serve(&mut deployment, &[]).await;
    let config = XDS.envoy(&deployment, &[], "30s");
    wait_for_healthy(&deployment, &[&one]).await;
    deployment.kill9_router();
    one.event_permits.add_permits(1_000);
    assert_eq!(deployment.query(&essay(1)).await.status, 200);
    list_workers(&deployment, &[&one, &two]);
    deployment.start_router(&XDS.warmroute()).await.unwrap();
    wait_for_healthy(&deployment, &[&one, &two]).await;
    deployment.start_envoy(&config).await.unwrap();
    wait_for_healthy(&deployment, &[&one, &two]).await;
    // The old Envoy is disconnected.
    wait_for_envoys(&deployment, 1).await;
}

/// One Envoy has a cluster for each role, and a cluster that warmroute does not know.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn clusters_have_their_configured_workers() {
    let [one, two] = [BurstEngine::start(1).await, BurstEngine::start(2).await];
    let mut deployment = TestDeployment::engines(&[]).await;
    let mut list = entries(&[&one, &two]);
    list[1]["role"] = json!("prefill");
    deployment.write_worker_entries(&list).unwrap();
    let mut own = XDS.warmroute();
    own["envoy"]["xds"] = json!({"clusters": [{"name": "prefill", "roles": ["prefill"]}]});
    deployment.start_router(&own).await.unwrap();
    let mut config: Value = serde_saphyr::from_str(&XDS.envoy(&deployment, &[], "30s")).unwrap();
    let clusters = config["static_resources"]["clusters"]
        .as_array_mut()
        .unwrap();
    for name in ["prefill", "unknown"] {
        let mut cluster = clusters[0].clone();
        cluster["name"] = json!(name);
        cluster["eds_cluster_config"]["eds_config"]["initial_fetch_timeout"] = json!("1s");
        clusters.push(cluster);
    }
    deployment.start_envoy(&config.to_string()).await.unwrap();
    let envoy = deployment.envoy_setup();
    wait_for_healthy(&deployment, &[&one, &two]).await;
    let found = endpoints(&deployment, &envoy, "prefill").await;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&two.address.to_string()]);
    assert!(endpoints(&deployment, &envoy, "unknown").await.is_empty());
    let listeners = deployment.debug_page("envoys").await.unwrap();
    let unknown = listeners
        .as_array()
        .unwrap()
        .iter()
        .find(|listener| listener["unknown"] == json!(["unknown"]));
    assert!(unknown.is_some(), "{listeners}");
    assert!(
        deployment
            .router_log()
            .contains("Envoy requested unknown clusters"),
        "{}",
        deployment.router_log()
    );
}

/// A client rejects a valid update, requests an unknown type, and disconnects.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn rejecting_client_is_shown_and_blocks_nothing() {
    let [one, two] = [BurstEngine::start(1).await, BurstEngine::start(2).await];
    let mut deployment = TestDeployment::engines(&[]).await;
    list_workers(&deployment, &[&one]);
    let xds = FreePort::find().unwrap().release();
    let mut own = STANDALONE.warmroute();
    own["envoy"] = json!({"xds": {"address": format!("127.0.0.1:{xds}")}});
    deployment.start_router(&own).await.unwrap();
    let mut client = EndpointDiscoveryServiceClient::connect(format!("http://127.0.0.1:{xds}"))
        .await
        .unwrap();
    let (request_tx, request_rx) = mpsc::channel(8);
    let discovery_request = |nonce: &str, refusal: Option<&str>| DiscoveryRequest {
        node: Some(Node {
            id: "contrary".to_owned(),
            ..Node::default()
        }),
        resource_names: vec!["workers".to_owned()],
        response_nonce: nonce.to_owned(),
        error_detail: refusal.map(|message| Status {
            message: message.to_owned(),
            ..Status::default()
        }),
        ..DiscoveryRequest::default()
    };
    request_tx.send(discovery_request("", None)).await.unwrap();
    let mut answers = client
        .stream_endpoints(ReceiverStream::new(request_rx))
        .await
        .unwrap()
        .into_inner();
    let first = answers.message().await.unwrap().unwrap();
    assert_eq!(first.resources.len(), 1);
    request_tx
        .send(discovery_request(&first.nonce, Some("rejected")))
        .await
        .unwrap();
    let shown =
        async || deployment.debug_page("envoys").await.unwrap()[0]["rejection"] == "rejected";
    assert!(until(PATIENCE, shown).await);
    let unknown_type = DiscoveryRequest {
        type_url: "type.googleapis.com/nonsense".to_owned(),
        ..discovery_request("77", None)
    };
    request_tx.send(unknown_type).await.unwrap();
    // The client does not acknowledge the update, and the new worker is used nevertheless.
    list_workers(&deployment, &[&one, &two]);
    let second = answers.message().await.unwrap().unwrap();
    assert_ne!(
        (&first.version_info, &first.nonce),
        (&second.version_info, &second.nonce)
    );
    deployment.wait_metric("workers", &[], 2.0).await;
    drop(answers);
    drop(request_tx);
    let gone = async || deployment.debug_page("envoys").await.unwrap() == json!([]);
    assert!(until(PATIENCE, gone).await);
}
