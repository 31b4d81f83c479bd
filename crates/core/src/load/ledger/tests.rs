use std::collections::BTreeMap;

use parking_lot::Mutex;
use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::block::SequenceHash;
use crate::load::tests::member;
use crate::load::{BookingEnd, RankLoad};
use crate::worker::{DpRank, RankSlot, WorkerId};

fn rank(worker: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker.into()),
        rank: DpRank(0),
    }
}

fn booking(worker: u32, blocks: u64) -> LoadBooking {
    LoadBooking {
        slot: RankSlot(worker),
        rank: rank(worker),
        sequences: (1..=blocks).map(SequenceHash).collect(),
        prompt_tokens: blocks * 16,
        cached_tokens: 0,
        track_prefill: true,
        prefill_time: None,
        content_time: None,
        end: BookingEnd::RequestEnd,
    }
}

fn request_attempt(request: &str, number: u64) -> RequestAttempt<'_> {
    RequestAttempt { request, number }
}

/// Ledger of two workers with a manual clock.
struct TestLedger {
    ledger: BookingLedger,
    load: Arc<LoadTracker>,
    now: Arc<Mutex<Instant>>,
}

impl TestLedger {
    fn new(rules: LedgerRules) -> Self {
        let now = Arc::new(Mutex::new(Instant::now()));
        let clock = now.clone();
        let load = LoadTracker::new(move || *clock.lock());
        (0..2).for_each(|worker| load.join(&member(worker, worker.into(), 1)));
        Self {
            ledger: BookingLedger::new(load.clone(), rules),
            load,
            now,
        }
    }

    fn advance(&self, time: Duration) {
        *self.now.lock() += time;
    }

    fn add(
        &mut self,
        request: &str,
        number: u64,
        booking: LoadBooking,
    ) -> Result<LedgerChange, LedgerError> {
        self.ledger
            .add(request_attempt(request, number), vec![booking])
    }

    /// Returns the blocks, prefill tokens and requests of both workers.
    fn loads(&self) -> Vec<(u64, u64, u64)> {
        let row = |load: &RankLoad| {
            (
                load.active_blocks,
                load.active_prefill_tokens,
                load.active_requests,
            )
        };
        self.load.snapshot().iter().map(row).collect()
    }
}

fn rules_for_one_booking() -> LedgerRules {
    LedgerRules {
        max_ended: 2,
        max_bookings: 1,
        ..LedgerRules::default()
    }
}

