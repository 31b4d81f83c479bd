//! Engines that exchange KV blocks, and their responses.

use serde_json::Value;
use warmroute_testbed::ports::{PATIENCE, until};

use crate::engine::SimulatorProcess;

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
        let reached = until(PATIENCE, async || self.metric(name).await == value).await;
        assert!(
            reached,
            "{name} is {}, not {value}",
            self.metric(name).await
        );
    }

    /// Waits until a number in the state of rank 0 has the expected value.
    pub(crate) async fn eventually(&self, pointer: &str, value: u64) {
        let mut state = Value::Null;
        let reached = until(PATIENCE, async || {
            state = self.state(0).await;
            state.pointer(pointer).unwrap() == value
        });
        assert!(reached.await, "{pointer} is not {value} in {state}");
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

/// Returns the text of a stream.
pub(crate) fn stream_text(stream: &str) -> String {
    assert!(stream.ends_with("data: [DONE]\n\n"), "{stream}");
    let chunks = stream
        .split_terminator("\n\n")
        .filter_map(|event| serde_json::from_str::<Value>(event.strip_prefix("data: ")?).ok());
    chunks
        .filter_map(|chunk| Some(chunk["choices"][0]["text"].as_str()?.to_owned()))
        .collect()
}
