//! The protocol of one connection as a state machine without I/O: received bytes in, events and
//! bytes to send out.

use bytes::{Bytes, BytesMut};
use strum::IntoStaticStr;

use crate::command::{self, ZmtpCommand};
use crate::error::ProtocolError;
use crate::frame::{AcceptedFrames, FrameDecoder, ZmtpFrame, put_command, put_part};
use crate::greeting::{greeting, take_greeting};

/// A message that exceeds the limits by at most this factor is skipped. A larger one ends the
/// connection.
const SKIP_FACTOR: u64 = 16;

/// Limits of a received message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageLimits {
    /// Largest message in bytes, all frames together.
    pub max_bytes: usize,
    /// Most frames of a message.
    pub max_frames: usize,
}

impl Default for MessageLimits {
    fn default() -> Self {
        Self {
            max_bytes: 64 << 20,
            max_frames: 16,
        }
    }
}

/// The role of the local socket.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SocketRole {
    /// Subscribes to a topic prefix; the peer is a publisher.
    Sub {
        /// The topic prefix; empty for all messages.
        topic: Bytes,
    },
    /// Sends requests to a router and receives its replies.
    Dealer,
}

impl SocketRole {
    fn socket_type(&self) -> &'static str {
        match self {
            SocketRole::Sub { .. } => "SUB",
            SocketRole::Dealer => "DEALER",
        }
    }

    fn accepts(&self, peer: &str) -> bool {
        match self {
            SocketRole::Sub { .. } => matches!(peer, "PUB" | "XPUB"),
            SocketRole::Dealer => matches!(peer, "ROUTER" | "DEALER" | "REP"),
        }
    }
}

/// The limit that a message exceeded.
#[derive(Clone, Copy, Debug, PartialEq, Eq, IntoStaticStr)]
#[strum(serialize_all = "snake_case")]
pub enum ExceededLimit {
    /// [`MessageLimits::max_bytes`].
    Message,
    /// [`MessageLimits::max_frames`].
    Frames,
}

impl ExceededLimit {
    /// Returns a short constant name, for metrics.
    pub fn as_str(self) -> &'static str {
        self.into()
    }
}

/// An event of a session.
#[derive(Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// The handshake is complete.
    Ready,
    /// A message, as its frames.
    Message(Vec<Bytes>),
    /// A message exceeded a limit and was skipped.
    Oversize(ExceededLimit),
}

#[derive(Debug)]
enum SessionPhase {
    Greeting,
    Handshake { minor: u8 },
    Traffic,
}

/// The protocol state of one connection.
#[derive(Debug)]
pub struct ZmtpSession {
    role: SocketRole,
    limits: MessageLimits,
    phase: SessionPhase,
    decoder: FrameDecoder,
    assembly: PartialMessage,
    output: BytesMut,
    /// Set if the peer understands PING, which older implementations treat as an error.
    has_heartbeats: bool,
}

impl ZmtpSession {
    /// Creates the state of a new connection. The output contains the greeting.
    pub fn new(role: SocketRole, limits: MessageLimits) -> Self {
        Self {
            role,
            limits,
            phase: SessionPhase::Greeting,
            decoder: FrameDecoder::default(),
            assembly: PartialMessage::default(),
            output: BytesMut::from(&greeting()[..]),
            has_heartbeats: false,
        }
    }

    /// Consumes input up to the next event. Returns `None` if more input is needed; the input then
    /// holds at most a part of a greeting or of a frame header.
    pub fn process(&mut self, input: &mut BytesMut) -> Result<Option<SessionEvent>, ProtocolError> {
        loop {
            match self.phase {
                SessionPhase::Greeting => {
                    let Some(minor) = take_greeting(input)? else {
                        return Ok(None);
                    };
                    put_command(
                        &mut self.output,
                        &command::ready_body(self.role.socket_type()),
                    );
                    self.phase = SessionPhase::Handshake { minor };
                }
                SessionPhase::Handshake { minor } => {
                    return match self.decoder.decode(input, AcceptedFrames::Commands)? {
                        Some(ZmtpFrame::Command(body)) => self.ready(minor, body).map(Some),
                        Some(ZmtpFrame::Part { .. } | ZmtpFrame::Skipped { .. }) => {
                            Err(ProtocolError::EarlyMessage)
                        }
                        None => Ok(None),
                    };
                }
                SessionPhase::Traffic => {
                    let accept = self.assembly.accept(&self.limits);
                    let Some(frame) = self.decoder.decode(input, accept)? else {
                        return Ok(None);
                    };
                    if let Some(event) = self.traffic(frame)? {
                        return Ok(Some(event));
                    }
                }
            }
        }
    }

    /// Returns the bytes to send. The caller removes the bytes that it has sent.
    pub fn output(&mut self) -> &mut BytesMut {
        &mut self.output
    }

