//! gRPC service of the router for clients other than Envoy. `proto/warmroute/v1/router.proto`
//! documents the calls. This module converts between messages and the library. For Envoy, a booking
//! lasts until its stream ends. Clients of this service name their bookings, which last until they
//! are freed or expire.

mod bookings;
pub mod config;
mod error;
mod index_dump;
mod rank_copy;
mod request;
mod response;
mod streams;
mod writers;

use std::sync::Arc;
use std::time::Duration;

use arc_swap::ArcSwap;
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tonic::{Request, Response, Status};
use tracing::info;
use warmroute_core::load::ledger::{LedgerChange, LedgerError};
use warmroute_core::router::{ExternalRouteOptions, SharedBlocks};
use warmroute_metrics::{ApiCallLabels, Metrics};
use warmroute_runtime::lifecycle::{Readiness, ticks};

pub use config::{ApiConfig, MAX_PROMPT_BLOCKS};
pub use error::ApiError;
pub use index_dump::DumpStream;
pub use writers::{RankWriters, RegisteredWriter};

use crate::dispatch::Dispatcher;
use crate::proto::router as pb;
use crate::proto::router::router_server::{Router, RouterServer};
use crate::request::RequestPreprocessor;
use bookings::BookingTable;

/// Maximum number of fleet watchers. Each receives the whole fleet after every change.
const MAX_WATCHERS: usize = 256;

/// gRPC service. Clones share one state.
#[derive(Clone)]
pub struct ApiService(Arc<ApiState>);

struct ApiState {
    parts: ApiDependencies,
    bookings: BookingTable,
    idle_timeout: Duration,
    dumps: Arc<Semaphore>,
    copies: Arc<Semaphore>,
    watchers: Arc<Semaphore>,
}

/// Components that the service uses.
pub struct ApiDependencies {
    /// Preprocessor.
    pub preprocessor: Arc<ArcSwap<RequestPreprocessor>>,
    /// Dispatcher.
    pub dispatcher: Arc<Dispatcher>,
    /// Index writers and the fleet, published by the fleet controller.
    pub writers: Arc<RankWriters>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Cancelled at shutdown to end open-ended streams.
    pub shutdown: CancellationToken,
    /// Readiness of the process. Copies are refused until it is ready.
    pub readiness: Readiness,
}

impl ApiService {
    /// Creates a service without bookings.
    pub fn new(parts: ApiDependencies, config: &ApiConfig) -> Self {
        let bookings = BookingTable::new(
            parts.dispatcher.router().load().clone(),
            config.ledger_rules(),
            parts.metrics.clone(),
        );
        let idle_timeout = config.booking_timeout.get();
        let semaphore = |permits| Arc::new(Semaphore::new(permits));
        Self(Arc::new(ApiState {
            parts,
            bookings,
            idle_timeout,
            dumps: semaphore(index_dump::MAX_DUMPS),
            copies: semaphore(index_dump::MAX_DUMPS),
            watchers: semaphore(MAX_WATCHERS),
        }))
    }

    /// Returns the gRPC server. `max_message_bytes` is the maximum size of a received message.
    pub fn server(&self, max_message_bytes: usize) -> RouterServer<ApiService> {
        RouterServer::new(self.clone())
            .max_decoding_message_size(max_message_bytes)
            .max_encoding_message_size(usize::MAX)
    }

    /// Releases expired bookings periodically. Never returns.
    pub async fn run_expiry(self) -> anyhow::Result<()> {
        let interval =
            (self.0.idle_timeout / 8).clamp(Duration::from_millis(20), Duration::from_secs(30));
        let mut tick = ticks(interval);
        loop {
            tick.tick().await;
            let expired = self.0.bookings.expire();
            if expired > 0 {
                info!(expired, "expired bookings released");
            }
        }
    }

    /// Counts the call by its status code and converts the result.
    fn respond<T>(
        &self,
        call: &'static str,
        answer: Result<T, ApiError>,
    ) -> Result<Response<T>, Status> {
        let code = answer.as_ref().err().map_or("OK", ApiError::code_name);
        self.0
            .parts
            .metrics
            .api
            .calls
            .get_or_create(&ApiCallLabels { method: call, code })
            .inc();
        Ok(Response::new(answer?))
    }

