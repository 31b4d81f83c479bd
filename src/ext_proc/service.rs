//! The gRPC service: the task of each stream feeds the exchange and carries out its effects. What an exchange holds is a
//! value of that task, so that whatever ends the stream (the answer's end, the client, Envoy, us) releases the load by drop.

use std::collections::BTreeSet;
use std::error::Error as _;
use std::future::{Ready, ready};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use tonic::codegen::http::uri::Authority;
use tonic::metadata::MetadataMap;
use tonic::server::StreamingService;
use tonic::{Request, Response, Status, Streaming};
use tracing::{debug, trace, warn};

use super::exchange::{Options, Start};
use super::first_tokens::FirstTokens;
use super::gateway::GatewayTraits;
use super::held::Held;
use super::message::{BodyMode, Incoming};
use super::pipeline::Pipeline;
use super::probe::Probe;
use super::replies::{Replies, Replying};
use super::retries::{Retries, Retry};
use super::stream::Stream;
use super::wire::Asked;
use crate::audit::Audit;
use crate::metrics::{Metrics, OutcomeLabel};

/// How Envoy says, as metadata of the stream, which of two filters of one exchange it speaks for.
pub const FILTER: &str = "x-warmroute-filter";
/// The filter that only looks for the first token.
pub const PROBE: &str = "probe";
/// The filter that shows us further tries.
pub const RETRY: &str = "retry";
/// The filter beside it.
pub const PROBED: &str = "probed";

/// Unknown authorities that are logged at most.
const LOGGED_AUTHORITIES: usize = 32;

/// What one configuration makes of exchanges. Those that are open keep the one they began with.
pub struct Live {
    /// The request path.
    pub pipeline: Arc<Pipeline>,
    /// What exchanges are allowed to do.
    pub options: Arc<Options>,
    /// How long the body of a request may take where only we watch that.
    pub upload: Duration,
    /// Most bytes of bodies that all exchanges together hold.
    pub held: usize,
}

/// What outlives a configuration.
pub struct Kept {
    pub(super) metrics: Arc<Metrics>,
    pub(super) first_tokens: Arc<FirstTokens>,
    pub(super) retries: Arc<Retries>,
    pub(super) held: Arc<Held>,
    pub(super) audit: Arc<Audit>,
    warned: AtomicBool,
    warned_of_unreadable: AtomicBool,
    warned_of_undecided: AtomicBool,
    /// Logged authorities without a pool.
    unknown_authorities: Mutex<BTreeSet<String>>,
}

impl Kept {
    /// Nothing yet.
    pub fn new(metrics: Arc<Metrics>, audit: Arc<Audit>) -> Arc<Self> {
        let held = Held::new(metrics.clone());
        Arc::new(Self {
            metrics,
            first_tokens: Arc::default(),
            retries: Arc::default(),
            held,
            audit,
            warned: AtomicBool::new(false),
            warned_of_unreadable: AtomicBool::new(false),
            warned_of_undecided: AtomicBool::new(false),
            unknown_authorities: Mutex::default(),
        })
    }

    /// Where is measured.
    pub fn metrics(&self) -> &Arc<Metrics> {
        &self.metrics
    }

    /// Where the cache reports of engines are compared with the predictions.
    pub fn audit(&self) -> &Arc<Audit> {
        &self.audit
    }

    /// From now on `hear` is told the names of exchanges whose first token was seen by a stream of ours, and that are none of
    /// ours. Who called first is the one who hears.
    pub fn on_foreign_first_token(&self, hear: impl Fn(&str) + Send + Sync + 'static) {
        self.first_tokens.on_foreign(hear);
    }

    /// The first token of an exchange was seen by another replica.
    pub fn first_token_of(&self, name: &str) {
        self.first_tokens.seen(name);
    }

