//! Prompts of requests whose response has not begun. They influence the routing of concurrent
//! requests, but are separate from the confirmed blocks: if the engine rejects the request, its
//! blocks are removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::predicted_rank::{PredictedRank, PredictionLease};
use super::predicted_tree::{EarlierUse, PredictedTree, PromptUse, RunId, UseStamp};
use crate::block::BlockHashes;
use crate::index::PathWriter;

/// Prompts in flight to one rank.
pub(super) struct InFlightState {
    max_blocks: u64,
    pub(super) tree: PredictedTree,
    uses: u64,
    /// Last run of each prompt, by its use.
    tails: BTreeMap<UseStamp, Option<RunId>>,
    pub(super) refused_blocks: u64,
}

/// Prompt that was sent to a rank. Dropping it removes its blocks, unless another prompt in flight
/// shares them.
#[derive(Debug)]
#[must_use = "dropping it removes the blocks of the prompt"]
pub struct InFlightPrompt {
    /// `None` if the slot belongs to another rank by now, or if the prompt exceeds the limit.
    rank: Option<Arc<PredictedRank>>,
    /// Use of the prompt while it is in flight; `None` if it was not recorded.
    stamp: Option<UseStamp>,
    /// Last uses of the blocks that the rank was predicted to have when the prompt was sent.
    earlier: Vec<EarlierUse>,
}

impl PredictedRank {
    /// Records a prompt that is being sent. A prompt that exceeds the limit of the rank, alone or
    /// together with the other prompts in flight, is counted and not recorded. If it exceeds the
    /// limit alone, it is not confirmed later either.
    pub(super) fn record_in_flight(self: &Arc<Self>, prompt: &BlockHashes) -> InFlightPrompt {
        let blocks = prompt.locals();
        let mut state = self.in_flight.lock();
        let Some(state) = state.as_mut() else {
            return InFlightPrompt::none();
        };
        if blocks.len() as u64 > state.max_blocks {
            state.refused_blocks += blocks.len() as u64;
            return InFlightPrompt::none();
        }
        let known = state.tree.known_blocks(blocks);
        let new = (blocks.len() - known) as u64;
        let mut sent = InFlightPrompt {
            rank: Some(self.clone()),
            stamp: None,
            earlier: self.earlier_uses(blocks, known),
        };
        if state.tree.blocks() + new > state.max_blocks {
            state.refused_blocks += new;
            return sent;
        }
        state.uses += 1;
        let stamp = UseStamp {
            expiry_step: self.rules.expiry_step(),
            use_number: state.uses,
        };
        let recorded = state
            .tree
            .record(blocks, known, PromptUse { stamp, lease: true });
        state.tails.insert(stamp, recorded.tail);
        sent.stamp = Some(stamp);
        sent
    }

    /// Removes prompts that have been in flight for longer than the time to live.
    pub(super) fn expire_in_flight(&self) {
        let now = self.rules.current_step();
        let mut state = self.in_flight.lock();
        let Some(state) = state.as_mut() else { return };
        while let Some((&stamp, _)) = state
            .tails
            .first_key_value()
            .filter(|(stamp, _)| stamp.expiry_step <= now)
        {
            state.remove(stamp);
        }
    }
}

impl InFlightState {
    pub(super) fn new(paths: PathWriter, max_blocks: u64) -> Self {
        Self {
            max_blocks,
            tree: PredictedTree::new(paths),
            uses: 0,
            tails: BTreeMap::new(),
            refused_blocks: 0,
        }
    }

    fn remove(&mut self, stamp: UseStamp) {
        let Some(tail) = self.tails.remove(&stamp) else {
            return;
        };
        self.tree.release(tail, 0, stamp);
        while let Some((_, unused)) = self.tree.oldest() {
            self.tree.evict(unused, u64::MAX);
        }
    }
}

impl InFlightPrompt {
    pub(super) fn none() -> Self {
        Self {
            rank: None,
            stamp: None,
            earlier: Vec::new(),
        }
    }

    /// Records the prompt among the confirmed blocks of the rank, because the engine accepted the
    /// request.
    pub fn confirm(mut self, prompt: &BlockHashes) -> PredictionLease {
        // Recorded before it is removed here, so concurrent queries find it in at least one place.
        let Some(rank) = &self.rank else {
            return PredictionLease::none();
        };
        let lease = match self.stamp {
            Some(stamp) if rank.rules.beside_events => {
                let is_expired = stamp.expiry_step <= rank.rules.current_step();
                if is_expired {
                    PredictionLease::none()
                } else {
                    rank.record_until(prompt, Some(stamp.expiry_step))
                }
            }
            _ => rank.record(prompt),
        };
        lease.with_earlier_uses(std::mem::take(&mut self.earlier))
    }
}

impl Drop for InFlightPrompt {
    fn drop(&mut self) {
        if let (Some(rank), Some(stamp)) = (&self.rank, self.stamp)
            && let Some(state) = rank.in_flight.lock().as_mut()
        {
            state.remove(stamp);
        }
    }
}
