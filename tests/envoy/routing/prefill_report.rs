//! Cache reports of prefill workers. Audit and parity check assess the worker that computed the
//! prompt.

use serde_json::{Value, json};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::audit::sums;
use crate::routing::bed::{RoutingBed, engine_for, essay, stream, text};
use crate::routing::call::{NIXL, call_config, start};
use crate::routing::mirror;

const PREFILL: u64 = 11;
const DECODE: u64 = 21;

async fn bed() -> RoutingBed {
    let pools = [
        engine_for("prefill", PREFILL).with(&NIXL),
        engine_for("decode", DECODE).with(&NIXL),
    ];
    let more = json!({"gateway": {"observe": "usage"}});
    start(&pools, call_config(json!({}), more)).await
}

/// Returns the number of checks that confirmed the tokens of a worker by its events.
async fn confirmed(bed: &RoutingBed, worker: u64) -> u64 {
    let parity: Value = bed.stack.debug_page("parity").await.unwrap();
    parity[0]["workers"][worker.to_string()]["events"]["confirmed"]
        .as_u64()
        .unwrap_or(0)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn called_prefill_is_audited_by_its_response() {
    let bed = bed().await;
    let prompt = text(&essay(1));
    let cold = bed.query(&prompt).await;
    assert_eq!(
        (cold.engine(), cold.header("x-prefill-instance-id")),
        (DECODE, "11")
    );
    let tokens = cold.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    let reusable = (tokens - 1) / 16 * 16;
    bed.settle().await;
    assert_eq!(
        sums(&bed, 1).await["missed_tokens"]["not_cached"],
        reusable,
        "the cache of the prefill worker is cold"
    );
    bed.query(&prompt).await.engine();
    let warm = sums(&bed, 2).await;
    assert_eq!(
        (&warm["equal"], &warm["delivered_tokens"]),
        (&json!(2), &json!(reusable)),
        "{warm:#}"
    );
    assert_eq!(
        (&warm["computed_by"], &warm["errors"]),
        (&json!({"prefill": 2}), &json!({})),
        "{warm:#}"
    );
    let page = bed.metrics().await;
    for (role, expected) in [("prefill", reusable as f64), ("decode", 0.0)] {
        for family in [
            "predicted_cached_tokens_total",
            "reported_cached_tokens_total",
        ] {
            assert_eq!(
                page.sum(family, &[("role", role)]),
                expected,
                "{family} {role}"
            );
        }
    }
    let has_confirmed = until(PATIENCE, async || confirmed(&bed, PREFILL).await > 0).await;
    assert!(
        has_confirmed,
        "{:#}",
        bed.stack.debug_page("parity").await.unwrap()
    );
    assert_eq!(confirmed(&bed, DECODE).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn prefill_that_envoy_mirrors_is_audited_as_undecided() {
    let bed = mirror::start_observed().await;
    for topic in 0..4 {
        bed.query(&stream(&essay(topic), 4)).await.engine();
    }
    let sums = sums(&bed, 4).await;
    assert_eq!(
        (&sums["undecided"], &sums["responses"]),
        (&json!(4), &json!(0)),
        "{sums:#}"
    );
    assert_eq!(
        (&sums["missed_tokens"], &sums["errors"]),
        (&json!({}), &json!({})),
        "{sums:#}"
    );
    assert_eq!(
        bed.metric("audit_responses_total", &[("outcome", "undecided")])
            .await,
        4.0
    );
    // warmroute itself sends the copy of a unary request, so it receives the report.
    bed.query(&text(&essay(5))).await.engine();
    let sums = self::sums(&bed, 5).await;
    assert_eq!(
        (&sums["undecided"], &sums["computed_by"]),
        (&json!(4), &json!({"prefill": 1})),
        "{sums:#}"
    );
}