    async fn handle_route(&self, message: pb::RouteRequest) -> Result<pb::RouteResponse, ApiError> {
        let ApiState {
            parts, bookings, ..
        } = &*self.0;
        let dispatcher = &parts.dispatcher;
        let attempt = message
            .book
            .as_ref()
            .map(|book| request::parse_attempt(Some(book)))
            .transpose()?;
        let session = message.session.map(request::parse_session).transpose()?;
        let query =
            request::parse_query(&parts.preprocessor.load_full(), message.query, true).await?;
        let mut request = query.request;
        if let Some(hints) = message.hints {
            request::apply_hints(&mut request, hints)?;
        }
        let tokens = if message.include_token_ids {
            query.tokens
        } else {
            Vec::new()
        };
        let prompts = response::prompts_to_proto(request.prompt.blocks(), tokens);
        let session = session.or(query.session);
        let Some(attempt) = attempt else {
            return Ok(response::route_to_proto(
                &dispatcher.preview(request, session.as_ref())?,
                prompts,
                pb::BookingOutcome::NotBooked,
            ));
        };
        if let Some(route) = bookings.find_route(attempt)? {
            return Ok(response::route_to_proto(
                &route,
                prompts,
                pb::BookingOutcome::AlreadyBooked,
            ));
        }
        let mut active = dispatcher
            .dispatch(request, session.as_ref(), |_| ())
            .await?;
        // The caller may never report the response status.
        dispatcher
            .router()
            .confirm_predictions(&mut active.placement);
        // No await from here on: a cancelled call leaves either nothing or a booking that the
        // caller can find by name.
        let (route, booked) = bookings.store(attempt, active)?;
        Ok(response::route_to_proto(&route, prompts, booked))
    }

    async fn handle_add_request(
        &self,
        message: pb::AddRequestRequest,
    ) -> Result<pb::AddRequestResponse, ApiError> {
        let ApiState {
            parts, bookings, ..
        } = &*self.0;
        let dispatcher = &parts.dispatcher;
        let attempt = request::parse_attempt(message.attempt.as_ref())?;
        let rank = request::parse_rank(message.worker)?;
        let mut request =
            request::parse_query(&parts.preprocessor.load_full(), message.query, false)
                .await?
                .request;
        request::apply_overrides(&mut request, message.overrides.as_ref())?;
        let options = ExternalRouteOptions {
            has_remote_prefill: !message.prefills.unwrap_or(true),
            cached_tokens: message.cached_tokens,
        };
        if options
            .cached_tokens
            .is_some_and(|cached| cached > request.prompt.tokens())
        {
            return Err(ApiError::invalid_argument(
                "cached_tokens exceeds the length of the prompt",
            ));
        }
        let router = dispatcher.router();
        let external = router
            .prepare_external(request, rank, options)
            .ok_or(LedgerError::NotServing { rank })?;
        let (added, booked) = bookings.add_external(attempt, &external, router)?;
        Ok(pb::AddRequestResponse {
            booked: booked.into(),
            prefill_tokens: added.prefill_tokens,
            prompt_blocks: added.prompt_blocks,
        })
    }

    fn handle_prefill_completed(
        &self,
        message: &pb::MarkPrefillCompletedRequest,
    ) -> Result<pb::MarkPrefillCompletedResponse, ApiError> {
        let attempt = request::parse_attempt(message.attempt.as_ref())?;
        let change = self
            .0
            .bookings
            .mark_prefill_completed(attempt, self.0.parts.dispatcher.router())?;
        Ok(pb::MarkPrefillCompletedResponse {
            changed: change == LedgerChange::Applied,
        })
    }

    fn handle_output_block(
        &self,
        message: &pb::AddOutputBlockRequest,
    ) -> Result<pb::AddOutputBlockResponse, ApiError> {
        let attempt = request::parse_attempt(message.attempt.as_ref())?;
        if message
            .decay_fraction
            .is_some_and(|fraction| !(0.0..=1.0).contains(&fraction))
        {
            return Err(ApiError::invalid_argument(
                "decay_fraction must be between 0 and 1",
            ));
        }
        self.0
            .bookings
            .add_output_block(attempt, message.decay_fraction)?;
        Ok(pb::AddOutputBlockResponse {})
    }

    fn handle_free(&self, message: &pb::FreeRequest) -> Result<pb::FreeResponse, ApiError> {
        let attempt = request::parse_attempt(message.attempt.as_ref())?;
        let status = message.status.map(request::parse_status).transpose()?;
        let change = self
            .0
            .bookings
            .free(attempt, status, self.0.parts.dispatcher.router());
        Ok(pb::FreeResponse {
            changed: change == LedgerChange::Applied,
        })
    }

