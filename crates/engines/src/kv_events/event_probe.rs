//! Receives the messages of an event source without an index, for diagnostics. Messages are neither
//! reordered nor filtered.

use std::time::{Duration, SystemTime};

use tokio::time::timeout;
use warmroute_zmtp::{SubEvent, SubSocket};

use super::replay::{ReplayReply, ReplaySource as _};
use super::replay_client::ReplayClient;
use super::subscriber::{open_socket, parse_live_message, socket_config};
use super::wire::{self, EventBatch};
use warmroute_core::worker::{EventSource, SocketAttach};

/// Maximum number of replies to one replay request.
const MAX_REPLIES: usize = 100_000;

/// One received message.
#[derive(Clone, Debug, PartialEq)]
pub struct ProbedBatch {
    /// Topic frame.
    pub topic: String,
    /// Batch number.
    pub seq: u64,
    /// Decoded batch, or the decoding error.
    pub batch: Result<EventBatch, String>,
    /// Local time of arrival.
    pub received_at: SystemTime,
}

/// A socket that is subscribed to all topics.
pub struct EventProbe {
    socket: SubSocket,
}

impl EventProbe {
    /// Opens a socket, connected or bound, and subscribes to all topics. Fails after a few seconds.
    /// `max_message` limits the size of a message in bytes.
    pub async fn open(
        endpoint: &str,
        attach: SocketAttach,
        max_message: usize,
    ) -> Result<Self, String> {
        let source = EventSource {
            endpoint: endpoint.to_owned(),
            topic: String::new(),
            attach,
            replay: None,
        };
        let socket = open_socket(&source, socket_config(max_message))
            .await
            .map_err(|error| error.to_string())?;
        Ok(Self { socket })
    }

    /// Waits until an engine has connected to a bound socket. Returns false at the timeout.
    pub async fn wait_for_publisher(&mut self, within: Duration) -> bool {
        let connected = async {
            while let Some(event) = self.socket.next_event().await {
                if matches!(event, SubEvent::Connected { .. }) {
                    return true;
                }
            }
            false
        };
        timeout(within, connected).await.unwrap_or(false)
    }

    /// Waits for the next message. Returns `None` if the connection is lost. Cancel-safe.
    pub async fn next_message(&mut self) -> Option<ProbedBatch> {
        loop {
            let event = self.socket.next_event().await?;
            let received_at = SystemTime::now();
            let (topic, (seq, batch)) = match event {
                SubEvent::Message(frames) => {
                    let topic = frames.first().map(|topic| String::from_utf8_lossy(topic));
                    let batch = match parse_live_message(&frames) {
                        Ok((seq, payload)) => (
                            seq,
                            wire::decode(payload).map_err(|error| error.to_string()),
                        ),
                        Err(problem) => (0, Err(problem.to_owned())),
                    };
                    (topic.unwrap_or_default().into_owned(), batch)
                }
                SubEvent::Oversize(limit) => {
                    let error = format!("a message exceeds the {} limit", limit.as_str());
                    (String::new(), (0, Err(error)))
                }
                SubEvent::Disconnected { .. } => return None,
                SubEvent::Connected { .. } | SubEvent::Refused { .. } => continue,
            };
            return Some(ProbedBatch {
                topic,
                seq,
                batch,
                received_at,
            });
        }
    }
}

/// Requests all batches starting with a number. Returns the number of replies, or `None` if the
/// replay did not end properly.
pub async fn count_replayed_batches(
    endpoint: &str,
    from: u64,
    max_message: usize,
) -> Option<usize> {
    let mut engine = ReplayClient::new(endpoint, socket_config(max_message));
    engine.request_from(from).await;
    for batches in 0..MAX_REPLIES {
        match engine.next_reply().await {
            ReplayReply::Batch(..) | ReplayReply::Oversize(_) => {}
            ReplayReply::End => return Some(batches),
            ReplayReply::Unanswered => return None,
        }
    }
    None
}
