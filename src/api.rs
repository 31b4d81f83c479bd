//! The router as a gRPC service, for callers that are not Envoy: `proto/warmroute/v1/router.proto` says what it offers and
//! what the numbers mean. Here is only the way from a message to the library and back. What Envoy's streams hold until
//! they end, callers here hold by a name, and lose when nothing is heard of it for too long.

mod answer;
mod bookings;
pub mod config;
mod copy;
mod dump;
mod events;
mod fault;
mod feed;
mod question;

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use futures_util::{Stream, stream};
use tokio::sync::Semaphore;
use tokio::time::MissedTickBehavior;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::info;

/// The messages, a client and a server, as compiled from the protocol.
#[expect(clippy::too_many_lines, reason = "generated")]
pub mod pb {
    tonic::include_proto!("warmroute.v1");
}

pub use config::ApiConfig;
pub use dump::DumpStream;
pub use events::NoEvent;
pub use fault::Fault;
pub use feed::{Feed, Joined};

use crate::entrance::Entrance;
use crate::index::dump::VERSION;
use crate::intake::Intake;
use crate::lifecycle::Readiness;
use crate::load::ledger::{Change, Refused};
use crate::metrics::{CallLabels, Metrics};
use crate::router::{Elsewhere, SharedBlocks};
use bookings::{Added, Bookings, Kept};
use pb::router_server::{Router, RouterServer};
use question::Shape;

/// Watchers of the fleet at a time: each is told the whole of it with every change.
const MOST_WATCHERS: usize = 256;

/// The service. A clone is the same service.
#[derive(Clone)]
pub struct Api(Arc<Shared>);

struct Shared {
    intake: Arc<ArcSwap<Intake>>,
    entrance: Arc<Entrance>,
    feed: Arc<Feed>,
    metrics: Arc<Metrics>,
    bookings: Bookings,
    silence: Duration,
    shape: Shape,
    dumps: Arc<Semaphore>,
    copies: Arc<Semaphore>,
    watchers: Arc<Semaphore>,
    closing: CancellationToken,
    readiness: Readiness,
}

/// What the service is made of.
pub struct Parts {
    /// The way in.
    pub intake: Arc<ArcSwap<Intake>>,
    /// The way to the router.
    pub entrance: Arc<Entrance>,
    /// What the keeper tells.
    pub feed: Arc<Feed>,
    /// Measures.
    pub metrics: Arc<Metrics>,
    /// Ends the streams that have no end.
    pub closing: CancellationToken,
    /// Whether what is known is of use to others.
    pub readiness: Readiness,
}

impl Api {
    /// A service in which nothing is booked.
    pub fn new(parts: Parts, config: &ApiConfig) -> Self {
        let Parts {
            intake,
            entrance,
            feed,
            metrics,
            closing,
            readiness,
        } = parts;
        let bookings = Bookings::new(
            entrance.router().load().clone(),
            config.rules(),
            metrics.clone(),
        );
        let silence = config.silence.get();
        let shape = Shape {
            most_blocks: config.most_blocks as usize,
            shared: true,
        };
        let at_once = |most| Arc::new(Semaphore::new(most));
        Self(Arc::new(Shared {
            intake,
            entrance,
            feed,
            metrics,
            bookings,
            silence,
            shape,
            dumps: at_once(dump::MOST),
            copies: at_once(dump::MOST),
            watchers: at_once(MOST_WATCHERS),
            closing,
            readiness,
        }))
    }

    /// The same as a gRPC server. `largest` is the most bytes that a message to it may have.
    pub fn server(&self, largest: usize) -> RouterServer<Api> {
        RouterServer::new(self.clone())
            .max_decoding_message_size(largest)
            .max_encoding_message_size(usize::MAX)
    }

