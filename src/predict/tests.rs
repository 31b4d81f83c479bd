mod model;

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use parking_lot::Mutex;
use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::block::LocalHash;
use crate::index::IndexStats;
use crate::worker::{BlockSize, DpRank, WorkerId};
use model::{Entered, Model};

const TTL: u64 = 1_050;
const A: Slot = Slot(0);
const B: Slot = Slot(1);
const RANKS: u32 = 4;

fn name(slot: Slot) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(100 + u64::from(slot.0)),
        rank: DpRank(0),
    }
}

fn prompt(path: &[u8]) -> BlockHashes {
    let locals = path
        .iter()
        .map(|&block| LocalHash(0x9e37_79b9 * (1 + u64::from(block))))
        .collect();
    BlockHashes::chain(path.len() * 16, BlockSize::new(16).unwrap(), locals)
}

fn ttl(most_blocks_per_rank: u64) -> Ttl {
    Ttl {
        ttl: Duration::from_millis(TTL),
        most_blocks_per_rank,
    }
}

/// A predictor with a clock that is set by hand.
struct Bed {
    now: Arc<Mutex<u64>>,
    predictor: Arc<Predictor>,
    overlaps: Overlaps,
}

impl Bed {
    fn new(policy: Policy) -> Self {
        let now = Arc::new(Mutex::new(0));
        let (start, clock) = (Instant::now(), now.clone());
        let predictor =
            Predictor::new(policy, move || start + Duration::from_millis(*clock.lock()));
        Self {
            now,
            predictor,
            overlaps: Overlaps::new(),
        }
    }

    fn now(&self) -> u64 {
        *self.now.lock()
    }

    fn wait(&self, millis: u64) {
        *self.now.lock() += millis;
    }

    fn record(&self, slot: Slot, path: &[u8]) -> Lease {
        self.predictor.record(slot, name(slot), &prompt(path))
    }

    fn overlap(&mut self, slot: Slot, path: &[u8]) -> usize {
        self.predictor.overlaps(&prompt(path), &mut self.overlaps);
        let found = self.overlaps.get(slot);
        assert_eq!(found.total(), found.device);
        found.device as usize
    }
}

fn lru(default_blocks: Option<u64>) -> Policy {
    Policy::Lru {
        default_blocks,
        fallback: ttl(1_000),
    }
}

#[test]
fn a_block_lives_its_time_rounded_up_from_when_it_was_last_recorded() {
    let mut bed = Bed::new(Policy::Ttl(ttl(100)));
    bed.predictor.open(A, name(A), None);
    drop(bed.record(A, &[1, 2, 3, 4]));
    bed.wait(500);
    drop(bed.record(A, &[1, 2]));
    // The end at 1050 ms is rounded up to 1100, that of the front at 1550 to 1600.
    for (millis, left) in [(1_000, 4), (1_099, 4), (1_100, 2), (1_599, 2), (1_600, 0)] {
        *bed.now.lock() = millis;
        bed.predictor.expire();
        assert_eq!(bed.overlap(A, &[1, 2, 3, 4]), left, "at {millis} ms");
    }
    let stats = bed.predictor.stats();
    assert_eq!(
        (stats.blocks, stats.ranks[0].runs, stats.ranks[0].expired),
        (0, 0, 4)
    );
}

#[test]
fn the_size_limit_takes_the_least_recently_recorded_tails_first() {
    let mut bed = Bed::new(Policy::Ttl(ttl(6)));
    bed.predictor.open(A, name(A), Some(1));
    for path in [&[1, 2, 3][..], &[4, 5, 6], &[1, 2], &[7]] {
        drop(bed.record(A, path));
    }
    let left = [&[1, 2, 3][..], &[4, 5, 6], &[7]].map(|path| bed.overlap(A, path));
    assert_eq!(left, [2, 3, 1], "the end that only the first prompt had");
    drop(bed.record(A, &[8, 8, 8, 8]));
    let left = [&[1, 2, 3][..], &[4, 5, 6], &[7], &[8, 8, 8, 8]].map(|path| bed.overlap(A, path));
    assert_eq!(left, [1, 0, 1, 4]);
    drop(bed.record(A, &[9; 10]));
    assert_eq!(
        (bed.overlap(A, &[9; 10]), bed.predictor.stats().blocks),
        (6, 6)
    );
    let stats = bed.predictor.stats();
    assert_eq!((stats.ranks[0].evicted, stats.ranks[0].expired), (15, 0));
}

