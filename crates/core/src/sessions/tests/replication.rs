//! Several replicas that bind the same sessions: which one reports the end of each.

use super::*;

/// Creates a replica with its own session store.
fn router(own: u64) -> (Arc<SessionStore>, ManualClock) {
    recording_sessions(8, Some(own))
}

/// Exchanges updates between the replicas until none is left.
fn exchange_updates(routers: &[&Arc<SessionStore>]) {
    loop {
        let updates: Vec<Vec<SessionUpdate>> =
            routers.iter().map(|router| router.take_updates()).collect();
        if updates.iter().all(Vec::is_empty) {
            return;
        }
        for (from, updates) in updates.into_iter().enumerate() {
            for (_, to) in routers.iter().enumerate().filter(|(to, _)| *to != from) {
                updates
                    .iter()
                    .for_each(|update| to.apply_update(update.clone(), UpdateKind::InUse));
            }
        }
    }
}

fn binding(target: u64) -> SessionBinding {
    SessionBinding {
        id: "a".to_owned(),
        group: false,
        tenant: None,
        target: rank(target),
        idle: None,
    }
}

#[test]
fn equal_bindings_leave_one_replica_responsible() {
    let ((a, _), (b, time)) = (router(1), router(2));
    let holds = [
        first(enter(&a, "a")).bind(rank(1)),
        first(enter(&b, "a")).bind(rank(1)),
    ];
    exchange_updates(&[&a, &b]);
    assert_eq!(
        a.take_moves(),
        [
            SessionMove::Bound(binding(1)),
            SessionMove::HandedOver(binding(1))
        ]
    );
    assert_eq!(b.take_moves(), [SessionMove::Bound(binding(1))]);
    drop(holds);
    time.forward(TTL);
    b.expire();
    assert_eq!(b.take_moves(), [SessionMove::Unbound(binding(1))]);
    assert_eq!(ended_bindings(&a), []);
}

#[test]
fn conflicting_binding_unbinds_losing_worker() {
    let ((a, _), (b, _)) = (router(1), router(2));
    let _holds = [
        first(enter(&a, "a")).bind(rank(1)),
        first(enter(&b, "a")).bind(rank(2)),
    ];
    exchange_updates(&[&a, &b]);
    assert_eq!(
        a.take_moves(),
        [
            SessionMove::Bound(binding(1)),
            SessionMove::Unbound(binding(1))
        ]
    );
    assert_eq!(bound(enter(&a, "a")).target(), rank(2));
}

#[test]
fn abandoned_decision_keeps_binding_of_other_replica() {
    let ((a, time), (b, _)) = (router(1), router(2));
    let deciding = first(enter(&a, "a"));
    let mut waits = waiting(enter(&a, "a"));
    let flag = Arc::new(WakeFlag::default());
    assert!(poll(&mut waits, &flag).is_none());
    let hold = first(enter(&b, "a")).bind(rank(2));
    exchange_updates(&[&a, &b]);
    assert!(!flag.is_woken(), "the local decision is newer");
    drop(deciding);
    assert!(flag.is_woken());
    assert_eq!(
        bound(poll(&mut waits, &flag).unwrap().unwrap()).target(),
        rank(2)
    );
    drop(waits);
    time.forward(TTL);
    a.expire();
    assert_eq!(
        (a.counts(), a.take_moves()),
        (SessionCounts::default(), vec![]),
        "it expires like any other, and was bound elsewhere"
    );

    // It ends at its replica, or its worker leaves, before the decision is abandoned.
    for gone in [true, false] {
        let deciding = first(enter(&a, "a"));
        a.apply_update(
            SessionUpdate::Bound {
                session: key(),
                target: rank(2),
                version: BindingVersion {
                    version: 3,
                    router: 2,
                },
            },
            UpdateKind::InUse,
        );
        match gone {
            true => a.retain(|worker| worker != WorkerId(2)),
            false => a.apply_update(
                SessionUpdate::Ended {
                    session: key(),
                    version: BindingVersion {
                        version: 3,
                        router: 2,
                    },
                },
                UpdateKind::InUse,
            ),
        }
        drop(deciding);
        assert_eq!(a.counts(), SessionCounts::default());
    }
    drop(hold);
}

