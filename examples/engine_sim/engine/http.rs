//! The engine's HTTP surface: OpenAI's endpoints, vLLM's operational ones (`render` has those that answer with tokens), and
//! `/sim/*` for tests.

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
use warmroute::openai::Api;

use super::Engine;
use super::aborts;
use super::answer::Answer;
use super::ask::Ask;
use super::cache::Keys;
use super::choices::{self, Order};
use super::guard;
use super::handover::{Hand, Protocol, Wishes, count};
use super::metrics;
use super::origin::Worst;
use super::rank::Rank;
use super::render;
use super::under_way::UnderWay;

/// Headers that tests want to see as the engine saw them.
const ECHOED: [&str; 6] = [
    "x-worker-instance-id",
    "x-dp-rank",
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
    "x-prefiller-host-port",
    "x-envoy-attempt-count",
];

pub(crate) fn router(engine: Arc<Engine>) -> Router {
    Router::new()
        .merge(render::routes())
        .route("/v1/chat/completions", post(generate))
        .route("/v1/completions", post(generate))
        .route("/v1/models", get(models))
        .route("/health", get(async || StatusCode::OK))
        .route("/metrics", get(metrics_page))
        .route("/reset_prefix_cache", post(reset))
        .route("/kv_event_sources", get(event_sources))
        .route("/abort_request", post(aborts::abort))
        .route("/sim/state", get(state))
        .route("/sim/misbehave", get(faults).post(misbehave))
        .layer(DefaultBodyLimit::disable())
        .layer(middleware::from_fn_with_state(engine.clone(), guard::admit))
        .layer(middleware::from_fn_with_state(engine.clone(), sign))
        .with_state(engine)
}

/// Marks every response with who served it and which routing headers arrived.
async fn sign(State(engine): State<Arc<Engine>>, request: Request, next: Next) -> Response {
    let received: Vec<(HeaderName, HeaderValue)> = ECHOED
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

/// A refusal in OpenAI's shape.
#[derive(Debug)]
pub(crate) struct Refusal(StatusCode, String);

impl Refusal {
    pub(crate) fn new(status: StatusCode, message: impl Into<String>) -> Self {
        Self(status, message.into())
    }

    pub(crate) fn bad(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, message)
    }
}

impl Refusal {
    pub(crate) fn failed(message: impl Into<String>) -> Self {
        Self::new(StatusCode::INTERNAL_SERVER_ERROR, message)
    }

    /// The body.
    pub(crate) fn error(&self) -> Value {
        let Self(status, message) = self;
        let kind = match *status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::FORBIDDEN => "ForbiddenError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::TOO_MANY_REQUESTS => "TooManyRequestsError",
            _ => "InternalServerError",
        };
        json!({"error": {"message": message, "type": kind, "param": null, "code": status.as_u16()}})
    }
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        (self.0, Json(self.error())).into_response()
    }
}

