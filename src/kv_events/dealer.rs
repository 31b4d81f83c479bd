//! The replay endpoint over ZMQ: DEALER to the engine's ROUTER. The request is an empty frame and the first number
//! wanted; every reply carries one batch, and an empty payload or the number -1 ends the conversation.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use warmroute_zmtp::{DealerSocket, SessionEvent, SocketConfig, ZmtpEndpoint, ZmtpError};

use super::replay::{Repeater, Reply};

/// Longest silence between two replies.
const SILENCE: Duration = Duration::from_secs(5);
/// Longest conversation.
const CONVERSATION: Duration = Duration::from_secs(60);
/// After an unanswered request the endpoint is left alone for this long, and twice as long after each further one, so
/// that neither gaps nor regular checks stall the live feed.
pub(super) const PAUSE: Duration = Duration::from_secs(5);
/// Longest time an endpoint is left alone.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// The replay endpoint of one engine.
pub(super) struct Dealer {
    endpoint: String,
    config: SocketConfig,
    paused_until: Option<Instant>,
    pause: Duration,
    talk: Option<Talk>,
}

impl Dealer {
    pub(super) fn new(endpoint: &str, config: SocketConfig) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            config,
            paused_until: None,
            pause: PAUSE,
            talk: None,
        }
    }

    fn leave_alone(&mut self) {
        self.paused_until = Some(Instant::now() + self.pause);
        self.pause = (self.pause * 2).min(LONGEST_PAUSE);
    }
}

impl Repeater for Dealer {
    async fn ask(&mut self, from: u64) {
        let paused = self
            .paused_until
            .is_some_and(|until| Instant::now() < until);
        if paused {
            return self.talk = None;
        }
        match Talk::open(&self.endpoint, self.config, from).await {
            Ok(talk) => self.talk = Some(talk),
            Err(error) => {
                tracing::debug!(endpoint = self.endpoint, %error, "replay endpoint not connected");
                self.talk = None;
                self.leave_alone();
            }
        }
    }

    async fn next(&mut self) -> Reply {
        let reply = match &mut self.talk {
            Some(talk) => talk.next().await,
            None => Reply::Silence,
        };
        if reply != Reply::Silence {
            self.pause = PAUSE;
        } else if self.talk.take().is_some() {
            self.leave_alone();
        }
        reply
    }

    fn hang_up(&mut self) {
        self.talk = None;
    }
}

/// One request and its replies.
struct Talk {
    socket: DealerSocket,
    deadline: Instant,
}

impl Talk {
    async fn open(endpoint: &str, config: SocketConfig, from: u64) -> Result<Self, ZmtpError> {
        let endpoint: ZmtpEndpoint = endpoint.parse()?;
        let mut socket = DealerSocket::connect(&endpoint, config).await?;
        socket
            .send(&[Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())])
            .await?;
        Ok(Self {
            socket,
            deadline: Instant::now() + CONVERSATION,
        })
    }

    async fn next(&mut self) -> Reply {
        let deadline = self.deadline.min(Instant::now() + SILENCE);
        timeout_at(deadline, self.receive())
            .await
            .unwrap_or(Reply::Silence)
    }

    async fn receive(&mut self) -> Reply {
        loop {
            let event = match self.socket.next_event().await {
                Ok(SessionEvent::Message(frames)) => reply(&frames),
                Ok(SessionEvent::Oversize(limit)) => Some(Reply::Oversize(limit)),
                Ok(SessionEvent::Ready) => None,
                Err(error) => {
                    tracing::debug!(%error, "replay connection lost");
                    return Reply::Silence;
                }
            };
            if let Some(reply) = event {
                return reply;
            }
        }
    }
}

/// Reads one reply. Number and payload come last in every form: `[empty, seq, payload]` and
/// `[empty, topic, seq, payload]`. The end is an empty payload, or the number -1. `None` is skipped.
fn reply(frames: &[Bytes]) -> Option<Reply> {
    let [.., seq, payload] = frames else {
        return None;
    };
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

    #[tokio::test]
    async fn an_endpoint_that_cannot_be_reached_is_left_alone_for_a_while() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let mut engine = Dealer::new(
            &format!("ipc://{}", file.join("beneath").display()),
            SocketConfig::default(),
        );
        engine.ask(0).await;
        assert_eq!(engine.next().await, Reply::Silence);
        let until = engine.paused_until.expect("it costs time to try");
        engine.ask(0).await;
        assert_eq!(engine.next().await, Reply::Silence);
        assert_eq!(engine.paused_until, Some(until), "not tried again yet");
        engine.paused_until = Some(Instant::now());
        engine.ask(0).await;
        assert!(engine.paused_until > Some(until), "tried again");
        assert_eq!(
            engine.pause,
            PAUSE * 4,
            "and left alone for longer each time"
        );
    }

    #[test]
    fn replies_are_read_in_all_their_forms() {
        let frames = |frames: &[&[u8]]| {
            frames
                .iter()
                .map(|frame| Bytes::copy_from_slice(frame))
                .collect::<Vec<_>>()
        };
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
