use std::collections::HashMap;
use std::time::{Duration, Instant};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::block::{BlockHashes, LocalHash};
use crate::fleet::Fleet;
use crate::index::PrefixIndex;
use crate::load::ledger::Refused;
use crate::router::{Elsewhere, Prompt, RouteRequest, RouterSettings};
use crate::sessions::{Entry, SessionName, SessionRules, Sessions};
use crate::worker::{BlockSize, DpRank, Worker, WorkerId};

const SILENCE: Duration = Duration::from_secs(300);

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        "127.0.0.1:8000".parse().unwrap(),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// A router with three workers, sessions, and bookings, all by one clock.
struct Scene {
    router: Router,
    sessions: Arc<Sessions>,
    bookings: Bookings,
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
            .for_each(|member| load.open(member.slot, member.rank));
        let router = Router::new(
            PrefixIndex::new(),
            load.clone(),
            RouterSettings::default(),
            1,
        );
        router.publish(Arc::new(change.fleet));
        let bookings = Bookings::new(
            load,
            Rules {
                silence: SILENCE,
                most: 4,
                ended: 64,
                ..Rules::default()
            },
            Arc::new(Metrics::new()),
        );
        Self {
            router,
            sessions: Sessions::new(SessionRules::default(), now()),
            bookings,
            clock,
        }
    }

    fn request(length: usize) -> RouteRequest {
        let locals = (0..length as u64).map(LocalHash).collect();
        let hashes = BlockHashes::chain(length * 4 + 1, BlockSize::new(4).unwrap(), locals);
        RouteRequest::new(Some("m".into()), Prompt::Hashed(vec![hashes]))
    }

    fn admitted(&self, length: usize) -> Admitted {
        let booked = self.router.route(Self::request(length)).unwrap();
        let session = match self.sessions.enter(SessionName {
            id: "s",
            parent: None,
            model: None,
            tenant: None,
        }) {
            Ok(Entry::Bound(hold)) => Some(hold),
            Ok(Entry::First(binding)) => Some(binding.bind(booked.route.to.rank)),
            _ => None,
        };
        Admitted {
            session,
            ..Admitted::new(booked)
        }
    }

    /// Routes, unless the attempt has been routed before.
    fn route(&self, attempt: Attempt<'_>, length: usize) -> Result<bool, Fault> {
        if self.bookings.again(attempt)?.is_some() {
            return Ok(false);
        }
        let kept = self.bookings.keep(attempt, self.admitted(length))?;
        Ok(matches!(kept, Kept::Now(_)))
    }

    fn add(&self, attempt: Attempt<'_>, worker: u64) -> Result<bool, Fault> {
        let rank = WorkerRank {
            worker: WorkerId(worker),
            rank: DpRank(0),
        };
        let foreign = self
            .router
            .foreign(Self::request(2), rank, Elsewhere::default())
            .unwrap();
        Ok(matches!(
            self.bookings.add(attempt, &foreign, &self.router)?,
            Kept::Now(_)
        ))
    }

    fn advance(&self, by: Duration) {
        *self.clock.lock() += by;
    }

    fn mark(&self, attempt: Attempt<'_>) -> Result<Change, Fault> {
        self.bookings.mark_prefill_completed(attempt, &self.router)
    }

    fn free(&self, attempt: Attempt<'_>) -> Change {
        self.bookings.free(attempt, None, &self.router)
    }

    /// Live requests by the load, by the ledger, and by the sessions.
    fn counts(&self) -> (u64, usize, usize) {
        let counts = self.bookings.state.lock().ledger.counts();
        assert_eq!(
            self.bookings.metrics.api_bookings.get(),
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

fn attempt(request: &str, number: u64) -> Attempt<'_> {
    Attempt { request, number }
}

#[test]
fn what_is_kept_goes_with_its_booking_whatever_ends_it() {
    let scene = Scene::new();
    let ends: [(&str, &dyn Fn()); 3] = [
        ("freed", &|| {
            assert_eq!(scene.free(attempt("a", 0)), Change::Applied)
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
                .for_each(|member| scene.router.load().close(member.slot));
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
fn who_books_twice_at_once_is_booked_once() {
    let scene = Scene::new();
    // Both looked before either had been let in.
    let (first, second) = (scene.admitted(3), scene.admitted(3));
    let Kept::Now(route) = scene.bookings.keep(attempt("a", 0), first).unwrap() else {
        panic!("not booked")
    };
    let Kept::Before(again) = scene.bookings.keep(attempt("a", 0), second).unwrap() else {
        panic!("booked twice")
    };
    assert!(Arc::ptr_eq(&route, &again));
    assert_eq!(scene.counts(), (1, 1, 1));
}

#[test]
fn a_later_attempt_takes_the_place_of_an_earlier_one() {
    let scene = Scene::new();
    assert!(scene.route(attempt("a", 1), 3).unwrap());
    assert!(scene.bookings.again(attempt("a", 2)).unwrap().is_none());
    assert_eq!(scene.counts(), (0, 0, 0), "it would wait for itself");
    assert!(
        !scene.route(attempt("a", 1), 3).unwrap(),
        "the earlier one again, late"
    );
    assert!(scene.route(attempt("a", 2), 3).unwrap());
    let refused = Fault::Booking(Refused::Booked { attempt: 2 });
    assert_eq!(scene.bookings.again(attempt("a", 1)).unwrap_err(), refused);
    let admitted = scene.admitted(3);
    assert_eq!(
        scene.bookings.keep(attempt("a", 1), admitted).unwrap_err(),
        refused
    );
    assert_eq!(
        scene.free(attempt("a", 1)),
        Change::None,
        "a late word about the earlier one"
    );
    assert_eq!(scene.counts(), (1, 1, 1));
}

#[test]
fn what_has_ended_gets_the_same_answer_and_is_not_booked_again() {
    let scene = Scene::new();
    let name = attempt("a", 0);
    let admitted = scene.admitted(3);
    let Kept::Now(route) = scene.bookings.keep(name, admitted).unwrap() else {
        panic!("not booked")
    };
    assert_eq!(scene.free(name), Change::Applied);
    assert!(Arc::ptr_eq(
        &scene.bookings.again(name).unwrap().unwrap(),
        &route
    ));
    assert_eq!(
        (scene.mark(name).unwrap(), scene.free(name)),
        (Change::None, Change::None)
    );
    assert!(scene.add(attempt("b", 0), 1).unwrap());
    assert_eq!(scene.free(attempt("b", 0)), Change::Applied);
    assert!(!scene.add(attempt("b", 0), 1).unwrap());
    assert_eq!(scene.counts(), (0, 0, 0));
}

#[test]
fn a_full_ledger_lets_nobody_wait() {
    let scene = Scene::new();
    let full = Fault::Booking(Refused::Full { most: 4 });
    for id in ["a", "b", "c", "d"] {
        assert!(scene.route(attempt(id, 0), 1).unwrap());
    }
    assert_eq!(scene.bookings.again(attempt("e", 0)).unwrap_err(), full);
    assert!(scene.bookings.again(attempt("a", 0)).unwrap().is_some());
    assert!(scene.route(attempt("a", 1), 1).unwrap());
}

#[test]
fn callers_tell_whether_workers_answer() {
    let scene = Scene::new();
    let all = [0, 1, 2].map(WorkerId);
    let all_out = || {
        (0..3).for_each(|_| drop(scene.router.heard(&all, Vec::new(), 500)));
        assert_eq!(scene.router.out().len(), 3);
        scene.advance(Duration::from_secs(100));
    };
    all_out();
    assert!(scene.route(attempt("a", 0), 3).unwrap());
    assert_eq!(scene.mark(attempt("a", 0)), Ok(Change::Applied));
    assert_eq!(scene.router.out().len(), 2, "who has a first token answers");
    all_out();
    assert!(scene.route(attempt("b", 0), 3).unwrap());
    assert_eq!(
        scene
            .bookings
            .free(attempt("b", 0), Some(404), &scene.router),
        Change::Applied
    );
    assert_eq!(
        scene.router.out().len(),
        3,
        "a refused request is no evidence of health"
    );
}

#[test]
fn a_booking_by_the_other_call_is_no_answer() {
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
    let elsewhere = Fault::BookedElsewhere {
        request: "a".into(),
        number: 0,
        rank,
    };
    assert_eq!(scene.add(attempt("a", 0), 2).unwrap_err(), elsewhere);
    assert_eq!(
        scene.bookings.again(attempt("a", 0)).unwrap_err(),
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
    fn nothing_is_held_that_is_not_booked(steps in steps()) {
        let scene = Scene::new();
        // What a caller believes who sees every answer: the live attempt at each request and when it was last heard of.
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
                Step::Output(fraction) => heard = scene.bookings.output_block(name, fraction).is_ok(),
                Step::Free => {
                    let change = scene.free(name);
                    prop_assert_eq!(change == Change::Applied, live, "only the live attempt is freed");
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
            // Expired by whoever looked: nobody is told, so the caller asks.
            believed.retain(|request, (number, heard)| {
                let there = scene.bookings.state.lock().ledger.get(attempt(&request.to_string(), *number)).is_some();
                there || { assert!(time - *heard > SILENCE, "ended before its time"); false }
            });
            let (requests, booked, running) = scene.counts();
            prop_assert_eq!(requests as usize, booked, "the load is what is booked");
            prop_assert!(booked == believed.len() && booked <= 4 && running <= booked);
        }
        scene.advance(SILENCE + Duration::from_secs(1));
        scene.bookings.expire();
        prop_assert_eq!(scene.counts(), (0, 0, 0));
        prop_assert!(scene.router.load().snapshot().iter().all(|load| load.active_blocks == 0));
    }
}