async fn generate(
    State(engine): State<Arc<Engine>>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Refusal> {
    let faults = engine.mood.faults();
    hang_or_refuse(faults.hang, faults.refuse).await?;
    let api = Api::of_path(uri.path())
        .filter(|api| matches!(api, Api::ChatCompletions | Api::Completions));
    let api = api.ok_or_else(|| Refusal(StatusCode::NOT_FOUND, "no such endpoint".into()))?;
    let ask = Ask::read(&body).map_err(Refusal::bad)?;
    let keys = keys(&engine, &ask)?;
    let wishes = wishes(&engine, &body)?;
    let asked_rank = engine
        .rank_asked(&headers, wishes.rank())
        .map_err(Refusal::bad)?;
    let vocabulary = engine.tokens.clone();
    let encoded = tokio::task::spawn_blocking(move || vocabulary.prompts(api, &body)).await;
    let prompts = encoded
        .map_err(|error| Refusal::bad(error.to_string()))?
        .map_err(Refusal::bad)?;
    check_length(&engine, &ask, &prompts)?;
    let hand = hand(&engine, &wishes, (prompts.len(), ask.choices()))?;
    let rank = rank_of(&engine, &hand, asked_rank)?;
    engine.mood.accepted();
    if hand.is_prefill()
        && let Some(answered) = trouble_prefills(&engine).await?
    {
        return Ok(answered);
    }

    let model = ask
        .model
        .clone()
        .unwrap_or_else(|| engine.config.model.clone());
    let name = headers
        .get("x-request-id")
        .and_then(|id| id.to_str().ok())
        .map(str::to_owned);
    let name = name.unwrap_or_else(|| engine.next_name());
    let abortable = engine.aborts.enter(wishes.names());
    let answer = Answer::new(
        (api, &ask),
        (model, &name),
        prompts.clone(),
        engine.tokens.clone(),
    );
    let answer = if engine.config.surface.no_prompt_tokens_details {
        answer.silent_on_cache()
    } else {
        answer
    };
    let answer = answer.cached_elsewhere(hand.cached_elsewhere());
    let worst = Worst::default();
    let answer = answer.telling(engine.config.handover.protocol().map(|_| worst.clone()));
    let answer_len = hand.answer_len(engine.config.handover.protocol(), ask.max_tokens());
    let order = Order {
        ask: &ask,
        hand: &hand,
        keys: &keys,
        prompts: &prompts,
        name: answer.id(),
        answer_len,
        worst,
    };
    let on = |at| {
        if let Hand::Host(rooms) = &hand {
            engine.rank_of_room(rooms[at])
        } else {
            rank.clone()
        }
    };
    let choices = choices::start(&engine, &order, on);
    let under_way = UnderWay {
        engine,
        rank: rank.clone(),
        wishes,
        choices,
        abortable,
        answer,
    };
    let mut response = if ask.streams() {
        under_way.stream().await?
    } else {
        under_way.document().await?
    };
    response
        .headers_mut()
        .insert("x-served-dp-rank", HeaderValue::from(rank.number));
    Ok(response)
}

async fn hang_or_refuse(hangs: bool, refuses: Option<u16>) -> Result<(), Refusal> {
    if hangs {
        // Ends when the client gives up.
        std::future::pending::<()>().await;
    }
    match refuses {
        None => Ok(()),
        Some(status) => {
            let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
            Err(Refusal(status, "told to refuse".into()))
        }
    }
}

/// What goes wrong with prefills only; an answer if that is what goes wrong.
async fn trouble_prefills(engine: &Engine) -> Result<Option<Response>, Refusal> {
    count(&engine.counts.prefills);
    let faults = engine.mood.faults();
    hang_or_refuse(faults.hang_prefills, faults.refuse_prefills).await?;
    tokio::time::sleep(Duration::from_millis(faults.slow_prefill_ms)).await;
    let error = faults
        .fail_prefills_with_200
        .then(|| Refusal::failed("told to fail with status 200").error());
    Ok(error.map(|error| Json(error).into_response()))
}

/// The fields about other engines, unless this one has nothing to do with others and does not look.
fn wishes(engine: &Engine, body: &Bytes) -> Result<Wishes, Refusal> {
    if engine.config.handover.protocol().is_none() {
        return Ok(Wishes::default());
    }
    Wishes::read(body).map_err(Refusal::bad)
}

fn hand(engine: &Engine, wishes: &Wishes, count: (usize, usize)) -> Result<Hand, Refusal> {
    let Some(protocol) = engine.config.handover.protocol() else {
        return Ok(Hand::Whole);
    };
    wishes
        .hand(protocol, count)
        .map_err(|problem| match protocol {
            // vLLM fails inside.
            Protocol::Nixl => Refusal::failed(problem),
            _ => Refusal::bad(problem),
        })
}

/// The rank asked for, that of the room, or the next in turn. A room belongs to one rank.
fn rank_of(engine: &Engine, hand: &Hand, asked: Option<Arc<Rank>>) -> Result<Arc<Rank>, Refusal> {
    let Hand::Host(rooms) = hand else {
        return Ok(asked.unwrap_or_else(|| engine.rank_in_turn()));
    };
    for &room in rooms {
        let rank = engine.rank_of_room(room);
        if let Some(asked) = asked.as_ref().filter(|asked| asked.number != rank.number) {
            count(&engine.counts.rooms_mismatched);
            let (asked, rank) = (asked.number, rank.number);
            return Err(Refusal::bad(format!(
                "bootstrap_room {room} is of rank {rank}, not of rank {asked}"
            )));
        }
    }
    Ok(engine.rank_of_room(rooms.first().copied().unwrap_or_default()))
}

/// What separates this request's blocks; refuses a model nobody serves.
pub(crate) fn keys(engine: &Engine, ask: &Ask) -> Result<Keys, Refusal> {
    let lora = match ask.model.as_deref() {
        None => None,
        Some(model) if model == engine.config.model => None,
        Some(model) => Some(engine.lora(model).ok_or_else(|| {
            Refusal(
                StatusCode::NOT_FOUND,
                format!("The model `{model}` does not exist."),
            )
        })?),
    };
    let salt = ask.cache_salt.as_deref().map(Arc::from);
    Ok(Keys {
        lora,
        salt,
        session: ask.session_id.as_deref().map(Arc::from),
    })
}

fn check_length(engine: &Engine, ask: &Ask, prompts: &[Vec<u32>]) -> Result<(), Refusal> {
    let longest = engine.config.capacity.longest();
    for prompt in prompts {
        let (len, wanted) = (prompt.len(), ask.max_tokens());
        if len == 0 {
            return Err(Refusal::bad("The prompt is empty."));
        }
        if wanted > longest || len > longest - wanted {
            let problem = format!(
                "{len} prompt tokens and {wanted} more exceed the context length of {longest}."
            );
            return Err(Refusal::bad(problem));
        }
    }
    Ok(())
}

async fn models(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let base = &engine.config.model;
    let one = |id: &String, parent: Option<&String>| {
        json!({"id": id, "object": "model", "created": 0, "owned_by": "engine_sim", "root": id, "parent": parent,
               "max_model_len": engine.config.capacity.longest()})
    };
    let loras = engine.config.loras.iter().map(|lora| one(lora, Some(base)));
    let models: Vec<_> = std::iter::once(one(base, None)).chain(loras).collect();
    Json(json!({"object": "list", "data": models}))
}

async fn metrics_page(State(engine): State<Arc<Engine>>) -> impl IntoResponse {
    let samples: Vec<_> = engine.ranks.iter().map(|rank| rank.sample()).collect();
    let content = [(
        header::CONTENT_TYPE,
        "text/plain; version=0.0.4; charset=utf-8",
    )];
    let own = metrics::render_own(
        &engine.config.model,
        &samples,
        (&engine.counts, engine.rooms.waiting()),
    );
    (
        content,
        metrics::render(&engine.config.model, &samples) + &own,
    )
}

/// As vLLM, 200 whether or not a busy rank refused; the body tells.
async fn reset(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let ranks: Vec<_> = engine.ranks.iter().map(|rank| rank.reset()).collect();
    Json(json!({"reset": ranks}))
}

async fn event_sources(State(engine): State<Arc<Engine>>) -> Result<Json<Value>, Refusal> {
    if engine.config.surface.no_kv_event_sources {
        return Err(Refusal::new(StatusCode::NOT_FOUND, "Not Found"));
    }
    Ok(Json(engine.publishers()))
}

async fn state(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let ranks: Vec<_> = engine.ranks.iter().map(|rank| rank.state()).collect();
    Json(json!({"id": engine.config.id, "ranks": ranks}))
}

async fn faults(State(engine): State<Arc<Engine>>) -> Json<Value> {
    let mut faults = engine.mood.faults();
    faults.drop_events = engine.ranks.first().map(|rank| rank.publisher.drops());
    Json(json!(faults))
}

async fn misbehave(State(engine): State<Arc<Engine>>, body: Bytes) -> Result<Json<Value>, Refusal> {
    let patch: Value =
        serde_json::from_slice(&body).map_err(|error| Refusal::bad(error.to_string()))?;
    let touches_events = patch.get("drop_events").is_some();
    let faults = engine.mood.change(patch).map_err(Refusal::bad)?;
    if touches_events {
        engine.drop_events(faults.drop_events.unwrap_or_default());
    }
    Ok(Json(json!(faults)))
}

/// Serves until the task is dropped.
pub(crate) async fn serve(
    engine: Arc<Engine>,
    listener: tokio::net::TcpListener,
) -> Result<Infallible, io::Error> {
    axum::serve(listener, router(engine)).await?;
    Err(io::Error::other("the HTTP server ended"))
}