    /// Returns the next message, or `None` after the half-close. An error status ends the stream: Envoy has sent an unreadable
    /// message, or has closed the connection and reads no status.
    pub(super) async fn receive(
        &self,
        incoming: &mut Streaming<Asked>,
    ) -> Result<Option<Asked>, Status> {
        incoming.message().await.inspect_err(|status| {
            // A connection error has a source. Envoy ends many streams in this way.
            if status.source().is_some() {
                return trace!(%status, "stream closed");
            }
            self.metrics.unreadable_messages.inc();
            if self.warned_of_unreadable.swap(true, Ordering::Relaxed) {
                return debug!(%status, "ext_proc message unreadable");
            }
            warn!(%status, "ext_proc message unreadable; see warmroute_unreadable_messages_total for further ones");
        })
    }

    /// The same, if there is a stream of messages to read; else it waits.
    pub(super) async fn receive_from(
        &self,
        incoming: Option<&mut Streaming<Asked>>,
    ) -> Result<Option<Asked>, Status> {
        match incoming {
            Some(incoming) => self.receive(incoming).await,
            None => std::future::pending().await,
        }
    }

    /// Logs once that the gateway does not show whether it or a worker has sent a 503.
    pub(super) fn warn_of_undecided_source(&self) {
        if self.warned_of_undecided.swap(true, Ordering::Relaxed) {
            return debug!("source of a 503 unknown");
        }
        warn!(
            "source of a 503 unknown: the response has neither ext_proc attributes nor x-envoy-upstream-service-time. \
             warmroute marks the worker as overloaded and does not eject it. Set \
             `response_attributes: [upstream.address, response.flags]` of the ext_proc filter, or `headers.enableEnvoyHeaders: true` \
             of Envoy Gateway's ClientTrafficPolicy"
        );
    }

    /// Logs once for each authority that it has no pool.
    fn warn_of_authority(&self, authority: &str) {
        let mut logged = self.unknown_authorities.lock();
        if logged.len() >= LOGGED_AUTHORITIES || !logged.insert(authority.to_owned()) {
            return debug!(authority, "the authority of a call has no pool");
        }
        drop(logged);
        warn!(
            authority,
            "the authority of a call has no pool in `confine.authority`: its requests may go to workers of every pool. Add the \
             authority, or send the pool's calls through the Service that is configured for it"
        );
    }

    /// Says once that a gateway is configured so that prompts cannot be read before it routes.
    pub(super) fn warn_of(&self, mode: BodyMode) {
        if mode == BodyMode::Streamed && !self.warned.swap(true, Ordering::Relaxed) {
            warn!(
                "Envoy streams request bodies (request_body_mode: STREAMED), so it routes before it has shown them: \
                 requests go by load only. Use BUFFERED or FULL_DUPLEX_STREAMED"
            );
        }
    }
}

/// The ext_proc service.
#[derive(Clone)]
pub struct Service {
    live: Arc<Live>,
    kept: Arc<Kept>,
}

impl Service {
    /// A service over the request path.
    pub fn new(live: Live, kept: Arc<Kept>) -> Self {
        Self {
            live: Arc::new(live),
            kept,
        }
    }

    async fn run(
        self,
        mut incoming: Streaming<Asked>,
        replies: Replies,
        call: CallMetadata,
    ) -> Result<(), Status> {
        let filter = call.filter;
        let Some(first) = self.kept.receive(&mut incoming).await? else {
            return Ok(());
        };
        let first = Incoming::read(first);
        if filter == Filter::Retry {
            return self.retry(first, incoming, replies).await;
        }
        if filter == Filter::Probe || Probe::begins(&first) {
            return self.probe(first, incoming, replies).await;
        }
        let sampled = self.live.options.observe.samples(rand::random());
        let start = Start {
            probed_as: (filter == Filter::Probed)
                .then(|| format!("{:016x}", rand::random::<u64>())),
            sampled,
            request_id: format!("{:032x}", rand::random::<u128>()),
            pool: self.pool_of(call.authority.as_ref()),
        };
        Stream::new(
            self.kept,
            self.live,
            (incoming, replies),
            start,
            call.gateway,
        )
        .run(first)
        .await
    }

