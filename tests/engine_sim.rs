//! The engine simulator as a process, over real HTTP and ZeroMQ: what it says in its answers, its events and its state
//! must be one and the same, or no benchmark built on it means anything.

#![expect(
    clippy::unwrap_used,
    reason = "in a test, and in what helps it, a failure is a failed test"
)]

// Included so that their unit tests run too. Setting `test = true` for the example would do that as well, but then cargo
// no longer builds the example itself, which these tests start.
#[path = "../examples/engine_sim/engine.rs"]
mod simulator;
#[path = "../examples/support/workload.rs"]
mod workload;

use std::collections::BTreeMap;
use std::process::Stdio;
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser as _;
use futures_util::StreamExt as _;
use reqwest::{Response, StatusCode};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt as _, BufReader};
use tokio::net::TcpListener;
use tokio::process::{Child, ChildStdin, Command};
use zeromq::{DealerSocket, Socket, SocketRecv, SocketSend, SubSocket, ZmqMessage};

use workload::{Shape, Workload};

const PATIENCE: Duration = Duration::from_secs(30);

/// A running engine; it ends with the test because its standard input does.
struct Engine {
    child: Child,
    stdin: Option<ChildStdin>,
    address: String,
    sources: Vec<Value>,
    http: reqwest::Client,
}

impl Engine {
    async fn start(more: &[&str]) -> Self {
        let tests = std::env::current_exe().unwrap();
        let binary = tests
            .parent()
            .unwrap()
            .with_file_name("examples")
            .join("engine_sim");
        // A whole `cargo test` builds it first; a run of this test alone does not.
        assert!(
            binary.exists(),
            "{} is missing: cargo build --example engine_sim",
            binary.display()
        );
        let mut child = Command::new(binary)
            .args([
                "--listen",
                "127.0.0.1:0",
                "--exit-on-stdin-eof",
                "--id",
                "7",
                "--speed",
                "20",
            ])
            .args(["--tokenizer", "examples/models/qwen2.5/tokenizer.json.gz"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .kill_on_drop(true)
            .spawn()
            .unwrap();
        let mut line = String::new();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        tokio::time::timeout(PATIENCE, stdout.read_line(&mut line))
            .await
            .expect("ready in time")
            .unwrap();
        let ready: Value = serde_json::from_str(&line).expect("one line of JSON");
        let address = ready["listening"].as_str().unwrap().to_owned();
        let sources = ready["kv_event_sources"].as_array().unwrap().clone();
        Self {
            stdin: child.stdin.take(),
            child,
            address,
            sources,
            http: warmroute::tls::client().build().unwrap(),
        }
    }

    async fn with_events(more: &[&str]) -> Self {
        let any = "tcp://127.0.0.1:0";
        let sockets: &[&str] = &[
            "--events-endpoint",
            any,
            "--replay-endpoint",
            any,
            "--topic",
            "kv@sim",
        ];
        Self::start(&[sockets, more].concat()).await
    }

    async fn post(&self, path: &str, body: Value) -> Response {
        self.try_post(path, body, &[]).await.unwrap()
    }

    async fn try_post(
        &self,
        path: &str,
        body: Value,
        headers: &[(&str, &str)],
    ) -> reqwest::Result<Response> {
        let request = self
            .http
            .post(format!("http://{}{path}", self.address))
            .json(&body);
        headers
            .iter()
            .fold(request, |request, (name, value)| {
                request.header(*name, *value)
            })
            .send()
            .await
    }

    async fn complete(&self, body: Value) -> Value {
        let response = self.post("/v1/completions", body).await;
        assert_eq!(response.status(), StatusCode::OK);
        response.json().await.unwrap()
    }

    async fn get(&self, path: &str) -> String {
        let response = self
            .http
            .get(format!("http://{}{path}", self.address))
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), StatusCode::OK, "{path}");
        response.text().await.unwrap()
    }

