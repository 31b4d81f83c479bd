//! Request with everything that can be looked up before the load is read: the cached prefix on each
//! rank, and the block hashes for load tracking. A request waits in the queue in this form, and is
//! refreshed after a long wait.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::event_sources::FreshnessTable;
use super::phase_plan::{BookedPhases, PhasePlan};
use super::pools::serving;
use super::reason::Reason;
use super::request::{RoutePrompt, RouteRequest};
use super::settings::RouterSettings;
use crate::block::{BlockHashes, SequenceHash};
use crate::fleet::{Fleet, FleetMember};
use crate::freshness::{IndexFreshness, SourceStatus, StaleReason};
use crate::index::{Overlaps, TierBlocks};
use crate::load::{AdditionalBlocks, LoadBooking, LoadView, PromptSequences};
use crate::policy::PolicySettings;
use crate::worker::{BlockSize, ModelName, RankSlot, WorkerId, WorkerRole};

/// Maximum number of retained overlap tables.
const MAX_BUFFERS: usize = 64;

/// Pool of overlap tables, which are reused to avoid allocations.
#[derive(Clone, Debug, Default)]
pub(super) struct OverlapBufferPool(Arc<Mutex<Vec<Overlaps>>>);

impl OverlapBufferPool {
    pub(super) fn acquire(&self) -> Overlaps {
        self.0.lock().pop().unwrap_or_default()
    }

    pub(super) fn release(&self, tables: impl IntoIterator<Item = Overlaps>) {
        let mut pool = self.0.lock();
        pool.extend(tables);
        // A request may have thousands of prompts, and their tables must not be retained forever.
        pool.truncate(MAX_BUFFERS);
    }
}

/// Request that needs only the load to be decided.
#[derive(Debug)]
pub struct RoutingContext {
    /// The request.
    pub(super) request: RouteRequest,
    /// Generation of the fleet whose slots the overlaps use.
    pub(super) generation: u64,
    /// Overlaps of each prompt.
    pub(super) overlaps: Vec<PromptOverlaps>,
    /// Blocks as the load tracker counts them.
    pub(super) blocks: PromptBlocks,
    /// Settings of the decision.
    pub(super) settings: Arc<RouterSettings>,
    /// Whether equal blocks of running requests count once.
    pub(super) assume_kv_reuse: bool,
    /// Whether the prefill counts as load.
    pub(super) track_prefill: bool,
    /// Status of the event sources at the time of the lookup.
    pub(super) freshness: Arc<FreshnessTable>,
    /// Workers whose tokens differ from warmroute's; empty if the tokens came from the engine.
    pub(super) mismatched_workers: Arc<BTreeSet<WorkerId>>,
    /// Workers that compute the last matched block of each prompt again.
    pub(super) recomputing_workers: Arc<BTreeSet<WorkerId>>,
    pub(super) buffers: OverlapBufferPool,
}

/// Overlaps of one prompt, with the sizes that convert them to tokens.
#[derive(Debug)]
pub(super) struct PromptOverlaps {
    pub(super) table: Overlaps,
    pub(super) tokens: usize,
    pub(super) block_size: BlockSize,
}

impl PromptOverlaps {
    pub(super) fn new(table: Overlaps, hashes: &BlockHashes) -> Self {
        Self {
            table,
            tokens: hashes.tokens(),
            block_size: hashes.block_size(),
        }
    }
}

/// Rules for counting cached tokens.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct TokenCounting {
    /// Tokens per block of the engine, which reuses only whole blocks of its own; defaults to the
    /// configured size.
    pub(super) engine_block_size: Option<BlockSize>,
    /// Whether the last token, which the engine always computes, is excluded.
    pub(super) excludes_last_token: bool,
    /// Whether the engine computes the last matched block again.
    pub(super) recomputes_last_block: bool,
}

/// Returns whether a slot holds any block of the prompts. Most slots hold none and need no further
/// checks.
#[inline(always)]
fn holds_any(prompts: &[PromptOverlaps], slot: RankSlot) -> bool {
    // A loop, because `any` is not inlined, and this runs for every candidate of every decision.
    for prompt in prompts {
        if prompt.table.get(slot).total() > 0 {
            return true;
        }
    }
    false
}

