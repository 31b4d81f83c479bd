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

/// Takes the peer's greeting from the input and returns its minor version. Returns `None` if it is
/// incomplete. Errors are reported as early as possible, because a peer of an older version sends
/// nothing after its signature.
pub(crate) fn take_greeting(input: &mut BytesMut) -> Result<Option<u8>, ProtocolError> {
    let received = &input[..input.len().min(LENGTH)];
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
    let minor = if received[MAJOR] > 3 {
        1
    } else {
        received[MINOR]
    };
    input.advance(LENGTH);
    Ok(Some(minor))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn decode(bytes: &[u8]) -> Result<Option<u8>, ProtocolError> {
        take_greeting(&mut BytesMut::from(bytes))
    }

    #[test]
    fn fragmented_greeting_is_complete_after_64_bytes() {
        let mut input = BytesMut::new();
        for byte in &greeting()[..63] {
            input.extend_from_slice(&[*byte]);
            assert_eq!(take_greeting(&mut input), Ok(None));
        }
        input.extend_from_slice(&[0, 7]);
        assert_eq!(take_greeting(&mut input), Ok(Some(1)));
        assert_eq!(
            &input[..],
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
