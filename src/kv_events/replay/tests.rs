use std::collections::{HashSet, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use parking_lot::Mutex;
use proptest::prelude::*;

use super::*;
use crate::index::{KvEvent, Outcome};
use crate::kv_events::{MediaTokens, RankSink, SourceSpec};
use crate::metrics::Metrics;
use crate::worker::{Attach, BlockSize, DpRank, EventSource, WorkerId, WorkerRank};

/// What the index would hold, and whether it was told to doubt it since it was last cleared.
#[derive(Default)]
struct Held {
    blocks: HashSet<u64>,
    doubted: bool,
}

fn sink(held: &Arc<Mutex<Held>>) -> RankSink {
    let (applied, doubted) = (held.clone(), held.clone());
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
            Outcome::Ok
        }),
        doubt: Box::new(move || {
            doubted.lock().doubted = true;
            1
        }),
        settle: Box::new(Default::default),
        position: Default::default(),
    }
}

fn feed(held: &Arc<Mutex<Held>>) -> Feed {
    let source = EventSource {
        endpoint: String::new(),
        topic: String::new(),
        attach: Attach::Connect,
        replay: None,
    };
    let spec = SourceSpec {
        engine: String::new(),
        rank: WorkerRank {
            worker: WorkerId(1),
            rank: DpRank(0),
        },
        source,
        block_size: BlockSize::new(1).unwrap(),
        media: MediaTokens::default(),
        resync: Default::default(),
        max_message: 1 << 20,
    };
    Feed::new(
        &spec,
        sink(held),
        Arc::new(Metrics::new()),
        Default::default(),
    )
}

/// An engine that numbers its batches, holds the newest ones, and answers as badly as it is told to.
struct Engine {
    life: u64,
    log: Vec<(Bytes, Option<u64>)>,
    holds: usize,
    /// Which replies get lost, in turn.
    losses: Vec<bool>,
    sent: usize,
    mute: bool,
    replies: VecDeque<Reply>,
}

impl Engine {
    fn publish(&mut self, readable: bool) -> (u64, Bytes) {
        let seq = self.log.len() as u64;
        let block = self.life * 1000 + seq;
        let event = ("BlockStored", [block], None::<u64>, [1u32], 1u32);
        let payload = match readable {
            true => rmp_serde::to_vec(&(1.0, [event], 0)).unwrap(),
            false => vec![0xc1, self.life as u8, seq as u8],
        };
        self.log
            .push((payload.clone().into(), readable.then_some(block)));
        (seq, payload.into())
    }

    fn restart(&mut self) {
        self.life += 1;
        self.log.clear();
    }

    fn blocks(&self) -> HashSet<u64> {
        self.log.iter().filter_map(|(_, block)| *block).collect()
    }
}

impl Repeater for Engine {
    async fn ask(&mut self, from: u64) {
        self.replies.clear();
        if self.mute {
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
                    .push_back(Reply::Batch(seq as u64, payload.clone()));
            }
        }
        self.replies.push_back(Reply::End);
    }

    async fn next(&mut self) -> Reply {
        self.replies.pop_front().unwrap_or(Reply::Silence)
    }

    fn hang_up(&mut self) {
        self.replies.clear();
    }
}

async fn deliver(engine: &mut Engine, feed: &mut Feed, seq: u64, payload: &Bytes) {
    if let Some(gap) = feed.live(seq, payload) {
        let _ = catch_up(engine, feed).await;
        feed.settle(gap, payload);
    }
}

async fn attach(engine: &mut Engine, feed: &mut Feed) {
    if catch_up(engine, feed).await.is_err() && !feed.is_fresh() {
        feed.doubt();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Publish { delivered: bool, readable: bool },
    Redeliver,
    Restart { unseen: usize, mute: bool },
    Reattach,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        8 => (prop::bool::weighted(0.7), prop::bool::weighted(0.9))
            .prop_map(|(delivered, readable)| Step::Publish { delivered, readable }),
        1 => Just(Step::Redeliver),
        1 => (0usize..12, prop::bool::weighted(0.2)).prop_map(|(unseen, mute)| Step::Restart { unseen, mute }),
        1 => Just(Step::Reattach),
    ]
}

async fn play(steps: Vec<Step>, engine: &mut Engine, feed: &mut Feed) {
    let mut last = None;
    attach(engine, feed).await;
    for step in steps {
        match step {
            Step::Publish {
                delivered,
                readable,
            } => {
                let (seq, payload) = engine.publish(readable);
                if delivered {
                    deliver(engine, feed, seq, &payload).await;
                    last = Some((seq, payload));
                }
            }
            Step::Redeliver => {
                if let Some((seq, payload)) = &last {
                    deliver(engine, feed, *seq, payload).await;
                }
            }
            Step::Restart { unseen, mute } => {
                engine.restart();
                last = None;
                for _ in 0..unseen {
                    engine.publish(true);
                }
                engine.mute = mute;
                attach(engine, feed).await;
                engine.mute = false;
            }
            Step::Reattach => attach(engine, feed).await,
        }
    }
    // Whatever went wrong before: one answer without losses.
    engine.losses.clear();
    attach(engine, feed).await;
}

fn check(steps: Vec<Step>, holds: usize, losses: Vec<bool>) -> (Held, HashSet<u64>) {
    let held = Arc::default();
    let mut feed = feed(&held);
    let mut engine = Engine {
        life: 1,
        log: vec![],
        holds,
        losses,
        sent: 0,
        mute: false,
        replies: VecDeque::new(),
    };
    let runtime = tokio::runtime::Builder::new_current_thread()
        .build()
        .unwrap();
    runtime.block_on(play(steps, &mut engine, &mut feed));
    let held = std::mem::take(&mut *held.lock());
    (held, engine.blocks())
}

proptest! {
    #[test]
    fn what_is_held_without_doubt_is_what_the_engine_holds(
        steps in prop::collection::vec(step(), 0..60),
        holds in 1usize..40,
        losses in prop::collection::vec(prop::bool::weighted(0.2), 0..7),
    ) {
        let (held, truth) = check(steps, holds, losses);
        prop_assert!(held.doubted || held.blocks == truth, "{:?} instead of {:?}", held.blocks, truth);
    }

    #[test]
    fn an_engine_that_repeats_everything_leaves_no_doubt(
        steps in prop::collection::vec(
            step().prop_filter("only losses on the live feed", |step| {
                !matches!(step, Step::Publish { readable: false, .. } | Step::Restart { mute: true, .. })
            }),
            0..60,
        ),
    ) {
        let (held, truth) = check(steps, usize::MAX, vec![]);
        prop_assert!(!held.doubted);
        prop_assert_eq!(held.blocks, truth);
    }
}

#[test]
fn a_lossy_answer_is_asked_for_again_from_the_hole() {
    let unseen = |count| Step::Restart {
        unseen: count,
        mute: false,
    };
    // Every fifth reply is lost.
    let (held, truth) = check(
        vec![unseen(20)],
        100,
        vec![true, false, false, false, false],
    );
    assert_eq!(held.blocks, truth);
    assert_eq!(truth.len(), 20);
}

#[test]
fn an_unreadable_batch_is_given_up_once_and_does_not_stop_the_rest() {
    let publish = |readable| Step::Publish {
        delivered: true,
        readable,
    };
    let (held, truth) = check(
        vec![publish(true), publish(false), publish(true), publish(true)],
        100,
        vec![],
    );
    assert_eq!(held.blocks, truth);
    assert_eq!(truth.len(), 3);
    assert!(held.doubted);
}
