mod model;
mod properties;

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
use model::{Model, UseSnapshot};

const TTL: u64 = 1_050;
const A: RankSlot = RankSlot(0);
const B: RankSlot = RankSlot(1);
const RANKS: u32 = 4;

fn rank_of(slot: RankSlot) -> WorkerRank {
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
    BlockHashes::from_locals(path.len() * 16, BlockSize::new(16).unwrap(), locals)
}

fn ttl(max_blocks_per_rank: u64) -> TtlPolicy {
    TtlPolicy {
        ttl: Duration::from_millis(TTL),
        max_blocks_per_rank,
    }
}

/// Predictor with a manual clock.
struct TestBed {
    now: Arc<Mutex<u64>>,
    predictor: Arc<Predictor>,
}

impl TestBed {
    fn new(policy: EvictionPolicy) -> Self {
        let now = Arc::new(Mutex::new(0));
        let start = Instant::now();
        let clock = now.clone();
        let predictor =
            Predictor::new(policy, move || start + Duration::from_millis(*clock.lock()));
        Self { now, predictor }
    }

    fn now(&self) -> u64 {
        *self.now.lock()
    }

    fn wait(&self, millis: u64) {
        *self.now.lock() += millis;
    }

    fn record(&self, slot: RankSlot, path: &[u8]) -> PredictionLease {
        self.predictor.record(slot, rank_of(slot), &prompt(path))
    }

    /// Sends a prompt, which the engine accepts.
    fn send(&self, slot: RankSlot, path: &[u8]) -> PredictionLease {
        let prompt = prompt(path);
        let sent = self
            .predictor
            .record_in_flight(slot, rank_of(slot), &prompt);
        sent.confirm(&prompt)
    }

    fn overlap(&mut self, slot: RankSlot, path: &[u8]) -> usize {
        let found = predicted_overlaps(&self.predictor, &prompt(path)).get(slot);
        assert_eq!(found.total(), found.device);
        found.device as usize
    }
}

fn predicted_overlaps(predictor: &Predictor, prompt: &BlockHashes) -> Overlaps {
    let mut found = Overlaps::new();
    predictor.raise(prompt, &mut found, &mut Overlaps::new(), |_| true);
    found
}

fn lru(default_blocks: Option<u64>) -> EvictionPolicy {
    EvictionPolicy::Lru {
        default_blocks,
        fallback: ttl(1_000),
    }
}

#[test]
fn eviction_value_falls_with_age_of_oldest_blocks() {
    let bed = TestBed::new(lru(Some(4)));
    bed.predictor.open(A, rank_of(A), None);
    bed.predictor.open(B, rank_of(B), None);
    let value = |slot| {
        let age = bed.predictor.eviction_age();
        bed.predictor.usage(slot, age).eviction_value
    };
    drop(bed.record(B, &[9]));
    bed.wait(10_000);
    assert_eq!(value(B), 1.0, "nothing was evicted yet");
    for block in 0..8 {
        drop(bed.record(A, &[block]));
        bed.wait(500);
    }
    assert_eq!(value(A), 1.0);
    // Evicted after 2 s, and unused for 14 s: less than blocks of twice the mean age.
    assert!((value(B) - 4.0 / 14.0).abs() < 0.01, "{}", value(B));
    drop(bed.record(B, &[9]));
    assert_eq!(value(B), 1.0);
}

