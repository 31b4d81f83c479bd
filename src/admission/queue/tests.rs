use std::time::Duration;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::admission::config::{ClassConfig, QueueConfig};
use crate::admission::{Gate, Policy, Turn};
use crate::worker::{DpRank, WorkerId, WorkerRank};

mod model;

use model::{Model, Waiter};

#[derive(Clone, Debug)]
enum Op {
    Push {
        class: usize,
        after: Duration,
        turn: Turn,
    },
    /// Takes out one of those that came.
    Remove(usize),
    Reopen,
    /// Lets this many go, but none whose number is divisible by the other.
    Next(usize, usize),
}

fn class_configs() -> impl Strategy<Value = Vec<ClassConfig>> {
    let policy = prop_oneof![Just(Policy::Fcfs), Just(Policy::Lcfs), Just(Policy::Wspt)];
    let limit = || prop::option::weighted(0.3, 0u64..40);
    let class = (
        policy,
        1u64..9,
        prop::option::weighted(0.3, 0u64..4),
        limit(),
        limit(),
    );
    vec(class, 1..4).prop_map(|classes| {
        let class = |(at, (policy, quantum, requests, prompt, cached))| ClassConfig {
            name: format!("class-{at}"),
            family: None,
            bucket: None,
            policy: Some(policy),
            quantum,
            prefill_busy_threshold: None,
            prefill_busy_threshold_frac: None,
            requests_per_worker: requests,
            prompt_tokens_per_worker: prompt,
            cached_tokens_per_worker: cached,
        };
        classes.into_iter().enumerate().map(class).collect()
    })
}

fn lane() -> impl Strategy<Value = Lane> {
    let pin = |worker| {
        Lane::Pinned(WorkerRank {
            worker: WorkerId(worker),
            rank: DpRank(0),
        })
    };
    prop_oneof![3 => Just(Lane::Shared), 1 => (0u64..2).prop_map(pin), 1 => (0u64..2).prop_map(Lane::Among)]
}

fn op() -> impl Strategy<Value = Op> {
    let jump = prop_oneof![4 => Just(0.0), 1 => Just(-1.0), 1 => Just(0.5), 1 => Just(2.0), 1 => Just(f64::NAN)];
    let turn = (
        lane(),
        prop_oneof![3 => Just(0i64), 1 => -2i64..3],
        jump,
        0u64..40,
        0u64..40,
    );
    let push = (0usize..4, 0u64..4, turn).prop_map(|(class, halves, turn)| {
        let (lane, strict_priority, priority_jump, prompt_tokens, cached_tokens) = turn;
        let turn = Turn {
            lane,
            strict_priority,
            priority_jump,
            prompt_tokens,
            cached_tokens,
            ..Turn::default()
        };
        Op::Push {
            class,
            after: Duration::from_millis(500 * halves),
            turn,
        }
    });
    prop_oneof![
        6 => push,
        2 => (0usize..40).prop_map(Op::Remove),
        1 => Just(Op::Reopen),
        3 => (1usize..8, 1usize..6).prop_map(|(many, blocked)| Op::Next(many, blocked)),
    ]
}

/// The queue and its model, side by side.
struct Both {
    classes: Arc<Classes>,
    queue: Queue<usize>,
    model: Model,
    start: Instant,
    now: Duration,
    tickets: Vec<Ticket>,
}

impl Both {
    const WORKERS: usize = 2;

