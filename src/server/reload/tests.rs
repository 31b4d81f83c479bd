//! Reloads of engine polling and self-tests in a running process.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router as Routes;
use axum::http::{HeaderMap, StatusCode, Uri};
use tokio::net::TcpListener;
use warmroute_core::engine_settings::SettingMismatch;
use warmroute_core::parity::CanaryVerdict;
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};

use super::*;
use crate::server::App;

const SOON: Duration = Duration::from_secs(30);
const ONE: WorkerId = WorkerId(1);

/// A simulated engine.
#[derive(Default)]
struct Engine {
    /// Required bearer token.
    token: Option<&'static str>,
    /// True if it does not answer.
    hangs: AtomicBool,
    /// Port of its KV events.
    publishes: Option<u16>,
    /// Number of settings queries.
    asked: AtomicUsize,
}

impl Engine {
    /// Starts to serve. Returns the address.
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
        let wanted = self.token.map(|token| format!("Bearer {token}"));
        let denied = wanted.is_some_and(|wanted| {
            headers
                .get("authorization")
                .is_none_or(|given| *given != *wanted)
        });
        if path == "/metrics" {
            self.asked.fetch_add(1, Ordering::SeqCst);
        }
        while self.hangs.load(Ordering::SeqCst) {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
        let page = match path {
            _ if denied => return (StatusCode::UNAUTHORIZED, String::new()),
            "/metrics" => {
                "vllm:cache_config_info{block_size=\"16\",engine=\"0\",num_gpu_blocks=\"100\"} 1.0\n".to_owned()
            }
            "/v1/models" => {
                json!({"data": [{"id": "m", "root": "org/m", "parent": null, "max_model_len": 4096}]}).to_string()
            }
            "/kv_event_sources" => match self.publishes {
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

fn config(workers: &[std::net::SocketAddr], more: &str) -> Config {
    let model = if more.contains("models:") {
        ""
    } else {
        "models: [{name: m}]\n"
    };
    let engines = if more.contains("engines:") {
        ""
    } else {
        "engines: {discovery: {interval: 1h}}\n"
    };
    let workers: Vec<_> = (1..)
        .zip(workers)
        .map(|(id, address)| format!("{{id: {id}, model: m, endpoint: '{address}'}}"))
        .collect();
    let text = format!(
        "listeners: {{ext_proc: {{address: '127.0.0.1:0'}}, admin: {{address: '127.0.0.1:0'}}}}\n{engines}{model}workers: {{list: [{}]}}\n{more}",
        workers.join(", ")
    );
    Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes())
        .unwrap_or_else(|error| panic!("{error:?}"))
}

fn with_tokenizer(more: &str) -> String {
    tokenizer_of("tinyllama", more)
}

fn tokenizer_of(model: &str, more: &str) -> String {
    let files = format!("{}/examples/models/{model}", env!("CARGO_MANIFEST_DIR"));
    format!("models: [{{name: m, tokenizer: {files}/tokenizer.json.gz}}]\n{more}")
}

async fn until(what: &str, met: impl Fn() -> bool) {
    let waited = tokio::time::timeout(SOON, async {
        while !met() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    });
    assert!(waited.await.is_ok(), "{what}");
}

async fn reload(app: &App, config: Config) {
    // Boxed, because the configuration would make the future of each caller large.
    let reloaded = Box::pin(app.reloader.reload(Ok(config))).await;
    assert!(
        matches!(reloaded, ReloadOutcome::Applied { .. }),
        "{reloaded:?}"
    );
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
    let folder = tempfile::tempdir().unwrap();
    let token = folder.path().join("token");
    std::fs::write(&token, "letmein").unwrap();
    let app = App::start(config(&[address], &with_tokenizer("")))
        .await
        .unwrap();
    let router = app.reloader.router.clone();
    let verdict = || {
        let parity = router
            .parity()
            .model_status(&"m".into())
            .map(|standing| standing.parity())
            .unwrap_or_default();
        match parity.workers.get(&ONE).map(|known| known.canaries.clone()) {
            Some(CanaryVerdict::CannotTest { why, .. }) => why,
            _ => String::new(),
        }
    };
    until("the self-test wants a token", || {
        verdict().contains("engines.http.token_file")
    })
    .await;
    assert!(router.sources().engine_settings(ONE).is_none());
    let more = format!("engines: {{http: {{token_file: {}}}}}\n", token.display());
    reload(&app, config(&[address], &with_tokenizer(&more))).await;
    until("it is learned of", || {
        router.sources().engine_settings(ONE).is_some()
    })
    .await;
    until("the self-test asks with it", || {
        verdict().contains("offers neither")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn engine_settings_follow_reload() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = App::start(config(&[address], "")).await.unwrap();
    let router = app.reloader.router.clone();
    let capacity = || {
        router
            .fleet()
            .worker(ONE)
            .and_then(|worker| worker.capacity.total_kv_blocks)
    };
    until("it is learned of", || capacity() == Some(100)).await;
    let agreed = || {
        router
            .sources()
            .common_settings()
            .load()
            .get(&"m".into())
            .cloned()
            .unwrap_or_default()
    };
    assert_eq!(
        (agreed().root.as_deref(), agreed().max_model_len),
        (Some("org/m"), Some(4096))
    );

    // Engines are compared with the new configuration.
    reload(
        &app,
        config(&[address], "models: [{name: m, block_size: 32}]\n"),
    )
    .await;
    let told = |setting| {
        mismatches(&router)
            .iter()
            .any(|found| found.setting == setting)
    };
    until("32 are not 16", || {
        told("block_size") && capacity() == Some(50)
    })
    .await;
    reload(&app, config(&[address], &other_model_files())).await;
    until("it was started with something else", || {
        told("multimodal.model") && !told("block_size")
    })
    .await;

    // Polling is disabled, and nothing is known.
    let off = |mut config: Config| {
        config.engines.discovery.enabled = false;
        config
    };
    reload(&app, off(config(&[address], ""))).await;
    until("it is forgotten", || {
        capacity().is_none() && router.sources().engine_settings(ONE).is_none()
    })
    .await;
    reload(&app, config(&[address], "")).await;
    until("it is learned of again", || capacity() == Some(100)).await;
}

/// Models with a tokenizer and another multimodal model than the engine's.
fn other_model_files() -> String {
    let media =
        "multimodal: {model: other, image: {token: '<s>', token_count: fixed, tokens_per_item: 4}}";
    let files = format!(
        "tokenizer: {}/examples/models/tinyllama/tokenizer.json.gz",
        env!("CARGO_MANIFEST_DIR")
    );
    format!("models: [{{name: m, {files}, {media}}}]\n")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn log_level_change_repeats_no_self_test() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = App::start(config(&[address], &with_tokenizer("")))
        .await
        .unwrap();
    let before = app.reloader.subjects();
    let client = app.reloader.client();
    reload(
        &app,
        config(
            &[address],
            &with_tokenizer("process: {log: {level: debug}}\n"),
        ),
    )
    .await;
    let after = app.reloader.subjects();
    assert_eq!((before.len(), after.len()), (1, 1));
    assert!(
        Arc::ptr_eq(&before[&"m".into()], &after[&"m".into()]),
        "its canaries are not tokenised again"
    );
    assert!(
        app.reloader.client().is_same(&client),
        "nor are engines connected to anew"
    );
    reload(
        &app,
        config(
            &[address],
            &with_tokenizer("engines: {parity_check: {enabled: false}}\n"),
        ),
    )
    .await;
    assert!(app.reloader.subjects().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokenizer_change_clears_findings() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = App::start(config(&[address], &with_tokenizer("")))
        .await
        .unwrap();
    let standing = || {
        app.reloader
            .router
            .parity()
            .model_status(&"m".into())
            .unwrap()
    };
    let label = || {
        standing()
            .parity()
            .workers
            .get(&ONE)
            .map(|known| known.canaries.label())
    };
    until("it cannot be tested", || label() == Some("cannot_test")).await;
    standing().record_canaries(
        ONE,
        CanaryVerdict::Agrees {
            compared: 1,
            skipped: Default::default(),
        },
    );
    // An engine that cannot be queried has not changed its tokens, but the local tokenizer has
    // changed.
    reload(&app, config(&[address], &tokenizer_of("qwen2.5", ""))).await;
    until("nothing is known of it", || label() != Some("agrees")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn new_and_restarted_workers_are_queried_despite_hanging_ones() {
    let hanging = Arc::new(Engine::default());
    let newcomer = Arc::new(Engine::default());
    hanging.hangs.store(true, Ordering::SeqCst);
    let first = hanging.serve().await;
    let second = newcomer.serve().await;
    let patient =
        "engines: {http: {timeout: 1h}}\nprocess: {readiness: {event_sources_timeout: 1h}}\n";
    let app = App::start(config(&[first], patient)).await.unwrap();
    let router = app.reloader.router.clone();
    until("the first is asked", || {
        hanging.asked.load(Ordering::SeqCst) == 1
    })
    .await;
    reload(&app, config(&[first, second], patient)).await;
    until("the newcomer is learned of", || {
        router.sources().engine_settings(WorkerId(2)).is_some()
    })
    .await;
    // All initial workers are queried: readiness waits for the first one.
    assert!(
        app.readiness
            .pending()
            .iter()
            .any(|pending| pending.contains("settings of the initial workers"))
    );

    let asked = || newcomer.asked.load(Ordering::SeqCst);
    assert_eq!(asked(), 1, "the next time in an hour");
    let rank = WorkerRank {
        worker: WorkerId(2),
        rank: DpRank(0),
    };
    let mut source = warmroute_core::freshness::EventSourceState::new(0.0);
    source.record_restart();
    router
        .sources()
        .register(rank, Arc::new(parking_lot::Mutex::new(source)));
    until("an engine that began anew is asked again", || asked() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_waits_for_event_sources_reported_by_engines() {
    let closed_port = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let publishes = Some(closed_port.local_addr().unwrap().port());
    let engine = Arc::new(Engine {
        publishes,
        ..Engine::default()
    });
    engine.hangs.store(true, Ordering::SeqCst);
    let address = engine.serve().await;
    let patient =
        "engines: {http: {timeout: 1h}}\nprocess: {readiness: {event_sources_timeout: 1h}}\n";
    let app = App::start(config(&[address], patient)).await.unwrap();
    let pending = || app.readiness.pending();
    let waits_for = |what: &str| pending().iter().any(|pending| pending.contains(what));
    until("it is asked", || engine.asked.load(Ordering::SeqCst) > 0).await;
    assert!(
        waits_for("settings of the initial workers"),
        "{:?}",
        pending()
    );
    engine.hangs.store(false, Ordering::SeqCst);
    until("its source is waited for", || {
        waits_for("event source of worker rank 1/0")
    })
    .await;
    until("and nothing else", || {
        !waits_for("settings of the initial workers")
    })
    .await;
    // Readiness does not wait for an engine that does not answer.
    let silent = Arc::new(Engine {
        token: Some("letmein"),
        ..Engine::default()
    });
    let address = silent.serve().await;
    let app = App::start(config(&[address], patient)).await.unwrap();
    until("it failed", || app.readiness.pending().is_empty()).await;
}
