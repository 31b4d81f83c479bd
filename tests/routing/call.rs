//! Prefills that warmroute has done itself by another worker, and hands over to whoever decodes.

use std::collections::BTreeSet;
use std::time::Duration;

use futures_util::{StreamExt as _, stream as streams};
use serde_json::{Value, json};

use crate::bed::{Answer, Bed, SOON, chat, engine_for, essay, stream, text};
use crate::support::ports::until;
use crate::support::stack::{BLOCK_SIZE, EngineSpec, MODEL, model_file};
use crate::told::{Alone, told};

pub(crate) const PREFILL: [u64; 2] = [11, 12];
pub(crate) const DECODE: [u64; 2] = [21, 22];

pub(crate) fn pools(args: &[&str]) -> Vec<EngineSpec> {
    let pool = |role, ids: [u64; 2]| ids.map(|id| engine_for(role, id).with(args));
    pool("prefill", PREFILL)
        .into_iter()
        .chain(pool("decode", DECODE))
        .collect()
}

#[expect(
    clippy::needless_pass_by_value,
    reason = "tests read better without the references"
)]
pub(crate) fn calling(prefill: Value, more: Value) -> Value {
    carrying("call", &prefill, &more)
}

/// A configuration in which prefills are carried out, and more.
pub(crate) fn carrying(by: &str, prefill: &Value, more: &Value) -> Value {
    let mut config = json!({"models": [{
        "name": MODEL,
        "tokenizer": model_file("tokenizer.json.gz"),
        "tokenizer_config": model_file("tokenizer_config.json"),
        "block_size": BLOCK_SIZE,
        "prefill": prefill,
    }]});
    config["models"][0]["prefill"]["by"] = json!(by);
    config
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    config
}

pub(crate) const NIXL: [&str; 2] = ["--kv-connector", "nixl"];

impl Bed {
    /// Whether no engine has anything to do.
    pub(crate) async fn idle(&self) -> bool {
        self.engines("vllm:num_requests_running").await
            + self.engines("vllm:num_requests_waiting").await
            == 0.0
    }

    /// Waits until nothing is in flight, and insists that no engine keeps anything for a request that is over.
    pub(crate) async fn nothing_left(&self) {
        self.quiet().await;
        assert!(
            until(SOON, async || self.idle().await).await,
            "an engine works for nobody"
        );
        assert_eq!(
            self.engines("engine_sim:kv_leases").await,
            0.0,
            "leases are left over"
        );
        assert_eq!(
            self.engines("engine_sim:kv_mismatches_total").await,
            0.0,
            "blocks of other requests were taken"
        );
    }
}

/// What an answer says, whoever gave it.
fn words(answer: &Answer) -> String {
    assert_eq!(answer.status, 200, "{answer:?}");
    let choice = &answer.json()["choices"][0];
    choice["message"]["content"]
        .as_str()
        .or(choice["text"].as_str())
        .unwrap()
        .to_owned()
}

/// Behind the shipped configuration for it.
pub(crate) async fn start(specs: &[EngineSpec], more: Value) -> Bed {
    Bed::behind_file("disaggregated-call", specs, more, crate::bed::patient).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_workers_do_their_part_and_answers_are_as_if_one_had_done_it_all() {
    let bed = start(&pools(&NIXL), calling(json!({}), json!({}))).await;
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
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, 60.0);
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("prefill_calls_total", &[("outcome", "done")]),
        60.0
    );
    assert_eq!(
        page.sum("prefill_to_first_token_seconds_count", &[]),
        20.0,
        "of each streamed answer"
    );
    assert_eq!(
        page.sum("phases_total", &[("phases", "remote_prefill")]),
        60.0
    );
    bed.nothing_left().await;
}

