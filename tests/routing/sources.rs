//! What becomes of requests where an engine's events are not what they should be: blocks of another size, lost batches,
//! silence, a crash; and what is learned of engines that nobody described.

use std::time::Duration;

use serde_json::{Value, json};

use crate::bed::{Answer, Bed, SOON, chat, engine, essay};
use crate::support::ports::until;
use crate::support::stack::{EngineSpec, MODEL, model_file};

/// A deployment whose model is configured with blocks of this size.
async fn bed_with_blocks(of: u32, specs: &[EngineSpec]) -> Bed {
    let models = json!([{
        "name": MODEL,
        "tokenizer": model_file("tokenizer.json.gz"),
        "tokenizer_config": model_file("tokenizer_config.json"),
        "block_size": of,
    }]);
    Bed::start(specs, json!({"models": models})).await
}

fn without_replay(id: u64) -> EngineSpec {
    EngineSpec {
        replay: false,
        ..engine(id)
    }
}

/// The event source of a worker as `/debug/fleet` has it.
async fn source(bed: &Bed, id: u64) -> Value {
    member(bed, id).await["source"].clone()
}

async fn member(bed: &Bed, id: u64) -> Value {
    let fleet = bed.stack.debug("fleet").await.unwrap();
    let members = fleet["members"].as_array().unwrap();
    members
        .iter()
        .find(|member| member["rank"]["worker"] == json!(id.to_string()))
        .cloned()
        .unwrap_or_default()
}

async fn stands(bed: &Bed, id: u64, trust: &str, because: Value) {
    let so = async || {
        let source = source(bed, id).await;
        source["trust"] == trust && source["because"] == because
    };
    assert!(
        until(SOON, so).await,
        "{trust} because {because}, but {}",
        source(bed, id).await
    );
    let state = [("worker_id", &id.to_string()[..]), ("trust", trust)];
    assert_eq!(
        bed.metrics().await.sum("kv_event_source_trust", &state),
        1.0
    );
}

/// Waits until the events of an answer have arrived.
async fn heard(bed: &Bed, id: u64, before: &Value) {
    let more = async || source(bed, id).await["batches"] != before["batches"];
    assert!(until(SOON, more).await, "no batch after {before}");
}

fn cached(answer: &Answer) -> u64 {
    answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap_or(0)
}