    async fn state(&self, rank: usize) -> Value {
        serde_json::from_str::<Value>(&self.get("/sim/state").await).unwrap()["ranks"][rank].take()
    }

    async fn misbehave(&self, patch: Value) {
        assert_eq!(
            self.post("/sim/misbehave", patch).await.status(),
            StatusCode::OK
        );
    }

    /// Waits until the state of rank 0 pleases.
    async fn eventually(&self, what: &str, pleases: impl Fn(&Value) -> bool) {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let state = self.state(0).await;
            if pleases(&state) {
                return;
            }
            assert!(Instant::now() < deadline, "{what}: {state}");
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Asks the replay socket of a rank for all batches from a number on.
    async fn replay(&self, rank: usize, start: u64) -> Vec<Batch> {
        let mut socket = DealerSocket::new();
        socket
            .connect(self.sources[rank]["replay_endpoint"].as_str().unwrap())
            .await
            .unwrap();
        let request = vec![Bytes::new(), Bytes::copy_from_slice(&start.to_be_bytes())];
        socket
            .send(ZmqMessage::try_from(request).unwrap())
            .await
            .unwrap();
        let mut batches = Vec::new();
        loop {
            let answer = tokio::time::timeout(PATIENCE, socket.recv())
                .await
                .unwrap()
                .unwrap()
                .into_vec();
            assert_eq!(
                (answer.len(), answer[0].len()),
                (4, 0),
                "empty, topic, number, payload"
            );
            if answer[2][..] == (-1_i64).to_be_bytes() {
                assert!(answer[1].is_empty() && answer[3].is_empty());
                return batches;
            }
            batches.push(Batch::of(&answer[1..]));
        }
    }
}

#[tokio::test]
async fn an_engine_runs_inside_another_program() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let tokenizer = "examples/models/tinyllama/tokenizer.json.gz";
    let config = simulator::EngineConfig::parse_from([
        "engine",
        "--quiet",
        "--id",
        "3",
        "--tokenizer",
        tokenizer,
    ]);
    let engine = tokio::spawn(simulator::run(config, listener));
    let request = warmroute::tls::client()
        .build()
        .unwrap()
        .post(format!("http://{address}/v1/completions"))
        .json(&ids(0..20, 2));
    let response = request.send().await.unwrap();
    assert_eq!(
        (response.status(), &response.headers()["x-engine-id"]),
        (StatusCode::OK, &"3".parse().unwrap())
    );
    engine.abort();
    assert!(engine.await.unwrap_err().is_cancelled());
}

/// A decoded batch of events.
#[derive(Clone, Debug, PartialEq)]
struct Batch {
    number: u64,
    rank: u64,
    events: Vec<Value>,
}

impl Batch {
    fn of(frames: &[impl AsRef<[u8]>]) -> Self {
        let [topic, number, payload] = frames else {
            panic!("{} frames", frames.len())
        };
        assert_eq!(topic.as_ref(), b"kv@sim");
        let payload: Value = rmp_serde::from_slice(payload.as_ref()).unwrap();
        assert!(payload[0].is_f64());
        Self {
            number: u64::from_be_bytes(number.as_ref().try_into().unwrap()),
            rank: payload[2].as_u64().unwrap(),
            events: payload[1].as_array().unwrap().clone(),
        }
    }
}

/// A field of an event in either encoding.
fn field<'e>(event: &'e Value, name: &str, at: usize) -> &'e Value {
    if event.is_array() {
        &event[at]
    } else {
        &event[name]
    }
}

