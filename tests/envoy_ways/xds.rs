//! warmroute as the xDS server: every variant of the protocol with a real Envoy, several Envoys, restarts of either side, and
//! a caller that is no Envoy and says what no Envoy would.

use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::service::discovery::v3::DiscoveryRequest;
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_client::EndpointDiscoveryServiceClient;
use envoy_types::pb::google::rpc::Status;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;

use crate::bursts::Bursts;
use crate::deployment::{Deployment, PATIENCE, chat, essay, fast};
use crate::support::child::Child;
use crate::support::envoy::{self, Standalone};
use crate::support::ports::{FreePort, until};
use crate::ways::{STANDALONE, XDS};

/// Where the endpoints of a cluster of the shipped file come from.
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

/// The shipped file with another variant of the protocol.
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

/// The endpoints of a cluster as an Envoy has them: the address, and the health that it was told.
async fn endpoints(
    deployment: &Deployment,
    envoy: &Standalone<'_>,
    cluster: &str,
) -> BTreeMap<String, String> {
    let response = deployment
        .http
        .get(envoy.admin_url("/clusters?format=json"))
        .send()
        .await
        .unwrap();
    let page: Value = response.json().await.unwrap();
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

async fn has(deployment: &Deployment, envoy: &Standalone<'_>, expected: &[(SocketAddr, &str)]) {
    let expected: BTreeMap<String, String> = expected
        .iter()
        .map(|(address, health)| (address.to_string(), (*health).to_owned()))
        .collect();
    let is_there = async || endpoints(deployment, envoy, "workers").await == expected;
    let found = until(PATIENCE, is_there).await;
    assert!(
        found,
        "{:?}, not {expected:?}",
        endpoints(deployment, envoy, "workers").await
    );
}

fn entries(workers: &[&Bursts]) -> Value {
    workers.iter().map(|worker| worker.entry()).collect()
}

/// Workers come, drain, go, and come back, and Envoy has it each time.
async fn follows(kind: &str, aggregated: bool) {
    let [one, two, three] = [
        Bursts::start(1).await,
        Bursts::start(2).await,
        Bursts::start(3).await,
    ];
    let mut deployment = Deployment::engines(&[]).await;
    deployment
        .write_worker_entries(&entries(&[&one, &two]))
        .unwrap();
    deployment.start_router(&XDS.warmroute()).await.unwrap();
    let config = variant(&XDS.envoy(&deployment, &[], "30s"), kind, aggregated);
    deployment.start_envoy(&config).await.unwrap();
    let envoy = deployment.standalone();
    has(
        &deployment,
        &envoy,
        &[(one.address, "HEALTHY"), (two.address, "HEALTHY")],
    )
    .await;

    deployment
        .write_worker_entries(&entries(&[&one, &two, &three]))
        .unwrap();
    has(
        &deployment,
        &envoy,
        &[
            (one.address, "HEALTHY"),
            (two.address, "HEALTHY"),
            (three.address, "HEALTHY"),
        ],
    )
    .await;

    let mut drains = entries(&[&one, &three]);
    drains[0]["draining"] = json!(true);
    deployment.write_worker_entries(&drains).unwrap();
    has(
        &deployment,
        &envoy,
        &[(one.address, "DRAINING"), (three.address, "HEALTHY")],
    )
    .await;
    [&one, &three]
        .into_iter()
        .for_each(|worker| worker.go.add_permits(1_000));
    for number in 0..10 {
        let response = deployment
            .post("/v1/chat/completions", &chat(&essay(number)))
            .await;
        assert_eq!(
            (
                response.status().as_u16(),
                response.headers()["x-engine-id"].to_str().unwrap()
            ),
            (200, "3")
        );
    }

    let listeners = deployment.debug("envoys").await.unwrap();
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
        page.sum("xds_updates_total", &[("outcome", "accepted")]) >= 3.0,
        "{}",
        page.text()
    );
    assert_eq!(
        page.sum("xds_updates_total", &[("outcome", "refused")]),
        0.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_of_the_world_alone() {
    follows("GRPC", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn state_of_the_world_aggregated() {
    follows("GRPC", true).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delta_alone() {
    follows("DELTA_GRPC", false).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn delta_aggregated() {
    follows("DELTA_GRPC", true).await;
}

/// Another Envoy of the same deployment, at ports of its own.
async fn another(deployment: &Deployment, config: &str) -> (Child, u16, u16) {
    let (port, admin_port) = (FreePort::find().unwrap(), FreePort::find().unwrap());
    let (port, admin_port) = (port.release(), admin_port.release());
    let own = deployment.standalone();
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

/// A newcomer is chosen when every Envoy has it, and not before: no request finds an Envoy that does not know its worker.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_envoys_at_an_address_of_its_own_have_a_newcomer_before_it_is_chosen() {
    let mut deployment = Deployment::engines(&[fast(1), fast(2), fast(3)]).await;
    let all: Vec<Value> = deployment
        .engines
        .iter()
        .map(|engine| engine.entry())
        .collect();
    deployment.write_worker_entries(&json!(all[..1])).unwrap();
    let xds = FreePort::find().unwrap().release();
    let mut own = XDS.warmroute();
    own["envoy"]["xds"] = json!({"listen": format!("127.0.0.1:{xds}")});
    deployment.start_router(&own).await.unwrap();
    let shipped = XDS.envoy(&deployment, &[], "30s");
    let (before, after) = shipped.split_once("- name: xds").unwrap();
    let pipe = format!(
        "pipe: {{path: {}}}",
        deployment.standalone().ext_proc_socket().display()
    );
    assert_eq!(after.matches(&pipe).count(), 1);
    let tcp = format!("socket_address: {{address: 127.0.0.1, port_value: {xds}}}");
    let config = format!("{before}- name: xds{}", after.replace(&pipe, &tcp));
    deployment.start_envoy(&config).await.unwrap();
    let (_second, port, _) = another(&deployment, &config).await;
    let listen = async || {
        deployment
            .debug("envoys")
            .await
            .unwrap()
            .as_array()
            .unwrap()
            .len()
            == 2
    };
    assert!(until(PATIENCE, listen).await, "{}", deployment.router_log());
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
            let body = json!({"model": crate::support::stack::MODEL, "prompt": essay(number), "max_tokens": 2});
            for url in [url.clone(), deployment.url("/v1/completions")] {
                let answer = deployment.http.post(url).json(&body).send().await.unwrap();
                assert_eq!(answer.status(), 200);
                let header = |name: &str| answer.headers()[name].to_str().unwrap().to_owned();
                // Nobody is sent where Envoy knows nobody: it would have chosen another.
                assert_eq!(header("x-worker-instance-id"), header("x-engine-id"));
                served.insert(header("x-engine-id"));
            }
            // Until the list is read, those serve who were in the last one.
            if !served.is_subset(&expected) {
                served.clear();
            }
            number > known * 1_000 + 50 && served == expected
        });
        assert!(every.await, "{served:?}");
    }
}

/// Envoy goes on with the workers that it has, and hears of others when warmroute is back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_of_either_side_loses_no_worker() {
    let [one, two] = [Bursts::start(1).await, Bursts::start(2).await];
    let mut deployment = Deployment::engines(&[]).await;
    deployment.write_worker_entries(&entries(&[&one])).unwrap();
    XDS.serve(&mut deployment, &[]).await;
    let config = XDS.envoy(&deployment, &[], "30s");
    let healthy = |worker: &Bursts| (worker.address, "HEALTHY");
    has(&deployment, &deployment.standalone(), &[healthy(&one)]).await;
    deployment.kill9_router();
    one.go.add_permits(1_000);
    let answer = deployment
        .post("/v1/chat/completions", &chat(&essay(1)))
        .await;
    assert_eq!(answer.status(), 200);
    deployment
        .write_worker_entries(&entries(&[&one, &two]))
        .unwrap();
    deployment.start_router(&XDS.warmroute()).await.unwrap();
    has(
        &deployment,
        &deployment.standalone(),
        &[healthy(&one), healthy(&two)],
    )
    .await;
    deployment.start_envoy(&config).await.unwrap();
    has(
        &deployment,
        &deployment.standalone(),
        &[healthy(&one), healthy(&two)],
    )
    .await;
    let alone = async || {
        deployment
            .debug("envoys")
            .await
            .unwrap()
            .as_array()
            .unwrap()
            .len()
            == 1
    };
    assert!(until(PATIENCE, alone).await, "the old one has left");
}

/// A cluster for each role, in one Envoy; and one that nobody knows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clusters_have_the_workers_that_they_are_configured_to_have() {
    let [one, two] = [Bursts::start(1).await, Bursts::start(2).await];
    let mut deployment = Deployment::engines(&[]).await;
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
    for name in ["prefill", "nobody"] {
        let mut cluster = clusters[0].clone();
        cluster["name"] = json!(name);
        cluster["eds_cluster_config"]["eds_config"]["initial_fetch_timeout"] = json!("1s");
        clusters.push(cluster);
    }
    deployment.start_envoy(&config.to_string()).await.unwrap();
    let envoy = deployment.standalone();
    has(
        &deployment,
        &envoy,
        &[(one.address, "HEALTHY"), (two.address, "HEALTHY")],
    )
    .await;
    let found = endpoints(&deployment, &envoy, "prefill").await;
    assert_eq!(found.keys().collect::<Vec<_>>(), [&two.address.to_string()]);
    assert!(endpoints(&deployment, &envoy, "nobody").await.is_empty());
    let listeners = deployment.debug("envoys").await.unwrap();
    let unknown = listeners
        .as_array()
        .unwrap()
        .iter()
        .find(|listener| listener["unknown"] == json!(["nobody"]));
    assert!(unknown.is_some(), "{listeners}");
    assert!(
        deployment
            .router_log()
            .contains("clusters that we do not know"),
        "{}",
        deployment.router_log()
    );
}

/// What no Envoy does: refusing what is right, asking for nonsense, leaving in the middle.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_refuses_is_shown_and_holds_nobody_up() {
    let [one, two] = [Bursts::start(1).await, Bursts::start(2).await];
    let mut deployment = Deployment::engines(&[]).await;
    deployment.write_worker_entries(&entries(&[&one])).unwrap();
    let xds = FreePort::find().unwrap().release();
    let mut own = STANDALONE.warmroute();
    own["envoy"] = json!({"xds": {"listen": format!("127.0.0.1:{xds}")}});
    deployment.start_router(&own).await.unwrap();
    let mut client = EndpointDiscoveryServiceClient::connect(format!("http://127.0.0.1:{xds}"))
        .await
        .unwrap();
    let (say, said) = mpsc::channel(8);
    let ask = |nonce: &str, refusal: Option<&str>| DiscoveryRequest {
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
    say.send(ask("", None)).await.unwrap();
    let mut answers = client
        .stream_endpoints(ReceiverStream::new(said))
        .await
        .unwrap()
        .into_inner();
    let first = answers.message().await.unwrap().unwrap();
    assert_eq!(first.resources.len(), 1);
    say.send(ask(&first.nonce, Some("I will not")))
        .await
        .unwrap();
    let shown = async || deployment.debug("envoys").await.unwrap()[0]["refused"] == "I will not";
    assert!(until(PATIENCE, shown).await);
    let strange = DiscoveryRequest {
        type_url: "type.googleapis.com/nonsense".to_owned(),
        ..ask("77", None)
    };
    say.send(strange).await.unwrap();
    // It was told, does not say a word, and the newcomer is used all the same.
    deployment
        .write_worker_entries(&entries(&[&one, &two]))
        .unwrap();
    let second = answers.message().await.unwrap().unwrap();
    assert_ne!(
        (&first.version_info, &first.nonce),
        (&second.version_info, &second.nonce)
    );
    deployment
        .metrics_show("both are used", |page| page.sum("workers", &[]) == 2.0)
        .await;
    drop(answers);
    drop(say);
    let gone = async || deployment.debug("envoys").await.unwrap() == json!([]);
    assert!(until(PATIENCE, gone).await);
}
