//! Origin of the cache report of the worker that computes the prompt.

use warmroute_core::router::Route;
use warmroute_core::worker::ModelName;

use crate::dispatch::audit::{CacheAudit, HitForecast};
use crate::prefill::RemotePrefill;

/// The response that carries the cache report of the worker that computes the prompt.
#[derive(Debug)]
pub(super) enum CacheReportSource {
    /// The response of the exchange, whose worker computes the prompt.
    InResponse(Box<HitForecast>),
    /// The response of the prefill worker, which warmroute receives and audits itself.
    InPrefillResponse,
    /// The response of the prefill worker, which does not pass through warmroute.
    NotReceived(ModelName),
}

impl CacheReportSource {
    pub(super) fn new(
        route: &Route,
        remote_prefill: Option<&RemotePrefill>,
        audit: &CacheAudit,
    ) -> Self {
        let is_received = remote_prefill.is_some_and(RemotePrefill::receives_response);
        match route.prefill() {
            None => Self::InResponse(Box::new(audit.forecast(route))),
            Some(_) if is_received => Self::InPrefillResponse,
            Some(_) => Self::NotReceived(route.model.clone()),
        }
    }
}