/// The copies of every block that the events leave behind.
fn content(batches: &[Batch]) -> BTreeMap<u64, u64> {
    let mut content = BTreeMap::new();
    for event in batches.iter().flat_map(|batch| &batch.events) {
        let hashes = || {
            field(event, "block_hashes", 1)
                .as_array()
                .unwrap()
                .iter()
                .map(|hash| hash.as_u64().unwrap())
        };
        match field(event, "type", 0).as_str().unwrap() {
            "BlockStored" => {
                let tokens = field(event, "token_ids", 3).as_array().unwrap().len();
                assert_eq!(tokens, hashes().count() * 16);
                assert_eq!(field(event, "block_size", 4), 16);
                hashes().for_each(|hash| *content.entry(hash).or_default() += 1);
            }
            "BlockRemoved" => {
                assert_eq!(hashes().count(), 1, "one hash per removed event");
                for hash in hashes() {
                    let copies: &mut u64 = content.get_mut(&hash).expect("removed after stored");
                    *copies -= 1;
                    if *copies == 0 {
                        content.remove(&hash);
                    }
                }
            }
            "AllBlocksCleared" => content.clear(),
            other => panic!("{other}"),
        }
    }
    content
}

fn cached(state: &Value) -> BTreeMap<u64, u64> {
    let blocks = state["cached"].as_array().unwrap().iter();
    blocks
        .map(|block| {
            (
                block["hash"].as_u64().unwrap(),
                block["copies"].as_u64().unwrap(),
            )
        })
        .collect()
}

fn ids(range: std::ops::Range<u32>, max_tokens: u32) -> Value {
    json!({"model": "sim", "prompt": range.collect::<Vec<_>>(), "max_tokens": max_tokens})
}

fn cached_tokens(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        .as_u64()
        .unwrap()
}

#[tokio::test]
async fn a_repeated_prompt_is_answered_out_of_the_cache_and_signed_by_its_engine() {
    let engine = Engine::start(&[]).await;
    let ask = json!({"model": "sim", "max_tokens": 4, "return_token_ids": true, "messages": [
        {"role": "system", "content": "Weigh every word. ".repeat(40)}, {"role": "user", "content": "What is 2+2?"}]});
    let mut answers = Vec::new();
    for _ in 0..2 {
        let headers = [("x-worker-instance-id", "42"), ("x-dp-rank", "0")];
        let response = engine
            .try_post("/v1/chat/completions", ask.clone(), &headers)
            .await
            .unwrap();
        assert_eq!(response.headers()["x-engine-id"], "7");
        assert_eq!(response.headers()["x-received-worker-instance-id"], "42");
        assert_eq!(response.headers()["x-received-dp-rank"], "0");
        answers.push(response.json::<Value>().await.unwrap());
    }
    let prompt = answers[0]["prompt_token_ids"].as_array().unwrap().len() as u64;
    assert!(prompt > 150);
    assert_eq!(answers[0]["usage"]["prompt_tokens"], prompt);
    assert_eq!(answers[0]["usage"]["total_tokens"], prompt + 4);
    assert_eq!(
        (cached_tokens(&answers[0]), cached_tokens(&answers[1])),
        (0, (prompt - 1) / 16 * 16)
    );
    assert_eq!(
        answers[0]["choices"], answers[1]["choices"],
        "answers depend on the prompt alone"
    );
    assert_eq!(answers[0]["choices"][0]["finish_reason"], "length");
    let page = engine.get("/metrics").await;
    let hits = format!(
        "vllm:prefix_cache_hits_total{{engine=\"0\",model_name=\"sim\"}} {}.0",
        (prompt - 1) / 16 * 16
    );
    assert!(page.contains(&hits), "{hits}\n{page}");
    assert!(engine.get("/v1/models").await.contains("\"sim\""));
    engine.get("/health").await;
}

