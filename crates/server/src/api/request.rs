//! Conversions from proto messages to routing requests. Callers are trusted, but their input is
//! validated before any lookup.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use serde::Deserialize;
use warmroute_core::block::{BlockHashes, LocalHash, SequenceHash};
use warmroute_core::load::ledger::RequestAttempt;
use warmroute_core::policy::{RouterOverrides, WorkerPin};
use warmroute_core::router::{Reason, RequestPriority, RoutePrompt, RouteRequest};
use warmroute_core::worker::{DpRank, WorkerId, WorkerRank};

use super::config::MAX_PROMPT_BLOCKS;
use super::error::ApiError;
use crate::dispatch::RequestSession;
use crate::proto::router as pb;
use crate::request::{RequestBody, RequestPreprocessor, ResolvedModel};

/// Maximum length of a request id in bytes.
const MAX_REQUEST_ID_BYTES: usize = 512;

/// Parsed prompt query.
pub(super) struct ParsedQuery {
    pub(super) request: RouteRequest,
    /// Session named in the body.
    pub(super) session: Option<RequestSession>,
    /// Token ids of each prompt, if known.
    pub(super) tokens: Vec<Vec<u32>>,
}

fn check_blocks(blocks: usize) -> Result<(), ApiError> {
    if blocks > MAX_PROMPT_BLOCKS {
        let text = format!("the prompt has {blocks} blocks; the maximum is {MAX_PROMPT_BLOCKS}");
        return Err(ApiError::InvalidArgument(text));
    }
    Ok(())
}

/// The `model` field of a body.
#[derive(Deserialize)]
struct QueryModel {
    model: Option<String>,
}

/// Parses a query and looks up external caches. Bodies always query the shared cache.
pub(super) async fn parse_query(
    preprocessor: &Arc<RequestPreprocessor>,
    query: Option<pb::PromptQuery>,
    query_shared_cache: bool,
) -> Result<ParsedQuery, ApiError> {
    let Some(mut query) = query else {
        return Err(ApiError::invalid_argument("query is missing"));
    };
    let prompt = query
        .prompt
        .take()
        .ok_or_else(|| ApiError::invalid_argument("query.prompt is missing"))?;
    let mut query = match prompt {
        pb::prompt_query::Prompt::Body(body) => {
            return parse_body_query(preprocessor, &query, body).await;
        }
        pb::prompt_query::Prompt::Tokens(tokens) => {
            parse_token_query(preprocessor, query, tokens.ids)?
        }
        pb::prompt_query::Prompt::Blocks(blocks) => {
            parse_block_query(preprocessor, &query, blocks)?
        }
    };
    preprocessor
        .query_caches(&mut query.request, query_shared_cache)
        .await;
    Ok(query)
}

async fn parse_body_query(
    preprocessor: &Arc<RequestPreprocessor>,
    query: &pb::PromptQuery,
    body: pb::Body,
) -> Result<ParsedQuery, ApiError> {
    if [&query.model, &query.adapter, &query.cache_salt]
        .into_iter()
        .any(|text| !text.is_empty())
    {
        return Err(ApiError::invalid_argument(
            "model, adapter and cache_salt are not allowed with a body, which contains its own",
        ));
    }
    let mut headers = body.headers;
    headers = headers
        .into_iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    let find = |name: &str| headers.get(name).map(|value| Cow::Borrowed(value.as_str()));
    let json = Bytes::from(body.json);
    let preprocessed = preprocessor
        .preprocess(&body.path, &find, &RequestBody::Whole(json.clone()))
        .await;
    if let RoutePrompt::Estimated { reason, .. } = &preprocessed.route_request.prompt {
        match reason {
            // Envoy forwards such requests unrouted. A caller of this service receives an error
            // instead.
            Reason::NotInference | Reason::NoBody | Reason::Unparseable => {
                return Err(ApiError::InvalidBody(*reason));
            }
            Reason::UnknownModel => {
                let field = serde_json::from_slice::<QueryModel>(&json)
                    .ok()
                    .and_then(|field| field.model);
                return Err(field.map_or_else(missing_model_error, ApiError::UnknownModel));
            }
            _ => {}
        }
    }
    check_blocks(
        preprocessed
            .route_request
            .prompt
            .blocks()
            .iter()
            .map(BlockHashes::len)
            .sum(),
    )?;
    Ok(ParsedQuery {
        request: preprocessed.route_request,
        session: preprocessed.session,
        tokens: preprocessed.tokens,
    })
}

