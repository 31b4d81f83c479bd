//! From a request as somebody brings it (Envoy, an API client, an operator with a file) to a question for the router:
//! parse, render, tokenise, hash, and what the client wishes. Quick prompts are encoded where they arrive; others on
//! threads for that behind a bounded queue, with a deadline. Every failure on the way is one step down the ladder with
//! its reason, and never an error for the client.

mod agreed;
mod beginning;
mod cluster;
pub mod config;
pub mod confine;
mod crew;
mod direct;
mod encoded;
pub mod engine_tokens;
mod large;
mod media;
mod models;
mod pace;
mod queue;
mod remote;
pub mod rewrite;
mod sessions;
mod shared;
mod tokenized;
mod wishes;

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::{Duration, Instant};

use bytes::Bytes;
use tokio::sync::Semaphore;
use tracing::{debug, warn};

pub use cluster::{Cluster, SharedCluster};
use encoded::{Encoded, estimate};
use engine_tokens::{Said, TokenSources};
use large::LargeBodies;
pub use models::{Model, Models, Named};
use pace::{Became, Pace};
use queue::Place;
pub use rewrite::{AskedModel, Rewrites, RewrittenBody};
pub use sessions::SessionSigns;
pub use shared::Shared;
use tokenized::{Stopwatch, TokenizedPrompts, hidden, reason};
pub use wishes::{Headers, Wishes};

use crate::block::tracking::Scope;
use crate::block::{BlockHashes, Content, Salt, SequenceHash, TrackingHash};
use crate::entrance::SessionWord;
use crate::openai::{self, Api, Paths, Shape};
use crate::parity::Standing;
use crate::prompt::Tokens;
use crate::remote_index::Asker;
use crate::router::{Prompt, Reason, RouteRequest};
use crate::worker::ModelName;
use config::ClientsConfig;
use confine::{ConfineConfig, PoolAuthorities};

/// How much of a body there is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Body {
    /// There is none.
    Absent,
    /// There may be one, but it was not needed or not shown.
    Unseen,
    /// All of it.
    Whole(Bytes),
    /// There may be one, but it comes only after the route was chosen.
    Streamed,
    /// Its beginning.
    Cut {
        /// What was shown.
        shown: Bytes,
        /// How long it will be, as the client says.
        length: Option<u64>,
    },
    /// The beginning of a body that exceeds the limit.
    TooLarge {
        /// The bytes received.
        shown: Bytes,
        /// A lower bound of its length.
        bytes: u64,
    },
    /// There was no room to keep it; so long it was.
    Shed {
        /// Its length.
        bytes: usize,
        /// The model it names, as far as that was found quickly.
        model: Option<String>,
    },
}

/// How much work is taken on at once.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Bodies up to this size are encoded on the caller's own thread.
    pub inline: usize,
    /// Bodies that may wait for the threads that encode.
    pub queue: usize,
    /// How long an encoding may take.
    pub deadline: Duration,
}

/// A request, read.
#[derive(Clone, Debug)]
pub struct Taken {
    /// The question.
    pub request: RouteRequest,
    /// Its API, where its path is known.
    pub api: Option<Api>,
    /// The model it asks for, as the client wrote it.
    pub asked_model: Option<String>,
    /// What is wrong with its body, where that cannot be read.
    pub unreadable: Option<String>,
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
    /// Which path is which API.
    pub paths: Paths,
    /// Whom we believe.
    pub clients: ClientsConfig,
    /// Which requests are for one pool only.
    pub confine: ConfineConfig,
    /// Rules that send requests to other models. Those of the cluster come after them.
    pub rewrites: Rewrites,
    /// Headers that name the model and beat the rules.
    pub rewrite_headers: Vec<String>,
    /// What a cluster says of requests.
    pub cluster: SharedCluster,
    /// How much work is taken on at once.
    pub limits: Limits,
    /// Under which names the load counts blocks.
    pub tracking: TrackingHash,
    /// Where sessions are named, if there are any.
    pub sessions: Option<SessionSigns>,
    /// A cache that all workers share.
    pub shared: Option<Shared>,
    /// Those who keep the index, where it is kept elsewhere.
    pub remote: Option<Arc<Asker>>,
    /// Where tokens come from, by model; of others they are ours.
    pub tokens: TokenSources,
}

/// The way in.
pub struct Intake {
    parts: Parts,
    pool_authorities: PoolAuthorities,
    encoders: Arc<Semaphore>,
    queued: AtomicUsize,
    large: LargeBodies,
    pace: Pace,
}

