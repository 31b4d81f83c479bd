//! Many requests through two workers each: none is lost, none takes over another's KV, and nothing is left of any of them.
//! How many and how long is larger where `WARMROUTE_HANDOVERS` (requests) and `WARMROUTE_CHAOS` (seconds) say so.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as streams};
use rand::rngs::StdRng;
use rand::{RngExt as _, SeedableRng as _};
use serde_json::{Value, json};

use crate::bed::{Answer, Bed, SOON, chat, essay, stream, text};
use crate::call::{self, path, phases, words};
use crate::mirror;
use crate::support::ports::until;

#[expect(clippy::disallowed_methods, reason = "how much is wanted, from the outside")]
fn wanted(name: &str, usual: usize) -> usize {
    std::env::var(name).map_or(usual, |text| text.parse().unwrap())
}

/// The `number`th request: half of them share their beginning with others.
fn body(number: usize) -> Value {
    let topic = if number.is_multiple_of(2) { number % 16 } else { number };
    match number % 3 {
        0 => chat(&essay(topic)),
        1 => text(&format!("{}{number}", essay(topic))),
        _ => stream(&essay(topic), 6),
    }
}

/// Whether an answer is whole: streams end with their mark.
fn is_whole(body: &Value, answer: &Answer) -> bool {
    answer.status == 200 && (body["stream"].is_null() || answer.text.trim_end().ends_with("data: [DONE]"))
}

