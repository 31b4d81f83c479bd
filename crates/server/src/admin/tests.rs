//! Tests of the admin pages over HTTP.

use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};

use axum::http::Method;
use warmroute_core::wall_time::WallTime;

use super::*;
use crate::app::OfflineRouter;
use crate::config::Config;
use crate::version::BuildVersion;

/// Configuration with names that must not become markup.
const HOSTILE: &str = "
models:
- {name: '<script>alert(1)</script>', block_size: 4}
- {name: plain, block_size: 4}
workers:
  list:
  - {id: 1, endpoint: '127.0.0.1:8001', name: '<img src=x onerror=alert(2)>', model: '<script>alert(1)</script>'}
  - {id: 18446744073709551615, endpoint: '127.0.0.1:8002', model: plain, role: prefill}
  - {id: 3, endpoint: '127.0.0.1:8003', model: plain, role: decode, data_parallel: {size: 2}}
";

/// Returns the state of a process in which all optional features are off.
pub(super) fn test_state(dispatcher: &Arc<Dispatcher>) -> AdminState {
    let metrics = Arc::new(Metrics::new());
    AdminState {
        dispatcher: dispatcher.clone(),
        audit: CacheAudit::new(dispatcher.router().clone(), metrics.clone()),
        metrics,
        readiness: Readiness::default(),
        process: Arc::new(process_status),
        config: Arc::new(|| Some(json!({}))),
        explain: Arc::default(),
        envoys: Arc::new(|| None),
        cluster: Arc::new(|| None),
        replicas: Arc::new(|| None),
        remote_index: Arc::new(|| None),
    }
}

fn process_status() -> ProcessStatus {
    let time = WallTime::from_unix_seconds(1_795_398_189.91);
    ProcessStatus {
        version: BuildVersion {
            number: "0.1.0",
            commit: "7707573, 2026-11-23",
            target: "x86_64-unknown-linux-gnu",
            text: "0.1.0 (7707573, 2026-11-23)",
        },
        started_at: time,
        config_file: Some("/etc/<b>/warmroute.yaml".into()),
        generation: 3,
        last_reload: ReloadReport {
            time,
            outcome: "rejected",
            errors: vec!["warmroute.yaml:2:32: `<i>` is not a number".to_owned()],
        },
        needs_restart: vec!["queue.timeout".to_owned()],
        pool: Some("inference/\"pool\"".to_owned()),
        models: [
            ("<script>alert(1)</script>", TokenizerKind::Local),
            ("plain", TokenizerKind::Remote),
        ]
        .map(|(name, tokenizer)| ModelStatus {
            name: name.to_owned(),
            tokenizer: Some(tokenizer),
        })
        .into(),
        observes_usage: false,
        checks_parity: true,
    }
}

/// Returns the dispatcher of a configuration.
async fn dispatcher(config: &str) -> Arc<Dispatcher> {
    let config = Config::parse(Path::new("warmroute.yaml"), config.as_bytes()).unwrap();
    let workers = crate::app::listed_workers(&config).unwrap();
    let offline = OfflineRouter::new(&config, workers).await.unwrap();
    offline.dispatcher
}