/// Counts the cached prompt tokens on a slot.
pub(super) fn cached_tokens(
    prompts: &[PromptOverlaps],
    slot: RankSlot,
    counting: TokenCounting,
) -> u64 {
    let in_prompt = |prompt: &PromptOverlaps| {
        let block_size = counting
            .engine_block_size
            .unwrap_or(prompt.block_size)
            .tokens();
        let held = prompt.table.get(slot).total() as usize * prompt.block_size.tokens();
        let max = if counting.excludes_last_token || counting.recomputes_last_block {
            prompt.tokens.saturating_sub(1)
        } else {
            usize::MAX
        };
        let dropped = usize::from(counting.recomputes_last_block);
        ((held.min(max) / block_size).saturating_sub(dropped) * block_size) as u64
    };
    prompts.iter().map(in_prompt).sum()
}

impl RoutingContext {
    /// Returns the request.
    pub fn request(&self) -> &RouteRequest {
        &self.request
    }

    /// Returns the policy for this request on the ranks of a model.
    pub(super) fn policy_of(&self, model: &ModelName) -> PolicySettings {
        let configured = self.settings.policy_of(model);
        self.request.overrides.apply(configured)
    }

    /// Returns the policy for this request.
    pub(super) fn policy(&self) -> PolicySettings {
        match &self.request.model {
            Some(model) => self.policy_of(model),
            None => self.request.overrides.apply(&self.settings.policy),
        }
    }

    /// Returns the cached blocks of a member over all prompts.
    pub(super) fn overlap(&self, member: &FleetMember) -> TierBlocks {
        self.overlap_and_credit(member).0
    }

    fn held(&self, member: &FleetMember) -> TierBlocks {
        if self.has_token_mismatch(member) {
            return TierBlocks::default();
        }
        let whole_blocks = |prompt: &PromptOverlaps| {
            let held = prompt.table.get(member.slot);
            if self.recomputes_last_block(member) {
                let prompts = std::slice::from_ref(prompt);
                let reused = cached_tokens(prompts, member.slot, self.counting(member, true));
                return held.limit_to((reused / prompt.block_size.tokens() as u64) as u32);
            }
            match self.blocks_per_engine_block(member, prompt.block_size) {
                Some(count) if held.total() > 0 => held.limit_to(held.total() / count * count),
                _ => held,
            }
        };
        self.overlaps
            .iter()
            .fold(TierBlocks::default(), |sum, prompt| {
                sum.combine(whole_blocks(prompt))
            })
    }

    /// Returns the number of configured blocks per block of the engine, if the engine's blocks are
    /// larger.
    fn blocks_per_engine_block(&self, member: &FleetMember, configured: BlockSize) -> Option<u32> {
        let engine = self.source_status(member).engine_block_size?;
        (engine > configured).then(|| engine.0.get() / configured.0)
    }

    /// Returns the status of a member's event source.
    pub(super) fn source_status(&self, member: &FleetMember) -> SourceStatus {
        self.freshness.status(member.rank)
    }

    /// Returns whether the engine of a member computes other tokens, so its cached blocks do not
    /// match the prompt.
    pub(super) fn has_token_mismatch(&self, member: &FleetMember) -> bool {
        self.mismatched_workers.contains(&member.rank.worker)
    }

    /// Returns whether a member publishes events of which none can be used.
    pub(super) fn is_source_unusable(&self, member: &FleetMember) -> bool {
        let status = self.source_status(member);
        status.freshness == IndexFreshness::Absent
            && !matches!(status.reason, None | Some(StaleReason::NoSource))
    }

    /// Returns the cached blocks of a member and the factor on the credit for them.
    #[inline(always)]
    pub(super) fn overlap_and_credit(&self, member: &FleetMember) -> (TierBlocks, f64) {
        if !holds_any(&self.overlaps, member.slot) {
            return (TierBlocks::default(), 1.0);
        }
        let status = self.source_status(member);
        (self.held(member), self.settings.freshness.credit(status))
    }

    /// Returns the reason why no cache is known.
    pub(super) fn cold_reason(&self, candidates: &[&FleetMember]) -> Reason {
        let mismatch = |member: &&FleetMember| {
            self.source_status(member).reason == Some(StaleReason::BlockSizeMismatch)
        };
        if candidates.iter().any(mismatch) {
            Reason::BlockSizeMismatch
        } else {
            Reason::IndexCold
        }
    }

    /// Counts the cached prompt tokens of a member. `as_reported` excludes the last token, which
    /// the engine always computes.
    #[inline]
    pub(super) fn cached_tokens(&self, member: &FleetMember, as_reported: bool) -> u64 {
        if holds_any(&self.overlaps, member.slot) {
            self.cached_of(&self.overlaps, member, as_reported)
        } else {
            0
        }
    }

    fn cached_of(
        &self,
        prompts: &[PromptOverlaps],
        member: &FleetMember,
        as_reported: bool,
    ) -> u64 {
        if self.has_token_mismatch(member) {
            0
        } else {
            cached_tokens(prompts, member.slot, self.counting(member, as_reported))
        }
    }