    /// The pool of a call, by its authority.
    fn pool_of(&self, authority: Option<&Authority>) -> Option<Arc<str>> {
        let authorities = self.live.pipeline.pool_authorities();
        if authorities.is_empty() {
            return None;
        }
        let authority = authority.map_or("", Authority::as_str);
        let pool = authorities.pool_of(authority);
        if pool.is_none() {
            self.kept.warn_of_authority(authority);
        }
        pool
    }

    async fn retry(
        &self,
        first: Incoming,
        mut incoming: Streaming<Asked>,
        replies: Replies,
    ) -> Result<(), Status> {
        let mut retry = Retry::new(self.live.pipeline.prefills().trusting);
        let mut next = Some(first);
        let mut counted = Counted {
            by: &self.kept.metrics.prefill_retries,
            outcome: "left",
        };
        while let Some(message) = next.take() {
            if let Some(hold) = retry.hold(&message) {
                replies.send(hold).await;
            }
            let answered = retry.on_message(&self.kept.retries, message).await;
            if let Some(reply) = answered.reply {
                replies.send(reply).await;
            }
            match answered.outcome {
                Some(became) => counted.outcome = became,
                None => next = self.kept.receive(&mut incoming).await?.map(Incoming::read),
            }
        }
        Ok(())
    }

    async fn probe(
        &self,
        first: Incoming,
        mut incoming: Streaming<Asked>,
        replies: Replies,
    ) -> Result<(), Status> {
        let mut probe = Probe::default();
        let mut next = Some(first);
        let mut counted = Counted {
            by: &self.kept.metrics.first_token_streams,
            outcome: "none",
        };
        while let Some(message) = next.take() {
            let answered = probe.on_message(message);
            for reply in answered.replies {
                replies.send(reply).await;
            }
            if let Some(name) = answered.first_token {
                counted.outcome = if self.kept.first_tokens.seen_here(&name) {
                    "seen"
                } else {
                    "foreign"
                };
            }
            if !answered.ends {
                next = self.kept.receive(&mut incoming).await?.map(Incoming::read);
            }
        }
        Ok(())
    }
}

/// What becomes of a stream, counted when it is over, whatever ends it.
struct Counted<'m> {
    by: &'m Family<OutcomeLabel, Counter>,
    outcome: &'static str,
}

impl Drop for Counted<'_> {
    fn drop(&mut self) {
        self.by
            .get_or_create(&OutcomeLabel {
                outcome: self.outcome,
            })
            .inc();
    }
}

/// The properties of a call that are known before its first message.
struct CallMetadata {
    filter: Filter,
    /// The authority of the call, as the HTTP/2 listener accepts it.
    authority: Option<Authority>,
    gateway: GatewayTraits,
}

impl CallMetadata {
    fn of<T>(request: &Request<T>) -> Self {
        Self {
            filter: Filter::of(request.metadata()),
            authority: request.extensions().get().cloned(),
            gateway: request.extensions().get().cloned().unwrap_or_default(),
        }
    }
}

/// For which filter of an exchange a stream speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Filter {
    /// There is one only, or nobody says.
    Alone,
    /// Another looks for the first token.
    Probed,
    /// The one that looks for the first token.
    Probe,
    /// The one that shows further tries.
    Retry,
}

impl Filter {
    fn of(metadata: &MetadataMap) -> Self {
        match metadata.get(FILTER).and_then(|value| value.to_str().ok()) {
            Some(PROBE) => Filter::Probe,
            Some(PROBED) => Filter::Probed,
            Some(RETRY) => Filter::Retry,
            _ => Filter::Alone,
        }
    }
}

impl StreamingService<Asked> for Service {
    type Response = ProcessingResponse;
    type ResponseStream = Replying;
    type Future = Ready<Result<Response<Replying>, Status>>;

    fn call(&mut self, request: Request<Streaming<Asked>>) -> Self::Future {
        let call = CallMetadata::of(&request);
        let service = self.clone();
        ready(Ok(Response::new(Replying::new(|replies| {
            service.run(request.into_inner(), replies, call)
        }))))
    }
}