    /// Releases, for ever, what was silent for too long.
    pub async fn run_expiry(&self) {
        let pause = (self.0.silence / 8).clamp(Duration::from_millis(20), Duration::from_secs(30));
        let mut tick = tokio::time::interval(pause);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            let silent = self.0.bookings.expire();
            if silent > 0 {
                info!(
                    silent,
                    "bookings were released because nothing was heard of them"
                );
            }
        }
    }

    /// Counts a call, and makes its answer a message.
    fn told<T>(&self, call: &'static str, answer: Result<T, Fault>) -> Result<Response<T>, Status> {
        let code = answer.as_ref().err().map_or("OK", Fault::name);
        self.0
            .metrics
            .api_calls
            .get_or_create(&CallLabels { call, code })
            .inc();
        Ok(Response::new(answer?))
    }

    async fn choose(&self, asked: pb::RouteRequest) -> Result<pb::RouteResponse, Fault> {
        let Shared {
            intake,
            entrance,
            bookings,
            shape,
            ..
        } = &*self.0;
        let attempt = asked
            .book
            .as_ref()
            .map(|book| question::attempt(Some(book)))
            .transpose()?;
        let session = asked.session.map(question::session).transpose()?;
        let read = question::read(&intake.load_full(), asked.question, *shape).await?;
        let mut request = read.request;
        if let Some(wishes) = asked.wishes {
            question::wish(&mut request, wishes)?;
        }
        let tokens = if asked.with_tokens {
            read.tokens
        } else {
            Vec::new()
        };
        let prompts = answer::prompts(request.prompt.blocks(), tokens);
        let session = session.or(read.session);
        let Some(attempt) = attempt else {
            return Ok(answer::route(
                &entrance.ask(request, session.as_ref())?,
                prompts,
                pb::Booked::Not,
            ));
        };
        if let Some(route) = bookings.again(attempt)? {
            return Ok(answer::route(&route, prompts, pb::Booked::Before));
        }
        let mut admitted = entrance.admit(request, session.as_ref(), |_| ()).await?;
        // A caller may never report the status of the answer.
        entrance.router().confirm_predictions(&mut admitted.booked);
        // No await from here on: a caller that leaves leaves either nothing or what it can find again by name.
        Ok(match bookings.keep(attempt, admitted)? {
            Kept::Now(route) => answer::route(&route, prompts, pb::Booked::Now),
            Kept::Before(route) => answer::route(&route, prompts, pb::Booked::Before),
        })
    }

    async fn add(&self, asked: pb::AddRequestRequest) -> Result<pb::AddRequestResponse, Fault> {
        let Shared {
            intake,
            entrance,
            bookings,
            shape,
            ..
        } = &*self.0;
        let attempt = question::attempt(asked.attempt.as_ref())?;
        let rank = question::rank(asked.worker)?;
        let mut request = question::read(
            &intake.load_full(),
            asked.question,
            Shape {
                shared: false,
                ..*shape
            },
        )
        .await?
        .request;
        question::apply_overrides(&mut request, asked.overrides.as_ref())?;
        let how = Elsewhere {
            prefilled: !asked.prefills.unwrap_or(true),
            cached_tokens: asked.cached_tokens,
        };
        if how
            .cached_tokens
            .is_some_and(|cached| cached > request.prompt.tokens())
        {
            return Err(Fault::argument(
                "more tokens are cached than the prompt has",
            ));
        }
        let router = entrance.router();
        let foreign = router
            .foreign(request, rank, how)
            .ok_or(Refused::NotServing { rank })?;
        let (added, booked) = match bookings.add(attempt, &foreign, router)? {
            Kept::Now(added) => (added, pb::Booked::Now),
            Kept::Before(added) => (added, pb::Booked::Before),
        };
        let Added {
            prefill_tokens,
            prompt_blocks,
            ..
        } = added;
        Ok(pb::AddRequestResponse {
            booked: booked.into(),
            prefill_tokens,
            prompt_blocks,
        })
    }

    fn prefilled(
        &self,
        asked: &pb::MarkPrefillCompletedRequest,
    ) -> Result<pb::MarkPrefillCompletedResponse, Fault> {
        let attempt = question::attempt(asked.attempt.as_ref())?;
        let change = self
            .0
            .bookings
            .mark_prefill_completed(attempt, self.0.entrance.router())?;
        Ok(pb::MarkPrefillCompletedResponse {
            changed: change == Change::Applied,
        })
    }

    fn output(
        &self,
        asked: &pb::AddOutputBlockRequest,
    ) -> Result<pb::AddOutputBlockResponse, Fault> {
        let attempt = question::attempt(asked.attempt.as_ref())?;
        if asked
            .decay_fraction
            .is_some_and(|fraction| !(0.0..=1.0).contains(&fraction))
        {
            return Err(Fault::argument("the decay fraction is not between 0 and 1"));
        }
        self.0
            .bookings
            .output_block(attempt, asked.decay_fraction)?;
        Ok(pb::AddOutputBlockResponse {})
    }

    fn release(&self, asked: &pb::FreeRequest) -> Result<pb::FreeResponse, Fault> {
        let attempt = question::attempt(asked.attempt.as_ref())?;
        let status = asked.status.map(question::status).transpose()?;
        let change = self
            .0
            .bookings
            .free(attempt, status, self.0.entrance.router());
        Ok(pb::FreeResponse {
            changed: change == Change::Applied,
        })
    }

    fn dump(&self, asked: pb::DumpEventsRequest) -> Result<DumpStream, Fault> {
        let Shared {
            feed,
            entrance,
            dumps,
            closing,
            ..
        } = &*self.0;
        let permit = dumps
            .clone()
            .try_acquire_owned()
            .map_err(|_| Fault::TooMany("dumps", dump::MOST))?;
        let wanted = asked
            .ranks
            .into_iter()
            .map(|rank| question::rank(Some(rank)))
            .collect::<Result<_, _>>()?;
        let (feed, fleet, closing) = (feed.clone(), entrance.router().fleet(), closing.clone());
        dump::dump(
            dump::Source {
                feed,
                fleet,
                permit,
                closing,
            },
            &wanted,
        )
    }

    fn copy(&self, asked: &pb::CopyRankRequest) -> Result<copy::CopyStream, Fault> {
        let Shared {
            feed,
            entrance,
            copies,
            closing,
            readiness,
            ..
        } = &*self.0;
        if !readiness.was_reached() {
            return Err(Fault::NotReady);
        }
        let rank = question::rank(asked.worker)?;
        if ![0, u32::from(VERSION)].contains(&asked.format) {
            return Err(Fault::Format(asked.format));
        }
        if !entrance.router().trust(rank).is_attached() && feed.ranks().binary_search(&rank).is_ok()
        {
            return Err(Fault::Detached(rank));
        }
        let permit = copies
            .clone()
            .try_acquire_owned()
            .map_err(|_| Fault::TooMany("copies", dump::MOST))?;
        copy::copy(feed, rank, permit, closing.clone())
    }

    async fn overlaps(
        &self,
        asked: pb::OverlapScoresRequest,
    ) -> Result<pb::OverlapScoresResponse, Fault> {
        let intake = self.0.intake.load_full();
        let shape = Shape {
            shared: asked.include_shared.unwrap_or(true),
            ..self.0.shape
        };
        let mut request = question::read(&intake, asked.question, shape)
            .await?
            .request;
        question::apply_overrides(&mut request, asked.overrides.as_ref())?;
        if !shape.shared {
            request.shared = SharedBlocks::NotAsked;
        }
        let shared_cache = shape
            .shared
            .then(|| answer::shared_cache(&request.shared, intake.has_shared_cache()));
        let blocks = request.prompt.blocks();
        let block_size = blocks
            .first()
            .map_or(0, |hashes| hashes.block_size().0.get());
        let prompt_blocks = blocks.iter().map(|hashes| hashes.len() as u64).sum();
        let surveyed = self.0.entrance.router().survey(request)?;
        let ranks = surveyed.iter().map(answer::overlap_score).collect();
        Ok(pb::OverlapScoresResponse {
            ranks,
            prompt_blocks,
            block_size,
            shared_cache,
        })
    }

    async fn loads(
        &self,
        asked: pb::PotentialLoadsRequest,
    ) -> Result<pb::PotentialLoadsResponse, Fault> {
        let router = self.0.entrance.router();
        if asked.question.is_none() {
            let mut loads = router.load().snapshot();
            loads.sort_by_key(|load| load.rank);
            return Ok(pb::PotentialLoadsResponse {
                ranks: loads.iter().map(answer::load).collect(),
            });
        }
        let mut request = question::read(&self.0.intake.load_full(), asked.question, self.0.shape)
            .await?
            .request;
        question::apply_overrides(&mut request, asked.overrides.as_ref())?;
        let ranks = router
            .survey(request)?
            .iter()
            .map(answer::potential_load)
            .collect();
        Ok(pb::PotentialLoadsResponse { ranks })
    }

    fn watch(&self, asked: &pb::WatchFleetRequest) -> Result<WatchStream, Fault> {
        let model = match asked.model.as_str() {
            "" => None,
            name => {
                let named = self
                    .0
                    .intake
                    .load()
                    .named(Some(name))
                    .ok_or_else(|| Fault::UnknownModel(name.to_owned()))?;
                Some(named.model.name.clone())
            }
        };
        let permit = self.0.watchers.clone().try_acquire_owned();
        let permit = permit.map_err(|_| Fault::TooMany("watchers", MOST_WATCHERS))?;
        let mut fleets = self.0.feed.fleets();
        fleets.mark_changed();
        let start = (fleets, model, self.0.closing.clone(), permit);
        let snapshots = stream::unfold(start, |(mut fleets, model, closing, permit)| async move {
            let changed = closing.run_until_cancelled(fleets.changed()).await;
            let told = changed?
                .ok()
                .map(|()| answer::fleet(&fleets.borrow_and_update(), model.as_ref()))?;
            Some((Ok(told), (fleets, model, closing, permit)))
        });
        Ok(Box::pin(snapshots))
    }
}

