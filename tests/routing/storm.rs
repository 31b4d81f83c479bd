//! Ten thousand requests with everything switched on, clients that leave whenever they like, and a worker that dies and
//! comes back: what is left over must be nothing.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::StreamExt as _;
use rand::rngs::SmallRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::bed::{Bed, SOON, chat, essay, stream, text};
use crate::support::ports::until;
use crate::support::stack::EngineSpec;

const REQUESTS: usize = 10_000;
const AT_ONCE: usize = 64;
/// The worker that dies.
const VICTIM: u64 = 2;

/// What became of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// Answered whole.
    Served,
    /// Told to come back.
    Refused,
    /// Its client left.
    Left,
    /// It was with the worker that died, when that died.
    Killed,
}

/// When the worker died.
type Death = parking_lot::Mutex<Option<Instant>>;

fn storm_engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "100", "--num-blocks", "4000"])
}

fn config() -> Value {
    let class = json!({"name": "all", "family": "f", "bucket": "any", "requests_per_worker": 8});
    json!({
        "queue": {
            "prefill_busy_threshold": 200, "policy": "wspt", "default_family": "f",
            "uncached_buckets": [{"min_tokens": 0, "bucket": "any"}], "classes": [class],
        },
        "sessions": {"ttl": "2s"},
        "load": {"output_blocks": true},
        "health": {"first": "500ms", "most": "1s"},
        "log": {"level": "warn"},
    })
}

/// The request of that number, and how long its client stays.
fn request(bed: &Bed, at: usize) -> (reqwest::RequestBuilder, Value, Option<Duration>) {
    let mut random = SmallRng::seed_from_u64(at as u64);
    let question = match random.random_range(0..10) {
        0 => essay(random.random_range(0..20)),
        1..=4 => format!("{} again", random.random_range(0..50)),
        _ => format!("{at} is a number that nobody has asked about before."),
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
    let stays = random
        .random_bool(0.3)
        .then(|| Duration::from_micros(random.random_range(0..60_000)));
    (request, body, stays)
}

/// Sends one request and says what became of it; whatever must not happen ends the test.
async fn one(bed: &Bed, at: usize, death: &Death) -> Fate {
    let (request, body, stays) = request(bed, at);
    let asked = async {
        let response = request
            .send()
            .await
            .unwrap_or_else(|error| panic!("no answer to {at}: {error:?}"));
        let chosen = response
            .headers()
            .get("x-worker-instance-id")
            .map(|id| id.to_str().unwrap().to_owned());
        let (status, headers) = (response.status().as_u16(), response.headers().clone());
        let text = response.text().await;
        (status, headers, chosen, text)
    };
    let (status, headers, chosen, text) = match stays {
        None => asked.await,
        Some(stays) => match tokio::time::timeout(stays, asked).await {
            Ok(answered) => answered,
            Err(_) => return Fate::Left,
        },
    };
    let killed = death.lock().is_some() && chosen.as_deref() == Some(&VICTIM.to_string());
    match (status, text) {
        (200, Ok(text)) if is_whole(&body, &text) => Fate::Served,
        (429, Ok(_)) => {
            assert_eq!(headers["retry-after"], "1", "{at}: {headers:?}");
            Fate::Refused
        }
        (200 | 503, _) if killed => Fate::Killed,
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
async fn ten_thousand_requests_with_cancels_and_a_death_leave_nothing_behind() {
    let mut bed = Bed::start(&[1, VICTIM, 3].map(storm_engine), config()).await;
    let death = Death::default();
    let started = Instant::now();
    let mut fates = Vec::new();
    for part in 0..3 {
        let done = AtomicUsize::new(0);
        let numbers = (part * REQUESTS / 3)..((part + 1) * REQUESTS / 3);
        let half = numbers.len() / 2;
        if part == 1 {
            // Dies in the middle of the second third, and is back after it.
            let pid = bed.engine(VICTIM).pid().unwrap();
            let pid = rustix::process::Pid::from_raw(pid.cast_signed()).unwrap();
            let kill = async {
                until(SOON, async || done.load(Ordering::Relaxed) >= half).await;
                *death.lock() = Some(Instant::now());
                rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
            };
            tokio::join!(send(&bed, numbers, &done, &death, &mut fates), kill);
            bed.restart(VICTIM).await;
        } else {
            send(&bed, numbers, &done, &death, &mut fates).await;
        }
    }
    let count = |fate| fates.iter().filter(|of| **of == fate).count();
    let (served, refused, left, killed) = (
        count(Fate::Served),
        count(Fate::Refused),
        count(Fate::Left),
        count(Fate::Killed),
    );
    let summary = format!(
        "{served} served, {refused} refused, {left} left, {killed} killed, {:?}",
        started.elapsed()
    );
    assert_eq!(fates.len(), REQUESTS, "{summary}");
    assert!(
        left > 500 && served > REQUESTS / 2 && killed <= AT_ONCE,
        "{summary}"
    );
    nothing_is_left(&bed, &summary).await;
}

async fn send(
    bed: &Bed,
    numbers: std::ops::Range<usize>,
    done: &AtomicUsize,
    death: &Death,
    fates: &mut Vec<Fate>,
) {
    let one = async |at| {
        let fate = one(bed, at, death).await;
        done.fetch_add(1, Ordering::Relaxed);
        fate
    };
    fates.extend(
        futures_util::stream::iter(numbers.map(one))
            .buffer_unordered(AT_ONCE)
            .collect::<Vec<_>>()
            .await,
    );
}

async fn nothing_is_left(bed: &Bed, summary: &str) {
    bed.quiet().await;
    bed.shows("sessions are left", |page| page.sum("sessions", &[]) == 0.0)
        .await;
    let page = bed.metrics().await;
    assert!(
        page.sum("queue_outcomes_total", &[("outcome", "waited")]) > 100.0,
        "{summary}\n{}",
        page.text()
    );
    assert!(
        page.sum("queue_outcomes_total", &[("outcome", "left")]) > 0.0,
        "{summary}\n{}",
        page.text()
    );
    assert!(
        page.sum("chosen_not_reached_total", &[("worker_id", "2")]) >= 3.0,
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
    // The worker that died takes part again, and the index knows again what each of them holds.
    let mut turn = 0;
    let back = until(SOON, async || {
        turn += 1;
        let answer = bed.ask(&text(&format!("{turn} after the storm"))).await;
        answer.engine() == VICTIM && bed.metrics().await.sum("workers_out", &[]) == 0.0
    });
    assert!(back.await, "{summary}");
    bed.settle().await;
}
