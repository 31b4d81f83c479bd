use std::collections::HashMap;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::ledger::LedgerError;
use warmroute_core::router::{ExternalRouteOptions, RoutePrompt, RouteRequest, RouterSettings};
use warmroute_core::sessions::{SessionEntry, SessionName, SessionRules, SessionStore};
use warmroute_core::worker::{BlockSize, Worker, WorkerId};
use warmroute_property_tests::property_config;

use super::*;

const IDLE_TIMEOUT: Duration = Duration::from_secs(300);

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// A router with three workers, sessions and bookings that share one clock.
struct BookingFixture {
    router: Router,
    sessions: Arc<SessionStore>,
    bookings: BookingTable,
    clock: Arc<Mutex<Instant>>,
}

impl BookingFixture {
    fn new() -> Self {
        let clock = Arc::new(Mutex::new(Instant::now()));
        let now = || {
            let clock = clock.clone();
            move || *clock.lock()
        };
        let load = LoadTracker::new(now());
        let router = Router::new(
            PrefixIndex::new(),
            load.clone(),
            RouterSettings::default(),
            1,
        );
        router.set_workers((0..3).map(worker));
        let bookings = BookingTable::new(
            load,
            LedgerRules {
                idle_timeout: IDLE_TIMEOUT,
                max_bookings: 4,
                max_ended: 64,
                ..LedgerRules::default()
            },
            Arc::new(Metrics::new()),
        );
        Self {
            router,
            sessions: SessionStore::new(SessionRules::default(), now()),
            bookings,
            clock,
        }
    }

    fn request(length: usize) -> RouteRequest {
        let locals = (0..length as u64).map(LocalHash).collect();
        let hashes = BlockHashes::from_locals(length * 4 + 1, BlockSize::new(4).unwrap(), locals);
        RouteRequest::new(Some("m".into()), RoutePrompt::Hashed(vec![hashes]))
    }

    fn active_request(&self, length: usize) -> ActiveRequest {
        let booked = self.router.route(Self::request(length)).unwrap();
        let session = match self.sessions.enter(SessionName {
            id: "s",
            parent: None,
            model: None,
            tenant: None,
        }) {
            Ok(SessionEntry::Bound(lease)) => Some(lease),
            Ok(SessionEntry::First(binding)) => Some(binding.bind(booked.route.to.rank)),
            _ => None,
        };
        ActiveRequest {
            session,
            ..ActiveRequest::new(booked)
        }
    }

    /// Routes a request unless its attempt has a route.
    fn route(&self, attempt: RequestAttempt<'_>, length: usize) -> Result<bool, ApiError> {
        if self.bookings.find_route(attempt)?.is_some() {
            return Ok(false);
        }
        let (_, outcome) = self.bookings.store(attempt, self.active_request(length))?;
        Ok(outcome == BookingOutcome::Booked)
    }

    fn add(&self, attempt: RequestAttempt<'_>, worker: u64) -> Result<bool, ApiError> {
        let rank = WorkerRank::new(worker, 0);
        let external = self
            .router
            .prepare_external(Self::request(2), rank, ExternalRouteOptions::default())
            .unwrap();
        let (_, outcome) = self
            .bookings
            .add_external(attempt, &external, &self.router)?;
        Ok(outcome == BookingOutcome::Booked)
    }

    fn advance(&self, duration: Duration) {
        *self.clock.lock() += duration;
    }

    fn mark(&self, attempt: RequestAttempt<'_>) -> Result<LedgerChange, ApiError> {
        self.bookings.mark_prefill_completed(attempt, &self.router)
    }

    fn free(&self, attempt: RequestAttempt<'_>) -> LedgerChange {
        self.bookings.free(attempt, None, &self.router)
    }

    /// Returns the active requests according to the load, the ledger and the sessions.
    fn counts(&self) -> (u64, usize, usize) {
        let counts = self.bookings.ledger.lock().counts();
        assert_eq!(
            self.bookings.metrics.api.bookings.get(),
            counts.bookings as i64
        );
        let requests = self
            .router
            .load()
            .snapshot()
            .iter()
            .map(|load| load.active_requests)
            .sum();
        (requests, counts.bookings, self.sessions.counts().running)
    }
}

fn attempt(request: &str, number: u64) -> RequestAttempt<'_> {
    RequestAttempt { request, number }
}

#[test]
fn guards_are_dropped_with_their_booking() {
    let fixture = BookingFixture::new();
    let ends: [(&str, &dyn Fn()); 2] = [
        ("freed", &|| {
            assert_eq!(fixture.free(attempt("a", 0)), LedgerChange::Applied)
        }),
        ("expired", &|| {
            fixture.advance(IDLE_TIMEOUT + Duration::from_millis(1));
            assert_eq!(fixture.bookings.expire(), 1);
        }),
    ];
    for ((cause, end), number) in ends.into_iter().zip(0..) {
        assert!(fixture.route(attempt("a", number), 3).unwrap(), "{cause}");
        assert_eq!(fixture.counts(), (1, 1, 1), "{cause}");
        end();
        assert_eq!(fixture.counts(), (0, 0, 0), "{cause}");
    }
}

