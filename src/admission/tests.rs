use std::future::Future;
use std::pin::pin;
use std::task::{Context, Waker};

use super::config::ClassConfig;
use super::*;
use crate::settings::Period;

mod pool;
mod stress;

use pool::{Does, Job, Pool, Seat};

/// One class, for which a worker can be busy.
fn gated() -> QueueConfig {
    QueueConfig {
        prefill_busy_threshold: Some(0),
        ..QueueConfig::default()
    }
}

fn room(seats: usize, config: &QueueConfig) -> Arc<Admission<Pool>> {
    assert_eq!(config.problems(), []);
    Pool::room(seats, config, Prefill::Steady)
}

fn turn(prompt_tokens: u64) -> Turn {
    Turn {
        prompt_tokens,
        ..Turn::default()
    }
}

fn placed(entered: Entered<Pool>) -> Seat {
    match entered {
        Entered::Done(outcome) => outcome.unwrap(),
        Entered::Waiting(_) => panic!("it waits"),
    }
}

fn rejected(entered: Entered<Pool>) -> Rejected<&'static str> {
    match entered {
        Entered::Done(outcome) => outcome.unwrap_err(),
        Entered::Waiting(_) => panic!("it waits"),
    }
}

fn waiting(entered: Entered<Pool>) -> Waiting<Pool> {
    match entered {
        Entered::Waiting(waiting) => waiting,
        Entered::Done(outcome) => panic!("it does not wait: {outcome:?}"),
    }
}

/// What a future says when it is asked once.
fn poll_once<F: Future>(future: std::pin::Pin<&mut F>) -> Option<F::Output> {
    match future.poll(&mut Context::from_waker(Waker::noop())) {
        std::task::Poll::Ready(output) => Some(output),
        std::task::Poll::Pending => None,
    }
}

/// Lets the others run until so many wait. Time stands still meanwhile.
async fn until_pending(admission: &Admission<Pool>, requests: u64) {
    for _ in 0..1000 {
        if pending(admission) == requests {
            return;
        }
        tokio::task::yield_now().await;
    }
    panic!("{} wait", pending(admission));
}

fn pending(admission: &Admission<Pool>) -> u64 {
    admission
        .standing()
        .iter()
        .map(|class| class.pending.requests)
        .sum()
}

#[tokio::test(start_paused = true)]
async fn with_nothing_configured_nothing_waits() {
    let admission = room(0, &QueueConfig::default());
    let seats: Vec<_> = (0..10)
        .map(|_| placed(admission.enter("a".into(), turn(10))))
        .collect();
    assert_eq!(seats.len(), 10);
    assert_eq!(pending(&admission), 0);
}

