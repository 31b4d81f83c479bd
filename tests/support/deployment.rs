//! A deployment in its own directory, with helpers that query its state.

use std::net::SocketAddr;
use std::ops::{Deref, DerefMut};
use std::path::Path;

use reqwest::header::HeaderMap;
use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute_testbed::deployment::{
    EngineSpec, LocalDeployment, MODEL, ModelFiles, ProgramCommands,
};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::{PATIENCE, until};
use warmroute_testbed::programs::example_program;

use crate::support::openmetrics::{self, OpenMetricsPage};

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
        Self::start_with(specs, json!({}), str::to_owned).await
    }

    /// Like [`Self::start`], with `more` merged into the configuration of warmroute, and a changed
    /// Envoy configuration.
    pub(crate) async fn start_with(
        specs: &[EngineSpec],
        more: Value,
        envoy: impl FnOnce(&str) -> String,
    ) -> Self {
        let mut deployment = Self::engines(specs).await;
        deployment.write_workers().unwrap();
        deployment.serve(more, envoy).await;
        deployment
    }

    /// Starts engines only.
    pub(crate) async fn engines(specs: &[EngineSpec]) -> Self {
        let dir = tempfile::tempdir().unwrap();
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

    /// Starts warmroute with the existing workers file, and Envoy with a change of the shipped
    /// configuration.
    pub(crate) async fn serve(&mut self, more: Value, envoy: impl FnOnce(&str) -> String) {
        let envoy = envoy(&self.envoy_config());
        self.start_router(&with_response_headers(more))
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

    /// Restarts an engine.
    pub(crate) async fn restart_engine(&mut self, at: usize) {
        let run_dir = self.run_dir.clone();
        self.engines[at]
            .restart(&programs(), &run_dir)
            .await
            .unwrap();
    }

    /// Returns the addresses of the engines.
    pub(crate) fn addresses(&self) -> Vec<SocketAddr> {
        self.engines.iter().map(|engine| engine.address).collect()
    }

    /// Makes an engine misbehave.
    pub(crate) async fn misbehave(&self, id: u64, how: Value) {
        let mut engines = self.engines.iter();
        let engine = engines.find(|engine| engine.spec.id == id).unwrap();
        let request = self.http.post(engine.url("/sim/misbehave")).json(&how);
        assert!(request.send().await.unwrap().status().is_success());
    }

    /// Returns a request with a JSON body to Envoy.
    pub(crate) fn request(&self, path: &str, body: &Value) -> RequestBuilder {
        self.http.post(self.url(path)).json(body)
    }

    pub(crate) async fn post(&self, path: &str, body: &Value) -> RoutedAnswer {
        RoutedAnswer::send(self.request(path, body)).await
    }

    /// Sends a chat with one question, which is cheap for the engine.
    pub(crate) async fn query(&self, question: &str) -> RoutedAnswer {
        self.post("/v1/chat/completions", &chat(question)).await
    }

    /// Sends a completion. Completions need not share a first block, unlike chats with a common
    /// template.
    pub(crate) async fn complete(&self, prompt: &str) -> RoutedAnswer {
        let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 2});
        self.post("/v1/completions", &body).await
    }

    /// Returns the text of a page.
    pub(crate) async fn page(&self, url: impl reqwest::IntoUrl) -> String {
        let response = self.http.get(url).send().await.unwrap();
        response.text().await.unwrap()
    }

    /// Returns a counter or gauge of Envoy, or 0 before its first increment.
    pub(crate) async fn envoy_stat(&self, name: &str) -> u64 {
        let setup = self.envoy_setup();
        let page = setup.admin_url(&format!("/stats?filter=^{name}$"));
        let page = self.page(page).await;
        let value = page.trim().strip_prefix(name);
        value.map_or(0, |value| value.trim_start_matches(": ").parse().unwrap())
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

    /// Returns the sum of the samples of a metric that have these labels.
    pub(crate) async fn metric(&self, name: &str, labels: &[(&str, &str)]) -> f64 {
        self.metrics().await.sum(name, labels)
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

    /// Waits until the samples of a metric that have these labels have a sum. A metric that is not
    /// on the page has no sum.
    pub(crate) async fn wait_metric(&self, name: &str, labels: &[(&str, &str)], wanted: f64) {
        let what = format!("{name} {labels:?} is not {wanted}");
        self.wait_metrics(&what, |page| {
            page.samples(name).next().is_some() && page.sum(name, labels) == wanted
        })
        .await;
    }

    /// Returns a field of `/debug/load`, summed over the ranks of a worker.
    pub(crate) async fn load(&self, id: u64, of: &str) -> u64 {
        let id = json!(id.to_string());
        self.sum_load(of, |rank| rank["rank"]["worker"] == id).await
    }

    /// Returns a field of `/debug/load`, summed over all ranks.
    pub(crate) async fn total_load(&self, of: &str) -> u64 {
        self.sum_load(of, |_| true).await
    }

    /// Returns the ranks that have a booking, all from one page of `/debug/load`.
    pub(crate) async fn booked_ranks(&self) -> Vec<Value> {
        let page = self.debug_page("load").await.unwrap();
        let mut ranks = page.as_array().unwrap().clone();
        let loads = ["active_requests", "active_blocks", "active_prefill_tokens"];
        ranks.retain(|rank| loads.iter().any(|of| rank[*of] != json!(0)));
        ranks
    }

    async fn sum_load(&self, of: &str, is_counted: impl Fn(&Value) -> bool) -> u64 {
        let page = self.debug_page("load").await.unwrap();
        let ranks = page.as_array().unwrap().iter();
        ranks
            .filter(|rank| is_counted(rank))
            .map(|rank| {
                rank[of]
                    .as_u64()
                    .unwrap_or_else(|| panic!("no {of} in {page}"))
            })
            .sum()
    }

    /// Waits until no request is in flight and the index equals the caches of the engines.
    pub(crate) async fn settle(&self) {
        self.idle().await;
        let agree = async || self.indexed_blocks().await == self.cached_blocks().await;
        assert!(
            until(PATIENCE, agree).await,
            "the index differs from the caches of the engines"
        );
    }

    /// Waits until no request is booked.
    pub(crate) async fn idle(&self) {
        let is_idle = async || self.total_load("active_requests").await == 0;
        assert!(
            until(PATIENCE, is_idle).await,
            "load remains: {}",
            self.debug_page("load").await.unwrap()
        );
    }

    /// Returns the number of device blocks in the index.
    pub(crate) async fn indexed_blocks(&self) -> u64 {
        let index = self.debug_page("index").await.unwrap();
        index["total"]["device"].as_u64().unwrap()
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
    format!("Number {topic}: {}", words(topic, 120))
}

/// Returns words that depend on the topic.
pub(crate) fn words(topic: usize, count: usize) -> String {
    let words = [
        "river", "engine", "window", "copper", "letter", "garden", "signal", "winter", "harbour",
        "thread",
    ];
    let word = |at: usize| words[(at * 7 + topic * (at + 3)) % words.len()];
    (0..count).map(word).collect::<Vec<_>>().join(" ")
}

/// Response that a client received, with its routing decision.
#[derive(Clone, Debug)]
pub(crate) struct RoutedAnswer {
    pub(crate) status: StatusCode,
    headers: HeaderMap,
    pub(crate) text: String,
    /// The response ended before it was complete.
    pub(crate) is_incomplete: bool,
}

impl RoutedAnswer {
    /// Sends a request. Asserts that the response is complete.
    pub(crate) async fn send(request: RequestBuilder) -> Self {
        let answer = Self::send_unchecked(request).await;
        assert!(!answer.is_incomplete, "{answer:?}");
        answer
    }

    /// Like [`Self::send`], for a response that may be incomplete.
    pub(crate) async fn send_unchecked(request: RequestBuilder) -> Self {
        Self::read(request.send().await.unwrap()).await
    }

    /// Reads a response up to its end or its first error.
    pub(crate) async fn read(mut response: Response) -> Self {
        let status = response.status();
        let headers = response.headers().clone();
        let mut body = Vec::new();
        let is_incomplete = loop {
            match response.chunk().await {
                Ok(Some(chunk)) => body.extend_from_slice(&chunk),
                end => break end.is_err(),
            }
        };
        Self::from_parts(status, headers, &body, is_incomplete)
    }

    pub(crate) fn from_parts(
        status: StatusCode,
        headers: HeaderMap,
        body: &[u8],
        is_incomplete: bool,
    ) -> Self {
        Self {
            status,
            headers,
            text: String::from_utf8_lossy(body).into_owned(),
            is_incomplete,
        }
    }

    /// Returns the value of a header, or an empty string.
    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers
            .get(name)
            .map_or("", |value| value.to_str().unwrap())
    }

    /// Returns the worker that served the request.
    pub(crate) fn engine(&self) -> u64 {
        assert_eq!(self.status, StatusCode::OK, "{self:?}");
        self.header("x-engine-id").parse().unwrap()
    }

    /// Returns true if Envoy tried more than one worker.
    pub(crate) fn is_retried(&self) -> bool {
        let attempts = self.header("x-received-envoy-attempt-count");
        assert!(!attempts.is_empty(), "{self:?}");
        attempts != "1"
    }

    /// Returns the worker in the response header of warmroute.
    pub(crate) fn chosen(&self) -> u64 {
        self.header("x-worker-instance-id")
            .parse()
            .unwrap_or_else(|_| panic!("no worker was chosen: {self:?}"))
    }

    pub(crate) fn mode(&self) -> &str {
        self.header("x-warmroute-mode")
    }

    pub(crate) fn predicted(&self) -> Option<u64> {
        self.header("x-warmroute-predicted-cached-tokens")
            .parse()
            .ok()
    }

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// Returns the JSON documents of the response: one for a unary response, one per event for a
    /// stream.
    pub(crate) fn documents(&self) -> Vec<Value> {
        if !self.header("content-type").starts_with("text/event-stream") {
            return vec![self.json()];
        }
        assert!(self.text.ends_with("data: [DONE]\n\n"), "{self:?}");
        let events = self
            .text
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
        assert_eq!(
            (self.status.as_u16(), self.mode()),
            (200, "exact"),
            "{self:?}"
        );
        let served = self.header("x-engine-id");
        assert!(!served.is_empty(), "{self:?}");
        for name in ["x-received-worker-instance-id", "x-worker-instance-id"] {
            assert_eq!(served, self.header(name), "{name}: {self:?}");
        }
        for name in ["x-received-dp-rank", "x-served-dp-rank"] {
            assert_eq!(self.header(name), self.header("x-dp-rank"), "{self:?}");
        }
    }

    /// Asserts an error in OpenAI's format. Returns its code and message.
    pub(crate) fn error(&self, status: u16) -> (String, String) {
        assert_eq!(self.status, status, "{self:?}");
        assert_eq!(self.header("content-type"), "application/json", "{self:?}");
        let error = &self.json()["error"];
        let text = |key: &str| {
            error[key]
                .as_str()
                .unwrap_or_else(|| panic!("no {key}: {self:?}"))
                .to_owned()
        };
        assert!(
            !text("type").is_empty() && error.get("param").is_some(),
            "{self:?}"
        );
        (text("code"), text("message"))
    }

    /// Returns the value of `Retry-After` in seconds.
    pub(crate) fn retry_after(&self) -> u64 {
        self.header("retry-after")
            .parse()
            .unwrap_or_else(|_| panic!("no Retry-After: {self:?}"))
    }
}
