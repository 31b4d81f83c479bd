//! From a request as somebody brings it (Envoy, an API client, an operator with a file) to a question for the router:
//! parse, render, tokenise, hash, and what the client wishes. Small prompts are encoded where they arrive; large ones on
//! the blocking pool behind a bounded queue, with a deadline. Every failure on the way is one step down the ladder with
//! its reason, and never an error for the client.

pub mod config;
mod direct;
mod models;
pub mod rewrite;
mod sessions;
mod shared;
mod wishes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

pub use models::{Model, Models, Named};
pub use sessions::SessionSigns;
pub use shared::Shared;
pub use wishes::{Headers, Wishes};

use crate::block::tracking::Scope;
use crate::block::{BlockHashes, Content, Salt, SequenceHash, TrackingHash};
use crate::entrance::SessionWord;
use crate::openai::{self, Api, Extension};
use crate::prompt::{EncodeError, Encoder};
use crate::router::{Prompt, Reason, RouteRequest};
use crate::worker::ModelName;
use config::ClientsConfig;

/// Bytes of a body per token where nothing better is known; English and code lie between 3 and 5.
const BYTES_PER_TOKEN: u64 = 4;

/// Most tokens that are estimated from bytes: as many as large models take. A guess must not keep a worker busy for longer
/// than any prompt could.
const MOST_ESTIMATED: u64 = 131_072;

/// How much of a body there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// There is none.
    Absent,
    /// There may be one, but it was not needed or not shown.
    Unseen,
    /// All of it.
    Whole(Bytes),
    /// More than the limit; so long it was when we stopped gathering.
    TooLarge(usize),
}

/// How much work is taken on at once.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bodies up to this size are encoded on the caller's own thread.
    pub inline: usize,
    /// Bodies that may wait for the blocking pool.
    pub queue: usize,
    /// How long an encoding may take.
    pub deadline: Duration,
}

/// A request, read.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The question.
    pub request: RouteRequest,
    /// What it says of its session.
    pub session: Option<SessionWord>,
    /// Whether the choice is asked for, and not an answer.
    pub query: bool,
    /// The tokens of each prompt, where they are known.
    pub tokens: Vec<Vec<u32>>,
    /// How long each stage took.
    pub times: Vec<(&'static str, Duration)>,
}

/// What the way in is made of.
pub struct Parts {
    /// What is served.
    pub models: Models,
    /// Whom we believe.
    pub clients: ClientsConfig,
    /// How much work is taken on at once.
    pub limits: Limits,
    /// Under which names the load counts blocks.
    pub tracking: TrackingHash,
    /// Where sessions are named, if there are any.
    pub sessions: Option<SessionSigns>,
    /// A cache that all workers share.
    pub shared: Option<Shared>,
}

/// The way in.
pub struct Intake {
    parts: Parts,
    encoders: Arc<Semaphore>,
    queued: AtomicUsize,
}

/// What the headers say that is needed to read the body.
struct Told {
    /// What separates this client's cache from others', where the engines listen to a header for it.
    tenant: Option<String>,
    /// Whether the session's id has to be looked for in the body.
    session_in_body: bool,
}

/// A body as far as it could be read.
struct Encoded {
    model: Option<ModelName>,
    adapter: Option<String>,
    prompt: Prompt,
    tracked: Option<Vec<Arc<[SequenceHash]>>>,
    tokens: Vec<Vec<u32>>,
    extension: Option<Box<Extension>>,
    session: Option<String>,
    times: Vec<(&'static str, Duration)>,
}

impl Intake {
    /// A way in.
    pub fn new(parts: Parts) -> Arc<Self> {
        // One encoder per core: more would only share the cores, and delay the async threads beside them.
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        let encoders = Arc::new(Semaphore::new(cores));
        Arc::new(Self { parts, encoders, queued: AtomicUsize::new(0) })
    }

    /// Reads a request.
    pub async fn take(self: &Arc<Self>, path: &str, headers: Headers<'_>, body: &Body) -> Taken {
        let encoded = self.encode(path, self.told(headers), body).await;
        let mut taken = self.taken(encoded, headers);
        if let Some(shared) = &self.parts.shared {
            shared.look_up(&mut taken.request).await;
        }
        taken
    }

    /// Reads a request without a limit of time, on this thread.
    pub fn take_now(&self, path: &str, headers: Headers<'_>, body: &[u8]) -> Taken {
        let encoded = match Api::of_path(path) {
            Some(api) => self.encode_now(api, &self.told(headers), body),
            None => Encoded::unread(0, Reason::NotInference),
        };
        self.taken(encoded, headers)
    }