fn parse_token_query(
    preprocessor: &Arc<RequestPreprocessor>,
    query: pb::PromptQuery,
    tokens: Vec<u32>,
) -> Result<ParsedQuery, ApiError> {
    if tokens.is_empty() {
        return Err(ApiError::invalid_argument("the prompt has no tokens"));
    }
    let resolved = resolve_model(preprocessor, &query)?;
    check_blocks(tokens.len() / resolved.model.block_size.tokens())?;
    let salt = Some(query.cache_salt).filter(|salt| !salt.is_empty());
    let request = preprocessor.preprocess_tokens(&resolved, tokens.clone(), salt);
    Ok(ParsedQuery {
        request,
        session: None,
        tokens: vec![tokens],
    })
}

fn parse_block_query(
    preprocessor: &Arc<RequestPreprocessor>,
    query: &pb::PromptQuery,
    blocks: pb::BlockHashes,
) -> Result<ParsedQuery, ApiError> {
    if !query.cache_salt.is_empty() {
        return Err(ApiError::invalid_argument(
            "`cache_salt` is not allowed with block hashes, which already contain it",
        ));
    }
    let resolved = resolve_model(preprocessor, query)?;
    let size = resolved.model.block_size;
    let count = blocks.local_hashes.len();
    let sequence_count = blocks.sequence_hashes.len();
    if sequence_count != 0 && sequence_count != count {
        return Err(ApiError::invalid_argument(format!(
            "there are {count} local hashes but {sequence_count} sequence hashes"
        )));
    }
    check_blocks(count)?;
    let tokens = usize::try_from(blocks.isl_tokens).unwrap_or(usize::MAX);
    if tokens == 0 || tokens / size.tokens() < count {
        let text = format!(
            "{count} blocks of {size} tokens do not fit into isl_tokens {tokens}",
            size = size.tokens()
        );
        return Err(ApiError::invalid_argument(text));
    }
    let locals = blocks.local_hashes.into_iter().map(LocalHash).collect();
    let hashes = BlockHashes::from_locals(tokens, size, locals);
    let mut request = RouteRequest::new(
        Some(resolved.model.name.clone()),
        RoutePrompt::Hashed(vec![hashes]),
    );
    request.constraints.adapter = resolved.adapter;
    if sequence_count != 0 {
        request.tracked_blocks = Some(vec![
            blocks
                .sequence_hashes
                .into_iter()
                .map(SequenceHash)
                .collect(),
        ]);
    }
    Ok(ParsedQuery {
        request,
        session: None,
        tokens: Vec::new(),
    })
}

fn resolve_model(
    preprocessor: &RequestPreprocessor,
    query: &pb::PromptQuery,
) -> Result<ResolvedModel, ApiError> {
    let name = Some(query.model.as_str()).filter(|name| !name.is_empty());
    let mut resolved = preprocessor.resolve_model(name).ok_or_else(|| match name {
        Some(name) => ApiError::UnknownModel(name.to_owned()),
        None => missing_model_error(),
    })?;
    if !query.adapter.is_empty() {
        resolved.adapter = Some(query.adapter.clone());
    }
    Ok(resolved)
}

fn missing_model_error() -> ApiError {
    ApiError::invalid_argument("several models are configured; set the model")
}

/// Applies the caller's routing hints. Unset hints leave the request unchanged.
pub(super) fn apply_hints(
    request: &mut RouteRequest,
    hints: pb::RoutingHints,
) -> Result<(), ApiError> {
    let constraints = &mut request.constraints;
    constraints.pin = hints.pin.map(parse_pin).or(constraints.pin);
    request.prefill_pin = hints.prefill_pin.map(parse_pin).or(request.prefill_pin);
    if let Some(allowed) = hints.allowed_workers {
        constraints.allowed = Some(allowed.ids.into_iter().map(WorkerId).collect());
    }
    if !hints.required_taints.is_empty() {
        constraints.required_taints = hints.required_taints.into_iter().collect();
    }
    if let Some((taint, weight)) = hints
        .preferred_taints
        .iter()
        .find(|(_, weight)| !weight.is_finite())
    {
        return Err(ApiError::invalid_argument(format!(
            "the weight of the taint `{taint}` must be finite, not {weight}"
        )));
    }
    if !hints.preferred_taints.is_empty() {
        constraints.preferred_taints = BTreeMap::from_iter(hints.preferred_taints);
    }
    if let Some(priority) = hints.priority {
        request.priority = parse_priority(priority)?;
    }
    apply_overrides(request, hints.overrides.as_ref())?;
    request.expected_output_tokens = hints
        .expected_output_tokens
        .or(request.expected_output_tokens);
    Ok(())
}