    fn new(classes: Vec<ClassConfig>) -> Self {
        let classes = Arc::new(Classes::new(&QueueConfig {
            classes,
            ..QueueConfig::default()
        }));
        let start = Instant::now();
        let model = Model::new(classes.iter().cloned().collect());
        let queue = Queue::new(classes.clone(), start);
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
            Op::Push { class, after, turn } => self.push(class, after, turn),
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
                self.queue.reopen();
                self.model.reopen();
            }
            Op::Next(many, divisor) => {
                let may_go = |id: usize| divisor == 1 || !id.is_multiple_of(divisor);
                for _ in 0..many {
                    let next = self
                        .queue
                        .next(|entry| may_go(entry.payload).then_some(entry.payload));
                    let expected = self.model.next(may_go);
                    assert_eq!(next.map(|(_, id)| id), expected);
                }
            }
        }
        for id in self.classes.ids() {
            assert_eq!(self.queue.pending(id), self.model.pending(id.at()));
        }
        assert_eq!(self.queue.len(), self.model.waiting.len());
        assert_eq!(self.queue.is_empty(), self.model.waiting.is_empty());
    }

    fn push(&mut self, class: usize, after: Duration, turn: Turn) {
        self.now += after;
        let class = class % self.classes.iter().count();
        let full = self
            .queue
            .full(ClassId(class), Self::WORKERS)
            .map(|full| (full.kind, full.current, full.limit));
        assert_eq!(full, self.model.full(class, Self::WORKERS as u64));
        if full.is_some() {
            return;
        }
        let id = self.tickets.len();
        let entry = Entry {
            turn: turn.clone(),
            class: ClassId(class),
            arrived: self.start + self.now,
            payload: id,
        };
        self.tickets.push(self.queue.push(entry));
        self.model.push(Waiter {
            id,
            class,
            turn,
            arrived: self.now,
        });
        assert!(self.queue.contains(self.tickets[id]));
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_queue_does_what_a_sorted_list_does(classes in class_configs(), ops in vec(op(), 1..40)) {
        let mut both = Both::new(classes);
        for op in ops {
            both.run(op);
        }
        // In the end everybody can go, and nothing remains.
        both.run(Op::Reopen);
        both.run(Op::Next(41, 1));
        prop_assert!(both.queue.is_empty());
    }
}

fn queue_of(quanta: &[u64]) -> (Arc<Classes>, Queue<usize>, Instant) {
    let class = |(at, quantum): (usize, &u64)| {
        let written = serde_json::json!({ "name": format!("class-{at}"), "quantum": quantum });
        serde_json::from_value(written).unwrap()
    };
    let config = QueueConfig {
        classes: quanta.iter().enumerate().map(class).collect(),
        ..QueueConfig::default()
    };
    let classes = Arc::new(Classes::new(&config));
    let start = Instant::now();
    (classes.clone(), Queue::new(classes, start), start)
}

fn entry(class: usize, prompt_tokens: u64, arrived: Instant, payload: usize) -> Entry<usize> {
    Entry {
        turn: Turn {
            prompt_tokens,
            ..Turn::default()
        },
        class: ClassId(class),
        arrived,
        payload,
    }
}

#[test]
fn classes_share_by_their_quanta_whatever_the_requests_cost() {
    let (_, mut queue, start) = queue_of(&[300, 100]);
    for at in 0..4000 {
        queue.push(entry(0, 700, start, at));
        queue.push(entry(1, 30, start, at));
    }
    let mut tokens = [0u64; 2];
    for _ in 0..2000 {
        let (entry, ()) = queue.next(|_| Some(())).unwrap();
        tokens[entry.class.at()] += entry.turn.cost();
    }
    let share = tokens[0] as f64 / tokens[1] as f64;
    assert!((2.9..3.1).contains(&share), "{tokens:?}");
}

