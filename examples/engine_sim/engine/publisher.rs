//! Sends KV events over ZeroMQ as vLLM's publisher does: a PUB socket for the live stream and a ROUTER socket that
//! answers a DEALER's request for everything since a sequence number out of a ring buffer. Numbering and buffering happen
//! synchronously in [`Publisher::publish`]; the sockets live in tasks of their own and may lose what nobody subscribed to,
//! exactly like the real thing.

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

/// Which side of the event socket listens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Attach {
    /// The engine listens, subscribers connect.
    Bind,
    /// A subscriber listens and the engine connects, as vLLM does for an endpoint without a wildcard.
    Connect,
}

/// Sockets of one rank before they are opened.
#[derive(Clone, Debug)]
pub(crate) struct Sockets {
    pub(crate) topic: String,
    pub(crate) events: Option<(String, Attach)>,
    pub(crate) replay: Option<String>,
    pub(crate) buffered_batches: usize,
}

/// Batches to lose, for tests of gap handling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Drops {
    /// How many of the next batches are numbered but not sent.
    pub(crate) batches: u64,
    /// Whether a replay still has them.
    #[serde(default)]
    pub(crate) keep_for_replay: bool,
}

/// Batches by number, the latest of them kept for replay.
#[derive(Debug, Default)]
struct Ring {
    next: u64,
    kept: VecDeque<(u64, Bytes)>,
    capacity: usize,
    drops: Drops,
}

impl Ring {
    /// Numbers a batch; returns the number if it is to be sent.
    fn push(&mut self, payload: &Bytes) -> Option<u64> {
        let number = self.next;
        self.next += 1;
        let is_dropped = self.drops.batches > 0;
        self.drops.batches -= u64::from(is_dropped);
        if !is_dropped || self.drops.keep_for_replay {
            self.kept.push_back((number, payload.clone()));
            while self.kept.len() > self.capacity {
                self.kept.pop_front();
            }
        }
        (!is_dropped).then_some(number)
    }

    fn since(&self, number: u64) -> Vec<(u64, Bytes)> {
        let start = self.kept.partition_point(|(kept, _)| *kept < number);
        self.kept.iter().skip(start).cloned().collect()
    }
}

/// The publisher of one rank; dropping it closes its sockets.
#[derive(Debug)]
pub(crate) struct Publisher {
    ring: Arc<Mutex<Ring>>,
    live: Option<mpsc::UnboundedSender<(u64, Bytes)>>,
    /// Where subscribers find the stream, as bound or as given.
    pub(crate) events: Option<String>,
    pub(crate) replay: Option<String>,
    _tasks: JoinSet<()>,
}

impl Publisher {
    pub(crate) async fn open(sockets: Sockets) -> anyhow::Result<Self> {
        let ring = Arc::new(Mutex::new(Ring {
            capacity: sockets.buffered_batches,
            ..Ring::default()
        }));
        let mut tasks = JoinSet::new();
        let topic = Bytes::from(sockets.topic);
        let (mut live, mut events, mut replay) = (None, None, None);
        if let Some((endpoint, attach)) = sockets.events {
            let (sender, batches) = mpsc::unbounded_channel();
            live = Some(sender);
            events = Some(match attach {
                Attach::Bind => {
                    let mut socket = PubSocket::new();
                    let bound = socket
                        .bind(&endpoint)
                        .await
                        .with_context(|| format!("cannot bind {endpoint}"))?;
                    tasks.spawn(send_bound(socket, topic.clone(), batches));
                    bound.to_string()
                }
                Attach::Connect => {
                    tasks.spawn(send_connected(endpoint.clone(), topic.clone(), batches));
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
            tasks.spawn(answer_replays(socket, topic, ring.clone()));
            replay = Some(bound.to_string());
        }
        Ok(Self {
            ring,
            live,
            events,
            replay,
            _tasks: tasks,
        })
    }

    pub(crate) fn publish(&self, payload: Vec<u8>) {
        let payload = Bytes::from(payload);
        // Sent under the lock, so that numbers leave in order.
        let mut ring = self.ring.lock();
        if let (Some(number), Some(live)) = (ring.push(&payload), &self.live) {
            // The task ends only with this publisher.
            live.send((number, payload)).ok();
        }
    }

    pub(crate) fn drop_next(&self, drops: Drops) {
        self.ring.lock().drops = drops;
    }

    pub(crate) fn drops(&self) -> Drops {
        self.ring.lock().drops
    }

    /// Number of the latest batch, if there was one.
    pub(crate) fn last_number(&self) -> Option<u64> {
        self.ring.lock().next.checked_sub(1)
    }
}

type Batches = mpsc::UnboundedReceiver<(u64, Bytes)>;

fn frames(topic: &Bytes, number: [u8; 8], payload: Bytes) -> [Bytes; 3] {
    [topic.clone(), Bytes::copy_from_slice(&number), payload]
}

fn message(frames: impl IntoIterator<Item = Bytes>) -> ZmqMessage {
    let frames: Vec<Bytes> = frames.into_iter().collect();
    ZmqMessage::try_from(frames).expect("every message here has frames")
}

async fn send_bound(mut socket: PubSocket, topic: Bytes, mut batches: Batches) {
    while let Some((number, payload)) = batches.recv().await {
        if let Err(error) = socket
            .send(message(frames(&topic, number.to_be_bytes(), payload)))
            .await
        {
            tracing::warn!(%error, "a batch of KV events was not sent");
        }
    }
}

/// Connects again whenever the subscriber goes away. Batches of the meantime are lost to it, as with libzmq.
async fn send_connected(endpoint: String, topic: Bytes, mut batches: Batches) {
    loop {
        let mut options = SocketOptions::default();
        options.connect_timeout(Duration::from_secs(5));
        let mut socket = PubSocket::with_options(options);
        let mut monitor = socket.monitor();
        if let Err(error) = socket.connect(&endpoint).await {
            tracing::debug!(%error, %endpoint, "no subscriber yet");
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
                        tracing::warn!(%error, "a batch of KV events was not sent");
                    }
                }
            }
        }
    }
}

