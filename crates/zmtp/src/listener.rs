//! The accepting side of a bound SUB socket: a bounded number of handshakes and of publishers.

use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::{AbortHandle, JoinError, JoinSet};
use tokio::time::sleep;

use crate::SocketConfig;
use crate::connection::ZmtpConnection;
use crate::error::ZmtpError;
use crate::sub::{PublisherId, SubEvent, forward, session};
use crate::transport::{TransportListener, TransportStream};

/// Most publishers of a socket. An event source has one; a second one exists while an engine is replaced.
const PUBLISHERS: usize = 4;
/// Most connections in the handshake. A new connection replaces the oldest one, which is the most likely to be stalled.
const HANDSHAKES: usize = 8;
/// Pause after a connection could not be accepted, for example because the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The outcome of one handshake, with the peer's address.
type Handshake = (String, Result<ZmtpConnection<TransportStream>, ZmtpError>);

/// Accepts publishers until it is dropped.
pub(crate) struct PublisherListener {
    transport: TransportListener,
    topic: String,
    config: SocketConfig,
    events: mpsc::Sender<SubEvent>,
    handshakes: JoinSet<Handshake>,
    /// The handshakes in the order of arrival.
    oldest: VecDeque<(AbortHandle, String)>,
    publishers: JoinSet<()>,
    next_id: u64,
}

impl PublisherListener {
    pub(crate) fn new(
        transport: TransportListener,
        topic: &str,
        config: SocketConfig,
        events: mpsc::Sender<SubEvent>,
    ) -> Self {
        Self {
            transport,
            topic: topic.to_owned(),
            config,
            events,
            handshakes: JoinSet::new(),
            oldest: VecDeque::new(),
            publishers: JoinSet::new(),
            next_id: 0,
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                Some(_) = self.publishers.join_next() => {}
                Some(done) = self.handshakes.join_next_with_id() => self.end_handshake(done),
                accepted = self.transport.accept() => match accepted {
                    Ok((stream, address)) => self.begin_handshake(stream, address),
                    Err(error) => self.accept_failed(error).await,
                },
            }
        }
    }

    fn begin_handshake(&mut self, stream: TransportStream, address: String) {
        if self.handshakes.len() >= HANDSHAKES
            && let Some((handshake, address)) = self.oldest.pop_front()
        {
            handshake.abort();
            self.refused(address, ZmtpError::TooManyHandshakes(HANDSHAKES));
        }
        let session = session(&self.topic, self.config);
        let timing = self.config.timing;
        let peer = address.clone();
        let handshake =
            self.handshakes.spawn(async move { (peer, ZmtpConnection::handshake(stream, session, timing).await) });
        self.oldest.push_back((handshake, address));
    }

    fn end_handshake(&mut self, done: Result<(tokio::task::Id, Handshake), JoinError>) {
        let id = match &done {
            Ok((id, _)) => *id,
            Err(error) => error.id(),
        };
        self.oldest.retain(|(handshake, _)| handshake.id() != id);
        match done {
            Ok((_, (address, Ok(_)))) if self.publishers.len() >= PUBLISHERS => {
                self.refused(address, ZmtpError::TooManyPublishers(PUBLISHERS));
            }
            Ok((_, (address, Ok(connection)))) => {
                let publisher = PublisherId(self.next_id);
                self.next_id += 1;
                let events = self.events.clone();
                self.publishers.spawn(async move {
                    if events.send(SubEvent::Connected { publisher, address }).await.is_ok() {
                        forward(connection, publisher, events).await;
                    }
                });
            }
            Ok((_, (address, Err(error)))) => self.refused(address, error),
            // An aborted handshake was reported when it was aborted.
            Err(_) => {}
        }
    }

    async fn accept_failed(&self, error: io::Error) {
        self.refused("unknown".to_owned(), error.into());
        sleep(ACCEPT_PAUSE).await;
    }

    fn refused(&self, address: String, error: ZmtpError) {
        // A full queue means that the consumer is busy with messages.
        let _ = self.events.try_send(SubEvent::Refused { address, error });
    }
}
