use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::queue::{
    BusyThreshold, ClassDefinition, QueueClass, QueueLimits, QueueMetadata, QueuePolicy,
};
use crate::worker::{DpRank, WorkerId, WorkerRank};

mod model;

use model::{Model, Waiter};

#[derive(Clone, Debug)]
enum Op {
    Push {
        class: usize,
        after: Duration,
        metadata: QueueMetadata,
    },
    /// Removes one of the queued requests.
    Remove(usize),
    Reopen,
    /// Places this many requests, but none whose number is divisible by the second value.
    Next(usize, usize),
}

fn class_configs() -> impl Strategy<Value = Vec<QueueClass>> {
    let policy = prop_oneof![
        Just(QueuePolicy::Fcfs),
        Just(QueuePolicy::Lcfs),
        Just(QueuePolicy::Wspt)
    ];
    let limit = || prop::option::weighted(0.3, 0u64..40);
    let class = (
        policy,
        1u64..9,
        prop::option::weighted(0.3, 0u64..4),
        limit(),
        limit(),
    );
    vec(class, 1..4).prop_map(|classes| {
        let class = |(at, (policy, quantum, requests, prompt, cached))| QueueClass {
            name: format!("class-{at}").into(),
            policy,
            quantum,
            limits: QueueLimits {
                requests,
                prompt_tokens: prompt,
                cached_tokens: cached,
            },
        };
        classes.into_iter().enumerate().map(class).collect()
    })
}

fn lane() -> impl Strategy<Value = QueueLane> {
    let pin = |worker| {
        QueueLane::Pinned(WorkerRank {
            worker: WorkerId(worker),
            rank: DpRank(0),
        })
    };
    prop_oneof![3 => Just(QueueLane::AnyWorker), 1 => (0u64..2).prop_map(pin), 1 => (0u64..2).prop_map(QueueLane::WorkerSet)]
}

fn op() -> impl Strategy<Value = Op> {
    let jump = prop_oneof![4 => Just(0.0), 1 => Just(-1.0), 1 => Just(0.5), 1 => Just(2.0), 1 => Just(f64::NAN)];
    let metadata = (
        lane(),
        prop_oneof![3 => Just(0i64), 1 => -2i64..3],
        jump,
        0u64..40,
        0u64..40,
    );
    let push = (0usize..4, 0u64..4, metadata).prop_map(|(class, halves, metadata)| {
        let (lane, strict_priority, priority_jump, prompt_tokens, cached_tokens) = metadata;
        let metadata = QueueMetadata {
            lane,
            strict_priority,
            priority_jump,
            prompt_tokens,
            cached_tokens,
            ..QueueMetadata::default()
        };
        Op::Push {
            class,
            after: Duration::from_millis(500 * halves),
            metadata,
        }
    });
    prop_oneof![
        6 => push,
        2 => (0usize..40).prop_map(Op::Remove),
        1 => Just(Op::Reopen),
        3 => (1usize..8, 1usize..6).prop_map(|(many, blocked)| Op::Next(many, blocked)),
    ]
}

/// Queue and model.
struct QueueAndModel {
    classes: Arc<QueueClasses>,
    queue: FairQueue<usize>,
    model: Model,
    start: Instant,
    now: Duration,
    tickets: Vec<QueueTicket>,
}

impl QueueAndModel {
    const WORKERS: usize = 2;

    fn new(classes: Vec<QueueClass>) -> Self {
        let classes = Arc::new(selected_by_name(classes));
        let start = Instant::now();
        let model = Model::new(classes.iter().cloned().collect());
        let queue = FairQueue::new(classes.clone(), start);
        Self {
            classes,
            queue,
            model,
            start,
            now: Duration::ZERO,
            tickets: vec![],
        }
    }

    fn run(&mut self, op: Op) {
        match op {
            Op::Push {
                class,
                after,
                metadata,
            } => self.push(class, after, metadata),
            Op::Remove(nth) => {
                let Some((id, ticket)) = nth
                    .checked_rem(self.tickets.len())
                    .map(|id| (id, self.tickets[id]))
                else {
                    return;
                };
                let removed = self.queue.remove(ticket).map(|entry| entry.payload);
                let expected = self.model.remove(id).then_some(id);
                assert_eq!(removed, expected);
            }
            Op::Reopen => {
                self.queue.unblock_all();
                self.model.reopen();
            }
            Op::Next(many, divisor) => {
                let may_go = |id: usize| divisor == 1 || !id.is_multiple_of(divisor);
                for _ in 0..many {
                    let next = self
                        .queue
                        .place_next(|entry| may_go(entry.payload).then_some(entry.payload));
                    let expected = self.model.next(may_go);
                    assert_eq!(next.map(|(_, id)| id), expected);
                }
            }
        }
        for id in self.classes.ids() {
            assert_eq!(self.queue.depth(id), self.model.pending(id.index()));
        }
        assert_eq!(self.queue.len(), self.model.waiting.len());
        assert_eq!(self.queue.is_empty(), self.model.waiting.is_empty());
    }

