//! Reloads of what engines are asked, on running parts.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use axum::Router as Routes;
use axum::http::{HeaderMap, StatusCode, Uri};
use tokio::net::TcpListener;

use super::*;
use crate::app::App;
use crate::learned::Mismatch;
use crate::parity::Verdict;
use crate::worker::{DpRank, WorkerId, WorkerRank};

const SOON: Duration = Duration::from_secs(30);
const ONE: WorkerId = WorkerId(1);

/// Pages of an engine, as tests want them.
#[derive(Default)]
struct Engine {
    /// Which token it wants.
    token: Option<&'static str>,
    /// Whether it says nothing.
    hangs: AtomicBool,
    /// Where it publishes.
    publishes: Option<u16>,
    /// How often it was asked for its settings.
    asked: AtomicUsize,
}

impl Engine {
    /// Serves from now on; gives out where.
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
    let workers: Vec<_> = (1..)
        .zip(workers)
        .map(|(id, address)| format!("{{id: {id}, model: m, endpoint: '{address}'}}"))
        .collect();
    let text = format!(
        "listen: {{tcp: '127.0.0.1:0'}}\nadmin: {{listen: '127.0.0.1:0'}}\nlearn: {{interval: 1h}}\n{model}workers: [{}]\n{more}",
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
    // The configuration would make the future of each caller large.
    let reloaded = Box::pin(app.reloader.reload(Ok(config))).await;
    assert!(matches!(reloaded, Reloaded::Applied { .. }), "{reloaded:?}");
}

fn mismatches(router: &Router) -> Vec<Mismatch> {
    router
        .sources()
        .learned(ONE)
        .map(|(_, mismatches)| mismatches)
        .unwrap_or_default()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_for_engines_reaches_those_who_ask_already() {
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
            .of(&"m".into())
            .map(|standing| standing.parity())
            .unwrap_or_default();
        match parity.workers.get(&ONE).map(|known| known.canaries.clone()) {
            Some(Verdict::CannotTest { why, .. }) => why,
            _ => String::new(),
        }
    };
    until("the self-test wants a token", || {
        verdict().contains("engines.token_file")
    })
    .await;
    assert!(router.sources().learned(ONE).is_none());
    let more = format!("engines: {{token_file: {}}}\n", token.display());
    reload(&app, config(&[address], &with_tokenizer(&more))).await;
    until("it is learned of", || {
        router.sources().learned(ONE).is_some()
    })
    .await;
    until("the self-test asks with it", || {
        verdict().contains("offers neither")
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_learned_follows_the_settings() {
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
            .agreed()
            .load()
            .get(&"m".into())
            .cloned()
            .unwrap_or_default()
    };
    assert_eq!(
        (agreed().root.as_deref(), agreed().max_model_len),
        (Some("org/m"), Some(4096))
    );

    // What engines contradict is what is configured now.
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
    let media = "media: {model: other, image: {token: '<s>', rule: fixed, tokens: 4}}";
    let files = format!(
        "tokenizer: {}/examples/models/tinyllama/tokenizer.json.gz",
        env!("CARGO_MANIFEST_DIR")
    );
    reload(
        &app,
        config(
            &[address],
            &format!("models: [{{name: m, {files}, {media}}}]\n"),
        ),
    )
    .await;
    until("it was started with something else", || {
        told("media.model") && !told("block_size")
    })
    .await;

    // Nobody is asked, and nothing is known.
    let off = |mut config: Config| {
        config.learn.enabled = false;
        config
    };
    reload(&app, off(config(&[address], ""))).await;
    until("it is forgotten", || {
        capacity().is_none() && router.sources().learned(ONE).is_none()
    })
    .await;
    reload(&app, config(&[address], "")).await;
    until("it is learned of again", || capacity() == Some(100)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn another_log_level_tests_nobody_again() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = App::start(config(&[address], &with_tokenizer("")))
        .await
        .unwrap();
    let before = app.reloader.subjects();
    let client = app.reloader.client();
    reload(
        &app,
        config(&[address], &with_tokenizer("log: {level: debug}\n")),
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
        config(&[address], &with_tokenizer("self_test: {enabled: false}\n")),
    )
    .await;
    assert!(app.reloader.subjects().is_empty());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_was_found_out_of_another_tokenizer_is_forgotten() {
    let engine = Arc::new(Engine::default());
    let address = engine.serve().await;
    let app = App::start(config(&[address], &with_tokenizer("")))
        .await
        .unwrap();
    let standing = || app.reloader.router.parity().of(&"m".into()).unwrap();
    let label = || {
        standing()
            .parity()
            .workers
            .get(&ONE)
            .map(|known| known.canaries.label())
    };
    until("it cannot be tested", || label() == Some("cannot_test")).await;
    standing().tested(
        ONE,
        Verdict::Agrees {
            compared: 1,
            skipped: Default::default(),
        },
    );
    // Who cannot be asked has not changed its tokens; but ours are others.
    reload(&app, config(&[address], &tokenizer_of("qwen2.5", ""))).await;
    until("nothing is known of it", || label() != Some("agrees")).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_newcomer_and_who_begins_anew_are_asked_at_once_whoever_hangs() {
    let (hanging, newcomer) = (Arc::new(Engine::default()), Arc::new(Engine::default()));
    hanging.hangs.store(true, Ordering::SeqCst);
    let (first, second) = (hanging.serve().await, newcomer.serve().await);
    let patient = "engines: {deadline: 1h}\nreadiness: {event_sources_deadline: 1h}\n";
    let app = App::start(config(&[first], patient)).await.unwrap();
    let router = app.reloader.router.clone();
    until("the first is asked", || {
        hanging.asked.load(Ordering::SeqCst) == 1
    })
    .await;
    reload(&app, config(&[first, second], patient)).await;
    until("the newcomer is learned of", || {
        router.sources().learned(WorkerId(2)).is_some()
    })
    .await;
    // Nobody of the beginning was left out: readiness waits for the first alone.
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
    let mut source = crate::trust::Source::new(0.0);
    source.restarted();
    router
        .sources()
        .watch(rank, Arc::new(parking_lot::Mutex::new(source)));
    until("an engine that began anew is asked again", || asked() == 2).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn readiness_waits_for_the_event_sources_that_only_engines_know_of() {
    let nobody = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let publishes = Some(nobody.local_addr().unwrap().port());
    let engine = Arc::new(Engine {
        publishes,
        ..Engine::default()
    });
    engine.hangs.store(true, Ordering::SeqCst);
    let address = engine.serve().await;
    let patient = "engines: {deadline: 1h}\nreadiness: {event_sources_deadline: 1h}\n";
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
    // Whoever does not answer is not waited for.
    let silent = Arc::new(Engine {
        token: Some("letmein"),
        ..Engine::default()
    });
    let address = silent.serve().await;
    let app = App::start(config(&[address], patient)).await.unwrap();
    until("it failed", || app.readiness.pending().is_empty()).await;
}
