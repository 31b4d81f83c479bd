//! Plan of a remote prefill. It is made before the request is dispatched, because a request that
//! cannot be handed over must not be split, and it is carried out before the request goes to its
//! decode worker.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
use thiserror::Error;
use tracing::debug;
use warmroute_core::policy::LocalPrefillReason;
use warmroute_core::router::{DecodeCapability, PhaseSelection, RouteError, Router};
use warmroute_core::worker::{ModelName, WorkerRole};
use warmroute_tokens::openai::ApiWorkload;

use super::bootstrap::{check_mirrorable, is_streaming};
use super::fallback::{FallbackContext, SequentialPrefill};
use super::handoff::{KvHandoff, SplitError, StrippedBody, engine_path, strip_kv_fields};
use super::headers::{ClientHeaders, forwarded_headers};
use super::mirror::{MirrorContext, MirrorTarget, PrefillMirror};
use super::retry::{PrefillInput, PrefillRecord, RemotePrefill};
use crate::dispatch::{ActiveRequest, Dispatcher};
use crate::request::{PreprocessedRequest, RequestBody};

/// Header with the id of a request, for logs.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");

/// Planner of remote prefills. For a model without an executor, only the headers name the prefill
/// worker.
#[derive(Default)]
pub struct PrefillPlanner {
    /// Executors by model.
    pub executors: HashMap<ModelName, PrefillExecutor>,
    /// Headers that clients must not set.
    pub reserved_headers: Vec<Arc<str>>,
    /// Whether clients may set KV transfer fields.
    pub trusts_clients: bool,
}

/// Execution of the remote prefills of a model.
pub enum PrefillExecutor {
    /// warmroute calls the prefill worker first.
    Call(Arc<SequentialPrefill>),
    /// The gateway mirrors the request to the prefill worker.
    Mirror(Arc<PrefillMirror>),
}

/// Error of a body that could not be checked for KV transfer fields.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
pub enum UncheckedBodyError {
    /// The body is not a JSON object in UTF-8, or repeats a field many times.
    #[error("the request body is not a JSON object in UTF-8, or repeats a field")]
    Unreadable,
    /// The body was not received completely.
    #[error("the request body was not received completely: it exceeds the limit, or timed out")]
    TooLarge,
    /// The body did not fit into the budget.
    #[error("the limit of buffered request bodies is reached")]
    OverBudget,
}

/// Plan for one request.
pub(crate) enum PrefillPlan<'p> {
    /// Set the headers of the chosen workers.
    HeaderOnly,
    /// Call the prefill worker, if one is chosen.
    Call(Box<CallPlan>),
    /// Send the request to both workers.
    Mirror(Box<MirrorPlan<'p>>),
}

/// Plan of a called prefill.
pub(crate) struct CallPlan {
    record: PrefillRecord,
    handoff: KvHandoff,
    headers: HeaderMap,
}

/// Plan of a mirrored prefill.
pub(crate) struct MirrorPlan<'p> {
    executor: &'p Arc<PrefillMirror>,
    body: Bytes,
    context: MirrorContext,
    /// The copy, if warmroute sends it to the prefill worker itself.
    copy: Option<PrefillInput>,
}

/// A request whose plan was carried out.
pub(crate) struct PrefillOutcome {
    /// Its reservations.
    pub(crate) active: ActiveRequest,
    /// Its new body, if it changed.
    pub(crate) body: Option<Bytes>,
    /// Endpoint that receives a mirrored copy.
    pub(crate) mirror_to: Option<MirrorTarget>,
    /// The running or completed prefill.
    pub(crate) remote_prefill: Option<RemotePrefill>,
}

impl PrefillOutcome {
    /// Creates the outcome of a request without a prefill on another worker.
    pub(super) fn new(active: ActiveRequest) -> Self {
        Self {
            active,
            body: None,
            mirror_to: None,
            remote_prefill: None,
        }
    }
}

