//! Options of exchanges: the configured behavior, the response headers, and the values that one
//! exchange starts with.

use std::sync::Arc;

use warmroute_core::router::RouteTarget;
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};
use warmroute_tokens::openai::paths::ApiPaths;

use crate::ext_proc::config::{ObserveMode, ResponseConfig};
use crate::ext_proc::header_changes::HeaderChanges;
use crate::ext_proc::headers;
use crate::ext_proc::message::BodyModes;
use crate::ext_proc::routing_headers::RoutingHeaders;

/// Configured behavior of exchanges.
#[derive(Clone, Debug, Default)]
pub struct ExchangeOptions {
    /// APIs by path. The API decides whether the body is needed.
    pub paths: Arc<ApiPaths>,
    /// Maximum size of a buffered request body, in bytes.
    pub body_limit: usize,
    /// Headers that carry the route.
    pub routing_headers: RoutingHeaders,
    /// Whether Envoy selects its route again after the headers have changed.
    pub clear_route_cache: bool,
    /// Body modes for a gateway that does not report them.
    pub assumed_modes: BodyModes,
    /// Observation of responses.
    pub observe: ObserveMode,
    /// Whether output blocks count as load, which requires the whole response body.
    pub output_blocks: bool,
    /// Whether to set the headers of the conformance tests.
    pub conformance: bool,
    /// Response headers to set.
    pub response_headers: ResponseConfig,
}

/// Values that one exchange starts with.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ExchangeStart {
    /// Key under which another filter reports the first token; `None` without such a filter.
    pub exchange_key: Option<String>,
    /// Whether the whole response body is observed.
    pub is_sampled: bool,
    /// Request id for a request without one.
    pub request_id: String,
    /// The pool that the authority of the call selects.
    pub pool: Option<Arc<str>>,
}

/// The worker that sends a response.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ServingWorker {
    /// The worker.
    pub worker: WorkerId,
    /// Its data-parallel rank; `None` if several ranks share the endpoint.
    pub rank: Option<DpRank>,
}

impl From<WorkerRank> for ServingWorker {
    fn from(rank: WorkerRank) -> Self {
        Self {
            worker: rank.worker,
            rank: Some(rank.rank),
        }
    }
}

impl ExchangeOptions {
    /// Adds the response headers that describe the route.
    pub(super) fn add_response_headers(
        &self,
        target: &RouteTarget,
        served_by: Option<ServingWorker>,
        changes: &mut HeaderChanges,
    ) {
        if self.response_headers.mode {
            changes.set(headers::MODE, target.mode.as_str().to_owned());
        }
        let served_by = served_by.or_else(|| target.to.map(|to| to.rank.into()));
        if let Some(ServingWorker { worker, rank }) =
            served_by.filter(|_| self.response_headers.worker)
        {
            changes.set(headers::WORKER_ID, worker.to_string());
            if let Some(rank) = rank {
                changes.set(headers::DP_RANK, rank.to_string());
            }
        }
        if let Some(to) = target.prefill.filter(|_| self.response_headers.worker) {
            changes.set(headers::PREFILL_ID, to.rank.worker.to_string());
            changes.set(headers::PREFILL_RANK, to.rank.rank.to_string());
        }
        if let Some(tokens) = target
            .predicted_cached_tokens
            .filter(|_| self.response_headers.prediction)
        {
            changes.set(headers::PREDICTED_CACHED_TOKENS, tokens.to_string());
        }
        if let Some(why) = target.why.as_ref().filter(|_| self.response_headers.why) {
            changes.set(headers::WHY_CHOSEN, why.to_string());
        }
    }
}
