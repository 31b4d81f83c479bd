//! Names of the headers that warmroute sets, reserves and reads.

use std::borrow::Cow;
use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};
use envoy_types::pb::google::protobuf::Struct;
use envoy_types::pb::google::protobuf::value::Kind;
use warmroute_core::worker::WorkerEndpoint;

use crate::prefill::ClientHeaders;

pub use warmroute_core::envoy_names::{ENDPOINT, PREFILL_CLUSTER, PREFILL_DESTINATION};

/// Instance id of the chosen worker, decimal.
pub const WORKER_ID: &str = "x-worker-instance-id";
/// Data-parallel rank of the chosen worker.
pub const DP_RANK: &str = "x-dp-rank";
/// The same rank under the name that vLLM's front end reads.
pub(super) const DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";
/// Instance id of the chosen prefill worker, decimal.
pub(super) const PREFILL_ID: &str = "x-prefill-instance-id";
/// Data-parallel rank of the chosen prefill worker.
pub const PREFILL_RANK: &str = "x-prefill-dp-rank";
/// `ip:port` of the chosen prefill worker, for sidecars.
pub(super) const PREFILL_ENDPOINT: &str = "x-prefiller-host-port";
/// Response header with the routing mode.
pub const MODE: &str = "x-warmroute-mode";

/// Response header with the cached prompt tokens that the engine is expected to report.
pub(super) const PREDICTED_CACHED_TOKENS: &str = "x-warmroute-predicted-cached-tokens";

/// Response header with a short explanation of the choice.
pub(super) const WHY_CHOSEN: &str = "x-warmroute-why";

/// Id of a request, for logs.
pub const REQUEST_ID: &str = "x-request-id";

/// Response header with llm-d's reason for a rejection.
pub(super) const DROPPED_REASON: &str = "x-llm-d-request-dropped-reason";

/// Response header with the endpoint that served, for conformance tests.
pub(super) const CONFORMANCE_SERVED: &str = "x-conformance-test-served-endpoint";
/// Request header with the candidate endpoints, for conformance tests.
pub(super) const CONFORMANCE_SELECTION: &str = "test-epp-endpoint-selection";
/// Request header that asks the echo server of conformance tests to set a response header.
pub(super) const CONFORMANCE_ECHO: &str = "x-echo-set-header";

/// The parts of a request's headers that warmroute uses.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RequestHead {
    /// HTTP method.
    pub method: String,
    /// Path with its query.
    pub path: String,
    /// `x-request-id`, for logs.
    pub request_id: String,
    /// Announced length of the body, in bytes.
    pub content_length: Option<u64>,
    /// All headers, as Envoy sent them.
    pub headers: Arc<HeaderMap>,
}

impl RequestHead {
    /// Parses the headers of a request.
    pub fn parse(headers: Option<HeaderMap>) -> Self {
        let all = Arc::new(headers.unwrap_or_default());
        let mut head = Self::default();
        for header in &all.headers {
            match header.key.as_str() {
                ":method" => head.method = value_text(header).into_owned(),
                ":path" => head.path = value_text(header).into_owned(),
                REQUEST_ID => head.request_id = value_text(header).into_owned(),
                "content-length" => head.content_length = value_text(header).trim().parse().ok(),
                _ => {}
            }
        }
        Self {
            headers: all,
            ..head
        }
    }

    /// Returns the last value of a header that is not blank, or else a blank one.
    pub fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        let values = || {
            self.headers
                .headers
                .iter()
                .rev()
                .filter(|header| header.key.eq_ignore_ascii_case(name))
                .map(value_text)
        };
        values()
            .find(|value| !value.trim().is_empty())
            .or_else(|| values().next())
    }

    /// Returns whether the request opens a tunnel, by `CONNECT` or by an upgrade of the protocol.
    /// The bytes that follow are frames of that protocol, and the client may wait for the response
    /// before it sends any.
    pub fn opens_tunnel(&self) -> bool {
        let has_upgrade_option = |header: &HeaderValue| {
            header.key.eq_ignore_ascii_case("connection")
                && value_text(header)
                    .split(',')
                    .any(|option| option.trim().eq_ignore_ascii_case("upgrade"))
        };
        self.method == "CONNECT"
            || (self.get("upgrade").is_some()
                && self.headers.headers.iter().any(has_upgrade_option))
    }
}

impl ClientHeaders for RequestHead {
    fn request_id(&self) -> &str {
        &self.request_id
    }

    fn fields(&self) -> Vec<(&str, &[u8])> {
        self.headers
            .headers
            .iter()
            .map(|header| (header.key.as_str(), value_bytes(header)))
            .collect()
    }

    fn get(&self, name: &str) -> Option<Cow<'_, str>> {
        RequestHead::get(self, name)
    }
}