#[test]
fn rounds_in_which_nobody_can_pay_are_not_walked() {
    let (_, mut queue, start) = queue_of(&[1, 2]);
    queue.push(entry(0, u64::MAX, start, 0));
    queue.push(entry(1, u64::MAX, start, 1));
    let order: Vec<_> =
        std::iter::from_fn(|| queue.next(|_| Some(())).map(|(entry, ())| entry.payload)).collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn a_class_that_is_blocked_saves_nothing_meanwhile() {
    let (_, mut queue, start) = queue_of(&[10, 10]);
    (0..100).for_each(|at| _ = queue.push(entry(0, 10, start, at)));
    (100..200).for_each(|at| _ = queue.push(entry(1, 10, start, at)));
    let second_is_blocked = |entry: &mut Entry<usize>| (entry.payload < 100).then_some(());
    for _ in 0..50 {
        queue.reopen();
        assert_eq!(queue.next(second_is_blocked).unwrap().0.class, ClassId(0));
    }
    queue.reopen();
    let classes: Vec<_> = (0..6)
        .map(|_| queue.next(|_| Some(())).unwrap().0.class.at())
        .collect();
    assert_eq!(classes, [1, 0, 1, 0, 1, 0]);
}

#[test]
fn who_is_blocked_stops_its_own_lane_only_and_is_not_asked_again_before_it_is_opened() {
    let (_, mut queue, start) = queue_of(&[1]);
    let among = |set, payload| {
        let mut entry = entry(0, 1, start, payload);
        entry.turn.lane = Lane::Among(set);
        entry
    };
    for waiter in [among(7, 0), among(7, 1), entry(0, 1, start, 2), among(8, 3)] {
        queue.push(waiter);
    }
    let mut asked = Vec::new();
    let mut went = Vec::new();
    let mut all = |queue: &mut Queue<usize>| {
        while let Some((entry, ())) = queue.next(|entry| {
            asked.push(entry.payload);
            (entry.payload != 0).then_some(())
        }) {
            went.push(entry.payload);
        }
    };
    all(&mut queue);
    all(&mut queue);
    queue.reopen();
    all(&mut queue);
    assert_eq!(asked, [0, 2, 3, 0]);
    assert_eq!(went, [2, 3]);
}

#[test]
fn an_attempt_that_panics_changes_nothing() {
    let (_, mut queue, start) = queue_of(&[1, 1]);
    queue.push(entry(0, 5, start, 0));
    queue.push(entry(1, 4, start, 1));
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        queue.next(|_| -> Option<()> { std::panic::resume_unwind(Box::new(())) })
    }));
    assert!(panicked.is_err());
    let order: Vec<_> =
        std::iter::from_fn(|| queue.next(|_| Some(())).map(|(entry, ())| entry.payload)).collect();
    assert_eq!(order, [1, 0]);
}

#[test]
fn a_request_finds_its_class_by_name_by_family_and_by_length() {
    let written = serde_json::json!({
        "default_family": "f",
        "uncached_buckets": [{ "min_tokens": 0, "bucket": "small" }, { "min_tokens": 1000, "bucket": "big" }],
        "classes": [
            { "name": "f-big", "family": "f", "bucket": "big" },
            { "name": "f-small", "family": "f", "bucket": "small" },
            { "name": "g-small", "family": "g", "bucket": "small" },
            { "name": "g-big", "family": "g", "bucket": "big" },
            { "name": "vip" },
        ],
    });
    let config: QueueConfig = serde_json::from_value(written).unwrap();
    assert_eq!(config.problems(), []);
    let classes = Classes::new(&config);
    let table = [
        (None, 0, "f-small"),
        (None, 999, "f-small"),
        (None, 1000, "f-big"),
        (Some("g"), 1, "g-small"),
        (Some("g"), 5000, "g-big"),
        (Some("vip"), 5000, "vip"),
        (Some("nobody"), 5000, "f-big"),
        // Only a class without a family is chosen by its name.
        (Some("g-big"), 1, "f-small"),
    ];
    for (asked, uncached, expected) in table {
        let class = classes.resolve(asked, uncached);
        assert_eq!(&*classes.get(class).name, expected, "{asked:?} {uncached}");
    }
    let only = Classes::new(&QueueConfig::default());
    assert_eq!(&*only.get(only.resolve(Some("vip"), 5)).name, "default");
}

#[test]
fn busy_is_strictly_more_than_the_threshold() {
    let gate = |prefill_tokens, prefill_fraction| Gate {
        prefill_tokens,
        prefill_fraction,
    };
    let table = [
        (gate(None, None), u64::MAX, Some(1), false),
        (gate(Some(100), None), 100, Some(1), false),
        (gate(Some(100), None), 101, Some(1), true),
        (gate(Some(0), None), 1, None, true),
        (gate(None, Some(0.5)), 1000, Some(2000), false),
        (gate(None, Some(0.5)), 1001, Some(2000), true),
        (gate(None, Some(0.5)), 5_000_000, None, false),
        (gate(None, Some(0.5)), 5_000_001, None, true),
        (gate(Some(10), Some(0.5)), 11, Some(2000), true),
    ];
    for (gate, active, batch, busy) in table {
        assert_eq!(
            gate.busy(active, batch),
            busy,
            "{gate:?} {active} {batch:?}"
        );
    }
}