/// The fleet in messages.
type WatchStream = Pin<Box<dyn Stream<Item = Result<pb::WatchFleetResponse, Status>> + Send>>;

#[tonic::async_trait]
impl Router for Api {
    type DumpEventsStream = DumpStream;
    type CopyRankStream = copy::CopyStream;
    type WatchFleetStream = WatchStream;

    async fn route(
        &self,
        request: Request<pb::RouteRequest>,
    ) -> Result<Response<pb::RouteResponse>, Status> {
        self.told("Route", self.choose(request.into_inner()).await)
    }

    async fn add_request(
        &self,
        request: Request<pb::AddRequestRequest>,
    ) -> Result<Response<pb::AddRequestResponse>, Status> {
        self.told("AddRequest", self.add(request.into_inner()).await)
    }

    async fn mark_prefill_completed(
        &self,
        request: Request<pb::MarkPrefillCompletedRequest>,
    ) -> Result<Response<pb::MarkPrefillCompletedResponse>, Status> {
        self.told(
            "MarkPrefillCompleted",
            self.prefilled(&request.into_inner()),
        )
    }

    async fn add_output_block(
        &self,
        request: Request<pb::AddOutputBlockRequest>,
    ) -> Result<Response<pb::AddOutputBlockResponse>, Status> {
        self.told("AddOutputBlock", self.output(&request.into_inner()))
    }