/// What the headers say that is needed to read the body.
struct Told {
    /// Separates the parts of a form, if the body is one.
    boundary: Option<String>,
    /// What separates this client's cache from others', where the engines listen to a header for it.
    tenant: Option<String>,
    /// Whether the session's id has to be looked for in the body.
    session_in_body: bool,
    /// What engines said of the prompt.
    engine: Said,
    /// How long they were waited for.
    waited: Duration,
    /// When tokenization stops.
    until: Option<Instant>,
}

/// The bytes of a body.
struct Shown {
    bytes: Bytes,
    /// Set if they are only its beginning.
    cut: Option<TruncatedBody>,
}

/// A body of which only the beginning was received.
#[derive(Clone, Copy)]
struct TruncatedBody {
    /// The announced length.
    length: Option<u64>,
    because: Reason,
}

impl Intake {
    /// A way in.
    pub fn new(parts: Parts) -> Arc<Self> {
        // One encoder per core: more would only share the cores, and delay the async threads beside them.
        let encoders = Arc::new(Semaphore::new(crew::size()));
        let large = LargeBodies::new(crew::size(), parts.limits.queue);
        let pool_authorities = PoolAuthorities::from(&parts.confine);
        Arc::new(Self {
            parts,
            pool_authorities,
            encoders,
            queued: AtomicUsize::new(0),
            large,
            pace: Pace::default(),
        })
    }

