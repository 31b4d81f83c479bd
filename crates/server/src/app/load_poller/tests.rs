//! Scrapes of real HTTP servers on the loopback interface.

use std::sync::atomic::AtomicUsize;
use std::time::Instant;

use axum::http::StatusCode;
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use warmroute_core::index::PrefixIndex;
use warmroute_core::load::{LoadTracker, RankEngineLoad};
use warmroute_core::router::RouterSettings;
use warmroute_core::worker::{BlockSize, Worker, WorkerEndpoint, WorkerId};
use warmroute_engines::engine_client::EngineClient;
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_settings::DurationSetting;

use super::*;

/// Time within which an expected state is reached.
const PATIENCE: Duration = Duration::from_secs(20);

/// Response of a test engine.
#[derive(Clone)]
enum TestPage {
    Text(StatusCode, String),
    /// No response.
    Silence,
}

/// An engine with a metrics page. It ends with the test.
struct TestEngine {
    endpoint: WorkerEndpoint,
    page: Arc<Mutex<TestPage>>,
    requests: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl Drop for TestEngine {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn vllm(running: u64, waiting: u64) -> TestPage {
    let text = format!(
        "vllm:num_requests_running{{engine=\"0\"}} {running}.0\nvllm:num_requests_waiting{{engine=\"0\"}} {waiting}.0\n\
         vllm:kv_cache_usage_perc{{engine=\"0\"}} 0.5\n"
    );
    TestPage::Text(StatusCode::OK, text)
}

impl TestEngine {
    async fn start(page: TestPage) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = WorkerEndpoint(listener.local_addr().unwrap());
        let page = Arc::new(Mutex::new(page));
        let requests = Arc::new(AtomicUsize::new(0));
        let served = (page.clone(), requests.clone());
        let respond = async move || {
            served.1.fetch_add(1, Ordering::Relaxed);
            let page = served.0.lock().clone();
            match page {
                TestPage::Text(status, text) => (status, text),
                TestPage::Silence => future::pending().await,
            }
        };
        let routes = axum::Router::new().route("/metrics", axum::routing::get(respond));
        Self {
            endpoint,
            page,
            requests,
            task: tokio::spawn(async move { axum::serve(listener, routes).await.unwrap() }),
        }
    }

    fn requests(&self) -> usize {
        self.requests.load(Ordering::Relaxed)
    }
}

/// A router with these workers, and a running poller.
struct TestPoller {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    config_tx: watch::Sender<Arc<LoadPollConfig>>,
    task: JoinHandle<anyhow::Result<()>>,
}

impl Drop for TestPoller {
    fn drop(&mut self) {
        self.task.abort();
    }
}

fn settings() -> EngineLoadConfig {
    EngineLoadConfig {
        interval: DurationSetting::millis(100),
        ..EngineLoadConfig::default()
    }
}

fn router(engines: &[WorkerEndpoint]) -> Arc<Router> {
    let load = LoadTracker::new(Instant::now);
    let router = Router::new(PrefixIndex::new(), load, RouterSettings::default(), 1);
    let worker = |(id, endpoint): (usize, &WorkerEndpoint)| {
        let size = BlockSize::new(16).unwrap();
        Worker::new(WorkerId(id as u64), *endpoint, "m".into(), size)
    };
    router.set_workers(engines.iter().enumerate().map(worker));
    Arc::new(router)
}

impl TestPoller {
    fn start(engines: &[&TestEngine], settings: EngineLoadConfig) -> Self {
        let endpoints: Vec<_> = engines.iter().map(|engine| engine.endpoint).collect();
        let router = router(&endpoints);
        let engines = EnginesConfig::default();
        let (config_tx, config_rx) = watch::channel(Arc::new(LoadPollConfig {
            settings,
            client: EngineClient::new(&engines).unwrap(),
            engines,
        }));
        let metrics = Arc::new(Metrics::new());
        Self {
            task: tokio::spawn(run(router.clone(), metrics.clone(), config_rx)),
            router,
            metrics,
            config_tx,
        }
    }

    fn loads(&self) -> Vec<RankEngineLoad> {
        let load = self.router.load();
        load.engine_loads().snapshot(load.now())
    }

