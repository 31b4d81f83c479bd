use std::time::Instant;

use super::*;
use crate::admission::Prefill;
use crate::admission::config::QueueConfig;
use crate::block::{BlockHashes, LocalHash};
use crate::fleet::Fleet;
use crate::index::PrefixIndex;
use crate::load::LoadTracker;
use crate::router::{Prompt, RouterSettings};
use crate::sessions::SessionRules;
use crate::worker::{BlockSize, Worker, WorkerId};

fn endpoint(id: u64) -> Endpoint {
    format!("127.0.0.1:{}", 8000 + id).parse().unwrap()
}

fn worker(id: u64) -> Worker {
    Worker::new(
        WorkerId(id),
        endpoint(id),
        "m".into(),
        BlockSize::new(4).unwrap(),
    )
}

/// An entrance to workers that are busy beyond `threshold` prefill tokens.
fn entrance(workers: u64, threshold: Option<u64>, affinity: Affinity) -> Arc<Entrance> {
    let load = LoadTracker::new(Instant::now);
    let router = Router::new(
        PrefixIndex::new(),
        load.clone(),
        RouterSettings::default(),
        1,
    );
    let router = Arc::new(router);
    publish(&router, 1..=workers);
    let queue = QueueConfig {
        prefill_busy_threshold: threshold,
        ..QueueConfig::default()
    };
    let admission = Admission::new(router.clone(), &queue, Prefill::Steady);
    let nudged = Arc::downgrade(&admission);
    load.on_relief(move || {
        nudged
            .upgrade()
            .into_iter()
            .for_each(|admission| admission.nudge())
    });
    let sessions = Sessions::new(SessionRules::default(), Instant::now);
    let affinities = Affinities {
        sessions,
        affinity,
        wait: Duration::from_secs(20),
    };
    Entrance::new(router, admission, Some(affinities), queue.deadline.get())
}

fn publish(router: &Router, ids: std::ops::RangeInclusive<u64>) {
    let change = Fleet::clone(&router.fleet()).reconcile(ids.map(worker).collect());
    change
        .added
        .iter()
        .for_each(|member| router.load().open(member.slot, member.rank));
    router.publish(Arc::new(change.fleet));
    change
        .removed
        .iter()
        .for_each(|member| router.load().close(member.slot));
}

/// A prompt of its own, of 401 tokens.
fn request(first: u64) -> RouteRequest {
    let locals = (0..100).map(|at| LocalHash(first * 1000 + at)).collect();
    let hashes = BlockHashes::chain(401, BlockSize::new(4).unwrap(), locals);
    RouteRequest::new(None, Prompt::Hashed(vec![hashes]))
}

fn word(id: &str) -> SessionWord {
    SessionWord {
        id: id.to_owned(),
        ..SessionWord::default()
    }
}

async fn admit(entrance: &Entrance, first: u64, session: Option<&SessionWord>) -> Admitted {
    entrance
        .admit(request(first), session, |_| panic!("nobody waits here"))
        .await
        .unwrap()
}

fn chosen(admitted: &Admitted) -> u64 {
    admitted.booked.route.to.rank.worker.0
}

fn at_rest(entrance: &Entrance) -> bool {
    let idle = entrance
        .router()
        .load()
        .snapshot()
        .iter()
        .all(|load| load.active_requests == 0);
    let waiting: u64 = entrance
        .admission()
        .standing()
        .iter()
        .map(|class| class.pending.requests)
        .sum();
    let sessions = entrance.sessions().unwrap().counts();
    idle && waiting == 0 && (sessions.running, sessions.waiting) == (0, 0)
}