impl PrefillPlanner {
    /// Removes the KV transfer fields from a request, and returns the body if it changed. A body
    /// that cannot be checked is rejected: such fields give access to the KV of other clients.
    pub(crate) fn strip_kv_fields(
        &self,
        preprocessed: &PreprocessedRequest,
        body: &mut RequestBody,
    ) -> Result<Option<Bytes>, UncheckedBodyError> {
        let has_executor = preprocessed
            .route_request
            .model
            .as_ref()
            .is_none_or(|model| self.executors.contains_key(model));
        if self.executors.is_empty() || self.trusts_clients || !has_executor {
            return Ok(None);
        }
        let is_prompt = preprocessed
            .api
            .is_some_and(|api| api.workload() == ApiWorkload::Prompt);
        match body {
            RequestBody::Whole(bytes) => match strip_kv_fields(bytes) {
                StrippedBody::Unchanged => Ok(None),
                StrippedBody::Changed(stripped) => {
                    *bytes = stripped.clone();
                    Ok(Some(stripped))
                }
                StrippedBody::Unreadable if is_prompt => Err(UncheckedBodyError::Unreadable),
                StrippedBody::Unreadable => Ok(None),
            },
            RequestBody::Truncated { .. } | RequestBody::TooLarge { .. } if is_prompt => {
                Err(UncheckedBodyError::TooLarge)
            }
            RequestBody::OverBudget { .. } if is_prompt => Err(UncheckedBodyError::OverBudget),
            _ => Ok(None),
        }
    }

    /// Plans the prefill of one request. A request that cannot be split is computed by one worker.
    pub(crate) fn plan(
        &self,
        preprocessed: &mut PreprocessedRequest,
        headers: &dyn ClientHeaders,
        body: &RequestBody,
        router: &Router,
    ) -> PrefillPlan<'_> {
        let model = preprocessed.route_request.model.as_ref();
        let Some(executor) = model.and_then(|model| self.executors.get(model)) else {
            return PrefillPlan::HeaderOnly;
        };
        let has_prefill_workers = model.is_some_and(|model| has_prefill_workers(router, model));
        if let PrefillExecutor::Mirror(_) = executor {
            // SGLang's decode workers reject requests without a bootstrap room.
            preprocessed.route_request.decode_capability = DecodeCapability::DecodeOnly;
        }
        if preprocessed.is_query || !has_prefill_workers {
            return PrefillPlan::HeaderOnly;
        }
        let plan = if let RequestBody::Whole(body) = body {
            self.split(executor, preprocessed, headers, body)
        } else {
            Err(SplitError::Body)
        };
        plan.unwrap_or_else(|error| {
            debug!(request_id = headers.request_id(), %error, "request not split");
            preprocessed.route_request.phases =
                PhaseSelection::Local(LocalPrefillReason::NotSplittable);
            PrefillPlan::HeaderOnly
        })
    }

    fn split<'p>(
        &self,
        executor: &'p PrefillExecutor,
        preprocessed: &mut PreprocessedRequest,
        headers: &dyn ClientHeaders,
        body: &Bytes,
    ) -> Result<PrefillPlan<'p>, SplitError> {
        match executor {
            PrefillExecutor::Call(executor) => {
                let handoff = KvHandoff::new(preprocessed.api, executor.protocol, body)?;
                preprocessed.route_request.phases =
                    PhaseSelection::PrefillFirst { failed: Vec::new() };
                Ok(PrefillPlan::Call(Box::new(CallPlan {
                    record: PrefillRecord {
                        prefill: executor.clone(),
                        api: preprocessed.api,
                        request: preprocessed.route_request.clone(),
                    },
                    handoff,
                    headers: self.worker_headers(headers),
                })))
            }
            PrefillExecutor::Mirror(executor) => {
                check_mirrorable(preprocessed.api, body)?;
                let path = engine_path(preprocessed.api.ok_or(SplitError::Api)?);
                // A unary response does not show when the prefill ends, so warmroute sends the copy
                // itself and reads its response.
                let copy = (!is_streaming(body)).then(|| PrefillInput {
                    path: path.to_owned(),
                    headers: self.worker_headers(headers),
                    body: body.clone(),
                    decode_endpoint: None,
                });
                let credentials = headers
                    .get("authorization")
                    .and_then(|value| HeaderValue::from_str(&value).ok());
                Ok(PrefillPlan::Mirror(Box::new(MirrorPlan {
                    executor,
                    body: body.clone(),
                    context: MirrorContext::new(preprocessed.route_request.clone(), credentials),
                    copy,
                })))
            }
        }
    }

    /// Returns the headers of a request that are forwarded to workers.
    pub(crate) fn worker_headers(&self, headers: &dyn ClientHeaders) -> HeaderMap {
        let mut map = forwarded_headers(headers.fields(), |name| {
            self.reserved_headers
                .iter()
                .any(|reserved| **reserved == *name)
        });
        // A request without an id has an assigned one.
        if let Ok(id) = headers.request_id().parse() {
            map.insert(REQUEST_ID, id);
        }
        map
    }
}