/// Request: `[identity, empty, first number]`. Answers: `[identity, empty, topic, number, payload]`, closed by
/// `[identity, empty, empty, -1, empty]`.
async fn answer_replays(mut socket: RouterSocket, topic: Bytes, ring: Arc<Mutex<Ring>>) {
    loop {
        let request = match socket.recv().await {
            Ok(request) => request.into_vec(),
            Err(error) => {
                tracing::debug!(%error, "replay socket");
                continue;
            }
        };
        let [identity, delimiter, start] = request.as_slice() else {
            tracing::warn!(frames = request.len(), "a replay request has three frames");
            continue;
        };
        let Ok(start) = <[u8; 8]>::try_from(&start[..]) else {
            tracing::warn!("a replay request ends in eight bytes");
            continue;
        };
        let kept = ring.lock().since(u64::from_be_bytes(start));
        let answers = kept
            .into_iter()
            .map(|(number, payload)| frames(&topic, number.to_be_bytes(), payload));
        let end = [
            Bytes::new(),
            Bytes::copy_from_slice(&(-1_i64).to_be_bytes()),
            Bytes::new(),
        ];
        for answer in answers.chain([end]) {
            let envelope = [identity.clone(), delimiter.clone()];
            if let Err(error) = socket
                .send(message(envelope.into_iter().chain(answer)))
                .await
            {
                tracing::debug!(%error, "the replay client went away");
                break;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ring(capacity: usize, drops: Drops, batches: u8) -> (Ring, Vec<u64>) {
        let mut ring = Ring {
            capacity,
            drops,
            ..Ring::default()
        };
        let sent = (0..batches)
            .filter_map(|at| ring.push(&Bytes::copy_from_slice(&[at])))
            .collect();
        (ring, sent)
    }

    fn numbers(batches: &[(u64, Bytes)]) -> Vec<u64> {
        batches.iter().map(|(number, _)| *number).collect()
    }

    #[test]
    fn the_ring_keeps_the_latest_batches_and_replays_from_a_number() {
        let (ring, sent) = ring(3, Drops::default(), 5);
        assert_eq!(sent, [0, 1, 2, 3, 4]);
        for (start, expected) in [
            (0, vec![2, 3, 4]),
            (3, vec![3, 4]),
            (5, vec![]),
            (99, vec![]),
        ] {
            assert_eq!(numbers(&ring.since(start)), expected, "from {start}");
        }
        assert_eq!(ring.since(4)[0].1, Bytes::from_static(&[4]));
    }

    #[test]
    fn dropped_batches_use_up_numbers_and_stay_replayable_only_by_choice() {
        for (keep_for_replay, replayed) in [(true, vec![0, 1, 2]), (false, vec![2])] {
            let (ring, sent) = ring(
                10,
                Drops {
                    batches: 2,
                    keep_for_replay,
                },
                3,
            );
            assert_eq!(sent, [2]);
            assert_eq!(numbers(&ring.since(0)), replayed);
        }
    }
}
