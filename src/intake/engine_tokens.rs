//! Tokens that the engine made itself, in place of ours: the body is shown to a worker or to a render server, which answers
//! with the prompt as it would compute it, images included. It costs a call, so it is asked for where the operator wants
//! it, always or only while our own tokens are known to differ. One who does not answer soon is not waited for: a second is
//! asked beside it, those that fail repeatedly rest, and in the end there are our own tokens, or the load.

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

use super::{Body, Encoded, Intake, Named, Place, Stopwatch, Told};
use crate::block::multimodal::{ObjectHash, PromptObject};
use crate::block::{BlockHashes, Content, Salt, SequenceHash, placeholders};
use crate::engine_client::config::EnginesConfig;
use crate::engine_client::{
    EngineClient, EngineError, EngineUrl, RenderApi, Rendered, RenderedObject, Tokenized,
};
use crate::metrics::{Metrics, ModelOutcomeLabels};
use crate::openai::{self, Api};
use crate::parity::{Foretold, Standing};
use crate::prompt::{BoundedTokens, TokenBudget};
use crate::router::{Prompt, Reason, Router, SharedAgreed};
use crate::worker::{ModelName, WorkerRank};
use breaker::Breaker;
use config::{EngineTokensConfig, RenderPath, When};

/// Those who are asked for one request at most.
const MOST_TRIES: usize = 2;

/// What `/tokenize` does not read although it changes the prompt.
const NOT_TOKENIZED: [&str; 6] = [
    "documents",
    "reasoning_effort",
    "truncate_prompt_tokens",
    "truncation_side",
    "prompt_embeds",
    "kv_transfer_params",
];

/// What it does not rename in messages as the chat does, so that the template sees no thoughts.
const NOT_RENAMED: &[u8] = b"\"reasoning_content\"";

/// Of so many prompts that engines render while our own tokens are not believed, one is looked for with ours.
const COMPARED: usize = 8;

/// Where a model's tokens come from.
pub struct TokenSource {
    /// Whether our own are believed.
    pub standing: Arc<Standing>,
    /// The engines', where they are asked.
    pub engine: Option<EngineTokens>,
    /// What engines say of their models.
    pub agreed: SharedAgreed,
}

/// The token sources by model.
pub type TokenSources = HashMap<ModelName, TokenSource>;

/// What engines said of a prompt.
#[derive(Default)]
pub(super) enum Said {
    /// They were not asked.
    #[default]
    NotAsked,
    /// Its tokens.
    Tokens(ModelName, Vec<Rendered>),
    /// They were asked in vain.
    Failed,
}

/// Asks engines for their tokens.
pub struct EngineTokens {
    client: EngineClient,
    config: EngineTokensConfig,
    engines: EnginesConfig,
    urls: Vec<EngineUrl>,
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    breakers: Mutex<HashMap<EngineUrl, Breaker>>,
    turn: AtomicUsize,
    /// One permit per request under way, taken before anything is made of its body.
    room: Semaphore,
}

/// One question, for all who are asked.
#[derive(Clone)]
struct Question {
    api: RenderApi,
    body: Bytes,
    started: Instant,
}

impl EngineTokens {
    /// A source of one model, by the connections of a client.
    pub fn new(
        config: &EngineTokensConfig,
        engines: &EnginesConfig,
        client: &EngineClient,
        router: Arc<Router>,
        metrics: Arc<Metrics>,
    ) -> Self {
        let token_file = config.token_file.clone().or(engines.token_file.clone());
        // A request asks two at most, and must not lack a call for the second because others have begun.
        let in_flight = config.in_flight.saturating_mul(MOST_TRIES as u32);
        Self {
            client: client.apart(token_file, in_flight),
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
            turn: AtomicUsize::new(0),
            room: Semaphore::new((config.in_flight as usize).min(Semaphore::MAX_PERMITS)),
        }
    }

    fn is_wanted(&self, standing: &Standing) -> bool {
        self.config.when == When::Always || standing.is_mistrusted()
    }

