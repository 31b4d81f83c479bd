use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::kv_events::{RankSink, SourceSpec};
use warmroute_core::index::{ApplyOutcome, KvEvent};
use warmroute_metrics::Metrics;

/// Content of the index, and whether a loss was recorded since it was last cleared.
#[derive(Default)]
struct Held {
    blocks: HashSet<u64>,
    lost: bool,
}

fn sink(held: &Arc<Mutex<Held>>) -> RankSink {
    let applied = held.clone();
    let lost = held.clone();
    RankSink {
        apply: Box::new(move |event| {
            let mut held = applied.lock();
            match event {
                KvEvent::Stored { blocks, .. } => held
                    .blocks
                    .extend(blocks.iter().map(|block| block.engine.0)),
                KvEvent::Removed { .. } => panic!("the model removes nothing"),
                KvEvent::Cleared => *held = Held::default(),
                KvEvent::GroupStored { .. } | KvEvent::GroupRemoved { .. } => {}
            }
            ApplyOutcome::Ok
        }),
        record_loss: Box::new(move || {
            lost.lock().lost = true;
            1
        }),
        reconcile: Box::new(Default::default),
        position: Default::default(),
    }
}

fn applier(held: &Arc<Mutex<Held>>) -> EventApplier {
    let spec = SourceSpec::for_test(1);
    EventApplier::new(
        &spec,
        sink(held),
        Arc::new(Metrics::new()),
        Default::default(),
    )
}

/// An engine that numbers its batches, retains the newest ones, and loses some of its replay
/// replies.
struct Engine {
    incarnation: u64,
    log: Vec<(Bytes, Option<u64>)>,
    holds: usize,
    /// Whether each successive reply is lost.
    losses: Vec<bool>,
    sent: usize,
    is_silent: bool,
    /// Whether the last replay after a connection was not answered.
    is_unanswered: bool,
    replies: VecDeque<ReplayReply>,
}

impl Engine {
    fn publish(&mut self, readable: bool) -> (u64, Bytes) {
        let seq = self.log.len() as u64;
        let block = self.incarnation * 1000 + seq;
        let event = ("BlockStored", [block], None::<u64>, [1u32], 1u32);
        let payload = match readable {
            true => rmp_serde::to_vec(&(1.0, [event], 0)).unwrap(),
            false => vec![0xc1, self.incarnation as u8, seq as u8],
        };
        self.log
            .push((payload.clone().into(), readable.then_some(block)));
        (seq, payload.into())
    }

    fn restart(&mut self) {
        self.incarnation += 1;
        self.log.clear();
    }

    fn blocks(&self) -> HashSet<u64> {
        self.log.iter().filter_map(|(_, block)| *block).collect()
    }
}

impl ReplaySource for Engine {
    async fn request_from(&mut self, from: u64) {
        self.replies.clear();
        if self.is_silent {
            return;
        }
        let first = self.log.len().saturating_sub(self.holds).max(from as usize);
        for (seq, (payload, _)) in self.log.iter().enumerate().skip(first) {
            self.sent += 1;
            if !self
                .losses
                .get(self.sent % self.losses.len().max(1))
                .copied()
                .unwrap_or(false)
            {
                self.replies
                    .push_back(ReplayReply::Batch(seq as u64, payload.clone()));
            }
        }
        self.replies.push_back(ReplayReply::End);
    }

    async fn next_reply(&mut self) -> ReplayReply {
        self.replies.pop_front().unwrap_or(ReplayReply::Unanswered)
    }

    fn cancel(&mut self) {
        self.replies.clear();
    }
}

async fn deliver(engine: &mut Engine, applier: &mut EventApplier, seq: u64, payload: &Bytes) {
    if engine.is_unanswered {
        attach(engine, applier).await;
    }
    if let Some(gap) = applier.update(|batches| batches.apply_live(seq, payload)) {
        let _ = catch_up(engine, applier).await;
        applier.update(|batches| batches.apply_after_replay(gap, payload));
    }
}

