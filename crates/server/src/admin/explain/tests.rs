use std::path::Path;

use reqwest::Method;
use serde_json::Value;

use super::*;
use crate::admin::admin_routes;
use crate::admin::tests::test_state;
use crate::app::OfflineRouter;
use crate::config::Config;
use crate::dispatch::{Dispatcher, RequestSession};

/// The model has no tokenizer, but trusted clients may send tokens.
const CONFIG: &str = "
requests: {clients: {trusted: true}}
models: [{name: m, block_size: 4}]
routing: {model_rewrites: {rules: [{models: [old], targets: [{model: m}]}]}}
sessions: {headers: [x-session-id], affinity: hard}
workers:
  list:
  - {id: 1, endpoint: '127.0.0.1:8001'}
  - {id: 2, endpoint: '127.0.0.1:8002'}
";
const LIMIT: usize = 200;
/// A completion of nine tokens.
const EXACT: &str = r#"{"model":"m","prompt":"x","nvext":{"token_data":[1,2,3,4,5,6,7,8,9]}}"#;

/// Admin server on its own port.
struct Pages {
    url: String,
    dispatcher: Arc<Dispatcher>,
    server: tokio::task::JoinHandle<()>,
}

impl Drop for Pages {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Pages {
    async fn serve(loaded: bool) -> Self {
        let config = Config::parse(Path::new("warmroute.yaml"), CONFIG.as_bytes()).unwrap();
        let OfflineRouter {
            preprocessor,
            dispatcher,
        } = OfflineRouter::new(&config, crate::app::listed_workers(&config).unwrap())
            .await
            .unwrap();
        let explain = SharedExplainContext::default();
        if loaded {
            explain.store(Some(Arc::new(ExplainContext {
                preprocessor,
                body_limit: LIMIT,
            })));
        }
        let admin = AdminState {
            explain,
            ..test_state(&dispatcher)
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}{EXPLAIN_PATH}", listener.local_addr().unwrap());
        let server =
            tokio::spawn(async move { axum::serve(listener, admin_routes(admin)).await.unwrap() });
        Self {
            url,
            dispatcher,
            server,
        }
    }