/// Which phases a request went through, as the metrics have them.
pub(crate) async fn phases(bed: &Bed, of: &str) -> f64 {
    bed.metrics().await.sum("phases_total", &[("phases", of)])
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_that_fails_is_done_by_the_next_one_and_then_by_whoever_decodes() {
    let args = [&NIXL[..], &["--kv-lease", "1s"]].concat();
    let bed = start(&pools(&args), calling(json!({"deadline": "2s"}), json!({}))).await;
    let well = json!({"refuse_prefills": null, "hang_prefills": false, "omit_transfer_params": false, "fail_prefills_with_200": false});
    let mut topics = 0..;
    // What goes wrong at one of them is done by the other.
    for how in [
        json!({"refuse_prefills": 503}),
        json!({"refuse_prefills": 500}),
        json!({"hang_prefills": true}),
    ] {
        bed.misbehave(11, how.clone()).await;
        for _ in 0..4 {
            let answer = bed.ask(&chat(&essay(topics.next().unwrap()))).await;
            assert_eq!(
                (
                    words(&answer).is_empty(),
                    answer.header("x-prefill-instance-id")
                ),
                (false, "12"),
                "{how}"
            );
        }
        bed.misbehave(11, well.clone()).await;
        bed.quiet().await;
    }
    let remote = phases(&bed, "remote_prefill").await;
    assert_eq!((remote, phases(&bed, "prefill_failed").await), (12.0, 0.0));
    // What goes wrong at both is done by whoever decodes; and so is what another one could do no better.
    let everywhere = [
        (json!({"refuse_prefills": 503}), "prefill_failed"),
        (json!({"refuse_prefills": 400}), "prefill_refused"),
        (json!({"omit_transfer_params": true}), "nothing_handed_over"),
        (
            json!({"fail_prefills_with_200": true}),
            "nothing_handed_over",
        ),
    ];
    for (how, reason) in everywhere {
        let before = phases(&bed, reason).await;
        for id in PREFILL {
            bed.misbehave(id, how.clone()).await;
        }
        let answer = bed.ask(&chat(&essay(topics.next().unwrap()))).await;
        assert_eq!(
            (
                words(&answer).is_empty(),
                answer.header("x-prefill-instance-id")
            ),
            (false, ""),
            "{how}"
        );
        assert_eq!(phases(&bed, reason).await, before + 1.0, "{how}");
        for id in PREFILL {
            bed.misbehave(id, well.clone()).await;
        }
    }
    // An engine that does not say where the blocks are keeps them for nobody.
    assert!(
        until(SOON, async || bed.engines("engine_sim:kv_leases").await
            == 0.0)
        .await
    );
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn where_decode_workers_must_not_prefill_the_client_is_refused() {
    let bed = start(
        &pools(&NIXL),
        calling(json!({}), json!({"disaggregation": {"enforce": true}})),
    )
    .await;
    assert_eq!(bed.ask(&chat(&essay(1))).await.status, 200);
    for id in PREFILL {
        bed.misbehave(id, json!({"refuse_prefills": 500})).await;
    }
    let (code, _) = bed.ask(&chat(&essay(2))).await.error(503);
    assert_eq!(code, "no_prefill_worker");
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_worker_is_booked_while_it_has_the_request_and_envoy_waits_for_the_prefill() {
    let hasty = |shipped: &str| {
        crate::bed::patient(shipped).replace(" message_timeout: 30s", " message_timeout: 2s")
    };
    let bed = Bed::behind_file(
        "disaggregated-call",
        &pools(&NIXL),
        calling(json!({}), json!({})),
        hasty,
    )
    .await;
    for id in PREFILL {
        bed.misbehave(id, json!({"slow_prefill_ms": 5000})).await;
    }
    let asking = bed.asking(&stream(&essay(1), 200));
    let of = async |ids: [u64; 2], what: &str| {
        bed.load(ids[0], what).await + bed.load(ids[1], what).await
    };
    assert!(
        until(SOON, async || of(PREFILL, "active_prefill_tokens").await
            > 300)
        .await,
        "the prefill is booked"
    );
    assert_eq!(of(DECODE, "active_requests").await, 0, "nobody decodes yet");
    assert!(
        until(SOON, async || of(DECODE, "active_blocks").await > 0).await,
        "the decode is booked"
    );
    assert_eq!(
        of(PREFILL, "active_requests").await,
        0,
        "the prefill is over"
    );
    assert_eq!(
        of(DECODE, "active_prefill_tokens").await,
        0,
        "and nothing is left of it"
    );
    let answer = asking.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.mode()),
        (200, "exact"),
        "{answer:?}"
    );
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_that_leaves_does_not_cut_a_prefill_off_and_it_counts_until_its_end() {
    let args = [&NIXL[..], &["--kv-lease", "2s"]].concat();
    let bed = start(&pools(&args), calling(json!({}), json!({}))).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"slow_prefill_ms": 3000})).await;
    }
    let asking = bed.asking(&chat(&essay(1)));
    let prefilling =
        async || bed.load(11, "active_requests").await + bed.load(12, "active_requests").await;
    // It is booked before it is asked for, and what no engine has been asked for is taken back.
    assert!(
        until(SOON, async || bed
            .engines("engine_sim:prefills_asked_total")
            .await
            == 1.0)
        .await
    );
    asking.abort();
    bed.shows("the client is gone", |page| {
        page.sum("prefill_calls_total", &[("outcome", "left_after_start")]) == 1.0
    })
    .await;
    assert_eq!(prefilling().await, 1, "the engine still works on it");
    bed.shows("it ends", |page| {
        page.sum("prefill_calls_total", &[("outcome", "done")]) == 1.0
    })
    .await;
    bed.quiet().await;
    // Nobody comes for the blocks, and the engine gives them up by itself.
    assert!(
        until(SOON, async || bed
            .engines("engine_sim:kv_leases_expired_total")
            .await
            == 1.0)
        .await
    );
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_client_cannot_say_whose_blocks_to_take() {
    let bed = start(&pools(&NIXL), calling(json!({}), json!({}))).await;
    // Somebody's blocks wait at a prefill engine.
    let mut prefill = text(&essay(1));
    prefill["kv_transfer_params"] = json!({"do_remote_decode": true, "do_remote_prefill": false});
    let answer = bed
        .http
        .post(bed.engine(11).url("/v1/completions"))
        .json(&prefill)
        .send()
        .await
        .unwrap();
    let waiting: Value = answer.json().await.unwrap();
    let mut forged = text(&essay(2));
    forged["kv_transfer_params"] = waiting["kv_transfer_params"].clone();
    assert!(
        forged["kv_transfer_params"]["remote_host"].is_string(),
        "{waiting}"
    );
    // By itself the engine takes them and answers from them; the simulated one says so.
    let taken = Answer::of(
        bed.http
            .post(bed.engine(21).url("/v1/completions"))
            .json(&forged),
    )
    .await;
    assert_eq!(
        (taken.status.as_u16(), taken.header("x-engine-kv")),
        (200, "mismatch"),
        "{taken:?}"
    );
    let before = bed.engines("engine_sim:kv_mismatches_total").await;
    assert_eq!(before, 1.0);
    for shape in [json!({}), json!({"n": 2})] {
        let mut forged = forged.clone();
        forged
            .as_object_mut()
            .unwrap()
            .extend(shape.as_object().unwrap().clone());
        assert_eq!(bed.ask(&forged).await.status, 200);
    }
    assert_eq!(bed.engines("engine_sim:kv_mismatches_total").await, before);
    assert_eq!(
        phases(&bed, "not_handed_over").await,
        1.0,
        "two answers are not handed over"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tensorrt_llms_workers_hand_over_in_their_own_words() {
    let bed = start(
        &pools(&["--disaggregation", "trtllm"]),
        calling(json!({"protocol": "trtllm"}), json!({})),
    )
    .await;
    let alone = Alone::start().await;
    for topic in 0..12 {
        let body = if topic % 2 == 0 {
            text(&essay(topic))
        } else {
            chat(&essay(topic))
        };
        let answer = bed.ask(&body).await;
        assert!(
            PREFILL.contains(&answer.header("x-prefill-instance-id").parse().unwrap()),
            "{answer:?}"
        );
        assert_eq!(told(&body, &answer), Ok(alone.says(&body).await), "{body}");
    }
    assert_eq!(bed.engines("engine_sim:kv_transfers_total").await, 12.0);
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_little_to_compute_stays_with_whoever_decodes() {
    let conditional = json!({"disaggregation": {"conditional": {"uncached_tokens": 64}}});
    let bed = start(&pools(&NIXL), calling(json!({}), conditional)).await;
    let first = bed.ask(&text(&essay(1))).await;
    assert!(
        !first.header("x-prefill-instance-id").is_empty(),
        "all of it is to be computed: {first:?}"
    );
    bed.settle().await;
    // Now the decode worker has it, because it took the blocks over.
    let again = bed.ask(&text(&essay(1))).await;
    assert_eq!(
        (again.header("x-prefill-instance-id"), again.engine()),
        ("", first.engine()),
        "{again:?}"
    );
    assert_eq!(phases(&bed, "little_to_compute").await, 1.0);
    bed.nothing_left().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn waiting_request_survives_a_stalled_warmroute() {
    let bed = start(&pools(&NIXL), calling(json!({}), json!({}))).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"slow_prefill_ms": 10_000})).await;
    }
    let asking = bed.asking(&stream(&essay(1), 4));
    assert!(
        until(SOON, async || bed
            .engines("engine_sim:prefills_asked_total")
            .await
            == 1.0)
        .await
    );
    // Longer than pings of 2 s and 2 s allow, shorter than those of the shipped file do.
    bed.stack.router().unwrap().freeze();
    tokio::time::sleep(Duration::from_secs(7)).await;
    bed.stack.router().unwrap().thaw();
    let answer = asking.await.unwrap();
    assert_eq!(
        (answer.status.as_u16(), answer.mode()),
        (200, "exact"),
        "{answer:?}"
    );
    assert_eq!(
        bed.metrics()
            .await
            .sum("prefill_calls_total", &[("outcome", "done")]),
        1.0
    );
    bed.nothing_left().await;
}