    fn counting(&self, member: &FleetMember, as_reported: bool) -> TokenCounting {
        TokenCounting {
            engine_block_size: self.source_status(member).engine_block_size,
            excludes_last_token: as_reported,
            recomputes_last_block: self.recomputes_last_block(member),
        }
    }

    fn recomputes_last_block(&self, member: &FleetMember) -> bool {
        self.recomputing_workers.contains(&member.rank.worker)
    }

    /// Returns the prompt tokens that an engine could find cached at best: whole blocks without the
    /// last token.
    pub(super) fn reusable_tokens(&self) -> u64 {
        let in_prompt = |prompt: &PromptOverlaps| {
            let block_size = prompt.block_size.tokens();
            (prompt.tokens.saturating_sub(1) / block_size * block_size) as u64
        };
        self.overlaps.iter().map(in_prompt).sum()
    }

    /// Sums, over the prompts, the maximum of cached tokens over all workers that may compute them.
    pub(super) fn best_cached_tokens(&self, fleet: &Fleet) -> u64 {
        let Ok(members) = serving(fleet, &self.request) else {
            return 0;
        };
        let has_prefill_workers = members
            .iter()
            .any(|member| member.worker.role == WorkerRole::Prefill);
        let computes_prompts = |member: &&&FleetMember| {
            !has_prefill_workers || member.worker.role != WorkerRole::Decode
        };
        let members: Vec<_> = members.iter().filter(computes_prompts).collect();
        let best = |prompt: &PromptOverlaps| {
            let prompt = std::slice::from_ref(prompt);
            let cached = |member: &&&FleetMember| self.cached_of(prompt, member, false);
            members.iter().map(cached).max().unwrap_or(0)
        };
        self.overlaps.iter().map(best).sum()
    }

    /// Returns the expected time to the first content of the answer, which is its end unless it is
    /// streamed. `None` if the engine may compute nothing.
    pub(super) fn content_time(
        &self,
        plan: &PhasePlan<'_>,
        bookings: &[LoadBooking],
        view: &LoadView<'_>,
    ) -> Option<Duration> {
        if !self.request.computes || !self.request.has_prompt() {
            return None;
        }
        let first_token = bookings
            .iter()
            .map(|booking| view.first_token_seconds(booking))
            .sum::<f64>();
        let answers_at_once = self.request.is_streamed || plan.booked == BookedPhases::Prefill;
        let decode = if answers_at_once {
            0.0
        } else {
            let input = &plan.decode.input;
            let step = input.estimate.coefficients.decode_step;
            self.request.output_tokens(&input.estimate) * step
        };
        Duration::try_from_secs_f64(first_token + decode).ok()
    }

    /// Moves the prompts out, after the request was placed.
    pub(super) fn take_prompts(&mut self) -> Vec<BlockHashes> {
        match &mut self.request.prompt {
            RoutePrompt::Hashed(prompts) => std::mem::take(prompts),
            RoutePrompt::Truncated { known, .. } => vec![known.clone()],
            RoutePrompt::Estimated { .. } => Vec::new(),
        }
    }

    pub(super) fn release_overlaps(&mut self) {
        self.buffers
            .release(self.overlaps.drain(..).map(|prompt| prompt.table));
    }
}

impl Drop for RoutingContext {
    fn drop(&mut self) {
        self.release_overlaps();
    }
}

/// Complete blocks of a request.
#[derive(Clone, Debug)]
pub(super) struct PromptBlocks {
    /// Hashes of the blocks.
    pub(super) sequences: PromptSequences,
    /// Number of blocks over all prompts.
    pub(super) complete: u64,
}

impl PromptBlocks {
    /// Returns the blocks under the hashes that the load tracker uses.
    pub(super) fn from_request(request: &RouteRequest) -> Self {
        let prompts: Vec<Arc<[SequenceHash]>> = match &request.tracked_blocks {
            Some(tracked) => tracked.clone(),
            None => request
                .prompt
                .blocks()
                .iter()
                .map(BlockHashes::shared_sequences)
                .collect(),
        };
        let complete = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        Self {
            sequences: PromptSequences::from_prompts(prompts),
            complete,
        }
    }

    /// Returns the blocks that running requests do not hold already, or all blocks if none are
    /// assumed to be shared.
    pub(super) fn additional(&self, view: &LoadView<'_>, is_shared: bool) -> AdditionalBlocks {
        if is_shared {
            view.additional(&self.sequences)
        } else {
            AdditionalBlocks::uniform(self.complete)
        }
    }
}
