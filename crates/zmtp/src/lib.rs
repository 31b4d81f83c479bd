//! A bounded ZMTP 3 client: SUB and DEALER sockets with the NULL mechanism, over TCP and Unix
//! sockets.
//!
//! The peer is not trusted. The memory of a connection depends on the bytes received, never on a
//! length that the peer announces, and is limited by [`MessageLimits`]. [`ZmtpSession`] is the
//! protocol without input and output; [`ZmtpConnection`] runs a session on a stream; [`SubSocket`]
//! and [`DealerSocket`] own connections.
//!
//! The memory of one SUB connection is at most two messages (one that is received or waits for the
//! consumer, one in the queue) and a read buffer. While a large message is received its buffer
//! grows by doubling, so that its old and new allocation exist together for a moment: at most 1.5
//! times the bytes received.

mod backoff;
mod command;
mod connection;
mod dealer;
mod endpoint;
mod error;
mod frame;
mod greeting;
mod listener;
mod session;
mod sub;
mod transport;

pub use backoff::ReconnectBackoff;
pub use connection::{ConnectionTiming, ZmtpConnection};
pub use dealer::DealerSocket;
pub use endpoint::ZmtpEndpoint;
pub use error::{ProtocolError, ZmtpError};
pub use session::{ExceededLimit, MessageLimits, SessionEvent, SocketRole, ZmtpSession};
pub use sub::{PublisherId, SubEvent, SubSocket};

/// Settings of a socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketConfig {
    /// Sizes.
    pub limits: MessageLimits,
    /// Timeouts and intervals.
    pub timing: ConnectionTiming,
}