/// Admin server on its own port.
struct AdminSite {
    url: String,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for AdminSite {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl AdminSite {
    async fn serve(admin: AdminState) -> Self {
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let server =
            tokio::spawn(async move { axum::serve(listener, admin_routes(admin)).await.unwrap() });
        Self { url, server }
    }

    async fn hostile() -> Self {
        Self::serve(test_state(&dispatcher(HOSTILE).await)).await
    }

    async fn send(&self, method: Method, path: &str, accept: &str) -> reqwest::Response {
        warmroute_runtime::tls::http_client_builder()
            .build()
            .unwrap()
            .request(method, format!("{}{path}", self.url))
            .header("accept", accept)
            .send()
            .await
            .unwrap()
    }

    async fn get(&self, path: &str) -> (u16, String) {
        let response = self.send(Method::GET, path, "*/*").await;
        (response.status().as_u16(), response.text().await.unwrap())
    }

    async fn json(&self, path: &str) -> Value {
        let (status, text) = self.get(path).await;
        assert_eq!(status, 200, "{path}: {text}");
        serde_json::from_str(&text).unwrap()
    }
}

#[tokio::test]
async fn every_listed_page_is_served() {
    let site = AdminSite::hostile().await;
    let list = site.json("/debug").await;
    assert_eq!(list["ready"], true);
    assert_eq!(list["version"], "0.1.0 (7707573, 2026-11-23)");
    let pages = list["pages"].as_array().unwrap();
    for page in pages.iter().filter(|page| page["method"] == "GET") {
        let path = page["path"].as_str().unwrap();
        let response = site.send(Method::GET, path, "*/*").await;
        assert_eq!(response.status(), 200, "{path}");
        let headers = response.headers();
        assert_eq!(headers["x-content-type-options"], "nosniff", "{path}");
        assert_eq!(headers["cache-control"], "no-store", "{path}");
    }
    let off: Vec<_> = pages
        .iter()
        .filter(|page| page["enabled"] == false)
        .map(|page| (page["path"].clone(), page["hint"].clone()))
        .collect();
    let expected = [
        (
            "/debug/audit",
            "set `gateway.observe: sampled(0.05)` or `usage` in warmroute.yaml",
        ),
        ("/debug/envoys", "set `envoy.xds.address` in warmroute.yaml"),
        (
            "/debug/cluster",
            "set `workers.kubernetes.pools` in warmroute.yaml",
        ),
        (
            "/debug/replicas",
            "set `replicas.nats.servers` in warmroute.yaml",
        ),
    ];
    assert_eq!(off, expected.map(|(path, hint)| (json!(path), json!(hint))));
    assert_eq!(site.json("/debug/").await, list);
    let as_json = site.send(Method::GET, "/", "application/json").await;
    assert_eq!(
        serde_json::from_str::<Value>(&as_json.text().await.unwrap()).unwrap(),
        list
    );
}

#[tokio::test]
async fn page_of_disabled_feature_names_setting() {
    let state = test_state(&dispatcher(HOSTILE).await);
    let is_on = Arc::new(AtomicBool::new(false));
    let switch = is_on.clone();
    let replicas = move || switch.load(Ordering::Relaxed).then(|| json!({"peers": []}));
    let site = AdminSite::serve(AdminState {
        replicas: Arc::new(replicas),
        ..state
    })
    .await;
    for (path, hint) in [
        ("/debug/envoys", "set `envoy.xds.address` in warmroute.yaml"),
        (
            "/debug/cluster",
            "set `workers.kubernetes.pools` in warmroute.yaml",
        ),
        (
            "/debug/replicas",
            "set `replicas.nats.servers` in warmroute.yaml",
        ),
    ] {
        assert_eq!(
            site.json(path).await,
            json!({"enabled": false, "hint": hint}),
            "{path}"
        );
    }
    assert_eq!(
        site.json("/debug/index").await["remote"],
        json!({"enabled": false, "hint": "set `index.remote.servers` in warmroute.yaml"})
    );
    is_on.store(true, Ordering::Relaxed);
    assert_eq!(site.json("/debug/replicas").await, json!({"peers": []}));
}

#[tokio::test]
async fn version_page_has_commit_and_target() {
    let site = AdminSite::hostile().await;
    assert_eq!(
        site.json("/version").await,
        json!({
            "version": "0.1.0",
            "commit": "7707573",
            "commit_date": "2026-11-23",
            "target": "x86_64-unknown-linux-gnu",
        })
    );
}

#[tokio::test]
async fn unknown_path_names_nearest_page() {
    let site = AdminSite::hostile().await;
    let (status, text) = site.get("/debug/flet").await;
    let body: Value = serde_json::from_str(&text).unwrap();
    assert_eq!((status, &body["nearest"]), (404, &json!("/debug/fleet")));
    assert_eq!(
        body["error"],
        "there is no such page; did you mean /debug/fleet? / lists all pages"
    );
    let (status, text) = site.get("/%3Cscript%3E").await;
    let body: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(status, 404);
    assert_eq!(
        body,
        json!({"error": "there is no such page; / lists all pages", "pages": "/"})
    );
}

#[tokio::test]
async fn wrong_method_names_allowed_one_and_command() {
    let site = AdminSite::hostile().await;
    let address = site.url.trim_start_matches("http://");
    for (method, path, allow, command) in [
        (
            Method::GET,
            "/debug/explain",
            "POST",
            format!("curl --data-binary @chat.json {address}/debug/explain"),
        ),
        (
            Method::POST,
            "/debug/fleet",
            "GET, HEAD",
            format!("curl {address}/debug/fleet"),
        ),
        (Method::DELETE, "/", "GET, HEAD", format!("curl {address}/")),
        (
            Method::PUT,
            "/debug/",
            "GET, HEAD",
            format!("curl {address}/debug/"),
        ),
    ] {
        let response = site.send(method.clone(), path, "*/*").await;
        assert_eq!(response.status(), 405, "{path}");
        let allowed: Vec<_> = response.headers().get_all("allow").iter().collect();
        assert_eq!(allowed, [allow], "{path}");
        let body: Value = serde_json::from_str(&response.text().await.unwrap()).unwrap();
        assert_eq!(body["command"], command);
        let error = body["error"].as_str().unwrap();
        assert!(
            error.starts_with(&format!("{path} does not support {method}; use ")),
            "{error}"
        );
    }
}

#[tokio::test]
async fn home_page_is_restricted_html() {
    let site = AdminSite::hostile().await;
    let response = site.send(Method::GET, "/", "text/html,*/*;q=0.8").await;
    let headers = response.headers().clone();
    assert_eq!(headers["content-type"], "text/html; charset=utf-8");
    let policy = headers["content-security-policy"].to_str().unwrap();
    assert!(policy.starts_with("default-src 'none';"), "{policy}");
    assert!(!policy.contains("script-src"), "{policy}");
    let html = response.text().await.unwrap();
    assert!(html.contains("&lt;script&gt;alert(1)&lt;/script&gt;"));
    for markup in ["<script", "<img", "<b>", "<i>", "onerror=alert(2)>"] {
        assert!(!html.contains(markup), "{markup}: {html}");
    }
}

/// Compares the overview with a golden file. Fleet, process and time are fixed.
#[tokio::test]
#[expect(
    clippy::disallowed_methods,
    reason = "the environment enables rewriting of the golden file"
)]
async fn overview_equals_golden_page() {
    let mut state = test_state(&dispatcher(HOSTILE).await);
    let readiness = Readiness::default();
    let _step = readiness.begin_step("event source of worker rank 1/0");
    let _tokenizers = readiness.begin_step("tokenizers");
    state.readiness = readiness;
    state.dispatcher.router().mark_overloaded(
        warmroute_core::worker::WorkerId(3),
        std::time::Duration::from_secs(3600),
    );
    let now = WallTime::from_unix_seconds(1_795_401_792.5);
    let html = home::render_at(&state, now).unwrap();
    // The remaining overload time depends on the duration of the test.
    let marked = html
        .split("overloaded for ")
        .map(|part| part.trim_start_matches(|letter: char| letter.is_ascii_digit()));
    let html = marked.collect::<Vec<_>>().join("overloaded for N");
    let path = format!("{}/tests/data/admin/overview.html", crate::REPOSITORY);
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, &html).unwrap();
    }
    let golden = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        html == golden,
        "UPDATE_GOLDEN=1 cargo test -p warmroute-server overview rewrites {path}:\n{html}"
    );
}