#[test]
fn live_requests_keep_their_blocks_and_the_longest_released_leave_first() {
    let mut bed = Bed::new(lru(None));
    assert_eq!(
        bed.predictor.open(A, name(A), Some(6)),
        EffectivePolicy::Lru { capacity: 6 }
    );
    let first = bed.record(A, &[1, 2, 3]);
    let second = bed.record(A, &[4, 5]);
    let third = bed.record(A, &[7, 8]);
    assert_eq!(
        bed.predictor.stats().blocks,
        7,
        "all are in use, more than there is room for"
    );
    drop((bed.record(A, &[20, 21]), bed.record(A, &[7, 8])));
    let full = bed.predictor.stats();
    assert_eq!(
        (
            full.blocks,
            full.ranks[0].refused,
            bed.overlap(A, &[20, 21])
        ),
        (7, 2, 0),
        "so no more come"
    );
    drop(second);
    assert_eq!(bed.overlap(A, &[4, 5]), 1);
    drop(first);
    drop(third);
    let fourth = bed.record(A, &[9, 10]);
    assert_eq!(
        (
            bed.overlap(A, &[4]),
            bed.overlap(A, &[1, 2, 3]),
            bed.overlap(A, &[7, 8])
        ),
        (0, 2, 2)
    );
    bed.wait(10 * TTL);
    bed.predictor.expire();
    assert_eq!(bed.overlap(A, &[7, 8]), 2, "time does nothing here");
    drop(fourth);
}

#[test]
fn generated_blocks_take_room_until_a_longer_prompt_names_them() {
    let mut bed = Bed::new(lru(Some(8)));
    bed.predictor.open(A, name(A), None);
    let mut turn = bed.record(A, &[1, 2]);
    turn.grow(2);
    turn.grow(1);
    drop(turn);
    let stats = bed.predictor.stats();
    assert_eq!((stats.blocks, stats.generated), (2, 3));
    let next = bed.record(A, &[1, 2, 3, 4, 5, 6]);
    let stats = bed.predictor.stats();
    assert_eq!((stats.blocks, stats.generated), (6, 0));
    drop(next);
    let mut other = bed.record(A, &[]);
    other.grow(4);
    assert_eq!(
        bed.overlap(A, &[1, 2, 3, 4, 5, 6]),
        4,
        "and they push others out"
    );
    drop(other);
    drop(bed.record(A, &[9, 9]));
    let stats = bed.predictor.stats();
    assert_eq!(
        (stats.blocks, stats.generated),
        (6, 2),
        "nor are those of prompts without a block forgotten"
    );
}

#[test]
fn what_was_entered_for_a_request_that_went_elsewhere_is_taken_back_unless_others_use_it() {
    for policy in [lru(Some(100)), Policy::Ttl(ttl(100))] {
        let mut bed = Bed::new(policy);
        bed.predictor.open(A, name(A), None);
        drop(bed.record(A, &[1, 2]));
        let mut lost = bed.record(A, &[1, 2, 3, 4]);
        lost.grow(2);
        lost.revoke(&prompt(&[1, 2, 3, 4]));
        let stats = bed.predictor.stats();
        assert_eq!(
            (bed.overlap(A, &[1, 2, 3, 4]), stats.blocks, stats.generated),
            (2, 2, 0),
            "{policy:?}"
        );
        let lost = bed.record(A, &[1, 2, 3, 4]);
        drop(bed.record(A, &[1, 2, 3, 5]));
        let _ = lost.revoke(&prompt(&[1, 2, 3, 4]));
        assert_eq!(
            (bed.overlap(A, &[1, 2, 3, 4]), bed.predictor.stats().blocks),
            (3, 4),
            "{policy:?}: others came by"
        );
        let lost = bed.record(A, &[7]);
        drop(bed.record(A, &[7]));
        let _ = lost.revoke(&prompt(&[7]));
        assert_eq!(bed.overlap(A, &[7]), 1, "{policy:?}: another has it too");
    }
}

