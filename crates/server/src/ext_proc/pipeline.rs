//! The request path: preprocess a request, dispatch it, run its remote prefill, and build the reply
//! to Envoy. Every failure on the way degrades the route by one step and is counted. A client
//! receives an error only if the operator or the request itself requires it.

mod counters;

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use tracing::{Level, debug, enabled};
use warmroute_core::policy::EndpointSubset;
use warmroute_core::router::{Reason, Route, RoutePrompt, RouteTarget, Router};
use warmroute_core::worker::ModelName;
use warmroute_metrics::{Metrics, ModelLabel};
use warmroute_tokens::openai::ApiKind;

use super::config::{FailureConfig, FailureMode, ResponseConfig};
use super::exchange::InboundRequest;
use super::headers::{self, RequestHead};
use super::reject::{self, RequestRejection};
use super::reply::{ImmediateReply, RouteReply};
use crate::dispatch::{ActiveRequest, DispatchError, Dispatcher};
use crate::prefill::{PrefillOutcome, PrefillPlan, PrefillPlanner, RemotePrefill};
use crate::request::pool_routes::PoolAuthorities;
use crate::request::{BodyEdit, PreprocessedRequest, RequestBody, RequestPreprocessor};

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

/// Outcome of one request.
pub enum RoutingOutcome {
    /// Envoy forwards the request.
    Routed {
        /// The reply to Envoy.
        reply: Box<RouteReply>,
        /// Resources of the request; `None` if it was not dispatched.
        active: Option<Box<ActiveRequest>>,
        /// The prefill on another worker, if there is one.
        remote_prefill: Option<RemotePrefill>,
    },
    /// The client receives this response.
    Immediate(ImmediateReply),
}

/// Properties of a response that the request determines.
struct ExpectedResponse {
    /// Whether engines may delay the headers of a stream of this API until the first token.
    delays_headers: bool,
    /// Whether the engine may store the response.
    may_store_response: bool,
}

/// The request path between Envoy's messages and the router.
pub struct RequestPipeline {
    preprocessor: Arc<RequestPreprocessor>,
    dispatcher: Arc<Dispatcher>,
    metrics: Arc<Metrics>,
    policy: ExchangePolicy,
    prefill_planner: PrefillPlanner,
}

impl RequestPipeline {
    /// Creates a pipeline in front of a router.
    pub fn new(
        preprocessor: Arc<RequestPreprocessor>,
        dispatcher: Arc<Dispatcher>,
        metrics: Arc<Metrics>,
        policy: ExchangePolicy,
        prefill_planner: PrefillPlanner,
    ) -> Arc<Self> {
        Arc::new(Self {
            preprocessor,
            dispatcher,
            metrics,
            policy,
            prefill_planner,
        })
    }

    /// Returns the dispatcher.
    pub(super) fn dispatcher(&self) -> &Dispatcher {
        &self.dispatcher
    }

    /// Returns the planner of remote prefills.
    pub(super) fn prefill_planner(&self) -> &PrefillPlanner {
        &self.prefill_planner
    }

    /// Returns the pools by the authority of a call.
    pub(super) fn pool_authorities(&self) -> &PoolAuthorities {
        self.preprocessor.pool_authorities()
    }

    /// Returns the router.
    pub fn router(&self) -> &Arc<Router> {
        self.dispatcher.router()
    }

