//! Queue order: waiting requests, their classes, and the request that is dispatched next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};
use warmroute_server::dispatch::queue::config::{BucketConfig, ClassConfig, QueueConfig};
use warmroute_server::dispatch::queue::{
    FairQueue, QueueEntry, QueueLane, QueueMetadata, QueuePolicy,
};

use super::frame::{CheckReport, run_cases};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueCase {
    description: String,
    profile: QueueProfile,
    worker_count: usize,
    enqueue: Vec<RequestArrival>,
    blocked_names: Vec<String>,
    dispatch_order: Vec<DispatchedEntry>,
    left_pending: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, untagged)]
enum QueueProfile {
    Single {
        queue_policy: QueuePolicy,
        synthetic_default_class: bool,
    },
    Classes {
        yaml: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RequestArrival {
    name: String,
    arrival_offset_s: f64,
    isl_tokens: u64,
    cached_tokens: u64,
    pinned: Option<(u64, u32)>,
    priority_jump: f64,
    strict_priority: u32,
    requested_class: Option<String>,
    resolved_class: String,
    scheduling_cost_tokens: u64,
    result: ExpectedOutcome,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, untagged)]
enum ExpectedOutcome {
    Queued(QueuedEntry),
    Full {
        rejected: RejectedEntry,
        #[serde(rename = "message")]
        _message: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum QueuedEntry {
    Queued,
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct RejectedEntry {
    policy_class: String,
    limit_kind: String,
    current: u64,
    limit: u64,
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct DispatchedEntry {
    class: String,
    name: String,
}

/// Class configuration in the format of the reference.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct QueueFile {
    default_policy_family: String,
    uncached_isl_buckets: Vec<BucketConfig>,
    policy_classes: Vec<WrittenClass>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WrittenClass {
    name: String,
    policy_family: Option<String>,
    cache_bucket: Option<String>,
    queue_policy: Option<QueuePolicy>,
    quantum: u64,
    prefill_busy_threshold_frac: Option<f64>,
    request_queue_limit_per_worker: Option<u64>,
    raw_isl_token_queue_limit_per_worker: Option<u64>,
    cached_token_queue_limit_per_worker: Option<u64>,
}

impl QueueProfile {
    fn config(self) -> QueueConfig {
        match self {
            Self::Single {
                queue_policy,
                synthetic_default_class,
            } => {
                assert!(synthetic_default_class);
                QueueConfig {
                    policy: queue_policy,
                    ..QueueConfig::default()
                }
            }
            Self::Classes { yaml } => {
                let written: QueueFile = serde_saphyr::from_str(&yaml).unwrap();
                QueueConfig {
                    prefill_busy_threshold_frac: written.policy_classes[0]
                        .prefill_busy_threshold_frac,
                    default_family: Some(written.default_policy_family),
                    uncached_buckets: written.uncached_isl_buckets,
                    classes: written
                        .policy_classes
                        .into_iter()
                        .map(WrittenClass::config)
                        .collect(),
                    ..QueueConfig::default()
                }
            }
        }
    }
}

impl WrittenClass {
    fn config(self) -> ClassConfig {
        ClassConfig {
            name: self.name,
            family: self.policy_family,
            bucket: self.cache_bucket,
            policy: self.queue_policy,
            quantum: self.quantum,
            max_requests_per_worker: self.request_queue_limit_per_worker,
            max_prompt_tokens_per_worker: self.raw_isl_token_queue_limit_per_worker,
            max_cached_tokens_per_worker: self.cached_token_queue_limit_per_worker,
        }
    }
}

impl RequestArrival {
    fn turn(&self) -> QueueMetadata {
        let pin = |(worker, rank)| {
            QueueLane::Pinned(WorkerRank {
                worker: WorkerId(worker),
                rank: DpRank(rank),
            })
        };
        QueueMetadata {
            class: self.requested_class.clone(),
            lane: self.pinned.map_or(QueueLane::AnyWorker, pin),
            strict_priority: self.strict_priority.into(),
            priority_jump: self.priority_jump,
            prompt_tokens: self.isl_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

/// Returns the name of a limit in the reference.
fn reference_kind(kind: &str) -> &str {
    if kind == "prompt_tokens" {
        "raw_isl_tokens"
    } else {
        kind
    }
}

fn check(case: QueueCase) {
    let QueueCase {
        description,
        profile,
        worker_count,
        enqueue,
        blocked_names,
        dispatch_order,
        left_pending,
    } = case;
    let config = profile.config();
    assert_eq!(config.problems(), [], "{description}");
    let classes = Arc::new(config.to_classes());
    let start = Instant::now();
    let mut queue = FairQueue::new(classes.clone(), start);
    for arrival in &enqueue {
        let turn = arrival.turn();
        let class = classes.resolve(turn.class.as_deref(), turn.uncached_tokens());
        let name = &*classes.get(class).name;
        assert_eq!(name, arrival.resolved_class, "{description}");
        assert_eq!(turn.cost(), arrival.scheduling_cost_tokens, "{description}");
        match (&arrival.result, queue.find_overflow(class, worker_count)) {
            (ExpectedOutcome::Queued(QueuedEntry::Queued), None) => {
                let arrived = start + Duration::from_secs_f64(arrival.arrival_offset_s);
                queue.push(QueueEntry {
                    metadata: turn,
                    class,
                    arrived_at: arrived,
                    payload: arrival.name.clone(),
                });
            }
            (ExpectedOutcome::Full { rejected, .. }, Some(full)) => {
                let found = RejectedEntry {
                    policy_class: name.into(),
                    limit_kind: reference_kind(full.kind.as_str()).into(),
                    current: full.current,
                    limit: full.limit,
                };
                assert_eq!(found, *rejected, "{description}");
            }
            (_, full) => panic!("{description}: {} got {full:?}", arrival.name),
        }
    }
    let mut order = Vec::new();
    while let Some((entry, ())) =
        queue.place_next(|entry| (!blocked_names.contains(&entry.payload)).then_some(()))
    {
        let class = classes.get(entry.class).name.to_string();
        order.push(DispatchedEntry {
            class,
            name: entry.payload,
        });
    }
    assert_eq!(order, dispatch_order, "{description}");
    assert_eq!(queue.len(), left_pending, "{description}");
}

pub(crate) fn run(text: &str) -> CheckReport {
    run_cases(
        text,
        &[],
        |case: &QueueCase| case.description.clone(),
        |case, _| check(case),
    )
}
