//! Processes of the engine simulator, and requests to them.

use std::ops::Range;
use std::process::Stdio;

use bytes::Bytes;
use reqwest::{Response, StatusCode};
use serde::Serialize;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::process::{Child, ChildStdin, Command};
use tokio::time::timeout;
use warmroute_testbed::ports::PATIENCE;
use warmroute_testbed::programs::example_program;
use zeromq::{DealerSocket, Socket as _, SocketRecv as _, SocketSend as _, ZmqMessage};

/// A running engine. It exits with the test, because its standard input closes.
pub(crate) struct SimulatorProcess {
    _child: Child,
    _stdin: Option<ChildStdin>,
    pub(crate) address: String,
    pub(crate) sources: Vec<Value>,
    pub(crate) http: reqwest::Client,
}

impl SimulatorProcess {
    pub(crate) async fn start(flags: &[&str]) -> Self {
        let mut command = Command::new(example_program("engine_sim").unwrap());
        command.args(["--listen", "127.0.0.1:0", "--exit-on-stdin-eof"]);
        if !flags.contains(&"--speed") {
            command.args(["--speed", "20"]);
        }
        let mut child = command
            .args(flags)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        timeout(PATIENCE, stdout.read_line(&mut line))
            .await
            .expect("the engine is not ready in time")
            .unwrap();
        let ready: Value = serde_json::from_str(&line).expect("the engine prints one line of JSON");
        let sources = ready["kv_event_sources"].as_array();
        Self {
            address: ready["listening"].as_str().unwrap().to_owned(),
            sources: sources.cloned().unwrap_or_default(),
            _stdin: child.stdin.take(),
            _child: child,
            http: warmroute_runtime::tls::http_client_builder()
                .timeout(PATIENCE)
                .build()
                .unwrap(),
        }
    }

    pub(crate) async fn try_post(
        &self,
        path: &str,
        body: impl Serialize,
        headers: &[(&str, &str)],
    ) -> reqwest::Result<Response> {
        let url = format!("http://{}{path}", self.address);
        let mut request = self.http.post(url).json(&body);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send().await
    }

    pub(crate) async fn post(&self, path: &str, body: impl Serialize) -> Response {
        self.try_post(path, body, &[]).await.unwrap()
    }

    /// Sends a request, and returns the JSON of the response.
    pub(crate) async fn post_json(&self, path: &str, body: impl Serialize) -> Value {
        self.post(path, body).await.json().await.unwrap()
    }

    /// Sends a completion request that must succeed.
    pub(crate) async fn complete(&self, body: impl Serialize) -> Value {
        let response = self.post("/v1/completions", body).await;
        assert_eq!(response.status(), StatusCode::OK);
        response.json().await.unwrap()
    }

    pub(crate) async fn get(&self, path: &str) -> String {
        let url = format!("http://{}{path}", self.address);
        let response = self.http.get(url).send().await.unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        response.text().await.unwrap()
    }

    pub(crate) async fn state(&self, rank: usize) -> Value {
        serde_json::from_str::<Value>(&self.get("/sim/state").await).unwrap()["ranks"][rank].take()
    }
}

pub(crate) fn ids(range: Range<u32>, max_tokens: u32) -> Value {
    json!({"model": "sim", "prompt": range.collect::<Vec<_>>(), "max_tokens": max_tokens})
}

pub(crate) fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

/// Fetches the frames of all batches from sequence number `start` onwards from a replay socket.
pub(crate) async fn replay(endpoint: &Value, start: u64) -> Vec<Vec<Bytes>> {
    let mut socket = DealerSocket::new();
    socket.connect(endpoint.as_str().unwrap()).await.unwrap();
    let request = vec![Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
    let request = ZmqMessage::try_from(request).unwrap();
    socket.send(request).await.unwrap();
    let mut batches = Vec::new();
    loop {
        let answer = timeout(PATIENCE, socket.recv()).await.unwrap().unwrap();
        let mut frames = answer.into_vec();
        assert_eq!(
            (frames.len(), frames.remove(0).len()),
            (4, 0),
            "frames: empty, topic, sequence number, payload"
        );
        if frames[1][..] == (-1_i64).to_be_bytes() {
            assert!(frames[0].is_empty() && frames[2].is_empty());
            return batches;
        }
        batches.push(frames);
    }
}
