//! HTTP client for facts that only engines know: the tokens of a request, the block size and the
//! event sources. All engines share one connection pool. Calls compete with the engine's work, so
//! their duration, response size and number are limited. Responses are not trusted.

mod bearer;
mod body;
mod completion;
pub mod config;
mod connections;
mod error;
mod load_gauges;
mod metrics;
mod responses;
mod url;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use reqwest::header::{AUTHORIZATION, CONTENT_TYPE, HeaderMap, HeaderValue};
use reqwest::{Body, Client, Response};
use serde::de::DeserializeOwned;
use tokio::sync::Semaphore;
use warmroute_settings::{MAX_SECRET_FILE, read_regular_file};

use bearer::BearerToken;
use body::{check_status, parse_json, read_body};
use config::EnginesConfig;
use connections::is_stale_connection;

pub(crate) use body::read_limited;
pub use completion::CompletionUsage;
pub use error::EngineError;
pub use load_gauges::{EngineGauges, MetricsPath, RankGauges};
pub use metrics::{CacheConfig, MetricSample, MetricsPage, cache_settings};
pub use responses::{
    EngineModel, EngineRendering, RankEventSource, RenderedObject, TokenizeResponse,
};
pub use url::EngineUrl;

/// Responses with more bytes are parsed on a blocking thread.
const LARGE_ANSWER: usize = 64 << 10;

/// Content type of all requests.
const JSON: HeaderValue = HeaderValue::from_static("application/json");

/// API whose requests an engine renders.
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

/// Client of all engines. Clones share one pool.
#[derive(Clone, Debug)]
pub struct EngineClient {
    shared: Arc<EngineClientInner>,
}

#[derive(Clone, Debug)]
struct EngineClientInner {
    client: Client,
    bearer: Option<Arc<BearerToken>>,
    max_response: usize,
    permits: Arc<Semaphore>,
    deadline: Duration,
    /// Additional headers of each request.
    headers: HeaderMap,
    /// Configuration that the client was created from.
    config: EnginesConfig,
    ca_bundle: Option<Vec<u8>>,
}

/// One call.
struct EngineCall<'a> {
    engine: &'a EngineUrl,
    path: &'a str,
    /// Body of a `POST`. Without one, the call is a `GET`.
    body: Option<Bytes>,
    /// Credentials of the client's request, used if the configuration has none.
    credentials: Option<HeaderValue>,
    deadline: Duration,
}

/// A client's request that is forwarded with its headers.
pub struct ForwardedRequest<'a> {
    /// Engine that receives it.
    pub engine: &'a EngineUrl,
    /// Path below the engine's address, with the query.
    pub path: &'a str,
    /// Headers. The configured credentials are added only if there are none and the configuration
    /// allows it.
    pub headers: HeaderMap,
    /// JSON body.
    pub body: Body,
    /// Second body for one retry, if the request may be repeated.
    pub retry_body: Option<Body>,
    /// Maximum duration.
    pub deadline: Duration,
}

/// Clients are equal if they share their connections and settings.
impl PartialEq for EngineClient {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

impl EngineClient {
    /// Creates a client. It connects on the first call.
    pub fn new(config: &EnginesConfig) -> Result<Self, EngineError> {
        Self::build(config, read_ca_file(config)?)
    }

    /// Returns a client for another configuration, or this one if neither the configuration nor the
    /// CA file has changed.
    pub fn with_config(&self, config: &EnginesConfig) -> Result<Self, EngineError> {
        let authorities = read_ca_file(config)?;
        if self.shared.config == *config && self.shared.ca_bundle == authorities {
            Ok(self.clone())
        } else {
            Self::build(config, authorities)
        }
    }

