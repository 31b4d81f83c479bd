//! One deployment in a directory of its own, and what the tests ask it.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Duration;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;

use crate::openmetrics::{self, Page};
use crate::support::ports::until;
use crate::support::stack::{EngineSpec, MODEL, Programs, Stack};

/// How long anything may take on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A deployment and a client. The processes end before their directory goes.
pub(crate) struct Deployment {
    stack: Stack,
    pub(crate) http: reqwest::Client,
    _dir: TempDir,
}

impl Deref for Deployment {
    type Target = Stack;

    fn deref(&self) -> &Stack {
        &self.stack
    }
}

impl DerefMut for Deployment {
    fn deref_mut(&mut self) -> &mut Stack {
        &mut self.stack
    }
}

/// An engine twenty times faster than a real one.
pub(crate) fn fast(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "20"])
}

pub(crate) fn programs() -> Programs {
    let tests = std::env::current_exe().unwrap();
    let engine = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("engine_sim");
    // A whole `cargo test` builds it first; a run of this test alone does not.
    assert!(
        engine.exists(),
        "{} is missing: cargo build --example engine_sim",
        engine.display()
    );
    Programs {
        warmroute: vec![env!("CARGO_BIN_EXE_warmroute").into()],
        engine: vec![engine.into()],
    }
}

impl Deployment {
    /// Engines, warmroute and Envoy; the answers tell every decision.
    pub(crate) async fn start(specs: &[EngineSpec]) -> Self {
        let mut deployment = Self::engines(specs).await;
        deployment.write_workers().unwrap();
        deployment.serve().await;
        deployment
    }

    /// The engines alone.
    pub(crate) async fn engines(specs: &[EngineSpec]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("warmroute-")
            .tempdir()
            .unwrap();
        let stack = Stack::engines(&programs(), specs, dir.path())
            .await
            .unwrap();
        let http = warmroute::tls::client().timeout(PATIENCE).build().unwrap();
        Self {
            stack,
            http,
            _dir: dir,
        }
    }

    /// Starts warmroute with the workers file as it is, and Envoy with the shipped configuration.
    pub(crate) async fn serve(&mut self) {
        let envoy = self.envoy_config();
        self.start_router(&telling(json!({}))).await.unwrap();
        self.start_envoy(&envoy).await.unwrap();
    }

    /// The shipped configuration. Only how long it waits for warmroute is another: on a busy machine a second passes
    /// without anybody being at fault.
    pub(crate) fn envoy_config(&self) -> String {
        let shipped = self.standalone().config().unwrap();
        assert_eq!(shipped.matches(" message_timeout: 1s").count(), 1);
        shipped.replace(" message_timeout: 1s", " message_timeout: 30s")
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> Response {
        self.http
            .post(self.url(path))
            .json(body)
            .send()
            .await
            .unwrap()
    }

    /// A chat with one question, so small that the engine has hardly anything to do.
    pub(crate) async fn ask(&self, question: &str) -> Answered {
        Answered::read(self.post("/v1/chat/completions", &chat(question)).await).await
    }

    /// A completion. Unlike chats, whose template begins all of them alike, completions need not share a first block.
    pub(crate) async fn complete(&self, prompt: &str) -> Answered {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 2});
        Answered::read(self.post("/v1/completions", &body).await).await
    }

    pub(crate) async fn metrics(&self) -> Page {
        let asking = self
            .http
            .get(self.admin_url("/metrics"))
            .header("accept", openmetrics::ACCEPT);
        let response = asking.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        Page::read(&response.text().await.unwrap())
    }

    /// Waits until a metrics page pleases.
    pub(crate) async fn metrics_show(&self, what: &str, pleases: impl Fn(&Page) -> bool) {
        let met = until(PATIENCE, async || pleases(&self.metrics().await)).await;
        assert!(met, "{what}:\n{}", self.metrics().await.text());
    }

    /// Waits until nothing is in flight and warmroute's index holds exactly what the engines hold.
    pub(crate) async fn settle(&self) {
        self.idle().await;
        let agree = async || {
            let indexed = self.debug("index").await.unwrap()["total"]["device"]
                .as_u64()
                .unwrap();
            indexed == self.cached_blocks().await
        };
        assert!(
            until(PATIENCE, agree).await,
            "the index differs from what the engines hold"
        );
    }

    /// Waits until no request is booked any more.
    pub(crate) async fn idle(&self) {
        let idle = async || {
            let load = self.debug("load").await.unwrap();
            load.as_array()
                .unwrap()
                .iter()
                .all(|rank| rank["active_requests"] == 0)
        };
        assert!(
            until(PATIENCE, idle).await,
            "load is left over: {}",
            self.debug("load").await.unwrap()
        );
    }

    /// Distinct blocks cached on the device, summed over the ranks of the engines.
    pub(crate) async fn cached_blocks(&self) -> u64 {
        let mut blocks = 0;
        for engine in &self.stack.engines {
            let state: Value = self
                .http
                .get(engine.url("/sim/state"))
                .send()
                .await
                .unwrap()
                .json()
                .await
                .unwrap();
            let ranks = state["ranks"].as_array().unwrap().iter();
            blocks += ranks
                .map(|rank| rank["cached"].as_array().unwrap().len() as u64)
                .sum::<u64>();
        }
        blocks
    }

    /// What warmroute has logged.
    pub(crate) fn router_log(&self) -> String {
        std::fs::read_to_string(self.router().unwrap().log()).unwrap()
    }

    pub(crate) fn workers_file(&self) -> std::path::PathBuf {
        Path::new(&self.run_dir).join("workers.yaml")
    }
}

