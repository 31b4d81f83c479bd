//! Header names: those we set, those only we may set, and the few we read.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::protobuf::value::Kind;

use crate::worker::Endpoint;

/// Instance id of the chosen worker, decimal.
pub const WORKER_ID: &str = "x-worker-instance-id";
/// Data-parallel rank of the chosen worker.
pub const DP_RANK: &str = "x-dp-rank";
/// The same rank under the name vLLM's own front end reads.
pub const DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";
/// Instance id of the chosen prefill worker, decimal.
pub const PREFILL_ID: &str = "x-prefill-instance-id";
/// Data-parallel rank of the chosen prefill worker.
pub const PREFILL_RANK: &str = "x-prefill-dp-rank";
/// `ip:port` of the chosen prefill worker, where sidecars look for it.
pub const PREFILL_ENDPOINT: &str = "x-prefiller-host-port";
/// Envoy's cluster that gets a copy of the request; where it is not there, nobody does.
pub const PREFILL_CLUSTER: &str = "x-prefill-cluster";
/// `ip:port` of who gets that copy; also a key of the dynamic metadata.
pub const PREFILL_DESTINATION: &str = "x-prefill-destination";
/// `ip:port` of the chosen worker; also the key of the dynamic metadata that Envoy's `override_host` reads.
pub const ENDPOINT: &str = "x-gateway-destination-endpoint";
/// Response header that names the step of the degradation ladder.
pub const MODE: &str = "x-warmroute-mode";

/// Response header with the cached prompt tokens that the engine is expected to report.
pub const PREDICTED: &str = "x-warmroute-predicted-cached-tokens";

/// Response header that says in short why the worker was chosen.
pub const WHY: &str = "x-warmroute-why";

/// Name of a request, for logs.
pub const REQUEST_ID: &str = "x-request-id";

/// Response header that says in llm-d's words why a request was dropped.
pub const DROPPED: &str = "x-llm-d-request-dropped-reason";

/// Response header with the endpoint that served, for conformance tests.
pub const CONFORMANCE_SERVED: &str = "x-conformance-test-served-endpoint";
/// Request header that names the endpoints to choose from, for conformance tests.
pub const CONFORMANCE_SELECTION: &str = "test-epp-endpoint-selection";
/// Request header by which the echo server of conformance tests is asked to set a response header.
pub const CONFORMANCE_ECHO: &str = "x-echo-set-header";

/// What we keep of a request's headers.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestHead {
    /// HTTP method.
    pub method: String,
    /// Path with its query.
    pub path: String,
    /// `x-request-id`, for logs.
    pub request_id: String,
    /// What it says of its length.
    pub content_length: Option<u64>,
    /// Everything, as Envoy sent it.
    pub all: Arc<HeaderMap>,
}

impl RequestHead {
    /// Reads the head of a request.
    pub fn read(headers: Option<HeaderMap>) -> Self {
        let all = Arc::new(headers.unwrap_or_default());
        let mut head = Self::default();
        for header in &all.headers {
            match header.key.as_str() {
                ":method" => head.method = text(header).into_owned(),
                ":path" => head.path = text(header).into_owned(),
                REQUEST_ID => head.request_id = text(header).into_owned(),
                "content-length" => head.content_length = text(header).trim().parse().ok(),
                _ => {}
            }
        }
        Self { all, ..head }
    }

    /// The last value of a header that is not blank; a blank one where there is no other.
    pub fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        let values = || {
            self.all
                .headers
                .iter()
                .rev()
                .filter(|header| header.key.eq_ignore_ascii_case(name))
                .map(text)
        };
        values()
            .find(|value| !value.trim().is_empty())
            .or_else(|| values().next())
    }
}

/// What we keep of a response's headers, and of what Envoy says beside them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseHead {
    /// HTTP status; 0 where Envoy sent none.
    pub status: u16,
    /// Whether the body is a stream of server-sent events.
    pub event_stream: bool,
    /// Who answered, where Envoy is configured to say.
    pub from: AnsweredBy,
    /// Whether Envoy's router has added `x-envoy-upstream-service-time`.
    pub has_upstream_time: bool,
}

