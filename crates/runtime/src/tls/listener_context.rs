//! State that a listener shares with its connections: limits, connection table, metrics and log.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use parking_lot::Mutex;
use prometheus_client::metrics::gauge::Gauge;
use strum::VariantArray;
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};
use tracing::{debug, warn};
use warmroute_http2_filter::{ErrorScope, SentError};

use super::connection_table::{
    ConnectionAdmissionError, ConnectionLimits, ConnectionTable, ConnectionUse,
};
use super::handshake::HandshakeError;
use super::listener_certificate::{ListenerCertificate, ListenerProtocol};
use crate::causes::process_fix;
use crate::descriptors::DescriptorReserve;
use warmroute_metrics::{
    Http2ErrorLabels, ListenerLabel, ListenerOutcomeLabels, ListenerReasonLabels, Metrics,
    start_at_zero,
};

/// Maximum pause after a failed accept. If the process has no free file descriptors, accept fails
/// until a connection was closed.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);

/// Number of idle connections to evict after a failed accept. The number of waiting clients is
/// unknown.
const EVICTED_AT_ONCE: usize = 32;

/// Limits of a listener.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ListenerLimits {
    /// Limits of open connections.
    pub connections: ConnectionLimits,
    /// Timeout of a TLS handshake, of the start of a connection, and of each header block.
    pub handshake: Duration,
    /// Maximum time that a connection may be open without a request in progress.
    pub idle: Option<Duration>,
    /// Maximum size of an HTTP/2 header block with its frames, in octets. A larger block closes the
    /// connection.
    pub max_header_block_bytes: usize,
}

/// Identity and protocol of a listener.
pub struct ListenerProfile {
    /// Name in logs and metrics.
    pub name: &'static str,
    /// Protocol of the connections.
    pub protocol: ListenerProtocol,
    /// Certificate; `None` means plaintext.
    pub tls: Option<Arc<ListenerCertificate>>,
    /// Connection limits.
    pub limits: ListenerLimits,
    /// Reserve of the process, which each closed connection refills.
    pub reserve: DescriptorReserve,
    /// Whether the listener accepts connections with descriptors of the reserve.
    pub serves_probes: bool,
}

/// Listener state that its connections share.
pub(super) struct ListenerContext {
    pub(super) profile: ListenerProfile,
    table: Mutex<ConnectionTable>,
    /// Notified when a connection was closed.
    closed: Notify,
    started: Instant,
    open: Gauge,
    metrics: Arc<Metrics>,
}

/// Entry of one connection in the connection table, removed on drop.
pub(super) struct ConnectionSlot {
    key: usize,
    pub(super) usage: Arc<ConnectionUse>,
    pub(super) context: Arc<ListenerContext>,
    pub(super) peer: Option<SocketAddr>,
}

impl ListenerContext {
    /// Creates the state of a listener and its metric series.
    pub(super) fn new(profile: ListenerProfile, metrics: Arc<Metrics>) -> Self {
        create_series(&profile, &metrics);
        let open = metrics
            .listeners
            .connections
            .get_or_create_owned(&ListenerLabel {
                listener: profile.name,
            });
        let table = Mutex::new(ConnectionTable::new(profile.limits.connections));
        Self {
            profile,
            table,
            closed: Notify::new(),
            started: Instant::now(),
            open,
            metrics,
        }
    }

    pub(super) fn admit(self: &Arc<Self>, peer: Option<SocketAddr>) -> Option<ConnectionSlot> {
        let now = self.now();
        match self.table.lock().admit(peer.map(|peer| peer.ip()), now) {
            Ok(admitted) => {
                if admitted.has_evicted {
                    self.warn_of_limit(
                        peer,
                        "too many connections; the one idle for longest was closed",
                        "",
                    );
                }
                self.open.inc();
                Some(ConnectionSlot {
                    key: admitted.key,
                    usage: admitted.usage,
                    context: self.clone(),
                    peer,
                })
            }
            Err(error) => {
                let text = match error {
                    ConnectionAdmissionError::TooMany => {
                        "too many connections, all in use; connection refused"
                    }
                    ConnectionAdmissionError::TooManyOfPeer => {
                        "too many connections of one address, all in use; connection refused"
                    }
                };
                self.metrics
                    .listeners
                    .connections_refused
                    .get_or_create(&ListenerLabel {
                        listener: self.name(),
                    })
                    .inc();
                self.warn_of_limit(
                    peer,
                    text,
                    "see `listeners.limits.max_connections` and \
                    `listeners.limits.max_connections_per_peer`",
                );
                None
            }
        }
    }

    /// Handles an accept error. The process may have no free file descriptors, so it evicts idle
    /// connections and returns when accept may succeed.
    pub(super) async fn on_accept_error(&self, error: &io::Error) {
        self.table.lock().evict_idlest(EVICTED_AT_ONCE, self.now());
        let fix = process_fix(error);
        warn!(listener = self.name(), %error, fix, "listener cannot accept connections");
        if !(self.profile.serves_probes && self.profile.reserve.release()) {
            // The pause ends early when a connection has been closed.
            _ = timeout(ACCEPT_PAUSE, self.closed.notified()).await;
        }
    }

