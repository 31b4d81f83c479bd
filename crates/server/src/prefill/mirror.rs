//! Mirrored prefill: Envoy sends a copy of the request to the prefill worker. Envoy never cancels a
//! copy and discards its response, so the only sign of progress is the response of the decode
//! worker: the prefill has ended at its first token. If the token never arrives, the engine needs
//! an abort.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use rand::RngExt as _;
use reqwest::header::HeaderValue;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep_until};
use tracing::debug;
use warmroute_core::health::RequestOutcome;
use warmroute_core::router::{Route, RouteRequest, Router};
use warmroute_core::worker::{WorkerEndpoint, WorkerId};

use super::aborts::AbortClient;
use super::bootstrap::{BootstrapInfo, BootstrapRoom, engine_request_ids};
use super::client::{PrefillClient, PrefillError, RunningPrefill};
use super::fallback::record_prefill_outcome;
use super::plan::PrefillOutcome;
use super::retry::RemotePrefill;
use crate::dispatch::ActiveRequest;
use crate::dispatch::audit::CacheAudit;

/// Mirrored prefills of one model.
pub struct PrefillMirror {
    /// Envoy's cluster of prefill workers.
    pub cluster: Arc<str>,
    /// Timeout of the first token.
    pub deadline: Duration,
    /// Client for aborts.
    pub aborts: Arc<AbortClient>,
    /// Client for copies that warmroute sends itself.
    pub client: PrefillClient,
    /// Audit of the prefill workers' cache reports.
    pub audit: Arc<CacheAudit>,
}

/// Endpoint to which the gateway mirrors a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MirrorTarget {
    /// Cluster of the gateway.
    pub cluster: Arc<str>,
    /// Endpoint in the cluster.
    pub endpoint: WorkerEndpoint,
}

/// Two workers that share a request.
pub struct BootstrapPair {
    /// The body for both workers.
    pub body: Bytes,
    /// The running prefill.
    pub mirrored_prefill: MirroredPrefill,
}

impl BootstrapPair {
    /// Returns the outcome for a request. The gateway sends the copy, unless warmroute does.
    pub(super) fn into_outcome(self, active: ActiveRequest) -> PrefillOutcome {
        let mirrored = self.mirrored_prefill;
        let mirror_to = (!mirrored.receives_response()).then(|| MirrorTarget {
            cluster: mirrored.mirror.cluster.clone(),
            endpoint: mirrored.worker,
        });
        PrefillOutcome {
            active,
            body: Some(self.body),
            mirror_to,
            remote_prefill: Some(RemotePrefill::Mirror(Box::new(mirrored))),
        }
    }
}

impl PrefillMirror {
    /// Draws a room for the two workers of a route, whose copy the gateway sends. Returns `None` if
    /// there is no prefill worker.
    pub fn bootstrap(
        self: &Arc<Self>,
        context: MirrorContext,
        body: &[u8],
        route: &Route,
        router: &Router,
    ) -> Option<BootstrapPair> {
        let to = route.prefill()?.to;
        let worker = router.fleet().worker(to.rank.worker)?.clone();
        let mut random = rand::rng();
        let room = BootstrapRoom::draw(worker.ranks, to.rank.rank, &mut random);
        let request = format!("warmroute-{:032x}", random.random::<u128>()).into();
        let (host, port) = worker.bootstrap_address();
        let info = BootstrapInfo {
            host,
            port,
            room,
            request_id: request,
        };
        let bootstrap = info.add_to_body(body, context.request_id.as_deref())?;
        let request_id = bootstrap.has_own_request_id.then_some(info.request_id);
        // Each further attempt has at least half of the timeout.
        let now = Instant::now();
        let deadline = context.deadline.map_or(now + self.deadline, |deadline| {
            deadline.max(now + self.deadline / 2)
        });
        let mirrored = MirroredPrefill {
            mirror: self.clone(),
            worker: to.endpoint,
            started: std::time::Instant::now(),
            deadline: Some(deadline),
            request_ids: request_id
                .as_ref()
                .map(|request_id| engine_request_ids(request_id, body)),
            running: None,
            context: MirrorContext {
                request_id,
                deadline: Some(deadline),
                ..context
            },
            is_over: false,
        };
        Some(BootstrapPair {
            body: bootstrap.body,
            mirrored_prefill: mirrored,
        })
    }
}

/// State of a mirrored request that a retry needs.
#[derive(Clone, Debug)]
pub struct MirrorContext {
    /// The routed request.
    pub(super) request: RouteRequest,
    /// Prefill workers that have failed.
    pub(super) failed_workers: Vec<WorkerId>,
    /// The request id in both engines, if warmroute has set it.
    pub(super) request_id: Option<Arc<str>>,
    /// Credentials of the client, used if warmroute has none for engines.
    pub(super) credentials: Option<HeaderValue>,
    /// Deadline of the first token, over all attempts.
    pub(super) deadline: Option<Instant>,
}

