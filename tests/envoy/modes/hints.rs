//! Gateway metadata and replies: subset hints, fallback endpoints, and IPv6 addresses.

use serde_json::{Value, json};

use crate::modes::gateway::{ConnectionManager, ManagerChange, ModeGateway};
use crate::modes::uploads::EnvoyBodyMode;
use crate::modes::worker::RecordingWorker;
use crate::routing::bed::{RoutedAnswer, chat, engine, essay, stream, text};

fn hinted(hint: Value, duplex: bool) -> ManagerChange {
    Box::new(move |manager: &mut ConnectionManager| {
        if duplex {
            manager.duplex();
        }
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
async fn subset_hint_of_envoy_is_followed() {
    let workers = [
        RecordingWorker::start().await,
        RecordingWorker::start().await,
        RecordingWorker::start().await,
    ];
    let hints = hints([0, 1, 2].map(|at| workers[at].address.to_string()));
    let both = hints
        .iter()
        .flat_map(|(hint, _)| [hinted(hint.clone(), false), hinted(hint.clone(), true)]);
    let changes: Vec<ManagerChange> = both.collect();
    let specs: Vec<_> = workers
        .iter()
        .zip(1..)
        .map(|(worker, id)| worker.engine(id))
        .collect();
    let gateway = ModeGateway::start(&specs, json!({}), &changes).await;
    for listener in 0..changes.len() {
        let (hint, allowed) = &hints[listener / 2];
        let mut served = std::collections::BTreeSet::new();
        for turn in 0..6 {
            let get = gateway.http.get(gateway.at(listener, "/v1/models"));
            let question = chat(&format!("{turn} {}", essay(listener)));
            let post = gateway.chat_to(listener, &question);
            for request in [get, post] {
                let answer = RoutedAnswer::send(request).await;
                if allowed.is_empty() {
                    assert_eq!(answer.error(503).0, "no_eligible_worker", "{hint}");
                    assert!(
                        answer.retry_after() > 0 && !answer.header("x-request-id").is_empty(),
                        "{answer:?}"
                    );
                    continue;
                }
                let chosen = answer.chosen();
                assert!(allowed.contains(&chosen), "{hint}: {answer:?}");
                let worker = &workers[chosen as usize - 1];
                assert_eq!(
                    answer.json()["worker"],
                    worker.address.to_string(),
                    "{hint}"
                );
                served.insert(chosen);
            }
        }
        assert!(allowed.is_empty() || !served.is_empty());
    }
    gateway.wait_idle().await;
}

/// Returns hints with the ids of the workers that they allow.
fn hints(workers: [String; 3]) -> [(Value, Vec<u64>); 11] {
    let [one, two, three] = workers;
    [
        (json!([two]), vec![2]),
        (json!(two), vec![2]),
        (json!([one, three]), vec![1, 3]),
        (json!(format!("{one},{three}")), vec![1, 3]),
        (json!(["127.0.0.1"]), vec![1, 2, 3]),
        (json!("127.0.0.1"), vec![1, 2, 3]),
        (json!(["127.0.0.9:1", three]), vec![3]),
        (json!([]), vec![]),
        (json!(""), vec![]),
        (json!(["127.0.0.9:1"]), vec![]),
        (json!("127.0.0.1:1"), vec![]),
    ]
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
            .metric("served_endpoint_mismatches_total", &[])
            .await,
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
        hinted(json!(["::1"]), false),
    ];
    let specs = [workers[0].engine(1), workers[1].engine(2)];
    let gateway = ModeGateway::start(&specs, json!({}), &changes).await;
    for listener in 0..changes.len() {
        for turn in 0..10 {
            let question = stream(&format!("{turn} {}", essay(listener)), 1);
            let request = gateway.chat_to(listener, &question);
            let answer = RoutedAnswer::send(request).await;
            assert_eq!(
                (answer.status.as_u16(), answer.mode()),
                (200, "exact"),
                "{answer:?}"
            );
            let worker = &workers[answer.chosen() as usize - 1];
            assert_eq!(answer.json()["worker"], worker.address.to_string());
        }
    }
    gateway.wait_idle().await;
}
