use std::collections::HashMap;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::fleet::Fleet;
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::ledger::LedgerError;
use warmroute_core::router::{ExternalRouteOptions, RoutePrompt, RouteRequest, RouterSettings};
use warmroute_core::sessions::{SessionEntry, SessionName, SessionRules, SessionStore};
use warmroute_core::worker::{BlockSize, DpRank, Worker, WorkerId};

use super::*;

const SILENCE: Duration = Duration::from_secs(300);

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// A router with three workers, sessions and bookings that share one clock.
struct Scene {
    router: Router,
    sessions: Arc<SessionStore>,
    bookings: BookingTable,
    clock: Arc<Mutex<Instant>>,
}

impl Scene {
    fn new() -> Self {
        let clock = Arc::new(Mutex::new(Instant::now()));
        let now = || {
            let clock = clock.clone();
            move || *clock.lock()
        };
        let load = LoadTracker::new(now());
        let change = Fleet::empty().reconcile((0..3).map(worker).collect());
        change
            .added
            .iter()
            .for_each(|member| load.open_slot(member.slot, member.rank));
        let router = Router::new(
            PrefixIndex::new(),
            load.clone(),
            RouterSettings::default(),
            1,
        );
        router.set_fleet(Arc::new(change.fleet));
        let bookings = BookingTable::new(
            load,
            LedgerRules {
                idle_timeout: SILENCE,
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

    fn admitted(&self, length: usize) -> ActiveRequest {
        let booked = self.router.route(Self::request(length)).unwrap();
        let session = match self.sessions.enter(SessionName {
            id: "s",
            parent: None,
            model: None,
            tenant: None,
        }) {
            Ok(SessionEntry::Bound(hold)) => Some(hold),
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
        let kept = self.bookings.store(attempt, self.admitted(length))?;
        Ok(matches!(kept, BookOutcome::New(_)))
    }

    fn add(&self, attempt: RequestAttempt<'_>, worker: u64) -> Result<bool, ApiError> {
        let rank = WorkerRank {
            worker: WorkerId(worker),
            rank: DpRank(0),
        };
        let foreign = self
            .router
            .prepare_external(Self::request(2), rank, ExternalRouteOptions::default())
            .unwrap();
        Ok(matches!(
            self.bookings
                .add_external(attempt, &foreign, &self.router)?,
            BookOutcome::New(_)
        ))
    }

    fn advance(&self, by: Duration) {
        *self.clock.lock() += by;
    }

    fn mark(&self, attempt: RequestAttempt<'_>) -> Result<LedgerChange, ApiError> {
        self.bookings.mark_prefill_completed(attempt, &self.router)
    }

    fn free(&self, attempt: RequestAttempt<'_>) -> LedgerChange {
        self.bookings.free(attempt, None, &self.router)
    }

    /// Active requests according to the load, the ledger and the sessions.
    fn counts(&self) -> (u64, usize, usize) {
        let counts = self.bookings.state.lock().ledger.counts();
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
    let scene = Scene::new();
    let ends: [(&str, &dyn Fn()); 3] = [
        ("freed", &|| {
            assert_eq!(scene.free(attempt("a", 0)), LedgerChange::Applied)
        }),
        ("silent", &|| {
            scene.advance(SILENCE + Duration::from_millis(1));
            assert_eq!(scene.bookings.expire(), 1);
        }),
        ("its worker gone", &|| {
            scene
                .router
                .fleet()
                .members()
                .for_each(|member| scene.router.load().close_slot(member.slot));
            assert_eq!(scene.bookings.expire(), 0);
        }),
    ];
    for ((how, end), number) in ends.into_iter().zip(0..) {
        assert!(scene.route(attempt("a", number), 3).unwrap(), "{how}");
        assert_eq!(scene.counts(), (1, 1, 1), "{how}");
        end();
        assert_eq!(scene.counts(), (0, 0, 0), "{how}");
    }
}

#[test]
fn concurrent_bookings_of_one_attempt_count_once() {
    let scene = Scene::new();
    // Both checked before either was admitted.
    let first = scene.admitted(3);
    let second = scene.admitted(3);
    let BookOutcome::New(route) = scene.bookings.store(attempt("a", 0), first).unwrap() else {
        panic!("not booked")
    };
    let BookOutcome::Existing(again) = scene.bookings.store(attempt("a", 0), second).unwrap()
    else {
        panic!("booked twice")
    };
    assert!(Arc::ptr_eq(&route, &again));
    assert_eq!(scene.counts(), (1, 1, 1));
}

#[test]
fn later_attempt_replaces_earlier_one() {
    let scene = Scene::new();
    assert!(scene.route(attempt("a", 1), 3).unwrap());
    assert!(
        scene
            .bookings
            .find_route(attempt("a", 2))
            .unwrap()
            .is_none()
    );
    assert_eq!(scene.counts(), (0, 0, 0), "it would wait for itself");
    assert!(
        !scene.route(attempt("a", 1), 3).unwrap(),
        "the earlier one again, late"
    );
    assert!(scene.route(attempt("a", 2), 3).unwrap());
    let refused = ApiError::Booking(LedgerError::AlreadyBooked { attempt: 2 });
    assert_eq!(
        scene.bookings.find_route(attempt("a", 1)).unwrap_err(),
        refused
    );
    let admitted = scene.admitted(3);
    assert_eq!(
        scene.bookings.store(attempt("a", 1), admitted).unwrap_err(),
        refused
    );
    assert_eq!(
        scene.free(attempt("a", 1)),
        LedgerChange::Unchanged,
        "a late word about the earlier one"
    );
    assert_eq!(scene.counts(), (1, 1, 1));
}

#[test]
fn ended_attempt_repeats_its_result_unbooked() {
    let scene = Scene::new();
    let name = attempt("a", 0);
    let admitted = scene.admitted(3);
    let BookOutcome::New(route) = scene.bookings.store(name, admitted).unwrap() else {
        panic!("not booked")
    };
    assert_eq!(scene.free(name), LedgerChange::Applied);
    assert!(Arc::ptr_eq(
        &scene.bookings.find_route(name).unwrap().unwrap(),
        &route
    ));
    assert_eq!(
        (scene.mark(name).unwrap(), scene.free(name)),
        (LedgerChange::Unchanged, LedgerChange::Unchanged)
    );
    assert!(scene.add(attempt("b", 0), 1).unwrap());
    assert_eq!(scene.free(attempt("b", 0)), LedgerChange::Applied);
    assert!(!scene.add(attempt("b", 0), 1).unwrap());
    assert_eq!(scene.counts(), (0, 0, 0));
}

#[test]
fn full_ledger_rejects_before_queueing() {
    let scene = Scene::new();
    let full = ApiError::Booking(LedgerError::Full { most: 4 });
    for id in ["a", "b", "c", "d"] {
        assert!(scene.route(attempt(id, 0), 1).unwrap());
    }
    assert_eq!(
        scene.bookings.find_route(attempt("e", 0)).unwrap_err(),
        full
    );
    assert!(
        scene
            .bookings
            .find_route(attempt("a", 0))
            .unwrap()
            .is_some()
    );
    assert!(scene.route(attempt("a", 1), 1).unwrap());
}

#[test]
fn callers_report_worker_health() {
    let scene = Scene::new();
    let all = [0, 1, 2].map(WorkerId);
    let all_out = || {
        (0..3).for_each(|_| drop(scene.router.report_status(&all, Vec::new(), 500)));
        assert_eq!(scene.router.ejected_workers().len(), 3);
        scene.advance(Duration::from_secs(100));
    };
    all_out();
    assert!(scene.route(attempt("a", 0), 3).unwrap());
    assert_eq!(scene.mark(attempt("a", 0)), Ok(LedgerChange::Applied));
    assert_eq!(
        scene.router.ejected_workers().len(),
        2,
        "a first token means healthy"
    );
    all_out();
    assert!(scene.route(attempt("b", 0), 3).unwrap());
    assert_eq!(
        scene
            .bookings
            .free(attempt("b", 0), Some(404), &scene.router),
        LedgerChange::Applied
    );
    assert_eq!(
        scene.router.ejected_workers().len(),
        3,
        "a refused request is no evidence of health"
    );
}

#[test]
fn booking_by_add_request_has_no_route() {
    let scene = Scene::new();
    assert!(scene.add(attempt("a", 0), 1).unwrap());
    assert!(
        !scene.add(attempt("a", 0), 1).unwrap(),
        "the same once more"
    );
    let rank = WorkerRank {
        worker: WorkerId(1),
        rank: DpRank(0),
    };
    let elsewhere = ApiError::RankMismatch {
        request: "a".into(),
        number: 0,
        rank,
    };
    assert_eq!(scene.add(attempt("a", 0), 2).unwrap_err(), elsewhere);
    assert_eq!(
        scene.bookings.find_route(attempt("a", 0)).unwrap_err(),
        elsewhere
    );
    assert_eq!(scene.counts(), (1, 1, 0));
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Route(usize),
    Add(u64),
    Prefilled,
    Output(Option<f64>),
    Free,
    Pass(u64),
    Expire,
}

fn steps() -> impl Strategy<Value = Vec<(u8, u64, Step)>> {
    let step = prop_oneof![
        4 => (0..4_usize).prop_map(Step::Route),
        2 => (0..3_u64).prop_map(Step::Add),
        1 => Just(Step::Prefilled),
        1 => proptest::option::of(0.0..1.0).prop_map(Step::Output),
        2 => Just(Step::Free),
        1 => (0..400_u64).prop_map(Step::Pass),
        1 => Just(Step::Expire),
    ];
    vec((0..6_u8, 0..3_u64, step), 0..40)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn nothing_is_held_without_a_booking(steps in steps()) {
        let scene = Scene::new();
        // Model of the ledger for a caller that sees every response: the active attempt of each
        // request and the time of its last call.
        let mut believed: HashMap<u8, (u64, Duration)> = HashMap::new();
        let mut ended: HashMap<u8, (u64, Duration)> = HashMap::new();
        let mut time = Duration::ZERO;
        for (request, number, step) in steps {
            let id = request.to_string();
            let name = attempt(&id, number);
            let live = believed.get(&request).is_some_and(|(live, _)| *live == number);
            let late = ended.get(&request).is_some_and(|(ended, at)| number <= *ended && time - *at <= SILENCE);
            let mut heard = false;
            match step {
                Step::Route(_) | Step::Add(_) => {
                    let booked = match step {
                        Step::Route(length) => scene.route(name, length),
                        Step::Add(worker) => scene.add(name, worker),
                        _ => unreachable!(),
                    };
                    if booked == Ok(true) {
                        prop_assert!(!live && !late, "booked twice");
                        believed.insert(request, (number, time));
                        ended.remove(&request);
                    } else {
                        heard = live && booked.is_ok();
                        prop_assert!(booked.is_err() || live || late);
                    }
                }
                Step::Prefilled => {
                    let marked = scene.mark(name);
                    prop_assert_eq!(marked.is_ok(), live || late);
                    heard = live;
                }
                Step::Output(fraction) => heard = scene.bookings.add_output_block(name, fraction).is_ok(),
                Step::Free => {
                    let change = scene.free(name);
                    prop_assert_eq!(change == LedgerChange::Applied, live, "only the live attempt is \
                    freed");
                    if live {
                        believed.remove(&request);
                        ended.insert(request, (number, time));
                    }
                }
                Step::Pass(seconds) => {
                    time += Duration::from_secs(seconds);
                    scene.advance(Duration::from_secs(seconds));
                }
                Step::Expire => drop(scene.bookings.expire()),
            }
            if heard {
                believed.insert(request, (number, time));
            }
            // The expiry is not reported, so the caller queries it.
            believed.retain(|request, (number, heard)| {
                let there = scene.bookings.state.lock().ledger.get(attempt(&request.to_string(), *number)).is_some();
                there || { assert!(time - *heard > SILENCE, "ended before its time"); false }
            });
            let (requests, booked, running) = scene.counts();
            prop_assert_eq!(requests as usize, booked, "the load equals the bookings");
            prop_assert!(booked == believed.len() && booked <= 4 && running <= booked);
        }
        scene.advance(SILENCE + Duration::from_secs(1));
        scene.bookings.expire();
        prop_assert_eq!(scene.counts(), (0, 0, 0));
        prop_assert!(scene.router.load().snapshot().iter().all(|load| load.active_blocks == 0));
    }
}
