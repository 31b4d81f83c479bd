//! Several routers that bind the same sessions: who sees to the end of each.

use super::*;

/// A router among others.
fn router(own: u64) -> (Arc<Sessions>, Hands) {
    let (sessions, hands) = sessions(8);
    sessions.on_word(own, || ());
    (sessions, hands)
}

/// Lets routers hear of each other until nobody has anything to say.
fn talk(routers: &[&Arc<Sessions>]) {
    loop {
        let words: Vec<Vec<Word>> = routers.iter().map(|router| router.words()).collect();
        if words.iter().all(Vec::is_empty) {
            return;
        }
        for (from, words) in words.into_iter().enumerate() {
            for (_, to) in routers.iter().enumerate().filter(|(to, _)| *to != from) {
                words
                    .iter()
                    .for_each(|word| to.take(word.clone(), Use::Now));
            }
        }
    }
}

fn stay(target: u64) -> Stay {
    Stay {
        id: "a".to_owned(),
        group: false,
        tenant: None,
        target: rank(target),
        idle: None,
    }
}

#[test]
fn of_two_who_bind_a_session_to_one_worker_one_sees_to_its_end() {
    let ((a, _), (b, hands)) = (router(1), router(2));
    let holds = [
        first(enter(&a, "a")).bind(rank(1)),
        first(enter(&b, "a")).bind(rank(1)),
    ];
    talk(&[&a, &b]);
    assert_eq!(
        a.moves(),
        [Moved::Came(stay(1)), Moved::HandedOver(stay(1))]
    );
    assert_eq!(b.moves(), [Moved::Came(stay(1))]);
    drop(holds);
    hands.forward(TTL);
    b.expire();
    assert_eq!(b.moves(), [Moved::Left(stay(1))]);
    assert_eq!(left(&a), []);
}

#[test]
fn of_two_who_bind_a_session_to_two_workers_the_losers_is_left() {
    let ((a, _), (b, _)) = (router(1), router(2));
    let _holds = [
        first(enter(&a, "a")).bind(rank(1)),
        first(enter(&b, "a")).bind(rank(2)),
    ];
    talk(&[&a, &b]);
    assert_eq!(a.moves(), [Moved::Came(stay(1)), Moved::Left(stay(1))]);
    assert_eq!(bound(enter(&a, "a")).target(), rank(2));
}

#[test]
fn a_decision_that_is_given_up_leaves_what_another_router_has_decided_meanwhile() {
    let ((a, hands), (b, _)) = (router(1), router(2));
    let deciding = first(enter(&a, "a"));
    let mut waits = waiting(enter(&a, "a"));
    let bell = Arc::new(Bell::default());
    assert!(poll(&mut waits, &bell).is_none());
    let hold = first(enter(&b, "a")).bind(rank(2));
    talk(&[&a, &b]);
    assert!(!bell.rang(), "the decision here comes after that one");
    drop(deciding);
    assert!(bell.rang());
    assert_eq!(
        bound(poll(&mut waits, &bell).unwrap().unwrap()).target(),
        rank(2)
    );
    drop(waits);
    hands.forward(TTL);
    a.expire();
    assert_eq!(
        (a.counts(), a.moves()),
        (Counts::default(), vec![]),
        "it is forgotten like any other, and was never ours"
    );

    // It ends where it was bound, or its worker leaves, before the decision is given up.
    for gone in [true, false] {
        let deciding = first(enter(&a, "a"));
        a.take(
            Word::Bound {
                session: key(),
                target: rank(2),
                stamp: Stamp { version: 3, by: 2 },
            },
            Use::Now,
        );
        match gone {
            true => a.retain(|worker| worker != WorkerId(2)),
            false => a.take(
                Word::Ended {
                    session: key(),
                    stamp: Stamp { version: 3, by: 2 },
                },
                Use::Now,
            ),
        }
        drop(deciding);
        assert_eq!(a.counts(), Counts::default());
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
fn whoever_inherits_sessions_sees_to_their_ends() {
    let ((a, hands), (b, _), (c, _)) = (router(1), router(2), router(3));
    drop(first(enter(&b, "a")).bind(rank(2)));
    drop(first(enter(&a, "own")).bind(rank(1)));
    talk(&[&a, &b, &c]);
    a.moves();
    assert_eq!(a.inherit(|by| by == 2), 0, "its maker is there");
    assert_eq!(a.inherit(|_| false), 1, "b is gone");
    assert_eq!(a.inherit(|_| false), 0);
    assert_eq!(a.moves(), [Moved::Inherited(stay(2))]);
    talk(&[&a, &c]);
    assert_eq!(c.moves(), []);
    // It was not: then it hears that the session is no longer its own.
    b.moves();
    for word in a.all_words() {
        b.take(word, Use::Now);
    }
    assert_eq!(b.moves(), [Moved::HandedOver(stay(2))]);
    hands.forward(TTL);
    let mut ends = left(&a);
    ends.sort_by_key(|stay| stay.target);
    assert_eq!(
        ends.iter().map(|stay| stay.target).collect::<Vec<_>>(),
        [rank(1), rank(2)]
    );
}

#[test]
fn what_was_given_up_is_not_taken_back_from_those_who_do_not_know() {
    let ((a, _), (b, hands)) = (router(1), router(2));
    let hold = first(enter(&a, "a")).bind(rank(1));
    talk(&[&a, &b]);
    a.retain(|worker| worker != WorkerId(1));
    let deciding = first(enter(&a, "a"));
    assert_eq!(a.moves(), [Moved::Came(stay(1)), Moved::Left(stay(1))]);
    hands.forward(TTL / 2);
    drop(bound(enter(&b, "a")));
    talk(&[&a, &b]);
    drop((deciding, hold));
    assert_eq!((a.counts(), a.moves()), (Counts::default(), vec![]));
}

#[test]
fn a_session_that_is_used_elsewhere_is_kept_by_who_has_bound_it_or_comes_anew() {
    let ((a, hands_of_a), (b, hands_of_b)) = (router(1), router(2));
    drop(first(enter(&a, "a")).bind(rank(1)));
    talk(&[&a, &b]);
    // A request that takes longer than the session's time: its end is told, too.
    let long = bound(enter(&b, "a"));
    [&hands_of_a, &hands_of_b]
        .into_iter()
        .for_each(|hands| hands.forward(TTL - 1));
    drop(long);
    talk(&[&a, &b]);
    [&hands_of_a, &hands_of_b]
        .into_iter()
        .for_each(|hands| hands.forward(TTL - 1));
    assert_eq!(left(&a), []);
    // Forgotten here, and still in use there: it is ours again.
    hands_of_a.forward(1);
    assert_eq!(left(&a), [stay(1)]);
    drop(bound(enter(&b, "a")));
    talk(&[&a, &b]);
    assert_eq!(a.moves(), [Moved::Came(stay(1))]);
}

#[test]
fn where_nobody_follows_the_moves_there_is_nothing_to_inherit() {
    let hands = Hands::new();
    let sessions = Sessions::new(SessionRules::default(), move || hands.now());
    sessions.on_word(1, || ());
    sessions.take(
        Word::Bound {
            session: key(),
            target: rank(2),
            stamp: Stamp { version: 1, by: 2 },
        },
        Use::Now,
    );
    assert_eq!(sessions.inherit(|_| false), 0);
    assert_eq!(sessions.words(), []);
}