#[tokio::test]
async fn the_stream_says_what_the_document_says_and_ends_in_usage() {
    let engine = Engine::start(&[]).await;
    let mut ask = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5});
    engine.post("/v1/chat/completions", ask.clone()).await;
    let document: Value = engine
        .post("/v1/chat/completions", ask.clone())
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(cached_tokens(&document), 16);
    for include_usage in [true, false] {
        ask["stream"] = json!(true);
        ask["stream_options"] = json!({"include_usage": include_usage});
        let response = engine.post("/v1/chat/completions", ask.clone()).await;
        assert!(
            response.headers()["content-type"]
                .to_str()
                .unwrap()
                .starts_with("text/event-stream")
        );
        let text = response.text().await.unwrap();
        let events: Vec<_> = text
            .split_terminator("\n\n")
            .map(|e| e.strip_prefix("data: ").unwrap())
            .collect();
        let (done, chunks) = events.split_last().unwrap();
        assert_eq!(*done, "[DONE]");
        let mut chunks: Vec<Value> = chunks
            .iter()
            .map(|chunk| serde_json::from_str(chunk).unwrap())
            .collect();
        if include_usage {
            let last = chunks.pop().unwrap();
            assert_eq!(
                (&last["choices"], &last["usage"]),
                (&json!([]), &document["usage"])
            );
        }
        assert_eq!(
            chunks[0]["choices"][0]["delta"],
            json!({"role": "assistant", "content": ""})
        );
        let said: String = chunks
            .iter()
            .map(|c| c["choices"][0]["delta"]["content"].as_str().unwrap())
            .collect();
        assert_eq!(
            said,
            document["choices"][0]["message"]["content"]
                .as_str()
                .unwrap()
        );
        let reasons: Vec<_> = chunks
            .iter()
            .map(|chunk| chunk["choices"][0]["finish_reason"].clone())
            .collect();
        assert_eq!(
            reasons,
            [
                json!(null),
                json!(null),
                json!(null),
                json!(null),
                json!(null),
                json!("length")
            ]
        );
    }
}

#[tokio::test]
async fn completions_take_texts_lists_and_token_ids_and_refuse_what_they_cannot_serve() {
    let engine = Engine::start(&["--num-blocks", "8", "--lora", "lora-x"]).await;
    let both = engine
        .complete(json!({"prompt": ["one", "two"], "n": 2, "max_tokens": 2}))
        .await;
    assert_eq!(
        (
            both["choices"].as_array().unwrap().len(),
            &both["usage"]["completion_tokens"]
        ),
        (4, &json!(8))
    );
    let lists = engine
        .complete(json!({"prompt": [[1, 2, 3], [4]], "max_tokens": 1}))
        .await;
    assert_eq!(lists["usage"]["prompt_tokens"], 4);
    let plain = engine.complete(ids(0..40, 1)).await;
    let salted = engine.complete(
        json!({"prompt": (0..40).collect::<Vec<_>>(), "max_tokens": 1, "cache_salt": "t"}),
    );
    assert_eq!(
        (cached_tokens(&plain), cached_tokens(&salted.await)),
        (0, 0)
    );
    let adapted =
        json!({"model": "lora-x", "prompt": (0..40).collect::<Vec<_>>(), "max_tokens": 1});
    assert_eq!(cached_tokens(&engine.complete(adapted.clone()).await), 0);
    assert_eq!(cached_tokens(&engine.complete(adapted).await), 32);
    for (body, status) in [
        (json!({"prompt": "x", "model": "nobody"}), 404),
        (json!({"prompt": "x", "max_tokens": 0}), 400),
        (ids(0..127, 2), 400),
        (json!({"prompt": {"not": "a prompt"}}), 400),
    ] {
        let response = engine.post("/v1/completions", body.clone()).await;
        assert_eq!(response.status().as_u16(), status, "{body}");
        assert_eq!(
            response.json::<Value>().await.unwrap()["error"]["code"],
            status
        );
    }
}

/// Traffic that stores, hits, copies, evicts, decodes over a block boundary and clears.
async fn traffic(engine: &Engine) {
    for _ in 0..3 {
        engine.complete(ids(0..64, 1)).await;
    }
    engine.complete(ids(1000..1040, 30)).await;
    engine.complete(ids(2000..2300, 1)).await;
    assert_eq!(
        engine
            .post("/reset_prefix_cache", json!({}))
            .await
            .json::<Value>()
            .await
            .unwrap()["reset"][0],
        true
    );
    for start in [3000, 4000, 3000, 5000] {
        engine.complete(ids(start..start + 150, 3)).await;
    }
}

