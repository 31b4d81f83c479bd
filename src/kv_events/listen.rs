//! Listening to an event source for a moment, without an index: for whoever wants to know what an engine says, and under
//! which topic. Nothing is put in order and nothing is left out.

use std::time::{Duration, SystemTime};

use tokio::time::timeout;
use warmroute_zmtp::{SubEvent, SubSocket};

use super::dealer::Dealer;
use super::replay::{Repeater as _, Reply};
use super::subscriber::{live_batch, open, socket_config};
use super::wire::{self, Batch};
use crate::worker::{Attach, EventSource};

/// Most replies that one question may bring before it is given up.
const REPLIES: usize = 100_000;

/// One message.
#[derive(Clone, Debug, PartialEq)]
pub struct Heard {
    /// Its topic.
    pub topic: String,
    /// Its number.
    pub seq: u64,
    /// What it says, or why it cannot be read.
    pub batch: Result<Batch, String>,
    /// When it came, by our clock.
    pub at: SystemTime,
}

/// A socket that hears every topic.
pub struct Ear {
    socket: SubSocket,
}

impl Ear {
    /// Connects to an engine, or binds for one, and subscribes to all topics. Fails after a few seconds at most. `max_message` limits the
    /// octets of a message.
    pub async fn open(endpoint: &str, attach: Attach, max_message: usize) -> Result<Self, String> {
        let source = EventSource {
            endpoint: endpoint.to_owned(),
            topic: String::new(),
            attach,
            replay: None,
        };
        let socket = open(&source, socket_config(max_message))
            .await
            .map_err(|error| error.to_string())?;
        Ok(Self { socket })
    }

    /// Waits until an engine has connected to a bound socket; false if none did.
    pub async fn visited(&mut self, within: Duration) -> bool {
        let visit = async {
            while let Some(event) = self.socket.next_event().await {
                if matches!(event, SubEvent::Connected { .. }) {
                    return true;
                }
            }
            false
        };
        timeout(within, visit).await.unwrap_or(false)
    }

    /// The next message; none where the connection is lost. May be cancelled.
    pub async fn next(&mut self) -> Option<Heard> {
        loop {
            let frames = match self.socket.next_event().await? {
                SubEvent::Message(frames) => frames,
                SubEvent::Disconnected { .. } => return None,
                SubEvent::Oversize(limit) => {
                    let error = format!("a message exceeds the {} limit", limit.as_str());
                    return Some(Heard {
                        topic: String::new(),
                        seq: 0,
                        batch: Err(error),
                        at: SystemTime::now(),
                    });
                }
                SubEvent::Connected { .. } | SubEvent::Refused { .. } => continue,
            };
            let at = SystemTime::now();
            let topic = frames
                .first()
                .map(|topic| String::from_utf8_lossy(topic).into_owned())
                .unwrap_or_default();
            return Some(match live_batch(&frames) {
                Ok((seq, payload)) => Heard {
                    topic,
                    seq,
                    batch: wire::decode(payload).map_err(|error| error.to_string()),
                    at,
                },
                Err(problem) => Heard {
                    topic,
                    seq: 0,
                    batch: Err(problem.to_owned()),
                    at,
                },
            });
        }
    }
}

/// Asks a replay endpoint for every batch from a number on: how many came until it said that these were all, or nothing
/// where it did not answer so.
pub async fn replayed(endpoint: &str, from: u64, max_message: usize) -> Option<usize> {
    let mut engine = Dealer::new(endpoint, socket_config(max_message));
    engine.ask(from).await;
    for batches in 0..REPLIES {
        match engine.next().await {
            Reply::Batch(..) | Reply::Oversize(_) => {}
            Reply::End => return Some(batches),
            Reply::Silence => return None,
        }
    }
    None
}
