//! Asks engines over HTTP what only they know for certain: which tokens a request becomes, how large their blocks are, where
//! their events come from. One pool of connections for all of them. An engine is asked beside its work, so every call is
//! bounded in time, in the size of its answer, and in number; and what comes back is looked at as if a stranger had sent it.

mod answers;
mod bearer;
mod canary;
pub mod config;
mod connections;
mod metrics;
mod url;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Body, Client, Method, Response, StatusCode};
use serde::de::DeserializeOwned;
use thiserror::Error;
use tokio::sync::Semaphore;

use bearer::Bearer;
use config::EnginesConfig;
use connections::was_closing;

pub use answers::{EngineModel, EventsOfRank, Rendered, RenderedObject, Tokenized};
pub use canary::Usage;
pub use metrics::{CacheConfig, MetricsPage, Sample};
pub use url::EngineUrl;

/// Most bytes of a refusal that are read.
const REFUSAL: usize = 4096;

/// Most characters of a refusal that are kept.
const MESSAGE: usize = 300;

/// Answers of more bytes are read beside the async threads.
const LARGE: usize = 64 << 10;

/// What engines are told in.
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// Which requests an engine is asked to render.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RenderApi {
    /// `/v1/chat/completions`
    Chat,
    /// `/v1/completions`
    Completions,
    /// `/v1/responses`
    Responses,
    /// `/v1/messages`
    Messages,
}

impl RenderApi {
    fn path(self) -> &'static str {
        match self {
            RenderApi::Chat => "v1/chat/completions/render",
            RenderApi::Completions => "v1/completions/render",
            RenderApi::Responses => "v1/responses/render",
            RenderApi::Messages => "v1/messages/render",
        }
    }
}

/// Why an engine's answer is not there.
#[derive(Clone, Debug, Error)]
pub enum EngineError {
    /// The client could not be made.
    #[error("the client could not be made: {0}")]
    Client(String),
    /// As many calls are under way as are allowed.
    #[error("too many calls to engines under way")]
    Busy,
    /// Nobody there, or the connection broke.
    #[error("the connection failed: {0}")]
    Unreachable(String),
    /// No whole answer in time.
    #[error("no answer within the deadline")]
    Timeout,
    /// The engine has no such endpoint, or was started without it: 403, 404, 405 and 501.
    #[error("the engine does not offer this (status {0})")]
    NotOffered(u16),
    /// Another status than 200.
    #[error("status {status}")]
    Status {
        /// The status.
        status: u16,
        /// What the engine says. It may quote the request: only of requests of our own may this be shown.
        message: Option<Arc<str>>,
    },
    /// An answer of another form than engines give.
    #[error("the answer cannot be read: {0}")]
    Unreadable(&'static str),
    /// A longer answer than is allowed.
    #[error("the answer is longer than {0} bytes")]
    TooLarge(usize),
}

impl EngineError {
    /// The reason, as named in metrics.
    pub fn label(&self) -> &'static str {
        match self {
            EngineError::Client(_) => "client",
            EngineError::Busy => "busy",
            EngineError::Unreachable(_) => "unreachable",
            EngineError::Timeout => "timeout",
            EngineError::NotOffered(_) => "not_offered",
            EngineError::Status { .. } => "status",
            EngineError::Unreadable(_) => "unreadable",
            EngineError::TooLarge(_) => "too_large",
        }
    }

    /// Whether the engine read the request and found it wrong, so that it would be refused elsewhere, too.
    pub fn is_refusal(&self) -> bool {
        matches!(
            self,
            EngineError::Status {
                status: 400 | 404 | 413 | 422,
                ..
            }
        )
    }

    /// Whether the next try may well go better: the engine is starting, or has much to do.
    pub fn passes(&self) -> bool {
        matches!(
            self,
            EngineError::Busy | EngineError::Timeout | EngineError::Unreachable(_)
        )
    }

    /// Whether the engine wants credentials that it did not get.
    pub fn is_denied(&self) -> bool {
        matches!(self, EngineError::Status { status: 401, .. })
    }
}

/// The way to engines; clones share one pool.
#[derive(Clone, Debug)]
pub struct EngineClient {
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    client: Client,
    bearer: Option<Bearer>,
    longest: usize,
    permits: Arc<Semaphore>,
    deadline: Duration,
    /// What it was made from.
    config: EnginesConfig,
    authorities: Option<Vec<u8>>,
}

