//! Multimodal objects in events: for each block, the identifiers of the objects that its
//! placeholder tokens stand for.

use warmroute_core::block::ObjectHash;
pub use warmroute_core::block::placeholders::{MediaTokens, substitute_pads};

/// Returns the hash of an object's identifier. A content digest is truncated, and any other name is
/// hashed. An empty name has no hash.
pub(super) fn identifier_hash(identifier: &str) -> Option<u64> {
    ObjectHash::from_identifier(identifier).map(|object| object.0)
}

/// Parses the first 16 of exactly 64 hexadecimal digits.
pub(super) fn parse_digest(text: &str) -> Option<u64> {
    let hex = text.len() == 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    hex.then(|| u64::from_str_radix(&text[..16], 16).ok())
        .flatten()
}

/// Parses a hash in the form in which other routers pass it through an engine: 16 lowercase
/// hexadecimal digits and 48 zeros.
pub(super) fn parse_marker(text: &str) -> Option<u64> {
    let zeros = text
        .get(16..)
        .is_some_and(|tail| tail.bytes().all(|byte| byte == b'0'));
    let lowercase = !text.bytes().any(|byte| byte.is_ascii_uppercase());
    if zeros && lowercase {
        parse_digest(text)
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use xxhash_rust::xxh3::xxh3_64;

    use super::*;

    #[test]
    fn media_identifiers_hash_by_their_form() {
        let digest = "0123456789ABCDEF00112233445566778899aabbccddeefffedcba9876543210";
        let cases = [
            ("", None),
            (digest, Some(0x0123_4567_89ab_cdef)),
            (&digest[..63], Some(xxh3_64(&digest.as_bytes()[..63]))),
            ("cat.png", Some(xxh3_64(b"cat.png"))),
        ];
        for (identifier, expected) in cases {
            assert_eq!(identifier_hash(identifier), expected, "{identifier:?}");
        }
    }

    #[test]
    fn marker_is_sixteen_lowercase_digits_and_zeros() {
        let zeros = "0".repeat(48);
        assert_eq!(
            parse_marker(&format!("00000000000000ab{zeros}")),
            Some(0xab)
        );
        assert_eq!(parse_marker(&format!("00000000000000AB{zeros}")), None);
        assert_eq!(
            parse_marker(&format!("00000000000000ab1{}", &zeros[1..])),
            None
        );
        assert_eq!(parse_marker("é".repeat(32).as_str()), None);
    }
}