#[test]
fn a_conversation_is_one_run_until_somebody_turns_off() {
    for policy in [lru(Some(100)), Policy::Ttl(ttl(100))] {
        let bed = Bed::new(policy);
        bed.predictor.open(A, name(A), None);
        for turn in 1..=5 {
            let mut lease = bed.record(A, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10][..2 * turn]);
            lease.grow(1);
        }
        let runs = || bed.predictor.stats().ranks[0].runs;
        assert_eq!(
            (runs(), bed.predictor.stats().blocks),
            (1, 10),
            "{policy:?}"
        );
        drop(bed.record(A, &[1, 2, 3, 8]));
        assert_eq!(
            (runs(), bed.predictor.stats().blocks),
            (3, 11),
            "{policy:?}"
        );
    }
}

#[test]
fn a_rank_without_a_known_capacity_goes_by_time_and_says_so() {
    let mut bed = Bed::new(lru(None));
    let policy = bed.predictor.open(A, name(A), None);
    assert_eq!(
        policy,
        EffectivePolicy::Ttl {
            most_blocks: 1_000,
            fallback: true
        }
    );
    assert_eq!(bed.predictor.stats().ranks[0].policy, policy);
    let lease = bed.record(A, &[1]);
    bed.wait(TTL + 100);
    bed.predictor.expire();
    assert_eq!(bed.overlap(A, &[1]), 0, "no lease holds it");
    drop(lease);
}

#[test]
fn a_decision_for_somebody_else_and_a_lease_of_an_earlier_one_change_nothing() {
    let mut bed = Bed::new(lru(Some(4)));
    bed.predictor.open(A, name(A), None);
    let mut old = bed.record(A, &[1, 2]);
    old.grow(1);
    bed.predictor.open(A, name(B), None);
    assert_eq!(bed.overlap(A, &[1, 2]), 0);
    drop(bed.record(A, &[1, 2]));
    drop(bed.record(B, &[1, 2]));
    assert_eq!(bed.predictor.stats().blocks, 0);
    let held = bed.predictor.record(A, name(B), &prompt(&[1, 2]));
    old.grow(5);
    drop(old);
    let stats = bed.predictor.stats();
    assert_eq!((stats.blocks, stats.generated), (2, 0));
    bed.predictor.close(A);
    bed.predictor.close(A);
    bed.predictor.close(Slot(77));
    drop(held);
    assert_eq!(bed.predictor.stats(), PredictStats::default());
    assert_eq!(bed.overlap(A, &[1, 2]), 0);
}

/// One step of a script; picks are taken modulo what there is to pick from.
#[derive(Clone, Debug)]
enum Step {
    Record {
        slot: Slot,
        path: Vec<u8>,
        hold: bool,
    },
    Grow {
        pick: usize,
        blocks: u64,
    },
    Release {
        pick: usize,
    },
    Revoke {
        pick: usize,
    },
    Wait {
        millis: u64,
    },
    Expire,
    Reopen {
        slot: Slot,
    },
}