    fn push(&mut self, class: usize, after: Duration, metadata: QueueMetadata) {
        self.now += after;
        let class = class % self.classes.iter().count();
        let full = self
            .queue
            .find_overflow(ClassId(class), Self::WORKERS)
            .map(|full| (full.kind, full.current, full.limit));
        assert_eq!(full, self.model.full(class, Self::WORKERS as u64));
        if full.is_some() {
            return;
        }
        let id = self.tickets.len();
        let entry = QueueEntry {
            metadata: metadata.clone(),
            class: ClassId(class),
            arrived_at: self.start + self.now,
            payload: id,
        };
        self.tickets.push(self.queue.push(entry));
        self.model.push(Waiter {
            id,
            class,
            metadata,
            arrived: self.now,
        });
        assert!(self.queue.contains(self.tickets[id]));
    }
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn queue_matches_sorted_list(classes in class_configs(), ops in vec(op(), 1..40)) {
        let mut both = QueueAndModel::new(classes);
        for op in ops {
            both.run(op);
        }
        // At the end, all requests can be placed and the queue is empty.
        both.run(Op::Reopen);
        both.run(Op::Next(41, 1));
        prop_assert!(both.queue.is_empty());
    }
}

fn selected_by_name(classes: Vec<QueueClass>) -> QueueClasses {
    let definition = |class| ClassDefinition {
        class,
        bucket: None,
    };
    QueueClasses::new(classes.into_iter().map(definition).collect(), None)
}

fn queue_of(quanta: &[u64]) -> (Arc<QueueClasses>, FairQueue<usize>, Instant) {
    let class = |(index, quantum): (usize, &u64)| QueueClass {
        name: format!("class-{index}").into(),
        policy: QueuePolicy::default(),
        quantum: *quantum,
        limits: QueueLimits::default(),
    };
    let classes = Arc::new(selected_by_name(
        quanta.iter().enumerate().map(class).collect(),
    ));
    let start = Instant::now();
    (classes.clone(), FairQueue::new(classes, start), start)
}

fn entry(class: usize, prompt_tokens: u64, arrived: Instant, payload: usize) -> QueueEntry<usize> {
    QueueEntry {
        metadata: QueueMetadata {
            prompt_tokens,
            ..QueueMetadata::default()
        },
        class: ClassId(class),
        arrived_at: arrived,
        payload,
    }
}

#[test]
fn classes_share_by_quantum() {
    let (_, mut queue, start) = queue_of(&[300, 100]);
    for at in 0..4000 {
        queue.push(entry(0, 700, start, at));
        queue.push(entry(1, 30, start, at));
    }
    let mut tokens = [0u64; 2];
    for _ in 0..2000 {
        let (entry, ()) = queue.place_next(|_| Some(())).unwrap();
        tokens[entry.class.index()] += entry.metadata.cost();
    }
    let share = tokens[0] as f64 / tokens[1] as f64;
    assert!((2.9..3.1).contains(&share), "{tokens:?}");
}

#[test]
fn rounds_without_affordable_class_are_skipped() {
    let (_, mut queue, start) = queue_of(&[1, 2]);
    queue.push(entry(0, u64::MAX, start, 0));
    queue.push(entry(1, u64::MAX, start, 1));
    let order: Vec<_> = std::iter::from_fn(|| {
        queue
            .place_next(|_| Some(()))
            .map(|(entry, ())| entry.payload)
    })
    .collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn panicking_attempt_changes_nothing() {
    let (_, mut queue, start) = queue_of(&[1, 1]);
    queue.push(entry(0, 5, start, 0));
    queue.push(entry(1, 4, start, 1));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        queue.place_next(|_| -> Option<()> { std::panic::resume_unwind(Box::new(())) })
    }));
    assert!(panicked.is_err());
    let order: Vec<_> = std::iter::from_fn(|| {
        queue
            .place_next(|_| Some(()))
            .map(|(entry, ())| entry.payload)
    })
    .collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn busy_is_strictly_more_than_the_threshold() {
    let threshold = |prefill_tokens, prefill_fraction| BusyThreshold {
        prefill_tokens,
        prefill_fraction,
    };
    let table = [
        (threshold(None, None), u64::MAX, Some(1), false),
        (threshold(Some(100), None), 100, Some(1), false),
        (threshold(Some(100), None), 101, Some(1), true),
        (threshold(Some(0), None), 1, None, true),
        (threshold(None, Some(0.5)), 1000, Some(2000), false),
        (threshold(None, Some(0.5)), 1001, Some(2000), true),
        (threshold(None, Some(0.5)), 5_000_000, None, false),
        (threshold(None, Some(0.5)), 5_000_001, None, true),
        (threshold(Some(10), Some(0.5)), 11, Some(2000), true),
    ];
    for (threshold, active, batch, busy) in table {
        assert_eq!(
            threshold.is_exceeded(active, batch),
            busy,
            "{threshold:?} {active} {batch:?}"
        );
    }
}
