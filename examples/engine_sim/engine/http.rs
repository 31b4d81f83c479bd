//! The engine's HTTP surface: OpenAI's endpoints, vLLM's operational ones (`render` has those that answer with tokens), and
//! `/sim/*` for tests.

use std::convert::Infallible;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{DefaultBodyLimit, Request, State};
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use futures_util::stream::{self, SelectAll, Stream, StreamExt as _};
use serde_json::{Value, json};
use warmroute::openai::Api;

use super::Engine;
use super::answer::Answer;
use super::ask::Ask;
use super::cache::{Keys, Sequence};
use super::guard;
use super::metrics;
use super::rank::{Rank, Ticket};
use super::render;
use super::scheduler::Output;

/// Headers that tests want to see as the engine saw them.
const ECHOED: [&str; 6] = [
    "x-worker-instance-id",
    "x-dp-rank",
    "x-prefill-instance-id",
    "x-prefill-dp-rank",
    "x-prefiller-host-port",
    "x-envoy-attempt-count",
];

/// How often a first token that is kept back looks whether it may go.
const HELD_LOOK: Duration = Duration::from_millis(5);

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
            Some((HeaderName::try_from(format!("x-received-{}", &name[2..])).ok()?, value))
        })
        .collect();
    let mut response = next.run(request).await;
    response.headers_mut().extend(received);
    response.headers_mut().insert("x-engine-id", HeaderValue::from(engine.config.id));
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

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let Self(status, message) = self;
        let kind = match status {
            StatusCode::BAD_REQUEST => "BadRequestError",
            StatusCode::FORBIDDEN => "ForbiddenError",
            StatusCode::NOT_FOUND => "NotFoundError",
            StatusCode::TOO_MANY_REQUESTS => "TooManyRequestsError",
            _ => "InternalServerError",
        };
        let error = json!({"message": message, "type": kind, "param": null, "code": status.as_u16()});
        (status, Json(json!({"error": error}))).into_response()
    }
}

async fn generate(
    State(engine): State<Arc<Engine>>,
    uri: Uri,
    headers: HeaderMap,
    body: Bytes,
) -> Result<Response, Refusal> {
    let faults = engine.mood.faults();
    if faults.hang {
        // Ends when the client gives up.
        std::future::pending::<()>().await;
    }
    if let Some(status) = faults.refuse {
        let status = StatusCode::from_u16(status).unwrap_or(StatusCode::SERVICE_UNAVAILABLE);
        return Err(Refusal(status, "told to refuse".into()));
    }
    let api = Api::of_path(uri.path()).filter(|api| matches!(api, Api::ChatCompletions | Api::Completions));
    let api = api.ok_or_else(|| Refusal(StatusCode::NOT_FOUND, "no such endpoint".into()))?;
    let ask = Ask::read(&body).map_err(Refusal::bad)?;
    let keys = keys(&engine, &ask)?;
    let rank = engine.rank(&headers).map_err(Refusal::bad)?;
    let vocabulary = engine.tokens.clone();
    let encoded = tokio::task::spawn_blocking(move || vocabulary.prompts(api, &body)).await;
    let prompts = encoded.map_err(|error| Refusal::bad(error.to_string()))?.map_err(Refusal::bad)?;
    check_length(&engine, &ask, &prompts)?;
    engine.mood.accepted();

    let tickets = submit(&engine, &rank, &ask, &keys, &prompts);
    let model = ask.model.clone().unwrap_or_else(|| engine.config.model.clone());
    let name = headers.get("x-request-id").and_then(|id| id.to_str().ok()).map(str::to_owned);
    let name = name.unwrap_or_else(|| engine.next_name());
    let answer = Answer::new((api, &ask), (model, &name), prompts, engine.tokens.clone());
    let answer = if engine.config.surface.no_prompt_tokens_details { answer.silent_on_cache() } else { answer };
    let mut response = if ask.streams() {
        let content = [(header::CONTENT_TYPE, "text/event-stream; charset=utf-8")];
        (content, Body::from_stream(events(engine, tickets, answer))).into_response()
    } else {
        document(&engine, tickets, answer).await.into_response()
    };
    response.headers_mut().insert("x-served-dp-rank", HeaderValue::from(rank.number));
    Ok(response)
}