    fn taken(&self, encoded: Encoded, headers: Headers<'_>) -> Taken {
        let mut request = RouteRequest::new(encoded.model, encoded.prompt);
        let mut query = false;
        if self.parts.clients.trusted {
            let wishes = Wishes::read(headers, encoded.extension.as_deref());
            query = wishes.query;
            request.constraints = wishes.constraints;
            request.prefill_pin = wishes.prefill_pin;
            request.overrides = wishes.overrides;
            request.expected_output_tokens = wishes.expected_output_tokens;
            request.priority = wishes.priority;
        }
        request.constraints.adapter = encoded.adapter;
        request.tracked = encoded.tracked;
        let session = self.parts.sessions.as_ref().and_then(|signs| signs.read(headers, encoded.session));
        Taken { request, session, query, tokens: encoded.tokens, times: encoded.times }
    }

    fn told(&self, headers: Headers<'_>) -> Told {
        let tenant = self.parts.clients.tenant_header.as_deref().and_then(headers);
        let tenant = tenant.map(|value| value.trim().to_owned()).filter(|tenant| !tenant.is_empty());
        let signs = self.parts.sessions.as_ref();
        Told { tenant, session_in_body: signs.is_some_and(|signs| signs.leave_it_to_the_body(headers)) }
    }

    async fn encode(self: &Arc<Self>, path: &str, told: Told, body: &Body) -> Encoded {
        let Some(api) = Api::of_path(path) else { return Encoded::unread(0, Reason::NotInference) };
        let body = match body {
            Body::Absent => return Encoded::unread(0, Reason::NoBody),
            Body::Unseen => return Encoded::unread(0, Reason::BodyNotShown),
            Body::TooLarge(bytes) => return Encoded::unread(estimate(*bytes), Reason::BodyTooLarge),
            Body::Whole(body) => body.clone(),
        };
        if body.len() <= self.parts.limits.inline {
            return self.encode_now(api, &told, &body);
        }
        let estimate = estimate(body.len());
        match tokio::time::timeout(self.parts.limits.deadline, self.encode_queued(api, told, body)).await {
            Ok(Some(encoded)) => encoded,
            Ok(None) => Encoded::unread(estimate, Reason::TokenizerBusy),
            Err(_) => Encoded::unread(estimate, Reason::Deadline),
        }
    }

    /// Encodes on the blocking pool; `None` when the queue is full.
    async fn encode_queued(self: &Arc<Self>, api: Api, told: Told, body: Bytes) -> Option<Encoded> {
        let _place = Place::take(&self.queued, self.parts.limits.queue)?;
        // The semaphore is never closed, and a lost blocking task is a panic already turned into an error.
        let permit = self.encoders.clone().acquire_owned().await.ok()?;
        let intake = self.clone();
        let encode = move || {
            // Held until the work is done and not only until it is waited for: a deadline does not stop the work.
            let _permit = permit;
            intake.encode_now(api, &told, &body)
        };
        tokio::task::spawn_blocking(encode).await.ok()
    }

    fn encode_now(&self, api: Api, told: &Told, body: &[u8]) -> Encoded {
        // Tokenizers are large foreign code, and a panic there must not end the exchange.
        let result = catch_unwind(AssertUnwindSafe(|| self.read(api, told, body)));
        result.unwrap_or_else(|_| {
            warn!("the tokenizer panicked; routing by load");
            Encoded::unread(estimate(body.len()), Reason::EncodeFailed)
        })
    }

