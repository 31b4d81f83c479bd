//! Asking an engine to repeat its recent batches: DEALER to its ROUTER. Replies are applied one by one as they come, so
//! the memory they take does not depend on how much is repeated. A reply that leaves batches out is asked for again from
//! the hole, as long as that brings anything; what then is still missing is gone.

use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::BoxStream;
use tokio::time::{Instant, timeout_at};
use zeromq::{DealerSocket, Socket, SocketEvent, SocketOptions, SocketRecv, SocketSend, ZmqMessage};

use super::feed::{Feed, Gap};
use super::sequencer::{Incomplete, Repeated};

/// Longest wait for a connection.
const CONNECT: Duration = Duration::from_secs(3);
/// Longest silence between two replies.
const SILENCE: Duration = Duration::from_secs(5);
/// Longest conversation.
const CONVERSATION: Duration = Duration::from_secs(60);
/// How often one replay is asked for again because of holes or a restart.
const ROUNDS: usize = 16;
/// After an unanswered request the endpoint is left alone for this long, so that gaps do not stall the live feed.
const PAUSE: Duration = Duration::from_secs(5);
/// Batches applied before other tasks get a turn.
pub(super) const BURST: usize = 32;

/// What the crate reports of a socket's connections.
pub(super) type Events = BoxStream<'static, SocketEvent>;

/// The replay endpoint of one engine.
pub(super) struct Replay {
    endpoint: String,
    paused_until: Option<Instant>,
}

/// How one question and its answers ended.
enum Round {
    Complete,
    /// The engine is a new one: ask again, from zero.
    Restarted,
    /// Batches were left out: ask again from there.
    Hole,
    Incomplete(Incomplete),
}

impl Replay {
    pub(super) fn new(endpoint: &str) -> Self {
        Self { endpoint: endpoint.to_owned(), paused_until: None }
    }

    /// Brings the feed up to what the engine can repeat.
    pub(super) async fn catch_up(&mut self, feed: &mut Feed) -> Result<(), Incomplete> {
        if self.paused_until.is_some_and(|until| Instant::now() < until) {
            return Err(Incomplete::EndedBeforeTarget);
        }
        let mut given_up = None;
        let mut at_hole = Incomplete::StartedAfterRequested;
        for _ in 0..ROUNDS {
            match self.round(feed, at_hole, &mut given_up).await {
                Round::Complete => return given_up.map_or(Ok(()), Err),
                Round::Restarted => at_hole = Incomplete::StartedAfterRequested,
                Round::Hole => at_hole = Incomplete::NonContiguous,
                Round::Incomplete(why) => return Err(why),
            }
        }
        Err(Incomplete::NonContiguous)
    }

    /// One question. A hole right at its start is given up: asking again would show it again.
    async fn round(&mut self, feed: &mut Feed, at_hole: Incomplete, given_up: &mut Option<Incomplete>) -> Round {
        let Some(mut talk) = Talk::open(&self.endpoint, feed.ask_from()).await else {
            return self.unanswered();
        };
        let (start, mut replies) = (feed.expected(), 0usize);
        loop {
            let (seq, payload) = match talk.next().await {
                Reply::Batch(seq, payload) => (seq, payload),
                Reply::End if replies > 0 => return Round::Complete,
                Reply::End if feed.repeated_nothing() => return Round::Restarted,
                Reply::End => return Round::Incomplete(Incomplete::Empty),
                Reply::Silence => return self.unanswered(),
            };
            replies += 1;
            match feed.repeated(seq, &payload) {
                Repeated::Apply | Repeated::Known => {}
                Repeated::Restart => return Round::Restarted,
                Repeated::Hole { .. } if feed.expected() > start => return Round::Hole,
                Repeated::Hole { from, to } => {
                    *given_up = Some(at_hole);
                    feed.jump(Gap { from, to }, &payload);
                }
            }
            if replies.is_multiple_of(BURST) {
                tokio::task::yield_now().await;
            }
        }
    }

    fn unanswered(&mut self) -> Round {
        self.paused_until = Some(Instant::now() + PAUSE);
        Round::Incomplete(Incomplete::EndedBeforeTarget)
    }
}

/// One message of the engine.
#[derive(Debug, PartialEq, Eq)]
enum Reply {
    Batch(u64, Bytes),
    End,
    Silence,
}

/// One question and its answers.
struct Talk {
    socket: DealerSocket,
    /// Tells when the engine hangs up, which receiving does not.
    events: Events,
    deadline: Instant,
}

impl Talk {
    async fn open(endpoint: &str, from: u64) -> Option<Self> {
        let mut options = SocketOptions::default();
        options.connect_timeout(CONNECT);
        let mut socket = DealerSocket::with_options(options);
        let events = socket.monitor().boxed();
        socket.connect(endpoint).await.ok()?;
        let mut request = ZmqMessage::from(Bytes::new());
        request.push_back(Bytes::copy_from_slice(&from.to_be_bytes()));
        socket.send(request).await.ok()?;
        Some(Self { socket, events, deadline: Instant::now() + CONVERSATION })
    }

    async fn next(&mut self) -> Reply {
        let deadline = self.deadline.min(Instant::now() + SILENCE);
        timeout_at(deadline, self.receive()).await.unwrap_or(Reply::Silence)
    }

    async fn receive(&mut self) -> Reply {
        loop {
            tokio::select! {
                // What was received counts before the news that the engine has gone.
                biased;
                message = self.socket.recv() => match message {
                    Ok(message) => if let Some(reply) = reply(&message.into_vec()) {
                        return reply;
                    },
                    Err(_) => return Reply::Silence,
                },
                event = self.events.next() => if !matches!(event, Some(SocketEvent::Connected(..))) {
                    return Reply::Silence;
                },
            }
        }
    }
}

/// Reads one reply. Number and payload come last in every form: `[empty, seq, payload]` and
/// `[empty, topic, seq, payload]`. The end is an empty payload, or the number -1. `None` is skipped.
fn reply(frames: &[Bytes]) -> Option<Reply> {
    let [.., seq, payload] = frames else { return None };
    if payload.is_empty() {
        return Some(Reply::End);
    }
    match u64::from_be_bytes(seq.as_ref().try_into().ok()?) {
        u64::MAX => Some(Reply::End),
        seq => Some(Reply::Batch(seq, payload.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replies_are_read_in_all_their_forms() {
        let frames = |frames: &[&[u8]]| frames.iter().map(|frame| Bytes::copy_from_slice(frame)).collect::<Vec<_>>();
        let seven = 7u64.to_be_bytes();
        let minus_one = (-1i64).to_be_bytes();
        let batch = || Some(Reply::Batch(7, Bytes::from_static(b"x")));
        let cases: [(&[&[u8]], Option<Reply>); 8] = [
            (&[b"", &seven, b"x"], batch()),
            (&[b"", b"topic", &seven, b"x"], batch()),
            (&[b"", &seven, b""], Some(Reply::End)),
            (&[b"", b"", &minus_one, b""], Some(Reply::End)),
            (&[b"", &minus_one, b"x"], Some(Reply::End)),
            (&[b"", b"", b""], Some(Reply::End)),
            (&[b"x"], None),
            (&[b"", b"short", b"x"], None),
        ];
        for (given, expected) in cases {
            assert_eq!(reply(&frames(given)), expected, "{given:?}");
        }
    }
}