fn key() -> Arc<SessionKey> {
    Arc::new(SessionKey {
        model: None,
        tenant: None,
        group: false,
        id: "a".into(),
    })
}

#[test]
fn successor_reports_ends_of_inherited_sessions() {
    let ((a, time), (b, _), (c, _)) = (router(1), router(2), router(3));
    drop(first(enter(&b, "a")).bind(rank(2)));
    drop(first(enter(&a, "own")).bind(rank(1)));
    exchange_updates(&[&a, &b, &c]);
    a.take_moves();
    assert_eq!(
        a.take_over_orphans(|by| by == 2),
        0,
        "the replica that bound it is present"
    );
    assert_eq!(a.take_over_orphans(|_| false), 1, "b is gone");
    assert_eq!(a.take_over_orphans(|_| false), 0);
    assert_eq!(a.take_moves(), [SessionMove::TakenOver(binding(2))]);
    exchange_updates(&[&a, &c]);
    assert_eq!(c.take_moves(), []);
    // If it was absent, it receives the newer binding later.
    b.take_moves();
    for update in a.snapshot_updates() {
        b.apply_update(update, UpdateKind::InUse);
    }
    assert_eq!(b.take_moves(), [SessionMove::HandedOver(binding(2))]);
    time.forward(TTL);
    let mut ends = ended_bindings(&a);
    ends.sort_by_key(|binding| binding.target);
    assert_eq!(
        ends.iter()
            .map(|binding| binding.target)
            .collect::<Vec<_>>(),
        [rank(1), rank(2)]
    );
}

#[test]
fn abandoned_session_keeps_binding_of_uninformed_replica() {
    let ((a, _), (b, time)) = (router(1), router(2));
    let hold = first(enter(&a, "a")).bind(rank(1));
    exchange_updates(&[&a, &b]);
    a.retain(|worker| worker != WorkerId(1));
    let deciding = first(enter(&a, "a"));
    assert_eq!(
        a.take_moves(),
        [
            SessionMove::Bound(binding(1)),
            SessionMove::Unbound(binding(1))
        ]
    );
    time.forward(TTL / 2);
    drop(bound(enter(&b, "a")));
    exchange_updates(&[&a, &b]);
    drop((deciding, hold));
    assert_eq!(
        (a.counts(), a.take_moves()),
        (SessionCounts::default(), vec![])
    );
}

#[test]
fn use_at_other_replica_refreshes_or_restores_session() {
    let ((a, time_a), (b, time_b)) = (router(1), router(2));
    drop(first(enter(&a, "a")).bind(rank(1)));
    exchange_updates(&[&a, &b]);
    // A request that runs longer than the TTL: its end is reported too.
    let long = bound(enter(&b, "a"));
    [&time_a, &time_b]
        .into_iter()
        .for_each(|time| time.forward(TTL - 1));
    drop(long);
    exchange_updates(&[&a, &b]);
    [&time_a, &time_b]
        .into_iter()
        .for_each(|time| time.forward(TTL - 1));
    assert_eq!(ended_bindings(&a), []);
    // Expired here, and still in use elsewhere: it is bound here again.
    time_a.forward(1);
    assert_eq!(ended_bindings(&a), [binding(1)]);
    drop(bound(enter(&b, "a")));
    exchange_updates(&[&a, &b]);
    assert_eq!(a.take_moves(), [SessionMove::Bound(binding(1))]);
}

#[test]
fn sessions_are_not_inherited_without_recorded_moves() {
    let time = ManualClock::new();
    let recording = SessionRecording {
        moves: false,
        updates_by: Some(1),
    };
    let rules = SessionRules::default();
    let sessions = SessionStore::with_listener(rules, move || time.now(), recording, Arc::new(()));
    sessions.apply_update(
        SessionUpdate::Bound {
            session: key(),
            target: rank(2),
            version: BindingVersion {
                version: 1,
                router: 2,
            },
        },
        UpdateKind::InUse,
    );
    assert_eq!(sessions.take_over_orphans(|_| false), 0);
    assert_eq!(sessions.take_updates(), []);
}