#[tokio::test]
async fn a_hard_session_stays_however_busy_its_worker_is() {
    let entrance = entrance(4, None, Affinity::Hard);
    let first = admit(&entrance, 0, Some(&word("s"))).await;
    let mut held = Vec::new();
    for at in 1..20 {
        let next = admit(&entrance, at, Some(&word("s"))).await;
        assert_eq!(chosen(&next), chosen(&first));
        held.push(next);
    }
    assert_ne!(
        chosen(&admit(&entrance, 99, None).await),
        chosen(&first),
        "others go where nothing is booked"
    );
    drop((first, held));
    assert!(at_rest(&entrance));
}

#[tokio::test]
async fn a_soft_session_leaves_a_busy_worker_and_a_hard_one_waits_for_it() {
    for (affinity, stays) in [(Affinity::Hard, true), (Affinity::Soft, false)] {
        let entrance = entrance(2, Some(500), affinity);
        let held = [
            admit(&entrance, 0, Some(&word("s"))).await,
            admit(&entrance, 1, Some(&word("s"))).await,
        ];
        assert_eq!(chosen(&held[0]), chosen(&held[1]));
        let mut waits = None;
        let session = word("s");
        let next = entrance.admit(request(2), Some(&session), |wait| waits = Some(wait));
        let next = tokio::time::timeout(Duration::from_millis(50), next).await;
        if stays {
            assert!(next.is_err(), "it waits for its own worker");
            assert_eq!(
                waits.map(|wait| wait.as_secs_f64().round()),
                Some(30.0),
                "and Envoy is told how long"
            );
        } else {
            assert_ne!(chosen(&next.unwrap().unwrap()), chosen(&held[0]));
            assert_ne!(
                chosen(&admit(&entrance, 3, Some(&word("s"))).await),
                chosen(&held[0]),
                "the session moved"
            );
        }
        drop(held);
        assert!(at_rest(&entrance), "who left while waiting leaves no trace");
    }
}

#[tokio::test]
async fn first_requests_of_a_session_that_come_together_go_to_one_worker() {
    let entrance = entrance(8, Some(500), Affinity::Hard);
    // Everybody is busy, so the first request of the session has to wait, and the others for it.
    let held: Vec<_> = futures_util::future::join_all((0..16).map(|at| {
        let entrance = &entrance;
        async move { admit(entrance, at, None).await }
    }))
    .await;
    let running: Vec<_> = (100..110)
        .map(|at| {
            let entrance = entrance.clone();
            tokio::spawn(async move {
                entrance
                    .admit(request(at), Some(&word("s")), |_| {})
                    .await
                    .unwrap()
            })
        })
        .collect();
    while entrance.sessions().unwrap().counts().waiting < 9 {
        tokio::task::yield_now().await;
    }
    drop(held);
    let mut ids = Vec::new();
    for task in running {
        let mut admitted = task.await.unwrap();
        admitted.booked.reservation.first_token();
        ids.push(chosen(&admitted));
    }
    ids.dedup();
    assert_eq!(ids.len(), 1);
    assert!(at_rest(&entrance));
}

#[tokio::test]
async fn a_session_whose_worker_is_gone_is_bound_to_another_and_the_last_request_ends_it() {
    let entrance = entrance(2, None, Affinity::Hard);
    let first = chosen(&admit(&entrance, 0, Some(&word("s"))).await);
    publish(entrance.router(), if first == 1 { 2..=3 } else { 1..=1 });
    let second = chosen(&admit(&entrance, 1, Some(&word("s"))).await);
    assert_ne!(first, second);
    for at in 2..10 {
        assert_eq!(
            chosen(&admit(&entrance, at, Some(&word("s"))).await),
            second
        );
    }
    let last = SessionWord {
        last: true,
        ..word("s")
    };
    let admitted = admit(&entrance, 10, Some(&last)).await;
    assert_eq!(entrance.sessions().unwrap().counts().sessions, 1);
    drop(admitted);
    assert_eq!(entrance.sessions().unwrap().counts().sessions, 0);
}

