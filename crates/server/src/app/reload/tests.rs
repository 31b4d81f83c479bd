//! Reloads of engine polling and self-tests in a running process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router as Routes;
use axum::http::{HeaderMap, StatusCode, Uri};
use serde_json::json;
use tokio::net::TcpListener;
use warmroute_core::engine_settings::SettingMismatch;
use warmroute_core::parity::CanaryVerdict;
use warmroute_core::worker::{WorkerId, WorkerRank};

use super::*;
use crate::REPOSITORY;
use crate::app::{App, NoExternalDiscovery, ProcessOrigin};

const SOON: Duration = Duration::from_secs(30);
const ONE: WorkerId = WorkerId(1);

/// A simulated engine.
#[derive(Default)]
struct Engine {
    /// Required bearer token.
    token: Option<&'static str>,
    /// True if it does not respond.
    hangs: AtomicBool,
    /// Port of its KV events, if it reports one.
    event_port: Option<u16>,
    /// Number of settings queries.
    queries: AtomicUsize,
}

impl Engine {
    /// Starts to serve and returns the address.
    async fn serve(self: &Arc<Self>) -> std::net::SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let engine = self.clone();
        let answer = move |headers: HeaderMap, uri: Uri| {
            let engine = engine.clone();
            async move { engine.answer(&headers, uri.path()).await }
        };
        tokio::spawn(async move {
            axum::serve(listener, Routes::new().fallback(answer))
                .await
                .unwrap()
        });
        address
    }

    async fn answer(&self, headers: &HeaderMap, path: &str) -> (StatusCode, String) {
        let required = self.token.map(|token| format!("Bearer {token}"));
        let is_unauthorized = required.is_some_and(|required| {
            headers
                .get("authorization")
                .is_none_or(|given| *given != *required)
        });
        if path == "/metrics" {
            self.queries.fetch_add(1, Ordering::SeqCst);
        }
        while self.hangs.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let page = match path {
            _ if is_unauthorized => return (StatusCode::UNAUTHORIZED, String::new()),
            "/metrics" => {
                "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n".to_owned()
            }
            "/v1/models" => {
                json!({"data": [{"id": "m", "root": "org/m", "parent": null, "max_model_len": 4096}]}).to_string()
            }
            "/kv_event_sources" => match self.event_port {
                Some(port) => {
                    let endpoint = format!("tcp://*:{port}");
                    json!({"0": {"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": endpoint}}).to_string()
                }
                None => "{}".to_owned(),
            },
            _ => return (StatusCode::NOT_FOUND, String::new()),
        };
        (StatusCode::OK, page)
    }
}

fn config(workers: &[std::net::SocketAddr], extra: &str) -> Config {
    let model = if extra.contains("models:") {
        ""
    } else {
        "models: [{name: m}]\n"
    };
    let engines = if extra.contains("engines:") {
        ""
    } else {
        "engines: {discovery: {interval: 1h}, load: {enabled: false}}\n"
    };
    let workers: Vec<_> = (1..)
        .zip(workers)
        .map(|(id, address)| format!("{{id: {id}, model: m, endpoint: '{address}'}}"))
        .collect();
    let text = format!(
        "listeners: {{ext_proc: {{address: '127.0.0.1:0'}}, admin: {{address: '127.0.0.1:0'}}}}\n{engines}{model}workers: {{list: [{}]}}\n{extra}",
        workers.join(", ")
    );
    Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes())
        .unwrap_or_else(|error| panic!("{error:?}"))
}

fn with_tokenizer(extra: &str) -> String {
    tokenizer_of("tinyllama", extra)
}

fn tokenizer_of(model: &str, extra: &str) -> String {
    let files = format!("{REPOSITORY}/examples/models/{model}");
    format!("models: [{{name: m, tokenizer: {files}/tokenizer.json.gz}}]\n{extra}")
}

async fn wait_until(event: &str, condition: impl Fn() -> bool) {
    let waited = tokio::time::timeout(SOON, async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "{event}");
}

async fn start(config: Config) -> App {
    let discovery = Arc::new(NoExternalDiscovery);
    let start = App::start(config, discovery, ProcessOrigin::default());
    Box::pin(start).await.unwrap()
}