/// warmroute's configuration for answers that tell every decision, without a deadline that a busy machine would miss.
pub(crate) fn telling(more: Value) -> Value {
    let mut config = json!({
        "response": {"worker_header": true, "prediction_header": true},
        "limits": {"exchange_deadline": "30s"},
        "readiness": {"event_sources_deadline": "60s"},
        // So slow that only a notification can bring a change in time.
        "discovery": {"poll": "1h"},
        "log": {"level": "info"},
    });
    let Value::Object(more) = more else {
        panic!("{more} is no section")
    };
    config.as_object_mut().unwrap().extend(more);
    config
}

pub(crate) fn chat(question: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 2})
}

/// A few dozen words that no other call with another `topic` begins with.
pub(crate) fn essay(topic: usize) -> String {
    let words = [
        "river", "engine", "window", "copper", "letter", "garden", "signal", "winter", "harbour",
        "thread",
    ];
    let word = |at: usize| words[(at * 7 + topic * (at + 3)) % words.len()];
    let body: Vec<&str> = (0..120).map(word).collect();
    format!("Number {topic}: {}", body.join(" "))
}

/// An answer and the decision behind it.
#[derive(Clone, Debug)]
pub(crate) struct Answered {
    pub(crate) status: StatusCode,
    headers: reqwest::header::HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl Answered {
    pub(crate) async fn read(response: Response) -> Self {
        let (status, headers) = (response.status(), response.headers().clone());
        Self {
            status,
            headers,
            body: response.bytes().await.unwrap().to_vec(),
        }
    }

    /// A header; empty where there is none.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    pub(crate) fn mode(&self) -> &str {
        self.header("x-warmroute-mode")
    }

    pub(crate) fn engine(&self) -> &str {
        self.header("x-engine-id")
    }

    pub(crate) fn predicted(&self) -> Option<u64> {
        self.header("x-warmroute-predicted-cached-tokens")
            .parse()
            .ok()
    }

    /// The answer as a document, the events of a stream as a list.
    pub(crate) fn documents(&self) -> Vec<Value> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        if !self.header("content-type").starts_with("text/event-stream") {
            return vec![serde_json::from_str(&text).unwrap()];
        }
        assert!(
            text.ends_with("data: [DONE]\n\n"),
            "a stream that was cut: {text}"
        );
        let events = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter(|event| *event != "[DONE]");
        events
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    /// The usage, which the last document carries.
    pub(crate) fn cached_tokens(&self) -> u64 {
        let documents = self.documents();
        let usage = &documents.last().unwrap()["usage"];
        usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or_else(|| panic!("no usage in {documents:?}"))
    }

    /// Everything that says who served agrees on an exact route.
    pub(crate) fn assert_exact(&self) {
        assert_eq!(self.status, StatusCode::OK, "{self:?}");
        assert_eq!(self.mode(), "exact", "{self:?}");
        assert!(!self.engine().is_empty(), "{self:?}");
        assert_eq!(
            self.engine(),
            self.header("x-received-worker-instance-id"),
            "as the engine received it: {self:?}"
        );
        assert_eq!(
            self.engine(),
            self.header("x-worker-instance-id"),
            "as the client is told: {self:?}"
        );
        assert_eq!(
            self.header("x-received-dp-rank"),
            self.header("x-dp-rank"),
            "{self:?}"
        );
        assert_eq!(
            self.header("x-served-dp-rank"),
            self.header("x-dp-rank"),
            "{self:?}"
        );
    }
}
