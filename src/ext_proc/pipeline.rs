//! From a request as Envoy shows it to a routing question and its answer: parse, render, tokenise, hash, route. Small
//! prompts are encoded where they arrive; large ones on the blocking pool behind a bounded queue, with a deadline. Every
//! failure on the way is one step down the ladder, counted, and never an error for the client.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

use super::config::LimitsConfig;
use super::exchange::{Inbound, InboundBody};
use crate::block::{BlockHashes, Salt};
use crate::load::Reservation;
use crate::metrics::{Metrics, ModelLabel, ReasonLabel, RequestLabels};
use crate::openai::{self, Api};
use crate::prompt::{EncodeError, Encoder};
use crate::router::{Prompt, Reason, Route, RouteRequest, Router, Steer};
use crate::worker::{BlockSize, ModelName};

/// Bytes of a body per token where nothing better is known; English and code lie between 3 and 5.
const BYTES_PER_TOKEN: u64 = 4;

/// One configured model.
pub struct Model {
    /// As the engines serve it.
    pub name: ModelName,
    /// Tokens per block of its workers.
    pub block_size: BlockSize,
    /// How its prompts become tokens; `None` where no tokenizer is configured.
    pub encoder: Option<Encoder>,
}

/// The configured models by every name a request may use.
#[derive(Clone, Default)]
pub struct Models(HashMap<String, Arc<Model>>);

impl Models {
    /// Adds a model under its name and its aliases.
    pub fn add(&mut self, model: Model, aliases: &[ModelName]) {
        let model = Arc::new(model);
        for alias in aliases {
            self.0.insert(alias.as_str().to_owned(), model.clone());
        }
        self.0.insert(model.name.as_str().to_owned(), model);
    }

    fn find(&self, name: Option<&str>) -> Option<&Arc<Model>> {
        match name {
            Some(name) => self.0.get(name),
            // Engines that serve one model accept requests that name none.
            None => self.0.values().next().filter(|only| self.0.values().all(|model| Arc::ptr_eq(model, only))),
        }
    }
}

/// What became of one request.
pub struct Routed {
    /// What Envoy is told.
    pub steer: Steer,
    /// The booking and why, if there is one.
    pub booked: Option<(Route, Reservation)>,
}

/// The request path between Envoy's messages and the router.
pub struct Pipeline {
    models: Models,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    encoders: Arc<Semaphore>,
    queued: AtomicUsize,
    limits: LimitsConfig,
}

/// A request as far as it could be read.
struct Encoded {
    model: Option<ModelName>,
    prompt: Prompt,
    times: Vec<(&'static str, Duration)>,
}

impl Pipeline {
    /// A pipeline over a router.
    pub fn new(models: Models, router: Arc<Router>, metrics: Arc<Metrics>, limits: LimitsConfig) -> Arc<Self> {
        // One encoder per core: more would only share the cores, and delay the async threads beside them.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let encoders = Arc::new(Semaphore::new(cores));
        Arc::new(Self { models, router, metrics, encoders, queued: AtomicUsize::new(0), limits })
    }

    /// Finds a worker rank for one request.
    pub async fn route(self: &Arc<Self>, inbound: Inbound) -> Routed {
        let started = Instant::now();
        let encoded = self.encode(&inbound).await;
        for &(stage, took) in &encoded.times {
            self.metrics.stage(stage, took);
        }
        let request = RouteRequest { model: encoded.model, prompt: encoded.prompt };
        let booked = self.router.route(&request);
        self.metrics.stage("total", started.elapsed());
        let routed = match booked {
            Ok((route, reservation)) => {
                self.metrics.stage("index", route.index_time);
                self.metrics.stage("choose", route.choose_time);
                debug!(request_id = inbound.head.request_id, worker = %route.to.rank, endpoint = %route.to.endpoint,
                    mode = route.mode.as_str(), predicted_cached_tokens = route.predicted_cached_tokens,
                    prompt_tokens = route.prompt_tokens, cost = route.choice.cost.total, "routed");
                Routed { steer: route.steer(), booked: Some((route, reservation)) }
            }
            Err(error) => {
                self.degraded(error.reason());
                debug!(request_id = inbound.head.request_id, %error, "left to Envoy");
                Routed { steer: Steer::PASSTHROUGH, booked: None }
            }
        };
        self.count(&routed, &request);
        routed
    }