async fn reload(app: &App, config: Config) {
    // Boxed, because the configuration would make the future of each caller large.
    Box::pin(app.reloader.reload(Ok(config))).await;
    assert_eq!(app.reloader.status().last_reload.outcome, "applied");
}

fn mismatches(router: &Router) -> Vec<SettingMismatch> {
    router
        .sources()
        .engine_settings(ONE)
        .map(|(_, mismatches)| mismatches)
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_token_reload_reaches_running_pollers() {
    let engine = Arc::new(Engine {
        token: Some("letmein"),
        ..Engine::default()
    });
    let address = engine.serve().await;
    let directory = tempfile::tempdir().unwrap();
    let token = directory.path().join("token");
    std::fs::write(&token, "letmein").unwrap();
    let app = start(config(&[address], &with_tokenizer(""))).await;
    let router = app.reloader.router.clone();
    let failure_reason = || {
        let parity = router
            .parity()
            .model_status(&"m".into())
            .map(|status| status.parity())
            .unwrap_or_default();
        match parity.workers.get(&ONE).map(|known| known.canaries.clone()) {
            Some(CanaryVerdict::CannotTest { reason, .. }) => reason,
            _ => String::new(),
        }
    };
    wait_until("the self-test reports the missing token", || {
        failure_reason().contains("engines.http.token_file")
    })
    .await;
    assert!(router.sources().engine_settings(ONE).is_none());
    let extra = format!("engines: {{http: {{token_file: {}}}}}\n", token.display());
    reload(&app, config(&[address], &with_tokenizer(&extra))).await;
    wait_until("the settings are queried", || {
        router.sources().engine_settings(ONE).is_some()
    })
    .await;
    wait_until("the self-test sends the token", || {
        failure_reason().contains("offers neither")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_settings_follow_reload() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = start(config(&[address], "")).await;
    let router = app.reloader.router.clone();
    let capacity = || {
        router
            .fleet()
            .worker(ONE)
            .and_then(|worker| worker.capacity.total_kv_blocks)
    };
    wait_until("the settings are queried", || capacity() == Some(100)).await;
    let common = || {
        router
            .sources()
            .common_settings
            .load()
            .get(&"m".into())
            .cloned()
            .unwrap_or_default()
    };
    assert_eq!(
        (common().root.as_deref(), common().max_model_len),
        (Some("org/m"), Some(4096))
    );

    // Engines are compared with the new configuration.
    reload(
        &app,
        config(&[address], "models: [{name: m, block_size: 32}]\n"),
    )
    .await;
    let is_mismatch = |setting| {
        mismatches(&router)
            .iter()
            .any(|found| found.setting == setting)
    };
    wait_until("the block size mismatch is found", || {
        is_mismatch("block_size") && capacity() == Some(50)
    })
    .await;
    reload(&app, config(&[address], &other_model_files())).await;
    wait_until("the model mismatch is found", || {
        is_mismatch("multimodal.model") && !is_mismatch("block_size")
    })
    .await;

    // If polling is disabled, the settings are removed.
    let without_polling = |mut config: Config| {
        config.engines.discovery.enabled = false;
        config
    };
    reload(&app, without_polling(config(&[address], ""))).await;
    wait_until("the settings are removed", || {
        capacity().is_none() && router.sources().engine_settings(ONE).is_none()
    })
    .await;
    reload(&app, config(&[address], "")).await;
    wait_until("the settings are queried again", || capacity() == Some(100)).await;
}

/// Returns a configuration of models whose multimodal model differs from that of the engine.
fn other_model_files() -> String {
    let media = "multimodal: {model: other, image: {token: '<s>', tokens_per_item: 4}}";
    let files = format!("tokenizer: {REPOSITORY}/examples/models/tinyllama/tokenizer.json.gz");
    format!("models: [{{name: m, {files}, {media}}}]\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_level_change_repeats_no_self_test() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = start(config(&[address], &with_tokenizer(""))).await;
    let before = app.reloader.suites();
    let client = app.reloader.client();
    reload(
        &app,
        config(
            &[address],
            &with_tokenizer("process: {log: {level: debug}}\n"),
        ),
    )
    .await;
    let after = app.reloader.suites();
    assert_eq!((before.len(), after.len()), (1, 1));
    assert!(
        Arc::ptr_eq(&before[&"m".into()], &after[&"m".into()]),
        "canaries were tokenized again"
    );
    assert!(
        app.reloader.client() == client,
        "the engine client was replaced"
    );
    reload(
        &app,
        config(
            &[address],
            &with_tokenizer("engines: {parity_check: {enabled: false}}\n"),
        ),
    )
    .await;
    assert!(app.reloader.suites().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokenizer_change_clears_findings() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = start(config(&[address], &with_tokenizer(""))).await;
    let status = || {
        app.reloader
            .router
            .parity()
            .model_status(&"m".into())
            .unwrap()
    };
    let label = || {
        status()
            .parity()
            .workers
            .get(&ONE)
            .map(|known| known.canaries.label())
    };
    wait_until("the engine cannot be tested", || {
        label() == Some("cannot_test")
    })
    .await;
    status().record_canaries(
        ONE,
        CanaryVerdict::Agrees {
            compared: 1,
            skipped: Default::default(),
        },
    );
    // The engine cannot be queried, so its finding stays until the local tokenizer changes.
    reload(&app, config(&[address], &tokenizer_of("qwen2.5", ""))).await;
    wait_until("the finding is cleared", || label() != Some("agrees")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hanging_worker_does_not_delay_queries_of_others() {
    let hanging = Arc::new(Engine::default());
    let new_engine = Arc::new(Engine::default());
    hanging.hangs.store(true, Ordering::SeqCst);
    let first = hanging.serve().await;
    let second = new_engine.serve().await;
    let patient = "engines: {http: {timeout: 1h}, load: {enabled: false}}\nprocess: {readiness: {event_sources_timeout: 1h}}\n";
    let app = start(config(&[first], patient)).await;
    let router = app.reloader.router.clone();
    wait_until("the first engine is queried", || {
        hanging.queries.load(Ordering::SeqCst) == 1
    })
    .await;
    reload(&app, config(&[first, second], patient)).await;
    wait_until("the settings of the new worker are known", || {
        router.sources().engine_settings(WorkerId(2)).is_some()
    })
    .await;
    // Readiness waits for the first engine, which is an initial worker and does not respond.
    assert!(
        app.readiness
            .pending()
            .iter()
            .any(|pending| pending.contains("settings of the initial workers"))
    );

    let query_count = || new_engine.queries.load(Ordering::SeqCst);
    assert_eq!(query_count(), 1, "the next query is due in an hour");
    let rank = WorkerRank::new(2, 0);
    let mut source = warmroute_core::freshness::EventSourceState::new(Default::default());
    source.record_restart();
    router
        .sources()
        .register(rank, Arc::new(parking_lot::Mutex::new(source)));
    wait_until("a restarted engine is queried again", || query_count() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_waits_for_event_sources_reported_by_engines() {
    let unused_listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let event_port = Some(unused_listener.local_addr().unwrap().port());
    let engine = Arc::new(Engine {
        event_port,
        ..Engine::default()
    });
    engine.hangs.store(true, Ordering::SeqCst);
    let address = engine.serve().await;
    let patient = "engines: {http: {timeout: 1h}, load: {enabled: false}}\nprocess: {readiness: {event_sources_timeout: 1h}}\n";
    let app = start(config(&[address], patient)).await;
    let pending = || app.readiness.pending();
    let waits_for = |step: &str| pending().iter().any(|pending| pending.contains(step));
    wait_until("the engine is queried", || {
        engine.queries.load(Ordering::SeqCst) > 0
    })
    .await;
    assert!(
        waits_for("settings of the initial workers"),
        "{:?}",
        pending()
    );
    engine.hangs.store(false, Ordering::SeqCst);
    wait_until("readiness waits for the event source", || {
        waits_for("event source of worker rank 1/0")
    })
    .await;
    wait_until("readiness no longer waits for the settings", || {
        !waits_for("settings of the initial workers")
    })
    .await;
    // Readiness does not wait for an engine whose responses are errors.
    let unauthorized = Arc::new(Engine {
        token: Some("letmein"),
        ..Engine::default()
    });
    let address = unauthorized.serve().await;
    let app = start(config(&[address], patient)).await;
    wait_until("the failed query ends the startup step", || {
        app.readiness.pending().is_empty()
    })
    .await;
}
