//! Audit of predicted cache hits. Each cause of a miss is provoked with engines, their events and a
//! real Envoy.

use std::process::Command;

use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutingBed, engine, essay, text};

async fn bed(specs: &[EngineSpec]) -> RoutingBed {
    // With these weights, a busy worker is avoided regardless of its cache.
    RoutingBed::start(
        specs,
        json!({
            "gateway": {"observe": "usage"},
            "routing": {"weights": {"decode_active_request_weight": 1000.0}},
        }),
    )
    .await
}

/// Returns the audit totals once `answers` responses have been audited.
pub(crate) async fn sums(bed: &RoutingBed, answers: u64) -> Value {
    let mut totals = Value::Null;
    let done = until(PATIENCE, async || {
        totals = bed.stack.debug_page("audit").await.unwrap();
        let sums = &totals["models"]["qwen2.5"];
        let counted = ["responses", "no_usage", "no_cached_tokens", "undecided"]
            .map(|key| sums[key].as_u64().unwrap_or(0));
        counted.iter().sum::<u64>() == answers && totals["waiting"] == 0
    });
    assert!(done.await, "{totals:#}");
    let sums = totals["models"]["qwen2.5"].take();
    let missed: u64 = sums["missed_tokens"]
        .as_object()
        .unwrap()
        .values()
        .map(|tokens| tokens.as_u64().unwrap())
        .sum();
    let number = |key: &str| sums[key].as_u64().unwrap();
    assert_eq!(
        missed,
        number("prompt_tokens") - number("delivered_tokens"),
        "{sums:#}"
    );
    sums
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn missed_tokens_are_attributed_and_printed() {
    let bed = bed(&[engine(1), engine(2)]).await;
    let prompt = text(&essay(1));
    let first = bed.query(&prompt).await;
    let tokens = first.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    bed.settle().await;
    // No worker has cached the prompt. The rest of the last block can never be reused.
    let cold = sums(&bed, 1).await;
    let reusable = (tokens - 1) / 16 * 16;
    assert_eq!(
        cold["missed_tokens"],
        json!({"block_alignment": tokens - reusable, "not_cached": reusable})
    );
    // The prediction for a repeated prompt is right.
    assert_eq!(bed.query(&prompt).await.engine(), first.engine());
    let warm = sums(&bed, 2).await;
    assert_eq!(
        (&warm["equal"], &warm["delivered_tokens"]),
        (&json!(2), &json!(reusable))
    );
    // The warm worker is busy, so the other one is chosen.
    bed.set_first_tokens(first.engine(), false).await;
    let busy = bed.send_in_background(&prompt);
    bed.wait_load(first.engine(), "active_requests", |active| active == 1)
        .await;
    let spilled = bed.query(&prompt).await;
    assert_ne!(spilled.engine(), first.engine());
    bed.set_first_tokens(first.engine(), true).await;
    busy.await.unwrap().engine();
    let all = sums(&bed, 4).await;
    assert_eq!(
        all["missed_tokens"],
        json!({"block_alignment": 4 * (tokens - reusable), "not_cached": reusable, "load_balancing": reusable})
    );
    assert_eq!(
        (
            &all["equal"],
            &all["available_tokens"],
            &all["captured_tokens"]
        ),
        (&json!(4), &json!(3 * reusable), &json!(2 * reusable))
    );
    let page = bed.metrics().await;
    assert_eq!(
        page.sum("audit_tokens_total", &[("kind", "prompt")]),
        all["prompt_tokens"].as_f64().unwrap()
    );
    let missed = all["prompt_tokens"].as_u64().unwrap() - all["delivered_tokens"].as_u64().unwrap();
    assert_eq!(page.sum("audit_missed_tokens_total", &[]), missed as f64);

    assert_report_is_printed(&bed, &all);
}

/// Asserts the output of `warmroute audit`.
fn assert_report_is_printed(bed: &RoutingBed, all: &Value) {
    let admin = bed.stack.admin_url("");
    let command = |more: &[&str]| {
        let ran = Command::new(env!("CARGO_BIN_EXE_warmroute"))
            .args(["audit", "--admin", &admin])
            .args(more)
            .output();
        let ran = ran.unwrap();
        assert!(ran.status.success(), "{ran:?}");
        String::from_utf8(ran.stdout).unwrap()
    };
    let text = command(&["--price", "1000000"]);
    for words in [
        "qwen2.5",
        "cached: prefill tokens saved",
        "worth",
        "no worker had cached it",
        "predictions correct",
    ] {
        assert!(text.contains(words), "{words}:\n{text}");
    }
    assert_eq!(
        serde_json::from_str::<Value>(&command(&["--json"])).unwrap()["models"]["qwen2.5"],
        *all
    );
}