/// One question.
struct Call<'a> {
    method: Method,
    engine: &'a EngineUrl,
    path: &'a str,
    body: Option<Bytes>,
    /// Somebody else's, where we have none of our own.
    credentials: Option<HeaderValue>,
    deadline: Duration,
}

/// Somebody else's question, passed on with its headers.
pub struct Forwarded<'a> {
    /// To whom.
    pub engine: &'a EngineUrl,
    /// The path below the engine's address, with its query.
    pub path: &'a str,
    /// Its headers. Our own credentials are lent to one that brings none only where the configuration says so.
    pub headers: HeaderMap,
    /// JSON.
    pub body: Body,
    /// The same once more, where it does no harm if an engine gets it twice.
    pub again: Option<Body>,
    /// How long it may take.
    pub deadline: Duration,
}

impl EngineClient {
    /// A client; it connects with the first call.
    pub fn new(config: &EnginesConfig) -> Result<Self, EngineError> {
        Self::made(config, authorities(config)?)
    }

    /// The client of another configuration: this one, if that says the same, and so do its authorities.
    pub fn renewed(&self, config: &EnginesConfig) -> Result<Self, EngineError> {
        let authorities = authorities(config)?;
        match self.shared.config == *config && self.shared.authorities == authorities {
            true => Ok(self.clone()),
            false => Self::made(config, authorities),
        }
    }