    async fn free(
        &self,
        request: Request<pb::FreeRequest>,
    ) -> Result<Response<pb::FreeResponse>, Status> {
        self.told("Free", self.release(&request.into_inner()))
    }

    async fn overlap_scores(
        &self,
        request: Request<pb::OverlapScoresRequest>,
    ) -> Result<Response<pb::OverlapScoresResponse>, Status> {
        self.told("OverlapScores", self.overlaps(request.into_inner()).await)
    }

    async fn potential_loads(
        &self,
        request: Request<pb::PotentialLoadsRequest>,
    ) -> Result<Response<pb::PotentialLoadsResponse>, Status> {
        self.told("PotentialLoads", self.loads(request.into_inner()).await)
    }

    async fn dump_events(
        &self,
        request: Request<pb::DumpEventsRequest>,
    ) -> Result<Response<DumpStream>, Status> {
        self.told("DumpEvents", self.dump(request.into_inner()))
    }

    async fn copy_rank(
        &self,
        request: Request<pb::CopyRankRequest>,
    ) -> Result<Response<copy::CopyStream>, Status> {
        self.told("CopyRank", self.copy(&request.into_inner()))
    }

    async fn watch_fleet(
        &self,
        request: Request<pb::WatchFleetRequest>,
    ) -> Result<Response<WatchStream>, Status> {
        self.told("WatchFleet", self.watch(&request.into_inner()))
    }
}