fn predicted(answer: &Answer) -> u64 {
    let header = answer.header("x-warmroute-predicted-cached-tokens");
    header
        .parse()
        .unwrap_or_else(|_| panic!("nothing is predicted: {answer:?}"))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_of_another_size_are_brought_to_ours() {
    for of in [8, 32] {
        let bed = bed_with_blocks(of, &[engine(1), engine(2)]).await;
        for topic in 1..4 {
            let question = chat(&essay(topic));
            let first = bed.ask(&question).await;
            let warm = first.engine();
            let tokens = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
            // What is known of it is all that the engine can reuse, to the edge of a block of the larger size.
            let least = (tokens - 1) / 32 * 32;
            let known = async || {
                let query = bed.ask(&question).await;
                query.engine() == warm && predicted(&query) >= least
            };
            assert!(
                until(SOON, known).await,
                "blocks of {of}: {:?}",
                bed.ask(&question).await
            );
            let again = bed.ask(&question).await;
            assert_eq!(
                (again.mode(), again.engine()),
                ("exact", warm),
                "blocks of {of}: {again:?}"
            );
            let (predicted, cached) = (predicted(&again), cached(&again));
            assert!(
                predicted <= cached && cached < predicted + 32,
                "blocks of {of}: {predicted} of {cached}"
            );
            assert!(
                of != 8 || predicted == cached,
                "smaller blocks lose nothing: {predicted} of {cached}"
            );
            assert_eq!(source(&bed, warm).await["engine_block_size"], json!(16));
        }
        bed.shows("the mismatch is told", |page| {
            page.sum("setting_mismatches", &[("setting", "block_size")]) == 2.0
        })
        .await;
        let mismatch =
            json!({"setting": "block_size", "configured": of.to_string(), "engine": "16"});
        let found = member(&bed, 1).await;
        assert_eq!(found["mismatches"], json!([mismatch]));
        let capacity = 8192 * 16 / u64::from(of);
        assert_eq!(
            found["worker"]["capacity"]["total_kv_blocks"],
            json!(capacity),
            "in blocks of {of}: {found}"
        );
        assert_eq!(
            bed.metrics().await.sum(
                "kv_events_total",
                &[("outcome", "filtered_block_size_mismatch")]
            ),
            0.0
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn blocks_that_do_not_divide_ours_leave_the_load_to_decide_and_say_so() {
    let bed = bed_with_blocks(24, &[engine(1)]).await;
    let question = chat(&essay(1));
    bed.ask(&question).await;
    stands(&bed, 1, "absent", json!("block_size_mismatch")).await;
    assert_eq!(source(&bed, 1).await["engine_block_size"], json!(16));
    let answer = bed.ask(&question).await;
    assert_eq!(
        (answer.mode(), answer.engine()),
        ("load_only", 1),
        "{answer:?}"
    );
    bed.shows("why", |page| {
        page.sum("degradations_total", &[("reason", "block_size_mismatch")]) >= 1.0
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_batches_make_a_source_stale_and_its_blocks_count_less_until_the_engine_begins_anew() {
    let mut bed = Bed::start(
        &[without_replay(1)],
        json!({"index_trust": {"stale_credit": 0.25}}),
    )
    .await;
    let question = chat(&essay(1));
    let before = source(&bed, 1).await;
    bed.ask(&question).await;
    heard(&bed, 1, &before).await;
    stands(&bed, 1, "exact", Value::Null).await;
    let full = explained(&bed, &question).await;
    assert_eq!(full["cost"]["trust_credit"], json!(1.0), "{full}");
    assert!(full["overlap"]["device"].as_u64().unwrap() > 10, "{full}");

    bed.misbehave(1, json!({"drop_events": {"batches": 1}}))
        .await;
    bed.ask(&chat(&essay(2))).await;
    let before = source(&bed, 1).await;
    bed.ask(&chat(&essay(3))).await;
    heard(&bed, 1, &before).await;
    stands(&bed, 1, "stale", json!("lost_batches")).await;
    let facts = source(&bed, 1).await;
    assert_eq!(
        (&facts["lost_batches"], &facts["gaps"]),
        (&json!(1), &json!(1)),
        "{facts}"
    );
    assert!(facts["doubted_blocks"].as_u64().unwrap() > 10, "{facts}");
    let less = explained(&bed, &question).await;
    assert_eq!(
        (&less["cost"]["trust_credit"], &less["source"]["trust"]),
        (&json!(0.25), &json!("stale")),
        "{less}"
    );
    let credit = |judged: &Value| judged["cost"]["device_credit"].as_f64().unwrap();
    assert_eq!(credit(&less), credit(&full) / 4.0);
    assert_eq!(
        bed.ask(&question).await.mode(),
        "exact",
        "it is still compared"
    );

    bed.kill(1);
    stands(&bed, 1, "stale", json!("detached")).await;
    bed.restart(1).await;
    // Attached again, and what happened meanwhile is not known.
    stands(&bed, 1, "stale", json!("lost_batches")).await;
    let mut topic = 10;
    let anew = async || {
        // Each of its own, because what the engine has cached is not told again.
        topic += 1;
        bed.ask(&chat(&essay(topic))).await;
        source(&bed, 1).await["trust"] == "exact"
    };
    assert!(until(SOON, anew).await, "{}", source(&bed, 1).await);
    assert_eq!(source(&bed, 1).await["restarts"], json!(1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reload_decides_what_becomes_of_blocks_when_batches_are_lost() {
    let bed = Bed::start(&[without_replay(1)], json!({})).await;
    let before = source(&bed, 1).await;
    bed.ask(&chat(&essay(1))).await;
    heard(&bed, 1, &before).await;
    bed.settle().await;
    let file = bed.stack.run_dir.join("warmroute.yaml");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&file).unwrap()).unwrap();
    config["index_trust"] = json!({"resync": "clear"});
    std::fs::write(&file, config.to_string()).unwrap();
    let taken = async || {
        bed.stack.debug("config").await.unwrap()["config"]["index_trust"]["resync"] == "clear"
    };
    assert!(until(SOON, taken).await);
    bed.misbehave(1, json!({"drop_events": {"batches": 1}}))
        .await;
    bed.ask(&chat(&essay(2))).await;
    let before = source(&bed, 1).await;
    bed.ask(&chat(&essay(3))).await;
    heard(&bed, 1, &before).await;
    let lost = async || source(&bed, 1).await["lost_batches"] == json!(1);
    assert!(until(SOON, lost).await, "{}", source(&bed, 1).await);
    assert_eq!(
        source(&bed, 1).await["doubted_blocks"],
        json!(0),
        "they are forgotten"
    );
}

/// What an explanation says of the only worker.
async fn explained(bed: &Bed, question: &Value) -> Value {
    let page = bed.stack.admin_url("/debug/explain");
    let response = bed
        .http
        .post(page)
        .json(&json!({"body": question}))
        .send()
        .await
        .unwrap();
    assert!(
        response.status().is_success(),
        "{}",
        response.text().await.unwrap()
    );
    let explanation: Value = response.json().await.unwrap();
    explanation["phases"][0]["judged"][0].clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_engine_whose_events_stop_is_noticed_by_its_answers() {
    let silence = json!({"index_trust": {"silence": {"requests": 3, "after": "1s"}}});
    let bed = Bed::start(&[without_replay(1)], silence).await;
    let before = source(&bed, 1).await;
    bed.ask(&chat(&essay(0))).await;
    heard(&bed, 1, &before).await;
    bed.misbehave(1, json!({"drop_events": {"batches": 1_000_000}}))
        .await;
    for topic in 1..=5 {
        bed.ask(&chat(&essay(topic))).await;
    }
    stands(&bed, 1, "stale", json!("silent")).await;
    bed.misbehave(1, json!({"drop_events": {"batches": 0}}))
        .await;
    // A silent source is attached anew, and what is told in between is lost; so it may take several until one is heard.
    let mut topic = 5;
    let heard = async || {
        topic += 1;
        bed.ask(&chat(&essay(topic))).await;
        source(&bed, 1).await["because"] == "lost_batches"
    };
    assert!(until(SOON, heard).await, "{}", source(&bed, 1).await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_used_after_a_loss_is_certain_again_though_the_engine_never_tells_of_it() {
    let bed = Bed::start(&[without_replay(1)], json!({"observe": "usage"})).await;
    let question = chat(&essay(1));
    let before = source(&bed, 1).await;
    bed.ask(&question).await;
    heard(&bed, 1, &before).await;
    let full = explained(&bed, &question).await;
    bed.misbehave(1, json!({"drop_events": {"batches": 1}}))
        .await;
    bed.ask(&chat(&essay(2))).await;
    bed.ask(&chat(&essay(3))).await;
    stands(&bed, 1, "stale", json!("lost_batches")).await;
    let batches = source(&bed, 1).await["batches"].clone();
    // All of it is cached, so the engine says nothing.
    let again = bed.ask(&question).await;
    assert_eq!(predicted(&again), cached(&again), "{again:?}");
    stands(&bed, 1, "incomplete", json!("untold_blocks")).await;
    assert_eq!(source(&bed, 1).await["batches"], batches);
    let judged = explained(&bed, &question).await;
    assert_eq!(
        (&judged["cost"]["trust_credit"], &judged["overlap"]),
        (&json!(1.0), &full["overlap"]),
        "{judged}"
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_nobody_configured_is_learned_from_the_engine() {
    let described = engine(1).listed(json!({"total_kv_blocks": 77}));
    let bed = Bed::start(
        &[described, engine(2).listed(json!({"kv_events": null}))],
        json!({}),
    )
    .await;
    stands(&bed, 2, "exact", Value::Null).await;
    let found = member(&bed, 2).await;
    assert_eq!(
        found["worker"]["capacity"]["total_kv_blocks"],
        json!(8192),
        "{found}"
    );
    assert_eq!(
        (&found["learned"]["block_size"], &found["mismatches"]),
        (&json!(16), &json!([])),
        "{found}"
    );
    assert!(
        found["worker"]["event_sources"][0]["replay"].is_string(),
        "{found}"
    );
    let told = async || !member(&bed, 1).await["mismatches"].is_null();
    assert!(until(SOON, told).await);
    let mismatch = json!([{"setting": "total_kv_blocks", "configured": "77", "engine": "8192"}]);
    let found = member(&bed, 1).await;
    assert_eq!(
        (
            &found["mismatches"],
            &found["worker"]["capacity"]["total_kv_blocks"]
        ),
        (&mismatch, &json!(77))
    );
    tokio::time::timeout(Duration::from_secs(60), bed.ask(&chat(&essay(1))))
        .await
        .unwrap();
}
