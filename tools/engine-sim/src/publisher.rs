//! Publishes KV events over ZeroMQ as vLLM does. A PUB socket sends the live stream. A ROUTER
//! socket answers replay requests of DEALER sockets from a ring buffer.
//! [`KvEventPublisher::publish`] numbers and buffers batches synchronously. The sockets run in
//! separate tasks. As in vLLM, they may lose messages without a subscriber.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use anyhow::Context as _;
use bytes::Bytes;
use futures_util::StreamExt as _;
use parking_lot::Mutex;
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use zeromq::{
    PubSocket, RouterSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, ZmqMessage,
};

/// Side of the event socket that binds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum AttachMode {
    /// The engine binds, and subscribers connect.
    Bind,
    /// A subscriber binds and the engine connects, as vLLM does if the endpoint has no wildcard.
    Connect,
}

/// Socket settings of one rank.
#[derive(Clone, Debug)]
pub(crate) struct PublisherSockets {
    pub(crate) topic: String,
    pub(crate) events: Option<(String, AttachMode)>,
    pub(crate) replay: Option<String>,
    pub(crate) buffered_batches: usize,
}

/// Number of batches to drop, for tests of gap handling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct BatchDrops {
    /// Number of batches that are numbered but not sent.
    pub(crate) batches: u64,
    /// True if the dropped batches stay available for replay.
    #[serde(default)]
    pub(crate) keep_for_replay: bool,
}

/// Batches by number. The latest ones are retained for replay.
#[derive(Debug, Default)]
struct ReplayBuffer {
    next: u64,
    batches: VecDeque<(u64, Bytes)>,
    capacity: usize,
    drops: BatchDrops,
}

impl ReplayBuffer {
    /// Numbers a batch. Returns the number if the batch must be sent.
    fn push(&mut self, payload: &Bytes) -> Option<u64> {
        let number = self.next;
        self.next += 1;
        let is_dropped = self.drops.batches > 0;
        self.drops.batches -= u64::from(is_dropped);
        if !is_dropped || self.drops.keep_for_replay {
            self.batches.push_back((number, payload.clone()));
            while self.batches.len() > self.capacity {
                self.batches.pop_front();
            }
        }
        (!is_dropped).then_some(number)
    }

    fn since(&self, number: u64) -> Vec<(u64, Bytes)> {
        let start = self.batches.partition_point(|(other, _)| *other < number);
        self.batches.iter().skip(start).cloned().collect()
    }
}

/// The publisher of one rank; dropping it closes its sockets.
#[derive(Debug)]
pub(crate) struct KvEventPublisher {
    buffer: Arc<Mutex<ReplayBuffer>>,
    batches_tx: Option<mpsc::UnboundedSender<(u64, Bytes)>>,
    /// Endpoint of the stream, as bound or as configured.
    pub(crate) events: Option<String>,
    pub(crate) replay: Option<String>,
    _tasks: JoinSet<()>,
}

impl KvEventPublisher {
    pub(crate) async fn open(sockets: PublisherSockets) -> anyhow::Result<Self> {
        let buffer = Arc::new(Mutex::new(ReplayBuffer {
            capacity: sockets.buffered_batches,
            ..ReplayBuffer::default()
        }));
        let mut tasks = JoinSet::new();
        let topic = Bytes::from(sockets.topic);
        let mut batches_tx = None;
        let mut events = None;
        let mut replay = None;
        if let Some((endpoint, attach)) = sockets.events {
            let (sender, receiver) = mpsc::unbounded_channel();
            batches_tx = Some(sender);
            events = Some(match attach {
                AttachMode::Bind => {
                    let mut socket = PubSocket::new();
                    let bound = socket
                        .bind(&endpoint)
                        .await
                        .with_context(|| format!("cannot bind {endpoint}"))?;
                    tasks.spawn(send_bound(socket, topic.clone(), receiver));
                    bound.to_string()
                }
                AttachMode::Connect => {
                    tasks.spawn(send_connected(endpoint.clone(), topic.clone(), receiver));
                    endpoint
                }
            });
        }
        if let Some(endpoint) = sockets.replay {
            let mut socket = RouterSocket::new();
            let bound = socket
                .bind(&endpoint)
                .await
                .with_context(|| format!("cannot bind {endpoint}"))?;
            tasks.spawn(serve_replays(socket, topic, buffer.clone()));
            replay = Some(bound.to_string());
        }
        Ok(Self {
            buffer,
            batches_tx,
            events,
            replay,
            _tasks: tasks,
        })
    }

    pub(crate) fn publish(&self, payload: Vec<u8>) {
        let payload = Bytes::from(payload);
        // Batches are sent under the lock, so that they leave in order.
        let mut buffer = self.buffer.lock();
        if let (Some(number), Some(batches_tx)) = (buffer.push(&payload), &self.batches_tx) {
            // The task ends only with this publisher.
            batches_tx.send((number, payload)).ok();
        }
    }

    pub(crate) fn drop_next(&self, drops: BatchDrops) {
        self.buffer.lock().drops = drops;
    }

    pub(crate) fn drops(&self) -> BatchDrops {
        self.buffer.lock().drops
    }

