//! Use of a remote index, and queries of remote routers to the local one.
//!
//! Decision 0020.

use super::remote::RemoteAnswer;
use super::state::Router;
use crate::block::BlockHashes;
use crate::fleet::Fleet;
use crate::index::{Overlaps, TierBlocks};
use crate::worker::{ModelName, RankSlot, WorkerRank};

impl Router {
    /// Uses a remote index: the overlaps arrive with the requests.
    #[must_use]
    pub fn with_remote_index(mut self) -> Self {
        self.lookup.has_remote_index = true;
        self.lookup.predictors.covers_all_ranks = true;
        self
    }

    /// Returns whether a remote server holds the index.
    pub fn has_remote_index(&self) -> bool {
        self.lookup.has_remote_index
    }

    /// Queries the local index on behalf of a remote router, for the ranks that serve a model, or
    /// for all.
    pub fn query_index(&self, model: Option<&ModelName>, prompts: &[BlockHashes]) -> RemoteAnswer {
        let mut table = self.lookup.buffers.acquire();
        let answer = loop {
            let fleet = self.fleet.load_full();
            // Statuses are read before the index, as in a local decision.
            let ranks = self.lookup.rank_statuses(&fleet);
            let found = prompts.iter().map(|hashes| {
                self.lookup.index.query_overlaps(hashes, &mut table);
                overlaps_by_rank(&table, &fleet, model)
            });
            let prompts = found.collect();
            // If the fleet changed, the slots belong to other ranks.
            if self.fleet.load().generation() == fleet.generation() {
                break RemoteAnswer { ranks, prompts };
            }
        };
        self.lookup.buffers.release([table]);
        answer
    }
}

fn overlaps_by_rank(
    table: &Overlaps,
    fleet: &Fleet,
    model: Option<&ModelName>,
) -> Vec<(WorkerRank, TierBlocks)> {
    let by_rank = |(slot, blocks): (RankSlot, TierBlocks)| {
        let member = fleet
            .member(slot)
            .filter(|member| model.is_none_or(|model| member.worker.model == *model))?;
        (blocks.total() > 0).then_some((member.rank, blocks))
    };
    let mut found: Vec<_> = table.iter().filter_map(by_rank).collect();
    found.sort_unstable_by_key(|(rank, _)| *rank);
    found
}
