//! Deployment for fault injection, with clients that check for complete responses, and conditions
//! to wait for.

use std::time::Duration;

use futures_util::future::join_all;
use reqwest::Response;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::deployment::{EngineSpec, LocalDeployment, MODEL};
use warmroute_testbed::merge_config;
use warmroute_testbed::ports::until;

use crate::support::deployment::programs;

/// Timeout of each wait, long enough for a busy machine.
pub(crate) const SOON: Duration = Duration::from_secs(60);

/// A running deployment in its own directory.
pub(crate) struct FaultBed {
    pub(crate) stack: LocalDeployment,
    pub(crate) http: reqwest::Client,
    more: Value,
    _dir: tempfile::TempDir,
}

/// Message timeout of Envoy's ext_proc filter.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum TimeoutLength {
    /// The shipped timeout.
    Shipped,
    /// Long enough for a busy machine.
    Long,
}

/// Response that a client received.
#[derive(Debug)]
pub(crate) struct FaultAnswer {
    pub(crate) engine: u64,
    /// Routing mode, or `None` if Envoy selected the worker.
    pub(crate) mode: Option<String>,
}

impl FaultBed {
    /// Starts engines with ids from 1 and the given arguments.
    pub(crate) async fn start(engines: usize, args: &[&str], timeout: TimeoutLength) -> Self {
        let specs: Vec<_> = (1..=engines as u64)
            .map(|id| EngineSpec::new(id).with(args))
            .collect();
        Self::of(&specs, timeout, json!({})).await
    }

    pub(crate) async fn of(specs: &[EngineSpec], timeout: TimeoutLength, more: Value) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut all = json!({
            "gateway": {"response_headers": {"prediction": true, "worker": true}},
        });
        merge_config(&mut all, &more);
        if timeout == TimeoutLength::Long {
            all["requests"]["limits"] = json!({"decision_timeout": "25s"});
        }
        let mut stack = LocalDeployment::start_engines(&programs(), specs, dir.path())
            .await
            .unwrap();
        stack.write_workers().unwrap();
        stack.start_router(&all).await.unwrap();
        let mut config = stack.envoy_setup().standalone_config().unwrap();
        if timeout == TimeoutLength::Long {
            for setting in [" message_timeout: ", " connect_timeout: "] {
                assert_eq!(
                    config.matches(&format!("{setting}1s")).count(),
                    1,
                    "{setting}"
                );
                config = config.replace(&format!("{setting}1s"), &format!("{setting}30s"));
            }
            // Envoy ends all exchanges if a busy machine answers its pings late.
            let pings = "connection_keepalive: {interval: 2s, timeout: ";
            assert!(config.contains(&format!("{pings}2s")));
            config = config.replace(&format!("{pings}2s"), &format!("{pings}30s"));
        }
        stack.start_envoy(&config).await.unwrap();
        let http = warmroute_runtime::tls::http_client_builder()
            .build()
            .unwrap();
        let bed = Self {
            stack,
            http,
            more: all,
            _dir: dir,
        };
        bed.wait_routable().await;
        bed
    }

    /// Waits until warmroute routes requests exactly.
    pub(crate) async fn wait_routable(&self) {
        let exact =
            async || self.send(&chat("are you there?", 1)).await.mode.as_deref() == Some("exact");
        assert!(until(SOON, exact).await, "no request was routed exactly");
        self.wait_idle().await;
    }

    /// Starts a successor of warmroute with the same configuration. Returns the old process, which
    /// drains.
    pub(crate) async fn replace_router(&mut self) -> ChildProcess {
        let more = self.more.clone();
        self.stack.replace_router(&more).await.unwrap()
    }

    pub(crate) fn post(&self, body: &Value) -> reqwest::RequestBuilder {
        self.http
            .post(self.stack.url("/v1/chat/completions"))
            .json(body)
    }

    /// Sends a request and asserts a complete response.
    pub(crate) async fn send(&self, body: &Value) -> FaultAnswer {
        finish(self.post(body).send().await.unwrap(), body).await
    }

    /// Sends a request in the background and asserts a complete response.
    pub(crate) fn send_in_background(&self, body: Value) -> JoinHandle<FaultAnswer> {
        let request = self.post(&body);
        tokio::spawn(async move { finish(request.send().await.unwrap(), &body).await })
    }

    /// Sends concurrent requests in the background. Every second one is streaming.
    pub(crate) fn send_many_in_background(
        &self,
        count: usize,
        name: &str,
        tokens: u64,
    ) -> Vec<JoinHandle<FaultAnswer>> {
        let body = |at| {
            if at % 2 == 0 {
                chat(&format!("{name} {at}"), tokens)
            } else {
                stream(&format!("{name} {at}"), tokens)
            }
        };
        (0..count)
            .map(|at| self.send_in_background(body(at)))
            .collect()
    }

    /// Returns a field of `/debug/load`, summed over all ranks.
    pub(crate) async fn load(&self, of: &str) -> u64 {
        let ranks = self.stack.debug_page("load").await.unwrap();
        ranks
            .as_array()
            .unwrap()
            .iter()
            .map(|rank| rank[of].as_u64().unwrap())
            .sum()
    }

    pub(crate) async fn wait_load(&self, of: &str, wanted: u64) {
        let mut seen = 0;
        let reached = until(SOON, async || {
            seen = self.load(of).await;
            seen == wanted
        });
        assert!(reached.await, "{of} is {seen}, not {wanted}");
    }

    /// Returns a value from the metrics page of warmroute.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        number(&self.text(&self.stack.admin_url("/metrics")).await, name)
    }

    pub(crate) async fn wait_exchanges(&self, wanted: usize) {
        let mut seen = 0.0;
        let reached = until(SOON, async || {
            seen = self.metric("warmroute_open_exchanges").await;
            seen == wanted as f64
        });
        assert!(reached.await, "{seen} exchanges are open, not {wanted}");
    }

    /// Waits until Envoy reports this many open streams to warmroute.
    pub(crate) async fn wait_held(&self, wanted: usize) {
        let url = self
            .stack
            .envoy_setup()
            .admin_url("/stats?filter=cluster.ext_proc.upstream_rq_active");
        let mut seen = 0.0;
        let reached = until(SOON, async || {
            seen = number(
                &self.text(&url).await,
                "cluster.ext_proc.upstream_rq_active:",
            );
            seen == wanted as f64
        });
        assert!(
            reached.await,
            "Envoy has {seen} streams to warmroute, not {wanted}"
        );
    }

    /// Waits until no exchange is open. Asserts that no rank has a booking.
    pub(crate) async fn wait_idle(&self) {
        self.wait_exchanges(0).await;
        for rank in self
            .stack
            .debug_page("load")
            .await
            .unwrap()
            .as_array()
            .unwrap()
        {
            for of in ["active_requests", "active_blocks", "active_prefill_tokens"] {
                assert_eq!(rank[of], json!(0), "{of} of {rank}");
            }
        }
    }

    async fn text(&self, url: &str) -> String {
        self.http
            .get(url)
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
    }

    /// Sets the misbehavior of an engine.
    pub(crate) async fn misbehave(&self, at: usize, how: &Value) {
        let response = self
            .http
            .post(self.stack.engines[at].url("/sim/misbehave"))
            .json(how)
            .send()
            .await
            .unwrap();
        assert!(response.status().is_success());
    }
}

