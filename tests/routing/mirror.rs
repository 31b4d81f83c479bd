//! Prefills that Envoy has done by a copy of the request: both workers get the same and meet.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, stream as streams};
use serde_json::{Value, json};

use crate::bed::{Answer, Bed, SOON, chat, essay, patient, stream, text};
use crate::call::{carrying, phases};
use crate::openmetrics::Page;
use crate::support::ports::{FreePort, until};
use crate::support::stack::EngineSpec;
use crate::told::{Alone, told};

pub(crate) const PREFILL: [u64; 2] = [11, 12];
pub(crate) const DECODE: [u64; 2] = [21, 22];

/// Two prefill and two decode engines as SGLang has them, each prefill engine with a port of its own to be met at.
fn pools([prefill_speed, decode_speed]: [&str; 2]) -> Vec<EngineSpec> {
    let prefill = PREFILL.map(|id| {
        let port = FreePort::find().unwrap().release();
        let mode = [
            "--disaggregation-mode",
            "prefill",
            "--bootstrap-port",
            &port.to_string(),
        ];
        let listed = json!({"role": "prefill", "bootstrap": {"port": port}});
        EngineSpec::new(id)
            .with(&["--speed", prefill_speed])
            .with(&mode)
            .listed(listed)
    });
    let mode = [
        "--disaggregation-mode",
        "decode",
        "--bootstrap-patience",
        "300ms",
    ];
    let listed = json!({"role": "decode"});
    let decode = DECODE.map(|id| {
        EngineSpec::new(id)
            .with(&["--speed", decode_speed])
            .with(&mode)
            .listed(listed.clone())
    });
    prefill.into_iter().chain(decode).collect()
}

pub(crate) async fn start(prefill_speed: &str, prefill: Value) -> Bed {
    start_behind(prefill_speed, prefill, patient).await
}

/// The same behind an Envoy of one's own.
pub(crate) async fn start_behind(
    prefill_speed: &str,
    prefill: Value,
    envoy: impl Fn(&str) -> String,
) -> Bed {
    start_with([prefill_speed, "20"], &prefill, envoy).await
}

/// The same with answers observed to their usage.
pub(crate) async fn start_observed() -> Bed {
    let config = carrying("mirror", &json!({}), &json!({"observe": "usage"}));
    Bed::behind_file(
        "disaggregated-mirror",
        &pools(["20", "20"]),
        config,
        patient,
    )
    .await
}

/// The same with engines of these speeds.
async fn start_with(speeds: [&str; 2], prefill: &Value, envoy: impl Fn(&str) -> String) -> Bed {
    let config = carrying("mirror", prefill, &json!({}));
    Bed::behind_file("disaggregated-mirror", &pools(speeds), config, envoy).await
}

/// Waits until nothing is in flight, and insists that everybody met whom it was to meet.
pub(crate) async fn all_met(bed: &Bed) {
    nobody_is_left_waiting(bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_unmet_total").await,
        0.0,
        "somebody waited in vain"
    );
}

