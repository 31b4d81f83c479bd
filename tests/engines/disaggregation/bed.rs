//! Engines that exchange KV blocks, and their responses.

use std::time::{Duration, Instant};

use serde_json::Value;

use crate::engine::{PATIENCE, SimulatorProcess};

impl SimulatorProcess {
    /// Returns the sum of a metric over the ranks. Names without a prefix are those of the
    /// simulator.
    pub(crate) async fn metric(&self, name: &str) -> f64 {
        let name = if name.contains(':') {
            name.to_owned()
        } else {
            format!("engine_sim:{name}")
        };
        let page = self.get("/metrics").await;
        let values: Vec<f64> = page
            .lines()
            .filter(|line| {
                line.strip_prefix(&name)
                    .is_some_and(|rest| rest.starts_with(['{', ',']))
            })
            .map(|line| line.rsplit(' ').next().unwrap().parse().unwrap())
            .collect();
        assert!(!values.is_empty(), "{name} is not among\n{page}");
        values.iter().sum()
    }

    pub(crate) async fn expect_metrics(&self, expected: &[(&str, f64)]) {
        for &(name, value) in expected {
            assert_eq!(self.metric(name).await, value, "{name}");
        }
    }

    pub(crate) async fn eventually_metric(&self, name: &str, value: f64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let now = self.metric(name).await;
            if now == value {
                return;
            }
            assert!(Instant::now() < deadline, "{name} is {now}, not {value}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a number in the state of rank 0 has the expected value.
    pub(crate) async fn eventually(&self, pointer: &str, value: u64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.state(0).await;
            if state.pointer(pointer).unwrap() == value {
                return;
            }
            assert!(
                Instant::now() < deadline,
                "{pointer} is not {value} in {state}"
            );
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

/// Returns the body with additional fields.
pub(crate) fn with(body: &Value, fields: &Value) -> Value {
    let mut body = body.clone();
    body.as_object_mut()
        .unwrap()
        .extend(fields.as_object().unwrap().clone());
    body
}

pub(crate) fn text(answer: &Value) -> &str {
    answer["choices"][0]["text"].as_str().unwrap()
}

/// Returns the source of the KV blocks of a response.
pub(crate) fn kv(answer: &Value) -> &str {
    answer["engine_kv"].as_str().unwrap()
}

/// Returns the source of the KV blocks for every chunk of a stream that has a token.
pub(crate) fn streamed_kv(stream: &str) -> Vec<String> {
    let chunks = stream
        .split_terminator("\n\n")
        .filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok());
    chunks.map(|chunk| kv(&chunk).to_owned()).collect()
}

/// Returns the text of a stream and its finish reasons.
pub(crate) fn stream_text(stream: &str) -> (String, Vec<String>) {
    let mut stream_text = (String::new(), Vec::new());
    for chunk in stream
        .split_terminator("\n\n")
        .map(|event| event.strip_prefix("data: ").unwrap())
    {
        if chunk == "[DONE]" {
            continue;
        }
        let chunk: Value = serde_json::from_str(chunk).unwrap();
        stream_text.0 += chunk["choices"][0]["text"].as_str().unwrap_or_default();
        stream_text.1.extend(
            chunk["choices"][0]["finish_reason"]
                .as_str()
                .map(str::to_owned),
        );
    }
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    stream_text
}
