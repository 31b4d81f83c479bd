use std::path::Path;

use reqwest::Method;
use serde_json::Value;

use super::*;
use crate::admin::routes;
use crate::app::Offline;
use crate::audit::Audit;
use crate::config::Config;
use crate::entrance::{Entrance, SessionWord};
use crate::lifecycle::Readiness;
use crate::metrics::Metrics;

/// Without a tokenizer: trusted clients may bring the tokens.
const CONFIG: &str = "
clients: {trusted: true}
models: [{name: m, block_size: 4}]
rewrites: {rules: [{models: [old], to: [{model: m}]}]}
sessions: {headers: [x-session-id], affinity: hard}
workers:
- {id: 1, endpoint: '127.0.0.1:8001'}
- {id: 2, endpoint: '127.0.0.1:8002'}
";
const LIMIT: usize = 200;
/// A completion of nine tokens.
const EXACT: &str = r#"{"model":"m","prompt":"x","nvext":{"token_data":[1,2,3,4,5,6,7,8,9]}}"#;

/// The pages on a port of their own.
struct Pages {
    url: String,
    entrance: Arc<Entrance>,
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
        let Offline { intake, entrance } = Offline::new(&config).await.unwrap();
        let way_in = WayIn::new(LIMIT);
        if loaded {
            way_in.intake.store(Some(intake));
        }
        let metrics = Arc::new(Metrics::new());
        let admin = Admin {
            entrance: entrance.clone(),
            audit: Audit::new(entrance.router().clone(), metrics.clone()),
            metrics,
            readiness: Readiness::default(),
            config: Arc::default(),
            way_in,
            envoys: Arc::new(|| serde_json::Value::Null),
            cluster: Arc::new(|| serde_json::Value::Null),
            replicas: Arc::new(|| serde_json::Value::Null),
            remote_index: Arc::new(|| serde_json::Value::Null),
        };
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}{PAGE}", listener.local_addr().unwrap());
        let server =
            tokio::spawn(async move { axum::serve(listener, routes(admin)).await.unwrap() });
        Self {
            url,
            entrance,
            server,
        }
    }

    async fn send(
        &self,
        method: Method,
        accept: &str,
        question: impl Into<reqwest::Body>,
    ) -> (u16, String) {
        let client = crate::tls::client().build().unwrap();
        let request = client
            .request(method, &self.url)
            .header("accept", accept)
            .body(question);
        let answer = request.send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    }

    async fn ask(&self, question: &Value) -> Value {
        let (status, text) = self.send(Method::POST, "*/*", question.to_string()).await;
        assert_eq!(status, 200, "{question}: {text}");
        serde_json::from_str(&text).unwrap()
    }
}

#[tokio::test]
async fn what_is_no_question_is_refused_with_a_sentence() {
    let pages = Pages::serve(true).await;
    let long = format!("{{\"body\":\"{}\"}}", "x".repeat(LIMIT * 6 + (1 << 20)));
    let cases = [
        (Method::POST, "[", 400, "no question of the form"),
        (Method::POST, "", 400, "no question of the form"),
        (Method::POST, "\u{0}\u{1}", 400, "no question of the form"),
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
            "the body is no text",
        ),
        (Method::POST, &long, 413, ""),
        (Method::GET, "", 405, ""),
    ];
    for (method, question, expected, text) in cases {
        let (status, answer) = pages.send(method, "*/*", question.to_owned()).await;
        assert!(
            status == expected && answer.contains(text),
            "{question:.40}: {status} {answer}"
        );
    }
}