/// The same where workers have died: who is alone in a room leaves it, and nobody meets another request.
pub(crate) async fn nobody_is_left_waiting(bed: &Bed) {
    bed.quiet().await;
    assert_eq!(
        bed.engines("engine_sim:rooms_mismatched_total").await,
        0.0,
        "somebody met another request"
    );
    let empty = async || bed.engines("engine_sim:rooms_waiting").await == 0.0 && bed.idle().await;
    if until(SOON, empty).await {
        return;
    }
    let mut left = Vec::new();
    for id in PREFILL.into_iter().chain(DECODE) {
        let of = async |name: &str| bed.engine_sum(&[id], name).await;
        let (waiting, running) = (
            of("engine_sim:rooms_waiting").await,
            of("vllm:num_requests_running").await,
        );
        left.push((id, waiting, running, of("vllm:num_requests_waiting").await));
    }
    let page = bed.metrics().await;
    let told: Vec<_> = page
        .text()
        .lines()
        .filter(|line| line.contains("prefill_") && !line.starts_with('#'))
        .collect();
    panic!(
        "somebody waits for nobody (id, in rooms, running, waiting): {left:?}\n{}",
        told.join("\n")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_workers_get_the_request_and_meet_over_it() {
    let bed = start("20", json!({})).await;
    let bodies = (0..60).map(|topic| match topic % 3 {
        0 => chat(&essay(topic)),
        1 => text(&essay(topic)),
        _ => stream(&essay(topic), 4),
    });
    let answers: Vec<(Value, Answer)> = streams::iter(bodies)
        .map(async |body| (body.clone(), bed.ask(&body).await))
        .buffer_unordered(8)
        .collect()
        .await;
    let (mut prefills, mut decodes, mut good) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for (body, answer) in &answers {
        decodes.insert(answer.engine());
        prefills.insert(
            answer
                .header("x-prefill-instance-id")
                .parse::<u64>()
                .expect("a prefill worker"),
        );
        good.push((
            body,
            told(body, answer).unwrap_or_else(|why| panic!("{why}: {answer:?}")),
        ));
    }
    Alone::start()
        .await
        .agrees(good.iter().map(|(body, told)| (*body, told)))
        .await;
    assert_eq!((prefills, decodes), (PREFILL.into(), DECODE.into()));
    assert_eq!(phases(&bed, "remote_prefill").await, 60.0);
    all_met(&bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_met_total").await,
        120.0,
        "each of them twice, once on either side"
    );
    assert_eq!(bed.metrics().await.sum("prefill_aborts_total", &[]), 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_prompts_meet_in_rooms_next_to_each_other_and_several_answers_are_refused() {
    let bed = start("20", json!({})).await;
    let mut several = text(&essay(1));
    several["n"] = json!(2);
    // A decode engine could do nothing with it.
    assert_eq!(bed.ask(&several).await.status, 503);
    let both = json!({"model": several["model"], "prompt": [essay(2), essay(3)], "max_tokens": 2});
    assert_eq!(
        bed.ask(&both).await.json()["choices"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    all_met(&bed).await;
    assert_eq!(bed.engines("engine_sim:rooms_met_total").await, 4.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_has_the_prefill_aborted() {
    let bed = start("0.005", json!({})).await;
    let asking = bed.asking(&stream(&essay(1), 50));
    let prefilling =
        async || bed.load(11, "active_requests").await + bed.load(12, "active_requests").await;
    assert!(until(SOON, async || prefilling().await == 1).await);
    let at_work = async || bed.engine_sum(&PREFILL, "vllm:num_requests_running").await == 1.0;
    assert!(until(SOON, at_work).await, "the copy has arrived");
    // Who decodes cannot tell the other any more.
    DECODE.iter().for_each(|id| bed.engine(*id).freeze());
    asking.abort();
    bed.shows("the engine is told", |page| {
        page.sum("prefill_aborts_total", &[("outcome", "told")]) == 1.0
    })
    .await;
    let aborted = async || bed.engine_sum(&PREFILL, "engine_sim:aborted_total").await == 1.0;
    assert!(until(SOON, aborted).await);
    DECODE.iter().for_each(|id| bed.engine(*id).thaw());
    bed.quiet().await;
    let idle = async || bed.engines("vllm:num_requests_running").await == 0.0;
    assert!(until(SOON, idle).await, "nobody works for nobody");
}

/// How much later than its deadline a failure may be told on a busy machine.
const MARGIN: Duration = Duration::from_secs(4);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_that_does_not_come_is_told_at_the_deadline() {
    let deadline = Duration::from_secs(3);
    let bed = start("20", json!({"deadline": "3s"})).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"hang_prefills": true})).await;
    }
    // The decode engine itself would wait for five minutes, and then say 500.
    for (number, body) in [chat(&essay(1)), text(&essay(2)), stream(&essay(3), 4)]
        .iter()
        .enumerate()
    {
        let asked = Instant::now();
        let answer = bed.ask(body).await;
        let took = asked.elapsed();
        let (code, message) = answer.error(504);
        assert_eq!(code, "prefill_failed", "{message}");
        assert!(
            (deadline..deadline + MARGIN).contains(&took),
            "{took:?} for {body}"
        );
        let told = |page: &Page| {
            page.sum("prefill_aborts_total", &[("outcome", "told")]) == 2.0 * (number + 1) as f64
        };
        bed.shows("both engines are told", told).await;
    }
    bed.quiet().await;
    assert!(
        until(SOON, async || bed
            .engine_sum(&DECODE, "engine_sim:rooms_waiting")
            .await
            == 0.0)
        .await
    );
    assert!(
        until(SOON, async || bed.idle().await).await,
        "an engine works for nobody"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefills_that_are_refused_are_told_at_the_deadline_at_the_latest() {
    let bed = start("20", json!({"deadline": "3s"})).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"refuse_prefills": 500})).await;
    }
    for body in [chat(&essay(1)), stream(&essay(2), 4)] {
        let asked = Instant::now();
        let answer = bed.ask(&body).await;
        let (took, (code, message)) = (asked.elapsed(), answer.error(504));
        assert_eq!(code, "prefill_failed", "{message}");
        assert!(
            took < Duration::from_secs(3) + MARGIN,
            "{took:?} for {body}"
        );
    }
    bed.quiet().await;
    assert!(
        until(SOON, async || bed.idle().await).await,
        "an engine works for nobody"
    );
    // And it is not for ever.
    for id in PREFILL {
        bed.misbehave(id, json!({"refuse_prefills": null})).await;
    }
    assert_eq!(bed.ask(&chat(&essay(3))).await.status, 200);
}

/// Asks while prefills take long, and says which workers have the request once the prefill is under way.
async fn caught(bed: &Bed, body: &Value) -> (tokio::task::JoinHandle<Answer>, [u64; 2]) {
    let asking = bed.asking(body);
    let has = async |ids: [u64; 2]| {
        let mut found = None;
        for id in ids {
            if bed.load(id, "active_requests").await > 0 {
                found = Some(id);
            }
        }
        found
    };
    let at_work = async || bed.engine_sum(&PREFILL, "vllm:num_requests_running").await == 1.0;
    assert!(until(SOON, at_work).await, "the copy has arrived");
    let pair = [
        has(PREFILL).await.expect("a prefill worker"),
        has(DECODE).await.expect("a decode worker"),
    ];
    (asking, pair)
}

fn other(pair: [u64; 2], than: u64) -> u64 {
    if pair[0] == than { pair[1] } else { pair[0] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_decode_worker_dies_the_next_one_meets_a_prefill_worker_anew() {
    let mut bed = start("0.2", json!({})).await;
    for body in [chat(&essay(1)), stream(&essay(2), 4)] {
        let before = bed
            .metrics()
            .await
            .sum("prefill_retries_total", &[("outcome", "prefilled_anew")]);
        let (asking, [_, decode]) = caught(&bed, &body).await;
        bed.kill(decode);
        let answer = asking.await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), answer.cut),
            (200, false),
            "{answer:?}"
        );
        assert_eq!(answer.engine(), other(DECODE, decode));
        let page = bed.metrics().await;
        assert_eq!(
            page.sum("prefill_retries_total", &[("outcome", "prefilled_anew")]),
            before + 1.0
        );
        // The room in which the first one died is given up.
        bed.shows("the engine is told", |page| {
            page.sum("prefill_aborts_total", &[("outcome", "told")]) == before + 1.0
        })
        .await;
        bed.quiet().await;
        bed.restart(decode).await;
    }
    assert_eq!(bed.engines("engine_sim:rooms_mismatched_total").await, 0.0);
    assert_eq!(
        bed.metrics()
            .await
            .sum("prefill_calls_total", &[("outcome", "done")]),
        2.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn when_the_prefill_worker_dies_another_one_prefills() {
    let mut bed = start("0.2", json!({})).await;
    for body in [chat(&essay(1)), stream(&essay(2), 4)] {
        let (asking, [prefill, _]) = caught(&bed, &body).await;
        bed.kill(prefill);
        let at_work = async || {
            bed.engine_sum(&[other(PREFILL, prefill)], "vllm:num_requests_running")
                .await
                == 1.0
        };
        assert!(until(SOON, at_work).await, "the other one has it");
        assert_eq!(
            bed.load(other(PREFILL, prefill), "active_requests").await,
            1,
            "and is booked"
        );
        assert_eq!(bed.load(prefill, "active_requests").await, 0);
        let answer = asking.await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), answer.cut),
            (200, false),
            "{answer:?}"
        );
        bed.quiet().await;
        bed.restart(prefill).await;
    }
    assert_eq!(
        bed.metrics()
            .await
            .sum("prefill_retries_total", &[("outcome", "prefilled_anew")]),
        2.0
    );
    assert_eq!(bed.engines("engine_sim:rooms_mismatched_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_answer_in_one_piece_may_take_longer_than_the_prefill() {
    let bed = start_with(["20", "1"], &json!({"deadline": "2s"}), patient).await;
    let mut long = text(&essay(1));
    long["max_tokens"] = json!(800);
    let asked = Instant::now();
    let asking = bed.asking(&long);
    let prefilling =
        async || bed.load(11, "active_requests").await + bed.load(12, "active_requests").await;
    let at_work = async || bed.engine_sum(&DECODE, "vllm:num_requests_running").await == 1.0;
    assert!(until(SOON, at_work).await);
    assert!(
        until(SOON, async || prefilling().await == 0).await,
        "the prefill is over, though nothing was answered"
    );
    assert!(!asking.is_finished());
    let answer = asking.await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(
        asked.elapsed() > Duration::from_secs(2),
        "it was no test: {:?}",
        asked.elapsed()
    );
    let out = bed.metrics().await;
    assert_eq!(out.sum("prefill_aborts_total", &[]), 0.0, "{}", out.text());
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workers_that_were_started_again_are_asked_by_new_connections() {
    let mut bed = start("20", json!({})).await;
    for round in 0..4 {
        for topic in 0..6 {
            let answer = bed.ask(&chat(&essay(10 * round + topic))).await;
            assert_eq!(answer.status, 200, "in round {round}: {answer:?}");
        }
        for id in PREFILL {
            bed.kill(id);
        }
        for id in PREFILL {
            bed.restart(id).await;
        }
    }
}
