//! ZMTP commands: a name and data.

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};

use crate::error::ProtocolError;

/// Longest context of a PING in bytes, from the specification.
const MAX_PING_CONTEXT: usize = 16;

/// A command that the peer sent.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum ZmtpCommand {
    /// The handshake is complete on the peer's side.
    Ready { socket_type: String },
    /// The handshake failed on the peer's side.
    Error { reason: String },
    /// A heartbeat, to be answered with its context.
    Ping { context: Bytes },
    /// Any other command; unknown ones are ignored by the specification.
    Other,
}

impl ZmtpCommand {
    pub(crate) fn decode(mut body: Bytes) -> Result<Self, ProtocolError> {
        let name =
            split_short_field(&mut body).ok_or(ProtocolError::MalformedCommand("unnamed"))?;
        match &name[..] {
            b"READY" => parse_ready(body).ok_or(ProtocolError::MalformedCommand("READY")),
            b"ERROR" => {
                let reason =
                    split_short_field(&mut body).ok_or(ProtocolError::MalformedCommand("ERROR"))?;
                Ok(ZmtpCommand::Error {
                    reason: String::from_utf8_lossy(&reason).into_owned(),
                })
            }
            b"PING" => {
                if body.try_get_u16().is_err() || body.len() > MAX_PING_CONTEXT {
                    return Err(ProtocolError::MalformedCommand("PING"));
                }
                Ok(ZmtpCommand::Ping { context: body })
            }
            _ => Ok(ZmtpCommand::Other),
        }
    }
}

/// Splits off a field that is prefixed with its length in one byte.
fn split_short_field(body: &mut Bytes) -> Option<Bytes> {
    let length = usize::from(body.try_get_u8().ok()?);
    (body.len() >= length).then(|| body.split_to(length))
}

/// Reads the properties of READY. Only the socket type is used.
fn parse_ready(mut body: Bytes) -> Option<ZmtpCommand> {
    let mut socket_type = String::new();
    while body.has_remaining() {
        let name = split_short_field(&mut body)?;
        let length = usize::try_from(body.try_get_u32().ok()?).ok()?;
        let value = (body.len() >= length).then(|| body.split_to(length))?;
        if name.eq_ignore_ascii_case(b"Socket-Type") {
            socket_type = String::from_utf8_lossy(&value).into_owned();
        }
    }
    Some(ZmtpCommand::Ready { socket_type })
}

/// Returns the body of READY for a socket type.
pub(crate) fn ready_body(socket_type: &str) -> BytesMut {
    let mut body = BytesMut::from(&b"\x05READY\x0bSocket-Type"[..]);
    body.put_u32(u32::try_from(socket_type.len()).unwrap_or_default());
    body.put_slice(socket_type.as_bytes());
    body
}

/// Returns the body of SUBSCRIBE (ZMTP 3.1).
pub(crate) fn subscribe_body(topic: &[u8]) -> Vec<u8> {
    [b"\x09SUBSCRIBE", topic].concat()
}

/// The body of PING, without a time to live and without a context.
pub(crate) const PING: &[u8] = b"\x04PING\x00\x00";

/// Returns the body of PONG.
pub(crate) fn pong_body(context: &[u8]) -> Vec<u8> {
    [b"\x04PONG", context].concat()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_decoded() {
        let ready = |socket_type: &str| ZmtpCommand::Ready {
            socket_type: socket_type.to_owned(),
        };
        let cases: [(&[u8], Result<ZmtpCommand, ProtocolError>); 12] = [
            (
                b"\x05READY\x0bSocket-Type\x00\x00\x00\x03PUB\x08Identity\x00\x00\x00\x00",
                Ok(ready("PUB")),
            ),
            (
                b"\x05READY\x0bsocket-type\x00\x00\x00\x04XPUB",
                Ok(ready("XPUB")),
            ),
            (b"\x05READY", Ok(ready(""))),
            (
                b"\x05READY\x0bSocket-Type\xff\xff\xff\xffPUB",
                Err(ProtocolError::MalformedCommand("READY")),
            ),
            (
                b"\x05READY\x0bSock",
                Err(ProtocolError::MalformedCommand("READY")),
            ),
            (
                b"\x05ERROR\x02no",
                Ok(ZmtpCommand::Error {
                    reason: "no".to_owned(),
                }),
            ),
            (
                b"\x05ERROR\x09no",
                Err(ProtocolError::MalformedCommand("ERROR")),
            ),
            (
                b"\x04PING\x00\x01abc",
                Ok(ZmtpCommand::Ping {
                    context: Bytes::from_static(b"abc"),
                }),
            ),
            (
                b"\x04PING\x00",
                Err(ProtocolError::MalformedCommand("PING")),
            ),
            (
                b"\x04PING\x00\x0112345678901234567",
                Err(ProtocolError::MalformedCommand("PING")),
            ),
            (b"\x04PONG", Ok(ZmtpCommand::Other)),
            (b"", Err(ProtocolError::MalformedCommand("unnamed"))),
        ];
        for (body, expected) in cases {
            assert_eq!(
                ZmtpCommand::decode(Bytes::from_static(body)),
                expected,
                "{body:?}"
            );
        }
    }
}
