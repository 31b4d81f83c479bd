use std::collections::BTreeMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::worker::{DpRank, WorkerId};

fn rank(worker: u64) -> WorkerRank {
    WorkerRank { worker: WorkerId(worker), rank: DpRank(0) }
}

fn booking(slot: u32, worker: u64, sequences: &[u64], tokens: u64) -> Booking {
    Booking {
        slot: Slot(slot),
        rank: rank(worker),
        sequences: sequences.iter().copied().map(SequenceHash).collect(),
        prompt_tokens: tokens,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        until: Until::End,
    }
}

fn book(tracker: &Arc<LoadTracker>, booking: Booking) -> Reservation {
    tracker.book_with(|_| Ok::<_, ()>(vec![booking])).unwrap()
}

fn loads(tracker: &LoadTracker) -> Vec<(u32, u64, u64, u64)> {
    let row = |load: &RankLoad| (load.slot.0, load.active_blocks, load.active_prefill_tokens, load.active_requests);
    tracker.snapshot().iter().map(row).collect()
}

#[test]
fn a_dropped_reservation_releases_everything() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.open(Slot(0), rank(1));
    let mut reservation = book(&tracker, booking(0, 1, &[1, 2, 3], 50));
    assert_eq!(loads(&tracker), [(0, 3, 50, 1)]);
    reservation.first_token();
    reservation.first_token();
    assert_eq!(loads(&tracker), [(0, 3, 0, 1)]);
    drop(reservation);
    assert_eq!(loads(&tracker), [(0, 0, 0, 0)]);
}

#[test]
fn cached_tokens_are_not_prefilled_and_untracked_prefill_counts_nothing() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.open(Slot(0), rank(1));
    for (cached, track, expected) in [(0, true, 64), (48, true, 16), (100, true, 0), (0, false, 0)] {
        let booking = Booking { cached_tokens: cached, track_prefill: track, ..booking(0, 1, &[1], 64) };
        let reservation = book(&tracker, booking);
        assert_eq!(loads(&tracker), [(0, 1, expected, 1)], "cached {cached} tracked {track}");
        drop(reservation);
    }
}

#[test]
fn no_length_makes_the_load_overflow() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.open(Slot(0), rank(1));
    let giants: Vec<_> = (0..3).map(|_| book(&tracker, booking(0, 1, &[1], u64::MAX))).collect();
    let small = book(&tracker, booking(0, 1, &[1], 16));
    assert!(loads(&tracker)[0].2 > 16);
    drop(giants);
    assert_eq!(loads(&tracker), [(0, 1, 16, 1)]);
    drop(small);
    assert_eq!(loads(&tracker), [(0, 0, 0, 0)]);
}

#[test]
fn a_late_release_does_not_touch_who_came_after() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.open(Slot(0), rank(1));
    let mut late = book(&tracker, booking(0, 1, &[1, 2], 32));
    tracker.close(Slot(0));
    assert_eq!(loads(&tracker), []);
    tracker.open(Slot(0), rank(1));
    let present = book(&tracker, booking(0, 1, &[1], 16));
    late.first_token();
    drop(late);
    assert_eq!(loads(&tracker), [(0, 1, 16, 1)]);
    drop(present);
    assert_eq!(loads(&tracker), [(0, 0, 0, 0)]);
}

#[test]
fn nothing_is_booked_where_the_slot_is_closed_or_somebody_elses() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.open(Slot(1), rank(1));
    let reservations = [book(&tracker, booking(0, 1, &[1], 16)), book(&tracker, booking(1, 2, &[1], 16))];
    assert_eq!(loads(&tracker), [(1, 0, 0, 0)]);
    drop(reservations);
    assert_eq!(loads(&tracker), [(1, 0, 0, 0)]);
    let refused = tracker.book_with(|view| {
        assert_eq!(view.load(Slot(0), rank(1)), None);
        assert_eq!(view.load(Slot(1), rank(2)), None);
        assert_eq!(view.load(Slot(7), rank(1)), None);
        assert_eq!(view.load(Slot(1), rank(1)), Some(Load::default()));
        assert_eq!(view.additional_blocks(Slot(7), &[SequenceHash(1)]), 1);
        Err("no")
    });
    assert_eq!(refused.map(|_| ()), Err("no"));
}

