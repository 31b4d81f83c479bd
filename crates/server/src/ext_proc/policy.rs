//! Configured handling of requests and responses, beyond the message order of an exchange.

use std::collections::{HashMap, HashSet};

use warmroute_core::worker::ModelName;

use super::config::{FailureConfig, FailureMode, ResponseConfig};

/// Configured handling of requests and of their responses.
#[derive(Clone, Debug, Default)]
pub struct ExchangePolicy {
    /// Handling of requests that cannot be routed or read.
    pub failure: FailureConfig,
    /// Failure modes of models, which take precedence over `failure.mode`.
    pub model_failure_modes: HashMap<ModelName, FailureMode>,
    /// Whether front ends choose both workers of a request without routing headers, so that Envoy
    /// may forward a request for which there is no prefill worker.
    pub fails_open_without_prefill: bool,
    /// Models whose engines send the response headers together with the first token.
    pub first_token_with_headers: HashSet<ModelName>,
    /// Headers that describe the route. Formatting the explanation takes a microsecond.
    pub response_headers: ResponseConfig,
    /// Whether conformance tests may name the candidate endpoints.
    pub conformance: bool,
    /// Whether rejections set llm-d's header with the reason.
    pub dropped_reason_header: bool,
}
