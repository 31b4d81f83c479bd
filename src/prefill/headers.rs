//! Which of a client's headers go to the prefill worker with its request: those that would go to a worker through Envoy.

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

/// Of one connection only, or of one body; and what only our own client knows: which compression it can undo.
const KEPT: [&str; 14] = [
    "accept",
    "accept-encoding",
    "connection",
    "content-length",
    "content-type",
    "expect",
    "host",
    "http2-settings",
    "keep-alive",
    "proxy-authorization",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// The headers of a request as its prefill worker gets them. Names that only we may use are not believed of a client.
pub fn forwarded<'h>(
    headers: impl IntoIterator<Item = (&'h str, &'h [u8])>,
    reserved: impl Fn(&str) -> bool,
) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = name.to_ascii_lowercase();
        if name.starts_with(':')
            || KEPT.contains(&&*name)
            || name.starts_with("x-envoy-")
            || reserved(&name)
        {
            continue;
        }
        if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_bytes(value))
        {
            map.append(name, value);
        }
    }
    map
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_worker_would_see_is_sent_on_and_what_belongs_to_a_connection_is_not() {
        let sent: [(&str, &[u8]); 10] = [
            (":path", b"/v1/chat/completions"),
            ("Authorization", b"Bearer x"),
            ("x-request-id", b"req-1"),
            ("content-length", b"7"),
            ("Accept-Encoding", b"gzip"),
            ("x-envoy-expected-rq-timeout-ms", b"15000"),
            ("x-worker-instance-id", b"7"),
            ("x-tag", b"a"),
            ("x-tag", b"b\xff"),
            ("bad name", b"x"),
        ];
        let map = forwarded(sent, |name| name == "x-worker-instance-id");
        let mut names: Vec<_> = map
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_bytes()))
            .collect();
        names.sort_unstable();
        let expected: [(&str, &[u8]); 4] = [
            ("authorization", b"Bearer x"),
            ("x-request-id", b"req-1"),
            ("x-tag", b"a"),
            ("x-tag", b"b\xff"),
        ];
        assert_eq!(names, expected);
    }
}
