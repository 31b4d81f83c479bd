//! Tokens from engines. The request body is sent to a worker or to a render server, which returns
//! the tokens of the prompt as it would compute them, including images. This costs one call per
//! request, so it is configured per model: always, or only while parity of the local tokens is
//! broken. A slow call is hedged with a second one, a circuit breaker pauses calls to failing
//! servers, and the fallback is the local tokenizer or load-only routing.

mod breaker;
pub mod config;

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream::{FuturesUnordered, StreamExt as _};
use parking_lot::Mutex;
use serde_json::Value;
use serde_json::value::RawValue;
use tokio::sync::Semaphore;
use tracing::debug;

use breaker::CircuitBreaker;
use config::{EngineTokensConfig, EngineTokensTrigger, RenderPath};
use warmroute_core::parity::ParityStatus;
use warmroute_core::router::{Router, SharedCommonSettings};
use warmroute_core::worker::{ModelName, WorkerRank};
use warmroute_engines::engine_client::config::EnginesConfig;
use warmroute_engines::engine_client::{
    EngineClient, EngineError, EngineRendering, EngineUrl, RenderApi, TokenizeResponse,
};
use warmroute_metrics::Metrics;
use warmroute_tokens::openai::{self, ApiKind};

/// Maximum number of servers called for one request.
const MAX_TRIES: usize = 2;

/// Delay after which a second server is called.
const HEDGE_DELAY: Duration = Duration::from_millis(100);

/// Fields that change the prompt and that `/tokenize` ignores.
const UNTOKENIZED_FIELDS: [&str; 6] = [
    "documents",
    "reasoning_effort",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_embeds",
    "kv_transfer_params",
];

/// Field of messages that the chat API renames for the template and `/tokenize` does not.
const UNTOKENIZED_KEY: &[u8] = b"\"reasoning_content\"";

/// Token source of a model.
pub struct TokenSource {
    /// Parity status of the local tokens.
    pub parity: Arc<ParityStatus>,
    /// Client for tokens of engines, if configured.
    pub engine_tokens: Option<Arc<EngineTokensClient>>,
    /// Settings that engines report.
    pub engine_settings: SharedCommonSettings,
}

/// The token sources by model.
pub type TokenSources = HashMap<ModelName, TokenSource>;

/// Result of a query for engine tokens.
#[derive(Default)]
pub(super) enum EngineTokensResult {
    /// No engine was queried.
    #[default]
    NotRequested,
    /// The tokens of the prompts, and the model.
    Tokens(ModelName, Vec<EngineRendering>),
    /// The query failed.
    Failed,
}

/// Client for tokens of engines.
pub struct EngineTokensClient {
    client: EngineClient,
    pub(super) config: EngineTokensConfig,
    engines: EnginesConfig,
    urls: Vec<EngineUrl>,
    router: Arc<Router>,
    pub(super) metrics: Arc<Metrics>,
    breakers: Mutex<HashMap<EngineUrl, CircuitBreaker>>,
    pub(super) next_target: AtomicUsize,
    pub(super) hedge_delay: Duration,
    /// One permit per running request, acquired before its body is parsed.
    pub(super) in_flight: Semaphore,
}

/// One query, which all called servers receive.
#[derive(Clone)]
pub(super) struct RenderQuery {
    pub(super) api: RenderApi,
    pub(super) body: Bytes,
    pub(super) started: Instant,
}

impl EngineTokensClient {
    /// Creates a client for one model, with the connections of `client`.
    pub fn new(
        config: &EngineTokensConfig,
        engines: &EnginesConfig,
        client: &EngineClient,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let token_file = config.token_file.clone().or(engines.token_file.clone());
        // A request calls at most two servers. The second call must not lack a permit.
        let in_flight = config.max_concurrency.saturating_mul(MAX_TRIES as u32);
        Self {
            client: client.with_credentials(token_file, in_flight),
            urls: config
                .urls
                .iter()
                .filter_map(|url| url.parse().ok())
                .collect(),
            config: config.clone(),
            engines: engines.clone(),
            router,
            metrics,
            breakers: Mutex::default(),
            next_target: AtomicUsize::new(0),
            hedge_delay: HEDGE_DELAY,
            in_flight: Semaphore::new(
                (config.max_concurrency as usize).min(Semaphore::MAX_PERMITS),
            ),
        }
    }

    /// Returns whether the configuration requests tokens of engines at this parity status.
    pub(super) fn is_wanted(&self, parity: &ParityStatus) -> bool {
        self.config.mode == EngineTokensTrigger::Always || parity.are_tokens_disabled()
    }

    /// Returns the servers to call, rotated for each request.
    fn targets(&self, model: &ModelName) -> Vec<EngineUrl> {
        let mut targets = self.urls.clone();
        if targets.is_empty() {
            let fleet = self.router.fleet();
            let serving = fleet.workers().filter(|worker| worker.model == *model);
            let usable = serving.filter(|worker| {
                let rank = |rank| WorkerRank {
                    worker: worker.id,
                    rank,
                };
                worker
                    .ranks
                    .iter()
                    .any(|dp| self.router.is_usable(rank(dp)))
            });
            targets.extend(usable.map(|worker| self.engines.url(worker.endpoint)));
            targets.sort_unstable();
        }
        if !targets.is_empty() {
            let first = self.next_target.fetch_add(1, Ordering::Relaxed) % targets.len();
            targets.rotate_left(first);
        }
        let mut breakers = self.breakers.lock();
        if breakers.len() > 2 * targets.len() + 16 {
            breakers.retain(|url, _| targets.contains(url));
        }
        targets
    }

