use std::num::NonZeroU32;

use axum::Router;
use axum::routing::get;
use proptest::prelude::*;
use tokio::net::TcpListener;
use warmroute_core::worker::WorkerEndpoint;
use warmroute_property_tests::property_config;

use super::*;
use crate::engine_client::config::EnginesConfig;

const VLLM_PAGE: &str = include_str!("../../../../../tests/data/engines/metrics-vllm.txt");
const VLLM_DP_PAGE: &str = include_str!("../../../../../tests/data/engines/metrics-vllm-dp2.txt");
/// Written by the documentation of SGLang, with two data-parallel ranks of two tensor-parallel
/// ranks each, and with priorities. It was not captured from an engine.
const SGLANG_PAGE: &str = include_str!("../../../../../tests/data/engines/metrics-sglang-dp2.txt");

fn scan(page: &str) -> EngineGauges {
    let mut scanner = GaugeScanner::default();
    scanner.scan(page.as_bytes());
    scanner.into_counters()
}

fn two_ranks() -> RankRange {
    RankRange {
        start: 0,
        size: NonZeroU32::new(2).unwrap(),
    }
}

fn counters(running: u64, waiting: u64, kv_usage: impl Into<Option<f64>>) -> Option<RankGauges> {
    Some(RankGauges {
        running,
        waiting,
        kv_usage: kv_usage.into(),
    })
}

/// Returns the counters of a page for a worker with one rank.
fn single_rank(page: &str) -> Option<RankGauges> {
    scan(page).for_rank(RankRange::ONE, DpRank(0))
}

#[test]
fn real_vllm_pages_have_counters_by_rank() {
    let idle = scan(VLLM_PAGE);
    assert_eq!(idle.max_lag(), Some(Duration::ZERO));
    assert_eq!(
        idle.for_rank(RankRange::ONE, DpRank(0)),
        counters(0, 0, 0.0)
    );
    let busy = VLLM_DP_PAGE
        .replace(
            "num_requests_running{engine=\"1\",model_name=\"tiny-qwen\"} 0.0",
            "num_requests_running{engine=\"1\",model_name=\"tiny-qwen\"} 12.0",
        )
        .replace(
            "num_requests_waiting{engine=\"0\",model_name=\"tiny-qwen\"} 0.0",
            "num_requests_waiting{engine=\"0\",model_name=\"tiny-qwen\"} 3.0",
        )
        .replace(
            "kv_cache_usage_perc{engine=\"1\",model_name=\"tiny-qwen\"} 0.0",
            "kv_cache_usage_perc{engine=\"1\",model_name=\"tiny-qwen\"} 0.75",
        );
    let busy = scan(&busy);
    assert_eq!(busy.for_rank(two_ranks(), DpRank(0)), counters(0, 3, 0.0));
    assert_eq!(busy.for_rank(two_ranks(), DpRank(1)), counters(12, 0, 0.75));
    assert_eq!(busy.for_rank(two_ranks(), DpRank(2)), None);
    assert_eq!(
        busy.for_rank(RankRange::ONE, DpRank(0)),
        counters(12, 3, 0.75),
        "a worker without data parallelism has all ranks"
    );
}

#[test]
fn sglang_page_has_counters_by_rank() {
    let page = scan(SGLANG_PAGE);
    assert_eq!(page.max_lag(), Some(SGLANG_LAG));
    assert_eq!(page.for_rank(two_ranks(), DpRank(0)), counters(7, 2, 0.62));
    assert_eq!(page.for_rank(two_ranks(), DpRank(1)), counters(3, 0, 0.04));
}

#[test]
fn older_names_and_tensorrt_llm_are_known() {
    let old = "vllm:num_requests_running{model_name=\"m\"} 2.0\nvllm:num_requests_waiting{model_name=\"m\"} 1.0\n\
               vllm:gpu_cache_usage_perc{model_name=\"m\"} 0.25\n";
    assert_eq!(single_rank(old), counters(2, 1, 0.25));
    let trt = "trtllm_num_requests_running{engine_type=\"undefined\",model_name=\"m\"} 2.0\n\
               trtllm_num_requests_waiting{engine_type=\"undefined\",model_name=\"m\"} 4\n\
               trtllm_kv_cache_utilization{model_name=\"m\"} 0.5\n";
    assert_eq!(single_rank(trt), counters(2, 4, 0.5));
    assert_eq!(scan(trt).max_lag(), None);
}

#[test]
fn unusable_values_are_unknown() {
    let page = |running: &str, waiting: &str, usage: &str| {
        format!(
            "vllm:num_requests_running {running}\nvllm:num_requests_waiting {waiting}\nvllm:kv_cache_usage_perc {usage}\n"
        )
    };
    for value in ["NaN", "+Inf", "-Inf", "-1", "1e300", "", "x", "0x10"] {
        assert_eq!(single_rank(&page(value, "1", "0.5")), None, "{value}");
        assert_eq!(single_rank(&page("1", value, "0.5")), None, "{value}");
    }
    for value in ["NaN", "+Inf", "-0.5", "x"] {
        let found = single_rank(&page("1", "2", value));
        assert_eq!(found, counters(1, 2, None), "{value}");
    }
    assert_eq!(single_rank(&page("1", "2", "1.5")), counters(1, 2, 1.0));
    assert_eq!(
        single_rank(&page("1 1700000000", "2 1700000000", "0.5 1")),
        counters(1, 2, 0.5),
        "lines with timestamps"
    );
}