async fn storm(bed: &Bed) {
    let count = wanted("WARMROUTE_HANDOVERS", 300);
    let asked = (0..count).map(body);
    let answers: Vec<(Value, Answer)> = streams::iter(asked)
        .map(async |body| (body.clone(), bed.ask(&body).await))
        .buffer_unordered(32)
        .collect()
        .await;
    let failed: Vec<_> = answers.iter().filter(|(body, answer)| !is_whole(body, answer)).collect();
    assert!(failed.is_empty(), "{} of {count}: {:?}", failed.len(), failed[0]);
    assert_eq!(phases(bed, "remote_prefill").await, count as f64);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_requests_that_are_handed_over_none_is_lost_or_mixed_up() {
    let bed = call::start(&call::pools(&call::NIXL), call::calling(json!({}), json!({}))).await;
    storm(&bed).await;
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_requests_that_meet_none_is_lost_or_mixed_up() {
    let bed = mirror::start("20", json!({})).await;
    storm(&bed).await;
    mirror::all_met(&bed).await;
}

/// What became of one request in chaos.
struct Fate {
    body: Value,
    from: Instant,
    to: Instant,
    answer: Answer,
}

/// One worker, and how long it was gone.
struct Death {
    of: u64,
    from: Instant,
    to: Instant,
}

/// Requests without a pause while workers of one pool are killed and started again every two seconds.
async fn chaos(bed: &mut Bed, pool: [u64; 2]) -> (Vec<Fate>, Vec<Death>) {
    let over = AtomicBool::new(false);
    let number = AtomicUsize::new(0);
    let (http, url) = (bed.http.clone(), bed.stack.url(""));
    let ask = async || {
        let mut fates = Vec::new();
        while !over.load(Ordering::Relaxed) {
            let body = body(number.fetch_add(1, Ordering::Relaxed));
            let from = Instant::now();
            let answer = Answer::begun(http.post(format!("{url}{}", path(&body))).json(&body)).await;
            fates.push(Fate { body, from, to: Instant::now(), answer });
        }
        fates
    };
    let kill = async {
        let mut random = StdRng::seed_from_u64(7);
        let mut deaths = Vec::new();
        let end = Instant::now() + Duration::from_secs(wanted("WARMROUTE_CHAOS", 8) as u64);
        while Instant::now() < end {
            let next = tokio::time::Instant::now() + Duration::from_secs(2);
            let of = pool[random.random_range(0..2)];
            let from = Instant::now();
            bed.kill(of);
            bed.restart(of).await;
            deaths.push(Death { of, from, to: Instant::now() });
            tokio::time::sleep_until(next).await;
        }
        over.store(true, Ordering::Relaxed);
        deaths
    };
    let asking = futures_util::future::join_all((0..12).map(|_| ask()));
    let (fates, deaths) = tokio::join!(asking, kill);
    (fates.into_iter().flatten().collect(), deaths)
}

/// Insists that nothing was lost but answers that had begun on a decode worker that was killed under them.
#[expect(clippy::print_stdout, reason = "the figures of the run")]
fn insist_on_no_other_loss(fates: &[Fate], deaths: &[Death]) {
    let lost: Vec<_> = fates.iter().filter(|fate| !is_whole(&fate.body, &fate.answer)).collect();
    let killed_under_it = |fate: &&Fate| {
        let Answer { status, cut, .. } = &fate.answer;
        let begun = *status == 200 && *cut;
        begun
            && deaths
                .iter()
                .any(|death| death.of == fate.answer.engine() && fate.from <= death.to && death.from <= fate.to)
    };
    let others: Vec<_> = lost.iter().filter(|fate| !killed_under_it(fate)).collect();
    println!(
        "{} requests, {} kills, {} lost, all but {} under way on a killed decode worker",
        fates.len(),
        deaths.len(),
        lost.len(),
        others.len()
    );
    assert!(fates.len() > 20 * deaths.len() && deaths.len() > 2, "it was no chaos");
    assert!(others.is_empty(), "{} were lost: {:?}", others.len(), others[0].answer);
}

/// Insists that whole answers are right: the same as one engine alone gives.
async fn insist_on_right_answers(bed: &Bed, fates: &[Fate], alone: u64) {
    let unary = fates.iter().filter(|fate| fate.answer.status == 200 && fate.body["stream"].is_null());
    let mut compared = 0;
    for fate in unary.take(300) {
        let alone = Answer::of(bed.http.post(bed.engine(alone).url(path(&fate.body))).json(&fate.body)).await;
        assert_eq!(words(&fate.answer), words(&alone), "{}", fate.body);
        compared += 1;
    }
    assert!(compared > 20, "only {compared}");
}

/// Prefill by call, with leases so short that what a dead worker left is over soon.
async fn calling() -> Bed {
    let args = [&call::NIXL[..], &["--kv-lease", "10s", "--kv-load-timeout", "500ms"]].concat();
    call::start(&call::pools(&args), call::calling(json!({"deadline": "5s"}), json!({}))).await
}

async fn insist_on_no_leases(bed: &Bed) {
    assert!(until(SOON, async || bed.engines("engine_sim:kv_leases").await == 0.0).await, "leases are left over");
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_prefill_workers_die_no_request_is_lost() {
    let mut bed = calling().await;
    let (fates, deaths) = chaos(&mut bed, call::PREFILL).await;
    insist_on_no_other_loss(&fates, &deaths);
    insist_on_right_answers(&bed, &fates, 21).await;
    insist_on_no_leases(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_decode_workers_die_only_what_they_had_begun_is_lost() {
    let mut bed = calling().await;
    let (fates, deaths) = chaos(&mut bed, call::DECODE).await;
    insist_on_no_other_loss(&fates, &deaths);
    insist_on_right_answers(&bed, &fates, 21).await;
    insist_on_no_leases(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_prefill_workers_die_that_were_to_meet_no_request_is_lost() {
    let mut bed = mirror::start("20", json!({})).await;
    let (fates, deaths) = chaos(&mut bed, mirror::PREFILL).await;
    insist_on_no_other_loss(&fates, &deaths);
    mirror::nobody_is_left_waiting(&bed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_decode_workers_die_that_were_to_meet_only_what_they_had_begun_is_lost() {
    let mut bed = mirror::start("20", json!({})).await;
    let (fates, deaths) = chaos(&mut bed, mirror::DECODE).await;
    insist_on_no_other_loss(&fates, &deaths);
    mirror::nobody_is_left_waiting(&bed).await;
}
