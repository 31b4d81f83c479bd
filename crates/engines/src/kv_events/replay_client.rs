//! Client of the replay endpoint: a DEALER socket connected to the engine's ROUTER socket. A
//! request is an empty frame and the first batch number. Every reply carries one batch. An empty
//! payload or the number -1 ends the replies.

use std::time::Duration;

use bytes::Bytes;
use tokio::time::{Instant, timeout_at};
use warmroute_zmtp::{DealerSocket, SessionEvent, SocketConfig, ZmtpEndpoint, ZmtpError};

use super::replay::{ReplayReply, ReplaySource};

/// Maximum time between two replies.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum duration of a request with all its replies.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(60);
/// Pause in requests after an unanswered one. It doubles with each further unanswered request, so
/// that neither gaps nor periodic checks delay live events.
pub(super) const FIRST_PAUSE: Duration = Duration::from_secs(5);
/// Maximum pause in requests.
const LONGEST_PAUSE: Duration = Duration::from_secs(300);

/// Client of one engine's replay endpoint.
pub(super) struct ReplayClient {
    endpoint: String,
    config: SocketConfig,
    paused_until: Option<Instant>,
    next_pause: Duration,
    request: Option<ReplayRequest>,
}

impl ReplayClient {
    pub(super) fn new(endpoint: &str, config: SocketConfig) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            config,
            paused_until: None,
            next_pause: FIRST_PAUSE,
            request: None,
        }
    }

    /// Ends a pause in requests.
    pub(super) fn end_pause(&mut self) {
        self.paused_until = None;
    }

    pub(super) fn back_off(&mut self) {
        self.paused_until = Some(Instant::now() + self.next_pause);
        self.next_pause = (self.next_pause * 2).min(LONGEST_PAUSE);
    }
}

impl ReplaySource for ReplayClient {
    async fn request_from(&mut self, from: u64) {
        let paused = self
            .paused_until
            .is_some_and(|until| Instant::now() < until);
        if paused {
            return self.request = None;
        }
        match ReplayRequest::open(&self.endpoint, self.config, from).await {
            Ok(request) => self.request = Some(request),
            Err(error) => {
                tracing::debug!(endpoint = self.endpoint, %error, "cannot connect to replay endpoint");
                self.request = None;
                self.back_off();
            }
        }
    }

    async fn next_reply(&mut self) -> ReplayReply {
        let reply = match &mut self.request {
            Some(request) => request.next().await,
            None => ReplayReply::Unanswered,
        };
        if reply != ReplayReply::Unanswered {
            self.next_pause = FIRST_PAUSE;
        } else if self.request.take().is_some() {
            self.back_off();
        }
        reply
    }

    fn cancel(&mut self) {
        self.request = None;
    }
}

/// A request that waits for replies.
struct ReplayRequest {
    socket: DealerSocket,
    deadline: Instant,
}

impl ReplayRequest {
    async fn open(endpoint: &str, config: SocketConfig, from: u64) -> Result<Self, ZmtpError> {
        let endpoint: ZmtpEndpoint = endpoint.parse()?;
        let mut socket = DealerSocket::connect(&endpoint, config).await?;
        socket
            .send(&[Bytes::new(), Bytes::copy_from_slice(&from.to_be_bytes())])
            .await?;
        Ok(Self {
            socket,
            deadline: Instant::now() + REQUEST_TIMEOUT,
        })
    }

    async fn next(&mut self) -> ReplayReply {
        let deadline = self.deadline.min(Instant::now() + REPLY_TIMEOUT);
        timeout_at(deadline, self.receive())
            .await
            .unwrap_or(ReplayReply::Unanswered)
    }

    async fn receive(&mut self) -> ReplayReply {
        loop {
            let event = match self.socket.next_event().await {
                Ok(SessionEvent::Message(frames)) => parse_reply(&frames),
                Ok(SessionEvent::Oversize(limit)) => Some(ReplayReply::Oversize(limit)),
                Ok(SessionEvent::Ready) => None,
                Err(error) => {
                    tracing::debug!(%error, "replay connection lost");
                    return ReplayReply::Unanswered;
                }
            };
            if let Some(reply) = event {
                return reply;
            }
        }
    }
}

/// Parses one reply. In every form, number and payload come last: `[empty, seq, payload]` and
/// `[empty, topic, seq, payload]`. An empty payload or the number -1 is the end. Returns `None` if
/// the reply is to be skipped.
fn parse_reply(frames: &[Bytes]) -> Option<ReplayReply> {
    let [.., seq, payload] = frames else {
        return None;
    };
    if payload.is_empty() {
        return Some(ReplayReply::End);
    }
    match u64::from_be_bytes(seq.as_ref().try_into().ok()?) {
        u64::MAX => Some(ReplayReply::End),
        seq => Some(ReplayReply::Batch(seq, payload.clone())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn unreachable_replay_endpoint_backs_off() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        std::fs::write(&file, "").unwrap();
        let mut engine = ReplayClient::new(
            &format!("ipc://{}", file.join("beneath").display()),
            SocketConfig::default(),
        );
        engine.request_from(0).await;
        assert_eq!(engine.next_reply().await, ReplayReply::Unanswered);
        let until = engine.paused_until.expect("requests are paused");
        engine.request_from(0).await;
        assert_eq!(engine.next_reply().await, ReplayReply::Unanswered);
        assert_eq!(engine.paused_until, Some(until), "no new request yet");
        engine.paused_until = Some(Instant::now());
        engine.request_from(0).await;
        assert!(engine.paused_until > Some(until), "requested again");
        assert_eq!(
            engine.next_pause,
            FIRST_PAUSE * 4,
            "the pause grows with each failure"
        );
    }

    #[test]
    fn every_replay_reply_form_is_parsed() {
        let frames = |frames: &[&[u8]]| {
            frames
                .iter()
                .map(|frame| Bytes::copy_from_slice(frame))
                .collect::<Vec<_>>()
        };
        let seven = 7u64.to_be_bytes();
        let minus_one = (-1i64).to_be_bytes();
        let batch = || Some(ReplayReply::Batch(7, Bytes::from_static(b"x")));
        let cases: [(&[&[u8]], Option<ReplayReply>); 8] = [
            (&[b"", &seven, b"x"], batch()),
            (&[b"", b"topic", &seven, b"x"], batch()),
            (&[b"", &seven, b""], Some(ReplayReply::End)),
            (&[b"", b"", &minus_one, b""], Some(ReplayReply::End)),
            (&[b"", &minus_one, b"x"], Some(ReplayReply::End)),
            (&[b"", b"", b""], Some(ReplayReply::End)),
            (&[b"x"], None),
            (&[b"", b"short", b"x"], None),
        ];
        for (input, expected) in cases {
            assert_eq!(parse_reply(&frames(input)), expected, "{input:?}");
        }
    }
}
