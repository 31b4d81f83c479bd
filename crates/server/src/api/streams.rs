//! Calls of the gRPC service that return streams: dumps, copies and the watched fleet.

use std::pin::Pin;

use futures_util::{Stream, stream};
use tonic::Status;
use warmroute_core::index::dump::VERSION;

use super::error::ApiError;
use super::index_dump::{self, DumpStream};
use super::{ApiDependencies, ApiService, ApiState, MAX_WATCHERS, rank_copy, request, response};
use crate::proto::router as pb;

/// Stream of fleet snapshots.
pub(super) type WatchStream =
    Pin<Box<dyn Stream<Item = Result<pb::WatchFleetResponse, Status>> + Send>>;

impl ApiService {
    pub(super) fn handle_dump(
        &self,
        message: pb::DumpEventsRequest,
    ) -> Result<DumpStream, ApiError> {
        let ApiState { parts, dumps, .. } = &*self.0;
        let permit = dumps
            .clone()
            .try_acquire_owned()
            .map_err(|_| ApiError::TooManyStreams("dumps", index_dump::MAX_DUMPS))?;
        let wanted = message
            .ranks
            .into_iter()
            .map(|rank| request::parse_rank(Some(rank)))
            .collect::<Result<_, _>>()?;
        index_dump::start_dump(
            index_dump::DumpSource {
                writers: parts.writers.clone(),
                fleet: parts.dispatcher.router().fleet(),
                permit,
                shutdown: parts.shutdown.clone(),
            },
            &wanted,
        )
    }

    pub(super) fn handle_latency_copy(&self) -> Result<pb::CopyLatencyResponse, ApiError> {
        if !self.0.parts.readiness.is_started() {
            return Err(ApiError::NotReady);
        }
        let snapshot = self.0.parts.dispatcher.router().load().latency_snapshot();
        // The snapshot has only numbers and strings, so it is always serializable.
        let snapshot = serde_json::to_vec(&snapshot).unwrap_or_default();
        Ok(pb::CopyLatencyResponse { snapshot })
    }

    pub(super) fn handle_copy(
        &self,
        message: &pb::CopyRankRequest,
    ) -> Result<rank_copy::CopyStream, ApiError> {
        let ApiState { parts, copies, .. } = &*self.0;
        let ApiDependencies {
            writers,
            dispatcher,
            ..
        } = parts;
        if !parts.readiness.is_started() {
            return Err(ApiError::NotReady);
        }
        let rank = request::parse_rank(message.worker)?;
        if ![0, u32::from(VERSION)].contains(&message.format) {
            return Err(ApiError::UnsupportedFormat(message.format));
        }
        if !dispatcher.router().source_status(rank).is_attached()
            && writers.ranks().binary_search(&rank).is_ok()
        {
            return Err(ApiError::SourceDetached(rank));
        }
        let permit = copies
            .clone()
            .try_acquire_owned()
            .map_err(|_| ApiError::TooManyStreams("copies", index_dump::MAX_DUMPS))?;
        rank_copy::start_copy(writers, rank, permit, parts.shutdown.clone())
    }

    pub(super) fn handle_watch(
        &self,
        message: &pb::WatchFleetRequest,
    ) -> Result<WatchStream, ApiError> {
        let model = match message.model.as_str() {
            "" => None,
            name => {
                let resolved = self
                    .0
                    .parts
                    .preprocessor
                    .load()
                    .resolve_model(Some(name))
                    .ok_or_else(|| ApiError::UnknownModel(name.to_owned()))?;
                Some(resolved.model.name.clone())
            }
        };
        let permit = self.0.watchers.clone().try_acquire_owned();
        let permit = permit.map_err(|_| ApiError::TooManyStreams("watchers", MAX_WATCHERS))?;
        let mut fleets = self.0.parts.writers.subscribe_fleet();
        fleets.mark_changed();
        let start = (fleets, model, self.0.parts.shutdown.clone(), permit);
        let snapshots = stream::unfold(start, |(mut fleets, model, shutdown, permit)| async move {
            let changed = shutdown.run_until_cancelled(fleets.changed()).await;
            let snapshot = changed?
                .ok()
                .map(|()| response::fleet_to_proto(&fleets.borrow_and_update(), model.as_ref()))?;
            Some((Ok(snapshot), (fleets, model, shutdown, permit)))
        });
        Ok(Box::pin(snapshots))
    }
}