    async fn encode(self: &Arc<Self>, inbound: &Inbound) -> Encoded {
        let unread =
            |tokens, because| Encoded { model: None, prompt: Prompt::Estimated { tokens, because }, times: Vec::new() };
        let Some(api) = Api::of_path(&inbound.head.path) else { return unread(0, Reason::NotInference) };
        let body = match &inbound.body {
            InboundBody::Absent => return unread(0, Reason::NoBody),
            InboundBody::Unseen => return unread(0, Reason::BodyNotShown),
            InboundBody::TooLarge(bytes) => return unread(estimate(*bytes), Reason::BodyTooLarge),
            InboundBody::Whole(body) => body.clone(),
        };
        if body.len() <= self.limits.tokenize_inline.bytes() {
            return self.encode_now(api, &body);
        }
        let estimate = estimate(body.len());
        let deadline = self.limits.exchange_deadline.get();
        match tokio::time::timeout(deadline, self.encode_queued(api, body)).await {
            Ok(Some(encoded)) => encoded,
            Ok(None) => unread(estimate, Reason::TokenizerBusy),
            Err(_) => unread(estimate, Reason::Deadline),
        }
    }

    /// Encodes on the blocking pool; `None` when the queue is full.
    async fn encode_queued(self: &Arc<Self>, api: Api, body: Bytes) -> Option<Encoded> {
        let _place = Place::take(&self.queued, self.limits.tokenize_queue as usize)?;
        // The semaphore is never closed, and a lost blocking task is a panic already turned into an error.
        let permit = self.encoders.clone().acquire_owned().await.ok()?;
        let pipeline = self.clone();
        let encode = move || {
            // Held until the work is done and not only until it is waited for: a deadline does not stop the work.
            let _permit = permit;
            pipeline.encode_now(api, &body)
        };
        tokio::task::spawn_blocking(encode).await.ok()
    }

    fn encode_now(&self, api: Api, body: &[u8]) -> Encoded {
        let mut times = Vec::with_capacity(4);
        // Tokenizers are large foreign code, and a panic there must not end the exchange.
        let result = catch_unwind(AssertUnwindSafe(|| self.read(api, body, &mut times)));
        let (model, prompt) = result.unwrap_or_else(|_| {
            warn!("the tokenizer panicked; routing by load");
            (None, Err(Reason::EncodeFailed))
        });
        let estimated = |because| Prompt::Estimated { tokens: estimate(body.len()), because };
        Encoded { model, prompt: prompt.unwrap_or_else(estimated), times }
    }