fn number(page: &str, name: &str) -> f64 {
    let line = page
        .lines()
        .find_map(|line| line.strip_prefix(name)?.trim().parse().ok());
    line.unwrap_or_else(|| panic!("no {name} in {page}"))
}

/// Returns a unary request.
pub(crate) fn chat(text: &str, tokens: u64) -> Value {
    // Prompts are several blocks long and differ from the first word on, so they share only the
    // template.
    let filler = "one two three four five six seven eight nine ten ".repeat(12);
    json!({"model": MODEL, "max_tokens": tokens, "messages": [{"role": "user", "content": format!("{text}: {filler}")}]})
}

/// Returns a streaming request.
pub(crate) fn stream(text: &str, tokens: u64) -> Value {
    let mut body = chat(text, tokens);
    body["stream"] = json!(true);
    body["stream_options"] = json!({"include_usage": true});
    body
}

/// Reads a response to its end and asserts that it is complete.
pub(crate) async fn finish(response: Response, request: &Value) -> FaultAnswer {
    let status = response.status();
    let headers = response.headers().clone();
    let text = response.text().await.unwrap();
    assert_eq!(status, 200, "{headers:?} {text}");
    let usage = if request["stream"] == json!(true) {
        usage_of_stream(&text)
    } else {
        serde_json::from_str::<Value>(&text).unwrap()["usage"].clone()
    };
    assert_eq!(usage["completion_tokens"], request["max_tokens"], "{text}");
    let header = |name: &str| {
        headers
            .get(name)
            .map(|value| value.to_str().unwrap().to_owned())
    };
    FaultAnswer {
        engine: header("x-engine-id").unwrap().parse().unwrap(),
        mode: header("x-warmroute-mode"),
    }
}

/// Returns the usage in the last event before `[DONE]`.
pub(crate) fn usage_of_stream(text: &str) -> Value {
    assert!(
        text.ends_with("data: [DONE]\n\n"),
        "truncated stream: {text}"
    );
    let events = text.lines().filter_map(|line| line.strip_prefix("data: {"));
    let usage =
        |event| serde_json::from_str::<Value>(&format!("{{{event}")).unwrap()["usage"].clone();
    events.map(usage).rfind(|usage| !usage.is_null()).unwrap()
}

/// Waits for all background requests, which assert complete responses.
pub(crate) async fn join_answers(requests: Vec<JoinHandle<FaultAnswer>>) -> Vec<FaultAnswer> {
    let answers = tokio::time::timeout(SOON * 2, join_all(requests))
        .await
        .expect("requests still have no response");
    answers.into_iter().map(Result::unwrap).collect()
}
