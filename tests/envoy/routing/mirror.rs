//! Prefills in mode `mirror`: Envoy sends a copy of the request to a prefill worker, and the two
//! workers connect through their bootstrap room.

use std::time::{Duration, Instant};

use serde_json::{Value, json};
use warmroute_testbed::deployment::EngineSpec;
use warmroute_testbed::ports::{FreePort, PATIENCE, until};

use crate::routing::bed::{RoutedAnswer, RoutingBed, chat, essay, patient, stream, text};
pub(crate) use crate::routing::call::{DECODE, PREFILL};
use crate::routing::call::{config_with_prefill, phases};
use crate::routing::contents::assert_split_contents;

/// Returns two prefill and two decode engines that behave like SGLang. Each prefill engine has its
/// own bootstrap port.
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
            .with_worker_fields(listed)
    });
    let mode = [
        "--disaggregation-mode",
        "decode",
        "--bootstrap-connect-timeout",
        "300ms",
    ];
    let listed = json!({"role": "decode"});
    let decode = DECODE.map(|id| {
        EngineSpec::new(id)
            .with(&["--speed", decode_speed])
            .with(&mode)
            .with_worker_fields(listed.clone())
    });
    prefill.into_iter().chain(decode).collect()
}

pub(crate) async fn start(prefill_speed: &str, prefill: Value) -> RoutingBed {
    start_behind(prefill_speed, prefill, patient).await
}

/// Like [`start`], with a changed Envoy configuration.
pub(crate) async fn start_behind(
    prefill_speed: &str,
    prefill: Value,
    envoy: impl Fn(&str) -> String,
) -> RoutingBed {
    start_with([prefill_speed, "20"], &prefill, envoy).await
}

/// Like [`start`], with responses that are observed up to their usage.
pub(crate) async fn start_observed() -> RoutingBed {
    let config = config_with_prefill(
        "mirror",
        &json!({}),
        &json!({"gateway": {"observe": "usage"}}),
    );
    RoutingBed::start_with_envoy_file(
        "disaggregated-mirror",
        &pools(["20", "20"]),
        config,
        patient,
    )
    .await
}

/// Like [`start_behind`], with these engine speeds.
async fn start_with(
    speeds: [&str; 2],
    prefill: &Value,
    envoy: impl Fn(&str) -> String,
) -> RoutingBed {
    let config = config_with_prefill("mirror", prefill, &json!({}));
    RoutingBed::start_with_envoy_file("disaggregated-mirror", &pools(speeds), config, envoy).await
}

/// Waits until no exchange is open. Asserts that both workers joined every bootstrap room.
pub(crate) async fn assert_all_rooms_joined(bed: &RoutingBed) {
    assert_no_room_waits(bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_unmet_total").await,
        0.0,
        "a worker waited in vain in its bootstrap room"
    );
}

