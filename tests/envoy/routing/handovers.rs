//! Load tests of requests with two workers each: no request is lost, none uses the KV of another,
//! and nothing is left over. `WARMROUTE_HANDOVERS` sets the number of requests and
//! `WARMROUTE_CHAOS` the seconds of a chaos test; a full run has 2000 and 60.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as streams};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::routing::bed::{RoutedAnswer, RoutingBed, SOON, chat, essay, path_of, stream, text};
use crate::routing::call::{self, phases};
use crate::routing::contents::{ReferenceEngine, ResponseContent, parse_content, tokens_seen};
use crate::routing::mirror;

/// Clients of a chaos test. Each sends requests without a pause.
const CLIENTS: usize = 12;

#[expect(
    clippy::disallowed_methods,
    reason = "how much is wanted, from the outside"
)]
fn wanted(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

/// Minimum time between the restart of a worker and the next kill.
const PAUSE: Duration = Duration::from_secs(1);

/// Request with this number. Half of the requests share a prefix with others.
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

/// Sends concurrent requests and asserts that the responses equal those of one engine. Returns
/// their number.
async fn storm(bed: &RoutingBed) -> f64 {
    let count = wanted("WARMROUTE_HANDOVERS", 300);
    let bodies = (0..count).map(body);
    let answers: Vec<(Value, RoutedAnswer)> = streams::iter(bodies)
        .map(async |body| (body.clone(), bed.ask(&body).await))
        .buffer_unordered(32)
        .collect()
        .await;
    let mut good = Vec::new();
    for (body, answer) in &answers {
        let content =
            parse_content(body, answer).unwrap_or_else(|why| panic!("{why}: {answer:?} to {body}"));
        good.push((body, content));
    }
    ReferenceEngine::start()
        .await
        .assert_same_contents(good.iter().map(|(body, content)| (*body, content)))
        .await;
    assert_eq!(phases(bed, "remote_prefill").await, count as f64);
    count as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_calls_lose_or_mix_no_request() {
    let bed = call::start(
        &call::pools(&call::NIXL),
        call::calling(json!({}), json!({})),
    )
    .await;
    let count = storm(&bed).await;
    bed.nothing_left().await;
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, count);
    assert_eq!(
        bed.engines("engine_sim:kv_leases_expired_total").await,
        0.0,
        "every decode worker fetched its blocks"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_mirrors_lose_or_mix_no_request() {
    let bed = mirror::start("20", json!({})).await;
    let count = storm(&bed).await;
    mirror::all_met(&bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_met_total").await,
        2.0 * count,
        "each request once on either side"
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
    /// True if the worker had begun its response and Envoy had forwarded the headers.
    fn is_cut_on(&self, worker: u64) -> bool {
        self.answer.status == 200 && self.answer.cut && self.answer.engine() == worker
    }

    /// True if the decode worker may have begun the stream before Envoy forwarded the headers.
    ///
    /// While the headers wait for the external processor, Envoy answers 502 with the reason
    /// `protocol error`, which it gives only for a connection that closes inside a response. That
    /// answer does not name the worker.
    fn is_cut_before_headers(&self, worker: u64) -> bool {
        call::DECODE.contains(&worker)
            && !self.body["stream"].is_null()
            && self.answer.status == 502
            && self.answer.text.ends_with("reset reason: protocol error")
    }
}

/// Downtime of one worker.
struct WorkerDowntime {
    of: u64,
    from: Instant,
    to: Instant,
}

impl WorkerDowntime {
    /// True if a request overlaps with the downtime.
    fn met(&self, fate: &ChaosOutcome) -> bool {
        fate.from <= self.to && self.from <= fate.to
    }
}

/// Result of a chaos test.
struct ChaosRun {
    fates: Vec<ChaosOutcome>,
    deaths: Vec<WorkerDowntime>,
}

/// Sends requests without a pause. Every two seconds, one worker of each pool is killed at the same
/// time, and restarted after up to a second.
async fn chaos(bed: &mut RoutingBed, pools: &[&[u64]]) -> ChaosRun {
    let over = AtomicBool::new(false);
    let number = AtomicUsize::new(0);
    let http = bed.http.clone();
    let url = bed.stack.url("");
    let ask = async || {
        let mut fates = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let body = body(number.fetch_add(1, Ordering::Relaxed));
            let from = Instant::now();
            let request = http.post(format!("{url}{}", path_of(&body))).json(&body);
            let answer = RoutedAnswer::begun(request).await;
            let to = Instant::now();
            let content = parse_content(&body, &answer);
            fates.push(ChaosOutcome {
                body,
                from,
                to,
                answer,
                content,
            });
        }
        fates
    };
    let kill = async {
        let mut random = StdRng::seed_from_u64(7);
        let mut deaths = Vec::new();
        let end = Instant::now() + Duration::from_secs(wanted("WARMROUTE_CHAOS", 8) as u64);
        while Instant::now() < end || deaths.len() < 3 * pools.len() {
            let next = tokio::time::Instant::now() + Duration::from_secs(2);
            let victims: Vec<u64> = pools
                .iter()
                .map(|pool| pool[random.random_range(0..pool.len())])
                .collect();
            for of in &victims {
                bed.harvest(*of).await;
            }
            let from = Instant::now();
            victims.iter().for_each(|of| bed.kill(*of));
            tokio::time::sleep(Duration::from_millis(random.random_range(0..1000))).await;
            for of in victims {
                bed.restart(of).await;
                deaths.push(WorkerDowntime {
                    of,
                    from,
                    to: Instant::now(),
                });
            }
            // Starts are slow on a busy machine, and overlapping downtimes are another test.
            tokio::time::sleep_until(next.max(tokio::time::Instant::now() + PAUSE)).await;
        }
        over.store(true, Ordering::Relaxed);
        deaths
    };
    let sending = futures_util::future::join_all((0..CLIENTS).map(|_| ask()));
    let (fates, deaths) = tokio::join!(sending, kill);
    ChaosRun {
        fates: fates.into_iter().flatten().collect(),
        deaths,
    }
}

/// Time at which engines send the headers of a stream.
#[derive(Clone, Copy, PartialEq)]
enum HeaderTiming {
    /// At once, like vLLM. A stream is also lost if its worker dies before the first token, because
    /// no gateway can retry a request after the response headers.
    AtOnce,
    /// With the first token, like SGLang.
    WithFirstToken,
}

impl ChaosRun {
    /// Asserts that only responses that had begun on a killed decode worker were lost, and that all
    /// others equal those of one engine.
    #[expect(clippy::print_stdout, reason = "the figures of the run")]
    async fn insist(&self, headers: HeaderTiming) {
        let Self { fates, deaths } = self;
        let lost: Vec<&ChaosOutcome> = fates.iter().filter(|fate| fate.content.is_err()).collect();
        let has_token = |fate: &ChaosOutcome| {
            fate.body["stream"].is_null() || tokens_seen(&fate.answer.text) > 0
        };
        let forgiven = |fate: &ChaosOutcome| {
            let at_once = headers == HeaderTiming::AtOnce;
            deaths.iter().filter(|death| death.met(fate)).any(|death| {
                (fate.is_cut_on(death.of) && (at_once || has_token(fate)))
                    || (at_once && fate.is_cut_before_headers(death.of))
            })
        };
        let others: Vec<_> = lost.iter().filter(|fate| !forgiven(fate)).collect();
        println!(
            "{} requests, {} kills, {} lost on a killed decode worker, {} of these before their first token, {} others lost",
            fates.len(),
            deaths.len(),
            lost.len() - others.len(),
            lost.iter()
                .filter(|fate| forgiven(fate) && !has_token(fate))
                .count(),
            others.len()
        );
        for fate in others.iter().take(5) {
            println!(
                "{:?} after {:?}: {:?}",
                fate.content,
                fate.to - fate.from,
                fate.answer
            );
        }
        assert!(
            fates.len() > 20 * deaths.len(),
            "too few requests for the number of kills"
        );
        assert!(
            others.is_empty(),
            "{} were lost: {:?} {:?}",
            others.len(),
            others[0].content,
            others[0].answer
        );
        let good = fates
            .iter()
            .filter_map(|fate| Some((&fate.body, fate.content.as_ref().ok()?)));
        ReferenceEngine::start()
            .await
            .assert_same_contents(good)
            .await;
    }

    /// Number of requests that overlap with a downtime in a pool.
    fn under_way(&self, pool: [u64; 2]) -> usize {
        let died = |fate: &&ChaosOutcome| {
            self.deaths
                .iter()
                .any(|death| pool.contains(&death.of) && death.met(fate))
        };
        self.fates.iter().filter(died).count()
    }
}

/// Deployment in mode `call` with short leases, so that those of killed workers expire soon.
async fn calling() -> RoutingBed {
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
        call::calling(json!({"timeout": "5s"}), json!({})),
    )
    .await
}

/// Asserts that no lease is left, and that leases expired only where a decode worker was killed
/// before its fetch.
async fn insist_on_no_leases(bed: &RoutingBed, chaos: &ChaosRun) {
    assert!(
        until(SOON, async || bed.engines("engine_sim:kv_leases").await
            == 0.0)
        .await,
        "leases are left over"
    );
    bed.nothing_left().await;
    let expired = bed.engines("engine_sim:kv_leases_expired_total").await;
    let most = chaos.under_way(call::DECODE);
    assert!(
        expired <= most as f64,
        "{expired} leases expired, and no more than {most} requests saw a decode worker die"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_loses_nothing_when_prefill_workers_die() {
    let mut bed = calling().await;
    let chaos = chaos(&mut bed, &[&call::PREFILL]).await;
    chaos.insist(HeaderTiming::AtOnce).await;
    insist_on_no_leases(&bed, &chaos).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_loses_only_begun_when_decode_workers_die() {
    let mut bed = calling().await;
    let chaos = chaos(&mut bed, &[&call::DECODE]).await;
    chaos.insist(HeaderTiming::AtOnce).await;
    insist_on_no_leases(&bed, &chaos).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn call_loses_only_begun_when_both_pools_die() {
    let mut bed = calling().await;
    let chaos = chaos(&mut bed, &[&call::PREFILL, &call::DECODE]).await;
    chaos.insist(HeaderTiming::AtOnce).await;
    insist_on_no_leases(&bed, &chaos).await;
}

/// Chaos test in mode `mirror`.
async fn meeting(pools: &[&[u64]]) {
    let mut bed = mirror::start("20", json!({})).await;
    let chaos = chaos(&mut bed, pools).await;
    chaos.insist(HeaderTiming::WithFirstToken).await;
    mirror::nobody_is_left_waiting(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirror_loses_nothing_when_prefill_workers_die() {
    meeting(&[&mirror::PREFILL]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirror_loses_only_begun_when_decode_workers_die() {
    meeting(&[&mirror::DECODE]).await;
}

/// The pools take turns. If one worker of each pool died at once, the retry after a decode worker
/// without its prefill worker could only choose a dead one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn mirror_loses_only_begun_when_both_pools_die() {
    let all: Vec<u64> = mirror::PREFILL.into_iter().chain(mirror::DECODE).collect();
    meeting(&[&all]).await;
}