#[test]
fn ended_attempt_is_not_booked_again() {
    let rules = rules_for_one_booking();
    let prefill = || LoadBooking {
        end: BookingEnd::FirstToken,
        ..booking(0, 2)
    };
    type End = fn(&mut BookingLedger, RequestAttempt<'_>) -> LedgerChange;
    let ends: [(&str, End); 2] = [
        ("first token", BookingLedger::mark_prefill_completed),
        ("free", BookingLedger::free),
    ];
    for (name, end) in ends {
        let mut test_ledger = TestLedger::new(rules);
        test_ledger.add("a", 1, prefill()).unwrap();
        assert_eq!(
            end(&mut test_ledger.ledger, request_attempt("a", 1)),
            LedgerChange::Applied,
            "{name}"
        );
        for number in [0, 1] {
            assert_eq!(
                test_ledger.add("a", number, prefill()),
                Ok(LedgerChange::Unchanged),
                "{name}"
            );
            assert_ended(&mut test_ledger, request_attempt("a", number), name);
        }
        assert_eq!(test_ledger.loads(), [(0, 0, 0), (0, 0, 0)], "{name}");
        assert_eq!(
            test_ledger.ledger.counts(),
            LedgerCounts::default(),
            "{name}: an ended attempt holds no slot"
        );
        assert_eq!(
            test_ledger.add("a", 2, booking(1, 1)),
            Ok(LedgerChange::Applied),
            "{name}: a later attempt"
        );
        test_ledger.ledger.free(request_attempt("a", 2));
        test_ledger.advance(rules.idle_timeout + Duration::from_millis(1));
        test_ledger.ledger.expire();
        assert!(
            test_ledger.ledger.entries.is_empty() && test_ledger.ledger.ended.is_empty(),
            "{name}"
        );
        assert_eq!(
            test_ledger.ledger.counts(),
            LedgerCounts::default(),
            "{name}: it was not idle"
        );
        assert_eq!(
            test_ledger.add("a", 1, prefill()),
            Ok(LedgerChange::Applied),
            "{name}: removed"
        );
    }
}

#[test]
fn number_of_remembered_attempts_is_limited() {
    let mut test_ledger = TestLedger::new(rules_for_one_booking());
    for name in ["a", "b", "c"] {
        test_ledger.add(name, 0, booking(0, 1)).unwrap();
        test_ledger.ledger.free(request_attempt(name, 0));
    }
    let known = ["a", "b", "c"].map(|name| {
        test_ledger
            .ledger
            .attempt_state(request_attempt(name, 0))
            .is_some()
    });
    assert_eq!(known, [false, true, true]);
}

fn assert_ended(test_ledger: &mut TestLedger, attempt: RequestAttempt<'_>, name: &str) {
    let ledger = &mut test_ledger.ledger;
    let completed = ledger.mark_prefill_completed(attempt);
    assert_eq!(completed, LedgerChange::Unchanged, "{name}");
    assert_eq!(ledger.free(attempt), LedgerChange::Unchanged, "{name}");
    let state = ledger.attempt_state(attempt);
    assert!(matches!(state, Some(AttemptState::Ended(()))), "{name}");
}

#[test]
fn ledger_limits_blocks() {
    let mut test_ledger = TestLedger::new(LedgerRules {
        max_blocks: 3,
        ..LedgerRules::default()
    });
    test_ledger.add("a", 0, booking(0, 2)).unwrap();
    assert_eq!(
        test_ledger.add("b", 0, booking(0, 2)),
        Err(LedgerError::TooManyBlocks { limit: 3 })
    );
    assert_eq!(
        test_ledger.add("b", 0, booking(0, 1)),
        Ok(LedgerChange::Applied)
    );
    test_ledger.advance(LedgerRules::default().idle_timeout + Duration::from_millis(1));
    assert_eq!(test_ledger.ledger.expire(), 2);
    assert_eq!(
        test_ledger.add("b", 1, booking(0, 3)),
        Ok(LedgerChange::Applied)
    );
    test_ledger.ledger.free(request_attempt("b", 1));
    assert_eq!(test_ledger.ledger.blocks, 0);
}

#[test]
fn external_booking_needs_all_ranks_in_fleet() {
    let mut test_ledger = TestLedger::new(LedgerRules::default());
    let unknown_rank = booking(7, 1);
    let result = test_ledger.ledger.add(
        request_attempt("a", 0),
        vec![booking(0, 1), unknown_rank.clone()],
    );
    assert_eq!(
        result,
        Err(LedgerError::NotServing {
            rank: unknown_rank.rank
        })
    );
    assert_eq!(test_ledger.loads(), [(0, 0, 0), (0, 0, 0)]);
    assert_eq!(test_ledger.ledger.counts(), LedgerCounts::default());
}

#[test]
fn ledger_limits_bookings_and_blocks() {
    let mut test_ledger = TestLedger::new(LedgerRules {
        max_bookings: 1,
        ..LedgerRules::default()
    });
    test_ledger.add("a", 0, booking(0, 1)).unwrap();
    assert_eq!(
        test_ledger.add("b", 0, booking(0, 1)),
        Err(LedgerError::Full { limit: 1 })
    );
    assert_eq!(
        test_ledger.add("a", 0, booking(0, 1)),
        Ok(LedgerChange::Unchanged)
    );
    test_ledger.ledger.free(request_attempt("a", 0));
    assert_eq!(
        test_ledger.add("b", 0, booking(0, 1)),
        Ok(LedgerChange::Applied)
    );
}

#[test]
fn booking_survives_or_ends_with_serving_endpoint() {
    let mut test_ledger = TestLedger::new(LedgerRules::default());
    let book = |booking: LoadBooking| {
        let load = &test_ledger.load;
        let booked = load.book_with(|_| Ok::<_, ()>((vec![booking], ())));
        booked.unwrap().0
    };
    let first = book(booking(0, 1));
    let same = book(booking(0, 1));
    let other = book(booking(1, 1));
    assert_eq!(
        test_ledger.ledger.adopt(request_attempt("a", 0), first),
        Ok(LedgerChange::Applied)
    );
    assert_eq!(
        test_ledger.ledger.adopt(request_attempt("a", 0), same),
        Ok(LedgerChange::Unchanged)
    );
    assert_eq!(
        test_ledger.ledger.adopt(request_attempt("a", 0), other),
        Err(LedgerError::AlreadyBooked { attempt: 0 })
    );
    assert_eq!(test_ledger.loads(), [(1, 16, 1), (0, 0, 0)]);
}

/// Booking in the model.
#[derive(Clone, Debug, PartialEq)]
struct ModelBooking {
    attempt: u64,
    worker: u32,
    blocks: u64,
    prefill: bool,
    outputs: u64,
    last_message_at: u64,
}

/// Naive model of the ledger. Time is in seconds.
#[derive(Default)]
struct LedgerModel {
    live: BTreeMap<u8, ModelBooking>,
    now: u64,
    swept_at: u64,
    expired: u64,
}

impl LedgerModel {
    fn expire(&mut self) {
        let before = self.live.len();
        let now = self.now;
        self.live
            .retain(|_, live| now - live.last_message_at <= 300);
        self.expired += (before - self.live.len()) as u64;
        self.swept_at = now;
    }

    fn add(&mut self, request: u8, new: ModelBooking) -> Result<LedgerChange, LedgerError> {
        if self.now - self.swept_at >= 30 {
            self.expire();
        }
        let now = self.now;
        if self
            .live
            .get(&request)
            .is_some_and(|live| now - live.last_message_at > 300)
        {
            self.live.remove(&request);
            self.expired += 1;
        }
        if let Some(live) = self
            .live
            .get_mut(&request)
            .filter(|live| new.attempt <= live.attempt)
        {
            if (live.attempt, live.worker, live.blocks) != (new.attempt, new.worker, new.blocks) {
                return Err(LedgerError::AlreadyBooked {
                    attempt: live.attempt,
                });
            }
            live.last_message_at = now;
            return Ok(LedgerChange::Unchanged);
        }
        if new.worker > 1 {
            return Err(LedgerError::NotServing {
                rank: rank(new.worker),
            });
        }
        self.live.insert(request, new);
        Ok(LedgerChange::Applied)
    }

    /// Handles a message about an attempt. Returns whether the attempt is booked.
    fn touch(&mut self, request: u8, attempt: u64) -> Option<&mut ModelBooking> {
        let now = self.now;
        let live = self
            .live
            .get_mut(&request)
            .filter(|live| live.attempt == attempt)?;
        live.last_message_at = now;
        Some(live)
    }

    fn load(&self, worker: u32) -> (u64, u64, u64) {
        let rows: Vec<_> = self
            .live
            .values()
            .filter(|live| live.worker == worker)
            .collect();
        let prompts = rows.iter().map(|live| live.blocks).max().unwrap_or(0);
        let outputs: u64 = rows.iter().map(|live| live.outputs).sum();
        let prefill = rows
            .iter()
            .filter(|live| live.prefill)
            .map(|live| live.blocks * 16)
            .sum();
        (prompts + outputs, prefill, rows.len() as u64)
    }
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn ledger_matches_live_attempts(
        script in vec((0..10u8, 0..3u8, 0..3u64, 0..3u32, 0..3u64), 1..40),
    ) {
        let mut test_ledger = TestLedger::new(LedgerRules::default());
        let mut model = LedgerModel::default();
        for (kind, request, attempt, worker, blocks) in script {
            let name = ["a", "b", "c"][usize::from(request)];
            let target = request_attempt(name, attempt);
            match kind {
                0..3 => {
                    let live = ModelBooking { attempt, worker, blocks, prefill: blocks > 0, outputs: 0, last_message_at: model.now };
                    prop_assert_eq!(test_ledger.add(name, attempt, booking(worker, blocks)), model.add(request, live));
                }
                3 => {
                    let known = model.touch(request, attempt);
                    let change = LedgerChange::from_applied(known.is_some_and(|live| std::mem::take(&mut live.prefill)));
                    prop_assert_eq!(test_ledger.ledger.mark_prefill_completed(target), change);
                }
                4 => {
                    let known = model.touch(request, attempt).map(|live| live.outputs += 1);
                    prop_assert_eq!(test_ledger.ledger.add_output_block(target, None), LedgerChange::from_applied(known.is_some()));
                }
                5 => prop_assert_eq!(test_ledger.ledger.touch(target), LedgerChange::from_applied(model.touch(request, attempt).is_some())),
                6 => {
                    let known = model.live.get(&request).is_some_and(|live| live.attempt == attempt);
                    prop_assert_eq!(test_ledger.ledger.free(target), LedgerChange::from_applied(known));
                    if known {
                        model.live.remove(&request);
                    }
                }
                7 => {
                    model.expire();
                    test_ledger.ledger.expire();
                }
                _ => {
                    let seconds = [1, 29, 30, 150, 299, 300, 301][(blocks * 3 + u64::from(request)) as usize % 7];
                    model.now += seconds;
                    test_ledger.advance(Duration::from_secs(seconds));
                }
            }
            prop_assert_eq!(test_ledger.loads(), [model.load(0), model.load(1)]);
            let counts = LedgerCounts { bookings: model.live.len(), expired: model.expired };
            prop_assert_eq!(test_ledger.ledger.counts(), counts);
        }
        drop(test_ledger.ledger);
        prop_assert!(test_ledger.load.snapshot().iter().all(|load| load.active_blocks + load.active_requests == 0));
    }
}