#[tokio::test]
async fn rewrites_are_applied_as_for_requests() {
    let pages = Pages::serve(true).await;
    let exact: Value = serde_json::from_str(EXACT).unwrap();
    let of_m = pages.ask(&json!({ "body": exact })).await;
    let mut old = exact.clone();
    old["model"] = json!("old");
    let mut rewritten = pages.ask(&json!({ "body": old })).await;
    assert_eq!(
        (&of_m["model"], &of_m["requested_model"]),
        (&json!("m"), &Value::Null)
    );
    assert_eq!(rewritten["requested_model"].take(), "old");
    assert_eq!(rewritten, of_m);
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
async fn pool_argument_confines_the_choice() {
    let pages = Pages::serve(true).await;
    let explained = pages.ask(&json!({ "body": EXACT, "pool": "p" })).await;
    let judged = &explained["phases"][0]["judged"];
    assert_eq!(judged[0]["excluded"], "is not of the pool `p`", "{judged}");
}

#[tokio::test]
async fn before_the_tokenizers_are_there_the_answer_is_503_and_says_so() {
    let (status, answer) = Pages::serve(false)
        .await
        .send(Method::POST, "*/*", "{}")
        .await;
    assert_eq!(status, 503);
    let answer: Value = serde_json::from_str(&answer).unwrap();
    assert_eq!(
        answer["error"],
        "the tokenizers are still being loaded; /readyz says when they are there"
    );
}

#[tokio::test]
async fn a_body_is_the_same_as_text_as_json_and_as_bytes() {
    let pages = Pages::serve(true).await;
    let exact: Value = serde_json::from_str(EXACT).unwrap();
    let explained = pages.ask(&json!({ "body": exact })).await;
    assert_eq!(
        (&explained["prompt_tokens"], &explained["prompt_blocks"]),
        (&json!(9), &json!(2))
    );
    assert_eq!(
        explained["mode"], "approximate",
        "these workers have no events"
    );
    let judged = explained["phases"][0]["judged"].as_array().unwrap();
    assert_eq!(judged.len(), 2);
    assert!(
        judged.iter().all(|judged| judged["cost"]["total"] == 20.0),
        "{judged:?}"
    );
    assert_eq!(pages.ask(&json!({ "body": EXACT })).await, explained);
    assert_eq!(
        pages.ask(&json!({ "bytes": EXACT.as_bytes() })).await,
        explained
    );
    let question = Question::new(None, BTreeMap::new(), EXACT.into()).unwrap();
    assert_eq!(
        pages.ask(&json!(question)).await,
        explained,
        "as the command asks"
    );

    let load = pages.entrance.router().load().snapshot();
    assert!(
        load.iter().all(|load| load.active_requests == 0),
        "nothing is booked: {load:?}"
    );
}

#[tokio::test]
async fn what_cannot_be_read_goes_by_load_and_says_why() {
    let pages = Pages::serve(true).await;
    let binary = Question::new(None, BTreeMap::new(), vec![0xff, b'{', b'}', 0xfe]).unwrap();
    assert!(binary.bytes.is_some());
    let cases = [
        (
            json!({"body": {"model": "unheard-of", "messages": []}}),
            "unreadable",
        ),
        (
            json!({"body": {"model": "unheard-of", "prompt": "x"}}),
            "unknown_model",
        ),
        (
            json!({"body": {"model": "m", "prompt": "x"}}),
            "no_tokenizer",
        ),
        (json!({"body": "hello"}), "unreadable"),
        (json!({"body": [1]}), "unreadable"),
        (json!(binary), "unreadable"),
        (json!({}), "no_body"),
        (json!({"body": null}), "no_body"),
        (json!({"body": ""}), "no_body"),
        (json!({"body": "x".repeat(LIMIT + 1)}), "body_too_large"),
        (json!({"path": "/tokenize", "body": EXACT}), "not_inference"),
        (
            json!({"path": "/v1/chat/completions", "body": EXACT}),
            "unreadable",
        ),
    ];
    for (question, reason) in cases {
        let explained = pages.ask(&question).await;
        assert_eq!(
            (&explained["mode"], &explained["reason"]),
            (&json!("load_only"), &json!(reason)),
            "{question}"
        );
        assert_eq!(
            explained["phases"][0]["judged"].as_array().unwrap().len(),
            2,
            "{question}"
        );
        let sentence = explained["sentence"].as_str().unwrap();
        assert!(
            sentence.contains("; caches were not compared, because "),
            "{sentence}"
        );
    }
}

#[tokio::test]
async fn headers_and_sessions_count_and_a_table_is_to_be_had() {
    let pages = Pages::serve(true).await;
    let pinned = pages
        .ask(&json!({"body": EXACT, "headers": {"X-Worker-Instance-Id": "2"}}))
        .await;
    assert_eq!(pinned["phases"][0]["winner"]["worker"], "2");
    assert_eq!(
        pinned["phases"][0]["judged"][0]["excluded"],
        "the request is pinned to another worker"
    );

    let intake_question = json!({"body": EXACT, "headers": {"x-session-id": "s"}});
    let word = SessionWord {
        id: "s".into(),
        ..SessionWord::default()
    };
    let prompt = crate::router::Prompt::Estimated {
        tokens: 9,
        because: crate::router::Reason::NoTokenizer,
    };
    let request = crate::router::RouteRequest::new(None, prompt);
    drop(
        pages
            .entrance
            .admit(request.clone(), Some(&word), |_| {})
            .await
            .unwrap(),
    );
    let bound = pages
        .entrance
        .admit(request, Some(&word), |_| {})
        .await
        .unwrap()
        .booked
        .route
        .to
        .rank
        .worker
        .0;
    let explained = pages.ask(&intake_question).await;
    assert_eq!(
        explained["phases"][0]["winner"]["worker"],
        bound.to_string()
    );
    let other = explained["phases"][0]["judged"]
        .as_array()
        .unwrap()
        .iter()
        .find(|judged| judged["cost"].is_null());
    assert_eq!(
        other.unwrap()["excluded"],
        "the session is bound to another worker rank"
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
async fn a_few_questions_are_answered_at_once_and_others_told_to_come_again() {
    use tokio::io::AsyncWriteExt as _;
    let pages = Pages::serve(true).await;
    let address = pages
        .url
        .trim_start_matches("http://")
        .trim_end_matches(PAGE)
        .to_owned();
    let mut slow = Vec::new();
    for _ in 0..AT_ONCE {
        let mut asker = tokio::net::TcpStream::connect(&address).await.unwrap();
        let begun = format!("POST {PAGE} HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n\r\n{{");
        asker.write_all(begun.as_bytes()).await.unwrap();
        slow.push(asker);
    }
    let until = async |expected: u16| {
        let reached = async {
            while pages.send(Method::POST, "*/*", "{}").await.0 != expected {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(Duration::from_secs(20), reached)
            .await
            .unwrap();
    };
    until(429).await;
    drop(slow);
    until(200).await;
}
