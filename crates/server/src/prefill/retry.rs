//! Retries of requests with a remote prefill. Envoy sends a request to the next decode worker after
//! the first has failed. The KV of the first attempt is lost: its bootstrap room is empty, or its
//! blocks were fetched and freed. The request is prefilled again, which is cheap if the prompt is
//! still cached.
//!
//! Decision 0041.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::HeaderMap;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tracing::debug;
use warmroute_core::health::RequestOutcome;
use warmroute_core::router::{
    PhaseSelection, Placement, ResponseOrigin, RouteError, RouteRequest, WorkerResponse,
};
use warmroute_core::worker::{WorkerEndpoint, WorkerId};
use warmroute_tokens::openai::ApiKind;

use super::client::{PrefillCall, PrefillError};
use super::fallback::{
    FallbackContext, SequentialPrefill, audit_prefill_response, record_prefill_outcome,
};
use super::handoff::{KvHandoff, PrefillBody, PrefillResponse, StrippedBody, strip_kv_fields};
use super::mirror::{BootstrapPair, MirrorContext, MirroredPrefill, PrefillEvent, PrefillMirror};
use super::plan::PrefillOutcome;
use crate::dispatch::{ActiveRequest, Dispatcher, log_health_changes};

/// Timeout of a connection attempt to a running worker.
const CONNECT_TIMEOUT: Duration = Duration::from_millis(250);

/// A prefill on another worker.
pub enum RemotePrefill {
    /// warmroute called the prefill worker.
    Call(Box<PrefillRecord>),
    /// Both workers received the request.
    Mirror(Box<MirroredPrefill>),
}

impl RemotePrefill {
    /// Returns the maximum duration of another attempt.
    pub fn max_duration(&self) -> Duration {
        match self {
            RemotePrefill::Call(record) => record.max_duration(),
            RemotePrefill::Mirror(_) => Duration::ZERO,
        }
    }

    /// Returns whether warmroute receives the response of the prefill worker.
    pub fn receives_response(&self) -> bool {
        match self {
            RemotePrefill::Call(_) => true,
            RemotePrefill::Mirror(mirrored) => mirrored.receives_response(),
        }
    }

    /// Completes at the next event of a mirrored prefill. A called prefill has no events.
    pub async fn next_event(&mut self) -> PrefillEvent {
        match self {
            RemotePrefill::Mirror(mirrored) => mirrored.next_event().await,
            RemotePrefill::Call(_) => std::future::pending().await,
        }
    }

    /// Prefills the request again for its new decode worker.
    pub(crate) async fn retry(
        self,
        dispatcher: &Dispatcher,
        mut active: ActiveRequest,
        input: PrefillInput,
    ) -> Result<PrefillOutcome, RouteError> {
        match self {
            RemotePrefill::Mirror(mirrored) => {
                let pair = mirrored.retry(dispatcher, &mut active, &input).await?;
                Ok(pair.into_outcome(active))
            }
            RemotePrefill::Call(record) => record.retry(dispatcher, active, input).await,
        }
    }
}

/// Input of a prefill: the parts of a client's request that both workers receive.
#[derive(Debug)]
pub struct PrefillInput {
    /// Path of the request.
    pub path: String,
    /// Forwarded headers of the request.
    pub headers: HeaderMap,
    /// Body of the request, or of its previous attempt.
    pub body: Bytes,
    /// The decode worker, if it is fixed.
    pub decode_endpoint: Option<WorkerEndpoint>,
}

/// A called prefill with its request, from which a retry begins.
pub struct PrefillRecord {
    pub(super) prefill: Arc<SequentialPrefill>,
    pub(super) api: Option<ApiKind>,
    pub(super) request: RouteRequest,
}

impl PrefillRecord {
    /// Returns the maximum duration of an attempt.
    pub fn max_duration(&self) -> Duration {
        self.prefill.max_duration()
    }

    /// Prefills the request again for its new decode worker.
    pub(super) async fn retry(
        self: Box<Self>,
        dispatcher: &Dispatcher,
        mut active: ActiveRequest,
        input: PrefillInput,
    ) -> Result<PrefillOutcome, RouteError> {
        let PrefillInput {
            headers,
            body,
            decode_endpoint,
            ..
        } = input;
        probe_decode_worker(dispatcher, &mut active).await;
        // The KV transfer parameters of the first attempt must not be used again, even if the new
        // prefill fails.
        let body = match strip_kv_fields(&body) {
            StrippedBody::Unchanged => body,
            StrippedBody::Changed(body) => body,
            StrippedBody::Unreadable => return Err(RouteError::NoCandidate),
        };
        let replaced = RouteRequest {
            phases: PhaseSelection::PrefillFirst { failed: Vec::new() },
            ..self.request.clone()
        };
        dispatcher.reroute(&mut active, replaced, decode_endpoint)?;
        let outcome = match KvHandoff::new(self.api, self.prefill.protocol, &body) {
            Ok(handoff) => {
                let context = FallbackContext {
                    dispatcher,
                    request: &self.request,
                    headers,
                    decode_endpoint,
                };
                self.prefill.run(context, handoff, active).await?
            }
            Err(_) => PrefillOutcome::new(active),
        };
        Ok(PrefillOutcome {
            body: outcome.body.or(Some(body)),
            remote_prefill: Some(RemotePrefill::Call(self)),
            ..outcome
        })
    }
}

