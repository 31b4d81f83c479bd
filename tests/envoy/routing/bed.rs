//! Test deployment with helpers that send requests and observe the state.

use std::ops::Deref;
use std::time::Duration;

use reqwest::{RequestBuilder, Response, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_engines::engine_client::MetricsPage;
use warmroute_testbed::deployment::{EngineProcess, EngineSpec, MODEL};
use warmroute_testbed::ports::until;

pub(crate) use crate::support::deployment::chat;
use crate::support::deployment::{TestDeployment, with_response_headers};

/// Timeout of every wait, long enough for a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// Returns true if the worker closed its connection after it had sent the response headers, and
/// before Envoy forwarded them.
///
/// While the headers wait for the external processor, Envoy answers 502 with the reason
/// `protocol error`, which it gives only for a connection that closes inside a response. That
/// answer does not name the worker.
pub(crate) fn is_reset_inside_response(status: u16, text: &str) -> bool {
    status == 502 && text.ends_with("reset reason: protocol error")
}

/// Deployment with the last metrics of its killed engines.
pub(crate) struct RoutingBed {
    pub(crate) stack: TestDeployment,
    /// Last metrics of killed engines, by worker id.
    harvested: Vec<(u64, MetricsPage)>,
}

impl Deref for RoutingBed {
    type Target = TestDeployment;

    fn deref(&self) -> &TestDeployment {
        &self.stack
    }
}

/// Returns an engine that is twenty times faster than a real one.
pub(crate) fn engine(id: u64) -> EngineSpec {
    EngineSpec::new(id).with(&["--speed", "20"])
}

/// Returns an engine for one phase.
pub(crate) fn engine_for(role: &str, id: u64) -> EngineSpec {
    engine(id).with_worker_fields(json!({"role": role}))
}

/// Returns the shipped configuration with longer timeouts, because one second can pass on a busy
/// machine.
pub(crate) fn patient(shipped: &str) -> String {
    let mut config = shipped.to_owned();
    for setting in [" message_timeout: ", " connect_timeout: "] {
        assert!(config.contains(&format!("{setting}1s")), "{setting}");
        config = config.replace(&format!("{setting}1s"), &format!("{setting}30s"));
    }
    config
}

/// Returns the shipped configuration with full-duplex request bodies, as in gateways that support
/// only this mode.
pub(crate) fn full_duplex(shipped: &str) -> String {
    let modes = "request_body_mode: BUFFERED # the worker is chosen by the whole prompt\n                \
                 request_trailer_mode: SKIP";
    assert_eq!(shipped.matches(modes).count(), 1);
    let full =
        "request_body_mode: FULL_DUPLEX_STREAMED\n                request_trailer_mode: SEND";
    shipped.replace(modes, full)
}

/// Returns a configuration that does not remove the pins and ranks of clients, as described in
/// `envoy/README.md`.
pub(crate) fn allow_pin_headers(shipped: &str) -> String {
    let mut config = patient(shipped);
    for name in [
        "x-worker-instance-id",
        "x-prefill-instance-id",
        "x-dp-rank",
        "x-data-parallel-rank",
        "x-prefill-dp-rank",
        "x-dynamo-worker-instance-id",
        "x-dynamo-prefill-instance-id",
        "x-dynamo-dp-rank",
        "x-dynamo-prefill-dp-rank",
    ] {
        let line = format!("              - remove: {name}\n");
        assert_eq!(config.matches(&line).count(), 1, "{name}");
        config = config.replace(&line, "");
    }
    config
}

impl RoutingBed {
    /// Starts the deployment and waits until requests are routed. `more` is merged into the
    /// configuration.
    pub(crate) async fn start(specs: &[EngineSpec], more: Value) -> Self {
        Self::start_with_envoy(specs, more, patient).await
    }

    /// Like [`Self::start`], with a changed Envoy configuration.
    pub(crate) async fn start_with_envoy(
        specs: &[EngineSpec],
        more: Value,
        envoy: impl Fn(&str) -> String,
    ) -> Self {
        Self::start_with_envoy_file("standalone", specs, more, envoy).await
    }

    /// Like [`Self::start_with_envoy`], with another shipped Envoy file.
    pub(crate) async fn start_with_envoy_file(
        file: &str,
        specs: &[EngineSpec],
        more: Value,
        envoy: impl Fn(&str) -> String,
    ) -> Self {
        let mut stack = TestDeployment::engines(specs).await;
        stack.write_workers().unwrap();
        stack
            .start_router(&with_response_headers(more))
            .await
            .unwrap();
        let shipped = stack.envoy_setup().shipped_config(file, &[]).unwrap();
        stack.start_envoy(&envoy(&shipped)).await.unwrap();
        Self {
            stack,
            harvested: Vec::new(),
        }
    }

    pub(crate) fn post(&self, body: &Value) -> RequestBuilder {
        self.http.post(self.stack.url(path_of(body))).json(body)
    }

    pub(crate) async fn ask(&self, body: &Value) -> RoutedAnswer {
        RoutedAnswer::of(self.post(body)).await
    }

    /// Like [`Self::ask`], in the background.
    pub(crate) fn send_in_background(&self, body: &Value) -> JoinHandle<RoutedAnswer> {
        tokio::spawn(RoutedAnswer::of(self.post(body)))
    }

    /// Makes an engine misbehave.
    pub(crate) async fn misbehave(&self, id: u64, how: Value) {
        let response = self
            .http
            .post(self.engine(id).url("/sim/misbehave"))
            .json(&how)
            .send()
            .await
            .unwrap();
        assert!(response.status().is_success());
    }

    /// Releases or holds the first tokens of an engine. While they are held, its prefills do not
    /// end.
    pub(crate) async fn set_first_tokens(&self, id: u64, released: bool) {
        self.misbehave(id, json!({"hold_first_tokens": !released}))
            .await;
    }

    pub(crate) fn engine(&self, id: u64) -> &EngineProcess {
        &self.stack.engines[self.at(id)]
    }

    fn at(&self, id: u64) -> usize {
        self.stack
            .engines
            .iter()
            .position(|engine| engine.spec.id == id)
            .unwrap()
    }

    /// Stores the metrics of an engine before it is killed.
    pub(crate) async fn save_metrics(&mut self, id: u64) {
        let page = self.page(id).await;
        self.harvested.push((id, page));
    }

    async fn page(&self, id: u64) -> MetricsPage {
        let page = self
            .http
            .get(self.engine(id).url("/metrics"))
            .send()
            .await
            .unwrap();
        MetricsPage::parse(&page.text().await.unwrap())
    }

    /// Returns the sum of a counter or gauge over all engines.
    pub(crate) async fn engines(&self, name: &str) -> f64 {
        let all: Vec<u64> = self
            .stack
            .engines
            .iter()
            .map(|engine| engine.spec.id)
            .collect();
        self.engine_sum(&all, name).await
    }

    /// Returns the sum of a counter or gauge over some engines. Counters include the last values of
    /// killed engines. Gauges of engines that do not run are zero.
    pub(crate) async fn engine_sum(&self, ids: &[u64], name: &str) -> f64 {
        let of = |page: &MetricsPage| page.sum(name).unwrap_or_else(|| panic!("no {name}"));
        let counted = |name: &str| name.ends_with("_total");
        let before = self
            .harvested
            .iter()
            .filter(|(id, _)| ids.contains(id) && counted(name));
        let mut sum = before.map(|(_, page)| of(page)).sum();
        for id in ids.iter().filter(|id| self.engine(**id).pid().is_some()) {
            sum += of(&self.page(*id).await);
        }
        sum
    }

    pub(crate) fn kill(&mut self, id: u64) {
        let at = self.at(id);
        self.stack.engines[at].kill9();
    }

    pub(crate) async fn restart(&mut self, id: u64) {
        let programs = self.stack.programs.clone();
        let run_dir = self.stack.run_dir.clone();
        let at = self.at(id);
        self.stack.engines[at]
            .restart(&programs, &run_dir)
            .await
            .unwrap();
    }

    /// Returns a field of one worker in `/debug/load`.
    pub(crate) async fn load(&self, id: u64, of: &str) -> u64 {
        let ranks = self.stack.debug_page("load").await.unwrap();
        let own = ranks
            .as_array()
            .unwrap()
            .iter()
            .filter(|rank| rank["rank"]["worker"] == json!(id.to_string()));
        own.map(|rank| {
            rank[of]
                .as_u64()
                .unwrap_or_else(|| panic!("no {of} in {ranks}"))
        })
        .sum()
    }

    pub(crate) async fn wait_load(&self, id: u64, of: &str, wanted: impl Fn(u64) -> bool) {
        let reached = until(SOON, async || wanted(self.load(id, of).await)).await;
        assert!(
            reached,
            "{of} of worker {id} is {}",
            self.load(id, of).await
        );
    }

    /// Waits until no exchange is open and no load is left. A failed request stays booked for the
    /// time that it would have taken. Asserts that no queue entry or session request is left.
    pub(crate) async fn wait_idle(&self) {
        self.wait_metrics("exchanges are open", |page| {
            page.sum("open_exchanges", &[]) == 0.0
        })
        .await;
        let is_unloaded = async || {
            let load = self.stack.debug_page("load").await.unwrap();
            load.as_array().unwrap().iter().all(|rank| {
                ["active_requests", "active_blocks", "active_prefill_tokens"]
                    .iter()
                    .all(|of| rank[*of] == json!(0))
            })
        };
        assert!(
            until(SOON, is_unloaded).await,
            "{}",
            self.stack.debug_page("load").await.unwrap()
        );
        let page = self.metrics().await;
        for family in [
            "queue_requests",
            "queue_prompt_tokens",
            "queue_cached_tokens",
            "session_requests",
        ] {
            assert_eq!(page.sum(family, &[]), 0.0, "{family}:\n{}", page.text());
        }
    }

    /// Waits until no exchange is open and the index equals the caches of the engines.
    pub(crate) async fn settle(&self) {
        self.wait_idle().await;
        self.stack.settle().await;
    }

    /// Sends a request directly to an engine, so that the engine caches the prompt.
    pub(crate) async fn warm(&self, id: u64, body: &Value) {
        let request = self
            .http
            .post(self.engine(id).url(path_of(body)))
            .json(body);
        assert_eq!(request.send().await.unwrap().status(), StatusCode::OK);
        self.settle().await;
    }
}

pub(crate) fn path_of(body: &Value) -> &'static str {
    if body["prompt"].is_null() {
        "/v1/chat/completions"
    } else {
        "/v1/completions"
    }
}

