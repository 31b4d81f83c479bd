use axum::Router;
use axum::extract::State;
use axum::http::HeaderMap;
use axum::routing::post;
use reqwest::header::AUTHORIZATION;
use tokio::net::TcpListener;
use tokio::sync::mpsc;
use tokio::time::timeout;
use warmroute_metrics::OutcomeLabel;
use warmroute_settings::DurationSetting;

use super::*;

const LONG: Duration = Duration::from_secs(60);

/// One received abort: body, authorization, time.
type ReceivedAbort = (String, Option<HeaderValue>, Instant);

/// Returns an engine with a response delay.
async fn engine(delay: Duration) -> (WorkerEndpoint, mpsc::UnboundedReceiver<ReceivedAbort>) {
    let (abort_tx, abort_rx) = mpsc::unbounded_channel();
    let answer = async move |State(abort_tx): State<mpsc::UnboundedSender<ReceivedAbort>>,
                             headers: HeaderMap,
                             body: String| {
        _ = abort_tx.send((body, headers.get(AUTHORIZATION).cloned(), Instant::now()));
        tokio::time::sleep(delay).await;
    };
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let worker = WorkerEndpoint(listener.local_addr().unwrap());
    let routes = Router::new()
        .route("/abort_request", post(answer))
        .with_state(abort_tx);
    tokio::spawn(async { axum::serve(listener, routes).await });
    (worker, abort_rx)
}

fn new_client(engines: EnginesConfig) -> (Arc<AbortClient>, Arc<Metrics>, TaskTracker) {
    let metrics = Arc::new(Metrics::default());
    let tasks = TaskTracker::new();
    let engines = EnginesConfig {
        timeout: DurationSetting(LONG),
        ..engines
    };
    (
        AbortClient::new(&engines, metrics.clone(), tasks.clone()).unwrap(),
        metrics,
        tasks,
    )
}

fn count_aborts(metrics: &Metrics, outcome: &'static str) -> u64 {
    metrics
        .prefill
        .aborts
        .get_or_create(&OutcomeLabel { outcome })
        .get()
}

fn request_id(number: usize) -> Option<Arc<str>> {
    Some(format!("warmroute-{number}").into())
}

async fn next(abort_rx: &mut mpsc::UnboundedReceiver<ReceivedAbort>) -> ReceivedAbort {
    timeout(LONG, abort_rx.recv())
        .await
        .expect("an abort is received")
        .unwrap()
}

#[tokio::test]
async fn abort_is_repeated_and_counted_once() {
    let (worker, mut abort_rx) = engine(Duration::ZERO).await;
    let (aborts, metrics, tasks) = new_client(EnginesConfig::default());
    let started = Instant::now();
    let abort = tokio::spawn(aborts.abort(worker, request_id(1), None));
    tasks.close();
    let mut shutdown_at = None;
    for (sent, delay) in SEND_DELAYS.into_iter().enumerate() {
        let (body, _, at) = next(&mut abort_rx).await;
        let body: serde_json::Value = serde_json::from_str(&body).unwrap();
        assert_eq!(body, json!({"rid": "warmroute-1", "abort_all": false}));
        assert!(
            at >= started + delay && at < started + delay + Duration::from_secs(5),
            "{delay:?}: {:?}",
            at - started
        );
        if sent + 1 == SENDS_BEFORE_SHUTDOWN {
            timeout(LONG, tasks.wait())
                .await
                .expect("shutdown waits for no further aborts");
            shutdown_at = Some(Instant::now());
        }
    }
    assert!(shutdown_at.unwrap() >= started + SEND_DELAYS[SENDS_BEFORE_SHUTDOWN - 1]);
    timeout(LONG, abort)
        .await
        .expect("no further abort")
        .unwrap();
    assert!(abort_rx.try_recv().is_err());
    assert_eq!(count_aborts(&metrics, "accepted"), 1);
}

