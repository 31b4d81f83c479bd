//! A deployment in its own directory, with helpers that query its state.

use std::ops::{Deref, DerefMut};
use std::path::Path;
use std::time::Duration;

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute_testbed::deployment::{
    EngineSpec, LocalDeployment, MODEL, ModelFiles, ProgramCommands,
};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::until;
use warmroute_testbed::programs::example_program;

use crate::support::openmetrics::{self, OpenMetricsPage};

/// Timeout of each wait, long enough for a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// A deployment and a client. On drop, the processes end before their directory is removed.
pub(crate) struct TestDeployment {
    stack: LocalDeployment,
    pub(crate) http: reqwest::Client,
    _dir: TempDir,
}

impl Deref for TestDeployment {
    type Target = LocalDeployment;

    fn deref(&self) -> &LocalDeployment {
        &self.stack
    }
}

impl DerefMut for TestDeployment {
    fn deref_mut(&mut self) -> &mut LocalDeployment {
        &mut self.stack
    }
}

/// Returns an engine that is twenty times faster than a real one.
pub(crate) fn fast(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "20"])
}

/// Returns the executables of warmroute and the engine simulator.
pub(crate) fn programs() -> ProgramCommands {
    ProgramCommands {
        warmroute: vec![env!("CARGO_BIN_EXE_warmroute").into()],
        engine: vec![example_program("engine_sim").unwrap().into()],
        model: ModelFiles::Reduced,
    }
}

impl TestDeployment {
    /// Starts engines, warmroute and Envoy, with response headers for each decision.
    pub(crate) async fn start(specs: &[EngineSpec]) -> Self {
        let mut deployment = Self::engines(specs).await;
        deployment.write_workers().unwrap();
        deployment.serve().await;
        deployment
    }

    /// Starts engines only.
    pub(crate) async fn engines(specs: &[EngineSpec]) -> Self {
        let dir = tempfile::Builder::new()
            .prefix("warmroute-")
            .tempdir()
            .unwrap();
        let stack = LocalDeployment::start_engines(&programs(), specs, dir.path())
            .await
            .unwrap();
        let http = warmroute_runtime::tls::http_client_builder()
            .timeout(PATIENCE)
            .build()
            .unwrap();
        Self {
            stack,
            http,
            _dir: dir,
        }
    }

    /// Starts warmroute with the existing workers file, and Envoy with the shipped configuration.
    pub(crate) async fn serve(&mut self) {
        let envoy = self.envoy_config();
        self.start_router(&with_response_headers(json!({})))
            .await
            .unwrap();
        self.start_envoy(&envoy).await.unwrap();
    }

    /// Returns the shipped configuration with a longer message timeout, because one second can pass
    /// on a busy machine.
    pub(crate) fn envoy_config(&self) -> String {
        let shipped = self.envoy_setup().standalone_config().unwrap();
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

    /// Sends a chat with one question, which is cheap for the engine.
    pub(crate) async fn ask(&self, question: &str) -> ChatAnswer {
        ChatAnswer::read(self.post("/v1/chat/completions", &chat(question)).await).await
    }

    /// Sends a completion. Completions need not share a first block, unlike chats with a common
    /// template.
    pub(crate) async fn complete(&self, prompt: &str) -> ChatAnswer {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 2});
        ChatAnswer::read(self.post("/v1/completions", &body).await).await
    }

    pub(crate) async fn metrics(&self) -> OpenMetricsPage {
        let request = self
            .http
            .get(self.admin_url("/metrics"))
            .header("accept", openmetrics::ACCEPT);
        let response = request.send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK);
        OpenMetricsPage::read(&response.text().await.unwrap())
    }

    /// Waits until the metrics page meets a condition.
    pub(crate) async fn wait_metrics(
        &self,
        what: &str,
        condition: impl Fn(&OpenMetricsPage) -> bool,
    ) {
        let met = until(PATIENCE, async || condition(&self.metrics().await)).await;
        assert!(met, "{what}:\n{}", self.metrics().await.text());
    }

    /// Waits until no request is in flight and the index equals the caches of the engines.
    pub(crate) async fn settle(&self) {
        self.idle().await;
        let agree = async || {
            let indexed = self.debug_page("index").await.unwrap()["total"]["device"]
                .as_u64()
                .unwrap();
            indexed == self.cached_blocks().await
        };
        assert!(
            until(PATIENCE, agree).await,
            "the index differs from the caches of the engines"
        );
    }

    /// Waits until no request is booked.
    pub(crate) async fn idle(&self) {
        let idle = async || {
            let load = self.debug_page("load").await.unwrap();
            load.as_array()
                .unwrap()
                .iter()
                .all(|rank| rank["active_requests"] == 0)
        };
        assert!(
            until(PATIENCE, idle).await,
            "load remains: {}",
            self.debug_page("load").await.unwrap()
        );
    }

    /// Returns the number of distinct device blocks in the caches of all running engines.
    pub(crate) async fn cached_blocks(&self) -> u64 {
        let mut blocks = 0;
        for engine in &self.stack.engines {
            let Ok(response) = self.http.get(engine.url("/sim/state")).send().await else {
                continue;
            };
            let state: Value = response.json().await.unwrap();
            let ranks = state["ranks"].as_array().unwrap().iter();
            blocks += ranks
                .map(|rank| rank["cached"].as_array().unwrap().len() as u64)
                .sum::<u64>();
        }
        blocks
    }

    /// Returns the log of warmroute.
    pub(crate) fn router_log(&self) -> String {
        std::fs::read_to_string(self.router().unwrap().log()).unwrap()
    }

    pub(crate) fn workers_file(&self) -> std::path::PathBuf {
        Path::new(&self.run_dir).join("workers.yaml")
    }
}