#[tokio::test]
async fn long_worker_table_is_cut_with_problems_first() {
    let mut config = "models: [{name: m, block_size: 4}]\nworkers:\n  list:\n".to_owned();
    for id in 0..400 {
        config += &format!(
            "  - {{id: {id}, endpoint: '10.0.{}.{}:8000'}}\n",
            id / 200,
            id % 200
        );
    }
    let state = test_state(&dispatcher(&config).await);
    let now = WallTime::default();
    let html = home::render_at(&state, now).unwrap();
    assert_eq!(html.matches("<td>10.0.").count(), 300);
    assert!(html.contains("100 ranks not shown."), "{html}");
    assert!(!html.contains("10.0.1.199:8000"));
    state.dispatcher.router().mark_overloaded(
        warmroute_core::worker::WorkerId(399),
        std::time::Duration::from_secs(60),
    );
    assert!(
        home::render_at(&state, now)
            .unwrap()
            .contains("10.0.1.199:8000")
    );
}

#[tokio::test]
async fn overview_shows_model_without_deliveries() {
    let dispatcher = dispatcher(HOSTILE).await;
    let state = test_state(&dispatcher);
    let router = dispatcher.router();
    let rank = router.fleet().members().next().map(|member| member.rank);
    for _ in 0..3 {
        router.report_status(rank.as_slice(), &mut [], 500);
    }
    let now = WallTime::from_unix_seconds(1_795_398_189.91);
    let headline = "<span class=\"state bad\">ready, but no worker of \
        &lt;script&gt;alert(1)&lt;/script&gt; delivers answers</span>";
    let shown = tokio::time::timeout(std::time::Duration::from_secs(60), async {
        while !home::render_at(&state, now).unwrap().contains(headline) {
            tokio::time::sleep(std::time::Duration::from_millis(10)).await;
        }
    });
    shown.await.expect("the headline");
}

#[tokio::test]
async fn overview_shows_engines_that_do_not_answer() {
    let dispatcher = dispatcher(HOSTILE).await;
    let state = test_state(&dispatcher);
    let router = dispatcher.router();
    let now = WallTime::from_unix_seconds(1_795_398_189.91);
    assert!(
        home::render_at(&state, now)
            .unwrap()
            .contains("<span class=\"state good\">ready</span>")
    );
    let workers: Vec<_> = router.fleet().workers().map(|worker| worker.id).collect();
    router.record_reachability(workers[0], false);
    let html = home::render_at(&state, now).unwrap();
    let headline = "<span class=\"state warn\">ready, but 2 of 3 engines answer</span>";
    assert!(html.contains(headline), "{html}");
    assert!(
        html.contains("<td class=\"bad\">unreachable since "),
        "{html}"
    );
    for worker in workers {
        router.record_reachability(worker, false);
    }
    let html = home::render_at(&state, now).unwrap();
    let headline = "<span class=\"state bad\">ready, but 0 of 3 engines answer</span>";
    assert!(html.contains(headline), "{html}");
    let site = AdminSite::serve(state).await;
    let page = site
        .send(Method::GET, "/debug/fleet", "application/json")
        .await;
    let page: Value = page.json().await.unwrap();
    assert_eq!(page["members"][0]["unreachable_seconds"], 0);
}