/// What separates this request's blocks; refuses a model nobody serves.
pub(crate) fn keys(engine: &Engine, ask: &Ask) -> Result<Keys, Refusal> {
    let lora = match ask.model.as_deref() {
        None => None,
        Some(model) if model == engine.config.model => None,
        Some(model) => Some(
            engine
                .lora(model)
                .ok_or_else(|| Refusal(StatusCode::NOT_FOUND, format!("The model `{model}` does not exist.")))?,
        ),
    };
    let salt = ask.cache_salt.as_deref().map(Arc::from);
    Ok(Keys { lora, salt, session: ask.session_id.as_deref().map(Arc::from) })
}

fn check_length(engine: &Engine, ask: &Ask, prompts: &[Vec<u32>]) -> Result<(), Refusal> {
    let longest = engine.config.capacity.longest();
    for prompt in prompts {
        let (len, wanted) = (prompt.len(), ask.max_tokens());
        if len == 0 {
            return Err(Refusal::bad("The prompt is empty."));
        }
        if wanted > longest || len > longest - wanted {
            let problem = format!("{len} prompt tokens and {wanted} more exceed the context length of {longest}.");
            return Err(Refusal::bad(problem));
        }
    }
    Ok(())
}

fn submit(engine: &Engine, rank: &Arc<Rank>, ask: &Ask, keys: &Keys, prompts: &[Vec<u32>]) -> Vec<Ticket> {
    let one = |prompt: &Vec<u32>, choice| {
        let answer = engine.tokens.answer(prompt, choice, ask.max_tokens());
        rank.submit(Sequence::new(prompt.clone(), keys.clone()), answer)
    };
    prompts.iter().flat_map(|prompt| (0..ask.choices()).map(move |choice| one(prompt, choice))).collect()
}

type Outputs = SelectAll<Pin<Box<dyn Stream<Item = (usize, Output)> + Send>>>;

/// The tokens of all choices as they come, each with the place of its choice.
fn outputs(tickets: Vec<Ticket>) -> Outputs {
    let one = |(at, ticket)| {
        let tokens = stream::unfold(ticket, |mut ticket: Ticket| async { Some((ticket.next().await?, ticket)) });
        tokens.map(move |output| (at, output)).boxed()
    };
    stream::select_all(tickets.into_iter().enumerate().map(one))
}

async fn delay_first(engine: &Engine, output: Output) {
    let slow = engine.mood.faults().slow_first_token_ms;
    if output.is_first && slow > 0 {
        tokio::time::sleep(Duration::from_millis(slow)).await;
    }
    while output.is_first && engine.mood.faults().hold_first_tokens {
        tokio::time::sleep(HELD_LOOK).await;
    }
}

async fn document(engine: &Engine, tickets: Vec<Ticket>, mut answer: Answer) -> Json<Value> {
    let mut outputs = outputs(tickets);
    while let Some((at, output)) = outputs.next().await {
        delay_first(engine, output).await;
        answer.note(at, output);
    }
    Json(answer.document())
}

/// The stream of server-sent events. An error in it makes hyper close the connection without the closing chunk, which
/// is how a died engine looks to its client.
fn events(engine: Arc<Engine>, tickets: Vec<Ticket>, answer: Answer) -> impl Stream<Item = io::Result<Bytes>> {
    let cut_after = engine.mood.faults().cut_stream_after_tokens;
    let start = Some((outputs(tickets), answer, 0_u64));
    stream::unfold(start, move |state| {
        let engine = engine.clone();
        async move {
            let (mut outputs, mut answer, sent) = state?;
            if cut_after == Some(sent) {
                return Some((Err(io::Error::other("told to cut the stream")), None));
            }
            let Some((at, output)) = outputs.next().await else {
                return Some((Ok(Bytes::from(answer.closing())), None));
            };
            delay_first(&engine, output).await;
            let chunk = answer.chunk(at, output);
            Some((Ok(Bytes::from(chunk)), Some((outputs, answer, sent + 1))))
        }
    })
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
    let content = [(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")];
    (content, metrics::render(&engine.config.model, &samples))
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
    let patch: Value = serde_json::from_slice(&body).map_err(|error| Refusal::bad(error.to_string()))?;
    let touches_events = patch.get("drop_events").is_some();
    let faults = engine.mood.change(patch).map_err(Refusal::bad)?;
    if touches_events {
        engine.drop_events(faults.drop_events.unwrap_or_default());
    }
    Ok(Json(json!(faults)))
}

/// Serves until the task is dropped.
pub(crate) async fn serve(engine: Arc<Engine>, listener: tokio::net::TcpListener) -> Result<Infallible, io::Error> {
    axum::serve(listener, router(engine)).await?;
    Err(io::Error::other("the HTTP server ended"))
}
