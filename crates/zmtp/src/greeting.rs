//! The greeting: 64 bytes with the signature, the protocol version and the security mechanism.

use bytes::{Buf as _, BytesMut};

use crate::error::ProtocolError;

const LENGTH: usize = 64;
const SIGNATURE_LENGTH: usize = 10;
const MAJOR: usize = 10;
const MINOR: usize = 11;
const MECHANISM: std::ops::Range<usize> = 12..32;

/// Returns the local greeting: ZMTP 3.1, NULL mechanism, client.
pub(crate) fn greeting() -> [u8; LENGTH] {
    let mut greeting = [0; LENGTH];
    greeting[0] = 0xff;
    greeting[9] = 0x7f;
    greeting[MAJOR] = 3;
    greeting[MINOR] = 1;
    greeting[MECHANISM][..4].copy_from_slice(b"NULL");
    greeting
}

/// Collects and checks the peer's greeting.
#[derive(Clone, Debug)]
pub(crate) struct GreetingDecoder {
    bytes: [u8; LENGTH],
    received: usize,
}

impl Default for GreetingDecoder {
    fn default() -> Self {
        Self {
            bytes: [0; LENGTH],
            received: 0,
        }
    }
}

impl GreetingDecoder {
    /// Consumes input and returns the peer's minor version when the greeting is complete. Errors
    /// are reported as early as possible, because a peer of an older version sends nothing after
    /// its signature.
    pub(crate) fn decode(&mut self, input: &mut BytesMut) -> Result<Option<u8>, ProtocolError> {
        let taken = input.len().min(LENGTH - self.received);
        self.bytes[self.received..][..taken].copy_from_slice(&input[..taken]);
        self.received += taken;
        input.advance(taken);
        let received = &self.bytes[..self.received];
        // The eight bytes in between are padding and may have any value.
        let is_signature = received.first().is_none_or(|first| *first == 0xff)
            && received
                .get(SIGNATURE_LENGTH - 1)
                .is_none_or(|last| last & 1 == 1);
        if !is_signature {
            return Err(ProtocolError::Signature);
        }
        if let Some(major) = received.get(MAJOR).filter(|major| **major < 3) {
            return Err(ProtocolError::Version(*major));
        }
        if received.len() < LENGTH {
            return Ok(None);
        }
        let mechanism = received[MECHANISM]
            .split(|byte| *byte == 0)
            .next()
            .unwrap_or_default();
        if mechanism != b"NULL" {
            return Err(ProtocolError::Mechanism(
                String::from_utf8_lossy(mechanism).into_owned(),
            ));
        }
        // A peer of a later major version falls back to version 3.1, which the local greeting has.
        Ok(Some(if received[MAJOR] > 3 {
            1
        } else {
            received[MINOR]
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Option<u8>, ProtocolError> {
        GreetingDecoder::default().decode(&mut BytesMut::from(bytes))
    }

    #[test]
    fn fragmented_greeting_is_complete_after_64_bytes() {
        let mut decoder = GreetingDecoder::default();
        for byte in &greeting()[..63] {
            assert_eq!(decoder.decode(&mut BytesMut::from(&[*byte][..])), Ok(None));
        }
        let mut rest = BytesMut::from(&[0, 7][..]);
        assert_eq!(decoder.decode(&mut rest), Ok(Some(1)));
        assert_eq!(
            &rest[..],
            [7],
            "the byte after the greeting is not consumed"
        );
    }

    #[test]
    fn greeting_fails_at_first_wrong_byte() {
        assert_eq!(decode(b"GET / HTTP/1.1"), Err(ProtocolError::Signature));
        assert_eq!(
            decode(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7e]),
            Err(ProtocolError::Signature)
        );
        assert_eq!(
            decode(&[0xff, 0, 0, 0, 0, 0, 0, 0, 1, 0x7f, 1]),
            Err(ProtocolError::Version(1))
        );
        let mut curve = greeting();
        curve[MECHANISM][..5].copy_from_slice(b"CURVE");
        assert_eq!(
            decode(&curve),
            Err(ProtocolError::Mechanism("CURVE".to_owned()))
        );
        for (major, minor, expected) in [(3, 0, 0), (3, 1, 1), (4, 0, 1)] {
            let mut other = greeting();
            other[MAJOR..=MINOR].copy_from_slice(&[major, minor]);
            assert_eq!(decode(&other), Ok(Some(expected)));
        }
    }
}