impl PrefillMirror {
    /// Sends the copy to the prefill worker of a route. If it cannot start, tries other prefill
    /// workers.
    pub async fn send_copy(
        self: &Arc<Self>,
        dispatcher: &Dispatcher,
        active: &mut ActiveRequest,
        context: MirrorContext,
        copy: &PrefillInput,
    ) -> Result<BootstrapPair, RouteError> {
        let router = dispatcher.router();
        let mut failed = context.failed_workers.clone();
        let reroute = |active: &mut ActiveRequest, failed: &[WorkerId]| {
            let replaced = RouteRequest {
                phases: PhaseSelection::Retry {
                    failed: failed.to_vec(),
                },
                ..context.request.clone()
            };
            dispatcher.reroute(active, replaced, copy.decode_endpoint)
        };
        let mut retry_all = true;
        loop {
            let pair = self.bootstrap(
                MirrorContext {
                    failed_workers: failed.clone(),
                    ..context.clone()
                },
                &copy.body,
                &active.placement.route,
                router,
            );
            let mut pair = pair.ok_or(RouteError::NoPrefill)?;
            let call = PrefillCall {
                worker: pair.mirrored_prefill.worker,
                path: copy.path.clone(),
                headers: copy.headers.clone(),
                body: PrefillBody::without_handoff(pair.body.clone()),
            };
            let on_response = self.response_auditor(&active.placement);
            let failure = match self.client.start(call, on_response).await {
                Ok(running) => {
                    pair.mirrored_prefill.attach_copy(running);
                    return Ok(pair);
                }
                Err(failure) => failure,
            };
            debug!(worker = %pair.mirrored_prefill.worker, %failure, "prefill failed to start");
            // The worker has received nothing.
            pair.mirrored_prefill.discard();
            if matches!(failure, PrefillError::LimitReached) {
                return Err(RouteError::NoPrefill);
            }
            let prefill = active.placement.route.prefill();
            failed.extend(prefill.map(|prefill| prefill.to.rank.worker));
            if let Some(outcome) = failure.health_outcome(|| false) {
                record_prefill_outcome(router, active, outcome);
            }
            if reroute(active, &failed).is_err() {
                // All workers have failed. A stale connection may be the cause, or a worker that
                // has restarted, so all are tried once more.
                if !std::mem::take(&mut retry_all) {
                    return Err(RouteError::NoPrefill);
                }
                failed.clear();
                reroute(active, &failed)?;
            }
        }
    }
}

impl PrefillMirror {
    /// Returns a callback that audits the response of the booked prefill worker.
    fn response_auditor(
        &self,
        booked: &Placement,
    ) -> impl FnOnce(&PrefillResponse) + Send + 'static {
        let audit = self.audit.clone();
        let forecast = self.audit.forecast(&booked.route);
        let prompts = booked.prompts.clone();
        move |response: &PrefillResponse| {
            audit_prefill_response(&audit, forecast, prompts, response.usage())
        }
    }
}

impl MirroredPrefill {
    /// Starts another mirrored prefill for the new decode worker of the request, and ends this one.
    /// The reservations move to the new workers.
    pub async fn retry(
        self,
        dispatcher: &Dispatcher,
        active: &mut ActiveRequest,
        copy: &PrefillInput,
    ) -> Result<BootstrapPair, RouteError> {
        let context = self.context.clone();
        let mirror = self.mirror.clone();
        let to = copy.decode_endpoint;
        let mut failed = context.failed_workers.clone();
        failed.extend(failed_prefill_worker(dispatcher, active).await);
        drop(self);
        let replaced = |failed| RouteRequest {
            phases: PhaseSelection::Retry { failed },
            ..context.request.clone()
        };
        let placed = dispatcher.reroute(active, replaced(failed.clone()), to);
        // A failed prefill worker is better than none.
        placed.or_else(|_| dispatcher.reroute(active, replaced(Vec::new()), to))?;
        let context = MirrorContext {
            failed_workers: failed,
            ..context
        };
        mirror.send_copy(dispatcher, active, context, copy).await
    }
}

/// Returns the prefill worker to avoid in a retry: one that refuses connections, or one whose
/// transfer failed although both workers accept connections.
async fn failed_prefill_worker(
    dispatcher: &Dispatcher,
    active: &mut ActiveRequest,
) -> Option<WorkerId> {
    let prefill = active.placement.route.prefill()?.to;
    let (is_decode_alive, is_prefill_alive) = tokio::join!(
        probe_decode_worker(dispatcher, active),
        accepts_connections(prefill.endpoint)
    );
    if !is_prefill_alive {
        record_prefill_outcome(dispatcher.router(), active, RequestOutcome::Unreachable);
    }
    (is_decode_alive || !is_prefill_alive).then_some(prefill.rank.worker)
}

/// Returns whether the decode worker of the failed attempt accepts connections. Otherwise reports
/// the failure.
async fn probe_decode_worker(dispatcher: &Dispatcher, active: &mut ActiveRequest) -> bool {
    let is_alive = accepts_connections(active.placement.route.to.endpoint).await;
    if !is_alive {
        let answer = WorkerResponse {
            status: 503,
            origin: ResponseOrigin::Gateway,
        };
        let router = dispatcher.router();
        log_health_changes(router, router.on_response(&mut active.placement, answer));
    }
    is_alive
}

/// Returns whether an endpoint accepts connections.
pub(super) async fn accepts_connections(WorkerEndpoint(address): WorkerEndpoint) -> bool {
    matches!(
        timeout(CONNECT_TIMEOUT, TcpStream::connect(address)).await,
        Ok(Ok(_))
    )
}