/// The parts of a response's headers and attributes that warmroute uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseHead {
    /// HTTP status; 0 if Envoy sent none.
    pub status: u16,
    /// Whether the body is a stream of server-sent events.
    pub is_event_stream: bool,
    /// Whether the body is too short for the answer of any API, such as `{}`.
    pub has_short_body: bool,
    /// Source of the response, if Envoy is configured to send it.
    pub source: ResponseSource,
    /// Whether Envoy's router has added `x-envoy-upstream-service-time`.
    pub has_upstream_time: bool,
}

/// Source of a response.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResponseSource {
    /// Not reported.
    #[default]
    Unknown,
    /// The worker at this endpoint.
    Worker(SocketAddr),
    /// Envoy: no worker could be reached.
    Envoy,
    /// Envoy, because of a limit or an injected fault. The response contains no information about
    /// workers.
    EnvoyPolicy,
    /// Envoy, because the worker did not respond in time.
    EnvoyTimeout,
    /// Envoy or the worker: a 503 without attributes, without `x-envoy-upstream-service-time`, and
    /// without headers that engines set. [`GatewayTraits`](super::gateway::GatewayTraits) decides.
    Ambiguous,
}

impl ResponseSource {
    /// Returns the name in metrics.
    pub(super) fn name(self) -> &'static str {
        match self {
            ResponseSource::Unknown | ResponseSource::Worker(_) | ResponseSource::Ambiguous => {
                "engine"
            }
            ResponseSource::Envoy | ResponseSource::EnvoyPolicy | ResponseSource::EnvoyTimeout => {
                "envoy"
            }
        }
    }
}

impl ResponseHead {
    /// Parses the headers of a response, and the attributes that Envoy is configured to send.
    pub fn parse(headers: Option<&HeaderMap>, attributes: &HashMap<String, Struct>) -> Self {
        let reported = response_source(attributes);
        let mut head = Self {
            source: reported.unwrap_or_default(),
            ..Self::default()
        };
        let mut has_engine_headers = false;
        for header in headers.iter().flat_map(|map| &map.headers) {
            match header.key.as_str() {
                ":status" => head.status = value_text(header).parse().unwrap_or(0),
                "content-type" => {
                    head.is_event_stream = value_text(header)
                        .trim_start()
                        .to_ascii_lowercase()
                        .starts_with("text/event-stream");
                }
                "content-length" => {
                    let length = value_text(header).parse::<u64>();
                    head.has_short_body = length.is_ok_and(|length| length <= MAX_SHORT_BODY);
                }
                // Envoy's router adds this header to responses of workers.
                "x-envoy-upstream-service-time" => head.has_upstream_time = true,
                // Envoy adds these to its own responses only after the filters.
                "date" | "server" => has_engine_headers = true,
                // Envoy's router adds this header to its responses to dropped requests.
                "x-envoy-overloaded" if reported.is_none() => {
                    head.source = ResponseSource::EnvoyPolicy
                }
                _ => {}
            }
        }
        let is_ambiguous = reported.is_none()
            && head.status == 503
            && !has_engine_headers
            && !head.has_upstream_time;
        if is_ambiguous && head.source == ResponseSource::Unknown {
            head.source = ResponseSource::Ambiguous;
        }
        head
    }

    /// Sets the endpoint that served, as the gateway reports it. The last endpoint of a
    /// comma-separated list sent the response.
    #[must_use]
    pub fn with_served_endpoint(mut self, served: Option<&str>) -> Self {
        let address = served.and_then(|text| text.rsplit(',').next()?.trim().parse().ok());
        // For a response of Envoy itself the attribute names an endpoint that did not respond.
        if let (Some(address), ResponseSource::Unknown | ResponseSource::Worker(_)) =
            (address, self.source)
        {
            self.source = ResponseSource::Worker(address);
        }
        self
    }
}

/// Length of `null`, the longest JSON value without content.
const MAX_SHORT_BODY: u64 = 4;

/// Envoy's attribute with the endpoint that a request is or was sent to.
const UPSTREAM_ADDRESS: &str = "upstream.address";

/// Envoy's response flag for exhausted retries. Also set on responses of workers.
const RETRIES_EXHAUSTED: u64 = 1 << 15;

/// Envoy's response flags for an unreachable or silent worker: no healthy upstream, upstream remote
/// reset, connection failure, connection termination, protocol error, DNS failure. The bits follow
/// the order of Envoy's `CoreResponseFlag`.
const UNREACHABLE_FLAGS: u64 = 1 << 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 23 | 1 << 26;

/// Envoy's response flag for a worker that did not respond within the timeout of the route.
const REQUEST_TIMEOUT: u64 = 1 << 2;