#[tokio::test]
async fn live_events_replayed_events_and_the_state_agree_in_both_encodings() {
    for encoding in ["map", "array"] {
        let more = [
            "--num-blocks",
            "24",
            "--max-num-batched-tokens",
            "128",
            "--event-encoding",
            encoding,
        ];
        let engine = Engine::with_events(&more).await;
        let mut live = SubSocket::new();
        live.connect(engine.sources[0]["endpoint"].as_str().unwrap())
            .await
            .unwrap();
        live.subscribe("kv@").await.unwrap();
        // A subscription takes effect when the engine has read it: probe until a batch comes through.
        let mut heard = Vec::new();
        for probe in 0.. {
            engine
                .complete(ids(10_000 + probe * 100..10_020 + probe * 100, 1))
                .await;
            if let Ok(message) = tokio::time::timeout(Duration::from_millis(50), live.recv()).await
            {
                heard.push(Batch::of(&message.unwrap().into_vec()));
                break;
            }
            assert!(probe < 400, "no event arrives");
        }
        traffic(&engine).await;
        let state = engine.state(0).await;
        let last = state["last_seq"].as_u64().unwrap();
        while heard.last().unwrap().number < last {
            let message = tokio::time::timeout(PATIENCE, live.recv())
                .await
                .unwrap()
                .unwrap();
            heard.push(Batch::of(&message.into_vec()));
        }
        let replayed = engine.replay(0, 0).await;
        let numbers: Vec<_> = replayed.iter().map(|batch| batch.number).collect();
        assert_eq!(numbers, (0..=last).collect::<Vec<_>>());
        let kinds: Vec<_> = replayed
            .iter()
            .flat_map(|batch| &batch.events)
            .map(|e| field(e, "type", 0))
            .collect();
        for kind in ["BlockStored", "BlockRemoved", "AllBlocksCleared"] {
            assert!(kinds.contains(&&json!(kind)), "{kind} happened");
        }
        assert_eq!(content(&replayed), cached(&state));
        assert_eq!(heard[..], replayed[replayed.len() - heard.len()..]);
        assert_eq!(engine.replay(0, last).await, replayed[replayed.len() - 1..]);
        assert_eq!(
            (
                state["blocks"]["used"].clone(),
                state["blocks"]["free"].clone()
            ),
            (json!(0), json!(24))
        );
    }
}

#[tokio::test]
async fn an_engine_connects_to_a_subscriber_that_listens() {
    let mut live = SubSocket::new();
    let endpoint = live.bind("tcp://127.0.0.1:0").await.unwrap().to_string();
    live.subscribe("").await.unwrap();
    let more = [
        "--events-endpoint",
        &endpoint,
        "--events-attach",
        "connect",
        "--topic",
        "kv@sim",
    ];
    let engine = Engine::start(&more).await;
    for probe in 0.. {
        engine.complete(ids(probe * 100..probe * 100 + 20, 1)).await;
        if let Ok(message) = tokio::time::timeout(Duration::from_millis(50), live.recv()).await {
            assert_eq!(Batch::of(&message.unwrap().into_vec()).rank, 0);
            return;
        }
        assert!(probe < 400, "no event arrives");
    }
}