/// Who made a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum AnsweredBy {
    /// Envoy does not say.
    #[default]
    Unknown,
    /// The worker at this endpoint.
    Worker(SocketAddr),
    /// Envoy itself: no worker could be reached.
    Envoy,
    /// Envoy itself, for reasons of its own: a limit, a time, a fault it was told to inject. That tells nothing of workers.
    Policy,
    /// Envoy or the worker: a 503 without attributes, without `x-envoy-upstream-service-time`, and without headers that engines set.
    /// [`GatewayTraits`](super::gateway::GatewayTraits) decides.
    Ambiguous,
}

impl ResponseHead {
    /// Reads the head of a response; `attributes` as the configuration asks Envoy to send them.
    pub fn read(headers: Option<&HeaderMap>, attributes: &HashMap<String, Struct>) -> Self {
        let said = answered_by(attributes);
        let mut head = Self {
            from: said.unwrap_or_default(),
            ..Self::default()
        };
        let mut is_of_engine = false;
        for header in headers.iter().flat_map(|map| &map.headers) {
            match header.key.as_str() {
                ":status" => head.status = text(header).parse().unwrap_or(0),
                "content-type" => {
                    head.event_stream = text(header)
                        .trim_start()
                        .to_ascii_lowercase()
                        .starts_with("text/event-stream");
                }
                // Envoy's router adds the first to responses of workers, and the second to requests that it refused to send.
                "x-envoy-upstream-service-time" => head.has_upstream_time = true,
                // Envoy adds these to its own responses only after the filters.
                "date" | "server" => is_of_engine = true,
                "x-envoy-overloaded" if said.is_none() => head.from = AnsweredBy::Policy,
                _ => {}
            }
        }
        let is_ambiguous =
            said.is_none() && head.status == 503 && !is_of_engine && !head.has_upstream_time;
        if is_ambiguous && head.from == AnsweredBy::Unknown {
            head.from = AnsweredBy::Ambiguous;
        }
        head
    }

    /// The same where the gateway names the endpoint that served: of several that were tried, separated by commas, the last.
    #[must_use]
    pub fn served_by(mut self, served: Option<&str>) -> Self {
        let address = served.and_then(|text| text.rsplit(',').next()?.trim().parse().ok());
        // What Envoy says of its own answers is not about whom it had meant to ask.
        if let (Some(address), AnsweredBy::Unknown | AnsweredBy::Worker(_)) = (address, self.from) {
            self.from = AnsweredBy::Worker(address);
        }
        self
    }
}

/// Attribute of Envoy's that names whoever a request goes to, or was sent to last.
const UPSTREAM: &str = "upstream.address";

/// Flag of Envoy's that also stands on answers of workers: there will be no further try.
const RETRIES_EXHAUSTED: u64 = 1 << 15;

/// Flags of Envoy's that say that no worker could be reached, or that it fell silent: no healthy host, reset by the worker,
/// no connection, connection lost, not understood, no address. Their bits are the order of Envoy's `CoreResponseFlag`.
const UNREACHABLE: u64 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 23 | 1 << 26;

/// `upstream.address` names who was tried last, `response.flags` says what went wrong where Envoy made the answer itself.
/// `None` where Envoy is not configured to say.
fn answered_by(attributes: &HashMap<String, Struct>) -> Option<AnsweredBy> {
    let flags = match find(attributes, "response.flags") {
        Some(Kind::NumberValue(flags)) => Some(*flags as u64 & !RETRIES_EXHAUSTED),
        _ => None,
    };
    match (flags, find(attributes, UPSTREAM)) {
        (Some(flags), _) if flags & UNREACHABLE != 0 => Some(AnsweredBy::Envoy),
        (Some(1..), _) => Some(AnsweredBy::Policy),
        (_, Some(Kind::StringValue(address))) => Some(
            address
                .parse()
                .map_or(AnsweredBy::Unknown, AnsweredBy::Worker),
        ),
        (Some(_), _) => Some(AnsweredBy::Unknown),
        (None, _) => None,
    }
}

/// Who gets a request that is on its way.
pub(super) fn upstream(attributes: &HashMap<String, Struct>) -> Option<Endpoint> {
    match find(attributes, UPSTREAM)? {
        Kind::StringValue(address) => address.parse().ok().map(Endpoint),
        _ => None,
    }
}

fn find<'a>(attributes: &'a HashMap<String, Struct>, name: &str) -> Option<&'a Kind> {
    attributes
        .values()
        .find_map(|group| group.fields.get(name)?.kind.as_ref())
}

