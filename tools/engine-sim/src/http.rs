//! The engine's HTTP API: OpenAI's endpoints, vLLM's operational endpoints, and `/sim/*` for tests.
//! The endpoints that return tokens are in `render`.

use std::convert::Infallible;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use serde_json::{Value, json};
use warmroute_tokens::openai::ApiKind;

use super::SimEngine;
use super::aborts;
use super::adapters;
use super::auth;
use super::cache::BlockKeys;
use super::choices::{self, ValidatedRequest};
use super::disaggregation::{DisaggregationFields, RequestPhase, TransferProtocol, increment};
use super::error::OpenAiError;
use super::kv_origin::WorstOrigin;
use super::metrics;
use super::rank::EngineRank;
use super::render;
use super::request::GenerationRequest;
use super::response::ResponseBuilder;
use super::running_request::RunningRequest;
use super::stored_responses;

/// Request headers that the response echoes for tests.
const ECHOED_HEADERS: [&str; 6] = [
    "x-worker-instance-id",
    "x-dp-rank",
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
    "x-prefiller-host-port",
    "x-envoy-attempt-count",
];

pub(crate) fn router(engine: Arc<SimEngine>) -> Router {
    Router::new()
        .merge(render::routes())
        .merge(stored_responses::routes())
        .merge(adapters::routes())
        .route("/v1/chat/completions", post(generate))
        .route("/v1/completions", post(generate))
        .route("/v1/messages", post(generate))
        .route("/health", get(async || StatusCode::OK))
        .route("/metrics", get(metrics_page))
        .route("/reset_prefix_cache", post(reset))
        .route("/kv_event_sources", get(event_sources))
        .route("/abort_request", post(aborts::abort))
        .route("/sim/state", get(state))
        .route("/sim/misbehave", get(get_faults).post(patch_faults))
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(
            engine.clone(),
            auth::require_api_key,
        ))
        .layer(middleware::from_fn_with_state(
            engine.clone(),
            add_identity_headers,
        ))
        .with_state(engine)
}

/// Adds the engine's id and the received routing headers to every response.
async fn add_identity_headers(
    State(engine): State<Arc<SimEngine>>,
    request: Request,
    next: Next,
) -> Response {
    let received: Vec<(HeaderName, HeaderValue)> = ECHOED_HEADERS
        .iter()
        .filter_map(|name| {
            let value = request.headers().get(*name)?.clone();
            Some((
                HeaderName::try_from(format!("x-received-{}", &name[2..])).ok()?,
                value,
            ))
        })
        .collect();
    let mut response = next.run(request).await;
    response.headers_mut().extend(received);
    response
        .headers_mut()
        .insert("x-engine-id", HeaderValue::from(engine.config.id));
    response
}

/// Parsed and validated request, and the rank that computes it.
struct AcceptedRequest {
    api: ApiKind,
    request: GenerationRequest,
    keys: BlockKeys,
    disaggregation_fields: DisaggregationFields,
    prompts: Vec<Vec<u32>>,
    phase: RequestPhase,
    rank: Arc<EngineRank>,
}

impl AcceptedRequest {
    async fn read(
        engine: &Arc<SimEngine>,
        uri: &Uri,
        headers: &HeaderMap,
        body: Bytes,
    ) -> Result<Self, OpenAiError> {
        let api = ApiKind::from_path(uri.path());
        let api = api.ok_or_else(|| OpenAiError::new(StatusCode::NOT_FOUND, "no such endpoint"))?;
        let request = GenerationRequest::read(&body).map_err(OpenAiError::bad_request)?;
        let keys = engine.block_keys(&request)?;
        let disaggregation_fields = disaggregation_fields(engine, &body)?;
        let requested_rank = engine
            .resolve_rank(headers, disaggregation_fields.rank())
            .map_err(OpenAiError::bad_request)?;
        let tokenizer = engine.tokenizer.clone();
        let encoded = tokio::task::spawn_blocking(move || tokenizer.prompts(api, &body)).await;
        let prompts = encoded
            .map_err(|error| OpenAiError::bad_request(error.to_string()))?
            .map_err(OpenAiError::bad_request)?;
        check_length(engine, &request, &prompts)?;
        let phase = request_phase(
            engine,
            &disaggregation_fields,
            prompts.len(),
            request.choices(),
        )?;
        let rank = select_rank(engine, &phase, requested_rank)?;
        Ok(Self {
            api,
            request,
            keys,
            disaggregation_fields,
            prompts,
            phase,
            rank,
        })
    }
}