#[test]
fn reported_cached_blocks_evict_older_predictions() {
    let mut test_bed = TestBed::new(lru(None));
    test_bed.predictor.open(A, rank_of(A), Some(64));
    for path in [&[1, 2, 3][..], &[4, 5, 6], &[7, 8, 9]] {
        drop(test_bed.send(A, path));
    }
    let mut held = test_bed.send(A, &[4, 5, 6, 10]);
    let mut concurrent = test_bed.send(A, &[4, 5, 6, 11]);
    concurrent.correct_cached_blocks(0, 2);
    assert_eq!(
        test_bed.overlap(A, &[1, 2, 3]),
        3,
        "a request held [4, 5, 6]"
    );
    held.correct_cached_blocks(2, 2);
    assert_eq!(test_bed.overlap(A, &[1, 2, 3]), 3, "the last matched block");
    drop((held, concurrent));
    let mut evicted = test_bed.send(A, &[7, 8, 9, 12]);
    evicted.correct_cached_blocks(0, 2);
    let left = [&[1, 2, 3][..], &[4, 5, 6, 10], &[7, 8, 9, 12]];
    let left = left.map(|path| test_bed.overlap(A, path));
    assert_eq!(left, [0, 4, 4], "only [1, 2, 3] was used earlier");
}

#[test]
fn report_of_concurrent_request_corrects_nothing() {
    let mut test_bed = TestBed::new(lru(None));
    test_bed.predictor.open(A, rank_of(A), Some(64));
    drop(test_bed.send(A, &[1, 2, 3]));
    let long = prompt(&[4, 5, 6]);
    let sent = [(); 2].map(|()| test_bed.predictor.record_in_flight(A, rank_of(A), &long));
    // Both responses arrive when the prompt was computed twice.
    for sent in sent {
        let mut lease = sent.confirm(&long);
        lease.correct_cached_blocks(0, 2);
    }
    assert_eq!(test_bed.overlap(A, &[1, 2, 3]), 3);
}

#[test]
fn conversation_is_one_run_until_it_branches() {
    for policy in [lru(Some(100)), EvictionPolicy::Ttl(ttl(100))] {
        let test_bed = TestBed::new(policy);
        test_bed.predictor.open(A, rank_of(A), None);
        for turn in 1..=5 {
            let mut lease = test_bed.record(A, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10][..2 * turn]);
            lease.grow(1);
        }
        let runs = || test_bed.predictor.stats()[0].runs;
        assert_eq!(
            (runs(), test_bed.predictor.stats()[0].blocks),
            (1, 10),
            "{policy:?}"
        );
        drop(test_bed.record(A, &[1, 2, 3, 8]));
        assert_eq!(
            (runs(), test_bed.predictor.stats()[0].blocks),
            (3, 11),
            "{policy:?}"
        );
    }
}

#[test]
fn rank_without_capacity_falls_back_to_ttl() {
    let mut test_bed = TestBed::new(lru(None));
    assert_eq!(
        test_bed.predictor.open(B, rank_of(B), Some(6)),
        EffectivePolicy::Lru { capacity: 6 }
    );
    let policy = test_bed.predictor.open(A, rank_of(A), None);
    assert_eq!(
        policy,
        EffectivePolicy::Ttl {
            max_blocks: 1_000,
            fallback: true
        }
    );
    assert_eq!(test_bed.predictor.stats()[0].policy, policy);
    let lease = test_bed.record(A, &[1]);
    test_bed.wait(TTL + 100);
    test_bed.predictor.expire();
    assert_eq!(test_bed.overlap(A, &[1]), 0, "no lease holds it");
    drop(lease);
}

#[test]
fn stale_rank_or_lease_has_no_effect() {
    let mut test_bed = TestBed::new(lru(Some(4)));
    test_bed.predictor.open(A, rank_of(A), None);
    let mut old = test_bed.record(A, &[1, 2]);
    old.grow(1);
    test_bed.predictor.open(A, rank_of(B), None);
    assert_eq!(test_bed.overlap(A, &[1, 2]), 0);
    drop(test_bed.record(A, &[1, 2]));
    drop(test_bed.record(B, &[1, 2]));
    assert_eq!(test_bed.predictor.stats()[0].blocks, 0);
    let held = test_bed.predictor.record(A, rank_of(B), &prompt(&[1, 2]));
    old.grow(5);
    drop(old);
    let stats = test_bed.predictor.stats();
    assert_eq!((stats[0].blocks, stats[0].generated), (2, 0));
    test_bed.predictor.close(A);
    test_bed.predictor.close(A);
    test_bed.predictor.close(RankSlot(77));
    drop(held);
    assert_eq!(test_bed.predictor.stats(), []);
    assert_eq!(test_bed.overlap(A, &[1, 2]), 0);
}

