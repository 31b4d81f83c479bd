//! Who waits, in which class, and who goes next.

use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::Deserialize;
use warmroute::admission::config::{BucketConfig, ClassConfig, QueueConfig};
use warmroute::admission::{Classes, Entry, Lane, Policy, Queue, Turn};
use warmroute::worker::{DpRank, WorkerId, WorkerRank};

use super::frame::{Report, run_cases};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Case {
    description: String,
    profile: Profile,
    worker_count: usize,
    enqueue: Vec<Arrival>,
    blocked_names: Vec<String>,
    dispatch_order: Vec<Dispatched>,
    left_pending: usize,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, untagged)]
enum Profile {
    Single {
        queue_policy: Policy,
        synthetic_default_class: bool,
    },
    Classes {
        yaml: String,
    },
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Arrival {
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
    result: Expected,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields, untagged)]
enum Expected {
    Queued(Queued),
    Full {
        rejected: Rejected,
        #[serde(rename = "message")]
        _message: String,
    },
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Queued {
    Queued,
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct Rejected {
    policy_class: String,
    limit_kind: String,
    current: u64,
    limit: u64,
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct Dispatched {
    class: String,
    name: String,
}

/// The field's way of writing the classes.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Written {
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
    queue_policy: Option<Policy>,
    quantum: u64,
    prefill_busy_threshold: Option<u64>,
    prefill_busy_threshold_frac: Option<f64>,
    request_queue_limit_per_worker: Option<u64>,
    raw_isl_token_queue_limit_per_worker: Option<u64>,
    cached_token_queue_limit_per_worker: Option<u64>,
}

impl Profile {
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
                let written: Written = serde_saphyr::from_str(&yaml).unwrap();
                QueueConfig {
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
            prefill_busy_threshold: self.prefill_busy_threshold,
            prefill_busy_threshold_frac: self.prefill_busy_threshold_frac,
            requests_per_worker: self.request_queue_limit_per_worker,
            prompt_tokens_per_worker: self.raw_isl_token_queue_limit_per_worker,
            cached_tokens_per_worker: self.cached_token_queue_limit_per_worker,
        }
    }
}

impl Arrival {
    fn turn(&self) -> Turn {
        let pin = |(worker, rank)| {
            Lane::Pinned(WorkerRank {
                worker: WorkerId(worker),
                rank: DpRank(rank),
            })
        };
        Turn {
            class: self.requested_class.clone(),
            lane: self.pinned.map_or(Lane::Shared, pin),
            strict_priority: self.strict_priority.into(),
            priority_jump: self.priority_jump,
            prompt_tokens: self.isl_tokens,
            cached_tokens: self.cached_tokens,
        }
    }
}

fn check(case: Case) {
    let Case {
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
    let classes = Arc::new(Classes::new(&config));
    let start = Instant::now();
    let mut queue = Queue::new(classes.clone(), start);
    for arrival in &enqueue {
        let turn = arrival.turn();
        let class = classes.resolve(turn.class.as_deref(), turn.uncached());
        let name = &*classes.get(class).name;
        assert_eq!(name, arrival.resolved_class, "{description}");
        assert_eq!(turn.cost(), arrival.scheduling_cost_tokens, "{description}");
        match (&arrival.result, queue.full(class, worker_count)) {
            (Expected::Queued(Queued::Queued), None) => {
                let arrived = start + Duration::from_secs_f64(arrival.arrival_offset_s);
                queue.push(Entry {
                    turn,
                    class,
                    arrived,
                    payload: arrival.name.clone(),
                });
            }
            (Expected::Full { rejected, .. }, Some(full)) => {
                let kind = if full.kind.as_str() == "prompt_tokens" {
                    "raw_isl_tokens"
                } else {
                    full.kind.as_str()
                };
                let (current, limit) = (full.current, full.limit);
                let got = Rejected {
                    policy_class: name.into(),
                    limit_kind: kind.into(),
                    current,
                    limit,
                };
                assert_eq!(got, *rejected, "{description}");
            }
            (_, full) => panic!("{description}: {} got {full:?}", arrival.name),
        }
    }
    let mut order = Vec::new();
    while let Some((entry, ())) =
        queue.next(|entry| (!blocked_names.contains(&entry.payload)).then_some(()))
    {
        let class = classes.get(entry.class).name.to_string();
        order.push(Dispatched {
            class,
            name: entry.payload,
        });
    }
    assert_eq!(order, dispatch_order, "{description}");
    assert_eq!(queue.len(), left_pending, "{description}");
}

pub(crate) fn run(text: &str) -> Report {
    run_cases(
        text,
        &[],
        |case: &Case| case.description.clone(),
        |case, _| check(case),
    )
}