/// Returns the request id of the client, or a new one.
pub(crate) fn request_id(engine: &SimEngine, headers: &HeaderMap) -> String {
    headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .map_or_else(|| engine.generate_request_id(), str::to_owned)
}

pub(crate) async fn generate(
    State(engine): State<Arc<SimEngine>>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, OpenAiError> {
    let faults = engine.faults.current();
    apply_request_faults(faults.hang, faults.refuse).await?;
    if faults.empty_responses {
        return Ok(StatusCode::OK.into_response());
    }
    let accepted = AcceptedRequest::read(&engine, &uri, &headers, body).await?;
    engine.faults.count_request();
    if accepted.phase.is_prefill()
        && let Some(response) = apply_prefill_faults(&engine).await?
    {
        return Ok(response);
    }

    let request_id = request_id(&engine, &headers);
    let rank = accepted.rank.number;
    let is_stream = accepted.request.streams();
    let running_request = start(engine, accepted, &request_id);
    let mut response = if is_stream {
        running_request.event_stream().await?
    } else {
        running_request.document().await?
    };
    response
        .headers_mut()
        .insert("x-served-dp-rank", HeaderValue::from(rank));
    Ok(response)
}

/// Starts the choices of a request.
fn start(engine: Arc<SimEngine>, accepted: AcceptedRequest, request_id: &str) -> RunningRequest {
    let request = &accepted.request;
    let phase = &accepted.phase;
    let rank = &accepted.rank;
    let abort_registration = engine
        .aborts
        .register(accepted.disaggregation_fields.abort_ids());
    let worst_origin = WorstOrigin::default();
    let protocol = engine.config.disaggregation.protocol();
    let response = ResponseBuilder::new(
        &engine,
        accepted.api,
        request,
        request_id,
        accepted.prompts.clone(),
    )
    .with_remote_cached_tokens(phase.remote_cached_tokens())
    .with_kv_origin(protocol.map(|_| worst_origin.clone()));
    let answer_len = phase.answer_len(protocol, request.max_tokens());
    let validated = ValidatedRequest {
        request,
        phase,
        keys: &accepted.keys,
        prompts: &accepted.prompts,
        response_id: response.id(),
        answer_len,
        worst_origin,
    };
    let rank_of_choice = |at| {
        if let RequestPhase::BootstrapPrefill(rooms) = phase {
            engine.bootstrap_room_rank(rooms[at])
        } else {
            rank.clone()
        }
    };
    let choices = choices::start(&engine, &validated, rank_of_choice);
    RunningRequest {
        engine,
        rank: rank.clone(),
        disaggregation_fields: accepted.disaggregation_fields,
        choices,
        abort_registration,
        response,
    }
}

async fn apply_request_faults(hang: bool, refuse_status: Option<u16>) -> Result<(), OpenAiError> {
    if hang {
        // The future ends when the client disconnects.
        std::future::pending::<()>().await;
    }
    match refuse_status {
        None => Ok(()),
        Some(status) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
            Err(OpenAiError::new(status, "injected fault: request refused"))
        }
    }
}

/// Applies the faults for prefills; returns a response if a fault requires one.
async fn apply_prefill_faults(engine: &SimEngine) -> Result<Option<Response>, OpenAiError> {
    increment(&engine.transfer_counters.prefills);
    let faults = engine.faults.current();
    apply_request_faults(faults.hang_prefills, faults.refuse_prefills).await?;
    tokio::time::sleep(Duration::from_millis(faults.slow_prefill_ms)).await;
    let error = faults
        .fail_prefills_with_200
        .then(|| OpenAiError::internal("injected fault: prefill failed with status 200").body());
    Ok(error.map(|error| Json(error).into_response()))
}

/// Returns the fields for disaggregated prefill; the default if this engine has no such protocol.
fn disaggregation_fields(
    engine: &SimEngine,
    body: &Bytes,
) -> Result<DisaggregationFields, OpenAiError> {
    if engine.config.disaggregation.protocol().is_none() {
        return Ok(DisaggregationFields::default());
    }
    DisaggregationFields::read(body).map_err(OpenAiError::bad_request)
}

fn request_phase(
    engine: &SimEngine,
    disaggregation_fields: &DisaggregationFields,
    prompts: usize,
    choices: usize,
) -> Result<RequestPhase, OpenAiError> {
    let Some(protocol) = engine.config.disaggregation.protocol() else {
        return Ok(RequestPhase::Local);
    };
    disaggregation_fields
        .phase(protocol, prompts, choices)
        .map_err(|problem| match protocol {
            // vLLM reports such problems as an internal error.
            TransferProtocol::Nixl => OpenAiError::internal(problem),
            _ => OpenAiError::bad_request(problem),
        })
}