#[test]
fn held_blocks_stay_visible_during_concurrent_changes() {
    let test_bed = TestBed::new(lru(Some(2_000)));
    (0..RANKS).for_each(|slot| {
        _ = test_bed
            .predictor
            .open(RankSlot(slot), rank_of(RankSlot(slot)), None)
    });
    // Longer than a step of the path writer, and than a run.
    let path = |turn: u64| -> Vec<u8> {
        (0..1_500)
            .map(|at| if at < 700 { 1 } else { (turn % 5) as u8 })
            .collect()
    };
    let held = test_bed.record(A, &path(0));
    let full_prompt = prompt(&path(0));
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let writers = [A, B].map(|slot| {
            let test_bed = &test_bed;
            let path = &path;
            scope.spawn(move || {
                for turn in 0..200 {
                    let prompt_path = &path(turn)[..700 + turn as usize * 37 % 800];
                    let mut lease = test_bed.record(slot, prompt_path);
                    lease.grow(turn % 3);
                    if turn % 4 == 0 {
                        lease.revoke(&prompt(prompt_path));
                    }
                }
            })
        });
        scope.spawn(|| {
            let mut is_done = false;
            while !is_done {
                is_done = done.load(Ordering::Relaxed);
                let overlaps = predicted_overlaps(&test_bed.predictor, &full_prompt);
                assert_eq!(overlaps.get(A).device, 1_500);
                assert!(overlaps.get(B).device <= 1_500);
            }
        });
        let ended = writers.map(|writer| writer.join().is_ok());
        done.store(true, Ordering::Relaxed);
        assert_eq!(ended, [true, true]);
    });
    let stats = test_bed.predictor.stats();
    assert!(stats[..2].iter().all(|rank| rank.evicted > 0), "{stats:?}");
    drop(held);
}

#[test]
fn prediction_beside_events_ends_at_fixed_time() {
    for beside_events in [true, false] {
        let now = Arc::new(Mutex::new(0));
        let start = Instant::now();
        let clock = now.clone();
        let clock = move || start + Duration::from_millis(*clock.lock());
        let predictor = match beside_events {
            true => Predictor::beside_events(EvictionPolicy::Ttl(ttl(100)), clock),
            false => Predictor::new(EvictionPolicy::Ttl(ttl(100)), clock),
        };
        let mut test_bed = TestBed { now, predictor };
        test_bed.predictor.open(A, rank_of(A), None);
        let send = |test_bed: &TestBed, path: &[u8]| {
            test_bed
                .predictor
                .record_in_flight(A, rank_of(A), &prompt(path))
        };
        // One response arrives in time, and one after its prediction has expired.
        let early = send(&test_bed, &[1, 2]);
        let late = send(&test_bed, &[3, 4]);
        test_bed.wait(TTL / 2);
        let _confirmed = early.confirm(&prompt(&[1, 2]));
        assert_eq!(test_bed.overlap(A, &[1, 2]), 2);
        test_bed.wait(TTL / 2 + 200);
        test_bed.predictor.expire();
        assert_eq!(
            test_bed.overlap(A, &[1, 2]),
            if beside_events { 0 } else { 2 }
        );
        let _confirmed = late.confirm(&prompt(&[3, 4]));
        assert_eq!(
            test_bed.overlap(A, &[3, 4]),
            if beside_events { 0 } else { 2 }
        );
        // A use that is confirmed later but expires earlier does not shorten another one.
        let first = send(&test_bed, &[5, 6]);
        test_bed.wait(300);
        let _second = send(&test_bed, &[5, 6]).confirm(&prompt(&[5, 6]));
        let _first = first.confirm(&prompt(&[5, 6]));
        test_bed.wait(TTL - 200);
        test_bed.predictor.expire();
        assert_eq!(test_bed.overlap(A, &[5, 6]), 2);
    }
}
