//! Load tests of requests with two workers each. No request may be lost or use the KV blocks of
//! another one, and no state may be left over. `WARMROUTE_HANDOVERS` sets the number of requests,
//! and `WARMROUTE_CHAOS` the seconds of a chaos test. A full run uses 2000 and 60.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as streams};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{
    RoutedAnswer, RoutingBed, chat, essay, is_reset_inside_response, path_of, stream, text,
};
use crate::routing::call::{self, phases};
use crate::routing::contents::{ReferenceEngine, ResponseContent, parse_content, tokens_seen};
use crate::routing::mirror;

/// Number of clients in a chaos test. Each sends requests without a pause.
const CLIENTS: usize = 12;

#[expect(
    clippy::disallowed_methods,
    reason = "the environment sets the length of a run"
)]
fn setting(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

/// Minimum time between the restart of a worker and the next kill.
const PAUSE: Duration = Duration::from_secs(1);

/// Returns the request with this number. Half of the requests share a prefix with others.
fn body(number: usize) -> Value {
    let topic = if number.is_multiple_of(2) {
        number % 16
    } else {
        number
    };
    match number % 3 {
        0 => chat(&essay(topic)),
        1 => text(&format!("{}{number}", essay(topic))),
        _ => stream(&essay(topic), 6),
    }
}

/// Sends concurrent requests. Asserts that the responses equal those of a single engine. Returns
/// the number of requests.
async fn storm(bed: &RoutingBed) -> f64 {
    let count = setting("WARMROUTE_HANDOVERS", 300);
    let bodies = (0..count).map(body);
    let answers: Vec<(Value, RoutedAnswer)> = streams::iter(bodies)
        .map(async |body| (body.clone(), bed.query(&body).await))
        .buffer_unordered(32)
        .collect()
        .await;
    let mut contents = Vec::new();
    for (body, answer) in &answers {
        let content =
            parse_content(body, answer).unwrap_or_else(|why| panic!("{why}: {answer:?} to {body}"));
        contents.push((body, content));
    }
    ReferenceEngine::start()
        .await
        .assert_same_contents(contents.iter().map(|(body, content)| (*body, content)))
        .await;
    assert_eq!(phases(bed, "remote_prefill").await, count as f64);
    count as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn concurrent_calls_lose_or_mix_no_request() {
    let bed = call::start(
        &call::pools(&call::NIXL),
        call::call_config(json!({}), json!({})),
    )
    .await;
    let count = storm(&bed).await;
    bed.assert_nothing_left().await;
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, count);
    assert_eq!(
        bed.engines("engine_sim:kv_leases_expired_total").await,
        0.0,
        "every decode worker fetched its blocks"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn concurrent_mirrors_lose_or_mix_no_request() {
    let bed = mirror::start("20", json!({})).await;
    let count = storm(&bed).await;
    mirror::assert_all_rooms_joined(&bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_met_total").await,
        2.0 * count,
        "each request joins its room on both sides"
    );
}

/// Outcome of one request in a chaos test.
struct ChaosOutcome {
    body: Value,
    from: Instant,
    to: Instant,
    answer: RoutedAnswer,
    content: Result<ResponseContent, String>,
}

impl ChaosOutcome {
    fn description(&self) -> String {
        format!(
            "{} stream {}: {:?} after {:?}: {:?}",
            path_of(&self.body),
            self.body["stream"],
            self.content,
            self.to - self.from,
            self.answer
        )
    }

    /// Returns true if the response ended early after Envoy had forwarded its headers from this
    /// worker.
    fn is_cut_on(&self, worker: u64) -> bool {
        self.answer.status == 200 && self.answer.is_incomplete && self.answer.engine() == worker
    }

    /// Returns true if the decode worker had begun the stream, and Envoy had not yet forwarded its
    /// headers. This is a lost response: Envoy does not retry a request after it has received
    /// response headers.
    fn is_cut_before_headers(&self, worker: u64) -> bool {
        call::DECODE.contains(&worker)
            && !self.body["stream"].is_null()
            && is_reset_inside_response(self.answer.status.as_u16(), &self.answer.text)
    }
}

/// Downtime of one worker.
struct WorkerDowntime {
    worker: u64,
    from: Instant,
    to: Instant,
}

impl WorkerDowntime {
    /// Returns true if a request overlaps with the downtime.
    fn overlaps(&self, outcome: &ChaosOutcome) -> bool {
        outcome.from <= self.to && self.from <= outcome.to
    }
}

/// Result of a chaos test.
struct ChaosRun {
    outcomes: Vec<ChaosOutcome>,
    downtimes: Vec<WorkerDowntime>,
}

/// Waits until the next kill. Downtimes of consecutive kills must not overlap, and starts are slow
/// on a busy machine. While a restarted worker is ejected, requests have no second choice.
async fn await_next_kill(bed: &RoutingBed, earliest: tokio::time::Instant) {
    let readmitted = async || bed.metrics().await.sum("ejected_workers", &[]) == 0.0;
    assert!(
        until(PATIENCE, readmitted).await,
        "a worker remains ejected"
    );
    tokio::time::sleep_until(earliest.max(tokio::time::Instant::now() + PAUSE)).await;
}

/// Sends requests without a pause. Every two seconds, one worker of each pool is killed, and
/// restarted after up to a second.
async fn chaos(bed: &mut RoutingBed, pools: &[&[u64]]) -> ChaosRun {
    let over = AtomicBool::new(false);
    let number = AtomicUsize::new(0);
    let http = bed.http.clone();
    let url = bed.stack.url("");
    let query = async || {
        let mut outcomes = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let body = body(number.fetch_add(1, Ordering::Relaxed));
            let from = Instant::now();
            let request = http.post(format!("{url}{}", path_of(&body))).json(&body);
            let answer = RoutedAnswer::send_unchecked(request).await;
            let to = Instant::now();
            let content = parse_content(&body, &answer);
            outcomes.push(ChaosOutcome {
                body,
                from,
                to,
                answer,
                content,
            });
        }
        outcomes
    };
    let kill = async {
        let mut random = StdRng::seed_from_u64(7);
        let mut downtimes = Vec::new();
        let end = Instant::now() + Duration::from_secs(setting("WARMROUTE_CHAOS", 8) as u64);
        while Instant::now() < end || downtimes.len() < 3 * pools.len() {
            let next = tokio::time::Instant::now() + Duration::from_secs(2);
            let victims: Vec<u64> = pools
                .iter()
                .map(|pool| pool[random.random_range(0..pool.len())])
                .collect();
            for worker in &victims {
                bed.save_metrics(*worker).await;
            }
            let from = Instant::now();
            victims.iter().for_each(|worker| bed.kill(*worker));
            tokio::time::sleep(Duration::from_millis(random.random_range(0..1000))).await;
            for worker in victims {
                bed.restart(worker).await;
                downtimes.push(WorkerDowntime {
                    worker,
                    from,
                    to: Instant::now(),
                });
            }
            await_next_kill(bed, next).await;
        }
        over.store(true, Ordering::Relaxed);
        downtimes
    };
    let sending = futures_util::future::join_all((0..CLIENTS).map(|_| query()));
    let (outcomes, downtimes) = tokio::join!(sending, kill);
    ChaosRun {
        outcomes: outcomes.into_iter().flatten().collect(),
        downtimes,
    }
}

impl ChaosRun {
    /// Asserts that the only lost responses had begun on a killed decode worker, and that all
    /// others equal those of a single engine. Some engines send the headers of a stream with the
    /// first token, but a worker may die after it has written them alone.
    #[expect(clippy::print_stdout, reason = "the figures of the run")]
    async fn assert_only_begun_lost(&self) {
        let Self {
            outcomes,
            downtimes,
        } = self;
        let lost: Vec<&ChaosOutcome> = outcomes
            .iter()
            .filter(|outcome| outcome.content.is_err())
            .collect();
        let has_token = |outcome: &ChaosOutcome| {
            outcome.body["stream"].is_null() || tokens_seen(&outcome.answer.text) > 0
        };
        let excused = |outcome: &ChaosOutcome| {
            downtimes
                .iter()
                .filter(|downtime| downtime.overlaps(outcome))
                .any(|downtime| {
                    outcome.is_cut_on(downtime.worker)
                        || outcome.is_cut_before_headers(downtime.worker)
                })
        };
        let others: Vec<_> = lost.iter().filter(|outcome| !excused(outcome)).collect();
        println!(
            "{} requests, {} kills, {} lost on a killed decode worker, {} of these before their first token, {} others lost",
            outcomes.len(),
            downtimes.len(),
            lost.len() - others.len(),
            lost.iter()
                .filter(|outcome| excused(outcome) && !has_token(outcome))
                .count(),
            others.len()
        );
        for outcome in others.iter().take(5) {
            println!("{}", outcome.description());
        }
        assert!(
            outcomes.len() > 20 * downtimes.len(),
            "too few requests for the number of kills"
        );
        assert!(
            others.is_empty(),
            "{} were lost: {}",
            others.len(),
            others[0].description()
        );
        let contents = outcomes
            .iter()
            .filter_map(|outcome| Some((&outcome.body, outcome.content.as_ref().ok()?)));
        ReferenceEngine::start()
            .await
            .assert_same_contents(contents)
            .await;
    }

    /// Returns the number of requests that overlap with a downtime in a pool.
    fn overlapping_requests(&self, pool: [u64; 2]) -> usize {
        let died = |outcome: &&ChaosOutcome| {
            self.downtimes
                .iter()
                .any(|downtime| pool.contains(&downtime.worker) && downtime.overlaps(outcome))
        };
        self.outcomes.iter().filter(died).count()
    }
}

/// Starts a deployment in mode `call` with short leases, so that those of killed workers expire
/// soon.
async fn start_call_bed() -> RoutingBed {
    let args = [
        &call::NIXL[..],
        &[
            "--kv-lease",
            "10s",
            "--kv-load-timeout",
            "500ms",
            "--kv-load-failure-policy",
            "recompute",
        ],
    ]
    .concat();
    call::start(
        &call::pools(&args),
        call::call_config(json!({"timeout": "5s"}), json!({})),
    )
    .await
}

/// Asserts that no lease is left, and that leases expired only if a decode worker died before it
/// fetched the blocks.
async fn assert_no_leases(bed: &RoutingBed, chaos: &ChaosRun) {
    assert!(
        until(PATIENCE, async || bed.engines("engine_sim:kv_leases").await
            == 0.0)
        .await,
        "leases are left over"
    );
    bed.assert_nothing_left().await;
    let expired = bed.engines("engine_sim:kv_leases_expired_total").await;
    let most = chaos.overlapping_requests(call::DECODE);
    assert!(
        expired <= most as f64,
        "{expired} leases expired, but only {most} requests overlap with a downtime of a decode worker"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn call_loses_nothing_when_prefill_workers_die() {
    let mut bed = start_call_bed().await;
    let chaos = chaos(&mut bed, &[&call::PREFILL]).await;
    chaos.assert_only_begun_lost().await;
    assert_no_leases(&bed, &chaos).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn call_loses_only_begun_when_both_pools_die() {
    let mut bed = start_call_bed().await;
    let chaos = chaos(&mut bed, &[&call::PREFILL, &call::DECODE]).await;
    chaos.assert_only_begun_lost().await;
    assert_no_leases(&bed, &chaos).await;
}

/// Runs a chaos test in mode `mirror`.
async fn mirror_chaos(pools: &[&[u64]]) {
    let mut bed = mirror::start("20", json!({})).await;
    let chaos = chaos(&mut bed, pools).await;
    chaos.assert_only_begun_lost().await;
    mirror::assert_no_room_waits(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn mirror_loses_nothing_when_prefill_workers_die() {
    mirror_chaos(&[&mirror::PREFILL]).await;
}

/// Only one worker is dead at a time. If one worker of each pool died at once, a retry could be
/// left with a dead worker only.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn mirror_loses_only_begun_when_both_pools_die() {
    let all: Vec<u64> = mirror::PREFILL.into_iter().chain(mirror::DECODE).collect();
    mirror_chaos(&[&all]).await;
}
