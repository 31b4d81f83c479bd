//! Many requests through two workers each: none is lost, none takes over another's KV, and nothing is left of any of them.
//! How many and how long is larger where `WARMROUTE_HANDOVERS` (requests) and `WARMROUTE_CHAOS` (seconds) say so: 2000 and
//! 60 are a full run.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as streams};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::bed::{Answer, Bed, SOON, chat, essay, path_of, stream, text};
use crate::call::{self, phases};
use crate::mirror;
use crate::support::ports::until;
use crate::told::{Alone, Told, tokens_seen, told};

/// Clients that ask without a pause in chaos.
const CLIENTS: usize = 12;

#[expect(
    clippy::disallowed_methods,
    reason = "how much is wanted, from the outside"
)]
fn wanted(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

/// Least time between one worker's return and the next one's death.
const PAUSE: Duration = Duration::from_secs(1);

/// The `number`th request: half of them share their beginning with others.
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

/// Many requests at once, every one of which is answered as one engine alone would; gives out how many.
async fn storm(bed: &Bed) -> f64 {
    let count = wanted("WARMROUTE_HANDOVERS", 300);
    let asked = (0..count).map(body);
    let answers: Vec<(Value, Answer)> = streams::iter(asked)
        .map(async |body| (body.clone(), bed.ask(&body).await))
        .buffer_unordered(32)
        .collect()
        .await;
    let mut good = Vec::new();
    for (body, answer) in &answers {
        let told = told(body, answer).unwrap_or_else(|why| panic!("{why}: {answer:?} to {body}"));
        good.push((body, told));
    }
    Alone::start()
        .await
        .agrees(good.iter().map(|(body, told)| (*body, told)))
        .await;
    assert_eq!(phases(bed, "remote_prefill").await, count as f64);
    count as f64
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_requests_that_are_handed_over_none_is_lost_or_mixed_up() {
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
        "everybody came for his blocks"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_requests_that_meet_none_is_lost_or_mixed_up() {
    let bed = mirror::start("20", json!({})).await;
    let count = storm(&bed).await;
    mirror::all_met(&bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_met_total").await,
        2.0 * count,
        "each of them once on either side"
    );
}

/// What became of one request in chaos.
struct Fate {
    body: Value,
    from: Instant,
    to: Instant,
    answer: Answer,
    told: Result<Told, String>,
}

/// One worker, and how long it was gone.
struct Death {
    of: u64,
    from: Instant,
    to: Instant,
}

impl Death {
    /// Whether a request was under way then.
    fn met(&self, fate: &Fate) -> bool {
        fate.from <= self.to && self.from <= fate.to
    }
}

/// What there was.
struct Chaos {
    fates: Vec<Fate>,
    deaths: Vec<Death>,
}

/// Requests without a pause while, every two seconds, one worker of each pool is killed, all in the same moment, and started
/// again after up to a second.
async fn chaos(bed: &mut Bed, pools: &[&[u64]]) -> Chaos {
    let over = AtomicBool::new(false);
    let number = AtomicUsize::new(0);
    let (http, url) = (bed.http.clone(), bed.stack.url(""));
    let ask = async || {
        let mut fates = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let body = body(number.fetch_add(1, Ordering::Relaxed));
            let from = Instant::now();
            let answer =
                Answer::begun(http.post(format!("{url}{}", path_of(&body))).json(&body)).await;
            let (to, told) = (Instant::now(), told(&body, &answer));
            fates.push(Fate {
                body,
                from,
                to,
                answer,
                told,
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
                deaths.push(Death {
                    of,
                    from,
                    to: Instant::now(),
                });
            }
            // On a slow machine starting takes its time, and two deaths that overlap are another test.
            tokio::time::sleep_until(next.max(tokio::time::Instant::now() + PAUSE)).await;
        }
        over.store(true, Ordering::Relaxed);
        deaths
    };
    let asking = futures_util::future::join_all((0..CLIENTS).map(|_| ask()));
    let (fates, deaths) = tokio::join!(asking, kill);
    Chaos {
        fates: fates.into_iter().flatten().collect(),
        deaths,
    }
}

/// When engines send the headers of a stream.
#[derive(Clone, Copy, PartialEq)]
enum Headers {
    /// At once, as vLLM. A stream whose worker dies after them and before the first token is lost as well: no gateway can
    /// try a request again whose answer has begun.
    AtOnce,
    /// With the first token, as SGLang.
    WithFirstToken,
}

impl Chaos {
    /// Insists that nothing was lost but answers that had begun on the very decode worker that was killed under them, and
    /// that all others say what one engine alone says.
    #[expect(clippy::print_stdout, reason = "the figures of the run")]
    async fn insist(&self, headers: Headers) {
        let Self { fates, deaths } = self;
        let lost: Vec<&Fate> = fates.iter().filter(|fate| fate.told.is_err()).collect();
        let has_token =
            |fate: &Fate| fate.body["stream"].is_null() || tokens_seen(&fate.answer.text) > 0;
        let forgiven = |fate: &Fate| {
            let begun = fate.answer.status == 200 && fate.answer.cut;
            begun
                && (has_token(fate) || headers == Headers::AtOnce)
                && deaths
                    .iter()
                    .any(|death| death.of == fate.answer.engine() && death.met(fate))
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
                fate.told,
                fate.to - fate.from,
                fate.answer
            );
        }
        assert!(fates.len() > 20 * deaths.len(), "it was no chaos");
        assert!(
            others.is_empty(),
            "{} were lost: {:?} {:?}",
            others.len(),
            others[0].told,
            others[0].answer
        );
        let good = fates
            .iter()
            .filter_map(|fate| Some((&fate.body, fate.told.as_ref().ok()?)));
        Alone::start().await.agrees(good).await;
    }

    /// Requests that were under way when workers of a pool died.
    fn under_way(&self, pool: [u64; 2]) -> usize {
        let died = |fate: &&Fate| {
            self.deaths
                .iter()
                .any(|death| pool.contains(&death.of) && death.met(fate))
        };
        self.fates.iter().filter(died).count()
    }
}

/// Prefill by call, with leases so short that what a dead worker left is over soon.
async fn calling() -> Bed {
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
        call::calling(json!({"deadline": "5s"}), json!({})),
    )
    .await
}

/// Insists that blocks are kept for nobody any longer, and that they were kept in vain only where a decode worker died that
/// was to come for them.
async fn insist_on_no_leases(bed: &Bed, chaos: &Chaos) {
    assert!(
        until(SOON, async || bed.engines("engine_sim:kv_leases").await
            == 0.0)
        .await,
        "leases are left over"
    );
    bed.nothing_left().await;
    let (expired, most) = (
        bed.engines("engine_sim:kv_leases_expired_total").await,
        chaos.under_way(call::DECODE),
    );
    assert!(
        expired <= most as f64,
        "{expired} leases expired, and no more than {most} requests saw a decode worker die"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_prefill_workers_die_no_request_is_lost() {
    let mut bed = calling().await;
    let chaos = chaos(&mut bed, &[&call::PREFILL]).await;
    chaos.insist(Headers::AtOnce).await;
    insist_on_no_leases(&bed, &chaos).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_decode_workers_die_only_what_they_had_begun_is_lost() {
    let mut bed = calling().await;
    let chaos = chaos(&mut bed, &[&call::DECODE]).await;
    chaos.insist(Headers::AtOnce).await;
    insist_on_no_leases(&bed, &chaos).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_workers_of_both_pools_die_at_once_only_what_had_begun_is_lost() {
    let mut bed = calling().await;
    let chaos = chaos(&mut bed, &[&call::PREFILL, &call::DECODE]).await;
    chaos.insist(Headers::AtOnce).await;
    insist_on_no_leases(&bed, &chaos).await;
}

/// The same where workers meet.
async fn meeting(pools: &[&[u64]]) {
    let mut bed = mirror::start("20", json!({})).await;
    let chaos = chaos(&mut bed, pools).await;
    chaos.insist(Headers::WithFirstToken).await;
    mirror::nobody_is_left_waiting(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_prefill_workers_die_that_were_to_meet_no_request_is_lost() {
    meeting(&[&mirror::PREFILL]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_decode_workers_die_that_were_to_meet_only_what_they_had_begun_is_lost() {
    meeting(&[&mirror::DECODE]).await;
}

/// In turns: of two and two that die at once, one of each pool, the next try after a decode worker that has met nobody can
/// only go to a dead one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_workers_of_both_pools_die_that_were_to_meet_only_what_had_begun_is_lost() {
    let all: Vec<u64> = mirror::PREFILL.into_iter().chain(mirror::DECODE).collect();
    meeting(&[&all]).await;
}