#[tokio::test]
async fn client_request_id_is_not_aborted() {
    let (worker, mut abort_rx) = engine(Duration::ZERO).await;
    let (aborts, metrics, _) = new_client(EnginesConfig::default());
    aborts.abort(worker, None, None).await;
    assert!(abort_rx.try_recv().is_err());
    assert_eq!(
        (
            count_aborts(&metrics, "client_request_id"),
            count_aborts(&metrics, "accepted")
        ),
        (1, 0)
    );
}

#[tokio::test]
async fn unsupported_abort_is_not_repeated() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let worker = WorkerEndpoint(listener.local_addr().unwrap());
    tokio::spawn(async { axum::serve(listener, Router::new()).await });
    let (aborts, metrics, _) = new_client(EnginesConfig::default());
    let started = Instant::now();
    aborts.abort(worker, request_id(1), None).await;
    assert!(started.elapsed() < SEND_DELAYS[3]);
    assert_eq!(count_aborts(&metrics, "not_offered"), 1);
}

#[tokio::test]
async fn many_concurrent_aborts_are_all_sent() {
    let (worker, mut abort_rx) = engine(Duration::from_millis(10)).await;
    let (aborts, metrics, _) = new_client(EnginesConfig {
        max_concurrency: 1,
        ..EnginesConfig::default()
    });
    let abort: Vec<_> = (0..300)
        .map(|number| tokio::spawn(aborts.clone().abort(worker, request_id(number), None)))
        .collect();
    let mut bodies = std::collections::BTreeSet::new();
    while bodies.len() < 300 {
        bodies.insert(next(&mut abort_rx).await.0);
    }
    let all_counted = async {
        while count_aborts(&metrics, "accepted") < 300 {
            tokio::task::yield_now().await
        }
    };
    timeout(LONG, all_counted)
        .await
        .expect("all aborts are counted");
    assert_eq!(
        (
            count_aborts(&metrics, "busy"),
            count_aborts(&metrics, "overflow")
        ),
        (0, 0)
    );
    abort.iter().for_each(tokio::task::JoinHandle::abort);
}

#[tokio::test]
async fn hanging_engine_delays_no_other_engine() {
    let (hanging, _abort_rx) = engine(LONG * 2).await;
    let (worker, mut abort_rx) = engine(Duration::ZERO).await;
    let (aborts, metrics, _) = new_client(EnginesConfig::default());
    let mut waiting = tokio::task::JoinSet::new();
    for number in 0..MAX_QUEUED_ABORTS {
        waiting.spawn(aborts.clone().abort(hanging, request_id(number), None));
    }
    aborts
        .clone()
        .abort(hanging, request_id(MAX_QUEUED_ABORTS), None)
        .await;
    assert_eq!(count_aborts(&metrics, "overflow"), 1);
    waiting.spawn(aborts.clone().abort(worker, request_id(0), None));
    next(&mut abort_rx).await;
    // A cancelled abort frees its slot.
    waiting.shutdown().await;
    assert_eq!(
        aborts.limits_of(hanging).queue_permits.available_permits(),
        MAX_QUEUED_ABORTS
    );
    aborts.limits_of(worker);
    assert!(aborts.limits_by_worker.lock().len() <= 2);
}

#[tokio::test]
async fn aborts_use_configured_token_or_client_credentials() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("token");
    std::fs::write(&path, "ours").unwrap();
    let (worker, mut abort_rx) = engine(Duration::ZERO).await;
    let client_credentials = HeaderValue::from_static("Bearer theirs");
    for (token_file, credentials_sent, expected) in [
        (None, None, None),
        (
            None,
            Some(client_credentials.clone()),
            Some("Bearer theirs"),
        ),
        (
            Some(path.clone()),
            Some(client_credentials),
            Some("Bearer ours"),
        ),
        (Some(path), None, Some("Bearer ours")),
    ] {
        let (aborts, ..) = new_client(EnginesConfig {
            token_file,
            ..EnginesConfig::default()
        });
        let abort = tokio::spawn(aborts.abort(worker, request_id(1), credentials_sent));
        let (_, credentials, _) = next(&mut abort_rx).await;
        assert_eq!(
            credentials.as_ref().map(|value| value.to_str().unwrap()),
            expected
        );
        abort.abort();
    }
}
