//! Prefill and decode on different workers.

use std::collections::BTreeSet;

use serde_json::{Value, json};
use warmroute_testbed::deployment::{EngineProcess, EngineSpec};

use crate::routing::bed::{RoutedAnswer, RoutingBed, chat, engine_for, essay, stream};
use crate::routing::call::{DECODE, PREFILL, phases, pools};

/// Returns the prefill worker in the headers of the decode request, or `None` if they name none.
fn prefill_of(bed: &RoutingBed, answer: &RoutedAnswer) -> Option<u64> {
    let worker = answer.engine();
    assert!(
        DECODE.contains(&worker),
        "a prefill engine decodes: {answer:?}"
    );
    assert_eq!(
        (answer.mode(), answer.chosen()),
        ("exact", worker),
        "{answer:?}"
    );
    assert_eq!(
        answer.header("x-received-worker-instance-id"),
        worker.to_string(),
        "{answer:?}"
    );
    assert_eq!(answer.header("x-received-dp-rank"), "0", "{answer:?}");
    let reported = [
        "x-received-prefill-instance-id",
        "x-received-prefill-dp-rank",
        "x-received-prefiller-host-port",
    ];
    let Ok(prefill) = answer.header("x-prefill-instance-id").parse() else {
        assert_eq!(
            reported.map(|name| answer.header(name)),
            [""; 3],
            "{answer:?}"
        );
        return None;
    };
    let address = bed.engine(prefill).address.to_string();
    assert_eq!(
        reported.map(|name| answer.header(name)),
        [&prefill.to_string(), "0", &address],
        "{answer:?}"
    );
    assert!(PREFILL.contains(&prefill), "{answer:?}");
    Some(prefill)
}

/// Writes only these workers to the workers file, and waits until they are the fleet.
async fn list_workers(bed: &RoutingBed, wanted: impl Fn(u64) -> bool) {
    let entries: Vec<Value> = bed
        .stack
        .engines
        .iter()
        .filter(|engine| wanted(engine.spec.id))
        .map(EngineProcess::worker_entry)
        .collect();
    bed.stack.write_worker_entries(&json!(entries)).unwrap();
    bed.wait_metric("workers", &[], entries.len() as f64).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn decode_request_names_both_workers() {
    let config = json!({"routing": {"policy": "round_robin"}});
    let bed = RoutingBed::start(&pools(&[]), config).await;
    let mut prefills = BTreeSet::new();
    let mut decodes = BTreeSet::new();
    for topic in 0..30 {
        let body = if topic % 2 == 0 {
            chat(&essay(topic))
        } else {
            stream(&essay(topic), 4)
        };
        let answer = bed.query(&body).await;
        prefills.insert(prefill_of(&bed, &answer).expect("a prefill worker"));
        decodes.insert(answer.engine());
        bed.wait_idle().await;
    }
    assert_eq!((prefills, decodes), (PREFILL.into(), DECODE.into()));
    // No condition is configured, so no prompt is too short or too warm for a remote prefill.
    let again = bed.query(&chat(&essay(0))).await;
    assert!(prefill_of(&bed, &again).is_some(), "{again:?}");
    assert_eq!(phases(&bed, "remote_prefill").await, 31.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn prefill_is_booked_until_the_first_token() {
    // Slow enough to observe the load during the decode phase.
    let decode = EngineSpec::new(21).with(&["--step-us", "30000"]);
    let specs = [
        engine_for("prefill", 11),
        decode.with_worker_fields(json!({"role": "decode"})),
    ];
    let bed = RoutingBed::start(&specs, json!({})).await;
    bed.set_first_tokens(21, false).await;
    let mut response = bed.post(&stream(&essay(1), 200)).send().await.unwrap();
    let booked = async |id| {
        let mut booked = Vec::new();
        for of in ["active_prefill_tokens", "active_requests", "active_blocks"] {
            booked.push(bed.load(id, of).await);
        }
        booked
    };
    let [prefill, decode] = [booked(11).await, booked(21).await];
    assert!(
        prefill[0] > 300 && prefill[1] == 1 && prefill[2] == 0,
        "{prefill:?}"
    );
    assert!(
        decode[0] == 0 && decode[1] == 1 && decode[2] > 15,
        "{decode:?}"
    );

    bed.set_first_tokens(21, true).await;
    response.chunk().await.unwrap().unwrap();
    bed.wait_load(11, "active_prefill_tokens", |tokens| tokens == 0)
        .await;
    assert_eq!(
        booked(11).await,
        [0, 0, 0],
        "the load of the prefill worker is released"
    );
    assert_eq!(
        booked(21).await,
        decode,
        "the load of the decode worker stays"
    );
    drop(response);
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn enforced_remote_prefill_rejects_without_workers() {
    let bed = RoutingBed::start(
        &pools(&[]),
        json!({"routing": {"disaggregation": {"enforce": true}}}),
    )
    .await;
    for round in 0..2 {
        let answer = bed.query(&chat(&essay(10 * round))).await;
        assert!(prefill_of(&bed, &answer).is_some(), "{answer:?}");
        list_workers(&bed, |id| DECODE.contains(&id)).await;
        for body in [chat(&essay(1)), stream(&essay(2), 4)] {
            let refused = bed.query(&body).await;
            let (code, message) = refused.error(503);
            assert_eq!(code, "no_prefill_worker");
            assert!(message.contains("prefill"), "{message}");
            assert_eq!(refused.retry_after(), 1);
            assert_eq!(
                refused.header("x-engine-id"),
                "",
                "no engine received the request: {refused:?}"
            );
        }
        bed.wait_idle().await;
        list_workers(&bed, |_| true).await;
    }
    let answer = bed.query(&chat(&essay(30))).await;
    assert!(prefill_of(&bed, &answer).is_some(), "{answer:?}");
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("degradations_total", &[("reason", "no_prefill")]),
        4.0,
        "{}",
        page.text()
    );
}