    fn admits(&self, url: &EngineUrl) -> bool {
        let mut breakers = self.breakers.lock();
        breakers
            .entry(url.clone())
            .or_default()
            .admits(Instant::now())
    }

    /// Returns the first usable result.
    pub(super) async fn fetch(
        &self,
        model: &ModelName,
        query: RenderQuery,
    ) -> Result<Vec<EngineRendering>, &'static str> {
        let mut targets = self.targets(model).into_iter();
        let mut next = || targets.by_ref().find(|url| self.admits(url));
        let mut calls = FuturesUnordered::new();
        calls.push(self.call(next().ok_or("no_engine")?, query.clone()));
        let mut tries = 1;
        let hedge = tokio::time::sleep(self.hedge_delay);
        tokio::pin!(hedge);
        let mut is_hedge_pending = true;
        loop {
            let failure = tokio::select! {
                result = calls.next() => match result {
                    Some(Ok(rendered)) => return Ok(rendered),
                    Some(Err(error)) if error.is_rejection() => return Err("refused"),
                    Some(Err(error)) => {
                        debug!(%model, %error, "engine tokens failed");
                        Some(error.label())
                    }
                    None => return Err("no_engine"),
                },
                () = &mut hedge, if is_hedge_pending => None,
            };
            is_hedge_pending = is_hedge_pending && failure.is_some();
            let is_late = query.started.elapsed() >= self.config.timeout.get();
            let another = if tries < MAX_TRIES && !is_late {
                next()
            } else {
                None
            };
            match (another, failure) {
                (Some(url), _) => {
                    tries += 1;
                    calls.push(self.call(url, query.clone()));
                }
                (None, Some(label)) if calls.is_empty() => return Err(label),
                _ => {}
            }
        }
    }

    async fn call(
        &self,
        url: EngineUrl,
        query: RenderQuery,
    ) -> Result<Vec<EngineRendering>, EngineError> {
        let remaining = self
            .config
            .timeout
            .get()
            .saturating_sub(query.started.elapsed());
        let call = RenderCall {
            client: self,
            url: url.clone(),
            started: Some(Instant::now()),
        };
        let result = match self.config.endpoint {
            RenderPath::Render => {
                self.client
                    .render(&url, query.api, query.body, remaining)
                    .await
            }
            RenderPath::Tokenize => {
                let tokenized = self.client.tokenize(&url, query.body, remaining).await;
                tokenized.map(|TokenizeResponse { tokens, .. }| {
                    vec![EngineRendering {
                        token_ids: tokens,
                        objects: vec![],
                    }]
                })
            }
        };
        call.finish();
        let mut breakers = self.breakers.lock();
        let breaker = breakers.entry(url).or_default();
        match &result {
            // The server did not cause the failure.
            Err(EngineError::Busy | EngineError::Client(_)) => {}
            Err(error) if !error.is_rejection() => {
                breaker.record_failure(Instant::now());
            }
            _ => breaker.record_success(),
        }
        drop(breakers);
        result
    }

    /// Returns the body of the query; `None` if the result would differ from the prompt.
    pub(super) fn render_query(&self, api: ApiKind, body: &Bytes) -> Option<(RenderApi, Bytes)> {
        let render = match api {
            ApiKind::ChatCompletions => RenderApi::Chat,
            ApiKind::Completions => RenderApi::Completions,
            ApiKind::Responses => RenderApi::Responses,
            ApiKind::Messages => RenderApi::Messages,
            _ => return None,
        };
        // Such bodies are not tokenized, so the engine need not render them.
        if openai::exceeds_value_limit(api, body) {
            return None;
        }
        match self.config.endpoint {
            // Without this field, the response contains every pixel.
            RenderPath::Render => Some((
                render,
                openai::json_edit::set_field(body, "mm_payload", b"\"none\"")?.into(),
            )),
            RenderPath::Tokenize => {
                let keys: BTreeMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
                let is_covered = !UNTOKENIZED_FIELDS.iter().any(|key| keys.contains_key(*key))
                    && !refuses_tools(&keys)
                    && memchr::memmem::find(body, UNTOKENIZED_KEY).is_none();
                let is_supported = matches!(render, RenderApi::Chat | RenderApi::Completions);
                (is_supported && is_covered).then(|| (render, body.clone()))
            }
        }
    }
}

/// Returns whether tools are offered while `tool_choice` is `none`. Engines with
/// `--exclude-tools-when-tool-choice-none` then omit them from the prompt, but `/tokenize` does
/// not.
fn refuses_tools(keys: &BTreeMap<String, &RawValue>) -> bool {
    let value_of = |key: &str| {
        keys.get(key)
            .and_then(|raw| serde_json::from_str::<Value>(raw.get()).ok())
    };
    value_of("tool_choice").is_some_and(|choice| choice == "none")
        && value_of("tools")
            .is_some_and(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()))
}

/// One running call. If it is dropped without a result after the hedge delay, it counts as failed.
/// Otherwise, the breaker of a hanging server would never open.
struct RenderCall<'a> {
    client: &'a EngineTokensClient,
    url: EngineUrl,
    started: Option<Instant>,
}

impl RenderCall<'_> {
    fn finish(mut self) {
        self.started = None;
    }
}

impl Drop for RenderCall<'_> {
    fn drop(&mut self) {
        let is_slow = |since: Instant| since.elapsed() >= self.client.hedge_delay;
        if self.started.is_some_and(is_slow) {
            let mut breakers = self.client.breakers.lock();
            let breaker = breakers.entry(self.url.clone()).or_default();
            breaker.record_failure(Instant::now());
        }
    }
}