impl PrefillPlan<'_> {
    /// Returns the maximum duration of the prefill.
    pub(crate) fn max_duration(&self) -> Duration {
        match self {
            PrefillPlan::HeaderOnly | PrefillPlan::Mirror(_) => Duration::ZERO,
            PrefillPlan::Call(plan) => plan.record.max_duration(),
        }
    }

    /// Runs the part of the prefill that precedes the decode worker. `on_call` is called before
    /// warmroute calls a prefill worker.
    pub(crate) async fn run(
        self,
        dispatcher: &Dispatcher,
        active: ActiveRequest,
        on_call: impl FnOnce(),
    ) -> Result<PrefillOutcome, RouteError> {
        let has_prefill_worker = active.placement.route.prefill().is_some();
        // The futures are boxed, because they are large and few requests need them.
        match self {
            PrefillPlan::Call(plan) if has_prefill_worker => {
                on_call();
                Box::pin(plan.run(dispatcher, active)).await
            }
            PrefillPlan::Mirror(plan) if has_prefill_worker => {
                Box::pin(plan.run(dispatcher, active)).await
            }
            PrefillPlan::HeaderOnly | PrefillPlan::Call(_) | PrefillPlan::Mirror(_) => {
                Ok(PrefillOutcome::new(active))
            }
        }
    }
}

impl CallPlan {
    async fn run(
        self,
        dispatcher: &Dispatcher,
        active: ActiveRequest,
    ) -> Result<PrefillOutcome, RouteError> {
        let Self {
            record,
            handoff,
            headers,
        } = self;
        let context = FallbackContext {
            dispatcher,
            request: &record.request,
            headers,
            decode_endpoint: None,
        };
        let mut outcome = record.prefill.run(context, handoff, active).await?;
        // A retry of a request without a KV handoff needs no second prefill.
        if outcome.body.is_some() {
            outcome.remote_prefill = Some(RemotePrefill::Call(Box::new(record)));
        }
        Ok(outcome)
    }
}

impl MirrorPlan<'_> {
    async fn run(
        self,
        dispatcher: &Dispatcher,
        mut active: ActiveRequest,
    ) -> Result<PrefillOutcome, RouteError> {
        let pair = match self.copy {
            None => self.executor.bootstrap(
                self.context,
                &self.body,
                &active.placement.route,
                dispatcher.router(),
            ),
            Some(copy) => self
                .executor
                .send_copy(dispatcher, &mut active, self.context, &copy)
                .await
                .ok(),
        };
        let pair = pair.ok_or(RouteError::NoPrefill)?;
        Ok(pair.into_outcome(active))
    }
}

fn has_prefill_workers(router: &Router, model: &ModelName) -> bool {
    let fleet = router.fleet();
    let members = fleet
        .slots_serving(model)
        .iter()
        .filter_map(|slot| fleet.member(*slot));
    members
        .into_iter()
        .any(|member| member.worker.role == WorkerRole::Prefill)
}
