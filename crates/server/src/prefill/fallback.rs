//! Sequential prefill with its fallbacks: the next prefill worker, then the decode worker itself,
//! or a rejection if so configured. The request is always booked at exactly the worker that
//! processes it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use tracing::debug;
use warmroute_core::block::BlockHashes;
use warmroute_core::health::RequestOutcome;
use warmroute_core::policy::LocalPrefillReason;
use warmroute_core::router::{PhaseSelection, RankEndpoint, RouteError, RouteRequest, Router};
use warmroute_core::worker::{WorkerEndpoint, WorkerId};
use warmroute_tokens::openai::usage::TokenUsage;

use super::client::{PrefillCall, PrefillClient, PrefillError};
use super::config::KvTransferProtocol;
use super::handoff::{KvHandoff, PrefillResponse};
use super::plan::PrefillOutcome;
use crate::dispatch::audit::{CacheAudit, HitForecast, ReportedUsage};
use crate::dispatch::{ActiveRequest, Dispatcher, log_health_changes};

/// Header with the data-parallel rank, as vLLM's front end reads it.
const RANK_HEADER: HeaderName = HeaderName::from_static("x-data-parallel-rank");

/// Sequential prefills of one model.
pub struct SequentialPrefill {
    /// Client of the prefill workers.
    pub client: PrefillClient,
    /// Protocol of the KV transfer.
    pub protocol: KvTransferProtocol,
    /// Maximum number of prefill workers to try.
    pub tries: u32,
    /// Audit of the prefill workers' cache reports.
    pub audit: Arc<CacheAudit>,
}

/// Next step after the response of a prefill worker.
enum FallbackStep {
    /// Send this body to the decode worker.
    HandOff(Bytes),
    /// Try another prefill worker.
    NextWorker,
    /// Let the decode worker prefill, even if the configuration enforces disaggregation.
    Aggregate(LocalPrefillReason),
    /// Let the decode worker prefill, unless the configuration enforces disaggregation.
    AggregateIfAllowed(LocalPrefillReason),
}

/// A request and its dispatcher, which all attempts share.
pub(super) struct FallbackContext<'a> {
    pub(super) dispatcher: &'a Dispatcher,
    pub(super) request: &'a RouteRequest,
    /// Its forwarded headers.
    pub(super) headers: HeaderMap,
    /// The decode worker, if it is fixed.
    pub(super) decode_endpoint: Option<WorkerEndpoint>,
}

impl FallbackContext<'_> {
    fn place_again(
        &self,
        active: &mut ActiveRequest,
        step: PhaseSelection,
    ) -> Result<(), RouteError> {
        self.dispatcher.reroute(
            active,
            RouteRequest {
                phases: step,
                ..self.request.clone()
            },
            self.decode_endpoint,
        )
    }

    fn may_decode_worker_prefill(&self) -> bool {
        !self.dispatcher.router().settings().disaggregation.enforce
    }
}

impl SequentialPrefill {
    /// Returns the maximum duration, with all attempts.
    pub fn max_duration(&self) -> Duration {
        self.client.deadline().saturating_mul(self.tries)
    }

    /// Runs the prefill of a placed request, and places it at its decode worker. Each failure falls
    /// back by one step. Returns an error only if no decode worker is available, or if the
    /// configuration enforces disaggregation.
    pub(super) async fn run(
        &self,
        context: FallbackContext<'_>,
        handoff: KvHandoff,
        mut active: ActiveRequest,
    ) -> Result<PrefillOutcome, RouteError> {
        let mut handoff = Some(handoff);
        let mut failed: Vec<WorkerId> = Vec::new();
        while let Some(to) = active.placement.route.prefill().map(|prefill| prefill.to) {
            let step;
            (active, step) = self.try_worker(&context, to, active, &mut handoff).await;
            let fallback = match step {
                FallbackStep::HandOff(body) => {
                    return Ok(PrefillOutcome {
                        body: Some(body),
                        ..PrefillOutcome::new(active)
                    });
                }
                FallbackStep::NextWorker => {
                    failed.push(to.rank.worker);
                    // A pinned prefill worker has no alternative.
                    if failed.len() < self.tries as usize && context.request.prefill_pin.is_none() {
                        context.place_again(
                            &mut active,
                            PhaseSelection::PrefillFirst {
                                failed: failed.clone(),
                            },
                        )?;
                        continue;
                    }
                    FallbackStep::AggregateIfAllowed(LocalPrefillReason::PrefillFailed)
                }
                step => step,
            };
            match fallback {
                FallbackStep::Aggregate(reason) => {
                    context.place_again(&mut active, PhaseSelection::Local(reason))?
                }
                FallbackStep::AggregateIfAllowed(reason) if context.may_decode_worker_prefill() => {
                    context.place_again(&mut active, PhaseSelection::Local(reason))?;
                }
                _ => return Err(RouteError::NoPrefill),
            }
        }
        Ok(PrefillOutcome::new(active))
    }