impl MirrorContext {
    /// Creates the state of a first attempt.
    pub fn new(request: RouteRequest, credentials: Option<HeaderValue>) -> Self {
        Self {
            request,
            failed_workers: Vec::new(),
            request_id: None,
            credentials,
            deadline: None,
        }
    }
}

/// A running mirrored prefill. Dropping it before it is over sends an abort.
#[must_use = "dropping it aborts the prefill"]
pub struct MirroredPrefill {
    pub(super) mirror: Arc<PrefillMirror>,
    /// The prefill worker.
    pub(super) worker: WorkerEndpoint,
    started: std::time::Instant,
    /// Deadline of the prefill.
    deadline: Option<Instant>,
    /// The request ids in the engines; `None` if the client has set its own.
    request_ids: Option<Arc<[Arc<str>]>>,
    /// The copy, if warmroute sends it.
    running: Option<RunningPrefill>,
    pub(super) context: MirrorContext,
    is_over: bool,
}

/// Event of a mirrored prefill.
#[derive(Debug)]
pub enum PrefillEvent {
    /// The prefill is complete.
    Done,
    /// The prefill has failed. The decode worker receives an abort.
    Failed(PrefillError),
    /// The prefill has timed out.
    TimedOut,
}

impl MirroredPrefill {
    /// Returns whether warmroute sent the copy and receives the response. Otherwise Envoy discards
    /// it.
    pub fn receives_response(&self) -> bool {
        self.running.is_some()
    }

    /// Attaches the copy that warmroute sends.
    pub(super) fn attach_copy(&mut self, running: RunningPrefill) {
        self.running = Some(running);
    }

    /// Completes at the next event.
    pub async fn next_event(&mut self) -> PrefillEvent {
        let deadline = self.deadline;
        let running = &mut self.running;
        let timeout = async {
            match deadline {
                Some(deadline) => sleep_until(deadline).await,
                None => std::future::pending().await,
            }
        };
        let end = async {
            match running {
                Some(running) => running.wait().await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            () = timeout => {
                self.deadline = None;
                PrefillEvent::TimedOut
            }
            end = end => {
                self.is_over = true;
                match end {
                    Ok(()) => {
                        // The rest of the output has no deadline, and a further attempt has its
                        // own.
                        self.deadline = None;
                        self.context.deadline = None;
                        PrefillEvent::Done
                    }
                    Err(failure) => {
                        debug!(worker = %self.worker, %failure, "prefill failed");
                        PrefillEvent::Failed(failure)
                    }
                }
            }
        }
    }

    /// Ends the prefill, because the decode worker has its KV.
    pub fn complete(mut self) {
        self.mirror.client.record_completion(self.worker);
        self.end();
    }

    /// Ends a prefill that has not started.
    pub(super) fn discard(mut self) {
        self.end();
    }

    fn end(&mut self) {
        self.is_over = true;
        if let Some(running) = self.running.take() {
            running.detach();
        }
    }

    /// Returns whether the worker has completed no other call since the start.
    fn is_worker_unresponsive(&self) -> bool {
        !self
            .mirror
            .client
            .completed_since(self.worker, self.started)
    }

    /// Handles a failure of the prefill. The decode worker would wait for its timeout; after an
    /// abort it fails at once, and the gateway can retry.
    pub fn on_failure(&self, failure: &PrefillError, router: &Router, active: &mut ActiveRequest) {
        if let Some(outcome) = failure.health_outcome(|| !self.is_worker_unresponsive()) {
            record_prefill_outcome(router, active, outcome);
        }
        self.send_abort(active.placement.route.to.endpoint);
    }

    /// Handles the timeout of the first token: aborts the request at the decode worker.
    pub fn on_timeout(&self, router: &Router, active: &mut ActiveRequest) {
        if self.is_worker_unresponsive() {
            record_prefill_outcome(router, active, RequestOutcome::NoResponse);
        }
        self.send_abort(active.placement.route.to.endpoint);
    }

    fn send_abort(&self, worker: WorkerEndpoint) {
        // At shutdown, there may be no runtime.
        if let Ok(runtime) = Handle::try_current() {
            let aborts = &self.mirror.aborts;
            match &self.request_ids {
                None => drop(runtime.spawn(aborts.clone().abort(worker, None, None))),
                Some(request_ids) => {
                    for request_id in request_ids.iter() {
                        runtime.spawn(aborts.clone().abort(
                            worker,
                            Some(request_id.clone()),
                            self.context.credentials.clone(),
                        ));
                    }
                }
            }
        }
    }
}

impl Drop for MirroredPrefill {
    fn drop(&mut self) {
        if !self.is_over {
            self.send_abort(self.worker);
        }
    }
}