    fn name(&self) -> &'static str {
        self.profile.name
    }

    fn now(&self) -> Duration {
        self.started.elapsed()
    }

    fn on_closed(&self, reason: &'static str) {
        let labels = ListenerReasonLabels {
            listener: self.name(),
            reason,
        };
        self.metrics
            .listeners
            .connections_closed
            .get_or_create(&labels)
            .inc();
    }

    pub(super) fn on_handshake(&self, outcome: &'static str) {
        let labels = ListenerOutcomeLabels {
            listener: self.name(),
            outcome,
        };
        self.metrics
            .listeners
            .tls_handshakes
            .get_or_create(&labels)
            .inc();
    }

    pub(super) fn on_handshake_error(
        &self,
        failure: HandshakeError,
        peer: Option<SocketAddr>,
        error: &dyn std::fmt::Display,
    ) {
        let reason = failure.reason();
        let labels = ListenerReasonLabels {
            listener: self.name(),
            reason,
        };
        self.metrics
            .listeners
            .tls_handshake_errors
            .get_or_create(&labels)
            .inc();
        if !failure.is_notable() {
            debug!(listener = self.name(), peer = peer.map(tracing::field::display), %error, "TLS handshake not finished");
        } else {
            let peer = peer.map(tracing::field::display);
            let hint = failure.hint();
            warn!(listener = self.name(), peer, reason, %error, hint, "TLS handshake failed");
        }
    }

    pub(super) fn on_http2_error(&self, sent: SentError, peer: Option<SocketAddr>) {
        let scope = match sent.scope {
            ErrorScope::Stream => "stream",
            ErrorScope::Connection => "connection",
        };
        let reason = sent.reason;
        self.metrics
            .listeners
            .http2_errors
            .get_or_create(&Http2ErrorLabels {
                listener: self.name(),
                scope,
                reason,
            })
            .inc();
        let peer = peer.map(tracing::field::display);
        warn!(
            listener = self.name(),
            peer, scope, reason, "HTTP/2 error sent to the client"
        );
    }

    fn warn_of_limit(&self, peer: Option<SocketAddr>, text: &'static str, hint: &'static str) {
        let peer = peer.map(tracing::field::display);
        let max_connections = self.profile.limits.connections.total;
        warn!(
            listener = self.name(),
            peer, max_connections, hint, "{text}"
        );
    }
}

impl ConnectionSlot {
    /// Returns the time since the start of the listener.
    pub(super) fn now(&self) -> Duration {
        self.context.now()
    }

    pub(super) fn instant_of(&self, time: Duration) -> Instant {
        self.context.started + time
    }

    /// Returns ready when the connection was evicted and has not been used since.
    pub(super) fn poll_evicted(&self, cx: &mut Context<'_>) -> Poll<()> {
        ready!(self.usage.poll_evicted(cx));
        if self.usage.is_replaceable(
            self.now(),
            self.context.profile.limits.connections.idle_timeout,
        ) {
            return Poll::Ready(());
        }
        self.usage.withdraw_eviction();
        Poll::Pending
    }

    /// Counts a connection that is closed because of a timeout, by its reason.
    pub(super) fn on_timeout(&self, reason: &'static str) {
        self.context.on_closed(reason);
    }
}

impl Drop for ConnectionSlot {
    fn drop(&mut self) {
        self.context.table.lock().remove(self.key);
        if self.usage.is_evicted() {
            self.context.on_closed("evicted");
        }
        self.context.open.dec();
        // The socket was dropped before.
        self.context.profile.reserve.refill();
        self.context.closed.notify_one();
    }
}

/// Creates the metric series of a listener, so that they start at zero.
fn create_series(profile: &ListenerProfile, metrics: &Metrics) {
    let listener = profile.name;
    let counted = |reason| ListenerReasonLabels { listener, reason };
    let reasons = [
        "evicted",
        "idle",
        "greeting_timeout",
        "header_timeout",
        "write_timeout",
    ];
    let listeners = &metrics.listeners;
    start_at_zero(&listeners.connections_closed, reasons.map(counted));
    start_at_zero(&listeners.connections_refused, [ListenerLabel { listener }]);
    if profile.tls.is_some() {
        let errors = HandshakeError::VARIANTS.iter().map(|error| error.reason());
        start_at_zero(&listeners.tls_handshake_errors, errors.map(counted));
    }
    if profile.protocol == ListenerProtocol::Grpc {
        let errors = ["stream", "connection"].map(|scope| Http2ErrorLabels {
            listener,
            scope,
            reason: "protocol_error",
        });
        start_at_zero(&listeners.http2_errors, errors);
    }
}