    /// The model and the hashed prompt of a body, or why there is none. The model is kept even where the prompt fails,
    /// so that the request still goes to a worker that serves it.
    fn read(&self, api: Api, told: &Told, body: &[u8]) -> Encoded {
        let mut clock = Stopwatch(Instant::now());
        let mut encoded = Encoded::unread(estimate(body.len()), Reason::Unreadable);
        let signs = self.parts.sessions.as_ref().filter(|_| told.session_in_body);
        encoded.session = signs.and_then(|signs| signs.in_body(body));
        let mut request = match openai::parse(api, body) {
            Ok(request) => request,
            Err(error) => {
                debug!(%error, "unreadable body");
                let named = openai::model_of(body).and_then(|name| self.parts.models.find(Some(&name)));
                encoded.names(named.as_ref());
                return encoded;
            }
        };
        encoded.times.push(("parse", clock.lap()));
        if let openai::Prompt::Chat(chat) = &request.prompt
            && chat.has_media()
        {
            // The bytes of an image say nothing about its tokens, and are far more.
            encoded.prompt = Prompt::Estimated { tokens: estimate(chat.text_bytes()), because: Reason::Multimodal };
        }
        let raw = request.extension.take().filter(|_| self.parts.clients.trusted);
        encoded.extension = raw.map(|raw| Box::new(Extension::read(&raw)));
        let Some(named) = self.parts.models.find(request.model.as_deref()) else {
            encoded.fail(Reason::UnknownModel);
            return encoded;
        };
        encoded.names(Some(&named));
        let salt_in_extension = encoded.extension.as_ref().and_then(|extension| extension.cache_salt.clone());
        let cache = told.tenant.clone().or(salt_in_extension).or(request.cache_salt.take());
        match self.tokens(&named, &request, &mut encoded, &mut clock) {
            Ok(prompts) => {
                let salt = Salt { lora: named.adapter.clone(), cache };
                let hashes: Vec<_> = prompts.iter().map(|tokens| named.hashes(tokens, &salt)).collect();
                encoded.tracked = self.tracked(&named, &prompts, &hashes, &salt);
                encoded.prompt = Prompt::Hashed(hashes);
                encoded.tokens = prompts;
                encoded.times.push(("hash", clock.lap()));
            }
            Err(reason) => encoded.fail(reason),
        }
        encoded
    }

    /// The names of the blocks in the load, where these are not their sequence hashes.
    fn tracked(
        &self,
        named: &Named,
        prompts: &[Vec<u32>],
        hashes: &[BlockHashes],
        salt: &Salt,
    ) -> Option<Vec<Arc<[SequenceHash]>>> {
        if self.parts.tracking == TrackingHash::Public {
            return None;
        }
        let scope = Scope { model: named.model.name.as_str(), routing_group: "" };
        let names = |(tokens, hashes): (&Vec<u32>, &BlockHashes)| {
            self.parts.tracking.sequences(&named.content(tokens, salt), hashes, scope)
        };
        Some(prompts.iter().zip(hashes).map(names).collect())
    }

    fn tokens(
        &self,
        named: &Named,
        request: &openai::Request,
        encoded: &mut Encoded,
        clock: &mut Stopwatch,
    ) -> Result<Vec<Vec<u32>>, Reason> {
        if let Some(tokens) = encoded.extension.as_mut().and_then(|extension| extension.token_data.take()) {
            return Ok(vec![tokens]);
        }
        if request.prompt == openai::Prompt::TooMany {
            return Err(Reason::TooManyPrompts);
        }
        let encoder: &Encoder = named.model.encoder.as_ref().ok_or(Reason::NoTokenizer)?;
        let rendered = encoder.render(request).map_err(reason)?;
        encoded.times.push(("render", clock.lap()));
        let prompts = encoder.tokenize(&rendered).map_err(reason)?;
        encoded.times.push(("tokenize", clock.lap()));
        Ok(prompts)
    }
}

impl Encoded {
    fn unread(tokens: u64, because: Reason) -> Self {
        let prompt = Prompt::Estimated { tokens, because };
        let times = Vec::with_capacity(4);
        Self {
            model: None,
            adapter: None,
            prompt,
            tracked: None,
            tokens: vec![],
            extension: None,
            session: None,
            times,
        }
    }

    fn names(&mut self, named: Option<&Named>) {
        self.model = named.map(|named| named.model.name.clone());
        self.adapter = named.and_then(|named| named.adapter.clone());
    }

    fn fail(&mut self, reason: Reason) {
        if let Prompt::Estimated { because, .. } = &mut self.prompt {
            *because = reason;
        }
    }
}

impl Named {
    /// The blocks of one prompt, as the model's engines cut them.
    pub fn hashes(&self, tokens: &[u32], salt: &Salt) -> BlockHashes {
        BlockHashes::of_content(&self.content(tokens, salt), self.model.block_size)
    }

    fn content<'a>(&self, tokens: &'a [u32], salt: &'a Salt) -> Content<'a> {
        Content { windows: self.model.windows, ..Content::plain(tokens, salt) }
    }
}

/// Tokens in a body of which only the length is known.
fn estimate(bytes: usize) -> u64 {
    (bytes as u64 / BYTES_PER_TOKEN).min(MOST_ESTIMATED)
}

fn reason(error: EncodeError) -> Reason {
    match error {
        EncodeError::Multimodal(_) => Reason::Multimodal,
        EncodeError::TooMany => Reason::TooManyPrompts,
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
mod tests;