#[tokio::test]
async fn ranks_have_their_own_cache_sockets_and_numbers() {
    let engine = Engine::with_events(&["--dp-size", "2", "--dp-start", "2"]).await;
    let ask = async |rank: &'static str| {
        let headers = [("X-data-parallel-rank", rank)];
        engine
            .try_post("/v1/completions", ids(0..40, 1), &headers)
            .await
            .unwrap()
    };
    for (rank, hit) in [("2", 0), ("2", 32), ("3", 0), ("3", 32)] {
        assert_eq!(
            cached_tokens(&ask(rank).await.json().await.unwrap()),
            hit,
            "rank {rank}"
        );
    }
    for rank in ["0", "4", "x", "-1"] {
        assert_eq!(
            ask(rank).await.status(),
            StatusCode::BAD_REQUEST,
            "rank {rank}"
        );
    }
    for (at, rank) in [(0, 2), (1, 3)] {
        let batches = engine.replay(at, 0).await;
        assert_eq!(
            batches
                .iter()
                .map(|batch| (batch.number, batch.rank))
                .collect::<Vec<_>>(),
            [(0, rank)]
        );
    }
    let hits: Vec<_> = [
        engine.complete(ids(500..540, 1)).await,
        engine.complete(ids(500..540, 1)).await,
    ]
    .iter()
    .map(cached_tokens)
    .collect();
    assert_eq!(hits, [0, 0], "without a header ranks take turns");
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("vllm:num_requests_running{engine=\"3\"")
    );
}

#[tokio::test]
async fn a_request_beyond_the_batch_waits_and_a_lost_client_frees_its_blocks() {
    let engine = Engine::start(&["--max-num-seqs", "1"]).await;
    let mut endless = ids(0..100, 100_000);
    endless["stream"] = json!(true);
    let mut first = engine.post("/v1/completions", endless.clone()).await;
    first.chunk().await.unwrap().expect("it runs");
    let second = engine.post("/v1/completions", endless).await;
    assert_eq!(
        second.status(),
        StatusCode::OK,
        "headers come before anything is computed"
    );
    engine
        .eventually("one runs and one waits", |s| {
            s["running"] == 1 && s["waiting"] == 1
        })
        .await;
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("vllm:num_requests_waiting{engine=\"0\",model_name=\"sim\"} 1.0")
    );
    drop(first);
    engine
        .eventually("the second runs", |s| {
            s["running"] == 1 && s["waiting"] == 0
        })
        .await;
    drop(second);
    engine
        .eventually("all is free", |s| {
            s["running"] == 0 && s["blocks"]["used"] == 0
        })
        .await;
    let unary = tokio::time::timeout(
        Duration::from_millis(300),
        engine.post("/v1/completions", ids(0..100, 100_000)),
    );
    assert!(unary.await.is_err(), "100,000 tokens take longer");
    engine
        .eventually("all is free", |s| {
            s["running"] == 0 && s["blocks"]["used"] == 0
        })
        .await;
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("finished_reason=\"abort\"} 3.0")
    );
}

