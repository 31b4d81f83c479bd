//! The engine simulator as a process with real HTTP and ZeroMQ sockets. Its responses, events and
//! state must agree, because benchmarks depend on them.

mod formats;

use std::collections::BTreeMap;
use std::time::Duration;

use reqwest::StatusCode;
use serde_json::{Value, json};
use warmroute_testbed::ports::PATIENCE;
use zeromq::{Socket as _, SocketRecv as _, SubSocket};

use crate::engine::{self, SimulatorProcess, cached_tokens, ids};

async fn simulator(flags: &[&str]) -> SimulatorProcess {
    let tokenizer = "examples/models/qwen2.5/tokenizer.json.gz";
    let identity = ["--id", "7", "--tokenizer", tokenizer];
    SimulatorProcess::start(&[&identity, flags].concat()).await
}

async fn with_events(flags: &[&str]) -> SimulatorProcess {
    let any = "tcp://127.0.0.1:0";
    let sockets: &[&str] = &[
        "--events-endpoint",
        any,
        "--replay-endpoint",
        any,
        "--topic",
        "kv@sim",
    ];
    simulator(&[sockets, flags].concat()).await
}

/// Fetches all batches from sequence number `start` onwards from the replay socket of a rank.
async fn replay(engine: &SimulatorProcess, rank: usize, start: u64) -> Vec<EventBatch> {
    let batches = engine::replay(&engine.sources[rank]["replay_endpoint"], start).await;
    batches
        .iter()
        .map(|frames| EventBatch::of(frames))
        .collect()
}

/// A decoded batch of events.
#[derive(Clone, Debug, PartialEq)]
struct EventBatch {
    number: u64,
    rank: u64,
    events: Vec<Value>,
}

impl EventBatch {
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

/// Returns a field of an event in map or array encoding.
fn field<'e>(event: &'e Value, name: &str, at: usize) -> &'e Value {
    if event.is_array() {
        &event[at]
    } else {
        &event[name]
    }
}

/// Returns the number of copies of each block after the events.
fn content(batches: &[EventBatch]) -> BTreeMap<u64, u64> {
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
                    let copies: &mut u64 = content
                        .get_mut(&hash)
                        .expect("a block is removed before it is stored");
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

/// Sends requests that store, hit, copy and evict blocks, decode past a block boundary, and clear
/// the cache.
async fn traffic(engine: &SimulatorProcess) {
    for _ in 0..3 {
        engine.complete(ids(0..64, 1)).await;
    }
    engine.complete(ids(1000..1040, 30)).await;
    engine.complete(ids(2000..2300, 1)).await;
    let reset = engine.post_json("/reset_prefix_cache", json!({})).await;
    assert_eq!(reset["reset"][0], true);
    for start in [3000, 4000, 3000, 5000] {
        engine.complete(ids(start..start + 150, 3)).await;
    }
}

/// Sends requests until a batch arrives. The subscription takes effect once the engine has read it.
async fn first_batch(engine: &SimulatorProcess, live: &mut SubSocket) -> EventBatch {
    for probe in 0..400 {
        engine
            .complete(ids(10_000 + probe * 100..10_020 + probe * 100, 1))
            .await;
        if let Ok(message) = tokio::time::timeout(Duration::from_millis(50), live.recv()).await {
            return EventBatch::of(&message.unwrap().into_vec());
        }
    }
    panic!("no event arrives");
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn live_events_replay_and_state_agree() {
    for encoding in ["map", "array"] {
        let flags = [
            "--num-blocks",
            "24",
            "--max-num-batched-tokens",
            "128",
            "--event-encoding",
            encoding,
        ];
        let engine = with_events(&flags).await;
        let mut live = SubSocket::new();
        live.connect(engine.sources[0]["endpoint"].as_str().unwrap())
            .await
            .unwrap();
        live.subscribe("kv@").await.unwrap();
        let mut received = vec![first_batch(&engine, &mut live).await];
        traffic(&engine).await;
        let state = engine.state(0).await;
        let last = state["last_seq"].as_u64().unwrap();
        while received.last().unwrap().number < last {
            let message = tokio::time::timeout(PATIENCE, live.recv())
                .await
                .unwrap()
                .unwrap();
            received.push(EventBatch::of(&message.into_vec()));
        }
        let replayed = replay(&engine, 0, 0).await;
        let numbers: Vec<_> = replayed.iter().map(|batch| batch.number).collect();
        assert_eq!(numbers, (0..=last).collect::<Vec<_>>());
        let kinds: Vec<_> = replayed
            .iter()
            .flat_map(|batch| &batch.events)
            .map(|e| field(e, "type", 0))
            .collect();
        for kind in ["BlockStored", "BlockRemoved", "AllBlocksCleared"] {
            assert!(kinds.contains(&&json!(kind)), "no {kind} event");
        }
        assert_eq!(content(&replayed), cached(&state));
        assert_eq!(received[..], replayed[replayed.len() - received.len()..]);
        assert_eq!(
            replay(&engine, 0, last).await,
            replayed[replayed.len() - 1..]
        );
        let blocks = &state["blocks"];
        assert_eq!((&blocks["used"], &blocks["free"]), (&json!(0), &json!(24)));
    }
}

#[tokio::test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn ranks_have_separate_caches_sockets_and_sequences() {
    let engine = with_events(&["--dp-size", "2", "--dp-start", "2"]).await;
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
        let batches = replay(&engine, at, 0).await;
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
    assert_eq!(hits, [0, 0], "without a header, ranks are used round-robin");
    assert!(
        engine
            .get("/metrics")
            .await
            .contains("vllm:num_requests_running{engine=\"3\"")
    );
}
