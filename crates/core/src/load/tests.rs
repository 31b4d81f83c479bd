use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use parking_lot::Mutex;

use super::*;
use crate::block::SequenceHash;
use crate::fleet::FleetMember;
use crate::worker::{BlockSize, DpRank, RankSlot, Worker, WorkerId, WorkerRank};

mod calibration;
mod departures;
mod replay;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

pub(super) fn member(slot: u32, id: u64, port: u16) -> FleetMember {
    let endpoint = format!("127.0.0.1:{port}").parse().unwrap();
    let block_size = BlockSize::new(16).unwrap();
    FleetMember {
        slot: RankSlot(slot),
        rank: rank(id),
        worker: Arc::new(Worker::new(WorkerId(id), endpoint, "m".into(), block_size)),
    }
}

fn booking(slot: u32, worker: u64, sequences: &[u64], tokens: u64) -> LoadBooking {
    LoadBooking {
        slot: RankSlot(slot),
        rank: rank(worker),
        sequences: sequences.iter().copied().map(SequenceHash).collect(),
        prompt_tokens: tokens,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        content_time: None,
        end: BookingEnd::RequestEnd,
    }
}

fn book(tracker: &Arc<LoadTracker>, booking: LoadBooking) -> Reservation {
    let booked = tracker.book_with(|_| Ok::<_, ()>((vec![booking], ())));
    booked.unwrap().0
}

fn loads(tracker: &LoadTracker) -> Vec<(u32, u64, u64, u64)> {
    let row = |load: &RankLoad| {
        (
            load.slot.0,
            load.active_blocks,
            load.active_prefill_tokens,
            load.active_requests,
        )
    };
    tracker.snapshot().iter().map(row).collect()
}

#[test]
fn prefill_load_excludes_cached_and_untracked_tokens() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.join(&member(0, 1, 1));
    for (cached, track, expected) in [(0, true, 64), (48, true, 16), (100, true, 0), (0, false, 0)]
    {
        let booking = LoadBooking {
            cached_tokens: cached,
            track_prefill: track,
            ..booking(0, 1, &[1], 64)
        };
        let reservation = book(&tracker, booking);
        assert_eq!(
            loads(&tracker),
            [(0, 1, expected, 1)],
            "cached {cached} tracked {track}"
        );
        drop(reservation);
    }
}

#[test]
fn huge_prompt_lengths_do_not_overflow_load() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.join(&member(0, 1, 1));
    let huge: Vec<_> = (0..3)
        .map(|_| book(&tracker, booking(0, 1, &[1], u64::MAX)))
        .collect();
    let small = book(&tracker, booking(0, 1, &[1], 16));
    assert!(loads(&tracker)[0].2 > 16);
    drop(huge);
    assert_eq!(loads(&tracker), [(0, 1, 16, 1)]);
    drop(small);
    assert_eq!(loads(&tracker), [(0, 0, 0, 0)]);
}

#[test]
fn closed_or_reassigned_slot_is_not_booked() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.join(&member(1, 1, 1));
    let reservations = [
        book(&tracker, booking(0, 1, &[1], 16)),
        book(&tracker, booking(1, 2, &[1], 16)),
    ];
    assert_eq!(loads(&tracker), [(1, 0, 0, 0)]);
    drop(reservations);
    assert_eq!(loads(&tracker), [(1, 0, 0, 0)]);
    let rejected = tracker.book_with(|view| {
        assert_eq!(view.load(RankSlot(0), rank(1)), None);
        assert_eq!(view.load(RankSlot(1), rank(2)), None);
        assert_eq!(view.load(RankSlot(7), rank(1)), None);
        assert_eq!(view.load(RankSlot(1), rank(1)), Some(ActiveLoad::default()));
        assert_eq!(
            view.additional(&PromptSequences::from_iter([SequenceHash(1)]))
                .for_slot(RankSlot(7)),
            1
        );
        Err::<(_, ()), _>("no")
    });
    assert_eq!(rejected.map(|_| ()), Err("no"));
}