    async fn send(
        &self,
        method: Method,
        accept: &str,
        query: impl Into<reqwest::Body>,
    ) -> (u16, String) {
        let client = warmroute_runtime::tls::http_client_builder()
            .build()
            .unwrap();
        let request = client
            .request(method, &self.url)
            .header("accept", accept)
            .body(query);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn explain(&self, query: &Value) -> Value {
        let (status, text) = self.send(Method::POST, "*/*", query.to_string()).await;
        assert_eq!(status, 200, "{query}: {text}");
        serde_json::from_str(&text).unwrap()
    }
}

#[tokio::test]
async fn invalid_explain_request_is_rejected_with_message() {
    let pages = Pages::serve(true).await;
    let long = format!("{{\"body\":\"{}\"}}", "x".repeat(LIMIT * 6 + (1 << 20)));
    let cases = [
        (Method::POST, "[", 400, "an object of the form"),
        (Method::POST, "[1]", 400, "an object of the form"),
        (Method::POST, "\"{}\"", 400, "an object of the form"),
        (Method::POST, "", 400, "the request has no body"),
        (Method::POST, " \n", 400, "the request has no body"),
        (Method::POST, "\u{0}\u{1}", 400, "an object of the form"),
        (
            Method::POST,
            r#"{"model": "m", "mesages": []}"#,
            400,
            "with `messages` or `prompt`",
        ),
        (
            Method::POST,
            r#"{"messages": [], "body": {}}"#,
            400,
            "unknown field `messages`",
        ),
        (
            Method::POST,
            r#"{"messages": [}"#,
            400,
            "expected value at line 1 column 15",
        ),
        (
            Method::POST,
            r#"{"boddy": {}}"#,
            400,
            "unknown field `boddy`",
        ),
        (Method::POST, r#"{"headers": [1]}"#, 400, "invalid type"),
        (
            Method::POST,
            r#"{"body": "\ud800"}"#,
            400,
            "invalid body string",
        ),
        (Method::POST, &long, 413, ""),
        (
            Method::GET,
            "",
            405,
            "/debug/explain does not support GET; use POST",
        ),
    ];
    for (method, query, expected, text) in cases {
        let (status, answer) = pages.send(method, "*/*", query.to_owned()).await;
        assert!(
            status == expected && answer.contains(text),
            "{query:.40}: {status} {answer}"
        );
    }
}

#[tokio::test]
async fn rewrites_are_applied_as_for_requests() {
    let pages = Pages::serve(true).await;
    let exact: Value = serde_json::from_str(EXACT).unwrap();
    let plain = pages.explain(&json!({ "body": exact })).await;
    let mut old = exact.clone();
    old["model"] = json!("old");
    let mut rewritten = pages.explain(&json!({ "body": old })).await;
    assert_eq!(
        (&plain["model"], &plain["requested_model"]),
        (&json!("m"), &Value::Null)
    );
    assert_eq!(rewritten["requested_model"].take(), "old");
    assert_eq!(rewritten, plain);
    let (_, table) = pages
        .send(
            Method::POST,
            "text/plain",
            json!({ "body": old }).to_string(),
        )
        .await;
    assert!(
        table.contains("m (rewritten from old), 9 tokens"),
        "{table}"
    );
}

#[tokio::test]
async fn pool_argument_limits_the_workers() {
    let pages = Pages::serve(true).await;
    let explained = pages.explain(&json!({ "body": EXACT, "pool": "p" })).await;
    let workers = &explained["phases"][0]["workers"];
    assert_eq!(
        workers[0]["excluded"], "is not of the pool `p`",
        "{workers}"
    );
}

#[tokio::test]
async fn explain_before_tokenizers_load_returns_503() {
    let (status, answer) = Pages::serve(false)
        .await
        .send(Method::POST, "*/*", "{}")
        .await;
    assert_eq!(status, 503);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(
        answer["error"],
        "the tokenizers are still loading; see /readyz"
    );
}

#[tokio::test]
async fn body_forms_are_equivalent() {
    let pages = Pages::serve(true).await;
    let exact: Value = serde_json::from_str(EXACT).unwrap();
    let explained = pages.explain(&json!({ "body": exact })).await;
    assert_eq!(
        (&explained["prompt_tokens"], &explained["prompt_blocks"]),
        (&json!(9), &json!(2))
    );
    assert_eq!(
        explained["mode"], "approximate",
        "these workers have no events"
    );
    let workers = explained["phases"][0]["workers"].as_array().unwrap();
    assert_eq!(workers.len(), 2);
    let costs: Vec<&Value> = workers.iter().map(|worker| &worker["cost"]).collect();
    assert_eq!(costs[0], costs[1]);
    assert!(costs[0]["total"].as_f64().unwrap() > 0.0, "{costs:?}");
    assert_eq!(pages.explain(&json!({ "body": EXACT })).await, explained);
    assert_eq!(
        pages.explain(&json!({ "bytes": EXACT.as_bytes() })).await,
        explained
    );
    let query = ExplainRequest::new(None, BTreeMap::new(), EXACT.into()).unwrap();
    assert_eq!(
        pages.explain(&json!(query)).await,
        explained,
        "the request of the command"
    );

    let load = pages.dispatcher.router().load().snapshot();
    assert!(
        load.iter().all(|load| load.active_requests == 0),
        "nothing is booked: {load:?}"
    );
}

#[tokio::test]
async fn plain_body_is_explained_like_envelope() {
    let pages = Pages::serve(true).await;
    let enveloped = pages.explain(&json!({"body": EXACT})).await;
    assert_eq!(enveloped["mode"], "approximate");
    let (status, plain) = pages.send(Method::POST, "*/*", EXACT).await;
    assert_eq!(status, 200, "{plain}");
    assert_eq!(serde_json::from_str::<Value>(&plain).unwrap(), enveloped);

    let chat = json!({"model": "m", "messages": [{"role": "user", "content": "x"}]});
    let as_chat = json!({"path": CHAT_PATH, "body": chat});
    assert_eq!(pages.explain(&chat).await, pages.explain(&as_chat).await);

    let long = json!({"model": "m", "prompt": "x".repeat(LIMIT)});
    assert_eq!(pages.explain(&long).await["reason"], "body_too_large");
}

#[tokio::test]
async fn unreadable_body_is_explained_as_load_only() {
    let pages = Pages::serve(true).await;
    let binary = ExplainRequest::new(None, BTreeMap::new(), vec![0xff, b'{', b'}', 0xfe]).unwrap();
    assert!(binary.bytes.is_some());
    let cases = [
        (
            json!({"body": {"model": "unheard-of", "messages": []}}),
            "unparseable",
        ),
        (
            json!({"body": {"model": "unheard-of", "prompt": "x"}}),
            "unknown_model",
        ),
        (
            json!({"body": {"model": "m", "prompt": "x"}}),
            "no_tokenizer",
        ),
        (json!({"body": "hello"}), "unparseable"),
        (json!({"body": [1]}), "unparseable"),
        (json!(binary), "unparseable"),
        (json!({}), "no_body"),
        (json!({"body": null}), "no_body"),
        (json!({"body": ""}), "no_body"),
        (json!({"body": "x".repeat(LIMIT + 1)}), "body_too_large"),
        (json!({"path": "/tokenize", "body": EXACT}), "not_inference"),
        (
            json!({"path": "/v1/chat/completions", "body": EXACT}),
            "unparseable",
        ),
    ];
    for (query, reason) in cases {
        let explained = pages.explain(&query).await;
        assert_eq!(
            (&explained["mode"], &explained["reason"]),
            (&json!("load_only"), &json!(reason)),
            "{query}"
        );
        assert_eq!(
            explained["phases"][0]["workers"].as_array().unwrap().len(),
            2,
            "{query}"
        );
        let summary = explained["summary"].as_str().unwrap();
        assert!(
            summary.contains("; caches were not compared, because "),
            "{summary}"
        );
    }
}

#[tokio::test]
async fn header_pins_the_explained_worker() {
    let pages = Pages::serve(true).await;
    let pinned = pages
        .explain(&json!({"body": EXACT, "headers": {"X-Worker-Instance-Id": "2"}}))
        .await;
    assert_eq!(pinned["phases"][0]["winner"]["worker"], "2");
    assert_eq!(
        pinned["phases"][0]["workers"][0]["excluded"],
        "the request is pinned to another worker"
    );

    let (status, table) = pages
        .send(
            Method::POST,
            "text/plain",
            json!({ "body": EXACT }).to_string(),
        )
        .await;
    assert_eq!(status, 200);
    assert!(
        table.starts_with(
            "route    approximate, class default\nprompt   m, 9 tokens, 2 complete blocks of 4"
        ),
        "{table}"
    );
}

#[tokio::test]
async fn session_of_header_is_explained() {
    let pages = Pages::serve(true).await;
    let query = json!({"body": EXACT, "headers": {"x-session-id": "s"}});
    let session = RequestSession {
        id: "s".into(),
        ..RequestSession::default()
    };
    let prompt = warmroute_core::router::RoutePrompt::Estimated {
        tokens: 9,
        reason: warmroute_core::router::Reason::NoTokenizer,
    };
    let request = warmroute_core::router::RouteRequest::new(None, prompt);
    drop(
        pages
            .dispatcher
            .dispatch(request.clone(), Some(&session), |_| {})
            .await
            .unwrap(),
    );
    let bound = pages
        .dispatcher
        .dispatch(request, Some(&session), |_| {})
        .await
        .unwrap()
        .placement
        .route
        .to
        .rank
        .worker
        .0;
    let explained = pages.explain(&query).await;
    assert_eq!(
        explained["phases"][0]["winner"]["worker"],
        bound.to_string()
    );
    let other = explained["phases"][0]["workers"]
        .as_array()
        .unwrap()
        .iter()
        .find(|worker| worker["cost"].is_null());
    assert_eq!(
        other.unwrap()["excluded"],
        "the session is bound to another worker rank"
    );
}

#[tokio::test]
async fn concurrent_explain_requests_are_limited() {
    use tokio::io::AsyncWriteExt as _;
    let pages = Pages::serve(true).await;
    let address = pages
        .url
        .trim_start_matches("http://")
        .trim_end_matches(EXPLAIN_PATH)
        .to_owned();
    let mut slow = Vec::new();
    for _ in 0..MAX_CONCURRENT {
        let mut socket = tokio::net::TcpStream::connect(&address).await.unwrap();
        let head =
            format!("POST {EXPLAIN_PATH} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
        socket.write_all(head.as_bytes()).await.unwrap();
        slow.push(socket);
    }
    let wait_for_status = async |expected: u16| {
        let reached = async {
            while pages.send(Method::POST, "*/*", "{}").await.0 != expected {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached)
            .await
            .unwrap();
    };
    wait_for_status(429).await;
    drop(slow);
    wait_for_status(200).await;
}