#[tokio::test]
async fn a_hard_session_goes_round_a_worker_that_is_overloaded_for_a_moment_and_comes_back() {
    let entrance = entrance(2, None, Affinity::Hard);
    let mut first = admit(&entrance, 0, Some(&word("s"))).await;
    let home = chosen(&first);
    let answer = |status, from| crate::router::Answer { status, from };
    let router = entrance.router();
    router.answered(
        &mut first.booked,
        answer(503, crate::router::AnswerFrom::Chosen),
    );
    let detour = admit(&entrance, 1, Some(&word("s"))).await;
    assert_ne!(chosen(&detour), home);
    assert_eq!(
        detour.session.unwrap().target(),
        first.booked.route.to.rank,
        "it is still at home there"
    );
    for _ in 0..3 {
        router.answered(
            &mut first.booked,
            answer(503, crate::router::AnswerFrom::Gateway),
        );
    }
    let moved = admit(&entrance, 2, Some(&word("s"))).await;
    assert_ne!(chosen(&moved), home);
    assert_eq!(
        moved.session.unwrap().target(),
        moved.booked.route.to.rank,
        "nobody answers there any longer"
    );
}

#[tokio::test]
async fn a_session_goes_with_who_served_it_but_a_hard_one_comes_back_while_its_worker_lives() {
    for affinity in [Affinity::Hard, Affinity::Soft] {
        let entrance = entrance(2, None, affinity);
        let router = entrance.router();
        let target = |admitted: &Admitted| admitted.session.as_ref().unwrap().target().worker.0;
        let mut first = admit(&entrance, 0, Some(&word("s"))).await;
        let home = 3 - chosen(&first);
        let moved = first.served(router, endpoint(home));
        assert_eq!(moved, Moved::To(first.booked.route.to.rank), "{affinity:?}");
        assert_eq!(
            (chosen(&first), target(&first)),
            (home, home),
            "{affinity:?}: its cache is nowhere else"
        );
        assert_eq!(first.served(router, endpoint(home)), Moved::Unchanged);
        assert_eq!(first.served(router, endpoint(9)), Moved::Away);
        assert_eq!(target(&first), home, "{affinity:?}: nobody knows better");

        let mut second = admit(&entrance, 1, Some(&word("s"))).await;
        assert_eq!(chosen(&second), home, "{affinity:?}");
        second.served(router, endpoint(3 - home));
        let stays = affinity == Affinity::Hard;
        assert_eq!(target(&second) == home, stays, "{affinity:?}");
        if stays {
            let dead = crate::router::Answer {
                status: 503,
                from: crate::router::AnswerFrom::Gateway,
            };
            let mut third = admit(&entrance, 2, Some(&word("s"))).await;
            (0..3).for_each(|_| drop(router.answered(&mut third.booked, dead)));
            third.served(router, endpoint(3 - home));
            assert_ne!(target(&third), home, "where it was nobody answers any more");
        }
        drop((first, second));
        assert!(at_rest(&entrance));
    }
}

#[tokio::test]
async fn a_session_leaves_a_worker_that_drains() {
    for affinity in [Affinity::Hard, Affinity::Soft] {
        let entrance = entrance(2, None, affinity);
        let first = admit(&entrance, 0, Some(&word("s"))).await;
        let home = chosen(&first);
        let drains = |id| Worker {
            draining: id == home,
            ..worker(id)
        };
        let change =
            Fleet::clone(&entrance.router().fleet()).reconcile((1..=2).map(drains).collect());
        assert!(change.added.is_empty() && change.removed.is_empty());
        entrance.router().publish(Arc::new(change.fleet));
        let second = admit(&entrance, 1, Some(&word("s"))).await;
        assert_eq!(
            (chosen(&second), second.session.unwrap().target().worker.0),
            (3 - home, 3 - home),
            "{affinity:?}"
        );
    }
}