#[tokio::test]
async fn refused_cut_and_hanging_requests_look_like_a_sick_engine() {
    let engine = Engine::start(&["--misbehave", r#"{"refuse": 429}"#]).await;
    assert_eq!(
        engine.post("/v1/completions", ids(0..4, 1)).await.status(),
        StatusCode::TOO_MANY_REQUESTS
    );
    engine
        .misbehave(json!({"refuse": null, "cut_stream_after_tokens": 2}))
        .await;
    let mut ask = ids(0..4, 10);
    ask["stream"] = json!(true);
    let chunks: Vec<_> = engine
        .post("/v1/completions", ask)
        .await
        .bytes_stream()
        .collect()
        .await;
    let (end, tokens) = chunks.split_last().unwrap();
    assert!(
        end.is_err() && tokens.iter().all(Result::is_ok),
        "{chunks:?}"
    );
    engine
        .eventually("the cut request is gone", |state| state["running"] == 0)
        .await;
    engine
        .misbehave(json!({"cut_stream_after_tokens": null, "slow_first_token_ms": 300}))
        .await;
    let start = Instant::now();
    engine.complete(ids(0..4, 1)).await;
    assert!(start.elapsed() >= Duration::from_millis(300));
    engine.misbehave(json!({"hang": true})).await;
    let hanging = tokio::time::timeout(
        Duration::from_millis(300),
        engine.post("/v1/completions", ids(0..4, 1)),
    );
    assert!(hanging.await.is_err(), "no answer");
    engine.get("/health").await;
    assert_eq!(
        engine
            .post("/sim/misbehave", json!({"explode": true}))
            .await
            .status(),
        StatusCode::BAD_REQUEST
    );
}

#[tokio::test]
async fn dropped_batches_leave_a_gap_that_a_replay_fills_only_if_it_may() {
    for (keep, numbers) in [(true, vec![0, 1, 2]), (false, vec![0, 2])] {
        let engine = Engine::with_events(&[]).await;
        engine.complete(ids(0..20, 1)).await;
        engine
            .misbehave(json!({"drop_events": {"batches": 1, "keep_for_replay": keep}}))
            .await;
        engine.complete(ids(100..120, 1)).await;
        engine.complete(ids(200..220, 1)).await;
        let replayed = engine.replay(0, 0).await;
        assert_eq!(
            replayed
                .iter()
                .map(|batch| batch.number)
                .collect::<Vec<_>>(),
            numbers
        );
    }
}

#[tokio::test]
async fn a_crash_cuts_its_requests_off_and_ends_the_process() {
    let mut engine = Engine::start(&["--misbehave", r#"{"crash": {"after_requests": 2}}"#]).await;
    engine.complete(ids(0..20, 1)).await;
    let cut = engine.try_post("/v1/completions", ids(0..20, 1), &[]).await;
    assert!(cut.is_err(), "{cut:?}");
    let status = tokio::time::timeout(PATIENCE, engine.child.wait())
        .await
        .unwrap()
        .unwrap();
    assert_eq!(status.code(), Some(134));
}

#[tokio::test]
async fn a_termination_signal_and_the_end_of_standard_input_end_it_cleanly() {
    for by_signal in [true, false] {
        let mut engine = Engine::start(&[]).await;
        if by_signal {
            let pid = Pid::from_raw(engine.child.id().unwrap().cast_signed()).unwrap();
            kill_process(pid, Signal::TERM).unwrap();
        } else {
            engine.stdin = None;
        }
        let status = tokio::time::timeout(PATIENCE, engine.child.wait())
            .await
            .expect("ends in time")
            .unwrap();
        assert!(status.success(), "by signal: {by_signal}: {status}");
    }
}

#[tokio::test]
async fn every_turn_of_a_conversation_hits_all_blocks_of_the_turn_before_with_its_answer() {
    let engine = Engine::start(&[]).await;
    let shape = Shape {
        groups: 2,
        sessions_per_group: 2,
        system_words: 200..=400,
        ..Shape::default()
    };
    let mut seen = [false; 2];
    for session in Workload::new(3, &shape).sessions {
        let (mut answers, mut known) = (Vec::new(), 0);
        while answers.len() < session.turns.len() {
            let response = engine
                .post("/v1/chat/completions", session.request("sim", &answers))
                .await;
            let answer: Value = response.json().await.unwrap();
            let hit = cached_tokens(&answer);
            if answers.is_empty() {
                assert_eq!(
                    hit >= 200,
                    seen[session.group],
                    "the group's system prompt is warm from its first session"
                );
            } else {
                assert!(hit >= known / 16 * 16, "hit {hit} of {known} known tokens");
            }
            // The very last token is sampled but never computed.
            known = answer["usage"]["total_tokens"].as_u64().unwrap() - 1;
            answers.push(
                answer["choices"][0]["message"]["content"]
                    .as_str()
                    .unwrap()
                    .to_owned(),
            );
        }
        seen[session.group] = true;
    }
}

#[tokio::test]
async fn the_tokens_of_a_request_can_be_asked_for_in_vllms_shapes() {
    let engine = Engine::with_events(&["--model", "m"]).await;
    let chat = json!({"model": "m", "max_tokens": 1, "cache_salt": "s", "return_token_ids": true,
        "messages": [{"role": "user", "content": "Hello, what is new?"}]});
    let answer: Value = engine
        .post("/v1/chat/completions", chat.clone())
        .await
        .json()
        .await
        .unwrap();
    let tokens = answer["prompt_token_ids"].clone();
    let told: Value = engine
        .post("/tokenize", chat.clone())
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(
        (&told["tokens"], told["count"].as_u64()),
        (&tokens, Some(tokens.as_array().unwrap().len() as u64))
    );
    let rendered: Value = engine
        .post("/v1/chat/completions/render", chat.clone())
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(
        (&rendered["token_ids"], &rendered["cache_salt"]),
        (&tokens, &json!("s"))
    );
    let body = json!({"prompt": ["one", "two three"], "truncate_prompt_tokens": 1});
    let lists: Value = engine
        .post("/v1/completions/render", body)
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(
        lists
            .as_array()
            .unwrap()
            .iter()
            .map(|one| one["token_ids"].as_array().unwrap().len())
            .max(),
        Some(1)
    );
    let told: Value = engine
        .post(
            "/tokenize",
            json!({"prompt": "two three", "truncate_prompt_tokens": 1}),
        )
        .await
        .json()
        .await
        .unwrap();
    assert_eq!(told["count"], 2, "truncation is not for /tokenize");
    let sources: Value = serde_json::from_str(&engine.get("/kv_event_sources").await).unwrap();
    let port = engine.sources[0]["endpoint"]
        .as_str()
        .unwrap()
        .rsplit_once(':')
        .unwrap()
        .1
        .to_owned();
    assert_eq!(sources["0"]["endpoint"], format!("tcp://*:{port}"));
    assert!(engine.get("/version").await.contains("engine_sim"));
    for (path, body) in [
        ("/tokenize", json!([])),
        ("/tokenize", json!({})),
        ("/tokenize", json!({"prompt": [1]})),
    ] {
        assert_eq!(
            engine.post(path, body.clone()).await.status(),
            StatusCode::BAD_REQUEST,
            "{path} {body}"
        );
    }
}

#[tokio::test]
async fn what_operators_forget_to_switch_on_is_missing() {
    let off = [
        "--no-prefix-caching",
        "--no-prompt-tokens-details",
        "--no-render",
        "--no-tokenize",
        "--no-kv-event-sources",
    ];
    let engine = Engine::with_events(&[&off[..], &["--api-key", "secret"]].concat()).await;
    let body = ids(0..100, 2);
    let status = async |path: &str, token: &str| {
        engine
            .try_post(path, body.clone(), &[("authorization", token)])
            .await
            .unwrap()
            .status()
    };
    assert_eq!(
        status("/v1/completions", "Bearer other").await,
        StatusCode::UNAUTHORIZED
    );
    assert_eq!(
        status("/v1/completions/render", "Bearer secret").await,
        StatusCode::FORBIDDEN
    );
    assert_eq!(status("/tokenize", "").await, StatusCode::NOT_FOUND);
    for _ in 0..2 {
        let answer = engine
            .try_post(
                "/v1/completions",
                body.clone(),
                &[("authorization", "bearer secret")],
            )
            .await;
        let answer: Value = answer.unwrap().json().await.unwrap();
        assert_eq!(answer["usage"]["prompt_tokens_details"], Value::Null);
    }
    let state = engine.state(0).await;
    assert_eq!(
        (&state["blocks"]["cached"], &state["last_seq"]),
        (&json!(0), &Value::Null),
        "{state}"
    );
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("enable_prefix_caching=\"False\"")
    );
    let sources = engine
        .http
        .get(format!("http://{}/kv_event_sources", engine.address))
        .send()
        .await
        .unwrap();
    assert_eq!(sources.status(), StatusCode::NOT_FOUND);
}
