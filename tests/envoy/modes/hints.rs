//! Fallback endpoints, and IPv6 addresses in endpoints and subset hints.

use serde_json::{Value, json};

use crate::modes::gateway::{ConnectionManager, ManagerChange, ModeGateway};
use crate::modes::uploads::EnvoyBodyMode;
use crate::modes::worker::RecordingWorker;
use crate::routing::bed::{RoutedAnswer, engine, essay, stream, text};

fn hinted(hint: Value) -> ManagerChange {
    Box::new(move |manager: &mut ConnectionManager| {
        manager.filter()["metadata_options"]["forwarding_namespaces"]["untyped"] =
            json!(["envoy.lb", "envoy.lb.subset_hint"]);
        manager.first(json!({
            "name": "hint",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config",
                "metadata": [{
                    "metadata_namespace": "envoy.lb.subset_hint",
                    "value": {"x-gateway-destination-endpoint-subset": hint},
                }],
            },
        }));
    })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dead_worker_falls_back_and_booking_moves() {
    let more = json!({
        "gateway": {"fallback_endpoints": 2},
        "routing": {"outlier_detection": {"consecutive_failures": 0}},
    });
    let changes: Vec<ManagerChange> = vec![Box::new(|_| {}), EnvoyBodyMode::Duplex.change()];
    let mut gateway = ModeGateway::start(&[engine(1), engine(2), engine(3)], more, &changes).await;
    let prompts = [text(&essay(1)), text(&essay(2))];
    for prompt in &prompts {
        gateway.warm(1, prompt).await;
    }
    gateway.kill(1);
    gateway.set_first_tokens(2, false).await;
    gateway.set_first_tokens(3, false).await;
    for (listener, prompt) in prompts.iter().enumerate() {
        let mut prompt = prompt.clone();
        prompt["stream"] = json!(true);
        let running = gateway
            .http
            .post(gateway.at(listener, "/v1/completions"))
            .json(&prompt)
            .send()
            .await
            .unwrap();
        let header = |name: &str| running.headers()[name].to_str().unwrap().to_owned();
        let served: u64 = header("x-engine-id").parse().unwrap();
        assert_ne!(served, 1);
        let named = header("x-worker-instance-id");
        assert_eq!(
            (running.status().as_u16(), named),
            (200, served.to_string()),
            "{running:?}"
        );
        gateway
            .wait_load(served, "active_requests", |requests| requests == 1)
            .await;
        assert_eq!(gateway.load(1, "active_requests").await, 0);
        drop(running);
        gateway.wait_idle().await;
    }
    assert_eq!(
        gateway
            .metrics()
            .await
            .sum("served_endpoint_mismatches_total", &[]),
        2.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn ipv6_workers_are_routed_exactly() {
    let workers = [
        RecordingWorker::at("[::1]:0").await,
        RecordingWorker::at("[::1]:0").await,
    ];
    let changes: Vec<ManagerChange> = vec![
        Box::new(|_| {}),
        EnvoyBodyMode::Duplex.change(),
        hinted(json!(["::1"])),
    ];
    let specs = [workers[0].engine(1), workers[1].engine(2)];
    let gateway = ModeGateway::start(&specs, json!({}), &changes).await;
    for listener in 0..changes.len() {
        for turn in 0..10 {
            let question = stream(&format!("{turn} {}", essay(listener)), 1);
            let request = gateway
                .http
                .post(gateway.at(listener, "/v1/chat/completions"))
                .json(&question);
            let answer = RoutedAnswer::of(request).await;
            assert_eq!(
                (answer.status.as_u16(), answer.mode()),
                (200, "exact"),
                "{answer:?}"
            );
            let address = workers[usize::try_from(answer.chosen()).unwrap() - 1]
                .address
                .to_string();
            assert_eq!(answer.json()["worker"], json!(address));
        }
    }
    gateway.wait_idle().await;
}
