//! Engine processes and requests to them.

use std::ops::Range;
use std::process::Stdio;
use std::time::{Duration, Instant};

use reqwest::{Response, StatusCode};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use warmroute_testbed::programs::example_program;

pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// A running engine. It exits with the test, because its standard input closes.
pub(crate) struct DisaggregatedEngine {
    _child: Child,
    _stdin: Option<ChildStdin>,
    address: String,
    pub(crate) replay: Option<String>,
    http: reqwest::Client,
}

impl DisaggregatedEngine {
    pub(crate) async fn start(flags: &[&str]) -> Self {
        let mut child = Command::new(example_program("engine_sim").unwrap())
            .args(["--exit-on-stdin-eof", "--bootstrap-port", "0"])
            .args(if flags.contains(&"--listen") {
                &[][..]
            } else {
                &["--listen", "127.0.0.1:0"]
            })
            .args(["--tokenizer", "examples/models/tinyllama/tokenizer.json.gz"])
            .args(if flags.contains(&"--speed") {
                &[][..]
            } else {
                &["--speed", "20"]
            })
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        tokio::time::timeout(PATIENCE, stdout.read_line(&mut line))
            .await
            .expect("the engine is not ready in time")
            .unwrap();
        let ready: Value = serde_json::from_str(&line).expect("the engine prints one line of JSON");
        let text = |value: &Value| value.as_str().map(str::to_owned);
        Self {
            address: text(&ready["listening"]).unwrap(),
            replay: text(&ready["kv_event_sources"][0]["replay_endpoint"]),
            _stdin: child.stdin.take(),
            _child: child,
            http: warmroute_runtime::tls::http_client_builder()
                .build()
                .unwrap(),
        }
    }

    pub(crate) async fn try_post(
        &self,
        path: &str,
        body: &Value,
        headers: &[(&str, &str)],
    ) -> reqwest::Result<Response> {
        let request = self
            .http
            .post(format!("http://{}{path}", self.address))
            .json(body);
        headers
            .iter()
            .fold(request, |request, (name, value)| {
                request.header(*name, *value)
            })
            .send()
            .await
    }

    /// Sends a request. Returns the status and the body, or panics after a timeout.
    pub(crate) async fn post(&self, path: &str, body: &Value) -> (StatusCode, String) {
        let answered = async {
            let response = self.try_post(path, body, &[]).await.unwrap();
            (response.status(), response.text().await.unwrap())
        };
        tokio::time::timeout(PATIENCE, answered)
            .await
            .expect("no response in time")
    }

    /// Sends a completion request.
    pub(crate) async fn send(&self, body: &Value) -> (StatusCode, Value) {
        let (status, text) = self.post("/v1/completions", body).await;
        (status, serde_json::from_str(&text).unwrap())
    }

    /// Sends a completion request that must succeed.
    pub(crate) async fn complete(&self, body: &Value) -> Value {
        let (status, answer) = self.send(body).await;
        assert_eq!(status, StatusCode::OK, "{answer}");
        answer
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        self.http
            .get(format!("http://{}{path}", self.address))
            .send()
            .await
            .unwrap()
            .text()
            .await
            .unwrap()
    }

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

    pub(crate) async fn state(&self) -> Value {
        serde_json::from_str::<Value>(&self.get("/sim/state").await).unwrap()["ranks"][0].take()
    }

    /// Waits until a number in the state of rank 0 has the expected value.
    pub(crate) async fn eventually(&self, pointer: &str, value: u64) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.state().await;
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

pub(crate) fn ids(range: Range<u32>, max_tokens: u32) -> Value {
    json!({"model": "sim", "prompt": range.collect::<Vec<_>>(), "max_tokens": max_tokens})
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

pub(crate) fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
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