    /// Those who may be asked, each time beginning with another.
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
            let first = self.turn.fetch_add(1, Ordering::Relaxed) % targets.len();
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
            .admits(Instant::now(), self.config.rest.get())
    }

    /// The first usable answer.
    async fn ask(
        &self,
        model: &ModelName,
        question: Question,
    ) -> Result<Vec<Rendered>, &'static str> {
        let mut targets = self.targets(model).into_iter();
        let mut next = || targets.by_ref().find(|url| self.admits(url));
        let mut calls = FuturesUnordered::new();
        calls.push(self.one(next().ok_or("nobody")?, question.clone()));
        let mut tries = 1;
        let hedge = tokio::time::sleep(self.config.hedge_after.get());
        tokio::pin!(hedge);
        let mut waits = true;
        loop {
            let more = tokio::select! {
                answered = calls.next() => match answered {
                    Some(Ok(rendered)) => return Ok(rendered),
                    Some(Err(error)) if error.is_refusal() => return Err("refused"),
                    Some(Err(error)) => {
                        debug!(%model, %error, "an engine did not say its tokens");
                        Some(error.label())
                    }
                    None => return Err("nobody"),
                },
                () = &mut hedge, if waits => None,
            };
            waits = waits && more.is_some();
            let late = question.started.elapsed() >= self.config.deadline.get();
            let another = if tries < MOST_TRIES && !late {
                next()
            } else {
                None
            };
            match (another, more) {
                (Some(url), _) => {
                    tries += 1;
                    calls.push(self.one(url, question.clone()));
                }
                (None, Some(label)) if calls.is_empty() => return Err(label),
                _ => {}
            }
        }
    }

    async fn one(&self, url: EngineUrl, question: Question) -> Result<Vec<Rendered>, EngineError> {
        let left = self
            .config
            .deadline
            .get()
            .saturating_sub(question.started.elapsed());
        let asked = Asked {
            of: self,
            url: url.clone(),
            since: Some(Instant::now()),
        };
        let answered = match self.config.path {
            RenderPath::Render => {
                self.client
                    .render(&url, question.api, question.body, left)
                    .await
            }
            RenderPath::Tokenize => {
                let tokenized = self.client.tokenize(&url, question.body, left).await;
                tokenized.map(|Tokenized { tokens, .. }| {
                    vec![Rendered {
                        token_ids: tokens,
                        objects: vec![],
                    }]
                })
            }
        };
        asked.answered();
        let mut breakers = self.breakers.lock();
        let breaker = breakers.entry(url).or_default();
        match &answered {
            // Ours is the fault.
            Err(EngineError::Busy | EngineError::Client(_)) => {}
            Err(error) if !error.is_refusal() => {
                breaker.failed(Instant::now(), self.config.failures, self.config.rest.get());
            }
            _ => breaker.succeeded(),
        }
        drop(breakers);
        answered
    }

    /// The body as it is asked with; `None` where the engine's answer would not be its prompt.
    fn question(&self, api: Api, body: &Bytes) -> Option<(RenderApi, Bytes)> {
        let render = match api {
            Api::ChatCompletions => RenderApi::Chat,
            Api::Completions => RenderApi::Completions,
            Api::Responses => RenderApi::Responses,
            Api::Messages => RenderApi::Messages,
            _ => return None,
        };
        // Of these we look at none, so the engine need not render them all.
        if openai::is_too_much(api, body) {
            return None;
        }
        match self.config.path {
            // Without it the answer holds every pixel.
            RenderPath::Render => Some((
                render,
                openai::edit::set_field(body, "mm_payload", b"\"none\"")?.into(),
            )),
            RenderPath::Tokenize => {
                let keys: BTreeMap<String, &RawValue> = serde_json::from_slice(body).ok()?;
                let read = !NOT_TOKENIZED.iter().any(|key| keys.contains_key(*key))
                    && !refuses_tools(&keys)
                    && memchr::memmem::find(body, NOT_RENAMED).is_none();
                let known = matches!(render, RenderApi::Chat | RenderApi::Completions);
                (known && read).then(|| (render, body.clone()))
            }
        }
    }
}

/// Whether tools are offered and none may be called: engines with `--exclude-tools-when-tool-choice-none` show them to nobody
/// then, and `/tokenize` shows them all the same.
fn refuses_tools(keys: &BTreeMap<String, &RawValue>) -> bool {
    let read = |key: &str| {
        keys.get(key)
            .and_then(|raw| serde_json::from_str::<Value>(raw.get()).ok())
    };
    read("tool_choice").is_some_and(|choice| choice == "none")
        && read("tools")
            .is_some_and(|tools| tools.as_array().is_some_and(|tools| !tools.is_empty()))
}

/// One who was asked. Dropped without an answer after another one had to be asked, it has failed: who hangs would otherwise
/// never rest.
struct Asked<'a> {
    of: &'a EngineTokens,
    url: EngineUrl,
    since: Option<Instant>,
}

impl Asked<'_> {
    fn answered(mut self) {
        self.since = None;
    }
}

impl Drop for Asked<'_> {
    fn drop(&mut self) {
        let EngineTokens {
            breakers, config, ..
        } = self.of;
        if self
            .since
            .is_some_and(|since| since.elapsed() >= config.hedge_after.get())
        {
            let mut breakers = breakers.lock();
            breakers.entry(self.url.clone()).or_default().failed(
                Instant::now(),
                config.failures,
                config.rest.get(),
            );
        }
    }
}

