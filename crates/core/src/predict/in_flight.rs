//! Prompts of requests whose response has not begun. They influence the routing of concurrent
//! requests, but are separate from the confirmed blocks: if the engine rejects the request, its
//! blocks are removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::confirmed::{ConfirmedBlocks, PredictionLease};
use super::predicted_tree::{EarlierUse, PredictedTree, PromptUse, RunId, UseStamp};
use super::rules::PredictorRules;
use super::stats::RankPrediction;
use crate::block::BlockHashes;
use crate::index::PathWriter;

/// Prompts in flight to one rank.
pub(super) struct InFlightPrompts {
    max_blocks: u64,
    rules: Arc<PredictorRules>,
    /// `None` after the slot was closed.
    state: Mutex<Option<InFlightState>>,
}

struct InFlightState {
    tree: PredictedTree,
    uses: u64,
    /// Last run of each prompt, by its use.
    tails: BTreeMap<UseStamp, Option<RunId>>,
    refused_blocks: u64,
}

/// Prompt that was sent to a rank. Dropping it removes its blocks, unless another prompt in flight
/// shares them.
#[derive(Debug)]
#[must_use = "dropping it removes the blocks of the prompt"]
pub struct InFlightPrompt {
    hold: Option<(Arc<InFlightPrompts>, UseStamp)>,
    /// Confirmed blocks of the rank. `None` if the slot belongs to another rank by now, or if the
    /// prompt exceeds the limit.
    confirmed: Option<Arc<ConfirmedBlocks>>,
    /// Last uses of the blocks that the rank was predicted to have when the prompt was sent.
    earlier: Vec<EarlierUse>,
}

impl std::fmt::Debug for InFlightPrompts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlightPrompts")
            .field("max_blocks", &self.max_blocks)
            .finish_non_exhaustive()
    }
}

impl InFlightPrompts {
    pub(super) fn new(paths: PathWriter, max_blocks: u64, rules: Arc<PredictorRules>) -> Self {
        let state = InFlightState {
            tree: PredictedTree::new(paths),
            uses: 0,
            tails: BTreeMap::new(),
            refused_blocks: 0,
        };
        Self {
            max_blocks,
            rules,
            state: Mutex::new(Some(state)),
        }
    }

    /// Records a prompt that is being sent. A prompt that exceeds the limit of the rank, alone or
    /// together with the other prompts in flight, is counted and not recorded. If it exceeds the
    /// limit alone, it is not confirmed later either.
    pub(super) fn record(
        self: &Arc<Self>,
        prompt: &BlockHashes,
        confirmed: Arc<ConfirmedBlocks>,
    ) -> InFlightPrompt {
        let blocks = prompt.locals();
        let mut state = self.state.lock();
        let Some(state) = state.as_mut() else {
            return InFlightPrompt::none();
        };
        if blocks.len() as u64 > self.max_blocks {
            state.refused_blocks += blocks.len() as u64;
            return InFlightPrompt::none();
        }
        let known = state.tree.known_blocks(blocks);
        let new = (blocks.len() - known) as u64;
        let earlier = confirmed.earlier_uses(blocks, known);
        if state.tree.blocks() + new > self.max_blocks {
            state.refused_blocks += new;
            return InFlightPrompt {
                hold: None,
                confirmed: Some(confirmed),
                earlier,
            };
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
        InFlightPrompt {
            hold: Some((self.clone(), stamp)),
            confirmed: Some(confirmed),
            earlier,
        }
    }

    /// Removes prompts that have been in flight for longer than the time to live.
    pub(super) fn expire(&self) {
        let now = self.rules.current_step();
        let mut state = self.state.lock();
        let Some(state) = state.as_mut() else { return };
        while let Some((&stamp, _)) = state
            .tails
            .first_key_value()
            .filter(|(stamp, _)| stamp.expiry_step <= now)
        {
            state.remove(stamp);
        }
    }

    /// Adds the blocks of the prompts to the predicted cache of the rank.
    pub(super) fn add_to(&self, stats: &mut RankPrediction) {
        if let Some(state) = self.state.lock().as_ref() {
            stats.in_flight = state.tree.blocks();
            stats.refused += state.refused_blocks;
        }
    }

    pub(super) fn close(&self) {
        let closed = self.state.lock().take();
        // Removing the blocks from the index takes time; the lock is not held meanwhile.
        drop(closed);
    }

    fn remove(&self, stamp: UseStamp) {
        if let Some(state) = self.state.lock().as_mut() {
            state.remove(stamp);
        }
    }
}

impl InFlightState {
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
            hold: None,
            confirmed: None,
            earlier: Vec::new(),
        }
    }

    /// Records the prompt among the confirmed blocks of the rank, because the engine accepted the
    /// request.
    pub fn confirm(mut self, prompt: &BlockHashes) -> PredictionLease {
        // Recorded before it is removed here, so concurrent queries find it in at least one place.
        let Some(rank) = self.confirmed.take() else {
            return PredictionLease::none();
        };
        let lease = match &self.hold {
            Some((prompts, stamp)) if prompts.rules.beside_events => {
                let is_expired = stamp.expiry_step <= prompts.rules.current_step();
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
        if let Some((prompts, stamp)) = self.hold.take() {
            prompts.remove(stamp);
        }
    }
}
