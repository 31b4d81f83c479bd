//! Sessions of several tenants.

use super::*;

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
    let (sessions, _clock_handle) = sessions(10);
    let hold = first(sessions.enter(of_tenant("a", "one")).unwrap()).bind(rank(1));
    let SessionEntry::First(other) = sessions.enter(of_tenant("a", "two")).unwrap() else {
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
fn tenant_at_limit_evicts_only_own_sessions() {
    let (sessions, time) = sessions(10);
    drop(first(sessions.enter(of_tenant("a", "victim")).unwrap()).bind(rank(1)));
    for id in ["a", "b", "c", "d", "e"] {
        time.forward(1);
        drop(first(sessions.enter(of_tenant(id, "greedy")).unwrap()).bind(rank(2)));
    }
    let left =
        ["a", "b", "c", "d", "e"].map(|id| sessions.target(of_tenant(id, "greedy")).is_some());
    assert_eq!(left, [false, false, false, true, true]);
    assert_eq!(sessions.target(of_tenant("a", "victim")), Some(rank(1)));
    let running = ["d", "e"].map(|id| sessions.enter(of_tenant(id, "greedy")).unwrap());
    assert_eq!(
        sessions.enter(of_tenant("f", "greedy")).unwrap_err(),
        SessionError::TenantFull { limit: 2 }
    );
    drop(running);
    let tenant = "a".repeat(257);
    let long = SessionName {
        tenant: Some(&tenant),
        ..of_tenant("a", "")
    };
    assert_eq!(
        sessions.enter(long).unwrap_err(),
        SessionError::IdLength { bytes: 257 }
    );
    sessions.expire();
    assert_eq!(sessions.counts().sessions, 3);
}

#[test]
fn moves_name_the_tenant_of_the_session() {
    let (sessions, _clock_handle) = sessions(10);
    let [one, two] = ["one", "two"]
        .map(|tenant| first(sessions.enter(of_tenant("a", tenant)).unwrap()).bind(rank(1)));
    sessions.take_moves();
    for (hold, tenant) in [(two, "two"), (one, "one")] {
        hold.finish();
        drop(hold);
        let binding = SessionBinding {
            id: "a".into(),
            group: false,
            tenant: Some(tenant.into()),
            target: rank(1),
            idle: None,
        };
        assert_eq!(sessions.take_moves(), [SessionMove::Unbound(binding)]);
    }
}