#[test]
fn concurrent_bookings_of_one_attempt_count_once() {
    let fixture = BookingFixture::new();
    // Both calls look up the attempt before either is booked.
    let first = fixture.active_request(3);
    let second = fixture.active_request(3);
    let (route, outcome) = fixture.bookings.store(attempt("a", 0), first).unwrap();
    assert_eq!(outcome, BookingOutcome::Booked);
    let (again, outcome) = fixture.bookings.store(attempt("a", 0), second).unwrap();
    assert_eq!(outcome, BookingOutcome::AlreadyBooked);
    assert!(Arc::ptr_eq(&route, &again));
    assert_eq!(fixture.counts(), (1, 1, 1));
}

#[test]
fn later_attempt_replaces_earlier_one() {
    let fixture = BookingFixture::new();
    assert!(fixture.route(attempt("a", 1), 3).unwrap());
    assert!(
        fixture
            .bookings
            .find_route(attempt("a", 2))
            .unwrap()
            .is_none()
    );
    assert_eq!(
        fixture.counts(),
        (0, 0, 0),
        "the earlier attempt ends before the later one is queued"
    );
    assert!(
        !fixture.route(attempt("a", 1), 3).unwrap(),
        "the ended attempt repeats its result"
    );
    assert!(fixture.route(attempt("a", 2), 3).unwrap());
    let refused = ApiError::Booking(LedgerError::AlreadyBooked { attempt: 2 });
    assert_eq!(
        fixture.bookings.find_route(attempt("a", 1)).unwrap_err(),
        refused
    );
    let active = fixture.active_request(3);
    assert_eq!(
        fixture.bookings.store(attempt("a", 1), active).unwrap_err(),
        refused
    );
    assert_eq!(
        fixture.free(attempt("a", 1)),
        LedgerChange::Unchanged,
        "a late call for the earlier attempt"
    );
    assert_eq!(fixture.counts(), (1, 1, 1));
}

#[test]
fn ended_attempt_repeats_its_result_unbooked() {
    let fixture = BookingFixture::new();
    let booked_attempt = attempt("a", 0);
    let active = fixture.active_request(3);
    let (route, outcome) = fixture.bookings.store(booked_attempt, active).unwrap();
    assert_eq!(outcome, BookingOutcome::Booked);
    assert_eq!(fixture.free(booked_attempt), LedgerChange::Applied);
    assert!(Arc::ptr_eq(
        &fixture
            .bookings
            .find_route(booked_attempt)
            .unwrap()
            .unwrap(),
        &route
    ));
    assert_eq!(
        (
            fixture.mark(booked_attempt).unwrap(),
            fixture.free(booked_attempt)
        ),
        (LedgerChange::Unchanged, LedgerChange::Unchanged)
    );
    assert!(fixture.add(attempt("b", 0), 1).unwrap());
    assert_eq!(fixture.free(attempt("b", 0)), LedgerChange::Applied);
    assert!(!fixture.add(attempt("b", 0), 1).unwrap());
    assert_eq!(fixture.counts(), (0, 0, 0));
}

#[test]
fn full_ledger_rejects_before_queueing() {
    let fixture = BookingFixture::new();
    let full = ApiError::Booking(LedgerError::Full { limit: 4 });
    for id in ["a", "b", "c", "d"] {
        assert!(fixture.route(attempt(id, 0), 1).unwrap());
    }
    assert_eq!(
        fixture.bookings.find_route(attempt("e", 0)).unwrap_err(),
        full
    );
    assert!(
        fixture
            .bookings
            .find_route(attempt("a", 0))
            .unwrap()
            .is_some()
    );
    assert!(fixture.route(attempt("a", 1), 1).unwrap());
}

#[test]
fn callers_report_worker_health() {
    let fixture = BookingFixture::new();
    let router = &fixture.router;
    let book_and_eject = |name| {
        assert!(fixture.route(attempt(name, 0), 3).unwrap());
        let route = fixture.bookings.find_route(attempt(name, 0)).unwrap();
        let chosen = route.unwrap().to.rank;
        let other = WorkerRank {
            worker: WorkerId((chosen.worker.0 + 1) % 3),
            ..chosen
        };
        for (rank, status) in [(chosen, 500), (other, 200), (chosen, 500), (chosen, 500)] {
            router.report_status(&[rank], &mut [], status);
        }
        assert_eq!(router.ejected_workers(), [chosen.worker]);
    };
    book_and_eject("a");
    assert_eq!(fixture.mark(attempt("a", 0)), Ok(LedgerChange::Applied));
    assert_eq!(router.ejected_workers(), [], "a first token means healthy");
    book_and_eject("b");
    assert_eq!(
        fixture.bookings.free(attempt("b", 0), Some(404), router),
        LedgerChange::Applied
    );
    assert_eq!(
        router.ejected_workers().len(),
        1,
        "a refused request is no evidence of health"
    );
}