#[test]
fn simultaneous_bookings_see_one_another() {
    let tracker = LoadTracker::new(Instant::now);
    (0..4).for_each(|slot| tracker.open(Slot(slot), rank(u64::from(slot))));
    let idlest = |view: &LoadView<'_>| {
        let requests = |slot: &u32| view.load(Slot(*slot), rank(u64::from(*slot))).unwrap().active_requests;
        let slot = (0..4).min_by_key(requests).unwrap();
        Ok::<_, ()>(vec![booking(slot, u64::from(slot), &[1, 2], 32)])
    };
    let held: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| (0..25).map(|_| tracker.book_with(idlest).unwrap()).collect::<Vec<_>>()))
            .collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(loads(&tracker), [(0, 2, 800, 25), (1, 2, 800, 25), (2, 2, 800, 25), (3, 2, 800, 25)]);
    drop(held);
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]);
}

/// What is live, kept by the simplest means: the list of live requests.
#[derive(Default)]
struct Naive(BTreeMap<usize, (u32, Vec<u64>, u64)>);

impl Naive {
    fn rows(&self, slot: u32) -> impl Iterator<Item = &(u32, Vec<u64>, u64)> {
        self.0.values().filter(move |row| row.0 == slot)
    }

    fn load(&self, slot: u32) -> Load {
        let mut blocks: Vec<u64> = self.rows(slot).flat_map(|row| row.1.clone()).collect();
        blocks.sort_unstable();
        blocks.dedup();
        Load {
            active_blocks: blocks.len() as u64,
            active_prefill_tokens: self.rows(slot).map(|row| row.2).sum(),
            active_requests: self.rows(slot).count() as u64,
        }
    }

    fn additional(&self, slot: u32, prompt: &[u64]) -> u64 {
        let held = |block: &&u64| self.rows(slot).any(|row| row.1.contains(block));
        (prompt.len() - prompt.iter().take_while(held).count()) as u64
    }
}

/// Chained names, as sequence hashes are: equal only after equal prefixes.
fn chained(locals: &[u64]) -> Vec<u64> {
    let step = |last: &mut u64, local: &u64| {
        *last = *last * 4 + local + 1;
        Some(*last)
    };
    locals.iter().scan(0, step).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 600, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn load_is_that_of_the_live_requests(
        script in vec((0..6u8, 0..3u32, vec(0..3u64, 0..7), 0..100u64, any::<u16>()), 1..50),
    ) {
        let tracker = LoadTracker::new(Instant::now);
        (0..3).for_each(|slot| tracker.open(Slot(slot), rank(u64::from(slot))));
        let mut naive = Naive::default();
        let mut live: BTreeMap<usize, Reservation> = BTreeMap::new();
        for (at, (kind, slot, locals, tokens, pick)) in script.into_iter().enumerate() {
            let prompt = chained(&locals);
            let picked = live.keys().copied().nth(usize::from(pick) % live.len().max(1));
            match (kind, picked) {
                (0..3, _) => {
                    live.insert(at, book(&tracker, booking(slot, u64::from(slot), &prompt, tokens)));
                    naive.0.insert(at, (slot, prompt.clone(), tokens));
                }
                (3, Some(picked)) => {
                    live.get_mut(&picked).unwrap().first_token();
                    naive.0.entry(picked).and_modify(|row| row.2 = 0);
                }
                (4, Some(picked)) => {
                    live.remove(&picked);
                    naive.0.remove(&picked);
                }
                (5, _) if pick % 8 == 0 => {
                    tracker.close(Slot(slot));
                    tracker.open(Slot(slot), rank(u64::from(slot)));
                    naive.0.retain(|_, row| row.0 != slot);
                }
                _ => {}
            }
            let hashes: Vec<_> = prompt.iter().copied().map(SequenceHash).collect();
            let read = tracker.book_with(|view| {
                let row = |slot: u32| {
                    (view.load(Slot(slot), rank(u64::from(slot))).unwrap(), view.additional_blocks(Slot(slot), &hashes))
                };
                Err::<Vec<Booking>, _>([row(0), row(1), row(2)])
            });
            for slot in 0..3 {
                let expected = (naive.load(slot), naive.additional(slot, &prompt));
                prop_assert_eq!(read.as_ref().unwrap_err()[slot as usize], expected);
            }
        }
        live.clear();
        prop_assert!(tracker.snapshot().iter().all(|load| load.active_blocks + load.active_requests == 0));
    }
}