impl Intake {
    /// Asks engines for the tokens of a body, where that is wanted of its model.
    pub(super) async fn ask_engines(self: &Arc<Self>, api: Api, told: &mut Told, body: &Body) {
        if self
            .parts
            .tokens
            .values()
            .all(|source| source.engine.is_none())
        {
            return;
        }
        let Body::Whole(bytes) = body else { return };
        let asked = openai::model_quickly(bytes);
        let Some(named) = self.parts.models.find(asked.as_deref()) else {
            return;
        };
        let model = &named.model.name;
        let Some(source) = self.parts.tokens.get(model) else {
            return;
        };
        let Some(engine) = source
            .engine
            .as_ref()
            .filter(|engine| engine.is_wanted(&source.standing))
        else {
            return;
        };
        let started = Instant::now();
        let Some(answered) = self.answered(engine, (api, model, bytes), started).await else {
            return;
        };
        let outcome = answered.as_ref().err().copied().unwrap_or("ok");
        let label = ModelOutcomeLabels {
            model: model.as_str().to_owned(),
            outcome,
        };
        engine.metrics.engine_tokens.get_or_create(&label).inc();
        told.engine = answered.map_or(Said::Failed, |rendered| {
            Said::Tokens(model.clone(), rendered)
        });
        told.waited = started.elapsed();
    }

