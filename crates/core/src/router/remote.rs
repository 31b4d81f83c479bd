//! Remote index: the reply of an index server replaces the local index, and its statuses replace
//! the local table of event sources. The decision is the one that the server would have made.
//! Without a reply, the predictors are used.
//!
//! Decision 0017.

use std::collections::HashSet;
use std::sync::Arc;

use super::event_sources::FreshnessTable;
use crate::fleet::Fleet;
use crate::freshness::{IndexFreshness, SourceStatus, StaleReason};
use crate::index::TierBlocks;
use crate::worker::{RankSlot, WorkerRank};

/// Overlaps of a request's prompts from a remote index server.
#[derive(Clone, Debug, Default)]
pub enum RemoteOverlaps {
    /// No server was queried. Without a local index, this equals an unavailable server.
    #[default]
    NotQueried,
    /// Reply of a server.
    Received(Arc<RemoteAnswer>),
    /// No server replied; the last known ranks.
    Unavailable(Arc<RemoteRanks>),
}

/// Reply of an index server.
#[derive(Clone, Debug, Default)]
pub struct RemoteAnswer {
    /// Status of the ranks whose events the server receives.
    pub ranks: Arc<RemoteRanks>,
    /// Per prompt of the request, the ranks that have any of it cached.
    pub prompts: Vec<Vec<(WorkerRank, TierBlocks)>>,
}

/// Status of one worker rank at an index server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRank {
    /// Worker rank.
    pub rank: WorkerRank,
    /// Status of its event source.
    pub status: SourceStatus,
    /// Whether its cache has several groups, which retain blocks by different rules, so a routed
    /// prompt predicts nothing.
    pub has_cache_groups: bool,
}

/// Status of all ranks at an index server.
#[derive(Clone, Debug, Default)]
pub struct RemoteRanks {
    rows: Vec<RemoteRank>,
    pub(super) statuses: Arc<FreshnessTable>,
    /// Statuses to use while no server replies: only the block sizes of the engines remain valid.
    pub(super) block_sizes: Arc<FreshnessTable>,
    grouped: HashSet<WorkerRank>,
}

impl RemoteRanks {
    /// Creates the status tables of these ranks.
    pub fn new(mut rows: Vec<RemoteRank>) -> Self {
        rows.sort_unstable_by_key(|row| row.rank);
        let only_block_size = |status: SourceStatus| SourceStatus {
            engine_block_size: status.engine_block_size,
            ..SourceStatus::default()
        };
        Self {
            statuses: Arc::new(rows.iter().map(|row| (row.rank, row.status)).collect()),
            block_sizes: Arc::new(
                rows.iter()
                    .map(|row| (row.rank, only_block_size(row.status)))
                    .collect(),
            ),
            grouped: rows
                .iter()
                .filter(|row| row.has_cache_groups)
                .map(|row| row.rank)
                .collect(),
            rows,
        }
    }

    /// Returns the ranks, sorted by worker and rank.
    pub fn rows(&self) -> &[RemoteRank] {
        &self.rows
    }

    pub(super) fn publishes_events(&self, rank: WorkerRank) -> bool {
        let status = self.statuses.status(rank);
        status.freshness != IndexFreshness::Absent
            || !matches!(status.reason, None | Some(StaleReason::NoSource))
    }
}

/// Source of a prompt's overlaps, which decides which predictions are added.
#[derive(Clone, Copy)]
pub(super) enum OverlapSource<'a> {
    /// The local index. Each predictor covers the ranks it was opened for.
    LocalIndex,
    /// A remote reply with these ranks.
    RemoteIndex(&'a RemoteRanks, &'a Fleet),
    /// No source.
    Unavailable,
}

impl OverlapSource<'_> {
    /// Returns whether the predictor for ranks without events applies to a slot.
    pub(super) fn counts_without_events(self, slot: RankSlot) -> bool {
        match self {
            OverlapSource::LocalIndex | OverlapSource::Unavailable => true,
            OverlapSource::RemoteIndex(ranks, fleet) => fleet
                .member(slot)
                .is_some_and(|member| !ranks.publishes_events(member.rank)),
        }
    }

    /// Returns whether the predictor for ranks with events applies to a slot.
    pub(super) fn counts_beside_events(self, slot: RankSlot) -> bool {
        match self {
            OverlapSource::LocalIndex => true,
            OverlapSource::RemoteIndex(ranks, fleet) => fleet.member(slot).is_some_and(|member| {
                ranks.publishes_events(member.rank) && !ranks.grouped.contains(&member.rank)
            }),
            OverlapSource::Unavailable => false,
        }
    }
}
