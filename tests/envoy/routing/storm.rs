//! Many requests with every feature enabled, of which some are cancelled, and a worker that crashes
//! and restarts. No load, queue entry or session may be left over.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::until;

use crate::routing::bed::{RoutingBed, SOON, chat, essay, is_reset_inside_response, stream, text};
use crate::support::long_tests::long_or_short;

/// Number of requests in the long and the short form.
const REQUESTS: [usize; 2] = [10_000, 1_500];
const AT_ONCE: usize = 64;
/// Id of the worker that is killed.
const VICTIM: u64 = 2;

/// Outcome of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum RequestFate {
    /// The response was complete.
    Served,
    /// The request was rejected with `Retry-After`.
    Refused,
    /// The client cancelled the request.
    Left,
    /// The request was in progress on the worker when the worker was killed.
    Killed,
}

/// Time at which the worker was killed, if it was.
type DeathTime = parking_lot::Mutex<Option<Instant>>;

fn storm_engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "100", "--num-blocks", "4000"])
}

fn config() -> Value {
    let class =
        json!({"name": "all", "family": "f", "bucket": "any", "max_requests_per_worker": 8});
    json!({
        "queue": {
            "prefill_busy_threshold": 200,
            "policy": "wspt",
            "default_family": "f",
            "uncached_buckets": [{"min_tokens": 0, "bucket": "any"}],
            "classes": [class],
        },
        "sessions": {"ttl": "2s"},
        "routing": {
            "load": {"output_blocks": true},
            "outlier_detection": {"base_ejection_time": "500ms", "max_ejection_time": "1s"},
        },
        "process": {"log": {"level": "warn"}},
    })
}

/// Returns the request with this number, and the time after which its client cancels it, if any.
fn request(bed: &RoutingBed, at: usize) -> (reqwest::RequestBuilder, Value, Option<Duration>) {
    let mut random = SmallRng::seed_from_u64(at as u64);
    let question = match random.random_range(0..10) {
        0 => essay(random.random_range(0..20)),
        1..=4 => format!("{} again", random.random_range(0..50)),
        _ => format!("{at} is a number that no request has contained before."),
    };
    let body = match random.random_range(0..3) {
        0 => text(&question),
        1 => chat(&question),
        _ => stream(&question, random.random_range(1..12)),
    };
    let mut request = bed.post(&body);
    if random.random_bool(0.5) {
        request = request.header(
            "x-session-id",
            format!("session-{}", random.random_range(0..300)),
        );
    }
    let cancel_after = random
        .random_bool(0.3)
        .then(|| Duration::from_micros(random.random_range(0..60_000)));
    (request, body, cancel_after)
}

/// Sends one request and returns its outcome. Panics on an outcome that is not allowed.
async fn send_one(bed: &RoutingBed, at: usize, death: &DeathTime) -> RequestFate {
    let (request, body, cancel_after) = request(bed, at);
    let sent = Instant::now();
    let answered_request = async {
        let response = request
            .send()
            .await
            .unwrap_or_else(|error| panic!("no answer to {at}: {error:?}"));
        let chosen = response
            .headers()
            .get("x-worker-instance-id")
            .map(|id| id.to_str().unwrap().to_owned());
        let status = response.status().as_u16();
        let headers = response.headers().clone();
        let text = response.text().await;
        (status, headers, chosen, text)
    };
    let (status, headers, chosen, text) = match cancel_after {
        None => answered_request.await,
        Some(cancel_after) => match tokio::time::timeout(cancel_after, answered_request).await {
            Ok(answered) => answered,
            Err(_) => return RequestFate::Left,
        },
    };
    let was_sent_before_death = death.lock().is_some_and(|death| sent <= death);
    let killed = death.lock().is_some() && chosen.as_deref() == Some(&VICTIM.to_string());
    match (status, text) {
        (200, Ok(text)) if is_whole(&body, &text) => RequestFate::Served,
        (429, Ok(_)) => {
            assert_eq!(headers["retry-after"], "1", "{at}: {headers:?}");
            RequestFate::Refused
        }
        (200 | 503, _) if killed => RequestFate::Killed,
        (status, Ok(text))
            if was_sent_before_death
                && body["stream"] == true
                && is_reset_inside_response(status, &text) =>
        {
            RequestFate::Killed
        }
        (status, text) => panic!("request {at} is lost: {status} {headers:?} {text:?}\n{body}"),
    }
}