#[test]
fn missing_counters_are_unknown() {
    for page in [
        "",
        "\n\n",
        "vllm:num_requests_running 1\n",
        "vllm:num_requests_waiting 1\nvllm:kv_cache_usage_perc 0.5\n",
        "vllm:num_requests_running_total 1\nvllm:num_requests_waiting_by_reason 1\n",
        "[{\"numActiveRequests\": 1, \"numQueuedRequests\": 2}]",
        "vllm:num_requests_running{engine=\"0\" 1\nvllm:num_requests_waiting{engine=0} 1\n",
    ] {
        assert!(scan(page).is_empty(), "{page}");
    }
}

#[test]
fn label_order_and_escapes_do_not_matter() {
    let page = "vllm:num_requests_running{model_name=\"a\\\"},engine=\\\"7\",engine=\"1\"} 5\n\
                vllm:num_requests_waiting{engine=\"1\",model_name=\"m\",} 6\n";
    assert_eq!(
        scan(page).for_rank(two_ranks(), DpRank(1)),
        counters(5, 6, None)
    );
}

#[test]
fn truncated_page_has_only_complete_lines() {
    let complete =
        "vllm:num_requests_running 1\nvllm:num_requests_waiting 2\nvllm:kv_cache_usage_perc 0.25\n";
    for end in 0..complete.len() {
        let found = single_rank(&complete[..end]);
        assert!(
            found.is_none() || found == counters(1, 2, None),
            "{end}: {found:?}"
        );
    }
    assert_eq!(single_rank(complete), counters(1, 2, 0.25));
}

#[test]
fn scanner_memory_is_bounded() {
    let mut scanner = GaugeScanner::default();
    for _ in 0..1000 {
        scanner.scan(&[b'v'; 10_000]);
        assert!(scanner.partial_line.capacity() <= 2 * MAX_LINE);
    }
    scanner.scan(b"\nvllm:num_requests_running 1\nvllm:num_requests_waiting 2\n");
    let many: String = (0..5000)
        .map(|rank| format!("vllm:num_requests_running{{engine=\"{rank}\"}} 1\n"))
        .collect();
    scanner.scan(many.as_bytes());
    assert_eq!(scanner.ranks.len(), RankRange::MAX_SIZE as usize);
    let found = scanner.into_counters().for_rank(RankRange::ONE, DpRank(0));
    assert_eq!(found, counters(1, 2, None));
}

proptest! {
    #![proptest_config(property_config(256))]

    #[test]
    fn pieces_do_not_change_the_result(cuts in prop::collection::vec(1_usize..3000, 1..40)) {
        let mut scanner = GaugeScanner::default();
        let mut rest = SGLANG_PAGE.as_bytes();
        for cut in cuts.iter().cycle() {
            let (piece, after) = rest.split_at((*cut).min(rest.len()));
            scanner.scan(piece);
            rest = after;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert_eq!(scanner.into_counters(), scan(SGLANG_PAGE));
    }

    #[test]
    fn garbage_is_skipped(garbage in prop::collection::vec(any::<u8>(), 0..500)) {
        let mut scanner = GaugeScanner::default();
        scanner.scan(&garbage);
        scanner.scan(b"\n");
        scanner.scan(VLLM_PAGE.as_bytes());
        prop_assert_eq!(scanner.into_counters(), scan(VLLM_PAGE));
    }
}

/// Starts a server with one page and reads its counters.
async fn read(routes: Router, path: MetricsPath) -> Result<EngineGauges, EngineError> {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = EngineUrl::http(WorkerEndpoint(listener.local_addr().unwrap()));
    let server = tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() });
    let client = EngineClient::new(&EnginesConfig::default()).unwrap();
    let found = client
        .load_gauges(&url, path, Duration::from_millis(500))
        .await;
    server.abort();
    found
}

#[tokio::test]
async fn counters_are_read_over_http() {
    let routes = Router::new()
        .route("/metrics", get(|| async { SGLANG_PAGE }))
        .route(
            "/prometheus/metrics",
            get(|| async { "trtllm_num_requests_running 1\ntrtllm_num_requests_waiting 0\n" }),
        );
    let found = read(routes.clone(), MetricsPath::Metrics).await.unwrap();
    assert_eq!(found, scan(SGLANG_PAGE));
    let found = read(routes, MetricsPath::PrometheusMetrics).await.unwrap();
    assert_eq!(
        found.for_rank(RankRange::ONE, DpRank(0)),
        counters(1, 0, None)
    );
}

#[tokio::test]
async fn huge_page_is_not_read_completely() {
    let huge = Router::new().fallback(|| async { "# filler line\n".repeat(800_000) });
    let error = read(huge, MetricsPath::Metrics).await.unwrap_err();
    assert!(matches!(error, EngineError::TooLarge(MAX_PAGE)), "{error}");
}

#[tokio::test]
async fn missing_page_and_slow_engine_are_errors() {
    let error = read(Router::new(), MetricsPath::Metrics).await.unwrap_err();
    assert!(matches!(error, EngineError::NotOffered(404)), "{error}");
    let slow = Router::new().fallback(std::future::pending::<()>);
    let error = read(slow, MetricsPath::Metrics).await.unwrap_err();
    assert!(matches!(error, EngineError::Timeout), "{error}");
}
