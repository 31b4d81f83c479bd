//! warmroute as the endpoint picker of the conformance tests of the Gateway API inference
//! extension. The real program runs with only the flags of that fixture, with an API server that
//! knows only pods and InferencePools, and a real Envoy configured as a gateway.

mod site;

use std::net::Ipv4Addr;
use std::time::Instant;

use rustix::process::Signal;
use serde_json::json;
use tonic_health::pb::health_check_response::ServingStatus::{NotServing, Serving};
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::support::api_server::ApiServer;
use site::{ConformanceBackend, ConformanceGateway, EndpointPicker, POOL, PROBED, pod, pool};

/// Waits until the fixture's probes would consider the endpoint picker ready.
async fn wait_ready(picker: &EndpointPicker) {
    let is_ready = async || picker.health(PROBED).await == Some(Serving);
    assert!(until(PATIENCE, is_ready).await, "{}", picker.log());
}

/// Waits until a request gets this status.
async fn wait_status(gateway: &ConformanceGateway, picker: &EndpointPicker, status: u16) {
    let is_reached = async || gateway.query(None).await.status == status;
    assert!(until(PATIENCE, is_reached).await, "{}", picker.log());
}

/// Starts a backend for each address and port.
async fn start_backends(addresses: [Ipv4Addr; 3], ports: [u16; 2]) -> Vec<ConformanceBackend> {
    let mut backends = Vec::new();
    for address in addresses {
        for port in ports {
            backends.push(ConformanceBackend::start((address, port).into()).await);
        }
    }
    backends
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn conformance_flags_alone_serve_the_pool() {
    let server = ApiServer::start().await;
    let picker = EndpointPicker::start(&server, &[]);
    let alive = async || picker.health("liveness").await == Some(Serving);
    assert!(until(PATIENCE, alive).await, "{}", picker.log());
    assert_eq!(
        picker.health(PROBED).await,
        Some(NotServing),
        "not serving without a pool"
    );

    // Two pods are not ready, and one is not selected by the pool.
    let first = FreePort::find().unwrap().release();
    let second = FreePort::find().unwrap().release();
    let all = [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 3]].map(Ipv4Addr::from);
    let backends = start_backends(all, [first, second]).await;
    server.put("pods", pod("backend-1", all[0], "primary", false));
    server.put("pods", pod("backend-2", all[1], "primary", false));
    server.put("pods", pod("stranger", all[2], "secondary", true));
    server.put("inferencepools", pool(&[first]));
    wait_ready(&picker).await;
    let gateway = ConformanceGateway::start(picker.grpc, &backends).await;
    assert_eq!(
        gateway.query(None).await.status,
        503,
        "the pool has no ready pod"
    );
    server.put("pods", pod("backend-1", all[0], "primary", true));
    server.put("pods", pod("backend-2", all[1], "primary", true));
    wait_status(&gateway, &picker, 200).await;

    let at = |address: usize, port: u16| format!("{}:{port}", all[address]);
    let endpoints = [at(0, first), at(1, first), at(2, first)];
    assert_subsets_are_followed(&gateway, &endpoints).await;

    // Data-parallel ranks: the pool has several ports, and each is an endpoint.
    server.change("inferencepools", POOL, |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": first}, {"number": second}])
    });
    let added = at(1, second);
    let is_served = async || gateway.query(Some(&added)).await.served == added;
    assert!(until(PATIENCE, is_served).await);
    for endpoint in [at(0, first), at(0, second), at(1, first), at(1, second)] {
        gateway.probe(Some(&endpoint), &[&endpoint]).await;
    }

    assert_pool_is_followed(&server, &picker, &gateway, second).await;
    gateway.probe(None, &[&at(0, second), &at(1, second)]).await;

    assert_eq!(
        server.violations(),
        [""; 0],
        "requests beyond the Role of the fixture"
    );
    let log = picker.log();
    assert!(
        log.lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{log}"
    );
}

/// Asserts that no endpoint is chosen after the deletion of the pool, and that a new pool with
/// another port is used.
async fn assert_pool_is_followed(
    server: &ApiServer,
    picker: &EndpointPicker,
    gateway: &ConformanceGateway,
    port: u16,
) {
    server.delete("inferencepools", POOL);
    wait_status(gateway, picker, 503).await;
    server.put("inferencepools", pool(&[port]));
    wait_status(gateway, picker, 200).await;
}

/// Asserts that requests for subsets of the two pool members reach only these. The third endpoint
/// is not a member.
async fn assert_subsets_are_followed(gateway: &ConformanceGateway, endpoints: &[String; 3]) {
    let [one, two, non_member] = endpoints;
    gateway.probe(Some(one), &[one]).await;
    let address = two.split(':').next();
    gateway.probe(address, &[two]).await;
    gateway
        .probe(Some(&format!("{non_member}, {two}")), &[two])
        .await;
    let members = [&**one, &**two];
    gateway.probe(Some("192.0.2.9"), &members).await;
    gateway.probe(None, &members).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn ext_proc_serves_self_signed_h2_by_default() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool(&[80]));
    server.put(
        "pods",
        pod("backend", [192, 0, 2, 1].into(), "primary", true),
    );
    let picker = EndpointPicker::start(&server, &[]);
    wait_ready(&picker).await;
    let (protocol, certificates) = picker.handshake("h2").await.unwrap();
    assert_eq!((protocol.as_deref(), certificates), (Some(&b"h2"[..]), 1));
    let http = picker.handshake("http/1.1").await;
    assert!(
        http.as_ref()
            .map_or(true, |(protocol, _)| protocol.is_none()),
        "{http:?}"
    );
    let plain = EndpointPicker::start(&server, &["--secure-serving=false"]);
    wait_ready(&plain).await;
    assert!(plain.handshake("h2").await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn shutdown_fails_probes_and_ends_within_grace() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool(&[80]));
    server.put(
        "pods",
        pod("backend", [192, 0, 2, 1].into(), "primary", true),
    );
    let picker = EndpointPicker::start(
        &server,
        &[
            "--drain-timeout",
            "3s",
            "--health-checking",
            "--enable-cert-reload",
        ],
    );
    wait_ready(&picker).await;
    // There is no configuration file to reload, and the process must not exit.
    picker.child.signal(Signal::HUP);
    assert!(
        until(PATIENCE, async || picker.log().contains("SIGHUP")).await,
        "{}",
        picker.log()
    );
    let signalled = Instant::now();
    picker.child.terminate();
    let not_serving = async || picker.health(PROBED).await == Some(NotServing);
    assert!(until(PATIENCE, not_serving).await, "{}", picker.log());
    assert_eq!(picker.health("liveness").await, Some(Serving));
    assert!(
        until(PATIENCE, async || !picker.child.is_running()).await,
        "{}",
        picker.log()
    );
    assert!(
        signalled.elapsed() >= std::time::Duration::from_secs(3),
        "{:?}",
        signalled.elapsed()
    );
    assert!(
        picker.child.wait_exit(Instant::now()).unwrap().success(),
        "{}",
        picker.log()
    );
}
