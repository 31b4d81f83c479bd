//! The shipped filter that only detects the first token. Both ext_proc filters use the same server.
//! Responses stay complete and undelayed even if the filter fails, and warmroute detects the end of
//! each prefill.

use std::ops::Deref;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use reqwest::{RequestBuilder, StatusCode, Version};
use serde_json::json;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::shipped::bursts::{BYTES, BurstEngine, EVENTS, PACED, piece, whole};
use crate::support::deployment::{TestDeployment, chat, essay, with_response_headers};

/// A deployment with workers whose responses are known.
struct ProbeBed {
    deployment: TestDeployment,
    workers: Vec<BurstEngine>,
}

impl Deref for ProbeBed {
    type Target = TestDeployment;

    fn deref(&self) -> &TestDeployment {
        &self.deployment
    }
}

impl ProbeBed {
    async fn start(change: impl FnOnce(&str) -> String) -> Self {
        let workers = BurstEngine::start_all(2).await;
        let mut deployment = TestDeployment::engines(&[]).await;
        deployment
            .write_worker_entries(&BurstEngine::entries(&workers))
            .unwrap();
        deployment.serve(json!({}), change).await;
        Self {
            deployment,
            workers,
        }
    }

    fn request(&self, client: &reqwest::Client, question: usize) -> RequestBuilder {
        client
            .post(self.url("/v1/chat/completions"))
            .json(&chat(&essay(question)))
    }

    /// Returns a request whose response events are sent one by one.
    fn paced(&self, events: usize) -> RequestBuilder {
        self.request(&self.http, 1)
            .header(EVENTS, events)
            .header(PACED, 1)
    }

    /// Lets each worker send one more event. Only one worker has a request.
    fn let_one_go(&self) {
        BurstEngine::permit(&self.workers, 1);
    }

    /// Removes the permits that workers without a request have not used.
    fn hold_all(&self) {
        self.workers.iter().for_each(BurstEngine::hold);
    }

    fn open(&self) -> usize {
        self.workers
            .iter()
            .map(|worker| worker.open.load(Ordering::SeqCst))
            .sum()
    }

    async fn probes(&self, outcome: &str) -> f64 {
        self.metric("first_token_streams_total", &[("outcome", outcome)])
            .await
    }

    async fn first_tokens(&self) -> f64 {
        self.metric("time_to_first_token_seconds_count", &[]).await
    }
}

/// Lengthens the timeout of the probe filter, so that any delay by the filter becomes visible.
fn patient_probe(config: &str) -> String {
    assert_eq!(config.matches("message_timeout: 0.3s").count(), 1);
    config.replace("message_timeout: 0.3s", "message_timeout: 100s")
}

fn clients() -> [(reqwest::Client, Version); 2] {
    let client = || warmroute_runtime::tls::http_client_builder().timeout(PATIENCE);
    let http1 = client().http1_only().build().unwrap();
    let http2 = client().http2_prior_knowledge().build().unwrap();
    [(http1, Version::HTTP_11), (http2, Version::HTTP_2)]
}

