use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use reqwest::header::AUTHORIZATION;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::*;
use crate::settings::Period;

const LONG: Duration = Duration::from_secs(60);

/// What an engine was told, and when.
type Told = (String, Option<HeaderValue>, Instant);

/// An engine that takes its time for each answer.
async fn engine(takes: Duration) -> (Endpoint, mpsc::UnboundedReceiver<Told>) {
    let (tell, told) = mpsc::unbounded_channel();
    let answer = async move |State(tell): State<mpsc::UnboundedSender<Told>>,
                             headers: HeaderMap,
                             body: String| {
        _ = tell.send((body, headers.get(AUTHORIZATION).cloned(), Instant::now()));
        tokio::time::sleep(takes).await;
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let worker = Endpoint(listener.local_addr().unwrap());
    let routes = Router::new()
        .route("/abort_request", post(answer))
        .with_state(tell);
    tokio::spawn(async { axum::serve(listener, routes).await });
    (worker, told)
}

fn aborts(engines: EnginesConfig) -> (Arc<Aborts>, Arc<Metrics>, TaskTracker) {
    let (metrics, under_way) = (Arc::new(Metrics::default()), TaskTracker::new());
    let engines = EnginesConfig {
        deadline: Period(LONG),
        ..engines
    };
    (
        Aborts::tracked(&engines, metrics.clone(), under_way.clone()).unwrap(),
        metrics,
        under_way,
    )
}

fn counted(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .prefill_aborts
        .get_or_create(&OutcomeLabel { outcome })
        .get()
}

fn ours(number: usize) -> Option<Arc<str>> {
    Some(format!("warmroute-{number}").into())
}

async fn next(told: &mut mpsc::UnboundedReceiver<Told>) -> Told {
    timeout(LONG, told.recv())
        .await
        .expect("it is told")
        .unwrap()
}

#[tokio::test]
async fn an_engine_is_told_again_because_the_request_may_only_be_coming_and_counts_once() {
    let (worker, mut told) = engine(Duration::ZERO).await;
    let (aborts, metrics, under_way) = aborts(EnginesConfig::default());
    let began = Instant::now();
    let telling = tokio::spawn(aborts.abort(worker, ours(1), None));
    under_way.close();
    let mut over = None;
    for (said, after) in WORDS.into_iter().enumerate() {
        let (body, _, at) = next(&mut told).await;
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body, json!({"rid": "warmroute-1", "abort_all": false}));
        assert!(
            at >= began + after && at < began + after + Duration::from_secs(5),
            "{after:?}: {:?}",
            at - began
        );
        if said + 1 == WAITED_FOR {
            timeout(LONG, under_way.wait())
                .await
                .expect("the end of the process waits no longer");
            over = Some(Instant::now());
        }
    }
    assert!(over.unwrap() >= began + WORDS[WAITED_FOR - 1]);
    timeout(LONG, telling).await.expect("that is all").unwrap();
    assert!(told.try_recv().is_err());
    assert_eq!(counted(&metrics, "told"), 1);
}

#[tokio::test]
async fn a_name_that_a_client_chose_is_not_told() {
    let (worker, mut told) = engine(Duration::ZERO).await;
    let (aborts, metrics, _) = aborts(EnginesConfig::default());
    aborts.abort(worker, None, None).await;
    assert!(told.try_recv().is_err());
    assert_eq!(
        (counted(&metrics, "not_ours"), counted(&metrics, "told")),
        (1, 0)
    );
}

#[tokio::test]
async fn who_does_not_know_the_call_is_told_once() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let worker = Endpoint(listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, Router::new()).await });
    let (aborts, metrics, _) = aborts(EnginesConfig::default());
    let began = Instant::now();
    aborts.abort(worker, ours(1), None).await;
    assert!(began.elapsed() < WORDS[3]);
    assert_eq!(counted(&metrics, "not_offered"), 1);
}

#[tokio::test]
async fn when_all_clients_leave_at_once_every_request_is_aborted_whatever_else_engines_are_asked() {
    let (worker, mut told) = engine(Duration::from_millis(10)).await;
    let (aborts, metrics, _) = aborts(EnginesConfig {
        in_flight: 1,
        ..EnginesConfig::default()
    });
    let telling: Vec<_> = (0..300)
        .map(|number| tokio::spawn(aborts.clone().abort(worker, ours(number), None)))
        .collect();
    let mut named = std::collections::BTreeSet::new();
    while named.len() < 300 {
        named.insert(next(&mut told).await.0);
    }
    let all = async {
        while counted(&metrics, "told") < 300 {
            tokio::task::yield_now().await
        }
    };
    timeout(LONG, all).await.expect("all are counted");
    assert_eq!(
        (counted(&metrics, "busy"), counted(&metrics, "overflow")),
        (0, 0)
    );
    telling.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn an_engine_that_hangs_delays_no_other_and_what_waits_for_it_is_bounded() {
    let (hangs, _told) = engine(LONG * 2).await;
    let (worker, mut told) = engine(Duration::ZERO).await;
    let (aborts, metrics, _) = aborts(EnginesConfig::default());
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..MOST {
        waiting.spawn(aborts.clone().abort(hangs, ours(number), None));
    }
    aborts.clone().abort(hangs, ours(MOST), None).await;
    assert_eq!(counted(&metrics, "overflow"), 1);
    waiting.spawn(aborts.clone().abort(worker, ours(0), None));
    next(&mut told).await;
    // Who is given up makes room.
    waiting.shutdown().await;
    assert_eq!(aborts.lane(hangs).room.available_permits(), MOST);
    aborts.lane(worker);
    assert!(aborts.lanes.lock().len() <= 2);
}

#[tokio::test]
async fn engines_are_told_with_our_token_and_else_with_the_clients_own() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("token");
    std::fs::write(&path, "ours").unwrap();
    let (worker, mut told) = engine(Duration::ZERO).await;
    let theirs = HeaderValue::from_static("Bearer theirs");
    for (token_file, brought, expected) in [
        (None, None, None),
        (None, Some(theirs.clone()), Some("Bearer theirs")),
        (Some(path.clone()), Some(theirs), Some("Bearer ours")),
        (Some(path), None, Some("Bearer ours")),
    ] {
        let (aborts, ..) = aborts(EnginesConfig {
            token_file,
            ..EnginesConfig::default()
        });
        let telling = tokio::spawn(aborts.abort(worker, ours(1), brought));
        let (_, credentials, _) = next(&mut told).await;
        assert_eq!(
            credentials.as_ref().map(|value| value.to_str().unwrap()),
            expected
        );
        telling.abort();
    }
}