    /// Whether both are one.
    pub fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }

    /// The same connections with another token, and other calls at once.
    #[must_use]
    pub fn apart(&self, token_file: Option<PathBuf>, in_flight: u32) -> Self {
        let Shared {
            client,
            longest,
            deadline,
            authorities,
            ..
        } = &*self.shared;
        let config = EnginesConfig {
            token_file,
            in_flight,
            ..self.shared.config.clone()
        };
        let shared = Shared {
            client: client.clone(),
            bearer: config.token_file.clone().map(Bearer::new),
            longest: *longest,
            permits: permits(&config),
            deadline: *deadline,
            authorities: authorities.clone(),
            config,
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn made(config: &EnginesConfig, authorities: Option<Vec<u8>>) -> Result<Self, EngineError> {
        let shared = Shared {
            client: connections::pool(config, authorities.as_deref())?,
            bearer: config.token_file.clone().map(Bearer::new),
            longest: config.answer.bytes(),
            permits: permits(config),
            deadline: config.deadline.get(),
            config: config.clone(),
            authorities,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// How long a call takes at most where nothing else is said.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// The tokens of a conversation or of one text: `POST /tokenize`. It ignores `truncate_prompt_tokens`, and of a
    /// conversation everything that is not messages, tools or a setting of the template.
    pub async fn tokenize(
        &self,
        engine: &EngineUrl,
        body: Bytes,
        deadline: Duration,
    ) -> Result<Tokenized, EngineError> {
        self.post(engine, "tokenize", body, deadline).await
    }

    /// The tokens of a request as the engine would compute it: `POST /v1/…/render` with the request itself, one answer per
    /// prompt.
    pub async fn render(
        &self,
        engine: &EngineUrl,
        api: RenderApi,
        body: Bytes,
        deadline: Duration,
    ) -> Result<Vec<Rendered>, EngineError> {
        self.post::<answers::Renderings>(engine, api.path(), body, deadline)
            .await?
            .read()
    }

    /// What it serves: `GET /v1/models`.
    pub async fn models(&self, engine: &EngineUrl) -> Result<Vec<EngineModel>, EngineError> {
        Ok(self
            .get::<answers::ModelList>(engine, "v1/models")
            .await?
            .data)
    }

    /// Its version: `GET /version`.
    pub async fn version(&self, engine: &EngineUrl) -> Result<String, EngineError> {
        Ok(self
            .get::<answers::Version>(engine, "version")
            .await?
            .version)
    }

    /// Its measures: `GET /metrics`.
    pub async fn metrics(&self, engine: &EngineUrl) -> Result<MetricsPage, EngineError> {
        let page = |page: &[u8]| {
            let text = std::str::from_utf8(page)
                .map_err(|_| EngineError::Unreadable("the page is not UTF-8"))?;
            Ok(MetricsPage::read(text))
        };
        self.ask(&self.question(engine, "metrics"), page).await
    }

    /// Where its ranks publish their KV events: `GET /kv_event_sources`, in the order of the ranks.
    pub async fn kv_event_sources(
        &self,
        engine: &EngineUrl,
    ) -> Result<Vec<EventsOfRank>, EngineError> {
        self.get::<answers::EventSources>(engine, "kv_event_sources")
            .await?
            .read()
    }

    /// Whether it says that it is well: `GET /health`.
    pub async fn health(&self, engine: &EngineUrl) -> Result<(), EngineError> {
        self.ask(&self.question(engine, "health"), |_| Ok(())).await
    }

    /// Any other question whose answer is JSON: `POST` to a path below the engine's address.
    pub async fn post<T: DeserializeOwned + Send + 'static>(
        &self,
        engine: &EngineUrl,
        path: &str,
        body: Bytes,
        deadline: Duration,
    ) -> Result<T, EngineError> {
        let call = Call {
            method: Method::POST,
            engine,
            path,
            body: Some(body),
            credentials: None,
            deadline,
        };
        self.ask(&call, read).await
    }

    /// Tells an engine something whose answer says nothing: `POST` to a path below its address, with somebody else's
    /// credentials where we have none of our own.
    pub async fn tell(
        &self,
        engine: &EngineUrl,
        path: &str,
        body: Bytes,
        credentials: Option<HeaderValue>,
    ) -> Result<(), EngineError> {
        let deadline = self.shared.deadline;
        let call = Call {
            method: Method::POST,
            engine,
            path,
            body: Some(body),
            credentials,
            deadline,
        };
        self.ask(&call, |_| Ok(())).await
    }

    /// Any other question whose answer is JSON: `GET` of a path below the engine's address.
    pub async fn get<T: DeserializeOwned + Send + 'static>(
        &self,
        engine: &EngineUrl,
        path: &str,
    ) -> Result<T, EngineError> {
        self.ask(&self.question(engine, path), read).await
    }

    /// Passes a request on, and reads the answer.
    pub async fn forward(&self, forwarded: Forwarded<'_>) -> Result<Bytes, EngineError> {
        let Forwarded {
            engine,
            path,
            mut headers,
            body,
            again,
            deadline,
        } = forwarded;
        let shared = &self.shared;
        let asking = async {
            let (path, query) = path
                .split_once('?')
                .map_or((path, None), |(path, query)| (path, Some(query)));
            let mut url = engine.join(path.trim_start_matches('/'));
            url.set_query(query);
            if shared.config.lend_token
                && !headers.contains_key(AUTHORIZATION)
                && let Some(value) = shared.token().await
            {
                headers.insert(AUTHORIZATION, value);
            }
            headers.insert(CONTENT_TYPE, JSON);
            let send = |body| {
                shared
                    .client
                    .post(url.clone())
                    .headers(headers.clone())
                    .body(body)
                    .send()
            };
            let sent = Instant::now();
            let answered = match (send(body).await, again) {
                (Err(error), Some(again)) if was_closing(&error, sent) => send(again).await,
                (answered, _) => answered,
            };
            shared.answer(answered).await
        };
        let _permit = shared
            .permits
            .try_acquire()
            .map_err(|_| EngineError::Busy)?;
        tokio::time::timeout(deadline, asking)
            .await
            .map_err(|_| EngineError::Timeout)?
            .map(Bytes::from)
    }

    fn question<'a>(&self, engine: &'a EngineUrl, path: &'a str) -> Call<'a> {
        Call {
            method: Method::GET,
            engine,
            path,
            body: None,
            credentials: None,
            deadline: self.shared.deadline,
        }
    }

    /// Asks, and reads the answer, which may be long and takes its time then.
    async fn ask<T: Send + 'static>(
        &self,
        call: &Call<'_>,
        read: impl FnOnce(&[u8]) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let permit = self
            .shared
            .permits
            .clone()
            .try_acquire_owned()
            .map_err(|_| EngineError::Busy)?;
        let asking = async {
            let body = match self.shared.exchange(call).await {
                // Its file may have changed since it was looked at.
                Err(error) if error.is_denied() && self.shared.has_news().await => {
                    self.shared.exchange(call).await?
                }
                answered => answered?,
            };
            if body.len() <= LARGE {
                return read(&body);
            }
            let reading = move || {
                // Held until the work is done: a deadline does not stop it.
                let _permit = permit;
                read(&body)
            };
            tokio::task::spawn_blocking(reading)
                .await
                .unwrap_or(Err(EngineError::Unreadable("its reader failed")))
        };
        tokio::time::timeout(call.deadline, asking)
            .await
            .map_err(|_| EngineError::Timeout)?
    }
}

