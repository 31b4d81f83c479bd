use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use super::*;
use crate::worker::{DpRank, WorkerId, WorkerRank};

mod model;
mod replication;
mod tenants;

const TTL: u64 = 10;

/// Manual clock.
#[derive(Clone)]
struct ManualClock {
    start: Instant,
    seconds: Arc<AtomicU64>,
}

impl ManualClock {
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

fn sessions(max_sessions: usize) -> (Arc<SessionStore>, ManualClock) {
    recording_sessions(max_sessions, None)
}

/// Creates a store that records moves, and updates under the id of a replica.
fn recording_sessions(
    max_sessions: usize,
    updates_by: Option<u64>,
) -> (Arc<SessionStore>, ManualClock) {
    let time = ManualClock::new();
    let rules = SessionRules {
        ttl: Duration::from_secs(TTL),
        max_sessions,
        max_sessions_per_tenant: 2,
    };
    let clock = time.clone();
    let recording = SessionRecording {
        moves: true,
        updates_by,
    };
    let sessions = SessionStore::with_listener(rules, move || clock.now(), recording, Arc::new(()));
    (sessions, time)
}

/// Returns the bindings that ended since the last call, after removing expired ones.
fn ended_bindings(sessions: &SessionStore) -> Vec<SessionBinding> {
    sessions.expire();
    let left = |moved| match moved {
        SessionMove::Unbound(binding) => Some(binding),
        SessionMove::Bound(_) | SessionMove::HandedOver(_) | SessionMove::TakenOver(_) => None,
    };
    sessions.take_moves().into_iter().filter_map(left).collect()
}

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

fn enter(sessions: &Arc<SessionStore>, id: &str) -> SessionEntry {
    sessions
        .enter(SessionName {
            id,
            parent: None,
            model: None,
            tenant: None,
        })
        .unwrap()
}

fn first(entry: SessionEntry) -> PendingBinding {
    match entry {
        SessionEntry::First(binding) => binding,
        other => panic!("{other:?}"),
    }
}

fn bound(entry: SessionEntry) -> SessionLease {
    match entry {
        SessionEntry::Bound(hold) => hold,
        other => panic!("{other:?}"),
    }
}

fn waiting(entry: SessionEntry) -> BindingWait {
    match entry {
        SessionEntry::Deciding(waiting) => waiting,
        other => panic!("{other:?}"),
    }
}

/// Waker that records its wake-up.
#[derive(Default)]
struct WakeFlag(AtomicBool);

impl Wake for WakeFlag {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl WakeFlag {
    fn is_woken(&self) -> bool {
        self.0.swap(false, Ordering::Relaxed)
    }
}

fn poll(
    waiting: &mut BindingWait,
    flag: &Arc<WakeFlag>,
) -> Option<Result<SessionEntry, SessionError>> {
    match pin!(waiting).poll(&mut Context::from_waker(&Waker::from(flag.clone()))) {
        Poll::Ready(entry) => Some(entry),
        Poll::Pending => None,
    }
}

#[test]
fn cancelled_waiter_leaves_no_trace() {
    let (sessions, _) = sessions(8);
    let binding = first(enter(&sessions, "a"));
    let flag = Arc::new(WakeFlag::default());
    let mut waiting = waiting(enter(&sessions, "a"));
    assert!(poll(&mut waiting, &flag).is_none());
    drop(waiting);
    assert_eq!(
        (sessions.counts().waiting, Arc::strong_count(&flag)),
        (0, 1)
    );
    drop(binding);
    assert!(!flag.is_woken());
    assert_eq!(sessions.counts(), SessionCounts::default());
}

#[test]
fn child_sessions_share_a_group_without_parent() {
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
        "the end of one child does not end the group"
    );
    drop(first(enter(&sessions, "p")));
    drop(first(enter(&sessions, "c1")));
}

#[test]
fn oversized_ids_and_counts_are_rejected() {
    let (sessions, time) = sessions(1);
    let refused = |id: &str, parent: Option<&str>| {
        sessions
            .enter(SessionName {
                id,
                parent,
                model: None,
                tenant: None,
            })
            .unwrap_err()
    };
    let id_length = |bytes| SessionError::IdLength { bytes };
    let (longest, too_long) = ("a".repeat(256), "a".repeat(257));
    assert_eq!(refused("", None), id_length(0));
    assert_eq!(refused(&too_long, None), id_length(257));
    assert_eq!(refused("1", Some(&too_long)), id_length(257));
    let hold = first(enter(&sessions, &longest)).bind(rank(1));
    time.forward(TTL);
    assert_eq!(refused("2", None), SessionError::Full { limit: 1 });
    drop(hold);
    drop(first(enter(&sessions, "2")));
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
fn invalid_rules_are_rejected_by_name() {
    let rules = SessionRules::default();
    let ttl = |ttl| SessionRules { ttl, ..rules };
    for (name, rules) in [
        ("ttl", ttl(Duration::from_millis(999))),
        ("ttl", ttl(Duration::from_secs(31_536_001))),
        (
            "max_sessions",
            SessionRules {
                max_sessions: 0,
                ..rules
            },
        ),
    ] {
        assert_eq!(rules.validate().unwrap_err().0, name);
    }
    assert_eq!(rules.validate(), Ok(()));
}

/// Runs a future on this thread.
fn block_on<F: Future>(future: F) -> F::Output {
    struct ThreadWaker(Thread);
    impl Wake for ThreadWaker {
        fn wake(self: Arc<Self>) {
            self.0.unpark();
        }
    }
    let waker = Waker::from(Arc::new(ThreadWaker(thread::current())));
    let mut task = Context::from_waker(&waker);
    let mut future = pin!(future);
    loop {
        match future.as_mut().poll(&mut task) {
            Poll::Ready(output) => return output,
            Poll::Pending => thread::park(),
        }
    }
}

#[test]
fn concurrent_first_requests_share_one_target() {
    let (sessions, _) = sessions(8);
    let threads = (0..200u64).map(|index| {
        let sessions = sessions.clone();
        thread::spawn(move || {
            let entry = match enter(&sessions, "a") {
                SessionEntry::Deciding(wait) => block_on(wait).unwrap(),
                entry => entry,
            };
            match entry {
                SessionEntry::Bound(lease) => Some(lease),
                // Nine of ten requests that may decide give up.
                SessionEntry::First(binding) if index % 10 == 9 => {
                    thread::yield_now();
                    Some(binding.bind(rank(index)))
                }
                SessionEntry::First(_) => None,
                SessionEntry::Deciding(_) => panic!("a wait ends with a decision"),
            }
        })
    });
    let mut leases = Vec::new();
    for thread in threads.collect::<Vec<_>>() {
        leases.extend(thread.join().unwrap());
    }
    assert!(leases.len() >= 20, "each request that binds has a target");
    assert!(
        leases
            .windows(2)
            .all(|pair| pair[0].target() == pair[1].target())
    );
    assert_eq!(
        sessions.counts(),
        SessionCounts {
            sessions: 1,
            running: leases.len(),
            waiting: 0
        }
    );
}

#[test]
fn target_lookup_does_not_enter_or_refresh_session() {
    let (sessions, time) = sessions(10);
    let target = |id| {
        sessions.target(SessionName {
            id,
            parent: None,
            model: None,
            tenant: None,
        })
    };
    assert_eq!(
        (target("a"), sessions.counts()),
        (None, SessionCounts::default())
    );
    let binding = first(enter(&sessions, "a"));
    assert_eq!(target("a"), None, "no request has decided");
    let hold = binding.bind(rank(3));
    assert_eq!((target("a"), sessions.counts().running), (Some(rank(3)), 1));
    drop(hold);
    time.forward(TTL - 1);
    assert_eq!(target("a"), Some(rank(3)));
    time.forward(1);
    assert_eq!(target("a"), None, "the lookup did not refresh the session");
    assert_eq!(target("an id that is too long"), None);
}
