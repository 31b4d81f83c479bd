//! Header names: those we set, those only we may set, and the few we read.

use envoy_types::pb::envoy::config::core::v3::{HeaderMap, HeaderValue};

/// Instance id of the chosen worker, decimal.
pub const WORKER_ID: &str = "x-worker-instance-id";
/// Data-parallel rank of the chosen worker.
pub const DP_RANK: &str = "x-dp-rank";
/// The same rank under the name vLLM's own front end reads.
pub const DATA_PARALLEL_RANK: &str = "x-data-parallel-rank";
/// `ip:port` of the chosen worker; also the key of the dynamic metadata that Envoy's `override_host` reads.
pub const ENDPOINT: &str = "x-gateway-destination-endpoint";
/// Response header that names the step of the degradation ladder.
pub const MODE: &str = "x-warmroute-mode";

/// Response header with the cached prompt tokens that the engine is expected to report.
pub const PREDICTED: &str = "x-warmroute-predicted-cached-tokens";

/// Headers that decide where a request goes. A client's own copies are removed, or anybody could choose a worker.
pub const ROUTING: [&str; 14] = [
    WORKER_ID,
    DP_RANK,
    DATA_PARALLEL_RANK,
    ENDPOINT,
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
    "x-prefiller-host-port",
    "x-dynamo-worker-instance-id",
    "x-dynamo-prefill-instance-id",
    "x-dynamo-dp-rank",
    "x-dynamo-prefill-dp-rank",
    "x-dynamo-routing-mode",
    "x-gateway-destination-endpoint-served",
    MODE,
];

/// What we keep of a request's headers.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct RequestHead {
    /// HTTP method.
    pub method: String,
    /// Path with its query.
    pub path: String,
    /// `x-request-id`, for logs.
    pub request_id: String,
    /// Routing headers the client sent, to be removed.
    pub forged: Vec<&'static str>,
}

impl RequestHead {
    /// Reads the head of a request.
    pub fn read(headers: Option<&HeaderMap>) -> Self {
        let mut head = Self::default();
        for header in headers.iter().flat_map(|map| &map.headers) {
            match header.key.as_str() {
                ":method" => head.method = text(header),
                ":path" => head.path = text(header),
                "x-request-id" => head.request_id = text(header),
                key => head.forged.extend(ROUTING.iter().find(|name| key.eq_ignore_ascii_case(name))),
            }
        }
        head.forged.sort_unstable();
        head.forged.dedup();
        head
    }
}

/// What we keep of a response's headers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ResponseHead {
    /// HTTP status; 0 where Envoy sent none.
    pub status: u16,
    /// Whether the body is a stream of server-sent events.
    pub event_stream: bool,
}

impl ResponseHead {
    /// Reads the head of a response.
    pub fn read(headers: Option<&HeaderMap>) -> Self {
        let mut head = Self::default();
        for header in headers.iter().flat_map(|map| &map.headers) {
            match header.key.as_str() {
                ":status" => head.status = text(header).parse().unwrap_or(0),
                "content-type" => {
                    head.event_stream = text(header).trim_start().to_ascii_lowercase().starts_with("text/event-stream");
                }
                _ => {}
            }
        }
        head
    }
}

/// Envoy fills `raw_value`; other gateways still fill the older text field.
fn text(header: &HeaderValue) -> String {
    if header.raw_value.is_empty() {
        header.value.clone()
    } else {
        String::from_utf8_lossy(&header.raw_value).into_owned()
    }
}
