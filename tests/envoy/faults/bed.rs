//! Deployments for fault injection, and clients that check for complete responses.

use std::time::Duration;

use futures_util::future::join_all;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use warmroute_testbed::deployment::{EngineSpec, MODEL};
use warmroute_testbed::ports::{PATIENCE, until};

use crate::routing::bed::{RoutedAnswer, RoutingBed, patient};
use crate::routing::contents::parse_content;

/// Starts engines with ids from 1 and the given arguments, behind an Envoy that waits long enough
/// for a busy machine.
pub(crate) async fn start(engines: u64, args: &[&str]) -> RoutingBed {
    let specs: Vec<_> = (1..=engines)
        .map(|id| EngineSpec::new(id).with(args))
        .collect();
    start_with(&specs, &json!({})).await
}

/// Like [`start`], with `process` in the configuration of warmroute.
pub(crate) async fn start_with(specs: &[EngineSpec], process: &Value) -> RoutingBed {
    let envoy = |shipped: &str| {
        let config = patient(shipped).replace("message_timeout: 30s", "message_timeout: 300s");
        // Envoy ends all exchanges if a busy machine answers its pings late.
        let pings = "connection_keepalive: {interval: 2s, timeout: ";
        assert!(config.contains(&format!("{pings}2s")));
        config.replace(&format!("{pings}2s"), &format!("{pings}300s"))
    };
    let bed = RoutingBed::start_with_envoy(specs, router_config(process), envoy).await;
    bed.wait_routable().await;
    bed
}

/// Returns the configuration of warmroute in [`start_with`].
pub(crate) fn router_config(process: &Value) -> Value {
    json!({"requests": {"limits": {"decision_timeout": "240s"}}, "process": process})
}

impl RoutingBed {
    /// Waits until warmroute routes requests exactly.
    pub(crate) async fn wait_routable(&self) {
        let exact = async || self.send(&chat("are you there?", 1)).await.mode() == "exact";
        assert!(
            until(PATIENCE, exact).await,
            "no request was routed exactly"
        );
        self.wait_unbooked().await;
    }

    /// Sends a request and asserts a complete response.
    pub(crate) async fn send(&self, body: &Value) -> RoutedAnswer {
        finish(self.post(body), body).await
    }

    /// Sends concurrent requests in the background, which assert complete responses. Every second
    /// one is streaming.
    pub(crate) fn send_many_in_background(
        &self,
        count: usize,
        name: &str,
        tokens: u64,
    ) -> Vec<JoinHandle<RoutedAnswer>> {
        let send = |at| {
            let name = format!("{name} {at}");
            let body = if at % 2 == 0 {
                chat(&name, tokens)
            } else {
                stream(&name, tokens)
            };
            self.send_and_check_in_background(body)
        };
        (0..count).map(send).collect()
    }

    /// Sends a request in the background and asserts a complete response.
    pub(crate) fn send_and_check_in_background(&self, body: Value) -> JoinHandle<RoutedAnswer> {
        let request = self.post(&body).timeout(PATIENCE * 2);
        tokio::spawn(async move { finish(request, &body).await })
    }

    pub(crate) async fn wait_total_load(&self, of: &str, wanted: u64) {
        let mut seen = 0;
        let reached = until(PATIENCE, async || {
            seen = self.total_load(of).await;
            seen == wanted
        });
        assert!(reached.await, "{of} is {seen}, not {wanted}");
    }

    /// Waits until Envoy reports this many open streams to warmroute.
    pub(crate) async fn wait_held(&self, wanted: u64) {
        let mut seen = 0;
        let reached = until(PATIENCE, async || {
            seen = self.envoy_stat("cluster.ext_proc.upstream_rq_active").await;
            seen == wanted
        });
        assert!(
            reached.await,
            "Envoy has {seen} streams to warmroute, not {wanted}"
        );
    }

    /// Waits until no exchange is open. Asserts that no rank has a booking.
    pub(crate) async fn wait_unbooked(&self) {
        self.wait_metric("open_exchanges", &[], 0.0).await;
        let booked = self.booked_ranks().await;
        assert!(booked.is_empty(), "{booked:?}");
    }
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

/// Sends a request and asserts a complete response.
pub(crate) async fn finish(request: reqwest::RequestBuilder, body: &Value) -> RoutedAnswer {
    let answer = RoutedAnswer::send(request).await;
    if let Err(error) = parse_content(body, &answer) {
        panic!("{error}: {answer:?}");
    }
    answer
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
pub(crate) async fn join_answers(requests: Vec<JoinHandle<RoutedAnswer>>) -> Vec<RoutedAnswer> {
    let answers = tokio::time::timeout(PATIENCE * 2, join_all(requests))
        .await
        .expect("requests still have no response");
    answers.into_iter().map(Result::unwrap).collect()
}

/// Waits for the exit of a process of warmroute and asserts success.
pub(crate) async fn assert_exits(router: &warmroute_testbed::child_process::ChildProcess) {
    let ended = until(PATIENCE, async || !router.is_running()).await;
    assert!(ended, "still running:\n{}", router.log_tail());
    let deadline = std::time::Instant::now() + Duration::from_secs(1);
    let status = router.wait_exit(deadline).unwrap();
    assert!(status.success(), "{status}:\n{}", router.log_tail());
}