/// Scripts of at most so many steps, on this many ranks, with prompts of fewer blocks than `longest` out of so many kinds.
fn steps(most: usize, ranks: u32, kinds: u8, longest: usize) -> impl Strategy<Value = Vec<Step>> {
    let slot = move || prop_oneof![3 => Just(A), 2 => (0..ranks).prop_map(Slot)];
    let step = prop_oneof![
        10 => (slot(), vec(0..kinds, 0..longest), any::<bool>())
            .prop_map(|(slot, path, hold)| Step::Record { slot, path, hold }),
        3 => (any::<usize>(), 1..4u64).prop_map(|(pick, blocks)| Step::Grow { pick, blocks }),
        5 => any::<usize>().prop_map(|pick| Step::Release { pick }),
        4 => any::<usize>().prop_map(|pick| Step::Revoke { pick }),
        5 => (1..500u64).prop_map(|millis| Step::Wait { millis }),
        4 => Just(Step::Expire),
        1 => slot().prop_map(|slot| Step::Reopen { slot }),
    ];
    vec(step, 1..most)
}

/// A request under way, as both sides see it.
struct Request {
    slot: Slot,
    opened: usize,
    asked: Vec<u8>,
    path: Vec<u8>,
    entered: Entered,
    generated: u64,
    lease: Lease,
}

/// A predictor and its models, side by side. The first rank has a capacity, the second has none, and so on.
struct Pair {
    bed: Bed,
    lru: bool,
    most: u64,
    models: Vec<Model>,
    opened: Vec<usize>,
    requests: Vec<Request>,
    seen: Vec<Vec<u8>>,
}

impl Pair {
    fn new(lru: bool, most: u64, ranks: u32) -> Self {
        let policy = if lru {
            Policy::Lru {
                default_blocks: None,
                fallback: ttl(most),
            }
        } else {
            Policy::Ttl(ttl(most))
        };
        let bed = Bed::new(policy);
        let opened = vec![0; ranks as usize];
        let mut pair = Self {
            bed,
            lru,
            most,
            models: Vec::new(),
            opened,
            requests: Vec::new(),
            seen: Vec::new(),
        };
        for slot in (0..ranks).map(Slot) {
            let model = pair.open(slot);
            pair.models.push(model);
        }
        pair
    }

    /// Opens a slot; the model that goes with it.
    fn open(&self, slot: Slot) -> Model {
        let capacity = slot
            .0
            .is_multiple_of(2)
            .then_some(self.most * (1 + u64::from(slot.0)));
        self.bed.predictor.open(slot, name(slot), capacity);
        let (most, leases) = match capacity.filter(|_| self.lru) {
            Some(capacity) => (capacity, true),
            None => (self.most, false),
        };
        Model::new(most, leases, TTL)
    }

    fn take(&mut self, step: &Step) {
        let now = self.bed.now();
        match step {
            Step::Record { slot, path, hold } => {
                let lease = self.bed.record(*slot, path);
                let (held, entered) = self.models[slot.at()].record(path, now);
                let (slot, opened, asked) = (*slot, self.opened[slot.at()], path.clone());
                let path = path[..held].to_vec();
                self.requests.push(Request {
                    slot,
                    opened,
                    asked,
                    path,
                    entered,
                    generated: 0,
                    lease,
                });
                let asked = &self.requests[self.requests.len() - 1].asked;
                if !self.seen.contains(asked) {
                    self.seen.push(asked.clone());
                }
                if !hold {
                    self.release(self.requests.len() - 1);
                }
            }
            Step::Grow { pick, blocks } if !self.requests.is_empty() => {
                let at = pick % self.requests.len();
                let request = &mut self.requests[at];
                request.lease.grow(*blocks);
                if request.opened == self.opened[request.slot.at()] {
                    request.generated += blocks;
                    self.models[request.slot.at()].grow(*blocks);
                }
            }
            Step::Release { pick } if !self.requests.is_empty() => {
                self.release(pick % self.requests.len())
            }
            Step::Revoke { pick } if !self.requests.is_empty() => {
                self.revoke(pick % self.requests.len())
            }
            Step::Grow { .. } | Step::Release { .. } | Step::Revoke { .. } => {}
            Step::Wait { millis } => self.bed.wait(*millis),
            Step::Expire => {
                self.bed.predictor.expire();
                self.models.iter_mut().for_each(|model| model.expire(now));
            }
            Step::Reopen { slot } => {
                self.models[slot.at()] = self.open(*slot);
                self.opened[slot.at()] += 1;
            }
        }
    }