    /// Returns a client that shares the connections, with another token and another limit of
    /// concurrent calls.
    #[must_use]
    pub fn with_credentials(&self, token_file: Option<PathBuf>, in_flight: u32) -> Self {
        let config = EnginesConfig {
            token_file,
            max_concurrency: in_flight,
            ..self.shared.config.clone()
        };
        let shared = EngineClientInner {
            bearer: bearer(&config),
            permits: permits(&config),
            config,
            ..(*self.shared).clone()
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    /// Returns a client that shares everything, and adds these headers to each request.
    #[must_use]
    pub fn with_headers(&self, headers: HeaderMap) -> Self {
        let shared = EngineClientInner {
            headers,
            ..(*self.shared).clone()
        };
        Self {
            shared: Arc::new(shared),
        }
    }

    fn build(config: &EnginesConfig, authorities: Option<Vec<u8>>) -> Result<Self, EngineError> {
        let shared = EngineClientInner {
            client: connections::build_pool(config, authorities.as_deref())?,
            bearer: bearer(config),
            headers: HeaderMap::new(),
            max_response: config.max_response_size.bytes(),
            permits: permits(config),
            deadline: config.timeout.get(),
            config: config.clone(),
            ca_bundle: authorities,
        };
        Ok(Self {
            shared: Arc::new(shared),
        })
    }

    /// Returns the default maximum duration of a call.
    pub fn deadline(&self) -> Duration {
        self.shared.deadline
    }

    /// Tokenizes a conversation or a text with `POST /tokenize`. The engine ignores
    /// `truncate_prompt_tokens`. Of a conversation, it uses only the messages, the tools and the
    /// template settings.
    pub async fn tokenize(
        &self,
        engine: &EngineUrl,
        body: Bytes,
        deadline: Duration,
    ) -> Result<TokenizeResponse, EngineError> {
        self.post(engine, "tokenize", body, deadline).await
    }

    /// Renders a request to the tokens that the engine would compute, with `POST /v1/…/render` and
    /// the request as its body. Returns one rendering per prompt.
    pub async fn render(
        &self,
        engine: &EngineUrl,
        api: RenderApi,
        body: Bytes,
        deadline: Duration,
    ) -> Result<Vec<EngineRendering>, EngineError> {
        self.post::<responses::RenderResponse>(engine, api.path(), body, deadline)
            .await?
            .into_renderings()
    }

    /// Returns the models that the engine serves, from `GET /v1/models`.
    pub async fn models(&self, engine: &EngineUrl) -> Result<Vec<EngineModel>, EngineError> {
        Ok(self
            .get::<responses::ModelList>(engine, "v1/models")
            .await?
            .data)
    }

    /// Returns the engine version, from `GET /version`.
    pub async fn version(&self, engine: &EngineUrl) -> Result<String, EngineError> {
        Ok(self
            .get::<responses::VersionResponse>(engine, "version")
            .await?
            .version)
    }

    /// Returns the metrics page, from `GET /metrics`.
    pub async fn metrics(&self, engine: &EngineUrl) -> Result<MetricsPage, EngineError> {
        let page = |page: &[u8]| {
            let text = std::str::from_utf8(page)
                .map_err(|_| EngineError::Unreadable("the page is not UTF-8"))?;
            Ok(MetricsPage::parse(text))
        };
        self.call(&self.get_call(engine, "metrics"), page).await
    }

    /// Returns the event sources of the ranks, from `GET /kv_event_sources`, sorted by rank.
    pub async fn kv_event_sources(
        &self,
        engine: &EngineUrl,
    ) -> Result<Vec<RankEventSource>, EngineError> {
        self.get::<responses::EventSourcesResponse>(engine, "kv_event_sources")
            .await?
            .into_sources()
    }

    /// Calls the health check, `GET /health`.
    pub async fn health(&self, engine: &EngineUrl) -> Result<(), EngineError> {
        self.call(&self.get_call(engine, "health"), |_| Ok(()))
            .await
    }

    /// Sends a `POST` to a path below the engine's address and parses the JSON response.
    pub async fn post<T: DeserializeOwned + Send + 'static>(
        &self,
        engine: &EngineUrl,
        path: &str,
        body: Bytes,
        deadline: Duration,
    ) -> Result<T, EngineError> {
        let call = EngineCall {
            body: Some(body),
            deadline,
            ..self.get_call(engine, path)
        };
        self.call(&call, parse_json).await
    }

    /// Sends a `POST` to a path below the engine's address and ignores the response. `credentials`
    /// are used if the configuration has none.
    pub async fn notify(
        &self,
        engine: &EngineUrl,
        path: &str,
        body: Bytes,
        credentials: Option<HeaderValue>,
    ) -> Result<(), EngineError> {
        let call = EngineCall {
            body: Some(body),
            credentials,
            ..self.get_call(engine, path)
        };
        self.call(&call, |_| Ok(())).await
    }

    /// Sends a `GET` to a path below the engine's address and parses the JSON response.
    pub async fn get<T: DeserializeOwned + Send + 'static>(
        &self,
        engine: &EngineUrl,
        path: &str,
    ) -> Result<T, EngineError> {
        self.call(&self.get_call(engine, path), parse_json).await
    }