    /// What engines make of a body; `None` where they cannot be asked for it.
    async fn answered(
        self: &Arc<Self>,
        engine: &EngineTokens,
        (api, model, body): (Api, &ModelName, &Bytes),
        started: Instant,
    ) -> Option<Result<Vec<Rendered>, &'static str>> {
        // First of all, so that bodies beyond what may be under way are not even looked at.
        let Ok(_permit) = engine.room.try_acquire() else {
            return Some(Err("busy"));
        };
        let prepared = tokio::time::timeout(
            engine.config.deadline.get(),
            self.prepared(api, model, body),
        )
        .await;
        match prepared.unwrap_or(Err("timeout")) {
            Ok(Some((api, body))) => Some(engine.ask(model, Question { api, body, started }).await),
            Ok(None) => None,
            Err(why) => Some(Err(why)),
        }
    }

    /// Made beside the async threads where it is long, in the same queue as prompts.
    async fn prepared(
        self: &Arc<Self>,
        api: Api,
        model: &ModelName,
        body: &Bytes,
    ) -> Result<Option<(RenderApi, Bytes)>, &'static str> {
        let question = move |intake: &Self, model: &ModelName, body: &Bytes| {
            intake
                .parts
                .tokens
                .get(model)?
                .engine
                .as_ref()?
                .question(api, body)
        };
        if body.len() <= self.parts.limits.inline {
            return Ok(question(self, model, body));
        }
        let _place = Place::take(&self.queued, self.parts.limits.queue).ok_or("busy")?;
        let permit = self
            .encoders
            .clone()
            .acquire_owned()
            .await
            .map_err(|_| "busy")?;
        let (intake, model, body) = (self.clone(), model.clone(), body.clone());
        let prepare = move || {
            // Held until the work is done, as for prompts.
            let _permit = permit;
            question(&intake, &model, &body)
        };
        super::crew::run(prepare).await.ok_or("client")
    }

    /// Takes what the engine said for the prompt; false where it said nothing of use.
    pub(super) fn take_engine_tokens(
        &self,
        (named, salt): (&Named, &Salt),
        told: &Told,
        request: &openai::Request,
        encoded: &mut Encoded,
    ) -> bool {
        let Said::Tokens(model, rendered) = &told.engine else {
            return false;
        };
        let Some(source) = self
            .parts
            .tokens
            .get(model)
            .filter(|_| *model == named.model.name)
        else {
            return false;
        };
        let has_media = matches!(&request.prompt, openai::Prompt::Chat(chat) if chat.has_media());
        let tokenize_only = source
            .engine
            .as_ref()
            .is_some_and(|engine| engine.config.path == RenderPath::Tokenize);
        let own = encoded
            .extension
            .as_ref()
            .is_some_and(|extension| extension.token_data.is_some());
        let asked = match &request.prompt {
            openai::Prompt::Chat(_) => 1,
            openai::Prompt::Texts(texts) => texts.len(),
            openai::Prompt::Tokens(lists) => lists.len(),
            // Too many, or nothing that tokens say all of.
            _ => return false,
        };
        // `/tokenize` does not say which images there are.
        if own || (has_media && tokenize_only) || rendered.len() != asked {
            return false;
        }
        let most = self.most_tokens(named);
        if rendered.iter().any(|one| one.token_ids.len() > most) {
            encoded.fail(Reason::PromptTooLong);
            // A prompt with images is not hashed in part: its blocks need the image objects, and the engine refuses the prompt.
            if let [one] = &rendered[..]
                && one.objects.is_empty()
            {
                self.begin_with(named, salt, one.token_ids[..most].to_vec().into(), encoded);
            }
            return true;
        }
        let prompts: Vec<_> = rendered.iter().map(|one| one.token_ids.clone()).collect();
        let (hashes, tracked): (Vec<_>, Vec<_>) = rendered
            .iter()
            .map(|one| self.engine_blocks((named, salt), one))
            .unzip();
        encoded.tracked = tracked
            .into_iter()
            .map(|mut names| names.as_mut().and_then(Vec::pop))
            .collect();
        encoded.prompt = Prompt::Hashed(hashes);
        if source.standing.is_mistrusted() && !has_media {
            encoded.foretold = self.shadow((named, salt), source, told.until, request);
        }
        encoded.tokens = prompts;
        true
    }

    /// The blocks of a prompt as its engine made it, and their names in the load.
    fn engine_blocks(
        &self,
        (named, salt): (&Named, &Salt),
        rendered: &Rendered,
    ) -> (BlockHashes, Option<Vec<Arc<[SequenceHash]>>>) {
        let object = |object: &RenderedObject| {
            let ranges = std::iter::once(object.offset..object.offset + object.length).collect();
            Some(PromptObject {
                object: ObjectHash::of(&object.hash)?,
                ranges,
            })
        };
        let objects: Vec<_> = rendered.objects.iter().filter_map(object).collect();
        let model = &named.model;
        let plain = Content::plain(&rendered.token_ids, salt);
        let content = Content {
            windows: model.windows,
            objects: &objects,
            ..plain
        };
        let hashes = placeholders::hashes(&content, model.block_size, model.media);
        let names = self.tracked_content(named, &content, &hashes);
        (hashes, names)
    }

    /// The blocks of a request by warmroute's own tokens, for one of [`COMPARED`] requests. Parity compares them with the events of the
    /// engine. Their tokenization has the limits of every prompt.
    fn shadow(
        &self,
        (named, salt): (&Named, &Salt),
        source: &TokenSource,
        until: Option<Instant>,
        request: &openai::Request,
    ) -> Foretold {
        let (Some(engine), Some(encoder)) = (&source.engine, &named.model.encoder) else {
            return Foretold::Nothing;
        };
        if !engine.turn.load(Ordering::Relaxed).is_multiple_of(COMPARED) {
            return Foretold::Nothing;
        }
        let is_over = Stopwatch::start(until).deadline();
        let budget = TokenBudget::new(self.most_tokens(named), &is_over);
        let rendered = encoder.render(request);
        let prompts = rendered.and_then(|rendered| {
            encoder.tokenize_within(&rendered, salt.cache.as_deref(), &budget)
        });
        match prompts.as_deref() {
            Ok(
                [
                    BoundedTokens {
                        tokens,
                        stopped: None,
                    },
                ],
            ) => Foretold::Shadow(Box::new(named.resumed_hashes(tokens, salt))),
            _ => Foretold::Nothing,
        }
    }

    /// Lets a prompt be known only as far as its tokens are believed.
    pub(super) fn judged(&self, told: &Told, mut encoded: Encoded) -> Encoded {
        if !matches!(told.engine, Said::NotAsked) {
            encoded.times.push(("engine_tokens", told.waited));
        }
        if matches!(told.engine, Said::Failed)
            && encoded.prompt.because() == Some(Reason::NoTokenizer)
        {
            encoded.fail(Reason::EngineTokensFailed);
        }
        let source = encoded
            .model
            .as_ref()
            .and_then(|model| self.parts.tokens.get(model));
        let Some(source) = source.filter(|_| encoded.ours) else {
            return encoded;
        };
        if !source.standing.is_mistrusted() {
            encoded.foretold = if encoded.illustrated {
                Foretold::Illustrated
            } else {
                Foretold::Prompt
            };
            return encoded;
        }
        let tokens = encoded.prompt.tokens();
        let doubted = Prompt::Estimated {
            tokens,
            because: Reason::ParityMismatch,
        };
        let shadow = match std::mem::replace(&mut encoded.prompt, doubted) {
            Prompt::Hashed(prompts) => <[BlockHashes; 1]>::try_from(prompts)
                .ok()
                .filter(|_| !encoded.illustrated),
            Prompt::Beginning { .. } => None,
            // What was not known is not doubted.
            prompt @ Prompt::Estimated { .. } => {
                encoded.prompt = prompt;
                return encoded;
            }
        };
        encoded.foretold = shadow.map_or(Foretold::Nothing, |[hashes]| {
            Foretold::Shadow(Box::new(hashes))
        });
        encoded.tracked = None;
        encoded.tokens = Vec::new();
        encoded
    }
}

/// How much of a deadline is left after engines were asked.
pub(super) fn left(deadline: Duration, told: &Told) -> Duration {
    deadline.saturating_sub(told.waited)
}

#[cfg(test)]
mod tests;