/// Returns the rank of the bootstrap room, the requested rank, or the next one in round-robin
/// order. A room belongs to one rank.
fn select_rank(
    engine: &SimEngine,
    phase: &RequestPhase,
    requested: Option<Arc<EngineRank>>,
) -> Result<Arc<EngineRank>, OpenAiError> {
    let RequestPhase::BootstrapPrefill(rooms) = phase else {
        return Ok(requested.unwrap_or_else(|| engine.next_rank()));
    };
    for &room in rooms {
        let rank = engine.bootstrap_room_rank(room);
        if let Some(requested) = requested
            .as_ref()
            .filter(|requested| requested.number != rank.number)
        {
            increment(&engine.transfer_counters.rooms_mismatched);
            let requested = requested.number;
            let rank = rank.number;
            return Err(OpenAiError::bad_request(format!(
                "bootstrap_room {room} belongs to rank {rank}, not to rank {requested}"
            )));
        }
    }
    Ok(engine.bootstrap_room_rank(rooms.first().copied().unwrap_or_default()))
}

fn check_length(
    engine: &SimEngine,
    request: &GenerationRequest,
    prompts: &[Vec<u32>],
) -> Result<(), OpenAiError> {
    let max_length = engine.config.capacity.max_length();
    for prompt in prompts {
        let len = prompt.len();
        let max_tokens = request.max_tokens();
        if len == 0 {
            return Err(OpenAiError::bad_request("The prompt is empty."));
        }
        if max_tokens > max_length || len > max_length - max_tokens {
            let problem = format!(
                "{len} prompt tokens and {max_tokens} more exceed the context length of {max_length}."
            );
            return Err(OpenAiError::bad_request(problem));
        }
    }
    Ok(())
}

async fn metrics_page(
    State(engine): State<Arc<SimEngine>>,
) -> Result<impl IntoResponse, OpenAiError> {
    if engine.faults.current().refuse_metrics {
        return Err(OpenAiError::internal("injected fault: metrics refused"));
    }
    let samples: Vec<_> = engine.ranks.iter().map(|rank| rank.sample()).collect();
    let content = [(
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    )];
    let sim_metrics = metrics::render_sim_metrics(
        &engine.config.model,
        &samples,
        &engine.transfer_counters,
        engine.bootstrap_rooms.waiting(),
    );
    Ok((
        content,
        metrics::render(&engine.config.model, &samples) + &sim_metrics,
    ))
}

/// Clears the caches. As in vLLM, the status is 200 even if a busy rank was not reset; the body has
/// the result.
async fn reset(State(engine): State<Arc<SimEngine>>) -> Json<Value> {
    let ranks: Vec<_> = engine.ranks.iter().map(|rank| rank.reset()).collect();
    Json(json!({"reset": ranks}))
}

async fn event_sources(State(engine): State<Arc<SimEngine>>) -> Result<Json<Value>, OpenAiError> {
    if engine.config.api.no_kv_event_sources {
        return Err(OpenAiError::new(StatusCode::NOT_FOUND, "Not Found"));
    }
    Ok(Json(engine.publishers()))
}

async fn state(State(engine): State<Arc<SimEngine>>) -> Json<Value> {
    let ranks: Vec<_> = engine.ranks.iter().map(|rank| rank.state()).collect();
    Json(json!({"id": engine.config.id, "ranks": ranks}))
}

async fn get_faults(State(engine): State<Arc<SimEngine>>) -> Json<Value> {
    let mut faults = engine.faults.current();
    faults.drop_events = engine.ranks.first().map(|rank| rank.publisher.drops());
    Json(json!(faults))
}

async fn patch_faults(
    State(engine): State<Arc<SimEngine>>,
    body: Bytes,
) -> Result<Json<Value>, OpenAiError> {
    let patch: Value = serde_json::from_slice(&body)
        .map_err(|error| OpenAiError::bad_request(error.to_string()))?;
    let changes_drop_events = patch.get("drop_events").is_some();
    let faults = engine
        .faults
        .patch(patch)
        .map_err(OpenAiError::bad_request)?;
    if changes_drop_events {
        engine.drop_events(faults.drop_events.unwrap_or_default());
    }
    Ok(Json(json!(faults)))
}

/// Serves requests until the task is dropped.
pub(crate) async fn serve(
    engine: Arc<SimEngine>,
    listener: tokio::net::TcpListener,
) -> Result<Infallible, io::Error> {
    axum::serve(listener, router(engine)).await?;
    Err(io::Error::other("the HTTP server ended"))
}