fn permits(config: &EnginesConfig) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(
        (config.in_flight as usize).min(Semaphore::MAX_PERMITS),
    ))
}

/// Who may vouch for engines, where that is configured.
fn authorities(config: &EnginesConfig) -> Result<Option<Vec<u8>>, EngineError> {
    let read = |path: &PathBuf| {
        std::fs::read(path)
            .map_err(|error| EngineError::Client(format!("{}: {error}", path.display())))
    };
    config.ca_file.as_ref().map(read).transpose()
}

impl Shared {
    async fn has_news(&self) -> bool {
        match &self.bearer {
            Some(bearer) => bearer.read_again().await,
            None => false,
        }
    }

    async fn token(&self) -> Option<HeaderValue> {
        match &self.bearer {
            Some(bearer) => bearer.header().await,
            None => None,
        }
    }

    async fn exchange(&self, call: &Call<'_>) -> Result<Vec<u8>, EngineError> {
        let mut request = self
            .client
            .request(call.method.clone(), call.engine.join(call.path));
        if let Some(value) = self.token().await.or_else(|| call.credentials.clone()) {
            request = request.header(AUTHORIZATION, value);
        }
        if let Some(body) = &call.body {
            request = request.header(CONTENT_TYPE, JSON).body(body.clone());
        }
        let (sent, again) = (Instant::now(), request.try_clone());
        let answered = match (request.send().await, again) {
            // No question of ours changes anything that it would not change once.
            (Err(error), Some(again)) if was_closing(&error, sent) => again.send().await,
            (answered, _) => answered,
        };
        self.answer(answered).await
    }

    async fn answer(&self, response: reqwest::Result<Response>) -> Result<Vec<u8>, EngineError> {
        let response = response.map_err(|error| broken(&error))?;
        match response.status() {
            StatusCode::OK => body(response, self.longest).await,
            status => Err(refused(status, &beginning(response).await)),
        }
    }
}

async fn body(mut response: Response, longest: usize) -> Result<Vec<u8>, EngineError> {
    let mut body = Vec::new();
    while let Some(chunk) = response.chunk().await.map_err(|error| broken(&error))? {
        if body.len() + chunk.len() > longest {
            return Err(EngineError::TooLarge(longest));
        }
        body.extend_from_slice(&chunk);
    }
    Ok(body)
}

/// The beginning of a refusal, as far as it comes.
async fn beginning(mut response: Response) -> Vec<u8> {
    let mut text = Vec::new();
    while let Ok(Some(chunk)) = response.chunk().await {
        text.extend_from_slice(&chunk[..chunk.len().min(REFUSAL - text.len())]);
        if text.len() == REFUSAL {
            break;
        }
    }
    text
}

fn refused(status: StatusCode, text: &[u8]) -> EngineError {
    let message = answers::message(text);
    let message = message.map(|text| text.chars().take(MESSAGE).collect::<String>().into());
    let code = status.as_u16();
    match code {
        // Engines say this of models and adapters, at endpoints that they do have.
        404 if message
            .as_ref()
            .is_some_and(|text: &Arc<str>| text.contains("does not exist")) =>
        {
            EngineError::Status {
                status: code,
                message,
            }
        }
        403 | 404 | 405 | 501 => EngineError::NotOffered(code),
        _ => EngineError::Status {
            status: code,
            message,
        },
    }
}

fn read<T: DeserializeOwned>(body: &[u8]) -> Result<T, EngineError> {
    // Not what serde says of it: that quotes what was sent.
    serde_json::from_slice(body)
        .map_err(|_| EngineError::Unreadable("not the JSON that was expected"))
}

fn broken(problem: &reqwest::Error) -> EngineError {
    // Who lets nobody in is not there, however long that takes to show.
    let late = problem.is_timeout() && !problem.is_connect();
    if late {
        EngineError::Timeout
    } else {
        EngineError::Unreachable(told(problem))
    }
}

/// With its causes: the outermost says only that sending failed.
fn told(problem: &reqwest::Error) -> String {
    let mut text = problem.to_string();
    let mut cause = std::error::Error::source(problem);
    while let Some(next) = cause {
        text = format!("{text}: {next}");
        cause = next.source();
    }
    text
}

#[cfg(test)]
mod tests;