/// Returns the source of a response according to Envoy's attributes; `None` if Envoy is not
/// configured to send them. `upstream.address` names the last endpoint tried, and `response.flags`
/// the failure if Envoy made the response.
fn response_source(attributes: &HashMap<String, Struct>) -> Option<ResponseSource> {
    let flags = match attribute(attributes, "response.flags") {
        Some(Kind::NumberValue(flags)) => Some(*flags as u64 & !RETRIES_EXHAUSTED),
        _ => None,
    };
    match (flags, attribute(attributes, UPSTREAM_ADDRESS)) {
        (Some(flags), _) if flags & UNREACHABLE_FLAGS != 0 => Some(ResponseSource::Envoy),
        (Some(flags), _) if flags & REQUEST_TIMEOUT != 0 => Some(ResponseSource::EnvoyTimeout),
        (Some(1..), _) => Some(ResponseSource::EnvoyPolicy),
        (_, Some(Kind::StringValue(address))) => Some(
            address
                .parse()
                .map_or(ResponseSource::Unknown, ResponseSource::Worker),
        ),
        (Some(_), _) => Some(ResponseSource::Unknown),
        (None, _) => None,
    }
}

/// Returns the endpoint that a request is being sent to.
pub(super) fn upstream_endpoint(attributes: &HashMap<String, Struct>) -> Option<WorkerEndpoint> {
    match attribute(attributes, UPSTREAM_ADDRESS)? {
        Kind::StringValue(address) => address.parse().ok().map(WorkerEndpoint),
        _ => None,
    }
}

fn attribute<'a>(attributes: &'a HashMap<String, Struct>, name: &str) -> Option<&'a Kind> {
    attributes
        .values()
        .find_map(|group| group.fields.get(name)?.kind.as_ref())
}

/// Returns the raw value of a header. Envoy fills `raw_value`; other gateways fill the older text
/// field.
fn value_bytes(header: &HeaderValue) -> &[u8] {
    if header.raw_value.is_empty() {
        header.value.as_bytes()
    } else {
        &header.raw_value
    }
}

fn value_text(header: &HeaderValue) -> Cow<'_, str> {
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

    fn source_of(
        status: u16,
        header_name: Option<&str>,
        flags: Option<u64>,
        address: Option<&str>,
    ) -> ResponseSource {
        let header = |key: &str, value: String| HeaderValue {
            key: key.to_owned(),
            value,
            ..HeaderValue::default()
        };
        let status = header(":status", status.to_string());
        let headers = [status]
            .into_iter()
            .chain(header_name.map(|name| header(name, "1".to_owned())))
            .collect();
        let mut group = Struct::default();
        let mut add = |name: &str, kind| {
            group
                .fields
                .insert(name.to_owned(), Value { kind: Some(kind) })
        };
        flags.map(|flags| add("response.flags", Kind::NumberValue(flags as f64)));
        address.map(|address| add("upstream.address", Kind::StringValue(address.to_owned())));
        ResponseHead::parse(
            Some(&HeaderMap { headers }),
            &[(String::new(), group)].into(),
        )
        .source
    }

    #[test]
    fn response_flags_decide_response_source() {
        const WORKER: &str = "127.0.0.1:8000";
        let worker = ResponseSource::Worker(WORKER.parse().unwrap());
        for (flags, expected) in [
            (0, worker),
            (1 << 15, worker),
            (1 << 1, ResponseSource::Envoy),
            (1 << 4, ResponseSource::Envoy),
            (1 << 5 | 1 << 15, ResponseSource::Envoy),
            (1 << 6, ResponseSource::Envoy),
            (1 << 23, ResponseSource::Envoy),
            (1 << 26, ResponseSource::Envoy),
            (1 << 2, ResponseSource::EnvoyTimeout),
            (1 << 7, ResponseSource::EnvoyPolicy),
            (1 << 10, ResponseSource::EnvoyPolicy),
            (1 << 11, ResponseSource::EnvoyPolicy),
            (1 << 12, ResponseSource::EnvoyPolicy),
        ] {
            assert_eq!(
                source_of(503, None, Some(flags), Some(WORKER)),
                expected,
                "{flags:#x}"
            );
        }
        assert_eq!(source_of(503, None, Some(0), None), ResponseSource::Unknown);
    }

    #[test]
    fn unmarked_503_without_attributes_is_ambiguous() {
        let time = Some("x-envoy-upstream-service-time");
        for (status, header_name, expected) in [
            (503, None, ResponseSource::Ambiguous),
            (503, time, ResponseSource::Unknown),
            (503, Some("date"), ResponseSource::Unknown),
            (503, Some("server"), ResponseSource::Unknown),
            (503, Some("x-envoy-overloaded"), ResponseSource::EnvoyPolicy),
            (429, None, ResponseSource::Unknown),
            (200, None, ResponseSource::Unknown),
        ] {
            assert_eq!(
                source_of(status, header_name, None, None),
                expected,
                "{status} {header_name:?}"
            );
        }
    }

    #[test]
    fn last_non_blank_header_value_is_used() {
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
            let head = RequestHead::parse(Some(HeaderMap {
                headers: values.iter().map(header).collect(),
            }));
            assert_eq!(head.get("x-tenant").as_deref(), expected, "{values:?}");
        }
    }
}
