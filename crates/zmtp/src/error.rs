//! Reasons why a connection fails.

use std::io;
use std::time::Duration;

use strum::IntoStaticStr;

/// An error of a socket or of one connection.
#[derive(Debug, thiserror::Error, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ZmtpError {
    /// The text is not an endpoint that this crate supports.
    #[error("`{endpoint}` {problem}")]
    Endpoint {
        /// The endpoint as configured.
        endpoint: String,
        /// The problem with it.
        problem: &'static str,
    },
    /// The transport failed.
    #[error(transparent)]
    Io(#[from] io::Error),
    /// The transport connection was not established in time.
    #[error("the connection was not established within {0:?}")]
    ConnectTimeout(Duration),
    /// The peer did not complete the handshake in time.
    #[error("the peer did not complete the ZMTP handshake within {0:?}")]
    HandshakeTimeout(Duration),
    /// The peer closed the connection.
    #[error("the peer closed the connection")]
    Closed,
    /// The peer closed the connection before the handshake was complete.
    #[error(
        "the peer closed the connection during the ZMTP handshake: it may require a security \
        mechanism other than NULL, or be another kind of socket"
    )]
    ClosedInHandshake,
    /// The peer neither sent nor accepted data.
    #[error("the peer did not respond to heartbeats for {0:?}")]
    HeartbeatTimeout(Duration),
    /// The peer violated the protocol, or requires a feature that this crate does not support.
    #[error(transparent)]
    Protocol(#[from] ProtocolError),
    /// The bound socket has as many publishers as it accepts.
    #[error("the socket has {0} publishers already")]
    TooManyPublishers(usize),
    /// A newer connection replaced this one, which had not completed its handshake.
    #[error("more than {0} connections are in the ZMTP handshake")]
    TooManyHandshakes(usize),
    /// The bound socket has as many publishers as it accepts, and a new one replaced this one.
    #[error("the publisher was silent for longer than the others, and a new one replaced it")]
    Replaced,
}

impl ZmtpError {
    /// Returns a short constant name of the reason, for metrics.
    pub fn reason(&self) -> &'static str {
        match self {
            ZmtpError::Protocol(
                ProtocolError::MessageTooLarge(_)
                | ProtocolError::CommandTooLarge(_)
                | ProtocolError::TooManyFrames,
            ) => "too_large",
            error => error.into(),
        }
    }
}

/// A violation of ZMTP 3, or an unsupported feature of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ProtocolError {
    /// The first bytes are not a ZMTP greeting.
    #[error("the peer does not speak ZMTP")]
    Signature,
    /// The peer speaks an older protocol.
    #[error("the peer speaks ZMTP {0}, but at least version 3 is required")]
    Version(u8),
    /// The peer requires another security mechanism.
    #[error("the peer requires the security mechanism {0:?}, but only NULL is supported")]
    Mechanism(String),
    /// The socket types of the two sides do not match.
    #[error("the peer's socket has the type {peer:?}, which does not match {ours}")]
    SocketType {
        /// Type of the peer's socket.
        peer: String,
        /// Type of the local socket.
        ours: &'static str,
    },
    /// Reserved bits of a frame's flags are set, or a command is marked as continued.
    #[error("a frame has the invalid flags {0:#04x}")]
    Flags(u8),
    /// A message was sent before the handshake was complete.
    #[error("the peer sent a message before the handshake was complete")]
    EarlyMessage,
    /// A command is malformed.
    #[error("the peer sent a malformed {0} command")]
    MalformedCommand(&'static str),
    /// The peer sent another command where READY is expected.
    #[error("the peer sent another command instead of READY")]
    NotReady,
    /// A command is longer than any valid one.
    #[error("the peer sent a command of {0} bytes")]
    CommandTooLarge(u64),
    /// A message is too long to be skipped.
    #[error("the peer sent a message of at least {0} bytes")]
    MessageTooLarge(u64),
    /// A message has too many frames to be skipped.
    #[error("the peer sent a message with too many frames")]
    TooManyFrames,
    /// The peer reported an error.
    #[error("the peer reported the error {0:?}")]
    Rejected(String),
}