    fn revoke(&mut self, at: usize) {
        let Request {
            slot,
            opened,
            asked,
            path,
            entered,
            generated,
            lease,
        } = self.requests.swap_remove(at);
        let told = lease.revoke(&prompt(&asked));
        if opened == self.opened[slot.at()] {
            assert_eq!(
                told,
                if self.models[slot.at()].leases() {
                    generated
                } else {
                    0
                }
            );
            let now = self.bed.now();
            self.models[slot.at()].revoke(&path, entered, generated, now);
        }
    }

    fn release(&mut self, at: usize) {
        let Request {
            slot,
            opened,
            path,
            generated,
            lease,
            ..
        } = self.requests.swap_remove(at);
        drop(lease);
        if opened == self.opened[slot.at()] {
            let now = self.bed.now();
            self.models[slot.at()].release(&path, generated, now);
        }
    }

    fn check(&mut self) {
        self.check_counts();
        for at in 0..self.seen.len() {
            self.check_path(at);
        }
    }

    fn check_path(&mut self, at: usize) {
        let path = &self.seen[at];
        self.bed
            .predictor
            .overlaps(&prompt(path), &mut self.bed.overlaps);
        for (slot, model) in self.models.iter().enumerate() {
            let found = self.bed.overlaps.get(Slot(slot as u32));
            assert_eq!(found.total(), found.device);
            assert_eq!(
                found.device as usize,
                model.overlap(path),
                "{slot:?} {path:?}"
            );
        }
    }

    fn check_counts(&self) {
        let stats = self.bed.predictor.stats();
        let indexed = self.bed.predictor.index.stats();
        let all: BTreeSet<&Vec<u8>> = self.models.iter().flat_map(Model::paths).collect();
        assert_eq!(indexed.distinct_blocks, all.len() as u64);
        for (slot, model) in self.models.iter().enumerate() {
            assert!(
                model.is_whole(),
                "a block left before its descendants: {model:?}"
            );
            let found = &stats.ranks[slot];
            assert_eq!(
                (found.blocks, found.generated),
                (model.blocks(), model.generated()),
                "{slot:?}"
            );
            let gone = (found.evicted, found.expired, found.refused);
            assert_eq!(
                gone,
                (model.evicted, model.expired, model.refused),
                "{slot:?}"
            );
            assert_eq!(
                indexed.slots[slot].counts.device,
                model.blocks(),
                "{slot:?}"
            );
        }
    }

