//! Conversion of one request, from its headers and body to the input of the router.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use warmroute_core::policy::Constraints;
use warmroute_core::router::{Reason, RemoteOverlaps, RoutePrompt, RouteRequest, SharedBlocks};
use warmroute_tokens::openai::{self, ApiKind, ApiWorkload, NvExt};

use super::encode::HeaderContext;
use super::engine_tokens::EngineTokensResult;
use super::models::ResolvedModel;
use super::partial_request::{BodyFields, PartialRequest, PromptEncoding};
use super::preprocessor::RequestPreprocessor;
use super::prompt_encoder::PromptEncoder;
use super::routing_hints::{HeaderLookup, RoutingHints};
use crate::cluster::remote_index::{OverlapQuery, RemoteIndexClient};
use crate::dispatch::{RequestSession, ResponseReference};

/// The received part of a request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestBody {
    /// The request has no body.
    Absent,
    /// The request may have a body, which was not needed or not received.
    NotReceived,
    /// The whole body.
    Whole(Bytes),
    /// The request may have a body, which is received only after the route was chosen.
    Streamed,
    /// The beginning of the body.
    Truncated {
        /// The bytes received.
        received: Bytes,
        /// The length that the client announced.
        length: Option<u64>,
    },
    /// The beginning of a body that exceeds the limit.
    TooLarge {
        /// The bytes received.
        received: Bytes,
        /// A lower bound of the body's length.
        bytes: u64,
    },
    /// A body that did not fit into the budget.
    OverBudget {
        /// The length of the body in bytes.
        bytes: usize,
        /// The model of the body, if a quick search found it.
        model: Option<String>,
    },
}

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
                let started = Instant::now();
                let engine_tokens = self.fetch_engine_tokens(api, body).await;
                let context = HeaderContext {
                    engine_tokens: engine_tokens.unwrap_or_default(),
                    engine_wait: started.elapsed(),
                    // The rest of the deadline is for hashing the tokenized part.
                    deadline: started.checked_add(self.parts.limits.deadline / 8 * 7),
                    ..self.header_context(headers)
                };
                self.encode(api, context, body).await
            }
            None => self.unknown_path(path),
        };
        let mut preprocessed = self.build_preprocessed(api, partial, headers, pool);
        let route_request = &mut preprocessed.route_request;
        if let Some(time) = self.query_caches(route_request, true).await {
            preprocessed.stage_times.push(time);
        }
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
        self.build_preprocessed(api, partial, headers, pool)
    }

    /// Returns a request with these tokens, for a model and optionally an adapter.
    pub fn preprocess_tokens(
        &self,
        resolved: &ResolvedModel,
        tokens: Vec<u32>,
        cache_salt: Option<String>,
    ) -> RouteRequest {
        let encoder = PromptEncoder::new(&self.parts, resolved, cache_salt);
        let hashes = vec![encoder.block_hashes(&tokens)];
        let tracked_blocks = encoder.tracked_blocks(&[tokens], &hashes);
        let model = resolved.model.name.clone();
        RouteRequest {
            tracked_blocks,
            constraints: Constraints {
                adapter: resolved.adapter.clone(),
                ..Constraints::default()
            },
            ..RouteRequest::new(Some(model), RoutePrompt::Hashed(hashes))
        }
    }

    /// Returns a request whose path belongs to no API. It may refer to a stored response.
    fn unknown_path(&self, path: &str) -> PartialRequest {
        let response_reference = ResponseReference {
            id: self.parts.paths.stored_response_id(path),
            ..ResponseReference::default()
        };
        PartialRequest {
            fields: BodyFields {
                response_reference,
                ..BodyFields::default()
            },
            prompts: PromptEncoding::estimated(0, Reason::NotInference),
            stage_times: Vec::new(),
        }
    }

    fn build_preprocessed(
        &self,
        api: Option<ApiKind>,
        partial: PartialRequest,
        headers: HeaderLookup<'_>,
        pool: Option<Arc<str>>,
    ) -> PreprocessedRequest {
        let PartialRequest {
            fields,
            prompts,
            stage_times,
        } = partial;
        let tenant = self.parts.clients.tenant(headers);
        let extension = fields.extension.as_deref();
        let hints = self.routing_hints(headers, extension, pool.as_deref());
        let control = extension.and_then(|extension| extension.session_control.as_ref());
        let sessions = self.parts.sessions.as_ref();
        let session = sessions
            .and_then(|sessions| sessions.parse(headers, fields.session, control))
            .map(|session| RequestSession {
                tenant: tenant.clone(),
                ..session
            });
        let model = fields.resolved.map(|resolved| resolved.model.name.clone());
        PreprocessedRequest {
            route_request: RouteRequest {
                constraints: Constraints {
                    pool,
                    adapter: fields.adapter,
                    ..hints.constraints
                },
                prefill_pin: hints.prefill_pin,
                overrides: hints.overrides,
                expected_output_tokens: hints.expected_output_tokens,
                priority: hints.priority,
                tracked_blocks: prompts.tracked_blocks,
                parity: prompts.parity,
                max_output_tokens: fields.max_output_tokens,
                is_streamed: fields.is_streamed,
                reads_prefix_cache: !fields.skips_prefix_cache,
                // Engines may also compute a prompt for unknown paths.
                computes: api.is_none_or(|api| api.workload() != ApiWorkload::None),
                ..RouteRequest::new(model, prompts.prompt)
            },
            api,
            requested_model: fields.requested_model,
            parse_error: fields.parse_error,
            session,
            response_reference: ResponseReference {
                tenant,
                ..fields.response_reference
            },
            is_query: hints.is_query,
            tokens: prompts.tokens,
            stage_times,
        }
    }

    /// Returns the hints of a trusted client, else no hints, with the priority of the objective.
    fn routing_hints(
        &self,
        headers: HeaderLookup<'_>,
        extension: Option<&NvExt>,
        pool: Option<&str>,
    ) -> RoutingHints {
        let mut hints = if self.parts.clients.trusted {
            RoutingHints::parse(headers, extension)
        } else {
            RoutingHints::default()
        };
        if hints.priority.strict == 0 {
            let priority = self.objective_priority(headers, pool);
            hints.priority.strict = priority.unwrap_or(0);
        }
        hints
    }

    /// Returns the priority of the objective that a request names. Every client may name an
    /// objective, because only the cluster defines objectives.
    fn objective_priority(&self, headers: HeaderLookup<'_>, pool: Option<&str>) -> Option<i64> {
        let cluster = self.parts.cluster.load();
        if !cluster.has_objectives() {
            return None;
        }
        let mut names = self.parts.clients.objective_headers.iter();
        let name = names.find_map(|header| headers(header))?;
        cluster.priority(name.trim(), pool)
    }

    fn header_context(&self, headers: HeaderLookup<'_>) -> HeaderContext {
        let sessions = self.parts.sessions.as_ref();
        HeaderContext {
            form_boundary: headers("content-type")
                .and_then(|value| openai::multipart_boundary(&value)),
            tenant: self.parts.clients.tenant(headers),
            is_session_in_body: sessions.is_some_and(|sessions| sessions.is_only_in_body(headers)),
            engine_tokens: EngineTokensResult::NotRequested,
            engine_wait: Duration::ZERO,
            deadline: None,
        }
    }

    /// Adds the answers of the remote index to a request, and those of the shared cache if
    /// `queries_shared_cache`. Both are queried concurrently, each with its own deadline. A missing
    /// answer counts as no information. Returns the duration of the index query.
    pub async fn query_caches(
        &self,
        request: &mut RouteRequest,
        queries_shared_cache: bool,
    ) -> Option<(&'static str, Duration)> {
        let shared = self
            .parts
            .shared_cache
            .as_ref()
            .filter(|_| queries_shared_cache);
        let blocks = async {
            match shared {
                // Boxed, because the future is large and few deployments have a shared cache.
                Some(shared) => Box::pin(shared.query(request)).await,
                None => SharedBlocks::NotQueried,
            }
        };
        let remote = async {
            let started = Instant::now();
            let answer = self
                .query_index(self.parts.index_client.as_deref()?, request)
                .await;
            Some((answer, started.elapsed()))
        };
        let (blocks, remote) = tokio::join!(blocks, remote);
        request.shared = blocks;
        let (answer, elapsed) = remote?;
        request.remote_overlaps = answer;
        Some(("remote_index", elapsed))
    }

    async fn query_index(
        &self,
        client: &RemoteIndexClient,
        request: &RouteRequest,
    ) -> RemoteOverlaps {
        // Without a complete block there is nothing to query, and the request is routed load-only.
        if matches!(&request.prompt, RoutePrompt::Truncated { known, .. } if known.is_empty()) {
            return RemoteOverlaps::NotQueried;
        }
        let model = request.model.as_ref();
        let Some(resolved) = self.resolve_model(model.map(|model| model.as_str())) else {
            return RemoteOverlaps::NotQueried;
        };
        let hashing = resolved.hash_fingerprint();
        client
            .query(OverlapQuery {
                model,
                hashing,
                prompts: request.prompt.blocks(),
            })
            .await
    }
}
