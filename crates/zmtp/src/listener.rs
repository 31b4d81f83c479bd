//! The listener of a bound SUB socket. It limits the number of handshakes and of publishers.

use std::cmp::Reverse;
use std::collections::VecDeque;
use std::io;
use std::time::Duration;

use tokio::sync::{mpsc, watch};
use tokio::task::{AbortHandle, Id, JoinError, JoinSet};
use tokio::time::{Instant, sleep};

use crate::SocketConfig;
use crate::connection::ZmtpConnection;
use crate::error::ZmtpError;
use crate::publisher::{PublisherId, SubEvent, forward_messages, report_end, session};
use crate::transport::{TransportListener, TransportStream};

/// Most publishers of a socket. An event source has one publisher, and two while an engine is
/// replaced. A connection beyond the limit replaces the publisher that has been silent for longest.
/// It is refused if no publisher has been silent for
/// [`ConnectionTiming::idle_timeout`](crate::ConnectionTiming::idle_timeout).
const MAX_PUBLISHERS: usize = 4;
/// Most connections in the handshake. A connection beyond the limit replaces the oldest one of the
/// host that has most of them, because that one is the most likely to be stalled.
const MAX_HANDSHAKES: usize = 8;
/// Pause after a failed `accept`, for example if the process has no free file descriptor.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// The outcome of one handshake, with the peer's address.
type Handshake = (String, Result<ZmtpConnection<TransportStream>, ZmtpError>);

/// An active publisher. Dropping this value ends its task.
struct ActivePublisher {
    task: Id,
    /// The time of the last message, or of the handshake if there was no message.
    last_message: watch::Receiver<Instant>,
    _active: watch::Sender<()>,
}

/// Accepts publishers until it is dropped.
pub(crate) struct PublisherListener {
    transport: TransportListener,
    topic: String,
    config: SocketConfig,
    events: mpsc::Sender<SubEvent>,
    handshakes: JoinSet<Handshake>,
    /// The handshakes in the order of arrival, oldest first.
    oldest: VecDeque<(AbortHandle, String)>,
    publishers: JoinSet<()>,
    /// At most [`MAX_PUBLISHERS`]. A replaced publisher is removed here at once. It stays in
    /// `publishers` until its end is reported.
    active: Vec<ActivePublisher>,
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
            active: Vec::with_capacity(MAX_PUBLISHERS),
            next_id: 0,
        }
    }

    pub(crate) async fn run(mut self) {
        loop {
            tokio::select! {
                biased;
                Some(ended) = self.publishers.join_next_with_id() => {
                    let task = task_id(&ended);
                    self.active.retain(|publisher| publisher.task != task);
                }
                Some(done) = self.handshakes.join_next_with_id() => self.end_handshake(done),
                accepted = self.transport.accept() => match accepted {
                    Ok((stream, address)) => self.begin_handshake(stream, address),
                    Err(error) => self.accept_failed(error).await,
                },
            }
        }
    }

    fn begin_handshake(&mut self, stream: TransportStream, address: String) {
        if self.handshakes.len() >= MAX_HANDSHAKES
            && let Some((handshake, address)) = self.take_replaceable_handshake(host(&address))
        {
            handshake.abort();
            self.report_refused(address, ZmtpError::TooManyHandshakes(MAX_HANDSHAKES));
        }
        let session = session(&self.topic, self.config);
        let timing = self.config.timing;
        let peer = address.clone();
        let handshake = self.handshakes.spawn(async move {
            (
                peer,
                ZmtpConnection::handshake(stream, session, timing).await,
            )
        });
        self.oldest.push_back((handshake, address));
    }

    /// Removes the handshake that a new connection from the host `new` replaces.
    fn take_replaceable_handshake(&mut self, new: &str) -> Option<(AbortHandle, String)> {
        let host_at = |at: usize| host(&self.oldest[at].1);
        let count = |of: &str| {
            (0..self.oldest.len())
                .filter(|&at| host_at(at) == of)
                .count()
                + usize::from(of == new)
        };
        let replaceable =
            (0..self.oldest.len()).max_by_key(|&at| (count(host_at(at)), Reverse(at)))?;
        self.oldest.remove(replaceable)
    }

    fn end_handshake(&mut self, done: Result<(Id, Handshake), JoinError>) {
        let id = task_id(&done);
        self.oldest.retain(|(handshake, _)| handshake.id() != id);
        match done {
            Ok((_, (address, Ok(_)))) if !self.free_publisher_slot() => {
                self.report_refused(address, ZmtpError::TooManyPublishers(MAX_PUBLISHERS));
            }
            Ok((_, (address, Ok(connection)))) => self.add_publisher(connection, address),
            Ok((_, (address, Err(error)))) => self.report_refused(address, error),
            // An aborted handshake was reported when it was aborted.
            Err(_) => {}
        }
    }

    /// If the limit is reached, ends the publisher that has been silent for longest, provided it
    /// has been silent long enough. Returns whether another publisher can be added.
    fn free_publisher_slot(&mut self) -> bool {
        if self.active.len() < MAX_PUBLISHERS {
            return true;
        }
        let last_message = |publisher: &ActivePublisher| *publisher.last_message.borrow();
        let silent = (0..self.active.len()).min_by_key(|&at| last_message(&self.active[at]));
        match silent {
            Some(at)
                if last_message(&self.active[at]).elapsed() >= self.config.timing.idle_timeout =>
            {
                drop(self.active.swap_remove(at));
                true
            }
            _ => false,
        }
    }

    fn add_publisher(&mut self, connection: ZmtpConnection<TransportStream>, address: String) {
        let publisher = PublisherId(self.next_id);
        self.next_id += 1;
        let events = self.events.clone();
        let (last_message_tx, last_message) = watch::channel(Instant::now());
        let (active, mut replaced) = watch::channel(());
        let task = self.publishers.spawn(async move {
            if events
                .send(SubEvent::Connected { publisher, address })
                .await
                .is_err()
            {
                return;
            }
            let error = tokio::select! {
                error = forward_messages(connection, &events, Some(&last_message_tx)) => error,
                // The sender is dropped when the publisher is replaced.
                _ = replaced.changed() => Some(ZmtpError::Replaced),
            };
            report_end(publisher, error, &events).await;
        });
        self.active.push(ActivePublisher {
            task: task.id(),
            last_message,
            _active: active,
        });
    }

    async fn accept_failed(&self, error: io::Error) {
        self.report_refused("unknown".to_owned(), error.into());
        sleep(ACCEPT_PAUSE).await;
    }

    fn report_refused(&self, address: String, error: ZmtpError) {
        // If the queue is full, the consumer is busy with messages, and the report is dropped.
        let _ = self.events.try_send(SubEvent::Refused { address, error });
    }
}

/// Returns a peer's address without its port.
fn host(address: &str) -> &str {
    address.rsplit_once(':').map_or(address, |(host, _)| host)
}

/// Returns the identifier of the task that ended.
fn task_id<T>(done: &Result<(Id, T), JoinError>) -> Id {
    match done {
        Ok((id, _)) => *id,
        Err(error) => error.id(),
    }
}
