//! Placement of a request, and the guards it holds: its reservation, its tracking by the health
//! model, and the leases on predicted blocks. All of them are released by drop.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Instant;

use super::predictions::RequestPredictions;
use super::remote::RemoteOverlaps;
use super::route::Route;
use crate::block::BlockHashes;
use crate::fleet::FleetMember;
use crate::health::TrackedRequest;
use crate::load::Reservation;
use crate::parity::ParityCheck;
use crate::worker::{WorkerEndpoint, WorkerId, WorkerRank};

/// Routed request, with everything it holds.
#[derive(Debug)]
pub struct Placement {
    /// Route, with the figures that explain it.
    pub route: Route,
    /// Reserved load.
    pub reservation: Reservation,
    /// The request at each rank that received it, for their health.
    pub tracked: Vec<TrackedRequest>,
    /// Predicted cache of its prompts.
    pub predictions: RequestPredictions,
    /// Parity check to start after a successful response.
    pub(super) parity_check: Option<ParityCheck>,
    /// Known prompts, until the serving worker is known.
    pub prompts: Vec<BlockHashes>,
    /// Overlaps of the prompts from a remote index, until the serving worker is known.
    pub remote_overlaps: RemoteOverlaps,
    /// Members whose cache is predicted, the answering one first.
    pub(super) predicted_members: Vec<FleetMember>,
    /// Time of the placement.
    pub(super) placed_at: Instant,
    /// Rank that was chosen to answer.
    pub(super) chosen: WorkerRank,
    /// Workers whose tokens differed from warmroute's at placement.
    pub(super) mismatched_workers: Arc<BTreeSet<WorkerId>>,
    /// Whether the prefill was complete before the placement.
    pub(super) has_completed_prefill: bool,
    /// Whether the engine reads the prefix cache for this request.
    pub(super) reads_prefix_cache: bool,
    /// Endpoint that served the request, if it belongs to no known worker.
    pub(super) unknown_endpoint: Option<WorkerEndpoint>,
}
