use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;
use crate::block::SequenceHash;
use crate::worker::{DpRank, WorkerId};

mod replay;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
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
    for (cached, track, expected) in [(0, true, 64), (48, true, 16), (100, true, 0), (0, false, 0)]
    {
        let booking = Booking {
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
fn no_length_makes_the_load_overflow() {
    let tracker = LoadTracker::new(Instant::now);
    tracker.open(Slot(0), rank(1));
    let giants: Vec<_> = (0..3)
        .map(|_| book(&tracker, booking(0, 1, &[1], u64::MAX)))
        .collect();
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
    let reservations = [
        book(&tracker, booking(0, 1, &[1], 16)),
        book(&tracker, booking(1, 2, &[1], 16)),
    ];
    assert_eq!(loads(&tracker), [(1, 0, 0, 0)]);
    drop(reservations);
    assert_eq!(loads(&tracker), [(1, 0, 0, 0)]);
    let refused = tracker.book_with(|view| {
        assert_eq!(view.load(Slot(0), rank(1)), None);
        assert_eq!(view.load(Slot(1), rank(2)), None);
        assert_eq!(view.load(Slot(7), rank(1)), None);
        assert_eq!(view.load(Slot(1), rank(1)), Some(Load::default()));
        assert_eq!(
            view.additional(&Sequences::from_iter([SequenceHash(1)]))
                .of(Slot(7)),
            1
        );
        Err("no")
    });
    assert_eq!(refused.map(|_| ()), Err("no"));
}

#[test]
fn simultaneous_bookings_see_one_another() {
    let tracker = LoadTracker::new(Instant::now);
    (0..4).for_each(|slot| tracker.open(Slot(slot), rank(u64::from(slot))));
    let idlest = |view: &LoadView<'_>| {
        let requests = |slot: &u32| {
            view.load(Slot(*slot), rank(u64::from(*slot)))
                .unwrap()
                .active_requests
        };
        let slot = (0..4).min_by_key(requests).unwrap();
        Ok::<_, ()>(vec![booking(slot, u64::from(slot), &[1, 2], 32)])
    };
    let held: Vec<_> = std::thread::scope(|scope| {
        let threads: Vec<_> = (0..4)
            .map(|_| {
                scope.spawn(|| {
                    (0..25)
                        .map(|_| tracker.book_with(idlest).unwrap())
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

/// A tracker with two open ranks and its clock.
fn timed() -> (Arc<LoadTracker>, Arc<Mutex<Instant>>) {
    let now = Arc::new(Mutex::new(Instant::now()));
    let clock = now.clone();
    let tracker = LoadTracker::new(move || *clock.lock());
    (0..2).for_each(|slot| tracker.open(Slot(slot), rank(u64::from(slot))));
    (tracker, now)
}

#[test]
fn a_prefill_worker_is_free_with_the_first_token_and_the_decode_worker_with_the_last() {
    let (tracker, _) = timed();
    let prefill = Booking {
        until: Until::FirstToken,
        ..booking(0, 0, &[1, 2], 32)
    };
    let decode = Booking {
        track_prefill: false,
        ..booking(1, 1, &[1, 2], 32)
    };
    let mut both = tracker
        .book_with(|_| Ok::<_, ()>(vec![decode, prefill]))
        .unwrap();
    assert_eq!(
        both.parts().collect::<Vec<_>>(),
        [(Slot(1), rank(1)), (Slot(0), rank(0))]
    );
    assert_eq!(both.parts().next(), Some((Slot(1), rank(1))));
    assert_eq!(loads(&tracker), [(0, 2, 32, 1), (1, 2, 0, 1)]);
    both.output_block(None);
    assert_eq!(loads(&tracker), [(0, 2, 32, 1), (1, 3, 0, 1)]);
    assert!(both.first_token());
    assert!(!both.first_token());
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 3, 0, 1)]);
    assert!(both.counts());
    assert!(both.release());
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0)]);
}

#[test]
fn a_booking_moves_as_far_as_it_had_come() {
    let (tracker, _) = timed();
    tracker.open(Slot(2), rank(2));
    let heard = Arc::new(AtomicUsize::new(0));
    let count = heard.clone();
    tracker.on_relief(move || _ = count.fetch_add(1, Ordering::SeqCst));
    let prefill = Booking {
        until: Until::FirstToken,
        ..booking(0, 0, &[1, 2], 32)
    };
    let decode = Booking {
        cached_tokens: 16,
        ..booking(1, 1, &[1, 2], 32)
    };
    let mut both = tracker
        .book_with(|_| Ok::<_, ()>(vec![decode, prefill]))
        .unwrap();
    both.output_block(None);
    let to = |slot: u32, worker: u64, cached_tokens: u64| {
        move |_: &LoadView<'_>, before: &Booking| {
            Some(Booking {
                slot: Slot(slot),
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
    assert_eq!(both.parts().next(), Some((Slot(2), rank(2))));
    assert_eq!(
        heard.load(Ordering::SeqCst),
        1,
        "whoever waits for the first rank hears of it"
    );
    both.first_token();
    assert!(both.relocate(to(1, 1, 0)));
    assert_eq!(
        loads(&tracker),
        [(0, 0, 0, 0), (1, 3, 0, 1), (2, 0, 0, 0)],
        "the prefill is over"
    );
    assert!(!both.relocate(to(2, 7, 0)), "nobody of that name is there");
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0), (2, 0, 0, 0)]);
    assert!(!both.relocate(to(1, 1, 0)), "nothing is held any longer");
    drop(both);
    let mut cached = book(
        &tracker,
        Booking {
            cached_tokens: 32,
            ..booking(0, 0, &[1, 2], 32)
        },
    );
    tracker.close(Slot(0));
    assert!(cached.relocate(to(1, 1, 16)), "its first rank has gone");
    assert_eq!(loads(&tracker), [(1, 2, 16, 1), (2, 0, 0, 0)]);
    assert!(!cached.relocate(|_, _| None));
    assert_eq!(loads(&tracker), [(1, 0, 0, 0), (2, 0, 0, 0)]);
}

#[test]
fn if_one_of_two_ranks_has_gone_neither_is_booked() {
    let (tracker, _) = timed();
    let both = vec![booking(0, 0, &[1], 16), booking(1, 7, &[1], 16)];
    let none = tracker.book_with(|_| Ok::<_, ()>(both)).unwrap();
    assert!(!none.counts());
    assert_eq!(loads(&tracker), [(0, 0, 0, 0), (1, 0, 0, 0)]);
}

#[test]
fn whoever_waits_hears_when_load_goes_down_and_may_look_at_once() {
    let (tracker, _) = timed();
    let heard = Arc::new(AtomicUsize::new(0));
    let (count, looked) = (heard.clone(), Arc::downgrade(&tracker));
    tracker.on_relief(move || {
        looked.upgrade().unwrap().snapshot();
        count.fetch_add(1, Ordering::SeqCst);
    });
    let heard =
        |expected, what: &str| assert_eq!(heard.swap(0, Ordering::SeqCst), expected, "{what}");
    let mut first = book(&tracker, booking(0, 0, &[1], 16));
    first.output_block(None);
    heard(0, "more load");
    first.output_block(Some(0.0));
    heard(1, "the answer will soon be over");
    first.first_token();
    heard(1, "first token");
    first.first_token();
    heard(0, "first token again");
    drop(first);
    heard(1, "the end");
    let second = book(&tracker, booking(1, 1, &[1], 16));
    tracker.close(Slot(1));
    heard(1, "the worker has gone");
    drop(second);
    heard(0, "nothing was left to release");
}

#[test]
fn fractions_outside_of_nothing_and_one_do_no_harm() {
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
        held.output_block(Some(fraction));
        assert_eq!(loads(&tracker)[0].1, expected, "{fraction}");
    }
    let mut held = book(&tracker, booking(0, 0, &[], 0));
    (0..5).for_each(|_| held.output_block(Some(0.7)));
    assert_eq!(loads(&tracker)[0].1, 4, "3.5 is rounded upwards");
}

#[test]
fn prefill_shrinks_with_time_as_long_as_it_is_known_how_fast() {
    let (tracker, now) = timed();
    let timed = |tokens, millis| Booking {
        prefill_time: Some(Duration::from_millis(millis)),
        ..booking(0, 0, &[], tokens)
    };
    let _instant = book(&tracker, timed(100, 0));
    assert_eq!(loads(&tracker)[0].2, 0, "what takes no time is done");
    let other = book(&tracker, timed(100, 1000));
    assert_eq!(loads(&tracker)[0].2, 100);
    drop(_instant);
    *now.lock() += Duration::from_millis(333);
    assert_eq!(
        loads(&tracker)[0].2,
        67,
        "the remaining part is rounded upwards"
    );
    *now.lock() += Duration::from_secs(1 << 60);
    assert_eq!(loads(&tracker)[0].2, 0);
    let unknown = book(&tracker, booking(0, 0, &[], 50));
    assert_eq!(loads(&tracker)[0].2, 50, "only the anchor shrinks");
    drop((other, unknown));
    assert_eq!(loads(&tracker)[0], (0, 0, 0, 0));
}
