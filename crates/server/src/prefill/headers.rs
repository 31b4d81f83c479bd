//! Headers of a client that are forwarded to the prefill worker: those that Envoy would forward to
//! a worker.

use std::borrow::Cow;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

/// Hop-by-hop headers, and headers that depend on the body or on the client's own compression.
const NOT_FORWARDED: [&str; 14] = [
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

/// Headers of a client's request. Only requests with a remote prefill read them.
pub trait ClientHeaders {
    /// Returns the id of the request, from the client or assigned; empty without one.
    fn request_id(&self) -> &str;

    /// Returns the names and values of all headers, in order.
    fn fields(&self) -> Vec<(&str, &[u8])>;

    /// Returns the last value of a header that is not blank.
    fn get(&self, name: &str) -> Option<Cow<'_, str>>;
}

/// Returns the forwarded headers of a request, without the names that clients must not set.
pub(super) fn forwarded_headers<'h>(
    headers: impl IntoIterator<Item = (&'h str, &'h [u8])>,
    reserved: impl Fn(&str) -> bool,
) -> HeaderMap {
    let mut map = HeaderMap::new();
    for (name, value) in headers {
        let name = name.to_ascii_lowercase();
        if name.starts_with(':')
            || NOT_FORWARDED.contains(&&*name)
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
    fn hop_by_hop_and_reserved_headers_are_removed() {
        let headers_sent: [(&str, &[u8]); 10] = [
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
        let map = forwarded_headers(headers_sent, |name| name == "x-worker-instance-id");
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