fn parse_pin(pin: pb::Pin) -> WorkerPin {
    WorkerPin {
        worker: WorkerId(pin.worker_id),
        rank: pin.dp_rank.map(DpRank),
    }
}

fn parse_priority(priority: pb::Priority) -> Result<RequestPriority, ApiError> {
    let pb::Priority {
        strict,
        jump,
        class,
    } = priority;
    if !(jump.is_finite() && jump >= 0.0) {
        return Err(ApiError::invalid_argument(format!(
            "priority.jump must be at least 0 seconds, not {jump}"
        )));
    }
    Ok(RequestPriority {
        strict: strict.into(),
        jump,
        class: Some(class).filter(|class| !class.is_empty()),
    })
}

/// Applies the weight overrides, if any.
pub(super) fn apply_overrides(
    request: &mut RouteRequest,
    overrides: Option<&pb::Overrides>,
) -> Result<(), ApiError> {
    let Some(overrides) = overrides else {
        return Ok(());
    };
    merge_overrides(&mut request.overrides, overrides);
    request
        .overrides
        .validate()
        .map_err(|(name, text)| ApiError::invalid_argument(format!("`{name}` {text}")))
}

fn merge_overrides(overrides: &mut RouterOverrides, set: &pb::Overrides) {
    *overrides = RouterOverrides {
        overlap_score_credit: set.overlap_score_credit.or(overrides.overlap_score_credit),
        prefill_load_scale: set.prefill_load_scale.or(overrides.prefill_load_scale),
        router_temperature: set.router_temperature.or(overrides.router_temperature),
        shared_cache_multiplier: set
            .shared_cache_multiplier
            .or(overrides.shared_cache_multiplier),
        assume_kv_reuse: set.assume_kv_reuse.or(overrides.assume_kv_reuse),
        track_prefill_tokens: set.track_prefill_tokens.or(overrides.track_prefill_tokens),
        overlap_score_weight: overrides.overlap_score_weight,
        policy: overrides.policy,
    };
}

/// Parses a session.
pub(super) fn parse_session(session: pb::Session) -> Result<RequestSession, ApiError> {
    let pb::Session { id, parent, last } = session;
    if id.is_empty() {
        return Err(ApiError::invalid_argument("session.id is empty"));
    }
    let parent = Some(parent).filter(|parent| !parent.is_empty());
    Ok(RequestSession {
        id,
        parent,
        tenant: None,
        is_last: last,
        idle_timeout: None,
    })
}

/// Parses the identity of a booking.
pub(super) fn parse_attempt(attempt: Option<&pb::Attempt>) -> Result<RequestAttempt<'_>, ApiError> {
    match attempt {
        None => Err(ApiError::invalid_argument("attempt is missing")),
        Some(attempt) if attempt.id.is_empty() => {
            Err(ApiError::invalid_argument("attempt.id is empty"))
        }
        Some(attempt) if attempt.id.len() > MAX_REQUEST_ID_BYTES => {
            let text = format!(
                "attempt.id has {} bytes; the maximum is {MAX_REQUEST_ID_BYTES}",
                attempt.id.len()
            );
            Err(ApiError::InvalidArgument(text))
        }
        Some(attempt) => Ok(RequestAttempt {
            request: &attempt.id,
            number: attempt.number,
        }),
    }
}

/// Parses an HTTP status.
pub(super) fn parse_status(status: u32) -> Result<u16, ApiError> {
    let known = u16::try_from(status)
        .ok()
        .filter(|status| (100..600).contains(status));
    known.ok_or_else(|| {
        ApiError::InvalidArgument(format!("{status} is not an HTTP status from 100 to 599"))
    })
}

/// Parses a worker rank.
pub(super) fn parse_rank(rank: Option<pb::WorkerRank>) -> Result<WorkerRank, ApiError> {
    let rank = rank.ok_or_else(|| ApiError::invalid_argument("worker rank is missing"))?;
    Ok(WorkerRank::new(rank.worker_id, rank.dp_rank))
}