    /// How far the tokens of each model are believed.
    pub fn standings(&self) -> impl Iterator<Item = (ModelName, Arc<Standing>)> + '_ {
        self.parts
            .tokens
            .iter()
            .map(|(model, source)| (model.clone(), source.standing.clone()))
    }

    /// The API of a request.
    pub fn api(&self, path: &str, headers: Headers<'_>) -> Option<Api> {
        self.parts.paths.of(path, headers)
    }

    /// Whether the body of a request is read at all, so that Envoy need not show others.
    pub fn wants_body(&self, path: &str, headers: Headers<'_>) -> bool {
        self.api(path, headers).is_some_and(Api::wants_body)
    }

    /// Reads a request.
    pub async fn take(self: &Arc<Self>, path: &str, headers: Headers<'_>, body: &Body) -> Taken {
        self.take_for(self.pool_of(path, headers), path, headers, body)
            .await
    }

    /// Reads a request of which it is known which pool it is for.
    pub async fn take_for(
        self: &Arc<Self>,
        pool: Option<Arc<str>>,
        path: &str,
        headers: Headers<'_>,
        body: &Body,
    ) -> Taken {
        let api = self.api(path, headers);
        let encoded = match api {
            Some(api) => {
                let mut told = self.told(headers);
                // The rest of the deadline is for hashing the tokenized part.
                told.until = Instant::now().checked_add(self.parts.limits.deadline / 8 * 7);
                self.ask_engines(api, &mut told, body).await;
                self.encode(api, told, body).await
            }
            None => Encoded::unread(0, Reason::NotInference),
        };
        let mut taken = Taken {
            api,
            ..self.taken(encoded, headers, pool)
        };
        taken.request.computes = computes(api);
        taken
            .times
            .extend(self.ask_others(&mut taken.request, true).await);
        taken
    }

    /// Reads a request without a limit of time, on this thread.
    pub fn take_now(
        &self,
        pool: Option<Arc<str>>,
        path: &str,
        headers: Headers<'_>,
        body: &[u8],
    ) -> Taken {
        let api = self.api(path, headers);
        let encoded = match api {
            Some(api) => {
                let shown = Shown {
                    bytes: Bytes::copy_from_slice(body),
                    cut: None,
                };
                self.encode_now(api, &self.told(headers), &shown)
            }
            None => Encoded::unread(0, Reason::NotInference),
        };
        let mut taken = Taken {
            api,
            ..self.taken(encoded, headers, pool)
        };
        taken.request.computes = computes(api);
        taken
    }

    fn taken(&self, encoded: Encoded, headers: Headers<'_>, pool: Option<Arc<str>>) -> Taken {
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
        if request.priority.strict == 0 {
            request.priority.strict = self.objective(headers, pool.as_deref()).unwrap_or(0);
        }
        request.constraints.pool = pool;
        request.constraints.adapter = encoded.adapter;
        request.tracked = encoded.tracked;
        request.foretold = encoded.foretold;
        let control = encoded
            .extension
            .as_ref()
            .and_then(|extension| extension.session_control.as_ref());
        let session = self.session(headers, encoded.session, control);
        let Encoded {
            asked_model,
            tokens,
            times,
            unreadable,
            ..
        } = encoded;
        Taken {
            request,
            api: None,
            asked_model,
            unreadable,
            session,
            query,
            tokens,
            times,
        }
    }

    fn told(&self, headers: Headers<'_>) -> Told {
        let tenant = self.tenant(headers);
        let signs = self.parts.sessions.as_ref();
        let boundary = headers("content-type").and_then(|value| openai::boundary(&value));
        let session_in_body = signs.is_some_and(|signs| signs.leave_it_to_the_body(headers));
        Told {
            boundary,
            tenant,
            session_in_body,
            engine: Said::NotAsked,
            waited: Duration::ZERO,
            until: None,
        }
    }

    async fn encode(self: &Arc<Self>, api: Api, told: Told, body: &Body) -> Encoded {
        let shown = match body {
            Body::Absent => return Encoded::without(api, 0, Reason::NoBody),
            Body::Unseen => return Encoded::without(api, 0, Reason::BodyNotShown),
            Body::Streamed => return Encoded::without(api, 0, Reason::BodyStreamed),
            Body::Shed { bytes, model } => {
                return self.unkept(api, (*bytes, model), Reason::TokenizerBusy);
            }
            Body::Whole(body) => Shown {
                bytes: body.clone(),
                cut: None,
            },
            Body::Cut { shown, length } => Shown {
                bytes: shown.clone(),
                cut: Some(TruncatedBody {
                    length: *length,
                    because: Reason::BodyCut,
                }),
            },
            Body::TooLarge { shown, bytes } => {
                let cut = TruncatedBody {
                    length: Some(*bytes),
                    because: Reason::BodyTooLarge,
                };
                Shown {
                    bytes: shown.clone(),
                    cut: Some(cut),
                }
            }
        };
        let bytes = shown.bytes.len();
        if self.pace.is_quick(bytes, self.parts.limits.inline) {
            return self.encode_now(api, &told, &shown);
        }
        let is_too_large = matches!(body, Body::TooLarge { .. });
        let body = shown.bytes.clone();
        let deadline = engine_tokens::left(self.parts.limits.deadline, &told);
        let because =
            match tokio::time::timeout(deadline, self.encode_queued(api, told, shown)).await {
                Ok(Some(encoded)) => return encoded,
                Ok(None) | Err(_) if is_too_large => Reason::BodyTooLarge,
                Ok(None) => Reason::TokenizerBusy,
                Err(_) => Reason::Deadline,
            };
        self.unkept(api, (bytes, &openai::model_quickly(&body)), because)
    }

    /// A request of which nothing is known but its length and perhaps its model, so that it reaches a worker that serves it.
    fn unkept(
        &self,
        api: Api,
        (bytes, model): (usize, &Option<String>),
        because: Reason,
    ) -> Encoded {
        let mut encoded = Encoded::without(api, bytes, because);
        if model.is_some() {
            encoded.asks(model.clone(), &self.parts.models);
        }
        encoded
    }

    /// Encodes on a thread for that; `None` when the queue is full.
    async fn encode_queued(
        self: &Arc<Self>,
        api: Api,
        told: Told,
        shown: Shown,
    ) -> Option<Encoded> {
        let lane = self.large.acquire(shown.bytes.len()).await?;
        let _place = Place::take(&self.queued, self.parts.limits.queue)?;
        // The semaphore is never closed, and what is lost is a panic already turned into an error.
        let permit = self.encoders.clone().acquire_owned().await.ok()?;
        let intake = self.clone();
        let encode = move || {
            // Held until the work is done: a deadline ends the wait, but does not stop the work at once.
            let _permit = permit;
            let _lane = lane;
            intake.encode_now(api, &told, &shown)
        };
        crew::run(encode).await
    }

    fn encode_now(&self, api: Api, told: &Told, shown: &Shown) -> Encoded {
        let Shown { bytes, cut } = shown;
        let began = Instant::now();
        // Tokenizers are large foreign code, and a panic there must not end the exchange.
        let result = catch_unwind(AssertUnwindSafe(|| match cut {
            None => self.read(api, told, bytes),
            Some(cut) => self.read_beginning(api, told, bytes, *cut),
        }));
        let encoded = result.unwrap_or_else(|_| {
            warn!("the tokenizer panicked; routing by load");
            Encoded::without(api, bytes.len(), Reason::EncodeFailed)
        });
        // The time of a partial tokenization does not show how long a whole body takes.
        if bytes.len() > self.parts.limits.inline
            && !matches!(encoded.prompt, Prompt::Beginning { .. })
        {
            let became = if encoded.ours {
                Became::Tokens
            } else {
                Became::Other
            };
            self.pace.note(became, bytes.len(), began.elapsed());
        }
        self.judged(told, encoded)
    }

    fn session_in(&self, told: &Told, body: &[u8]) -> Option<String> {
        self.parts
            .sessions
            .as_ref()
            .filter(|_| told.session_in_body)?
            .in_body(body)
    }

    /// The model and the hashed prompt of a body, or why there is none. The model is kept even where the prompt fails,
    /// so that the request still goes to a worker that serves it.
    fn read(&self, api: Api, told: &Told, body: &[u8]) -> Encoded {
        let mut clock = Stopwatch::start(told.until);
        let mut encoded = Encoded::without(api, body.len(), Reason::Unreadable);
        encoded.session = self.session_in(told, body);
        let mut request = match openai::parse_body(api, told.boundary.as_deref(), body) {
            Ok(request) => request,
            Err(error) => {
                debug!(%error, "unreadable body");
                encoded.unreadable = Some(error.to_string());
                encoded.asks(openai::model_of(body), &self.parts.models);
                return encoded;
            }
        };
        encoded.times.push(("parse", clock.lap()));
        if let Some((text_bytes, because)) = unhashed(&request.prompt) {
            // The bytes of an image say nothing about its tokens, and are far more.
            encoded.prompt = Prompt::Estimated {
                tokens: estimate(text_bytes),
                because,
            };
        }
        let cache = encoded.salt(told, &mut request, self.parts.clients.trusted);
        let Some(named) = encoded.asks(request.model.take(), &self.parts.models) else {
            if api.shape() != Shape::NoPrompt {
                encoded.fail(Reason::UnknownModel);
            }
            return encoded;
        };
        if request.prompt == openai::Prompt::Nothing {
            return encoded;
        }
        self.measure(&named, &mut request);
        let salt = Salt {
            lora: named.adapter.clone(),
            cache,
        };
        if self.take_engine_tokens((&named, &salt), told, &request, &mut encoded) {
            return encoded;
        }
        let brings_tokens = encoded
            .extension
            .as_ref()
            .is_some_and(|extension| extension.token_data.is_some());
        if matches!(&request.prompt, openai::Prompt::Chat(chat) if chat.has_media())
            && !brings_tokens
        {
            self.read_illustrated((&named, &salt), &request, &mut encoded, &mut clock);
            return encoded;
        }
        match self.tokens((&named, &salt), &request, &mut encoded, &mut clock) {
            Ok(TokenizedPrompts {
                mut prompts,
                stopped: Some(because),
            }) => {
                encoded.fail(because);
                if prompts.len() == 1
                    && let Some(tokens) = prompts.pop()
                {
                    self.begin_with(&named, &salt, tokens, &mut encoded);
                    encoded.times.push(("hash", clock.lap()));
                }
            }
            Ok(TokenizedPrompts {
                prompts,
                stopped: None,
            }) => {
                let hashes: Vec<_> = prompts
                    .iter()
                    .map(|tokens| named.resumed_hashes(tokens, &salt))
                    .collect();
                let prompts: Vec<_> = prompts.into_iter().map(Tokens::into_ids).collect();
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
        let names = prompts.iter().zip(hashes).map(|(tokens, hashes)| {
            self.tracked_content(named, &named.content(tokens, salt), hashes)
                .unwrap_or_default()
                .pop()
        });
        names.collect()
    }

    /// The same of one prompt.
    fn tracked_content(
        &self,
        named: &Named,
        content: &Content<'_>,
        hashes: &BlockHashes,
    ) -> Option<Vec<Arc<[SequenceHash]>>> {
        if self.parts.tracking == TrackingHash::Public {
            return None;
        }
        let scope = Scope {
            model: named.model.name.as_str(),
            routing_group: "",
        };
        Some(vec![self.parts.tracking.sequences(content, hashes, scope)])
    }
}

/// Bytes of text in a prompt that is not hashed, and why it is not.
fn unhashed(prompt: &openai::Prompt) -> Option<(usize, Reason)> {
    match prompt {
        openai::Prompt::Chat(chat) if chat.has_media() => {
            Some((chat.text_bytes(), Reason::Multimodal))
        }
        openai::Prompt::Opaque(opaque) => Some((opaque.text_bytes, hidden(*opaque))),
        openai::Prompt::Nothing => Some((0, Reason::NotInference)),
        _ => None,
    }
}

/// Whether an engine may compute something for requests of this API. What an unknown path asks for is not known.
fn computes(api: Option<Api>) -> bool {
    api.is_none_or(|api| api.shape() != Shape::NoPrompt)
}

#[cfg(test)]
mod tests;