    /// Finds the workers for one request. If the request has to wait, `on_wait` is called once with
    /// the maximum wait.
    pub async fn route(
        &self,
        mut inbound: InboundRequest,
        on_wait: impl FnOnce(Duration),
    ) -> RoutingOutcome {
        let started = Instant::now();
        let pool = self.pool_of(&mut inbound);
        let edit = self.rewrite_model(&mut inbound, pool.as_deref());
        let mut preprocessed = self.preprocess(pool, &inbound).await;
        let InboundRequest { head, mut body, .. } = inbound;
        let model = model_label(&preprocessed);
        let edit = match self
            .prefill_planner
            .strip_kv_fields(&preprocessed, &mut body)
        {
            Ok(stripped) => BodyEdit::replace_body(edit, stripped),
            Err(error) => {
                return self.reject(&RequestRejection::Unchecked(error), &head, &model);
            }
        };
        let plan = self
            .prefill_planner
            .plan(&mut preprocessed, &head, &body, self.router());
        // A request may wait in the queue for a long time. Only a handoff still needs its body.
        drop(body);
        for &(stage, duration) in &preprocessed.stage_times {
            self.metrics.observe_stage(stage, duration);
        }
        if let Some(rejection) = self.strict_rejection(&preprocessed) {
            return self.reject(&rejection, &head, &model);
        }
        if preprocessed.is_query {
            return self.answer_query(preprocessed, &head, &model);
        }
        let is_hashed = !matches!(
            preprocessed.route_request.prompt,
            RoutePrompt::Estimated { .. }
        );
        let failure = self.failure_mode(preprocessed.route_request.model.as_ref());
        let pool = preprocessed.route_request.constraints.pool.clone();
        let expected_response = ExpectedResponse {
            delays_headers: preprocessed
                .api
                .is_some_and(ApiKind::may_delay_stream_headers),
            may_store_response: preprocessed.response_reference.may_store_response,
        };
        match self.dispatch(preprocessed, plan, started, on_wait).await {
            Ok(prefilled) => {
                self.count_route(&prefilled.active, &model, is_hashed);
                log_route(&head, &prefilled.active.placement.route);
                self.routed(prefilled, edit, &expected_response)
            }
            Err(error) => {
                debug!(request_id = head.request_id, pool = pool.as_deref(), %error, "request not routed");
                self.reject(&RequestRejection::Routing(&error, failure), &head, &model)
            }
        }
    }

    async fn preprocess(
        &self,
        pool: Option<Arc<str>>,
        inbound: &InboundRequest,
    ) -> PreprocessedRequest {
        let head = &inbound.head;
        let header = |name: &str| head.get(name);
        let mut preprocessed = self
            .preprocessor
            .preprocess_for_pool(pool, &head.path, &header, &inbound.body)
            .await;
        let constraints = &mut preprocessed.route_request.constraints;
        constraints.endpoints = self
            .conformance_subset(head)
            .or_else(|| inbound.subset.clone());
        constraints.storing_rank = self
            .dispatcher
            .find_stored(&preprocessed.response_reference);
        preprocessed
    }

    /// Dispatches a request, and runs the part of its prefill that precedes the reply to Envoy.
    async fn dispatch(
        &self,
        mut preprocessed: PreprocessedRequest,
        plan: PrefillPlan<'_>,
        started: Instant,
        on_wait: impl FnOnce(Duration),
    ) -> Result<PrefillOutcome, DispatchError> {
        // Only the reply to a query contains the tokens, and the request may wait for a long time.
        preprocessed.tokens = Vec::new();
        let max_prefill = plan.max_duration();
        let mut on_wait = Some(on_wait);
        let mut notify_wait = |wait| _ = on_wait.take().map(|on_wait| on_wait(wait + max_prefill));
        let active = self
            .dispatcher
            .dispatch(
                preprocessed.route_request,
                preprocessed.session.as_ref(),
                &mut notify_wait,
            )
            .await;
        self.metrics.observe_stage("total", started.elapsed());
        let active = ActiveRequest {
            tenant: preprocessed.response_reference.tenant,
            ..active?
        };
        plan.run(&self.dispatcher, active, || notify_wait(Duration::ZERO))
            .await
            .map_err(DispatchError::Refused)
    }

    /// Returns the outcome of a routed request.
    fn routed(
        &self,
        prefilled: PrefillOutcome,
        edit: Option<BodyEdit>,
        expected: &ExpectedResponse,
    ) -> RoutingOutcome {
        let route = &prefilled.active.placement.route;
        let edit = BodyEdit::replace_body(edit, prefilled.body);
        let first_token_with_headers =
            expected.delays_headers && self.policy.first_token_with_headers.contains(&route.model);
        let reply = RouteReply {
            target: RouteTarget {
                why: self
                    .policy
                    .response_headers
                    .why
                    .then(|| route.summary_line().into()),
                ..route.target()
            },
            body_edit: edit,
            mirror_to: prefilled.mirror_to,
            first_token_with_headers,
            may_store_response: expected.may_store_response,
        };
        RoutingOutcome::Routed {
            reply: Box::new(reply),
            active: Some(Box::new(prefilled.active)),
            remote_prefill: prefilled.remote_prefill,
        }
    }

    /// Returns the pool of a request: from the gateway, or else by the configured rules.
    fn pool_of(&self, inbound: &mut InboundRequest) -> Option<Arc<str>> {
        let from_call = inbound.pool.take();
        from_call.or_else(|| {
            self.preprocessor
                .pool_of(&inbound.head.path, &|name: &str| inbound.head.get(name))
        })
    }