/// Envoy fills `raw_value`; other gateways still fill the older text field.
/// The value of a header as it came.
pub(super) fn bytes(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() {
        header.value.as_bytes()
    } else {
        &header.raw_value
    }
}

fn text(header: &HeaderValue) -> Cow<'_, str> {
    if header.raw_value.is_empty() {
        Cow::Borrowed(&header.value)
    } else {
        String::from_utf8_lossy(&header.raw_value)
    }
}

#[cfg(test)]
mod tests {
    use envoy_types::pb::google::protobuf::Value;

    use super::*;

    fn from(
        status: u16,
        named: Option<&str>,
        flags: Option<u64>,
        address: Option<&str>,
    ) -> AnsweredBy {
        let header = |key: &str, value: String| HeaderValue {
            key: key.to_owned(),
            value,
            ..HeaderValue::default()
        };
        let status = header(":status", status.to_string());
        let headers = [status]
            .into_iter()
            .chain(named.map(|name| header(name, "1".to_owned())))
            .collect();
        let mut group = Struct::default();
        let mut add = |name: &str, kind| {
            group
                .fields
                .insert(name.to_owned(), Value { kind: Some(kind) })
        };
        flags.map(|flags| add("response.flags", Kind::NumberValue(flags as f64)));
        address.map(|address| add("upstream.address", Kind::StringValue(address.to_owned())));
        ResponseHead::read(
            Some(&HeaderMap { headers }),
            &[(String::new(), group)].into(),
        )
        .from
    }

    #[test]
    fn only_what_happened_on_the_way_to_a_worker_is_held_against_it() {
        const WORKER: &str = "127.0.0.1:8000";
        let worker = AnsweredBy::Worker(WORKER.parse().unwrap());
        for (flags, expected) in [
            (0, worker),
            (1 << 15, worker),
            (1 << 1, AnsweredBy::Envoy),
            (1 << 4, AnsweredBy::Envoy),
            (1 << 5 | 1 << 15, AnsweredBy::Envoy),
            (1 << 6, AnsweredBy::Envoy),
            (1 << 23, AnsweredBy::Envoy),
            (1 << 26, AnsweredBy::Envoy),
            (1 << 2, AnsweredBy::Policy),
            (1 << 7, AnsweredBy::Policy),
            (1 << 10, AnsweredBy::Policy),
            (1 << 11, AnsweredBy::Policy),
            (1 << 12, AnsweredBy::Policy),
        ] {
            assert_eq!(
                from(503, None, Some(flags), Some(WORKER)),
                expected,
                "{flags:#x}"
            );
        }
        assert_eq!(from(503, None, Some(0), None), AnsweredBy::Unknown);
    }

    #[test]
    fn unmarked_503_without_attributes_is_ambiguous() {
        let time = Some("x-envoy-upstream-service-time");
        for (status, named, expected) in [
            (503, None, AnsweredBy::Ambiguous),
            (503, time, AnsweredBy::Unknown),
            (503, Some("date"), AnsweredBy::Unknown),
            (503, Some("server"), AnsweredBy::Unknown),
            (503, Some("x-envoy-overloaded"), AnsweredBy::Policy),
            (429, None, AnsweredBy::Unknown),
            (200, None, AnsweredBy::Unknown),
        ] {
            assert_eq!(
                from(status, named, None, None),
                expected,
                "{status} {named:?}"
            );
        }
    }

    #[test]
    fn the_last_value_that_is_not_blank_counts() {
        type Case<'a> = (&'a [&'a str], Option<&'a str>);
        let cases: [Case<'_>; 5] = [
            (&[], None),
            (&["a"], Some("a")),
            (&["a", "b"], Some("b")),
            (&["a", "", " "], Some("a")),
            (&["", " "], Some(" ")),
        ];
        for (values, expected) in cases {
            let header = |value: &&str| HeaderValue {
                key: "X-Tenant".to_owned(),
                raw_value: value.as_bytes().to_vec(),
                ..HeaderValue::default()
            };
            let head = RequestHead::read(Some(HeaderMap {
                headers: values.iter().map(header).collect(),
            }));
            assert_eq!(head.get("x-tenant").as_deref(), expected, "{values:?}");
        }
    }
}