#[test]
fn booking_by_add_request_has_no_route() {
    let fixture = BookingFixture::new();
    assert!(fixture.add(attempt("a", 0), 1).unwrap());
    assert!(
        !fixture.add(attempt("a", 0), 1).unwrap(),
        "a repeated call books nothing"
    );
    let rank = WorkerRank::new(1, 0);
    let mismatch = ApiError::RankMismatch {
        request: "a".into(),
        number: 0,
        rank,
    };
    assert_eq!(fixture.add(attempt("a", 0), 2).unwrap_err(), mismatch);
    assert_eq!(
        fixture.bookings.find_route(attempt("a", 0)).unwrap_err(),
        mismatch
    );
    assert_eq!(fixture.counts(), (1, 1, 0));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Route(usize),
    Add(u64),
    Prefilled,
    Output(Option<f64>),
    Free,
    Advance(u64),
    Expire,
}

fn steps() -> impl Strategy<Value = Vec<(u8, u64, Step)>> {
    let step = prop_oneof![
        4 => (0..4_usize).prop_map(Step::Route),
        2 => (0..3_u64).prop_map(Step::Add),
        1 => Just(Step::Prefilled),
        1 => proptest::option::of(0.0..1.0).prop_map(Step::Output),
        2 => Just(Step::Free),
        1 => (0..400_u64).prop_map(Step::Advance),
        1 => Just(Step::Expire),
    ];
    vec((0..6_u8, 0..3_u64, step), 0..40)
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn nothing_is_held_without_a_booking(steps in steps()) {
        let fixture = BookingFixture::new();
        // Model of the ledger for a caller that sees every response: the active attempt of each
        // request and the time of its last call.
        let mut active_attempts: HashMap<u8, (u64, Duration)> = HashMap::new();
        let mut ended: HashMap<u8, (u64, Duration)> = HashMap::new();
        let mut time = Duration::ZERO;
        for (request, number, step) in steps {
            let id = request.to_string();
            let booked_attempt = attempt(&id, number);
            let is_active = active_attempts.get(&request).is_some_and(|(active, _)| *active == number);
            let has_ended = ended.get(&request).is_some_and(|(ended, at)| number <= *ended && time - *at <= IDLE_TIMEOUT);
            let mut is_refreshed = false;
            match step {
                Step::Route(_) | Step::Add(_) => {
                    let booked = match step {
                        Step::Route(length) => fixture.route(booked_attempt, length),
                        Step::Add(worker) => fixture.add(booked_attempt, worker),
                        _ => unreachable!(),
                    };
                    if booked == Ok(true) {
                        prop_assert!(!is_active && !has_ended, "booked twice");
                        active_attempts.insert(request, (number, time));
                        ended.remove(&request);
                    } else {
                        is_refreshed = is_active && booked.is_ok();
                        prop_assert!(booked.is_err() || is_active || has_ended);
                    }
                }
                Step::Prefilled => {
                    let marked = fixture.mark(booked_attempt);
                    prop_assert_eq!(marked.is_ok(), is_active || has_ended);
                    is_refreshed = is_active;
                }
                Step::Output(fraction) => is_refreshed = fixture.bookings.add_output_block(booked_attempt, fraction).is_ok(),
                Step::Free => {
                    let change = fixture.free(booked_attempt);
                    prop_assert_eq!(change == LedgerChange::Applied, is_active, "only the active attempt is \
                    freed");
                    if is_active {
                        active_attempts.remove(&request);
                        ended.insert(request, (number, time));
                    }
                }
                Step::Advance(seconds) => {
                    time += Duration::from_secs(seconds);
                    fixture.advance(Duration::from_secs(seconds));
                }
                Step::Expire => drop(fixture.bookings.expire()),
            }
            if is_refreshed {
                active_attempts.insert(request, (number, time));
            }
            // Expiry is not reported to the caller, so the model queries the ledger.
            active_attempts.retain(|request, (number, last_call)| {
                let exists = fixture.bookings.ledger.lock().get(attempt(&request.to_string(), *number)).is_some();
                exists || { assert!(time - *last_call > IDLE_TIMEOUT, "expired early"); false }
            });
            let (requests, booked, running) = fixture.counts();
            prop_assert_eq!(requests as usize, booked, "the load equals the bookings");
            prop_assert!(booked == active_attempts.len() && booked <= 4 && running <= booked);
        }
        fixture.advance(IDLE_TIMEOUT + Duration::from_secs(1));
        fixture.bookings.expire();
        prop_assert_eq!(fixture.counts(), (0, 0, 0));
        prop_assert!(fixture.router.load().snapshot().iter().all(|load| load.active_blocks == 0));
    }
}