    /// Calls the booked prefill worker, and places the request at its decode worker.
    async fn try_worker(
        &self,
        context: &FallbackContext<'_>,
        to: RankEndpoint,
        active: ActiveRequest,
        handoff: &mut Option<KvHandoff>,
    ) -> (ActiveRequest, FallbackStep) {
        let router = context.dispatcher.router();
        // The worker has left the fleet.
        let Some(prefilled) = router.completed_prefill(&active.placement.route) else {
            return (active, FallbackStep::NextWorker);
        };
        let call = handoff.as_ref().and_then(|handoff| {
            Some(PrefillCall {
                worker: to.endpoint,
                path: handoff.path().to_owned(),
                headers: headers_for_rank(&context.headers, to),
                body: handoff.prefill_body()?,
            })
        });
        let Some(call) = call else {
            return (
                active,
                FallbackStep::Aggregate(LocalPrefillReason::NotSplittable),
            );
        };
        let (mut active, answer) = self.call_worker(router, call, active).await;
        let mut step = self.fallback_step(to.endpoint, handoff, answer);
        if let FallbackStep::HandOff(_) = step {
            router.complete_remote_prefill(&mut active.placement);
            if context
                .place_again(&mut active, PhaseSelection::Decode(Box::new(prefilled)))
                .is_err()
            {
                // No decode worker is in reach of the prefill worker.
                step = FallbackStep::AggregateIfAllowed(LocalPrefillReason::TopologyMismatch);
            }
        }
        (active, step)
    }

    async fn call_worker(
        &self,
        router: &Arc<Router>,
        call: PrefillCall,
        active: ActiveRequest,
    ) -> (ActiveRequest, Result<PrefillResponse, PrefillError>) {
        let router = router.clone();
        let client = self.client.clone();
        let worker = call.worker;
        let audit = self.audit.clone();
        let forecast = self.audit.forecast(&active.placement.route);
        // Called at the end of the prefill, even if the client has disconnected.
        let on_end = move |active: &mut ActiveRequest,
                           answer: &Result<PrefillResponse, PrefillError>,
                           since| {
            let outcome = answer.as_ref().map_or_else(
                |failure| failure.health_outcome(|| client.completed_since(worker, since)),
                |_| Some(RequestOutcome::Delivered),
            );
            if let Ok(response) = answer {
                router.confirm_prefill(&mut active.placement);
                let usage = response.usage();
                if usage.is_some() {
                    router.on_prompt_computed(&mut active.placement);
                }
                let prompts = std::mem::take(&mut active.placement.prompts);
                audit_prefill_response(&audit, forecast, prompts, usage);
            }
            if let Some(outcome) = outcome {
                record_prefill_outcome(&router, active, outcome);
            }
        };
        self.client.run(call, active, on_end).await
    }

    /// Returns the next step for a result. A successful handoff consumes the request.
    fn fallback_step(
        &self,
        worker: WorkerEndpoint,
        handoff: &mut Option<KvHandoff>,
        answer: Result<PrefillResponse, PrefillError>,
    ) -> FallbackStep {
        let response = match answer {
            Ok(response) => response,
            Err(failure) => {
                debug!(%worker, %failure, "prefill failed");
                return match failure {
                    // The decode worker rejects it as well, and the client receives that response.
                    PrefillError::Rejected(_) => {
                        FallbackStep::Aggregate(LocalPrefillReason::PrefillRefused)
                    }
                    PrefillError::LimitReached => FallbackStep::AggregateIfAllowed(
                        LocalPrefillReason::PrefillConcurrencyLimit,
                    ),
                    PrefillError::Unusable(_) => {
                        FallbackStep::AggregateIfAllowed(LocalPrefillReason::NoHandoff)
                    }
                    PrefillError::NotOffered(error) => {
                        self.client.warn_not_offered(worker, &error);
                        FallbackStep::NextWorker
                    }
                    PrefillError::Busy(_) | PrefillError::Failed(_) => FallbackStep::NextWorker,
                };
            }
        };
        match handoff.take().map(|handoff| handoff.decode_body(response)) {
            Some(Ok(body)) => FallbackStep::HandOff(body),
            Some(Err(error)) => {
                self.client.warn_no_handoff(worker, error);
                FallbackStep::Aggregate(LocalPrefillReason::NoHandoff)
            }
            None => FallbackStep::Aggregate(LocalPrefillReason::NotSplittable),
        }
    }
}

/// Reports the outcome of a prefill worker.
pub(super) fn record_prefill_outcome(
    router: &Router,
    active: &mut ActiveRequest,
    outcome: RequestOutcome,
) {
    let changes = router.on_prefill_response(&mut active.placement, outcome);
    log_health_changes(router, changes);
}

/// Compares the cache report of a prefill worker with the prediction for it. The usage of the
/// decode worker does not describe that cache: after a transfer, engines report the value of the
/// prefill worker, their own, or none.
pub(super) fn audit_prefill_response(
    audit: &CacheAudit,
    forecast: HitForecast,
    prompts: Vec<BlockHashes>,
    usage: Option<TokenUsage>,
) {
    if let Some(reported) = usage.and_then(ReportedUsage::from_usage) {
        audit.count_delivered_tokens(&forecast, reported);
    }
    audit.record_usage(forecast, usage, prompts, false);
}

fn headers_for_rank(headers: &HeaderMap, to: RankEndpoint) -> HeaderMap {
    let mut headers = headers.clone();
    if to.several_ranks {
        headers.insert(RANK_HEADER, HeaderValue::from(to.rank.rank.0));
    }
    headers
}