#[test]
fn concurrent_bookings_see_each_other() {
    let tracker = LoadTracker::new(Instant::now);
    (0..4).for_each(|slot| tracker.join(&member(slot, slot.into(), 1)));
    let choose_idlest = |view: &LoadView<'_>| {
        let requests = |slot: &u32| {
            view.load(RankSlot(*slot), rank(u64::from(*slot)))
                .unwrap()
                .active_requests
        };
        let slot = (0..4).min_by_key(requests).unwrap();
        Ok::<_, ()>((vec![booking(slot, u64::from(slot), &[1, 2], 32)], ()))
    };
    let held: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..25)
                        .map(|_| tracker.book_with(choose_idlest).unwrap())
                        .collect::<Vec<_>>()
                })
            })
            .collect();
        threads
            .into_iter()
            .flat_map(|thread| thread.join().unwrap())
            .collect()
    });
    assert_eq!(
        loads(&tracker),
        [
            (0, 2, 800, 25),
            (1, 2, 800, 25),
            (2, 2, 800, 25),
            (3, 2, 800, 25)
        ]
    );
    drop(held);
    assert_eq!(
        loads(&tracker),
        [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0), (3, 0, 0, 0)]
    );
}

/// Counts the notifications, and reads the load during each.
#[derive(Default)]
struct CapacityCounter {
    count: AtomicUsize,
    tracker: OnceLock<Weak<LoadTracker>>,
}

impl CapacityCounter {
    /// Returns the number of notifications since the last call.
    fn take(&self) -> usize {
        self.count.swap(0, Ordering::SeqCst)
    }
}

impl LoadListener for CapacityCounter {
    fn on_capacity_freed(&self) {
        self.tracker
            .get()
            .and_then(Weak::upgrade)
            .unwrap()
            .snapshot();
        self.count.fetch_add(1, Ordering::SeqCst);
    }
}

/// Creates a tracker with two open ranks, and the counter of its notifications.
fn counted() -> (Arc<LoadTracker>, Arc<CapacityCounter>) {
    let counter = Arc::new(CapacityCounter::default());
    let tracker = LoadTracker::with_listener(Instant::now, counter.clone());
    counter.tracker.set(Arc::downgrade(&tracker)).unwrap();
    (0..2).for_each(|slot| tracker.join(&member(slot, slot.into(), 1)));
    (tracker, counter)
}

/// Creates a tracker with two open ranks and a manual clock.
fn timed() -> (Arc<LoadTracker>, Arc<Mutex<Instant>>) {
    let now = Arc::new(Mutex::new(Instant::now()));
    let clock = now.clone();
    let tracker = LoadTracker::new(move || *clock.lock());
    (0..2).for_each(|slot| tracker.join(&member(slot, slot.into(), 1)));
    (tracker, now)
}

#[test]
fn first_token_releases_prefill_booking() {
    let (tracker, _) = timed();
    let prefill = LoadBooking {
        end: BookingEnd::FirstToken,
        ..booking(0, 0, &[1, 2], 32)
    };
    let decode = LoadBooking {
        track_prefill: false,
        ..booking(1, 1, &[1, 2], 32)
    };
    let (mut both, ()) = tracker
        .book_with(|_| Ok::<_, ()>((vec![decode, prefill], ())))
        .unwrap();
    assert_eq!(
        both.booked_slots().collect::<Vec<_>>(),
        [(RankSlot(1), rank(1)), (RankSlot(0), rank(0))]
    );
    assert_eq!(both.booked_slots().next(), Some((RankSlot(1), rank(1))));
    assert_eq!(loads(&tracker), [(0, 2, 32, 1), (1, 2, 0, 1)]);
    both.add_output_block(None);
    assert_eq!(loads(&tracker), [(0, 2, 32, 1), (1, 3, 0, 1)]);
    assert!(both.on_first_token());
    assert!(!both.on_first_token());
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 3, 0, 1)]);
    assert!(both.is_active());
    assert!(both.release());
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0)]);
}

