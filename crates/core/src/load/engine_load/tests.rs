use super::*;
use crate::load::tests::member;
use crate::load::{BookingEnd, LoadBooking, LoadTracker, PromptSequences};
use crate::worker::{DpRank, WorkerId};

const SLOT: RankSlot = RankSlot(5);

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

/// A tracker whose clock is moved by the test.
struct TestTracker {
    load: Arc<LoadTracker>,
    clock: Arc<Mutex<Instant>>,
}

impl TestTracker {
    fn new() -> Self {
        let clock = Arc::new(Mutex::new(Instant::now()));
        let load = LoadTracker::new({
            let clock = clock.clone();
            move || *clock.lock()
        });
        load.join(&member(5, 1, 1));
        Self { load, clock }
    }

    fn unbooked_requests(&self, slot: RankSlot) -> u64 {
        let loads = self.load.engine_loads().view(self.load.now());
        loads.unbooked_requests(slot)
    }

    fn advance(&self, time: Duration) {
        *self.clock.lock() += time;
    }

    fn sample(&self, requests: u64) -> EngineLoadSample {
        EngineLoadSample {
            report: EngineLoadReport {
                running: requests,
                waiting: 0,
                kv_usage: Some(0.5),
                received_at: self.load.now(),
            },
            booked_before: 0,
            valid_for: Duration::from_secs(3),
            max_lag: Some(Duration::ZERO),
        }
    }

    fn report(&self, requests: u64) -> bool {
        self.advance(Duration::from_secs(1));
        self.load
            .record_engine_load(SLOT, rank(1), &self.sample(requests))
    }

    fn kv_usage(&self) -> Option<f64> {
        self.load
            .engine_loads()
            .view(self.load.now())
            .kv_usage(SLOT)
    }

    fn book(&self) -> crate::load::Reservation {
        let booking = LoadBooking {
            slot: SLOT,
            rank: rank(1),
            sequences: PromptSequences::empty(),
            prompt_tokens: 1,
            cached_tokens: 0,
            track_prefill: true,
            prefill_time: None,
            content_time: None,
            end: BookingEnd::RequestEnd,
        };
        let booked = self.load.book_with(|_| Ok::<_, ()>((vec![booking], ())));
        booked.unwrap().0
    }
}

#[test]
fn restarted_router_assumes_reported_requests() {
    let tracker = TestTracker::new();
    assert_eq!(tracker.unbooked_requests(SLOT), 0);
    assert!(tracker.report(9));
    assert_eq!(tracker.unbooked_requests(SLOT), 9);
    assert_eq!(tracker.kv_usage(), Some(0.5));
}

#[test]
fn booked_requests_are_not_assumed_again() {
    let tracker = TestTracker::new();
    let booked = [tracker.book(), tracker.book()];
    tracker.report(5);
    assert_eq!(tracker.unbooked_requests(SLOT), 3);
    drop(booked);
    tracker.report(0);
    assert_eq!(tracker.unbooked_requests(SLOT), 0);
}

#[test]
fn requests_released_during_the_scrape_are_no_drift() {
    let tracker = TestTracker::new();
    let sample = EngineLoadSample {
        booked_before: 4,
        ..tracker.sample(4)
    };
    assert!(tracker.load.record_engine_load(SLOT, rank(1), &sample));
    assert_eq!(tracker.unbooked_requests(SLOT), 0);
    let [load] = tracker.load.engine_loads().snapshot(tracker.load.now())[..] else {
        panic!("one report")
    };
    assert_eq!((load.drift, load.rank), (4, rank(1)));
}

#[test]
fn stale_report_does_not_count() {
    let tracker = TestTracker::new();
    tracker.report(9);
    tracker.advance(Duration::from_millis(2999));
    assert_eq!(tracker.unbooked_requests(SLOT), 9);
    tracker.advance(Duration::from_millis(1));
    assert_eq!(tracker.unbooked_requests(SLOT), 0);
    assert_eq!(tracker.kv_usage(), None);
    let loads = tracker.load.engine_loads();
    assert_eq!(loads.snapshot(tracker.load.now()), []);
}

#[test]
fn reused_slot_starts_without_report() {
    let tracker = TestTracker::new();
    tracker.report(9);
    tracker.load.leave(&member(5, 1, 1));
    assert_eq!(tracker.unbooked_requests(SLOT), 0);
    tracker.load.join(&member(5, 2, 1));
    assert!(!tracker.report(9), "a late report of the previous rank");
    assert_eq!(tracker.unbooked_requests(SLOT), 0);
}

#[test]
fn report_survives_growth_of_the_table() {
    let tracker = TestTracker::new();
    tracker.report(9);
    tracker.load.join(&member(500, 7, 1));
    assert_eq!(tracker.unbooked_requests(SLOT), 9);
    assert_eq!(tracker.unbooked_requests(RankSlot(500)), 0);
    assert_eq!(tracker.unbooked_requests(RankSlot(5000)), 0);
}

#[test]
fn unknown_usage_is_not_zero() {
    let tracker = TestTracker::new();
    let mut sample = tracker.sample(1);
    sample.report.kv_usage = None;
    tracker.load.record_engine_load(SLOT, rank(1), &sample);
    assert_eq!(tracker.kv_usage(), None);
    assert_eq!(tracker.unbooked_requests(SLOT), 1);
}