    /// Replaces the model in the body, if a header or a rule requires it, before anything else
    /// reads the body.
    fn rewrite_model(&self, inbound: &mut InboundRequest, pool: Option<&str>) -> Option<BodyEdit> {
        let RequestBody::Whole(body) = &inbound.body else {
            return None;
        };
        let header = |name: &str| inbound.head.get(name);
        let edit = self
            .preprocessor
            .rewrite_model(pool, &header, body, rand::random())?;
        self.metrics.requests.model_rewrites.inc();
        inbound.body = RequestBody::Whole(edit.body.clone());
        Some(edit)
    }

    /// Returns the candidate endpoints that a conformance test names.
    fn conformance_subset(&self, head: &RequestHead) -> Option<EndpointSubset> {
        let selection = head
            .get(headers::CONFORMANCE_SELECTION)
            .filter(|_| self.policy.conformance)?;
        let selected = EndpointSubset::parse([&*selection]);
        let fleet = self.router().fleet();
        // A list without a known endpoint is ignored.
        fleet
            .workers()
            .any(|worker| selected.contains(worker.endpoint))
            .then_some(selected)
    }

    /// Returns the rejection of a request in strict mode; `None` if the request is to be routed.
    fn strict_rejection<'t>(
        &self,
        preprocessed: &'t PreprocessedRequest,
    ) -> Option<RequestRejection<'t>> {
        let failure = &self.policy.failure;
        let reason = preprocessed.route_request.prompt.reason()?;
        let requested = preprocessed.requested_model.as_deref();
        // A request of an API without a prompt may name an unknown model, too.
        let unknown = reason == Reason::UnknownModel
            || (requested.is_some() && preprocessed.route_request.model.is_none());
        match reason {
            _ if unknown && failure.strict_models => Some(RequestRejection::UnknownModel(
                requested.unwrap_or_default(),
            )),
            Reason::Unparseable if failure.strict_bodies => Some(RequestRejection::Unreadable(
                preprocessed.parse_error.as_deref(),
            )),
            Reason::BodyTooLarge if failure.strict_size => Some(RequestRejection::TooLarge),
            _ => None,
        }
    }

    fn failure_mode(&self, model: Option<&ModelName>) -> FailureMode {
        let model_mode = model.and_then(|model| self.policy.model_failure_modes.get(model));
        model_mode.copied().unwrap_or(self.policy.failure.mode)
    }

    fn answer_query(
        &self,
        preprocessed: PreprocessedRequest,
        head: &RequestHead,
        model: &ModelLabel,
    ) -> RoutingOutcome {
        let failure = self.failure_mode(preprocessed.route_request.model.as_ref());
        match self
            .dispatcher
            .preview(preprocessed.route_request, preprocessed.session.as_ref())
        {
            Ok(route) => {
                self.count_request(model, "query", "none");
                RoutingOutcome::Immediate(reject::query_reply(&route, &preprocessed.tokens))
            }
            Err(error) => self.reject(
                &RequestRejection::Routing(&DispatchError::Refused(error), failure),
                head,
                model,
            ),
        }
    }

    fn reject(
        &self,
        rejection: &RequestRejection<'_>,
        head: &RequestHead,
        model: &ModelLabel,
    ) -> RoutingOutcome {
        self.count_degradation(rejection.reason());
        match rejection.immediate_reply(&head.request_id, &self.policy) {
            Some(response) => {
                self.count_request(model, "rejected", "none");
                RoutingOutcome::Immediate(response)
            }
            None => {
                self.count_request(model, RouteTarget::PASSTHROUGH.mode.as_str(), "none");
                RoutingOutcome::Routed {
                    reply: Box::new(RouteTarget::PASSTHROUGH.into()),
                    active: None,
                    remote_prefill: None,
                }
            }
        }
    }
}

fn log_route(head: &RequestHead, route: &Route) {
    if enabled!(Level::DEBUG) {
        debug!(
            request_id = head.request_id,
            mode = route.mode.as_str(),
            endpoint = %route.to.endpoint,
            prefill_endpoint = route.prefill().map(|prefill| tracing::field::display(prefill.to.endpoint)),
            prompt_tokens = route.prompt_tokens,
            predicted_cached_tokens = route.computed_by().cached_tokens,
            "routed {}",
            route.summary_line()
        );
    }
}

fn model_label(preprocessed: &PreprocessedRequest) -> ModelLabel {
    let model = preprocessed.route_request.model.as_ref();
    model.map_or_else(
        || ModelLabel {
            model: "unknown".into(),
        },
        ModelLabel::from,
    )
}