/// Waits until no exchange is open and no bootstrap room has a waiting worker. Asserts that no room
/// mixed two requests. Suits tests in which workers crash.
pub(crate) async fn assert_no_room_waits(bed: &RoutingBed) {
    bed.wait_idle().await;
    assert_eq!(
        bed.engines("engine_sim:rooms_mismatched_total").await,
        0.0,
        "two requests shared a bootstrap room"
    );
    let empty = async || bed.engines("engine_sim:rooms_waiting").await == 0.0 && bed.idle().await;
    if until(PATIENCE, empty).await {
        return;
    }
    let mut left = Vec::new();
    for id in PREFILL.into_iter().chain(DECODE) {
        let of = async |name: &str| bed.engine_sum(&[id], name).await;
        let waiting = of("engine_sim:rooms_waiting").await;
        let running = of("vllm:num_requests_running").await;
        left.push((id, waiting, running, of("vllm:num_requests_waiting").await));
    }
    let page = bed.metrics().await;
    let reported: Vec<_> = page
        .text()
        .lines()
        .filter(|line| line.contains("prefill_") && !line.starts_with('#'))
        .collect();
    panic!(
        "rooms or requests are left over (id, in rooms, running, waiting): {left:?}\n{}",
        reported.join("\n")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn both_workers_receive_the_request_and_connect() {
    let bed = start("20", json!({})).await;
    let served_by = assert_split_contents(&bed).await;
    assert_eq!(served_by.prefills, PREFILL.into());
    assert_eq!(served_by.decodes, DECODE.into());
    assert_eq!(phases(&bed, "remote_prefill").await, 60.0);
    assert_all_rooms_joined(&bed).await;
    assert_eq!(
        bed.engines("engine_sim:rooms_met_total").await,
        120.0,
        "each request joins its room on both sides"
    );
    assert_eq!(bed.metric("prefill_aborts_total", &[]).await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn prompts_use_adjacent_rooms_and_n_is_rejected() {
    let bed = start("20", json!({})).await;
    let mut several = text(&essay(1));
    several["n"] = json!(2);
    // A decode engine could not process the request.
    assert_eq!(bed.query(&several).await.status, 503);
    let both = json!({"model": several["model"], "prompt": [essay(2), essay(3)], "max_tokens": 2});
    assert_eq!(
        bed.query(&both).await.json()["choices"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    assert_all_rooms_joined(&bed).await;
    assert_eq!(bed.engines("engine_sim:rooms_met_total").await, 4.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn cancelled_request_aborts_its_prefill() {
    let bed = start("0.005", json!({})).await;
    let sending = bed.send_in_background(&stream(&essay(1), 50));
    let prefilling =
        async || bed.load(11, "active_requests").await + bed.load(12, "active_requests").await;
    assert!(until(PATIENCE, async || prefilling().await == 1).await);
    let at_work = async || bed.engine_sum(&PREFILL, "vllm:num_requests_running").await == 1.0;
    assert!(until(PATIENCE, at_work).await, "the copy has arrived");
    // A frozen decode worker cannot notify the prefill worker.
    DECODE.iter().for_each(|id| bed.engine(*id).freeze());
    sending.abort();
    bed.wait_metric("prefill_aborts_total", &[("outcome", "accepted")], 1.0)
        .await;
    let aborted = async || bed.engine_sum(&PREFILL, "engine_sim:aborted_total").await == 1.0;
    assert!(until(PATIENCE, aborted).await);
    DECODE.iter().for_each(|id| bed.engine(*id).thaw());
    bed.wait_idle().await;
    bed.wait_engines("vllm:num_requests_running", 0.0).await;
}

/// Delay of a failure after its deadline that a busy machine may cause.
const MARGIN: Duration = Duration::from_secs(4);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn hanging_prefill_fails_at_the_deadline() {
    let deadline = Duration::from_secs(3);
    let bed = start("20", json!({"timeout": "3s"})).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"hang_prefills": true})).await;
    }
    // Without the deadline, the decode engine would wait for five minutes and respond with 500.
    for (number, body) in [chat(&essay(1)), text(&essay(2)), stream(&essay(3), 4)]
        .iter()
        .enumerate()
    {
        let sent_at = Instant::now();
        let answer = bed.query(body).await;
        let took = sent_at.elapsed();
        let (code, message) = answer.error(504);
        assert_eq!(code, "prefill_failed", "{message}");
        assert!(
            (deadline..deadline + MARGIN).contains(&took),
            "{took:?} for {body}"
        );
        // Both engines receive the abort.
        let aborts = 2.0 * (number + 1) as f64;
        bed.wait_metric("prefill_aborts_total", &[("outcome", "accepted")], aborts)
            .await;
    }
    bed.wait_idle().await;
    assert!(
        until(PATIENCE, async || bed
            .engine_sum(&DECODE, "engine_sim:rooms_waiting")
            .await
            == 0.0)
        .await
    );
    bed.wait_engines_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn rejected_prefill_fails_by_the_deadline() {
    let bed = start("20", json!({"timeout": "3s"})).await;
    for id in PREFILL {
        bed.misbehave(id, json!({"refuse_prefills": 500})).await;
    }
    for body in [chat(&essay(1)), stream(&essay(2), 4)] {
        let sent_at = Instant::now();
        let answer = bed.query(&body).await;
        let took = sent_at.elapsed();
        let (code, message) = answer.error(504);
        assert_eq!(code, "prefill_failed", "{message}");
        assert!(
            took < Duration::from_secs(3) + MARGIN,
            "{took:?} for {body}"
        );
    }
    bed.wait_idle().await;
    bed.wait_engines_idle().await;
    // The failure is not permanent.
    for id in PREFILL {
        bed.misbehave(id, json!({"refuse_prefills": null})).await;
    }
    assert_eq!(bed.query(&chat(&essay(3))).await.status, 200);
}

/// Sends a request while prefills are slow. Returns its workers once the prefill runs.
async fn start_and_find_workers(
    bed: &RoutingBed,
    body: &Value,
) -> (tokio::task::JoinHandle<RoutedAnswer>, [u64; 2]) {
    let sending = bed.send_in_background(body);
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
    assert!(until(PATIENCE, at_work).await, "the copy has arrived");
    let pair = [
        has(PREFILL).await.expect("a prefill worker"),
        has(DECODE).await.expect("a decode worker"),
    ];
    (sending, pair)
}

fn other(pair: [u64; 2], than: u64) -> u64 {
    if pair[0] == than { pair[1] } else { pair[0] }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dead_decode_worker_is_replaced_with_new_room() {
    let mut bed = start("0.2", json!({})).await;
    for body in [chat(&essay(1)), stream(&essay(2), 4)] {
        let before = bed
            .metric("prefill_retries_total", &[("outcome", "prefilled_again")])
            .await;
        let (sending, [_, decode]) = start_and_find_workers(&bed, &body).await;
        bed.kill(decode);
        let answer = sending.await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), answer.is_incomplete),
            (200, false),
            "{answer:?}"
        );
        assert_eq!(answer.engine(), other(DECODE, decode));
        let page = bed.metrics().await;
        assert_eq!(
            page.sum("prefill_retries_total", &[("outcome", "prefilled_again")]),
            before + 1.0
        );
        // The bootstrap room of the dead worker is aborted.
        bed.wait_metric(
            "prefill_aborts_total",
            &[("outcome", "accepted")],
            before + 1.0,
        )
        .await;
        bed.wait_idle().await;
        bed.restart(decode).await;
    }
    assert_eq!(bed.engines("engine_sim:rooms_mismatched_total").await, 0.0);
    assert_eq!(
        bed.metric("prefill_calls_total", &[("outcome", "completed")])
            .await,
        2.0
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn dead_prefill_worker_is_replaced() {
    let mut bed = start("0.2", json!({})).await;
    for body in [chat(&essay(1)), stream(&essay(2), 4)] {
        let (sending, [prefill, _]) = start_and_find_workers(&bed, &body).await;
        bed.kill(prefill);
        let at_work = async || {
            bed.engine_sum(&[other(PREFILL, prefill)], "vllm:num_requests_running")
                .await
                == 1.0
        };
        assert!(
            until(PATIENCE, at_work).await,
            "the other prefill worker has the request"
        );
        assert_eq!(
            bed.load(other(PREFILL, prefill), "active_requests").await,
            1,
            "the other prefill worker is booked"
        );
        assert_eq!(bed.load(prefill, "active_requests").await, 0);
        let answer = sending.await.unwrap();
        assert_eq!(
            (answer.status.as_u16(), answer.is_incomplete),
            (200, false),
            "{answer:?}"
        );
        bed.wait_idle().await;
        bed.restart(prefill).await;
    }
    assert_eq!(
        bed.metric("prefill_retries_total", &[("outcome", "prefilled_again")])
            .await,
        2.0
    );
    assert_eq!(bed.engines("engine_sim:rooms_mismatched_total").await, 0.0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn unstreamed_response_may_outlast_prefill_timeout() {
    let bed = start_with(["20", "1"], &json!({"timeout": "2s"}), patient).await;
    let mut long = text(&essay(1));
    long["max_tokens"] = json!(800);
    let sent_at = Instant::now();
    let sending = bed.send_in_background(&long);
    let prefilling =
        async || bed.load(11, "active_requests").await + bed.load(12, "active_requests").await;
    let at_work = async || bed.engine_sum(&DECODE, "vllm:num_requests_running").await == 1.0;
    assert!(until(PATIENCE, at_work).await);
    assert!(
        until(PATIENCE, async || prefilling().await == 0).await,
        "the prefill has ended before the response"
    );
    assert!(!sending.is_finished());
    let answer = sending.await.unwrap();
    assert_eq!(answer.status, 200, "{answer:?}");
    assert!(
        sent_at.elapsed() > Duration::from_secs(2),
        "the response did not outlast the timeout: {:?}",
        sent_at.elapsed()
    );
    let out = bed.metrics().await;
    assert_eq!(out.sum("prefill_aborts_total", &[]), 0.0, "{}", out.text());
    bed.wait_idle().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn restarted_workers_get_new_connections() {
    let mut bed = start("20", json!({})).await;
    for round in 0..4 {
        for topic in 0..6 {
            let answer = bed.query(&chat(&essay(10 * round + topic))).await;
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