async fn attach(engine: &mut Engine, applier: &mut EventApplier) {
    let outcome = catch_up(engine, applier).await;
    let is_fresh = applier.sequencer().is_fresh();
    engine.is_unanswered = !is_fresh && outcome == Err(ReplayError::EndedBeforeTarget);
    if outcome.is_err() && !is_fresh && !engine.is_unanswered {
        applier.update(BatchApplier::record_loss);
    }
}

#[derive(Clone, Debug)]
enum Step {
    Publish { delivered: bool, readable: bool },
    Redeliver,
    Restart { unseen: usize, is_silent: bool },
    Reattach,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (prop::bool::weighted(0.7), prop::bool::weighted(0.9))
            .prop_map(|(delivered, readable)| Step::Publish { delivered, readable }),
        1 => Just(Step::Redeliver),
        1 => (0usize..12, prop::bool::weighted(0.2)).prop_map(|(unseen, is_silent)| Step::Restart { unseen, is_silent }),
        1 => Just(Step::Reattach),
    ]
}

async fn run_steps(steps: Vec<Step>, engine: &mut Engine, applier: &mut EventApplier) {
    let mut last = None;
    attach(engine, applier).await;
    for step in steps {
        match step {
            Step::Publish {
                delivered,
                readable,
            } => {
                let (seq, payload) = engine.publish(readable);
                if delivered {
                    deliver(engine, applier, seq, &payload).await;
                    last = Some((seq, payload));
                }
            }
            Step::Redeliver => {
                if let Some((seq, payload)) = &last {
                    deliver(engine, applier, *seq, payload).await;
                }
            }
            Step::Restart { unseen, is_silent } => {
                engine.restart();
                last = None;
                for _ in 0..unseen {
                    engine.publish(true);
                }
                engine.is_silent = is_silent;
                attach(engine, applier).await;
                engine.is_silent = false;
            }
            Step::Reattach => attach(engine, applier).await,
        }
    }
    // Regardless of the history, one replay without losses follows.
    engine.losses.clear();
    attach(engine, applier).await;
}

fn run_history(steps: Vec<Step>, holds: usize, losses: Vec<bool>) -> (Held, HashSet<u64>) {
    let held = Arc::default();
    let mut applier = applier(&held);
    let mut engine = Engine {
        incarnation: 1,
        log: vec![],
        holds,
        losses,
        sent: 0,
        is_silent: false,
        is_unanswered: false,
        replies: VecDeque::new(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(run_steps(steps, &mut engine, &mut applier));
    let held = std::mem::take(&mut *held.lock());
    (held, engine.blocks())
}

proptest! {
    #[test]
    fn exact_index_equals_engine_cache(
        steps in prop::collection::vec(step(), 0..60),
        holds in 1usize..40,
        losses in prop::collection::vec(prop::bool::weighted(0.2), 0..7),
    ) {
        let (held, cached) = run_history(steps, holds, losses);
        prop_assert!(held.lost || held.blocks == cached, "{:?} instead of {:?}", held.blocks, cached);
    }

    #[test]
    fn complete_replay_keeps_the_index_exact(
        steps in prop::collection::vec(
            step().prop_filter("batches are lost only on the live stream", |step| {
                !matches!(step, Step::Publish { readable: false, .. } | Step::Restart { is_silent: true, .. })
            }),
            0..60,
        ),
    ) {
        let (held, cached) = run_history(steps, usize::MAX, vec![]);
        prop_assert!(!held.lost);
        prop_assert_eq!(held.blocks, cached);
    }
}

#[test]
fn replay_with_gap_is_requested_from_the_gap() {
    let unseen = |count| Step::Restart {
        unseen: count,
        is_silent: false,
    };
    // Every fifth reply is lost.
    let (held, cached) = run_history(
        vec![unseen(20)],
        100,
        vec![true, false, false, false, false],
    );
    assert_eq!(held.blocks, cached);
    assert_eq!(cached.len(), 20);
}

#[test]
fn undecodable_batch_is_skipped_once_during_replay() {
    let publish = |readable| Step::Publish {
        delivered: true,
        readable,
    };
    let (held, cached) = run_history(
        vec![publish(true), publish(false), publish(true), publish(true)],
        100,
        vec![],
    );
    assert_eq!(held.blocks, cached);
    assert_eq!(cached.len(), 3);
    assert!(held.lost);
}