    /// Appends a message to the output.
    pub fn send(&mut self, frames: &[Bytes]) {
        for (at, frame) in frames.iter().enumerate() {
            put_part(&mut self.output, frame, at + 1 < frames.len());
        }
    }

    /// Appends a heartbeat to the output. Returns false, and appends nothing, if the peer does not
    /// support heartbeats.
    pub fn ping(&mut self) -> bool {
        if self.has_heartbeats {
            put_command(&mut self.output, command::PING);
        }
        self.has_heartbeats
    }

    /// Completes the handshake with the peer's READY.
    fn ready(&mut self, minor: u8, body: Bytes) -> Result<SessionEvent, ProtocolError> {
        let peer = match ZmtpCommand::decode(body)? {
            ZmtpCommand::Ready { socket_type } => socket_type,
            ZmtpCommand::Error { reason } => return Err(ProtocolError::Rejected(reason)),
            ZmtpCommand::Ping { .. } | ZmtpCommand::Other => return Err(ProtocolError::NotReady),
        };
        if !self.role.accepts(&peer) {
            return Err(ProtocolError::SocketType {
                peer,
                ours: self.role.socket_type(),
            });
        }
        self.has_heartbeats = minor >= 1;
        if let SocketRole::Sub { topic } = &self.role {
            match minor {
                0 => put_part(&mut self.output, &[&[1], &topic[..]].concat(), false),
                _ => put_command(&mut self.output, &command::subscribe_body(topic)),
            }
        }
        self.phase = SessionPhase::Traffic;
        Ok(SessionEvent::Ready)
    }

    fn traffic(&mut self, frame: ZmtpFrame) -> Result<Option<SessionEvent>, ProtocolError> {
        match frame {
            ZmtpFrame::Part { more, body } => self.assembly.part(more, body, &self.limits),
            ZmtpFrame::Skipped { more, length } => {
                self.assembly.skipped(more, length, &self.limits)
            }
            // A command may arrive between the frames of a message.
            ZmtpFrame::Command(body) => {
                match ZmtpCommand::decode(body)? {
                    ZmtpCommand::Ping { context } => {
                        self.has_heartbeats = true;
                        put_command(&mut self.output, &command::pong_body(&context));
                    }
                    ZmtpCommand::Error { reason } => return Err(ProtocolError::Rejected(reason)),
                    ZmtpCommand::Ready { .. } | ZmtpCommand::Other => {}
                }
                Ok(None)
            }
        }
    }
}

/// The message that is being received.
#[derive(Debug, Default)]
struct PartialMessage {
    parts: Vec<Bytes>,
    /// Bytes of all frames, stored or skipped.
    bytes: u64,
    frames: usize,
    oversize: Option<ExceededLimit>,
}

impl PartialMessage {
    fn accept(&self, limits: &MessageLimits) -> AcceptedFrames {
        let limit = limits.max_bytes as u64;
        let store_limit = match self.oversize {
            None => usize::try_from(limit.saturating_sub(self.bytes)).unwrap_or(usize::MAX),
            Some(_) => 0,
        };
        AcceptedFrames::Messages {
            store_limit,
            skip_limit: limit.saturating_mul(SKIP_FACTOR).saturating_sub(self.bytes),
        }
    }

    fn part(
        &mut self,
        more: bool,
        body: Bytes,
        limits: &MessageLimits,
    ) -> Result<Option<SessionEvent>, ProtocolError> {
        self.bytes += body.len() as u64;
        if self.oversize.is_none() && self.frames < limits.max_frames {
            self.parts.push(body);
        }
        self.end_frame(more, limits)
    }

    fn skipped(
        &mut self,
        more: bool,
        length: u64,
        limits: &MessageLimits,
    ) -> Result<Option<SessionEvent>, ProtocolError> {
        self.bytes = self.bytes.saturating_add(length);
        self.exceed(ExceededLimit::Message);
        self.end_frame(more, limits)
    }

    fn exceed(&mut self, limit: ExceededLimit) {
        self.oversize.get_or_insert(limit);
        self.parts = Vec::new();
    }

    fn end_frame(
        &mut self,
        more: bool,
        limits: &MessageLimits,
    ) -> Result<Option<SessionEvent>, ProtocolError> {
        self.frames += 1;
        if self.frames > limits.max_frames {
            self.exceed(ExceededLimit::Frames);
        }
        if self.frames as u64 > (limits.max_frames as u64).saturating_mul(SKIP_FACTOR) {
            return Err(ProtocolError::TooManyFrames);
        }
        if more {
            return Ok(None);
        }
        let message = std::mem::take(self);
        Ok(Some(match message.oversize {
            None => SessionEvent::Message(message.parts),
            Some(limit) => SessionEvent::Oversize(limit),
        }))
    }
}

#[cfg(test)]
mod tests;
