//! A bounded ZMTP 3 client: SUB and DEALER sockets with the NULL mechanism, over TCP and Unix
//! sockets.
//!
//! The peer is not trusted. The memory of a connection depends on the bytes received, never on a
//! length that the peer announces, and is limited by [`MessageLimits`]. [`ZmtpSession`] implements
//! the protocol without I/O. [`ZmtpConnection`] runs a session on a stream. [`SubSocket`] and
//! [`DealerSocket`] own connections.
//!
//! A SUB connection holds at most two messages and a read buffer. One message is being received or
//! waits for the consumer, and the other one is in the queue. The buffer of a large message grows
//! by doubling. During a reallocation, the old and the new buffer exist at the same time.
//!
//! Decision 0051.

mod command;
mod connection;
mod endpoint;
mod error;
mod frame;
mod greeting;
mod listener;
mod publisher;
mod session;
mod sub;
mod transport;

pub use connection::{ConnectionTiming, DealerSocket, ZmtpConnection};
pub use endpoint::ZmtpEndpoint;
pub use error::{ProtocolError, ZmtpError};
pub use publisher::{PublisherId, SubEvent};
pub use session::{ExceededLimit, MessageLimits, SessionEvent, SocketRole, ZmtpSession};
pub use sub::SubSocket;

/// Settings of a socket.
#[derive(Clone, Copy, Debug, Default)]
pub struct SocketConfig {
    /// Largest sizes of a message.
    pub limits: MessageLimits,
    /// Timeouts and intervals.
    pub timing: ConnectionTiming,
}