    /// Returns the number of the latest batch, if there is one.
    pub(crate) fn last_number(&self) -> Option<u64> {
        self.buffer.lock().next.checked_sub(1)
    }
}

type EventBatches = mpsc::UnboundedReceiver<(u64, Bytes)>;

fn frames(topic: &Bytes, number: [u8; 8], payload: Bytes) -> [Bytes; 3] {
    [topic.clone(), Bytes::copy_from_slice(&number), payload]
}

fn message(frames: impl IntoIterator<Item = Bytes>) -> ZmqMessage {
    let frames: Vec<Bytes> = frames.into_iter().collect();
    ZmqMessage::try_from(frames).expect("every message here has frames")
}

async fn send_bound(mut socket: PubSocket, topic: Bytes, mut batches: EventBatches) {
    while let Some((number, payload)) = batches.recv().await {
        if let Err(error) = socket
            .send(message(frames(&topic, number.to_be_bytes(), payload)))
            .await
        {
            tracing::warn!(%error, "KV event batch not sent");
        }
    }
}

/// Sends batches over a connecting socket, and reconnects whenever the subscriber disconnects.
/// Batches published in between are lost, as with libzmq.
async fn send_connected(endpoint: String, topic: Bytes, mut batches: EventBatches) {
    loop {
        let mut options = SocketOptions::default();
        options.connect_timeout(Duration::from_secs(5));
        let mut socket = PubSocket::with_options(options);
        let mut monitor = socket.monitor();
        if let Err(error) = socket.connect(&endpoint).await {
            tracing::debug!(%error, %endpoint, "KV event subscriber not reachable");
            tokio::time::sleep(Duration::from_millis(100)).await;
            continue;
        }
        while batches.try_recv().is_ok() {}
        loop {
            tokio::select! {
                event = monitor.next() => match event {
                    Some(SocketEvent::Disconnected(_)) | None => break,
                    Some(_) => {}
                },
                batch = batches.recv() => {
                    let Some((number, payload)) = batch else { return };
                    if let Err(error) = socket.send(message(frames(&topic, number.to_be_bytes(), payload))).await {
                        tracing::warn!(%error, "KV event batch not sent");
                    }
                }
            }
        }
    }
}

/// Serves replays. A request is `[identity, empty, first number]`. The replies are `[identity,
/// empty, topic, number, payload]`, followed by `[identity, empty, empty, -1, empty]`.
async fn serve_replays(mut socket: RouterSocket, topic: Bytes, buffer: Arc<Mutex<ReplayBuffer>>) {
    loop {
        let request = match socket.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "replay request not received");
                continue;
            }
        };
        let [identity, delimiter, start] = request.as_slice() else {
            tracing::warn!(
                frames = request.len(),
                "invalid replay request: not three frames"
            );
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else {
            tracing::warn!("invalid replay request: sequence number is not eight bytes");
            continue;
        };
        let batches = buffer.lock().since(u64::from_be_bytes(start));
        let replies = batches
            .into_iter()
            .map(|(number, payload)| frames(&topic, number.to_be_bytes(), payload));
        let end = [
            Bytes::new(),
            Bytes::copy_from_slice(&(-1_i64).to_be_bytes()),
            Bytes::new(),
        ];
        for reply in replies.chain([end]) {
            let envelope = [identity.clone(), delimiter.clone()];
            if let Err(error) = socket
                .send(message(envelope.into_iter().chain(reply)))
                .await
            {
                tracing::debug!(%error, "replay client disconnected");
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn buffer(capacity: usize, drops: BatchDrops, batches: u8) -> (ReplayBuffer, Vec<u64>) {
        let mut buffer = ReplayBuffer {
            capacity,
            drops,
            ..ReplayBuffer::default()
        };
        let sent = (0..batches)
            .filter_map(|at| buffer.push(&Bytes::copy_from_slice(&[at])))
            .collect();
        (buffer, sent)
    }

    fn numbers(batches: &[(u64, Bytes)]) -> Vec<u64> {
        batches.iter().map(|(number, _)| *number).collect()
    }

    #[test]
    fn ring_replays_latest_batches_from_a_number() {
        let (buffer, sent) = buffer(3, BatchDrops::default(), 5);
        assert_eq!(sent, [0, 1, 2, 3, 4]);
        for (start, expected) in [
            (0, vec![2, 3, 4]),
            (3, vec![3, 4]),
            (5, vec![]),
            (99, vec![]),
        ] {
            assert_eq!(numbers(&buffer.since(start)), expected, "from {start}");
        }
        assert_eq!(buffer.since(4)[0].1, Bytes::from_static(&[4]));
    }

    #[test]
    fn dropped_batches_leave_gap_and_optional_replay() {
        for (keep_for_replay, replayed) in [(true, vec![0, 1, 2]), (false, vec![2])] {
            let (buffer, sent) = buffer(
                10,
                BatchDrops {
                    batches: 2,
                    keep_for_replay,
                },
                3,
            );
            assert_eq!(sent, [2]);
            assert_eq!(numbers(&buffer.since(0)), replayed);
        }
    }
}
