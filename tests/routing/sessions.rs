//! Sessions that stay with their worker.

use std::collections::BTreeSet;

use futures_util::future::join_all;
use serde_json::{Value, json};

use crate::bed::{Answer, Bed, SOON, chat, engine, essay, stream, text};
use crate::support::ports::until;

/// Two workers and sessions, whose first requests are waited for as long as a busy machine may need.
async fn bed(affinity: &str, more: Value) -> Bed {
    let mut config = json!({"sessions": {"affinity": affinity, "wait": "20s"}});
    config
        .as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    Bed::start(&[engine(1), engine(2)], config).await
}

async fn ask(bed: &Bed, session: &str, body: &Value) -> Answer {
    Answer::of(bed.post(body).header("x-session-id", session)).await
}

fn other(worker: u64) -> u64 {
    3 - worker
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hard_session_stays_where_it_began_although_another_worker_is_cheaper() {
    let bed = bed("hard", json!({})).await;
    let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
    for topic in 0..3 {
        // Only the other one has this cached, and whoever has no session goes there.
        bed.warm(other(home), &chat(&essay(topic))).await;
        let free = bed.ask(&chat(&essay(topic))).await;
        assert_eq!(
            free.engine(),
            other(home),
            "the other must be the cheaper one for this test to mean anything"
        );
        bed.quiet().await;
        let bound = ask(&bed, "alice", &chat(&format!("{} And?", essay(topic)))).await;
        assert_eq!((bound.chosen(), bound.engine()), (home, home), "{bound:?}");
        bed.settle().await;
    }
    let page = bed.metrics().await;
    assert_eq!(
        (page.sum("sessions", &[]), page.sum("session_requests", &[])),
        (1.0, 0.0),
        "{}",
        page.text()
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_whose_worker_died_is_bound_to_another_and_stays_there() {
    let mut bed = bed("hard", json!({"health": {"failures": 2}})).await;
    let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
    bed.kill(home);
    let mut turn = 0;
    let rebound = until(SOON, async || {
        turn += 1;
        let answer = ask(&bed, "alice", &chat(&format!("Are you there? {turn}"))).await;
        assert_eq!(
            answer.engine(),
            other(home),
            "no request is lost: {answer:?}"
        );
        !answer.is_retried()
    });
    assert!(rebound.await, "bound to the dead worker");
    bed.restart(home).await;
    let mut turn = 0;
    let well = async || {
        turn += 1;
        bed.ask(&text(&format!("{turn} somebody else"))).await;
        bed.metrics().await.sum("workers_out", &[]) == 0.0
    };
    assert!(until(SOON, well).await, "it does not come back");
    bed.settle().await;
    // The old home is well again, knows what is asked now, and is not asked.
    bed.warm(home, &chat(&essay(1))).await;
    let answer = ask(&bed, "alice", &chat(&essay(1))).await;
    assert_eq!(
        (answer.chosen(), answer.engine()),
        (other(home), other(home)),
        "{answer:?}"
    );
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hard_session_waits_for_its_busy_worker_and_a_soft_one_goes_elsewhere() {
    for (affinity, waits) in [("hard", true), ("soft", false)] {
        let bed = bed(affinity, json!({"queue": {"prefill_busy_threshold": 10}})).await;
        let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
        let again = ask(&bed, "alice", &chat("Good morning again."))
            .await
            .engine();
        assert_eq!(again, home, "{affinity}");
        bed.quiet().await;
        bed.first_tokens(home, false).await;
        let holder = {
            let request = bed
                .post(&stream("Keep it busy.", 4))
                .header("x-session-id", "alice");
            tokio::spawn(Answer::of(request))
        };
        bed.wait_load(home, "active_prefill_tokens", |tokens| tokens > 10)
            .await;
        let request = bed.post(&chat("And now?")).header("x-session-id", "alice");
        let asking = tokio::spawn(Answer::of(request));
        if waits {
            bed.shows("it waits", |page| page.sum("queue_requests", &[]) == 1.0)
                .await;
            bed.first_tokens(home, true).await;
            assert_eq!(asking.await.unwrap().engine(), home);
        } else {
            assert_eq!(asking.await.unwrap().engine(), other(home));
            // It goes along with its last request.
            let next = ask(&bed, "alice", &chat("And then?")).await;
            assert_eq!(next.engine(), other(home), "{next:?}");
            bed.first_tokens(home, true).await;
        }
        assert_eq!(holder.await.unwrap().engine(), home);
        bed.quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn many_first_requests_of_a_session_at_once_go_to_one_worker() {
    for affinity in ["hard", "soft"] {
        let bed = bed(affinity, json!({})).await;
        let mut homes = BTreeSet::new();
        for session in 0..6 {
            let name = format!("session {session}");
            let bodies: Vec<_> = (0..16).map(|at| text(&essay(100 * session + at))).collect();
            let answers = join_all(bodies.iter().map(|body| ask(&bed, &name, body))).await;
            let workers: BTreeSet<u64> = answers.iter().map(Answer::engine).collect();
            assert_eq!(workers.len(), 1, "{affinity} {name}: {workers:?}");
            homes.extend(workers);
        }
        assert_eq!(homes.len(), 2, "{affinity}: sessions are spread");
        bed.quiet().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_forgotten_when_it_was_not_used_for_long_or_says_that_it_ends() {
    let bed = bed("hard", json!({"sessions": {"ttl": "1s"}})).await;
    ask(&bed, "alice", &chat("Good morning.")).await.engine();
    let last = bed
        .post(&chat("Good bye."))
        .header("x-session-id", "bob")
        .header("x-dynamo-session-final", "true");
    assert_eq!(Answer::of(last).await.status, 200);
    bed.shows("none is left", |page| page.sum("sessions", &[]) == 0.0)
        .await;
    bed.quiet().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_stays_with_one_rank_of_a_worker() {
    let mut spec = engine(1)
        .with(&["--dp-size", "2"])
        .listed(json!({"data_parallel": {"size": 2}}));
    // The port after that of the events is the second rank's, and without replay endpoint nobody else's.
    spec.replay = false;
    let bed = Bed::start(&[spec], json!({"sessions": {}})).await;
    let mut ranks = BTreeSet::new();
    for turn in 0..24 {
        let body = text(&essay(turn));
        let rank = |answer: &Answer| {
            assert_eq!(
                answer.header("x-received-dp-rank"),
                answer.header("x-served-dp-rank"),
                "{answer:?}"
            );
            answer.header("x-served-dp-rank").to_owned()
        };
        let bound = rank(&ask(&bed, "alice", &body).await);
        ranks.insert((true, bound));
        let free = rank(&bed.ask(&text(&essay(100 + turn))).await);
        ranks.insert((false, free));
        bed.quiet().await;
    }
    let of = |bound: bool| ranks.iter().filter(|(is, _)| *is == bound).count();
    assert_eq!((of(true), of(false)), (1, 2), "{ranks:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn who_waits_for_its_sessions_worker_goes_to_another_when_that_is_removed() {
    let bed = bed("hard", json!({"queue": {"prefill_busy_threshold": 10}})).await;
    let home = ask(&bed, "alice", &chat("Good morning.")).await.engine();
    bed.quiet().await;
    bed.first_tokens(home, false).await;
    let holder = tokio::spawn(Answer::of(
        bed.post(&stream("Busy.", 4))
            .header("x-session-id", "alice"),
    ));
    bed.wait_load(home, "active_prefill_tokens", |tokens| tokens > 10)
        .await;
    let asking = tokio::spawn(Answer::of(
        bed.post(&chat("And now?")).header("x-session-id", "alice"),
    ));
    bed.shows("it waits", |page| page.sum("queue_requests", &[]) == 1.0)
        .await;
    bed.stack
        .write_worker_entries(&json!([bed.engine(other(home)).entry()]))
        .unwrap();
    let answer = asking.await.unwrap();
    assert_eq!(
        (answer.engine(), answer.chosen()),
        (other(home), other(home)),
        "{answer:?}"
    );
    // Who is being answered by a worker that was removed is answered to the end.
    bed.first_tokens(home, true).await;
    assert_eq!(holder.await.unwrap().engine(), home);
    bed.quiet().await;
}