/// Returns a unary completion request. Completions share no cached blocks, unlike chats, whose
/// template is a common prefix.
pub(crate) fn text(prompt: &str) -> Value {
    json!({"model": MODEL, "prompt": prompt, "max_tokens": 2})
}

/// Returns a streaming chat request whose response includes the usage.
pub(crate) fn stream(question: &str, tokens: u64) -> Value {
    let mut body = chat(question);
    body["max_tokens"] = json!(tokens);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Returns a few hundred tokens that share no prefix with other topics.
pub(crate) fn essay(topic: usize) -> String {
    let words = [
        "river", "engine", "window", "copper", "letter", "garden", "signal", "winter", "harbour",
        "thread",
    ];
    let word = |at: usize| words[(at * 7 + topic * (at + 3)) % words.len()];
    let body: Vec<&str> = (0..300).map(word).collect();
    format!("{topic} is the number: {}", body.join(" "))
}

/// Response that a client received.
#[derive(Clone, Debug)]
pub(crate) struct RoutedAnswer {
    pub(crate) status: StatusCode,
    headers: reqwest::header::HeaderMap,
    pub(crate) text: String,
    /// The response ended before it was complete.
    pub(crate) cut: bool,
}

impl RoutedAnswer {
    pub(crate) async fn of(request: RequestBuilder) -> Self {
        let answer = Self::begun(request).await;
        assert!(!answer.cut, "{answer:?}");
        answer
    }

    /// Like [`Self::of`], for a response that may be incomplete.
    pub(crate) async fn begun(request: RequestBuilder) -> Self {
        Self::read(request.send().await.unwrap()).await
    }

    pub(crate) async fn read(mut response: Response) -> Self {
        let status = response.status();
        let headers = response.headers().clone();
        let mut text = Vec::new();
        let cut = loop {
            match response.chunk().await {
                Ok(Some(chunk)) => text.extend_from_slice(&chunk),
                end => break end.is_err(),
            }
        };
        Self {
            status,
            headers,
            text: String::from_utf8(text).unwrap(),
            cut,
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

    pub(crate) fn json(&self) -> Value {
        serde_json::from_str(&self.text).unwrap_or_else(|error| panic!("{error}: {self:?}"))
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