/// Returns a configuration with response headers for each decision, and with timeouts that suit a
/// busy machine.
#[expect(clippy::needless_pass_by_value, reason = "callers pass literals")]
pub(crate) fn with_response_headers(more: Value) -> Value {
    let mut config = json!({
        "gateway": {"response_headers": {"worker": true, "prediction": true}},
        "requests": {"limits": {"decision_timeout": "30s"}},
        "process": {"readiness": {"event_sources_timeout": "60s"}, "log": {"level": "info"}},
    });
    merge_config(&mut config, &more);
    config
}

/// Returns a unary chat request.
pub(crate) fn chat(question: &str) -> Value {
    json!({"model": MODEL, "messages": [{"role": "user", "content": question}], "max_tokens": 2})
}

/// Returns a few dozen words that share no prefix with other topics.
pub(crate) fn essay(topic: usize) -> String {
    let words = [
        "river", "engine", "window", "copper", "letter", "garden", "signal", "winter", "harbour",
        "thread",
    ];
    let word = |at: usize| words[(at * 7 + topic * (at + 3)) % words.len()];
    let body: Vec<&str> = (0..120).map(word).collect();
    format!("Number {topic}: {}", body.join(" "))
}

/// A response with its routing decision.
#[derive(Clone, Debug)]
pub(crate) struct ChatAnswer {
    pub(crate) status: StatusCode,
    headers: reqwest::header::HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl ChatAnswer {
    pub(crate) async fn read(response: Response) -> Self {
        let status = response.status();
        let headers = response.headers().clone();
        Self {
            status,
            headers,
            body: response.bytes().await.unwrap().to_vec(),
        }
    }

    /// Returns a header, or an empty string.
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

    /// Returns the JSON documents of the response: one for a unary response, one per event for a
    /// stream.
    pub(crate) fn documents(&self) -> Vec<Value> {
        let text = String::from_utf8(self.body.clone()).unwrap();
        if !self.header("content-type").starts_with("text/event-stream") {
            return vec![serde_json::from_str(&text).unwrap()];
        }
        assert!(
            text.ends_with("data: [DONE]\n\n"),
            "truncated stream: {text}"
        );
        let events = text
            .lines()
            .filter_map(|line| line.strip_prefix("data: "))
            .filter(|event| *event != "[DONE]");
        events
            .map(|event| serde_json::from_str(event).unwrap())
            .collect()
    }

    /// Returns the cached tokens in the usage of the last document.
    pub(crate) fn cached_tokens(&self) -> u64 {
        let documents = self.documents();
        let usage = &documents.last().unwrap()["usage"];
        usage["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap_or_else(|| panic!("no usage in {documents:?}"))
    }

    /// Asserts that the route is exact and that all headers agree on the worker.
    pub(crate) fn assert_exact(&self) {
        assert_eq!(self.status, StatusCode::OK, "{self:?}");
        assert_eq!(self.mode(), "exact", "{self:?}");
        assert!(!self.engine().is_empty(), "{self:?}");
        assert_eq!(
            self.engine(),
            self.header("x-received-worker-instance-id"),
            "worker id received by the engine: {self:?}"
        );
        assert_eq!(
            self.engine(),
            self.header("x-worker-instance-id"),
            "worker id sent to the client: {self:?}"
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