    async fn handle_overlap_scores(
        &self,
        message: pb::OverlapScoresRequest,
    ) -> Result<pb::OverlapScoresResponse, ApiError> {
        let preprocessor = self.0.parts.preprocessor.load_full();
        let query_shared_cache = message.include_shared.unwrap_or(true);
        let mut request = request::parse_query(&preprocessor, message.query, query_shared_cache)
            .await?
            .request;
        request::apply_overrides(&mut request, message.overrides.as_ref())?;
        if !query_shared_cache {
            request.shared = SharedBlocks::NotQueried;
        }
        let shared_cache = query_shared_cache.then(|| {
            response::shared_cache_to_proto(&request.shared, preprocessor.has_shared_cache())
        });
        let blocks = request.prompt.blocks();
        let block_size = blocks
            .first()
            .map_or(0, |hashes| hashes.block_size().0.get());
        let prompt_blocks = blocks.iter().map(|hashes| hashes.len() as u64).sum();
        let estimates = self.0.parts.dispatcher.router().estimate_all(request)?;
        let ranks = estimates
            .iter()
            .map(response::overlap_score_to_proto)
            .collect();
        Ok(pb::OverlapScoresResponse {
            ranks,
            prompt_blocks,
            block_size,
            shared_cache,
        })
    }

    async fn handle_potential_loads(
        &self,
        message: pb::PotentialLoadsRequest,
    ) -> Result<pb::PotentialLoadsResponse, ApiError> {
        let router = self.0.parts.dispatcher.router();
        if message.query.is_none() {
            let mut loads = router.load().snapshot();
            loads.sort_by_key(|load| load.rank);
            return Ok(pb::PotentialLoadsResponse {
                ranks: loads.iter().map(response::load_to_proto).collect(),
            });
        }
        let mut request =
            request::parse_query(&self.0.parts.preprocessor.load_full(), message.query, true)
                .await?
                .request;
        request::apply_overrides(&mut request, message.overrides.as_ref())?;
        let ranks = router
            .estimate_all(request)?
            .iter()
            .map(response::potential_load_to_proto)
            .collect();
        Ok(pb::PotentialLoadsResponse { ranks })
    }
}

#[tonic::async_trait]
impl Router for ApiService {
    type DumpEventsStream = DumpStream;
    type CopyRankStream = rank_copy::CopyStream;
    type WatchFleetStream = streams::WatchStream;

    async fn route(
        &self,
        request: Request<pb::RouteRequest>,
    ) -> Result<Response<pb::RouteResponse>, Status> {
        self.respond("Route", self.handle_route(request.into_inner()).await)
    }

    async fn add_request(
        &self,
        request: Request<pb::AddRequestRequest>,
    ) -> Result<Response<pb::AddRequestResponse>, Status> {
        self.respond(
            "AddRequest",
            self.handle_add_request(request.into_inner()).await,
        )
    }

    async fn mark_prefill_completed(
        &self,
        request: Request<pb::MarkPrefillCompletedRequest>,
    ) -> Result<Response<pb::MarkPrefillCompletedResponse>, Status> {
        self.respond(
            "MarkPrefillCompleted",
            self.handle_prefill_completed(&request.into_inner()),
        )
    }

    async fn add_output_block(
        &self,
        request: Request<pb::AddOutputBlockRequest>,
    ) -> Result<Response<pb::AddOutputBlockResponse>, Status> {
        self.respond(
            "AddOutputBlock",
            self.handle_output_block(&request.into_inner()),
        )
    }

    async fn free(
        &self,
        request: Request<pb::FreeRequest>,
    ) -> Result<Response<pb::FreeResponse>, Status> {
        self.respond("Free", self.handle_free(&request.into_inner()))
    }

    async fn overlap_scores(
        &self,
        request: Request<pb::OverlapScoresRequest>,
    ) -> Result<Response<pb::OverlapScoresResponse>, Status> {
        self.respond(
            "OverlapScores",
            self.handle_overlap_scores(request.into_inner()).await,
        )
    }

    async fn potential_loads(
        &self,
        request: Request<pb::PotentialLoadsRequest>,
    ) -> Result<Response<pb::PotentialLoadsResponse>, Status> {
        self.respond(
            "PotentialLoads",
            self.handle_potential_loads(request.into_inner()).await,
        )
    }

    async fn dump_events(
        &self,
        request: Request<pb::DumpEventsRequest>,
    ) -> Result<Response<DumpStream>, Status> {
        self.respond("DumpEvents", self.handle_dump(request.into_inner()))
    }

    async fn copy_rank(
        &self,
        request: Request<pb::CopyRankRequest>,
    ) -> Result<Response<rank_copy::CopyStream>, Status> {
        self.respond("CopyRank", self.handle_copy(&request.into_inner()))
    }

    async fn copy_latency(
        &self,
        _request: Request<pb::CopyLatencyRequest>,
    ) -> Result<Response<pb::CopyLatencyResponse>, Status> {
        self.respond("CopyLatency", self.handle_latency_copy())
    }

    async fn watch_fleet(
        &self,
        request: Request<pb::WatchFleetRequest>,
    ) -> Result<Response<streams::WatchStream>, Status> {
        self.respond("WatchFleet", self.handle_watch(&request.into_inner()))
    }
}
