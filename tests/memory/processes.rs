//! Memory of a warmroute process with the maximum number of streams, exchanges and worker ranks.

use std::time::Duration;

use serde_json::{Value, json};
use tonic::transport::Channel;
use warmroute_testbed::ports::until;

use crate::MemoryBound;
use crate::messages::{PendingExchange, completion, exchange, meter};
use crate::support::process::WarmrouteProcess;

/// Default of `listeners.limits.max_streams`.
const STREAMS: u64 = 1 << 16;
/// Maximum number of worker ranks of a fleet.
const RANKS: u64 = 8192;
/// Streams of one connection, so that no connection is a bottleneck.
const STREAMS_PER_CONNECTION: u64 = 2048;
/// Timeout of steps that handle thousands of streams or workers.
const PATIENCE: Duration = Duration::from_secs(300);

/// Tokens of the prompt of an exchange.
const PROMPT_TOKENS: usize = 16;

/// Starts a process that accepts `streams` streams.
async fn start(streams: u64) -> WarmrouteProcess {
    let limits = json!({"max_streams": streams});
    WarmrouteProcess::start(
        json!({"listeners": {"limits": limits}, "requests": {"clients": {"trusted": true}}}),
        &[],
    )
    .await
}

/// Opens `count` streams, each with the first `messages` messages of a request.
async fn open_streams(
    process: &WarmrouteProcess,
    count: u64,
    messages: usize,
) -> Vec<PendingExchange> {
    let mut channel: Option<Channel> = None;
    let mut streams = Vec::new();
    for number in 0..count {
        if number % STREAMS_PER_CONNECTION == 0 {
            channel = Some(process.channel(process.grpc).await);
        }
        let request = completion(number as usize, PROMPT_TOKENS).into_iter();
        streams.push(exchange(channel.clone().unwrap(), request.take(messages)).await);
    }
    let open = async || process.metric("open_exchanges").await == count as f64;
    assert!(until(PATIENCE, open).await, "{}", process.log());
    streams
}

/// Opens the maximum number of streams, each with the headers of a request.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn streams_of_a_listener() {
    let entries = STREAMS;
    let process = start(entries).await;
    let meter = meter(&process);
    let _streams = open_streams(&process, entries, 1).await;
    meter.compare(
        "processes::streams_of_a_listener",
        MemoryBound {
            entries,
            bytes: 16 << 10,
        },
    );
}

/// Opens the maximum number of streams, each with a request that was routed and has no response.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn exchanges_in_flight() {
    let entries = STREAMS;
    let process = start(entries).await;
    let meter = meter(&process);
    let mut streams = open_streams(&process, entries, 2).await;
    for (_, replies) in &mut streams {
        for _ in 0..2 {
            replies.message().await.unwrap().unwrap();
        }
    }
    meter.compare(
        "processes::exchanges_in_flight",
        MemoryBound {
            entries,
            bytes: 20 << 10,
        },
    );
}

/// Returns workers at addresses of the loopback interface at which no engine listens.
fn workers(count: u64) -> Value {
    let worker = |id: u64| {
        let [high, low] = [id >> 8, id & 0xff];
        json!({"id": id, "endpoint": format!("127.1.{high}.{low}:1")})
    };
    (1..=count).map(worker).collect()
}

/// Grows a fleet to the maximum number of ranks. Their load is polled without a response. Includes the
/// page `/metrics` of this fleet.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
async fn ranks_of_a_fleet() {
    let process = WarmrouteProcess::start(json!({}), &[]).await;
    let meter = meter(&process);
    process.reconfigure(&json!({"workers": {"list": workers(RANKS)}}));
    process.hangup();
    let grown = async || process.metric("workers").await == RANKS as f64;
    assert!(until(PATIENCE, grown).await, "{}", process.log());
    meter.compare(
        "processes::ranks_of_a_fleet",
        MemoryBound {
            entries: RANKS,
            bytes: 32 << 10,
        },
    );
}