#[tokio::test(start_paused = true)]
async fn those_who_wait_go_in_order_and_need_no_pump_for_it() {
    let admission = room(1, &gated());
    let first = placed(admission.enter("a".into(), turn(10)));
    let wait = |name: &'static str| waiting(admission.enter(name.into(), turn(10)));
    let (b, c) = (wait("b"), wait("c"));
    assert_eq!(b.deadline(), Duration::from_secs(30));
    let before = admission.standing().remove(0);
    assert_eq!((&*before.class, before.tally.waited), ("default", 2));
    assert_eq!(
        before.pending,
        Pending {
            requests: 2,
            prompt_tokens: 20,
            cached_tokens: 0
        }
    );
    drop(first);
    // c is asked first and looks for both; the seat is b's all the same.
    let mut c = pin!(c.placed());
    assert!(poll_once(c.as_mut()).is_none());
    let second = b.placed().await.unwrap();
    assert_eq!((second.name, admission.placing().free()), ("b", 0));
    drop(second);
    assert_eq!(c.await.unwrap().name, "c");
    assert_eq!(pending(&admission), 0);
    assert_eq!(admission.placing().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn the_pump_places_those_whose_tasks_are_slow() {
    let admission = room(0, &gated());
    let slow = waiting(admission.enter("slow".into(), turn(10)));
    let pump = admission.clone();
    let pump = tokio::spawn(async move { pump.run().await });
    admission.placing().add(1);
    until_pending(&admission, 0).await;
    assert_eq!(slow.placed().await.unwrap().name, "slow");
    pump.abort();
}

#[tokio::test(start_paused = true)]
async fn the_pump_looks_from_time_to_time_without_a_nudge() {
    for (prefill, least, most) in [(Prefill::Steady, 500, 2_001), (Prefill::Shrinks, 50, 201)] {
        let config = QueueConfig {
            deadline: Period::seconds(90),
            ..gated()
        };
        let admission = Pool::room(0, &config, prefill);
        let pump = admission.clone();
        let pump = tokio::spawn(async move { pump.run().await });
        let began = Instant::now();
        let waits = tokio::spawn(waiting(admission.enter("a".into(), turn(10))).placed());
        tokio::task::yield_now().await;
        admission.placing().add_silently(1);
        waits.await.unwrap().unwrap();
        let took = began.elapsed().as_millis();
        assert!((least..most).contains(&took), "{prefill:?}: {took} ms");
        pump.abort();
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_the_wait_and_leaves_nothing() {
    let config = QueueConfig {
        deadline: Period::seconds(7),
        retry_after: Period::seconds(3),
        ..gated()
    };
    let admission = room(0, &config);
    let waits = waiting(admission.enter("a".into(), turn(10)));
    let rejected = waits.placed().await.unwrap_err();
    let Rejected::Deadline {
        class,
        waited,
        retry_after,
    } = rejected
    else {
        panic!("{rejected}")
    };
    assert_eq!((&*class, retry_after), ("default", Duration::from_secs(3)));
    assert!(
        (Duration::from_secs(7)..Duration::from_millis(7100)).contains(&waited),
        "{waited:?}"
    );
    let standing = admission.standing().remove(0);
    assert_eq!(standing.pending, Pending::default());
    assert_eq!(
        standing.tally,
        Tally {
            waited: 1,
            expired: 1,
            ..Tally::default()
        }
    );
    admission.placing().add(1);
    assert_eq!(admission.placing().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_client_that_leaves_leaves_nothing() {
    let admission = room(0, &gated());
    let first = waiting(admission.enter("a".into(), turn(10)));
    let second = waiting(admission.enter("b".into(), turn(10)));
    let third = waiting(admission.enter("c".into(), turn(10)));
    // One before it was ever asked, one after.
    drop(first);
    let mut second = Box::pin(second.placed());
    assert!(poll_once(second.as_mut()).is_none());
    drop(second);
    assert_eq!(pending(&admission), 1);
    admission.placing().add(1);
    assert_eq!(third.placed().await.unwrap().name, "c");
    let standing = admission.standing().remove(0);
    assert_eq!(standing.pending, Pending::default());
    assert_eq!(
        standing.tally,
        Tally {
            waited: 3,
            left: 2,
            ..Tally::default()
        }
    );
    assert_eq!(admission.placing().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_place_that_nobody_takes_is_given_back() {
    let admission = room(0, &gated());
    let left = waiting(admission.enter("a".into(), turn(10)));
    let next = waiting(admission.enter("b".into(), turn(10)));
    admission.placing().add(1);
    admission.look();
    assert_eq!((pending(&admission), admission.placing().free()), (1, 0));
    // It was placed already, and was told so, but does not hear it any more.
    drop(left);
    assert_eq!(next.placed().await.unwrap().name, "b");
    assert_eq!(admission.placing().free(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_does_not_overtake_who_waits_in_its_lane() {
    let admission = room(0, &gated());
    let first = waiting(admission.enter("first".into(), turn(10)));
    admission.placing().add_silently(1);
    // There is room, but nobody has told the first yet.
    let newcomer = waiting(admission.enter("newcomer".into(), turn(10)));
    admission.nudge();
    let mut newcomer = pin!(newcomer.placed());
    assert!(poll_once(newcomer.as_mut()).is_none());
    let seat = first.placed().await.unwrap();
    assert_eq!(seat.name, "first");
    drop(seat);
    assert_eq!(newcomer.await.unwrap().name, "newcomer");
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_that_is_more_urgent_goes_first() {
    let admission = room(0, &gated());
    let patient = waiting(admission.enter("patient".into(), turn(10)));
    let urgent = Turn {
        strict_priority: 1,
        ..turn(10)
    };
    let urgent = waiting(admission.enter("urgent".into(), urgent));
    admission.placing().add(1);
    let seat = urgent.placed().await.unwrap();
    assert_eq!((seat.name, pending(&admission)), ("urgent", 1));
    drop(patient);
}

#[tokio::test(start_paused = true)]
async fn who_overflows_is_told_of_what_and_when_to_come_back() {
    let config: QueueConfig = serde_json::from_value(serde_json::json!({
        "prefill_busy_threshold": 0,
        "retry_after": "4s",
        "default_family": "f",
        "uncached_buckets": [{ "min_tokens": 0, "bucket": "all" }],
        "classes": [
            { "name": "two", "family": "f", "bucket": "all", "requests_per_worker": 2 },
            { "name": "tokens", "prompt_tokens_per_worker": 100 },
            { "name": "cached", "cached_tokens_per_worker": 5 },
            { "name": "never", "requests_per_worker": 0 },
        ],
    }))
    .unwrap();
    let admission = room(0, &config);
    let of = |class: &str, cached_tokens| Turn {
        class: Some(class.into()),
        cached_tokens,
        ..turn(99)
    };
    let table = [
        ("f", 2, LimitKind::Requests, 2, 2),
        ("tokens", 2, LimitKind::PromptTokens, 198, 100),
        ("cached", 1, LimitKind::CachedTokens, 9, 5),
        ("never", 0, LimitKind::Requests, 0, 0),
    ];
    let mut held = Vec::new();
    for (name, fit, kind, current, limit) in table {
        held.extend((0..fit).map(|_| waiting(admission.enter("a".into(), of(name, 9)))));
        let class = if name == "f" { "two" } else { name }.into();
        let retry_after = Duration::from_secs(4);
        let expected = Rejected::Overflow {
            class,
            kind,
            current,
            limit,
            retry_after,
        };
        assert_eq!(rejected(admission.enter("b".into(), of(name, 9))), expected);
    }
    let tallies: Vec<_> = admission
        .standing()
        .into_iter()
        .map(|class| class.tally)
        .collect();
    let over = |tally: &Tally| {
        (
            tally.waited,
            tally.over_requests,
            tally.over_prompt_tokens,
            tally.over_cached_tokens,
        )
    };
    assert_eq!(
        tallies.iter().map(over).collect::<Vec<_>>(),
        [(2, 1, 0, 0), (2, 0, 1, 0), (1, 0, 0, 1), (0, 1, 0, 0)]
    );
    // More workers, more who may wait; and who need not wait is not turned away, though its class may never wait.
    admission.placing().set_workers(2);
    held.push(waiting(admission.enter("a".into(), of("f", 9))));
    held.clear();
    admission.placing().add(1);
    let seat = placed(admission.enter("a".into(), of("never", 9)));
    let waits = waiting(admission.enter("a".into(), of("f", 9)));
    drop(seat);
    waits.placed().await.unwrap();
    assert_eq!(pending(&admission), 0);
}

#[tokio::test(start_paused = true)]
async fn who_need_not_wait_is_not_turned_away_while_others_wait() {
    let class = |name: &str, requests| -> ClassConfig {
        serde_json::from_value(serde_json::json!({ "name": name, "requests_per_worker": requests }))
            .unwrap()
    };
    let config = QueueConfig {
        classes: vec![class("never", Some(0)), class("waits", None)],
        ..gated()
    };
    let admission = Pool::room(0, &config, Prefill::Steady);
    let of = |class: &str, lane| Turn {
        class: Some(class.into()),
        lane,
        ..turn(10)
    };
    let waits = waiting(admission.enter("waits".into(), of("waits", Lane::Shared)));
    admission.placing().add_silently(1);
    // Nobody has told the other that there is room, so it does not compete.
    let seat = placed(admission.enter("never".into(), of("never", Lane::Shared)));
    assert_eq!(seat.name, "never");
    drop(seat);
    assert_eq!(waits.placed().await.unwrap().name, "waits");
}

#[tokio::test(start_paused = true)]
async fn who_waited_long_is_looked_up_again() {
    for (refresh_after, seconds, refreshed) in [(10, 9, 0), (10, 11, 1), (10, 25, 1), (0, 25, 0)] {
        let admission = room(
            0,
            &QueueConfig {
                refresh_after: Period::seconds(refresh_after),
                ..gated()
            },
        );
        let waits = waiting(admission.enter("a".into(), turn(10)));
        tokio::time::advance(Duration::from_secs(seconds)).await;
        admission.placing().add(1);
        assert_eq!(
            waits.placed().await.unwrap().refreshed,
            refreshed,
            "{refresh_after} s, {seconds} s"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn who_waits_on_is_not_looked_up_at_every_nudge() {
    let admission = room(0, &gated());
    let waits = waiting(admission.enter("a".into(), turn(10)));
    for _ in 0..25 {
        tokio::time::advance(Duration::from_secs(1)).await;
        admission.nudge();
        admission.look();
    }
    admission.placing().add(1);
    assert_eq!(waits.placed().await.unwrap().refreshed, 2);
}

#[tokio::test(start_paused = true)]
async fn a_nudge_during_an_attempt_is_not_lost() {
    let early = |times| Job {
        does: Does::ComesEarly(times),
        ..Job::from("early")
    };
    let admission = room(1, &gated());
    // The first attempt is before it waits, the second when it has begun to, all others are nobody's but the nudge's.
    drop(placed(admission.enter(early(1), turn(10))));
    for times in 2..6 {
        let waits = waiting(admission.enter(early(times), turn(10)));
        assert_eq!(waits.placed().await.unwrap().name, "early", "{times}");
    }
}

#[tokio::test(start_paused = true)]
async fn who_stood_behind_one_that_is_gone_goes() {
    for leaves in [true, false] {
        let admission = room(
            1,
            &QueueConfig {
                deadline: Period::seconds(10),
                ..gated()
            },
        );
        let wide = waiting(admission.enter(
            Job {
                does: Does::TakesTwo,
                ..Job::from("wide")
            },
            turn(10),
        ));
        tokio::time::advance(Duration::from_secs(5)).await;
        let narrow = tokio::spawn(waiting(admission.enter("narrow".into(), turn(10))).placed());
        tokio::task::yield_now().await;
        assert_eq!(
            pending(&admission),
            2,
            "a place in the lane is a place in the lane"
        );
        let began = Instant::now();
        if leaves {
            drop(wide);
        } else {
            assert!(matches!(
                wide.placed().await,
                Err(Rejected::Deadline { .. })
            ));
        }
        assert_eq!(narrow.await.unwrap().unwrap().name, "narrow");
        let most = if leaves { 0 } else { 5 };
        assert_eq!(began.elapsed().as_secs(), most, "nobody else nudged");
    }
}

#[tokio::test(start_paused = true)]
async fn a_panic_concerns_one_request_alone() {
    let panics = || Job {
        does: Does::Panics,
        ..Job::from("panics")
    };
    let admission = room(1, &gated());
    assert_eq!(
        rejected(admission.enter(panics(), turn(10))),
        Rejected::Failed
    );
    let seat = placed(admission.enter("a".into(), turn(10)));
    let bad = waiting(admission.enter(panics(), turn(10)));
    let good = waiting(admission.enter("good".into(), turn(10)));
    // Long enough for the refresh to panic as well.
    tokio::time::advance(Duration::from_secs(12)).await;
    drop(seat);
    assert_eq!(good.placed().await.unwrap().name, "good");
    assert_eq!(bad.placed().await.unwrap_err(), Rejected::Failed);
    assert_eq!((pending(&admission), admission.placing().free()), (0, 1));
}

#[tokio::test(start_paused = true)]
async fn where_no_worker_is_left_nobody_waits() {
    let admission = room(0, &gated());
    let waits = waiting(admission.enter("a".into(), turn(10)));
    admission.placing().set_workers(0);
    assert_eq!(
        rejected(admission.enter("b".into(), turn(10))),
        Rejected::Refused("no worker")
    );
    assert_eq!(
        waits.placed().await.unwrap_err(),
        Rejected::Refused("no worker")
    );
    assert_eq!(pending(&admission), 0);
}

#[tokio::test(start_paused = true)]
async fn one_who_looks_does_not_work_for_everybody() {
    let admission = room(0, &gated());
    let all: Vec<_> = (0..100)
        .map(|_| waiting(admission.enter("a".into(), turn(10))))
        .collect();
    admission.placing().add(100);
    admission.look();
    assert_eq!(pending(&admission), 100 - MOST_PER_PASS as u64);
    let mut seats = Vec::new();
    for waits in all {
        seats.push(waits.placed().await.unwrap());
    }
    assert_eq!((pending(&admission), admission.placing().free()), (0, 0));
}

#[tokio::test(start_paused = true)]
async fn classes_share_what_comes_free_by_their_quanta() {
    let class = |name: &str, quantum| -> ClassConfig {
        serde_json::from_value(serde_json::json!({ "name": name, "quantum": quantum })).unwrap()
    };
    let config = QueueConfig {
        classes: vec![class("much", 30), class("little", 10)],
        ..gated()
    };
    let admission = Pool::room(0, &config, Prefill::Steady);
    let wait = |class: &'static str| {
        let turn = Turn {
            class: Some(class.into()),
            ..turn(10)
        };
        tokio::spawn(waiting(admission.enter(class.into(), turn)).placed())
    };
    let tasks: Vec<_> = (0..80)
        .flat_map(|_| [wait("much"), wait("little")])
        .collect();
    for went in 1..=40 {
        admission.placing().add(1);
        until_pending(&admission, 160 - went).await;
    }
    let went: Vec<_> = admission
        .standing()
        .iter()
        .map(|class| 80 - class.pending.requests)
        .collect();
    // Their tasks hold what they got.
    assert_eq!(went, [30, 10]);
    tasks.iter().for_each(|task| task.abort());
}