    fn outcomes(&self, outcome: &'static str) -> u64 {
        let label = warmroute_metrics::OutcomeLabel { outcome };
        self.metrics
            .workers
            .engine_load_scrapes
            .get_or_create(&label)
            .get()
    }
}

async fn until(expected: &str, mut condition: impl FnMut() -> bool) {
    let end = Instant::now() + PATIENCE;
    while !condition() {
        assert!(Instant::now() < end, "not within {PATIENCE:?}: {expected}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test]
async fn restarted_server_sees_busy_engine() {
    let engine = TestEngine::start(vllm(7, 2)).await;
    let poller = TestPoller::start(&[&engine], settings());
    until("a report", || !poller.loads().is_empty()).await;
    let load = poller.loads()[0];
    assert_eq!((load.report.running, load.report.waiting), (7, 2));
    assert_eq!((load.drift, load.unbooked_requests), (9, 9));
    assert_eq!(load.report.kv_usage, Some(0.5));
    *engine.page.lock() = vllm(0, 0);
    until("an idle engine", || {
        poller.loads()[0].unbooked_requests == 0
    })
    .await;
}

#[tokio::test]
async fn slow_engine_neither_counts_nor_delays_others() {
    let slow = TestEngine::start(TestPage::Silence).await;
    let fast = TestEngine::start(vllm(1, 0)).await;
    let poller = TestPoller::start(&[&slow, &fast], settings());
    until("timeouts", || poller.outcomes("timeout") >= 2).await;
    assert!(poller.outcomes("ok") >= 3);
    assert_eq!(poller.loads().len(), 1);
    *slow.page.lock() = vllm(3, 0);
    until("a report of the recovered engine", || {
        poller.loads().len() == 2
    })
    .await;
}

#[tokio::test]
async fn report_expires_when_engine_stops_responding() {
    let engine = TestEngine::start(vllm(4, 0)).await;
    let poller = TestPoller::start(&[&engine], settings());
    until("a report", || !poller.loads().is_empty()).await;
    *engine.page.lock() = TestPage::Silence;
    until("no report", || poller.loads().is_empty()).await;
}

#[tokio::test]
async fn engine_without_counters_is_rarely_scraped() {
    let missing = TestEngine::start(TestPage::Text(StatusCode::NOT_FOUND, String::new())).await;
    let other = TestPage::Text(StatusCode::OK, "python_info 1.0\n".to_owned());
    let other = TestEngine::start(other).await;
    let poller = TestPoller::start(&[&missing, &other], settings());
    until("both outcomes", || {
        poller.outcomes("not_offered") + poller.outcomes("no_gauges") == 2
    })
    .await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    assert_eq!((missing.requests(), other.requests()), (1, 1));
    assert_eq!(
        (poller.outcomes("not_offered"), poller.loads().len()),
        (1, 0)
    );
}

#[tokio::test]
async fn changed_settings_apply_at_once() {
    let engine = TestEngine::start(vllm(1, 0)).await;
    let disabled = EngineLoadConfig {
        enabled: false,
        ..settings()
    };
    let poller = TestPoller::start(&[&engine], disabled);
    tokio::time::sleep(Duration::from_millis(300)).await;
    assert_eq!(engine.requests(), 0);
    poller.config_tx.send_modify(|config| {
        let enabled = LoadPollConfig {
            settings: settings(),
            ..LoadPollConfig::clone(config)
        };
        *config = Arc::new(enabled);
    });
    until("a report", || !poller.loads().is_empty()).await;
}

#[tokio::test]
async fn fleet_changes_start_and_end_tasks() {
    let first = TestEngine::start(vllm(1, 0)).await;
    let second = TestEngine::start(vllm(2, 0)).await;
    let poller = TestPoller::start(&[&first], settings());
    until("a report", || first.requests() > 0).await;
    poller.router.set_fleet(router(&[second.endpoint]).fleet());
    until("the new engine", || second.requests() > 0).await;
    let ended = first.requests();
    tokio::time::sleep(Duration::from_millis(400)).await;
    assert_eq!(first.requests(), ended);
}