fn is_whole(body: &Value, text: &str) -> bool {
    match body["stream"] == true {
        true => text.ends_with("data: [DONE]\n\n"),
        false => serde_json::from_str::<Value>(text)
            .is_ok_and(|answer| answer["usage"]["completion_tokens"] == 2),
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn storm_of_requests_leaves_nothing_behind() {
    let [long, short] = REQUESTS;
    let requests = long_or_short(long, short);
    let mut bed = RoutingBed::start(&[1, VICTIM, 3].map(storm_engine), config()).await;
    let death = DeathTime::default();
    let started = Instant::now();
    let mut outcomes = Vec::new();
    for part in 0..3 {
        let done = AtomicUsize::new(0);
        let numbers = (part * requests / 3)..((part + 1) * requests / 3);
        let half = numbers.len() / 2;
        if part == 1 {
            // The worker is killed in the middle of the second third, and restarted after it.
            let pid = bed.engine(VICTIM).pid().unwrap();
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            let kill = async {
                until(SOON, async || done.load(Ordering::Relaxed) >= half).await;
                *death.lock() = Some(Instant::now());
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            };
            tokio::join!(send(&bed, numbers, &done, &death, &mut outcomes), kill);
            bed.restart(VICTIM).await;
        } else {
            send(&bed, numbers, &done, &death, &mut outcomes).await;
        }
    }
    let count = |outcome| outcomes.iter().filter(|of| **of == outcome).count();
    let served = count(RequestFate::Served);
    let refused = count(RequestFate::Refused);
    let left = count(RequestFate::Left);
    let killed = count(RequestFate::Killed);
    let summary = format!(
        "{served} served, {refused} refused, {left} left, {killed} killed, {:?}",
        started.elapsed()
    );
    assert_eq!(outcomes.len(), requests, "{summary}");
    assert!(
        left > requests / 20 && served > requests / 2 && killed <= AT_ONCE,
        "{summary}"
    );
    assert_nothing_left(&bed, requests, &summary).await;
}

async fn send(
    bed: &RoutingBed,
    numbers: std::ops::Range<usize>,
    done: &AtomicUsize,
    death: &DeathTime,
    outcomes: &mut Vec<RequestFate>,
) {
    let send_one = async |at| {
        let outcome = send_one(bed, at, death).await;
        done.fetch_add(1, Ordering::Relaxed);
        outcome
    };
    outcomes.extend(
        futures_util::stream::iter(numbers.map(send_one))
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await,
    );
}

async fn assert_nothing_left(bed: &RoutingBed, requests: usize, summary: &str) {
    bed.wait_idle().await;
    bed.wait_metrics("sessions are left", |page| page.sum("sessions", &[]) == 0.0)
        .await;
    let page = bed.metrics().await;
    assert!(
        page.sum("queue_outcomes_total", &[("outcome", "admitted")]) > requests as f64 / 100.0,
        "{summary}\n{}",
        page.text()
    );
    assert!(
        page.sum("queue_outcomes_total", &[("outcome", "cancelled")]) > 0.0,
        "{summary}\n{}",
        page.text()
    );
    assert!(
        page.sum(
            "worker_failed_requests_total",
            &[("worker_id", "2"), ("kind", "unreachable")]
        ) >= 3.0,
        "{summary}\n{}",
        page.text()
    );
    assert_eq!(
        page.sum("requests_total", &[("mode", "passthrough")]),
        0.0,
        "{summary}\n{}",
        page.text()
    );
    assert_eq!(
        page.sum("task_restarts_total", &[("task", "admission")]),
        0.0,
        "{summary}\n{}",
        page.text()
    );
    // The restarted worker has served requests, and the index equals the caches.
    let served = bed
        .engine_sum(&[VICTIM], "vllm:request_success_total")
        .await;
    assert!(served > 0.0, "{summary}");
    bed.wait_metrics("workers are ejected", |page| {
        page.sum("ejected_workers", &[]) == 0.0
    })
    .await;
    bed.settle().await;
}