    /// Forwards a request and returns the response body.
    pub async fn forward(&self, forwarded: ForwardedRequest<'_>) -> Result<Bytes, EngineError> {
        let ForwardedRequest {
            engine,
            path,
            mut headers,
            body,
            retry_body,
            deadline,
        } = forwarded;
        let shared = &self.shared;
        let call_future = async {
            let (path, query) = path
                .split_once('?')
                .map_or((path, None), |(path, query)| (path, Some(query)));
            let mut url = engine.join(path.trim_start_matches('/'));
            url.set_query(query);
            if shared.config.forward_token
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
            let response = match (send(body).await, retry_body) {
                (Err(error), Some(retry_body)) if is_stale_connection(&error, sent) => {
                    send(retry_body).await
                }
                (response, _) => response,
            };
            shared.read_response(response).await
        };
        let _permit = shared
            .permits
            .try_acquire()
            .map_err(|_| EngineError::Busy)?;
        tokio::time::timeout(deadline, call_future)
            .await
            .map_err(|_| EngineError::Timeout)?
            .map(Bytes::from)
    }

    fn get_call<'a>(&self, engine: &'a EngineUrl, path: &'a str) -> EngineCall<'a> {
        EngineCall {
            engine,
            path,
            body: None,
            credentials: None,
            deadline: self.shared.deadline,
        }
    }

    /// Makes a call. Large responses are parsed on a blocking thread.
    async fn call<T: Send + 'static>(
        &self,
        call: &EngineCall<'_>,
        parse: impl FnOnce(&[u8]) -> Result<T, EngineError> + Send + 'static,
    ) -> Result<T, EngineError> {
        let permit = self
            .shared
            .permits
            .clone()
            .try_acquire_owned()
            .map_err(|_| EngineError::Busy)?;
        let call_future = async {
            let body = match self.shared.send_call(call).await {
                // The token file may have changed since it was read.
                Err(error) if error.is_unauthorized() && self.shared.reload_token().await => {
                    self.shared.send_call(call).await?
                }
                response => response?,
            };
            if body.len() <= LARGE_ANSWER {
                return parse(&body);
            }
            let reading = move || {
                // The parsing thread holds the permit, because the deadline does not stop the
                // thread.
                let _permit = permit;
                parse(&body)
            };
            tokio::task::spawn_blocking(reading)
                .await
                .unwrap_or(Err(EngineError::Unreadable("the parser panicked")))
        };
        tokio::time::timeout(call.deadline, call_future)
            .await
            .map_err(|_| EngineError::Timeout)?
    }
}

fn bearer(config: &EnginesConfig) -> Option<Arc<BearerToken>> {
    let file = config.token_file.clone()?;
    Some(Arc::new(BearerToken::new(file)))
}

fn permits(config: &EnginesConfig) -> Arc<Semaphore> {
    Arc::new(Semaphore::new(
        (config.max_concurrency as usize).min(Semaphore::MAX_PERMITS),
    ))
}

/// Reads the CA file, if one is configured.
fn read_ca_file(config: &EnginesConfig) -> Result<Option<Vec<u8>>, EngineError> {
    let read = |path: &PathBuf| {
        read_regular_file(path, MAX_SECRET_FILE)
            .map_err(|error| EngineError::Client(format!("{}: {error}", path.display())))
    };
    config.ca_file.as_ref().map(read).transpose()
}

impl EngineClientInner {
    async fn reload_token(&self) -> bool {
        match &self.bearer {
            Some(bearer) => bearer.reload().await,
            None => false,
        }
    }

    async fn token(&self) -> Option<HeaderValue> {
        match &self.bearer {
            Some(bearer) => bearer.header().await,
            None => None,
        }
    }

    async fn send_call(&self, call: &EngineCall<'_>) -> Result<Vec<u8>, EngineError> {
        let url = call.engine.join(call.path);
        let mut request = match &call.body {
            Some(body) => self.client.post(url).body(body.clone()),
            None => self.client.get(url),
        };
        request = request.headers(self.headers.clone());
        if let Some(value) = self.token().await.or_else(|| call.credentials.clone()) {
            request = request.header(AUTHORIZATION, value);
        }
        if call.body.is_some() {
            request = request.header(CONTENT_TYPE, JSON);
        }
        let sent = Instant::now();
        let retry = request.try_clone();
        let response = match (request.send().await, retry) {
            // All calls of this client are idempotent.
            (Err(error), Some(retry)) if is_stale_connection(&error, sent) => retry.send().await,
            (response, _) => response,
        };
        self.read_response(response).await
    }

    async fn read_response(
        &self,
        response: reqwest::Result<Response>,
    ) -> Result<Vec<u8>, EngineError> {
        read_body(check_status(response).await?, self.max_response).await
    }
}

#[cfg(test)]
mod tests;
