//! The conformance tests of the Gateway API inference extension bring an endpoint picker with them, as a fixture. Here warmroute
//! stands in its place: the real program with that one's flags and nothing else, an API server that knows pods and
//! InferencePools only, and a real Envoy that speaks as a gateway does.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "tls/clients.rs"]
mod clients;
#[path = "tls/pki.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod pki;
#[path = "kubernetes/server.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod server;
#[path = "conformance/site.rs"]
mod site;

use std::time::Instant;

use rustix::process::Signal;
use serde_json::json;
use tonic_health::pb::health_check_response::ServingStatus::{NotServing, Serving};

use server::ApiServer;
use site::{Backend, Gateway, POOL, PROBED, Picker, SOON, pod, pool};
use support::ports::{FreePort, until};

/// Whether kubelets with the fixture's probes would call it ready.
async fn is_ready(picker: &Picker) -> bool {
    picker.health(PROBED).await == Some(Serving)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_fixtures_flags_alone_serve_the_pool() {
    let server = ApiServer::start().await;
    let picker = Picker::start(&server, &[]);
    assert!(
        until(SOON, async || picker.health("liveness").await
            == Some(Serving))
        .await,
        "{}",
        picker.log()
    );
    assert_eq!(
        picker.health(PROBED).await,
        Some(NotServing),
        "there is no pool"
    );

    // Of the pods one is not ready, one belongs to nobody.
    let (first, second) = (
        FreePort::find().unwrap().release(),
        FreePort::find().unwrap().release(),
    );
    let all = [[127, 0, 0, 1], [127, 0, 0, 2], [127, 0, 0, 3]].map(std::net::Ipv4Addr::from);
    let mut backends = Vec::new();
    for address in all {
        for port in [first, second] {
            backends.push(Backend::start((address, port).into()).await);
        }
    }
    server.put("pods", pod("backend-1", all[0], "primary", false));
    server.put("pods", pod("backend-2", all[1], "primary", false));
    server.put("pods", pod("stranger", all[2], "secondary", true));
    server.put("inferencepools", pool(&[first]));
    assert!(
        until(SOON, async || is_ready(&picker).await).await,
        "the pool is known: {}",
        picker.log()
    );
    let gateway = Gateway::start(picker.grpc, &backends).await;
    assert_eq!(gateway.ask(None).await.status, 503, "and has no ready pod");
    server.put("pods", pod("backend-1", all[0], "primary", true));
    server.put("pods", pod("backend-2", all[1], "primary", true));
    assert!(
        until(SOON, async || gateway.ask(None).await.status == 200).await,
        "{}",
        picker.log()
    );

    let at = |address: usize, port: u16| format!("{}:{port}", all[address]);
    gateway.sends(Some(&at(0, first)), &[&at(0, first)]).await;
    gateway
        .sends(Some(&all[1].to_string()), &[&at(1, first)])
        .await;
    gateway
        .sends(
            Some(&format!("{}, {}", at(2, first), at(1, first))),
            &[&at(1, first)],
        )
        .await;
    let members = [&*at(0, first), &*at(1, first)];
    gateway.sends(Some("192.0.2.9"), &members).await;
    gateway.sends(None, &members).await;

    // Data-parallel ranks: several ports, each an endpoint.
    server.change("inferencepools", POOL, |pool| {
        pool["spec"]["targetPorts"] = json!([{"number": first}, {"number": second}])
    });
    assert!(
        until(SOON, async || gateway
            .ask(Some(&at(1, second)))
            .await
            .served
            == at(1, second))
        .await
    );
    for endpoint in [at(0, first), at(0, second), at(1, first), at(1, second)] {
        gateway.sends(Some(&endpoint), &[&endpoint]).await;
    }

    // Without the pool nobody may be chosen.
    server.delete("inferencepools", POOL);
    assert!(
        until(SOON, async || gateway.ask(None).await.status == 503).await,
        "{}",
        picker.log()
    );
    server.put("inferencepools", pool(&[second]));
    assert!(
        until(SOON, async || gateway.ask(None).await.status == 200).await,
        "{}",
        picker.log()
    );
    gateway.sends(None, &[&at(0, second), &at(1, second)]).await;

    assert_eq!(
        server.violations(),
        [""; 0],
        "it asks for what the fixture's Role has, and for nothing else"
    );
    let log = picker.log();
    assert!(
        log.lines()
            .all(|line| serde_json::from_str::<serde_json::Value>(line).is_ok()),
        "{log}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ext_proc_speaks_tls_with_a_certificate_of_its_own_and_h2_unless_it_is_told_otherwise() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool(&[80]));
    server.put(
        "pods",
        pod("backend", [192, 0, 2, 1].into(), "primary", true),
    );
    let picker = Picker::start(&server, &[]);
    assert!(
        until(SOON, async || is_ready(&picker).await).await,
        "{}",
        picker.log()
    );
    let (protocol, certificates) = picker.handshake("h2").await.unwrap();
    assert_eq!((protocol.as_deref(), certificates), (Some(&b"h2"[..]), 1));
    let http = picker.handshake("http/1.1").await;
    assert!(
        http.as_ref()
            .map_or(true, |(protocol, _)| protocol.is_none()),
        "{http:?}"
    );
    let plain = Picker::start(&server, &["--secure-serving=false"]);
    assert!(
        until(SOON, async || is_ready(&plain).await).await,
        "{}",
        plain.log()
    );
    assert!(plain.handshake("h2").await.is_err());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_say_no_from_the_signal_to_stop_and_it_ends_within_the_fixtures_grace() {
    let server = ApiServer::start().await;
    server.put("inferencepools", pool(&[80]));
    server.put(
        "pods",
        pod("backend", [192, 0, 2, 1].into(), "primary", true),
    );
    let picker = Picker::start(
        &server,
        &[
            "--drain-timeout",
            "3s",
            "--health-checking",
            "--enable-cert-reload",
        ],
    );
    assert!(
        until(SOON, async || is_ready(&picker).await).await,
        "{}",
        picker.log()
    );
    // There is no file to be read again, and no reason to end.
    picker.child.signal(Signal::HUP);
    assert!(
        until(SOON, async || picker.log().contains("SIGHUP")).await,
        "{}",
        picker.log()
    );
    let told = Instant::now();
    picker.child.terminate();
    assert!(
        until(SOON, async || picker.health(PROBED).await
            == Some(NotServing))
        .await,
        "{}",
        picker.log()
    );
    assert_eq!(picker.health("liveness").await, Some(Serving));
    assert!(
        until(SOON, async || !picker.child.is_running()).await,
        "{}",
        picker.log()
    );
    assert!(
        told.elapsed() >= std::time::Duration::from_secs(3),
        "{:?}",
        told.elapsed()
    );
    assert!(
        picker.child.wait_exit(Instant::now()).unwrap().success(),
        "{}",
        picker.log()
    );
}