#[test]
fn relocated_booking_keeps_its_progress() {
    let (tracker, counter) = counted();
    tracker.join(&member(2, 2, 1));
    let prefill = LoadBooking {
        end: BookingEnd::FirstToken,
        ..booking(0, 0, &[1, 2], 32)
    };
    let decode = LoadBooking {
        cached_tokens: 16,
        ..booking(1, 1, &[1, 2], 32)
    };
    let (mut both, ()) = tracker
        .book_with(|_| Ok::<_, ()>((vec![decode, prefill], ())))
        .unwrap();
    both.add_output_block(None);
    let to = |slot: u32, worker: u64, cached_tokens: u64| {
        move |_: &LoadView<'_>, before: &LoadBooking| {
            Some(LoadBooking {
                slot: RankSlot(slot),
                rank: rank(worker),
                cached_tokens,
                ..before.clone()
            })
        }
    };
    assert!(both.relocate(to(2, 2, 0)));
    assert_eq!(
        loads(&tracker),
        [(0, 2, 32, 1), (1, 0, 0, 0), (2, 3, 32, 1)],
        "the remote prefill stays"
    );
    assert_eq!(both.booked_slots().next(), Some((RankSlot(2), rank(2))));
    assert_eq!(
        counter.take(),
        1,
        "requests that wait for the first rank are notified"
    );
    both.on_first_token();
    assert!(both.relocate(to(1, 1, 0)));
    assert_eq!(
        loads(&tracker),
        [(0, 0, 0, 0), (1, 3, 0, 1), (2, 0, 0, 0)],
        "the prefill has ended"
    );
    assert!(!both.relocate(to(2, 7, 0)), "no such rank is in the slot");
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0)]);
    assert!(!both.relocate(to(1, 1, 0)), "no load is held any more");
    drop(both);
    let mut cached = book(
        &tracker,
        LoadBooking {
            cached_tokens: 32,
            ..booking(0, 0, &[1, 2], 32)
        },
    );
    tracker.leave(&member(0, 0, 1));
    assert!(cached.relocate(to(1, 1, 16)), "its first rank has left");
    assert_eq!(loads(&tracker), [(1, 2, 16, 1), (2, 0, 0, 0)]);
    assert!(!cached.relocate(|_, _| None));
    assert_eq!(loads(&tracker), [(1, 0, 0, 0), (2, 0, 0, 0)]);
}

#[test]
fn missing_rank_prevents_both_bookings() {
    let (tracker, _) = timed();
    let both = vec![booking(0, 0, &[1], 16), booking(1, 7, &[1], 16)];
    let (none, ()) = tracker.book_with(|_| Ok::<_, ()>((both, ()))).unwrap();
    assert!(!none.is_active());
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0)]);
}

#[test]
fn capacity_listener_runs_unlocked_after_load_decreases() {
    let (tracker, counter) = counted();
    let expect_notified = |expected, case: &str| assert_eq!(counter.take(), expected, "{case}");
    let mut first = book(&tracker, booking(0, 0, &[1], 16));
    first.add_output_block(None);
    expect_notified(0, "more load");
    first.add_output_block(Some(0.0));
    expect_notified(1, "the response is almost complete");
    first.on_first_token();
    expect_notified(1, "first token");
    first.on_first_token();
    expect_notified(0, "first token again");
    drop(first);
    expect_notified(1, "the end");
    let second = book(&tracker, booking(1, 1, &[1], 16));
    tracker.leave(&member(1, 1, 1));
    expect_notified(1, "the worker has left");
    drop(second);
    expect_notified(1, "the end of a request at a worker that has left");
}

#[test]
fn out_of_range_fractions_are_clamped() {
    let (tracker, _) = timed();
    for (fraction, expected) in [
        (-1.0, 0),
        (0.1, 0),
        (0.5, 1),
        (2.0, 2),
        (f64::INFINITY, 2),
        (f64::NAN, 2),
    ] {
        let mut held = book(&tracker, booking(0, 0, &[1], 16));
        held.add_output_block(Some(fraction));
        assert_eq!(loads(&tracker)[0].1, expected, "{fraction}");
    }
    let mut held = book(&tracker, booking(0, 0, &[], 0));
    (0..5).for_each(|_| held.add_output_block(Some(0.7)));
    assert_eq!(loads(&tracker)[0].1, 4, "3.5 is rounded upwards");
}
