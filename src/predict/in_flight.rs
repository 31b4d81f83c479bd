//! Prompts of requests whose answer has not begun. Concurrent requests are routed by them, but they are kept apart from the
//! confirmed blocks: an engine may still refuse the request, and its blocks are then removed.

use std::collections::BTreeMap;
use std::sync::Arc;

use parking_lot::Mutex;

use super::Rules;
use super::chains::{Chains, RunId, Stamp, Use};
use super::rank::Rank;
use crate::block::BlockHashes;
use crate::index::PathWriter;

/// The prompts in flight to one rank.
pub(super) struct InFlightPrompts {
    most_blocks: u64,
    rules: Arc<Rules>,
    /// None once the slot was closed.
    state: Mutex<Option<State>>,
}

struct State {
    chains: Chains,
    uses: u64,
    /// The last run of each prompt, by the time it was recorded.
    tails: BTreeMap<Stamp, Option<RunId>>,
    refused_blocks: u64,
}

/// Counters of the prompts in flight to one rank.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct InFlightStats {
    pub(super) blocks: u64,
    pub(super) refused_blocks: u64,
}

/// A prompt that was sent to a rank. Dropping it removes its blocks, unless another prompt in flight shares them.
#[derive(Debug)]
#[must_use = "dropping it removes the blocks of the prompt"]
pub struct InFlightPrompt {
    hold: Option<(Arc<InFlightPrompts>, Stamp)>,
    /// The confirmed blocks of the rank; none where the slot has another owner by now, or the prompt does not fit.
    confirmed: Option<Arc<Rank>>,
}

impl std::fmt::Debug for InFlightPrompts {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("InFlightPrompts")
            .field("most_blocks", &self.most_blocks)
            .finish_non_exhaustive()
    }
}

impl InFlightPrompts {
    pub(super) fn new(paths: PathWriter, most_blocks: u64, rules: Arc<Rules>) -> Self {
        let state = State {
            chains: Chains::new(paths),
            uses: 0,
            tails: BTreeMap::new(),
            refused_blocks: 0,
        };
        Self {
            most_blocks,
            rules,
            state: Mutex::new(Some(state)),
        }
    }

    /// Records a prompt that is sent now. A prompt that exceeds the limit of the rank, alone or together with the other
    /// prompts in flight, is counted and not recorded; one that exceeds it alone will not be confirmed either.
    pub(super) fn record(
        self: &Arc<Self>,
        prompt: &BlockHashes,
        confirmed: Arc<Rank>,
    ) -> InFlightPrompt {
        let blocks = prompt.locals();
        let mut state = self.state.lock();
        let Some(state) = state.as_mut() else {
            return InFlightPrompt::none();
        };
        if blocks.len() as u64 > self.most_blocks {
            state.refused_blocks += blocks.len() as u64;
            return InFlightPrompt::none();
        }
        let known = state.chains.known(blocks);
        let new = (blocks.len() - known) as u64;
        if state.chains.blocks() + new > self.most_blocks {
            state.refused_blocks += new;
            return InFlightPrompt {
                hold: None,
                confirmed: Some(confirmed),
            };
        }
        state.uses += 1;
        let stamp = Stamp {
            end_of_life: self.rules.end_of_life(),
            use_number: state.uses,
        };
        let recorded = state
            .chains
            .record(blocks, known, Use { stamp, lease: true });
        state.tails.insert(stamp, recorded.tail);
        InFlightPrompt {
            hold: Some((self.clone(), stamp)),
            confirmed: Some(confirmed),
        }
    }

    /// Removes prompts that have been in flight for longer than the time to live of blocks.
    pub(super) fn expire(&self) {
        let now = self.rules.steps();
        let mut state = self.state.lock();
        let Some(state) = state.as_mut() else { return };
        while let Some((&stamp, _)) = state
            .tails
            .first_key_value()
            .filter(|(stamp, _)| stamp.end_of_life <= now)
        {
            state.remove(stamp);
        }
    }

    pub(super) fn stats(&self) -> InFlightStats {
        let state = self.state.lock();
        let of = |state: &State| InFlightStats {
            blocks: state.chains.blocks(),
            refused_blocks: state.refused_blocks,
        };
        state.as_ref().map(of).unwrap_or_default()
    }

    pub(super) fn close(&self) {
        let closed = self.state.lock().take();
        // Removing the blocks from the index takes time; the lock is not held meanwhile.
        drop(closed);
    }

    fn remove(&self, stamp: Stamp) {
        if let Some(state) = self.state.lock().as_mut() {
            state.remove(stamp);
        }
    }
}

impl State {
    fn remove(&mut self, stamp: Stamp) {
        let Some(tail) = self.tails.remove(&stamp) else {
            return;
        };
        self.chains.release(tail, 0, stamp);
        while let Some((_, unused)) = self.chains.oldest() {
            self.chains.evict(unused, u64::MAX);
        }
    }
}

impl InFlightPrompt {
    pub(super) fn none() -> Self {
        Self {
            hold: None,
            confirmed: None,
        }
    }

    /// The engine accepted the request: records the prompt among the confirmed blocks of the rank.
    pub fn confirm(mut self, prompt: &BlockHashes) -> super::Lease {
        // Recorded before it is removed here, so concurrent queries find it in either place.
        let Some(rank) = self.confirmed.take() else {
            return super::Lease::none();
        };
        match &self.hold {
            Some((prompts, stamp)) if prompts.rules.beside_events => {
                let is_expired = stamp.end_of_life <= prompts.rules.steps();
                if is_expired {
                    super::Lease::none()
                } else {
                    rank.record_until(prompt, Some(stamp.end_of_life))
                }
            }
            _ => rank.record(prompt),
        }
    }
}

impl Drop for InFlightPrompt {
    fn drop(&mut self) {
        if let Some((prompts, stamp)) = self.hold.take() {
            prompts.remove(stamp);
        }
    }
}
