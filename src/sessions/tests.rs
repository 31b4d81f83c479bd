use std::pin::pin;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::Wake;

use super::*;
use crate::worker::DpRank;

mod model;
mod words;

const TTL: u64 = 10;

/// A clock that stands until it is told to go on.
#[derive(Clone)]
struct Hands {
    start: Instant,
    seconds: Arc<AtomicU64>,
}

impl Hands {
    fn new() -> Self {
        Self {
            start: Instant::now(),
            seconds: Arc::default(),
        }
    }

    fn forward(&self, seconds: u64) {
        self.seconds.fetch_add(seconds, Ordering::Relaxed);
    }

    fn now(&self) -> Instant {
        self.start + Duration::from_secs(self.seconds.load(Ordering::Relaxed))
    }
}

fn sessions(most_sessions: usize) -> (Arc<Sessions>, Hands) {
    let hands = Hands::new();
    let rules = SessionRules {
        ttl: Duration::from_secs(TTL),
        most_sessions,
        most_sessions_per_tenant: 2,
        longest_id: 8,
    };
    let clock = hands.clone();
    let sessions = Sessions::new(rules, move || clock.now());
    sessions.on_move(|| ());
    (sessions, hands)
}

/// Who left since the last call, what is too old included.
fn left(sessions: &Sessions) -> Vec<Stay> {
    sessions.expire();
    let left = |moved| match moved {
        Moved::Left(stay) => Some(stay),
        Moved::Came(_) | Moved::HandedOver(_) | Moved::Inherited(_) => None,
    };
    sessions.moves().into_iter().filter_map(left).collect()
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

fn enter(sessions: &Arc<Sessions>, id: &str) -> Entry {
    sessions
        .enter(SessionName {
            id,
            parent: None,
            model: None,
            tenant: None,
        })
        .unwrap()
}

fn first(entry: Entry) -> Binding {
    match entry {
        Entry::First(binding) => binding,
        other => panic!("{other:?}"),
    }
}

fn bound(entry: Entry) -> Hold {
    match entry {
        Entry::Bound(hold) => hold,
        other => panic!("{other:?}"),
    }
}

fn waiting(entry: Entry) -> Waiting {
    match entry {
        Entry::Wait(waiting) => waiting,
        other => panic!("{other:?}"),
    }
}

/// Tells whether it was woken.
#[derive(Default)]
struct Bell(AtomicBool);

impl Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Bell {
    fn rang(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

fn poll(waiting: &mut Waiting, bell: &Arc<Bell>) -> Option<Result<Entry, Refused>> {
    match pin!(waiting).poll(&mut Context::from_waker(&Waker::from(bell.clone()))) {
        Poll::Ready(entry) => Some(entry),
        Poll::Pending => None,
    }
}

#[test]
fn a_session_stays_where_its_first_request_went_until_it_was_not_used_for_its_time() {
    let (sessions, hands) = sessions(8);
    let hold = first(enter(&sessions, "a")).bind(rank(1));
    hands.forward(TTL * 5);
    assert_eq!(
        bound(enter(&sessions, "a")).target(),
        rank(1),
        "a request runs all the time"
    );
    drop(hold);
    hands.forward(TTL - 1);
    drop(bound(enter(&sessions, "a")));
    hands.forward(TTL - 1);
    assert_eq!(bound(enter(&sessions, "a")).target(), rank(1));
    hands.forward(TTL);
    drop(first(enter(&sessions, "a")));
    assert_eq!(sessions.counts(), Counts::default());
    let stay = Stay {
        id: "a".to_owned(),
        group: false,
        tenant: None,
        target: rank(1),
        idle: None,
    };
    assert_eq!(
        sessions.moves(),
        [Moved::Came(stay.clone()), Moved::Left(stay)]
    );
    assert_eq!(sessions.moves(), []);
}

#[test]
fn those_that_come_while_the_first_decides_are_woken_with_its_decision() {
    let (sessions, _) = sessions(8);
    let binding = first(enter(&sessions, "a"));
    let bells = [Arc::new(Bell::default()), Arc::new(Bell::default())];
    let mut two = [
        waiting(enter(&sessions, "a")),
        waiting(enter(&sessions, "a")),
    ];
    for (waiting, bell) in two.iter_mut().zip(&bells) {
        assert!(poll(waiting, bell).is_none());
    }
    assert_eq!(
        sessions.counts(),
        Counts {
            sessions: 1,
            running: 0,
            waiting: 2
        }
    );
    let hold = binding.bind(rank(3));
    for (mut waiting, bell) in two.into_iter().zip(&bells) {
        assert!(bell.rang());
        assert_eq!(
            bound(poll(&mut waiting, bell).unwrap().unwrap()).target(),
            rank(3)
        );
    }
    assert_eq!(
        sessions.counts(),
        Counts {
            sessions: 1,
            running: 1,
            waiting: 0
        }
    );
    drop(hold);
    assert_eq!(
        sessions.counts(),
        Counts {
            sessions: 1,
            running: 0,
            waiting: 0
        }
    );
}

#[test]
fn when_the_first_leaves_undecided_the_next_decides() {
    let (sessions, _) = sessions(8);
    let binding = first(enter(&sessions, "a"));
    let bells = [Arc::new(Bell::default()), Arc::new(Bell::default())];
    let mut two = [
        waiting(enter(&sessions, "a")),
        waiting(enter(&sessions, "a")),
    ];
    for (waiting, bell) in two.iter_mut().zip(&bells) {
        assert!(poll(waiting, bell).is_none());
    }
    drop(binding);
    assert!(bells.iter().all(|bell| bell.rang()));
    let binding = first(poll(&mut two[1], &bells[1]).unwrap().unwrap());
    assert!(poll(&mut two[0], &bells[0]).is_none());
    drop(binding.bind(rank(2)));
    assert!(bells[0].rang() && !bells[1].rang());
    assert_eq!(
        bound(poll(&mut two[0], &bells[0]).unwrap().unwrap()).target(),
        rank(2)
    );
}

#[test]
fn a_waiting_request_that_leaves_is_not_woken_and_leaves_no_trace() {
    let (sessions, _) = sessions(8);
    let binding = first(enter(&sessions, "a"));
    let bell = Arc::new(Bell::default());
    let mut waiting = waiting(enter(&sessions, "a"));
    assert!(poll(&mut waiting, &bell).is_none());
    drop(waiting);
    assert_eq!(
        (sessions.counts().waiting, Arc::strong_count(&bell)),
        (0, 1)
    );
    drop(binding);
    assert!(!bell.rang());
    assert_eq!(sessions.counts(), Counts::default());
}

#[test]
fn sessions_on_a_worker_that_left_are_decided_anew() {
    let (sessions, _) = sessions(8);
    drop(first(enter(&sessions, "idle")).bind(rank(1)));
    let hold = first(enter(&sessions, "busy")).bind(rank(1));
    drop(first(enter(&sessions, "other")).bind(rank(2)));
    sessions.retain(|worker| worker != WorkerId(1));
    assert_eq!(
        sessions.counts(),
        Counts {
            sessions: 2,
            running: 1,
            waiting: 0
        }
    );
    assert_eq!(left(&sessions).len(), 2);
    let again = first(enter(&sessions, "busy")).bind(rank(3));
    drop((hold, again));
    assert_eq!(bound(enter(&sessions, "busy")).target(), rank(3));
    assert_eq!(bound(enter(&sessions, "other")).target(), rank(2));
    drop(first(enter(&sessions, "idle")));
}

#[test]
fn soft_affinity_takes_the_session_along() {
    let (sessions, _) = sessions(8);
    let mut hold = first(enter(&sessions, "a")).bind(rank(1));
    hold.rebind(rank(1));
    assert_eq!(left(&sessions), []);
    hold.rebind(rank(2));
    assert_eq!(bound(enter(&sessions, "a")).target(), rank(2));
    assert_eq!(left(&sessions)[0].target, rank(1));
}

#[test]
fn the_last_request_of_a_session_ends_it_unless_it_is_used_again() {
    let (sessions, _) = sessions(8);
    let last = first(enter(&sessions, "a")).bind(rank(1));
    let other = bound(enter(&sessions, "a"));
    last.finish();
    drop(last);
    assert_eq!(
        sessions.counts().sessions,
        1,
        "another request of it still runs"
    );
    drop(other);
    assert_eq!(sessions.counts().sessions, 0);
    let last = first(enter(&sessions, "a")).bind(rank(1));
    last.finish();
    let again = bound(enter(&sessions, "a"));
    drop((last, again));
    assert_eq!(sessions.counts().sessions, 1);
}

#[test]
fn children_of_one_parent_stay_together_and_apart_from_their_parent() {
    let (sessions, _) = sessions(8);
    let child = |id| {
        sessions
            .enter(SessionName {
                id,
                parent: Some("p"),
                model: None,
                tenant: None,
            })
            .unwrap()
    };
    let hold = first(child("c1")).bind(rank(1));
    hold.finish();
    drop(hold);
    assert_eq!(
        bound(child("c2")).target(),
        rank(1),
        "one child that ends does not end the group"
    );
    drop(first(enter(&sessions, "p")));
    drop(first(enter(&sessions, "c1")));
}

#[test]
fn ids_and_numbers_beyond_the_limits_are_refused() {
    let (sessions, hands) = sessions(1);
    let refused = |id, parent| {
        sessions
            .enter(SessionName {
                id,
                parent,
                model: None,
                tenant: None,
            })
            .unwrap_err()
    };
    assert_eq!(refused("", None), Refused::IdLength { bytes: 0, most: 8 });
    assert_eq!(
        refused("123456789", None),
        Refused::IdLength { bytes: 9, most: 8 }
    );
    assert_eq!(
        refused("1", Some("123456789")),
        Refused::IdLength { bytes: 9, most: 8 }
    );
    let hold = first(enter(&sessions, "12345678")).bind(rank(1));
    hands.forward(TTL);
    assert_eq!(refused("2", None), Refused::Full { most: 1 });
    drop(hold);
    drop(first(enter(&sessions, "2")));
}

#[test]
fn where_there_is_no_room_the_session_not_used_for_longest_goes() {
    let (sessions, hands) = sessions(3);
    let running = first(enter(&sessions, "running")).bind(rank(1));
    for id in ["old", "older"] {
        drop(first(enter(&sessions, id)).bind(rank(2)));
        hands.forward(1);
    }
    drop(bound(enter(&sessions, "old")));
    let new = first(enter(&sessions, "new")).bind(rank(3));
    assert_eq!(
        left(&sessions),
        [Stay {
            id: "older".to_owned(),
            group: false,
            tenant: None,
            target: rank(2),
            idle: None
        }]
    );
    assert_eq!(bound(enter(&sessions, "old")).target(), rank(2));
    drop((running, new));
}

#[test]
fn sessions_of_different_models_are_different_ones() {
    let (sessions, _) = sessions(8);
    let of = |model, parent| {
        sessions
            .enter(SessionName {
                id: "a",
                parent,
                model,
                tenant: None,
            })
            .unwrap()
    };
    for (nth, parent) in [None, Some("p")].into_iter().enumerate() {
        let nth = nth as u64 * 10;
        let one = first(of(Some("m1"), parent)).bind(rank(nth + 1));
        let two = first(of(Some("m2"), parent)).bind(rank(nth + 2));
        let targets = (
            bound(of(Some("m1"), parent)).target(),
            bound(of(Some("m2"), parent)).target(),
        );
        assert_eq!(targets, (rank(nth + 1), rank(nth + 2)));
        drop((one, two));
    }
}

#[test]
fn rules_outside_their_range_are_refused_by_name() {
    let rules = SessionRules::default();
    let ttl = |ttl| SessionRules { ttl, ..rules };
    for (name, rules) in [
        ("ttl", ttl(Duration::from_millis(999))),
        ("ttl", ttl(Duration::from_secs(31_536_001))),
        (
            "most_sessions",
            SessionRules {
                most_sessions: 0,
                ..rules
            },
        ),
        (
            "longest_id",
            SessionRules {
                longest_id: 0,
                ..rules
            },
        ),
    ] {
        assert_eq!(rules.validate().unwrap_err().0, name);
    }
    assert_eq!(rules.validate(), Ok(()));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn first_requests_from_many_threads_end_up_together_though_some_give_up() {
    let (sessions, _) = sessions(8);
    let tasks = (0..200u64).map(|nth| {
        let sessions = sessions.clone();
        tokio::spawn(async move {
            let entry = match enter(&sessions, "a") {
                Entry::Wait(waiting) => waiting.await.unwrap(),
                entry => entry,
            };
            match entry {
                Entry::Bound(hold) => Some(hold),
                // Most of those that may decide do not.
                Entry::First(binding) if nth % 10 == 9 => {
                    tokio::task::yield_now().await;
                    Some(binding.bind(rank(nth)))
                }
                Entry::First(_) => None,
                Entry::Wait(_) => panic!("it has waited"),
            }
        })
    });
    let mut holds = Vec::new();
    for task in tasks.collect::<Vec<_>>() {
        holds.extend(task.await.unwrap());
    }
    assert!(holds.len() >= 20, "whoever would decide has a target");
    assert!(
        holds
            .windows(2)
            .all(|pair| pair[0].target() == pair[1].target())
    );
    assert_eq!(
        sessions.counts(),
        Counts {
            sessions: 1,
            running: holds.len(),
            waiting: 0
        }
    );
}

#[test]
fn looking_where_a_session_is_enters_nothing_and_keeps_nothing_alive() {
    let (sessions, hands) = sessions(10);
    let target = |id| {
        sessions.target(SessionName {
            id,
            parent: None,
            model: None,
            tenant: None,
        })
    };
    assert_eq!((target("a"), sessions.counts()), (None, Counts::default()));
    let binding = first(enter(&sessions, "a"));
    assert_eq!(target("a"), None, "nobody has decided");
    let hold = binding.bind(rank(3));
    assert_eq!((target("a"), sessions.counts().running), (Some(rank(3)), 1));
    drop(hold);
    hands.forward(TTL - 1);
    assert_eq!(target("a"), Some(rank(3)));
    hands.forward(1);
    assert_eq!(target("a"), None, "looking has not made it younger");
    assert_eq!(target("an id that is too long"), None);
}

fn of_tenant<'a>(id: &'a str, tenant: &'a str) -> SessionName<'a> {
    SessionName {
        id,
        parent: None,
        model: None,
        tenant: Some(tenant),
    }
}

#[test]
fn tenants_cannot_enter_or_end_each_others_sessions() {
    let (sessions, _hands) = sessions(10);
    let hold = first(sessions.enter(of_tenant("a", "one")).unwrap()).bind(rank(1));
    let Entry::First(other) = sessions.enter(of_tenant("a", "two")).unwrap() else {
        panic!("another tenant's session")
    };
    let other = other.bind(rank(2));
    other.finish();
    drop(other);
    assert_eq!(sessions.target(of_tenant("a", "one")), Some(rank(1)));
    assert_eq!(sessions.target(of_tenant("a", "two")), None);
    assert_eq!(
        sessions.target(SessionName {
            id: "a",
            parent: None,
            model: None,
            tenant: None
        }),
        None
    );
    drop(hold);
}

#[test]
fn tenant_at_its_limit_evicts_only_its_own_sessions() {
    let (sessions, hands) = sessions(10);
    drop(first(sessions.enter(of_tenant("a", "victim")).unwrap()).bind(rank(1)));
    for id in ["a", "b", "c", "d", "e"] {
        hands.forward(1);
        drop(first(sessions.enter(of_tenant(id, "greedy")).unwrap()).bind(rank(2)));
    }
    let left =
        ["a", "b", "c", "d", "e"].map(|id| sessions.target(of_tenant(id, "greedy")).is_some());
    assert_eq!(left, [false, false, false, true, true]);
    assert_eq!(sessions.target(of_tenant("a", "victim")), Some(rank(1)));
    let running = ["d", "e"].map(|id| sessions.enter(of_tenant(id, "greedy")).unwrap());
    assert_eq!(
        sessions.enter(of_tenant("f", "greedy")).unwrap_err(),
        Refused::TenantFull { most: 2 }
    );
    drop(running);
    let long = SessionName {
        tenant: Some("123456789"),
        ..of_tenant("a", "")
    };
    assert_eq!(
        sessions.enter(long).unwrap_err(),
        Refused::IdLength { bytes: 9, most: 8 }
    );
    sessions.expire();
    assert_eq!(sessions.counts().sessions, 3);
}

#[test]
fn moves_name_the_tenant_of_the_session() {
    let (sessions, _hands) = sessions(10);
    let [one, two] = ["one", "two"]
        .map(|tenant| first(sessions.enter(of_tenant("a", tenant)).unwrap()).bind(rank(1)));
    sessions.moves();
    for (hold, tenant) in [(two, "two"), (one, "one")] {
        hold.finish();
        drop(hold);
        let stay = Stay {
            id: "a".into(),
            group: false,
            tenant: Some(tenant.into()),
            target: rank(1),
            idle: None,
        };
        assert_eq!(sessions.moves(), [Moved::Left(stay)]);
    }
}