    /// Ends all requests, then closes all slots: nothing may be left.
    fn end(mut self) {
        while !self.requests.is_empty() {
            self.release(0);
        }
        self.check();
        for slot in (0..self.models.len() as u32).map(Slot) {
            self.bed.predictor.close(slot);
        }
        assert_eq!(self.bed.predictor.index.stats(), IndexStats::default());
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_predictor_holds_exactly_what_the_model_holds(
        lru in any::<bool>(),
        most in 1..20u64,
        steps in steps(30, 2, 2, 8),
    ) {
        let mut pair = Pair::new(lru, most, 2);
        for step in &steps {
            pair.take(step);
            pair.check();
        }
        pair.end();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn and_so_it_does_for_long_on_several_ranks(
        lru in any::<bool>(),
        most in 5..100u64,
        steps in steps(300, RANKS, 3, 16),
    ) {
        let mut pair = Pair::new(lru, most, RANKS);
        for (at, step) in steps.iter().enumerate() {
            pair.take(step);
            pair.check_counts();
            let last = pair.seen.len().saturating_sub(4);
            (last..pair.seen.len()).for_each(|seen| pair.check_path(seen));
            if !pair.seen.is_empty() {
                pair.check_path(at * 7919 % pair.seen.len());
            }
        }
        pair.end();
    }
}

#[test]
fn what_a_live_request_holds_is_seen_whole_whatever_others_do_meanwhile() {
    let bed = Bed::new(lru(Some(2_000)));
    (0..RANKS).for_each(|slot| _ = bed.predictor.open(Slot(slot), name(Slot(slot)), None));
    // Longer than what is entered or taken out in one step, and than a run.
    let path = |turn: u64| -> Vec<u8> {
        (0..1_500)
            .map(|at| if at < 700 { 1 } else { (turn % 5) as u8 })
            .collect()
    };
    let held = bed.record(A, &path(0));
    let whole = prompt(&path(0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers = [A, B].map(|slot| {
            let (bed, path) = (&bed, &path);
            scope.spawn(move || {
                for turn in 0..200 {
                    let asked = &path(turn)[..700 + turn as usize * 37 % 800];
                    let mut lease = bed.record(slot, asked);
                    lease.grow(turn % 3);
                    if turn % 4 == 0 {
                        lease.revoke(&prompt(asked));
                    }
                }
            })
        });
        scope.spawn(|| {
            let (mut overlaps, mut over) = (Overlaps::new(), false);
            while !over {
                over = done.load(Ordering::Relaxed);
                bed.predictor.overlaps(&whole, &mut overlaps);
                assert_eq!(overlaps.get(A).device, 1_500);
                assert!(overlaps.get(B).device <= 1_500);
            }
        });
        let ended = writers.map(|writer| writer.join().is_ok());
        done.store(true, Ordering::Relaxed);
        assert_eq!(ended, [true, true]);
    });
    let stats = bed.predictor.stats();
    assert!(
        stats.ranks[..2].iter().all(|rank| rank.evicted > 0),
        "{stats:?}"
    );
    drop(held);
}

#[test]
fn prediction_beside_events_ends_a_fixed_time_after_the_request() {
    for beside_events in [true, false] {
        let now = Arc::new(Mutex::new(0));
        let (start, clock) = (Instant::now(), now.clone());
        let clock = move || start + Duration::from_millis(*clock.lock());
        let predictor = match beside_events {
            true => Predictor::beside_events(Policy::Ttl(ttl(100)), clock),
            false => Predictor::new(Policy::Ttl(ttl(100)), clock),
        };
        let mut bed = Bed {
            now,
            predictor,
            overlaps: Overlaps::new(),
        };
        bed.predictor.open(A, name(A), None);
        let send = |bed: &Bed, path: &[u8]| bed.predictor.send(A, name(A), &prompt(path));
        // One answer comes in time, one after its prediction has ended.
        let early = send(&bed, &[1, 2]);
        let late = send(&bed, &[3, 4]);
        bed.wait(TTL / 2);
        let _confirmed = early.confirm(&prompt(&[1, 2]));
        assert_eq!(bed.overlap(A, &[1, 2]), 2);
        bed.wait(TTL / 2 + 200);
        bed.predictor.expire();
        assert_eq!(bed.overlap(A, &[1, 2]), if beside_events { 0 } else { 2 });
        let _confirmed = late.confirm(&prompt(&[3, 4]));
        assert_eq!(bed.overlap(A, &[3, 4]), if beside_events { 0 } else { 2 });
        // A prompt that is recorded later and ends earlier shortens no other.
        let first = send(&bed, &[5, 6]);
        bed.wait(300);
        let _second = send(&bed, &[5, 6]).confirm(&prompt(&[5, 6]));
        let _first = first.confirm(&prompt(&[5, 6]));
        bed.wait(TTL - 200);
        bed.predictor.expire();
        assert_eq!(bed.overlap(A, &[5, 6]), 2);
    }
}
