//! Test deployment with helpers that send requests and observe the state.

use std::ops::Deref;

use reqwest::{RequestBuilder, StatusCode};
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_engines::engine_client::MetricsPage;
use warmroute_testbed::deployment::{EngineProcess, EngineSpec, MODEL};
use warmroute_testbed::ports::{PATIENCE, until};

pub(crate) use crate::support::deployment::{RoutedAnswer, chat, fast as engine};
use crate::support::deployment::{TestDeployment, with_response_headers, words};

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

    pub(crate) async fn query(&self, body: &Value) -> RoutedAnswer {
        RoutedAnswer::send(self.post(body)).await
    }

    /// Like [`Self::query`], in the background.
    pub(crate) fn send_in_background(&self, body: &Value) -> JoinHandle<RoutedAnswer> {
        tokio::spawn(RoutedAnswer::send(self.post(body)))
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
        let page = self.engine_metrics(id).await;
        self.harvested.push((id, page));
    }

    async fn engine_metrics(&self, id: u64) -> MetricsPage {
        let url = self.engine(id).url("/metrics");
        MetricsPage::parse(&self.stack.page(url).await)
    }

    /// Returns the sum of a counter or gauge over all engines.
    pub(crate) async fn engines(&self, name: &str) -> f64 {
        let all: Vec<u64> = self.engines.iter().map(|engine| engine.spec.id).collect();
        self.engine_sum(&all, name).await
    }

    /// Waits until a counter or gauge has a sum over all engines.
    pub(crate) async fn wait_engines(&self, name: &str, wanted: f64) {
        let reached = until(PATIENCE, async || self.engines(name).await == wanted).await;
        assert!(
            reached,
            "{name} is {}, not {wanted}",
            self.engines(name).await
        );
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
            sum += of(&self.engine_metrics(*id).await);
        }
        sum
    }

    pub(crate) fn kill(&mut self, id: u64) {
        let at = self.at(id);
        self.stack.engines[at].kill9();
    }

    pub(crate) async fn restart(&mut self, id: u64) {
        let at = self.at(id);
        self.stack.restart_engine(at).await;
    }

    pub(crate) async fn wait_load(&self, id: u64, of: &str, wanted: impl Fn(u64) -> bool) {
        let reached = until(PATIENCE, async || wanted(self.load(id, of).await)).await;
        assert!(
            reached,
            "{of} of worker {id} is {}",
            self.load(id, of).await
        );
    }

    /// Waits until no exchange is open and no load is left. A failed request stays booked for the
    /// time that it would have taken. Asserts that no queue entry or session request is left.
    pub(crate) async fn wait_idle(&self) {
        self.wait_metric("open_exchanges", &[], 0.0).await;
        let is_unloaded = async || self.booked_ranks().await.is_empty();
        assert!(
            until(PATIENCE, is_unloaded).await,
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
    format!("{topic} is the number: {}", words(topic, 300))
}