    /// The model and the hashed prompt of a body, or why there is none. The model is kept even where the prompt fails,
    /// so that the request still goes to a worker that serves it.
    fn read(
        &self,
        api: Api,
        body: &[u8],
        times: &mut Vec<(&'static str, Duration)>,
    ) -> (Option<ModelName>, Result<Prompt, Reason>) {
        let mut clock = Stopwatch(Instant::now());
        let request = match openai::parse(api, body) {
            Ok(request) => request,
            Err(error) => {
                debug!(%error, "unreadable body");
                let model = openai::model_of(body).and_then(|name| self.models.find(Some(&name)));
                return (model.map(|model| model.name.clone()), Err(Reason::Unreadable));
            }
        };
        times.push(("parse", clock.lap()));
        let Some(model) = self.models.find(request.model.as_deref()) else { return (None, Err(Reason::UnknownModel)) };
        let hashed = || {
            let encoder = model.encoder.as_ref().ok_or(Reason::NoTokenizer)?;
            let rendered = encoder.render(&request).map_err(reason)?;
            times.push(("render", clock.lap()));
            let prompts = encoder.tokenize(&rendered).map_err(reason)?;
            times.push(("tokenize", clock.lap()));
            let salt = Salt { lora: None, cache: request.cache_salt.clone() };
            let hashes = prompts.iter().map(|tokens| BlockHashes::of(tokens, model.block_size, &salt)).collect();
            times.push(("hash", clock.lap()));
            Ok(Prompt::Hashed(hashes))
        };
        (Some(model.name.clone()), { hashed }())
    }

    fn degraded(&self, reason: Reason) {
        self.metrics.degradations.get_or_create(&ReasonLabel { reason: reason.as_str() }).inc();
    }

    fn count(&self, routed: &Routed, request: &RouteRequest) {
        let model = request.model.as_ref().map_or_else(|| "unknown".to_owned(), |model| model.as_str().to_owned());
        let mode = routed.steer.mode.as_str();
        self.metrics.requests.get_or_create(&RequestLabels { model: model.clone(), mode }).inc();
        let Some((route, _)) = &routed.booked else { return };
        if let Some(reason) = route.reason {
            self.degraded(reason);
        }
        let (Prompt::Hashed(_), label) = (&request.prompt, ModelLabel { model }) else { return };
        self.metrics.prompt_tokens.get_or_create(&label).observe(route.prompt_tokens as f64);
        self.metrics.hit_rate.get_or_create(&label).observe(route.hit_rate());
        self.metrics.best_cached_tokens.get_or_create(&label).inc_by(route.best_cached_tokens);
        self.metrics.predicted_cached_tokens.get_or_create(&label).inc_by(route.predicted_cached_tokens);
        if route.predicted_cached_tokens < route.best_cached_tokens {
            self.metrics.non_max_overlap_choices.get_or_create(&label).inc();
        }
    }
}

/// Tokens in a body of which only the length is known.
fn estimate(bytes: usize) -> u64 {
    bytes as u64 / BYTES_PER_TOKEN
}

fn reason(error: EncodeError) -> Reason {
    match error {
        EncodeError::Multimodal(_) => Reason::Multimodal,
        error => {
            debug!(%error, "prompt refused");
            Reason::EncodeFailed
        }
    }
}

/// A place in a bounded queue; given back by drop.
struct Place<'a>(&'a AtomicUsize);

impl<'a> Place<'a> {
    fn take(queued: &'a AtomicUsize, most: usize) -> Option<Self> {
        let before = queued.fetch_add(1, Ordering::Relaxed);
        let place = Self(queued);
        (before < most).then_some(place)
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

struct Stopwatch(Instant);

impl Stopwatch {
    fn lap(&mut self) -> Duration {
        let now = Instant::now();
        let took = now - self.0;
        self.0 = now;
        took
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ext_proc::headers::RequestHead;
    use crate::index::PrefixIndex;
    use crate::load::LoadTracker;
    use crate::prompt;
    use crate::schedule::Weights;
    use crate::settings::Period;

    /// A pipeline with the shipped tokenizer and next to no time.
    fn hurried() -> Arc<Pipeline> {
        let files = prompt::Config {
            tokenizer: "examples/models/qwen2.5/tokenizer.json.gz".into(),
            tokenizer_config: None,
            chat_template: None,
        };
        let encoder = Encoder::load(&files).unwrap();
        let mut models = Models::default();
        models.add(Model { name: "m".into(), block_size: BlockSize::new(16).unwrap(), encoder: Some(encoder) }, &[]);
        let router = Router::new(PrefixIndex::new(), LoadTracker::new(std::time::Instant::now), Weights::default(), 1);
        let limits = LimitsConfig { exchange_deadline: Period::millis(1), ..LimitsConfig::default() };
        Pipeline::new(models, Arc::new(router), Arc::new(Metrics::new()), limits)
    }

    #[tokio::test]
    async fn an_encoder_that_missed_its_deadline_keeps_its_place_until_it_is_done() {
        let pipeline = hurried();
        let places = pipeline.encoders.available_permits();
        let prompt = "a prompt that takes longer than a millisecond ".repeat(20_000);
        let body = serde_json::json!({"model": "m", "prompt": prompt}).to_string();
        let head = RequestHead { path: "/v1/completions".into(), ..RequestHead::default() };
        let encoded = pipeline.encode(&Inbound { head, body: InboundBody::Whole(body.into()) }).await;
        assert!(matches!(encoded.prompt, Prompt::Estimated { because: Reason::Deadline, .. }));
        assert_eq!(pipeline.encoders.available_permits(), places - 1, "the work goes on");
        let done = tokio::time::timeout(Duration::from_secs(60), pipeline.encoders.acquire_many(places as u32)).await;
        assert!(done.is_ok(), "the place is given back");
    }
}
