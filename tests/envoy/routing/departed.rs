//! Metric series of a worker that left the fleet, and the load of one that returns.

use serde_json::{Value, json};
use warmroute_testbed::ports::until;

use crate::routing::bed::{RoutingBed, SOON, engine, essay, stream, text};

const LABELS: &str = include_str!("../../../crates/metrics/src/labels.rs");

/// Returns the label structs that name a worker.
fn worker_labels() -> Vec<&'static str> {
    let sets = LABELS.split("pub struct ").skip(1).filter(|set| {
        let fields = set.split('}').next().unwrap();
        ["worker_id:", "dp_rank:", "endpoint:"]
            .iter()
            .any(|field| fields.contains(field))
    });
    sets.map(|set| set.split_whitespace().next().unwrap())
        .collect()
}

/// Returns the source of the metric families of `crates/metrics`, with one declaration per line:
/// `"name" field: Type = constructor;`.
fn declarations() -> &'static str {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/crates/metrics/src/families");
    let files = std::fs::read_dir(directory).unwrap();
    let sources: Vec<String> = files
        .map(|file| std::fs::read_to_string(file.unwrap().path()).unwrap())
        .collect();
    sources.join("\n").leak()
}

/// Returns the metric families whose series name a worker.
fn worker_families() -> Vec<&'static str> {
    let labels = worker_labels();
    let declared = declarations().lines().filter_map(|line| {
        let (name, rest) = line.trim().strip_prefix('"')?.split_once("\" ")?;
        let (_, declared) = rest.strip_suffix(';')?.split_once(": ")?;
        Some((name, declared))
    });
    let of_workers = declared.filter(|(_, declared)| {
        let declared = declared.split(" = ").next().unwrap();
        labels
            .iter()
            .any(|labels| declared.contains(&format!("<{labels}")))
    });
    of_workers.map(|(name, _)| name).collect()
}

/// Returns the families of a page that have series of a worker.
fn shown<'f>(page: &str, families: &[&'f str], id: u64) -> Vec<&'f str> {
    let label = format!("worker_id=\"{id}\"");
    let has_series = |family: &&&str| {
        let name = format!("warmroute_{family}");
        let suffixes = ["{", "_total{", "_count{"];
        page.lines().any(|line| {
            let rest = line.strip_prefix(&name).filter(|_| line.contains(&label));
            rest.is_some_and(|rest| suffixes.iter().any(|suffix| rest.starts_with(suffix)))
        })
    };
    families.iter().filter(has_series).copied().collect()
}

/// Families of workers whose requests have failed.
const OF_FAILURES: [&str; 2] = ["worker_failed_requests", "worker_health_state"];

/// Covers every family whose labels name a worker. For a new family, the test fails until it makes
/// the series appear, and if the series remain.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn departed_worker_leaves_no_metric_series() {
    let mut families = worker_families();
    // A task of a rank has series only while it does not run.
    families.retain(|family| !["task_up", "task_restarts"].contains(family));
    assert!(
        families.contains(&"worker_failed_requests") && families.len() >= 12,
        "{families:?}"
    );
    let more = json!({
        "index": {"approximate": {"ttl_with_events": "600s"}},
        "routing": {"outlier_detection": {
            "consecutive_failures": 1,
            "base_ejection_time": "60s",
            "max_ejection_time": "60s",
        }},
    });
    let mut bed = RoutingBed::start(&[engine(1), engine(2)], more).await;
    let mut turn = 0;
    let mut of_healthy = families.clone();
    of_healthy.retain(|family| !OF_FAILURES.contains(family));
    // The lag of a source appears with its first batch that is not replayed.
    let all_served = until(SOON, async || {
        turn += 1;
        bed.ask(&text(&essay(turn))).await;
        let page = bed.metrics().await;
        [1, 2]
            .iter()
            .all(|id| shown(page.text(), &families, *id) == of_healthy)
    });
    assert!(
        all_served.await,
        "only {:?} of {of_healthy:?}",
        shown(bed.metrics().await.text(), &families, 2)
    );
    bed.settle().await;
    bed.kill(2);
    let all_shown = until(SOON, async || {
        turn += 1;
        bed.ask(&text(&format!("{turn} is not reached"))).await;
        shown(bed.metrics().await.text(), &families, 2) == families
    });
    assert!(
        all_shown.await,
        "only {:?} of {families:?}",
        shown(bed.metrics().await.text(), &families, 2)
    );

    let endpoint = bed.engine(2).address.to_string();
    let remaining: Vec<Value> = vec![bed.engine(1).worker_entry()];
    bed.stack.write_worker_entries(&json!(remaining)).unwrap();
    bed.wait_metrics("the worker leaves", |page| page.sum("workers", &[]) == 1.0)
        .await;
    let page = bed.metrics().await;
    let left: Vec<_> = page
        .text()
        .lines()
        .filter(|line| line.contains("worker_id=\"2\"") || line.contains(&endpoint))
        .collect();
    assert!(left.is_empty(), "{left:#?}");
    let kept = shown(page.text(), &families, 1);
    assert_eq!(kept, of_healthy);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn returning_worker_has_its_running_requests() {
    let bed = RoutingBed::start(&[engine(1), engine(2)], json!({})).await;
    for id in [1, 2] {
        bed.set_first_tokens(id, false).await;
    }
    let answer = bed.send_in_background(&stream("Keep it busy.", 4));
    let mut busy = None;
    let is_running = until(SOON, async || {
        for id in [1, 2] {
            if bed.load(id, "active_requests").await == 1 {
                busy = Some(id);
            }
        }
        busy.is_some()
    });
    assert!(is_running.await, "the request is not booked");
    let busy = busy.unwrap();
    let tokens = bed.load(busy, "active_prefill_tokens").await;
    for _ in 0..2 {
        let remaining = vec![bed.engine(3 - busy).worker_entry()];
        bed.stack.write_worker_entries(&json!(remaining)).unwrap();
        bed.wait_metrics("the worker leaves", |page| page.sum("workers", &[]) == 1.0)
            .await;
        bed.stack.write_workers().unwrap();
        bed.wait_metrics("the worker returns", |page| page.sum("workers", &[]) == 2.0)
            .await;
        assert_eq!(bed.load(busy, "active_requests").await, 1);
        assert_eq!(bed.load(busy, "active_prefill_tokens").await, tokens);
    }
    for id in [1, 2] {
        bed.set_first_tokens(id, true).await;
    }
    assert_eq!(answer.await.unwrap().engine(), busy);
    bed.wait_idle().await;
}
