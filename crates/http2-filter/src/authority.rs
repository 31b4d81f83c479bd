//! Values of `:authority` that `h2` accepts.

use std::borrow::Cow;

use http::uri::Authority;

/// Returns the authority that a service behind the filter receives. Valid values are unchanged. In
/// other values, `|` becomes `+`, and `/` becomes `=`. Any other character that is not an ASCII
/// letter, a digit or one of `-._~` becomes `-`. For example, `outbound|9002||picker.ns.svc`
/// becomes `outbound+9002++picker.ns.svc`. To compare a configured name with a request, normalize
/// the configured name first.
pub fn normalize_authority(name: &str) -> Cow<'_, str> {
    match replacement(name.as_bytes()).map(String::from_utf8) {
        Some(Ok(valid)) => Cow::Owned(valid),
        _ => Cow::Borrowed(name),
    }
}

/// Returns a valid authority of the same length, or `None` if `value` is valid or cannot be
/// replaced because it is empty or has control characters.
pub(crate) fn replacement(value: &[u8]) -> Option<Vec<u8>> {
    if value.is_empty()
        || value.iter().any(u8::is_ascii_control)
        || Authority::try_from(value).is_ok()
    {
        return None;
    }
    Some(value.iter().copied().map(substitute).collect())
}

/// Returns the substitute of an octet in an invalid authority. Its Huffman code is never longer
/// than that of the octet, so a replaced value still fits into its frame.
fn substitute(octet: u8) -> u8 {
    match octet {
        b'|' => b'+',
        b'/' => b'=',
        b'-' | b'.' | b'_' | b'~' => octet,
        _ if octet.is_ascii_alphanumeric() => octet,
        _ => b'-',
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::huffman;

    #[test]
    fn control_plane_names_become_valid_authorities() {
        for (name, expected) in [
            (
                "outbound|9002||warmroute.inference.svc.cluster.local",
                "outbound+9002++warmroute.inference.svc.cluster.local",
            ),
            ("extension/ns/name", "extension=ns=name"),
            (
                "warmroute.inference.svc:9002",
                "warmroute.inference.svc:9002",
            ),
            ("[::1]:9002", "[::1]:9002"),
            ("a:b:c", "a-b-c"),
            ("my cluster", "my-cluster"),
        ] {
            let normalized = normalize_authority(name);
            assert_eq!(normalized, expected);
            assert!(Authority::try_from(&*normalized).is_ok(), "{name}");
        }
    }

    #[test]
    fn every_octet_has_substitute_without_longer_code() {
        for octet in 0..=u8::MAX {
            for value in [
                vec![octet],
                vec![b'a', octet, b'b', b'|'],
                vec![b'[', octet],
            ] {
                let Some(replaced) = replacement(&value) else {
                    continue;
                };
                assert_eq!(replaced.len(), value.len());
                assert!(Authority::try_from(&*replaced).is_ok(), "{value:?}");
                assert!(
                    huffman::encode(&replaced).len() <= huffman::encode(&value).len(),
                    "{value:?}"
                );
            }
        }
    }

    #[test]
    fn empty_names_and_control_characters_are_not_replaced() {
        for name in ["", "a\nb|", "\u{7f}"] {
            assert_eq!(replacement(name.as_bytes()), None);
        }
    }
}