/// Sends all requests, eight at a time. Returns the number of exact responses.
async fn exact(requests: impl Iterator<Item = RequestBuilder>, expected: &str) -> usize {
    let answers = futures_util::stream::iter(requests).map(async |request| {
        let response = request.send().await.ok()?;
        (response.status() == StatusCode::OK).then_some(response.text().await.ok()?)
    });
    let exact = async |exact, answer: Option<String>| {
        exact + usize::from(answer.as_deref() == Some(expected))
    };
    answers.buffer_unordered(8).fold(0, exact).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn bursts_arrive_unchanged_and_first_tokens_are_detected() {
    let bed = ProbeBed::start(patient_probe).await;
    let mut sent = 0;
    for (client, version) in &clients() {
        for (events, times) in [(1, 100), (19, 100), (999, 100), (19_999, 1)] {
            let requests = (0..times).map(|at| {
                bed.request(client, at % 7)
                    .version(*version)
                    .header(EVENTS, events)
            });
            assert_eq!(
                exact(requests, &whole(events)).await,
                times,
                "{events} events over {version:?}"
            );
            sent += times;
        }
        let response = bed
            .request(client, 1)
            .version(*version)
            .header(BYTES, 454)
            .send()
            .await
            .unwrap();
        assert_eq!(
            response.headers()["content-length"],
            "454",
            "over {version:?}"
        );
        sent += 1;
        for bytes in [454, 100_000] {
            let requests = (0..20).map(|at| {
                bed.request(client, at % 7)
                    .version(*version)
                    .header(BYTES, bytes)
            });
            assert_eq!(
                exact(requests, &piece(bytes)).await,
                20,
                "{bytes} bytes over {version:?}"
            );
            sent += 20;
        }
    }
    let counted = until(PATIENCE, async || {
        (bed.probes("observed").await, bed.first_tokens().await) == (sent as f64, sent as f64)
    });
    assert!(
        counted.await,
        "{sent} requests were sent:\n{}",
        bed.metrics().await.text()
    );
    assert_eq!(bed.probes("unmatched").await, 0.0);
    bed.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn tokens_are_undelayed_and_first_ends_prefill() {
    let bed = ProbeBed::start(patient_probe).await;
    let mut response = bed.paced(20).send().await.unwrap();
    assert_eq!(response.status(), 200);
    assert!(
        bed.total_load("active_prefill_tokens").await > 0,
        "the headers alone do not end the prefill"
    );
    let mut text = String::new();
    for at in 0..=20 {
        // The next event is sent only after the previous one has arrived.
        bed.let_one_go();
        let chunk = response.chunk().await.unwrap().unwrap();
        text.push_str(std::str::from_utf8(&chunk).unwrap());
        if at == 0 {
            let over = until(PATIENCE, async || {
                bed.total_load("active_prefill_tokens").await == 0
            });
            assert!(over.await, "the first token is counted");
            assert_eq!(bed.first_tokens().await, 1.0);
        }
        if at < 20 {
            assert_eq!(
                bed.total_load("active_requests").await,
                1,
                "after {at} events"
            );
        }
    }
    assert_eq!(response.chunk().await.unwrap(), None);
    assert_eq!(text, whole(20));
    bed.idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn disconnect_frees_worker_before_and_after_first_token() {
    let bed = ProbeBed::start(patient_probe).await;
    for events in [0, 1, 5] {
        let mut response = bed.paced(50).send().await.unwrap();
        for _ in 0..events {
            bed.let_one_go();
            response.chunk().await.unwrap().unwrap();
        }
        assert_eq!(
            (bed.total_load("active_requests").await, bed.open()),
            (1, 1)
        );
        drop(response);
        bed.idle().await;
        assert!(
            until(PATIENCE, async || bed.open() == 0).await,
            "the worker still has an open response"
        );
        bed.hold_all();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn responses_are_whole_across_warmroute_restart() {
    let mut bed = ProbeBed::start(str::to_owned).await;
    let mut open = Vec::new();
    for _ in 0..8 {
        open.push(bed.paced(30).send().await.unwrap());
    }
    // Some responses have had their first token, others have not.
    (0..2).for_each(|_| bed.let_one_go());
    assert!(
        until(PATIENCE, async || (1.0..8.0)
            .contains(&bed.first_tokens().await))
        .await
    );
    bed.deployment.kill9_router();
    BurstEngine::permit(&bed.workers, 10_000);
    for text in join_all(open.into_iter().map(reqwest::Response::text)).await {
        assert_eq!(text.unwrap(), whole(30));
    }
    for (client, version) in &clients() {
        let requests = |times| {
            (0..times).map(|at| {
                bed.request(client, at)
                    .version(*version)
                    .header(EVENTS, 500)
            })
        };
        assert_eq!(
            exact(requests(50), &whole(500)).await,
            50,
            "without warmroute, over {version:?}"
        );
    }
    bed.deployment
        .start_router(&with_response_headers(json!({})))
        .await
        .unwrap();
    let is_routed = async || !bed.query(&essay(1)).await.mode().is_empty();
    assert!(until(PATIENCE, is_routed).await);
    let before = bed.probes("observed").await;
    let requests = (0..50).map(|at| bed.request(&bed.http, at).header(EVENTS, 500));
    assert_eq!(exact(requests, &whole(500)).await, 50);
    // The number depends on the machine: Envoy closes a probe stream that gets no reply within the
    // shipped 0.3 s.
    assert!(until(PATIENCE, async || bed.probes("observed").await > before).await);
}

/// Keepalive pings of the connection detect a frozen server. Until then, chunks in close succession
/// are delayed, because each chunk restarts the timeout of the probe.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn frozen_warmroute_delays_responses_by_seconds_at_most() {
    let bed = ProbeBed::start(str::to_owned).await;
    let mut response = bed.paced(2_000).send().await.unwrap();
    assert_eq!(response.status(), 200);
    bed.router().unwrap().freeze();
    let frozen = Instant::now();
    let tick = async {
        for _ in 0..=2_000 {
            bed.let_one_go();
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let read = async {
        let mut text = Vec::new();
        let mut first = None;
        while let Some(chunk) = response.chunk().await.unwrap() {
            first.get_or_insert_with(|| frozen.elapsed());
            text.extend(chunk);
        }
        (first.unwrap(), String::from_utf8(text).unwrap())
    };
    let ((), (first, text)) = tokio::join!(tick, read);
    bed.router().unwrap().thaw();
    assert_eq!(text, whole(2_000));
    assert!(
        first < Duration::from_secs(8),
        "no chunk arrived for {first:?}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn local_replies_pass_the_probe() {
    let mut bed = ProbeBed::start(patient_probe).await;
    let strict = json!({"gateway": {"failure": {"strict_models": true, "mode": "fail_open"}}});
    bed.deployment
        .start_router(&with_response_headers(strict))
        .await
        .unwrap();
    let unknown =
        json!({"model": "absent-model", "messages": [{"role": "user", "content": "hello"}]});
    for _ in 0..20 {
        let answer = bed.post("/v1/chat/completions", &unknown).await;
        assert_eq!(answer.status, 404);
        assert!(answer.json()["error"]["message"].is_string(), "{answer:?}");
    }
    // All workers stop, so Envoy responds itself.
    bed.workers.clear();
    let answer = bed.query(&essay(1)).await;
    assert_eq!(answer.status, 503);
    assert!(!answer.text.is_empty());
    assert!(
        until(PATIENCE, async || bed.probes("no_token").await >= 20.0).await,
        "{}",
        bed.metrics().await.text()
    );
    bed.idle().await;
}