#[tokio::test]
async fn requests_for_different_workers_do_not_hold_each_other_up() {
    let entrance = entrance(2, Some(300), Affinity::Hard);
    let only = |id: u64, first: u64| {
        let mut request = request(first);
        request.constraints.allowed = Some([WorkerId(id)].into());
        request
    };
    let _held = entrance.admit(only(1, 0), None, |_| {}).await.unwrap();
    let stuck = tokio::spawn({
        let entrance = entrance.clone();
        let request = only(1, 1);
        async move { entrance.admit(request, None, |_| {}).await }
    });
    while entrance.admission().standing()[0].pending.requests == 0 {
        tokio::task::yield_now().await;
    }
    let other = entrance
        .admit(only(2, 2), None, |_| panic!("it need not wait"))
        .await
        .unwrap();
    assert_eq!(chosen(&other), 2);
    stuck.abort();
    assert!(stuck.await.is_err_and(|error| error.is_cancelled()));
    assert_eq!(entrance.admission().standing()[0].pending.requests, 0);
}

#[tokio::test]
async fn an_explanation_knows_the_session_and_the_queue_and_enters_neither() {
    for (affinity, stays) in [(Affinity::Hard, true), (Affinity::Soft, false)] {
        let entrance = entrance(2, Some(100), affinity);
        let held = admit(&entrance, 1, Some(&word("s"))).await;
        let before = (
            entrance.router().load().snapshot(),
            entrance.sessions().unwrap().counts(),
        );
        let winner = |session: &str| {
            let explanation = entrance.explain(request(2), Some(&word(session)));
            assert_eq!(explanation.class.as_deref(), Some("default"));
            (
                explanation.phases[0].winner.map(|rank| rank.worker.0),
                explanation.busy,
                explanation.sentence,
            )
        };
        let (bound, busy, sentence) = winner("s");
        assert_eq!(
            (bound == Some(chosen(&held)), busy),
            (stays, stays),
            "{affinity:?}: {sentence}"
        );
        assert_eq!(
            sentence.contains("but first it waits, because everybody it could go to is busy"),
            stays
        );
        let (free, busy, _) = winner("another");
        assert!(free != Some(chosen(&held)) && !busy, "{affinity:?}");
        let other = admit(&entrance, 3, None).await;
        assert!(winner("another").1, "{affinity:?}: now both are busy");
        drop(other);
        assert_eq!(
            (
                entrance.router().load().snapshot(),
                entrance.sessions().unwrap().counts()
            ),
            before
        );
        drop(held);
        assert!(at_rest(&entrance));
    }
}

#[tokio::test]
async fn a_hard_session_moves_when_its_worker_will_not_do_and_a_mere_question_follows_it() {
    let entrance = entrance(2, None, Affinity::Hard);
    let home = chosen(&admit(&entrance, 0, Some(&word("s"))).await);
    let _held = admit(&entrance, 1, Some(&word("s"))).await;
    assert_eq!(
        entrance
            .ask(request(2), Some(&word("s")))
            .unwrap()
            .to
            .rank
            .worker
            .0,
        home
    );
    assert_ne!(
        entrance.ask(request(2), None).unwrap().to.rank.worker.0,
        home,
        "where nothing is booked"
    );
    let mut elsewhere = request(3);
    elsewhere.constraints.allowed = Some([WorkerId(3 - home)].into());
    let moved = entrance
        .admit(elsewhere, Some(&word("s")), |_| {})
        .await
        .unwrap();
    assert_eq!(moved.session.unwrap().target().worker, WorkerId(3 - home));
}

#[tokio::test]
async fn what_has_no_prompt_goes_past_the_queue() {
    let entrance = entrance(1, Some(100), Affinity::Hard);
    let _held = admit(&entrance, 0, None).await;
    let because = crate::router::Reason::NotInference;
    let models = RouteRequest::new(None, Prompt::Estimated { tokens: 0, because });
    let admitted = entrance
        .admit(models, None, |_| panic!("it waits"))
        .await
        .unwrap();
    assert_eq!(chosen(&admitted), 1);
}
