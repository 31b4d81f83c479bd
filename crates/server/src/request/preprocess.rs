//! Conversion of one request, from its headers and body to the input of the router.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_core::router::{Reason, RouteRequest};
use warmroute_tokens::openai::{self, ApiKind, ApiWorkload};

use super::body::RequestBody;
use super::engine_tokens::EngineTokensResult;
use super::header_context::HeaderContext;
use super::partial_request::PartialRequest;
use super::preprocessor::RequestPreprocessor;
use super::routing_hints::{HeaderLookup, RoutingHints};
use crate::dispatch::{RequestSession, ResponseReference};

/// A preprocessed request.
#[derive(Clone, Debug)]
pub struct PreprocessedRequest {
    /// The input of the router.
    pub route_request: RouteRequest,
    /// The API of the request; `None` for an unknown path.
    pub api: Option<ApiKind>,
    /// The model that the client requested.
    pub requested_model: Option<String>,
    /// The parse error of an unreadable body.
    pub parse_error: Option<String>,
    /// The session of the request.
    pub session: Option<RequestSession>,
    /// The stored responses that the request refers to or creates.
    pub response_reference: ResponseReference,
    /// Whether the client only queries the routing decision.
    pub is_query: bool,
    /// The tokens of each prompt, if known.
    pub tokens: Vec<Vec<u32>>,
    /// The duration of each stage.
    pub stage_times: Vec<(&'static str, Duration)>,
}

impl RequestPreprocessor {
    /// Preprocesses a request.
    pub async fn preprocess(
        self: &Arc<Self>,
        path: &str,
        headers: HeaderLookup<'_>,
        body: &RequestBody,
    ) -> PreprocessedRequest {
        self.preprocess_for_pool(self.pool_of(path, headers), path, headers, body)
            .await
    }

    /// Preprocesses a request whose pool is known.
    pub async fn preprocess_for_pool(
        self: &Arc<Self>,
        pool: Option<Arc<str>>,
        path: &str,
        headers: HeaderLookup<'_>,
        body: &RequestBody,
    ) -> PreprocessedRequest {
        let api = self.api(path, headers);
        let partial = match api {
            Some(api) => {
                let mut context = self.header_context(headers);
                // The rest of the deadline is for hashing the tokenized part.
                context.deadline = Instant::now().checked_add(self.parts.limits.deadline / 8 * 7);
                self.fetch_engine_tokens(api, &mut context, body).await;
                self.encode(api, context, body).await
            }
            None => self.unknown_path(path),
        };
        let mut preprocessed = PreprocessedRequest {
            api,
            ..self.build_preprocessed(partial, headers, pool)
        };
        preprocessed.route_request.computes = computes_prompt(api);
        preprocessed.stage_times.extend(
            self.query_caches(&mut preprocessed.route_request, true)
                .await,
        );
        preprocessed
    }

    /// Preprocesses a request on this thread and without a deadline.
    pub fn preprocess_blocking(
        &self,
        pool: Option<Arc<str>>,
        path: &str,
        headers: HeaderLookup<'_>,
        body: &[u8],
    ) -> PreprocessedRequest {
        let api = self.api(path, headers);
        let partial = match api {
            Some(api) => {
                let body = Bytes::copy_from_slice(body);
                self.encode_blocking(api, &self.header_context(headers), &body)
            }
            None => self.unknown_path(path),
        };
        let mut preprocessed = PreprocessedRequest {
            api,
            ..self.build_preprocessed(partial, headers, pool)
        };
        preprocessed.route_request.computes = computes_prompt(api);
        preprocessed
    }

    /// Returns a request whose path belongs to no API. It may refer to a stored response.
    fn unknown_path(&self, path: &str) -> PartialRequest {
        let mut partial = PartialRequest::estimated(0, Reason::NotInference);
        partial.response_reference.id = self.parts.paths.stored_response_id(path);
        partial
    }

    fn build_preprocessed(
        &self,
        partial: PartialRequest,
        headers: HeaderLookup<'_>,
        pool: Option<Arc<str>>,
    ) -> PreprocessedRequest {
        let mut request = RouteRequest::new(partial.model, partial.prompt);
        let mut query = false;
        if self.parts.clients.trusted {
            let hints = RoutingHints::parse(headers, partial.extension.as_deref());
            query = hints.is_query;
            request.constraints = hints.constraints;
            request.prefill_pin = hints.prefill_pin;
            request.overrides = hints.overrides;
            request.expected_output_tokens = hints.expected_output_tokens;
            request.priority = hints.priority;
        }
        if request.priority.strict == 0 {
            request.priority.strict = self
                .objective_priority(headers, pool.as_deref())
                .unwrap_or(0);
        }
        request.constraints.pool = pool;
        request.constraints.adapter = partial.adapter;
        request.tracked_blocks = partial.tracked_blocks;
        request.parity = partial.parity_expectation;
        request.max_output_tokens = partial.max_output_tokens;
        request.is_streamed = partial.is_streamed;
        request.reads_prefix_cache = partial.reads_prefix_cache;
        let control = partial
            .extension
            .as_ref()
            .and_then(|extension| extension.session_control.as_ref());
        let session = self.session(headers, partial.session, control);
        let PartialRequest {
            requested_model,
            tokens,
            stage_times,
            parse_error,
            response_reference,
            ..
        } = partial;
        PreprocessedRequest {
            route_request: request,
            api: None,
            requested_model,
            parse_error,
            session,
            response_reference: ResponseReference {
                tenant: self.tenant(headers),
                ..response_reference
            },
            is_query: query,
            tokens,
            stage_times,
        }
    }

    fn header_context(&self, headers: HeaderLookup<'_>) -> HeaderContext {
        let tenant = self.tenant(headers);
        let session_fields = self.parts.session_fields.as_ref();
        let boundary = headers("content-type").and_then(|value| openai::multipart_boundary(&value));
        let session_in_body =
            session_fields.is_some_and(|session_fields| session_fields.is_only_in_body(headers));
        HeaderContext {
            form_boundary: boundary,
            tenant,
            is_session_in_body: session_in_body,
            engine_tokens: EngineTokensResult::NotRequested,
            engine_wait: Duration::ZERO,
            deadline: None,
        }
    }
}

/// Returns whether an engine computes a prompt for requests of this API. Unknown paths may do so.
fn computes_prompt(api: Option<ApiKind>) -> bool {
    api.is_none_or(|api| api.workload() != ApiWorkload::None)
}
