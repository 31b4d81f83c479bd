//! A question with everything that can be found out before the load is looked at: what each worker rank has cached, and
//! under which names the load will count the prompt's blocks. It can wait for its turn in this form, and be looked up
//! again when it waited long.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::pools::serving;
use super::question::{Prompt, RouteRequest};
use super::reason::Reason;
use super::settings::RouterSettings;
use super::sources::Trusted;
use crate::block::{BlockHashes, SequenceHash};
use crate::fleet::{Fleet, Member};
use crate::index::{Overlaps, TierBlocks};
use crate::load::{Additional, LoadView, Sequences};
use crate::schedule::Weights;
use crate::trust::{Because, Standing, Trust};
use crate::worker::{BlockSize, Role, Slot, WorkerId};

/// Tables of overlaps that are kept to be used again.
const MOST_SCRATCH: usize = 64;

/// Tables of overlaps, used again and again.
#[derive(Clone, Debug, Default)]
pub(super) struct Scratch(Arc<Mutex<Vec<Overlaps>>>);

impl Scratch {
    pub(super) fn take(&self) -> Overlaps {
        self.0.lock().pop().unwrap_or_default()
    }

    pub(super) fn give(&self, tables: impl IntoIterator<Item = Overlaps>) {
        let mut kept = self.0.lock();
        kept.extend(tables);
        // A request may hold thousands of prompts; their tables are not kept for ever.
        kept.truncate(MOST_SCRATCH);
    }
}

/// A question that only needs the load to be decided.
#[derive(Debug)]
pub struct Prepared {
    /// The question.
    pub(super) request: RouteRequest,
    /// The fleet that the overlaps' slots belong to.
    pub(super) generation: u64,
    /// What is cached of each prompt.
    pub(super) overlaps: Vec<Looked>,
    /// The blocks as the load counts them.
    pub(super) blocks: Blocks,
    /// How it is decided.
    pub(super) settings: Arc<RouterSettings>,
    /// The weights for this request.
    pub(super) weights: Weights,
    /// Whether equal blocks of live requests count once.
    pub(super) reuse: bool,
    /// Whether the prefill counts.
    pub(super) track_prefill: bool,
    /// Time for the overlaps.
    pub(super) index_time: Duration,
    /// How far event sources could be believed when it was looked up.
    pub(super) trust: Arc<Trusted>,
    /// Who made other tokens than we do; nobody where the tokens are not ours.
    pub(super) differing: Arc<BTreeSet<WorkerId>>,
    pub(super) scratch: Scratch,
}

/// The overlaps of one prompt and what is needed to read them as tokens.
#[derive(Debug)]
pub(super) struct Looked {
    pub(super) table: Overlaps,
    pub(super) tokens: usize,
    pub(super) block_size: BlockSize,
}

impl Looked {
    pub(super) fn new(table: Overlaps, hashes: &BlockHashes) -> Self {
        Self {
            table,
            tokens: hashes.tokens(),
            block_size: hashes.block_size(),
        }
    }
}

/// How cached tokens are counted.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counting {
    /// Tokens per block of the engine, which reuses whole blocks of its own only; ours where it is not known.
    pub(super) engine: Option<BlockSize>,
    /// Whether the last token is left to the engine, which always computes it.
    pub(super) as_reported: bool,
}

/// Whether a slot holds anything of any prompt. Most do not, and then nothing else has to be found out about them.
#[inline(always)]
fn holds_any(prompts: &[Looked], slot: Slot) -> bool {
    // A loop, because `any` becomes a call, and this is asked of every candidate of every decision.
    for looked in prompts {
        if looked.table.get(slot).total() > 0 {
            return true;
        }
    }
    false
}

/// Cached prompt tokens on a slot.
pub(super) fn cached_tokens(prompts: &[Looked], slot: Slot, counting: Counting) -> u64 {
    let of_prompt = |looked: &Looked| {
        let size = counting.engine.unwrap_or(looked.block_size).tokens();
        let held = looked.table.get(slot).total() as usize * looked.block_size.tokens();
        let most = if counting.as_reported {
            looked.tokens.saturating_sub(1)
        } else {
            usize::MAX
        };
        (held.min(most) / size * size) as u64
    };
    prompts.iter().map(of_prompt).sum()
}

impl Prepared {
    /// The question.
    pub fn request(&self) -> &RouteRequest {
        &self.request
    }

    /// What a member has cached, all prompts together.
    pub(super) fn overlap(&self, member: &Member) -> TierBlocks {
        self.overlap_and_credit(member).0
    }

    fn held(&self, member: &Member) -> TierBlocks {
        if self.differs(member) {
            return TierBlocks::default();
        }
        let whole = |looked: &Looked| {
            let held = looked.table.get(member.slot);
            match self.engine_blocks(member, looked.block_size) {
                Some(count) if held.total() > 0 => held.cut(held.total() / count * count),
                _ => held,
            }
        };
        self.overlaps
            .iter()
            .fold(TierBlocks::default(), |sum, looked| sum.plus(whole(looked)))
    }

    /// How many of our blocks one of the engine's is, where that is more than one.
    fn engine_blocks(&self, member: &Member, ours: BlockSize) -> Option<u32> {
        let engine = self.standing(member).engine_block_size?;
        (engine > ours).then(|| engine.0.get() / ours.0)
    }

    /// How far a member's event source can be believed.
    pub(super) fn standing(&self, member: &Member) -> Standing {
        self.trust.standing(member.rank)
    }

    /// Whether a member makes other tokens of the prompt, so that whatever it holds is no part of it.
    pub(super) fn differs(&self, member: &Member) -> bool {
        self.differing.contains(&member.rank.worker)
    }

    /// Whether a member tells of its cache and nothing of that can be used.
    pub(super) fn is_unusable(&self, member: &Member) -> bool {
        let standing = self.standing(member);
        standing.trust == Trust::Absent
            && !matches!(standing.because, None | Some(Because::NoSource))
    }

    /// What a member has cached, and what is left of the credit for it.
    #[inline(always)]
    pub(super) fn overlap_and_credit(&self, member: &Member) -> (TierBlocks, f64) {
        match holds_any(&self.overlaps, member.slot) {
            true => (
                self.held(member),
                self.settings.trust.credit(self.standing(member)),
            ),
            false => (TierBlocks::default(), 1.0),
        }
    }

    /// Why nothing is known of anybody's cache.
    pub(super) fn why_cold(&self, candidates: &[&Member]) -> Reason {
        let mismatch =
            |member: &&Member| self.standing(member).because == Some(Because::BlockSizeMismatch);
        if candidates.iter().any(mismatch) {
            Reason::BlockSizeMismatch
        } else {
            Reason::IndexCold
        }
    }

    /// Cached prompt tokens on a member; `as_reported` leaves the last token to the engine, which always computes it.
    #[inline]
    pub(super) fn cached_tokens(&self, member: &Member, as_reported: bool) -> u64 {
        if holds_any(&self.overlaps, member.slot) {
            self.cached_of(&self.overlaps, member, as_reported)
        } else {
            0
        }
    }

    fn cached_of(&self, prompts: &[Looked], member: &Member, as_reported: bool) -> u64 {
        if self.differs(member) {
            0
        } else {
            cached_tokens(prompts, member.slot, self.counting(member, as_reported))
        }
    }

    fn counting(&self, member: &Member, as_reported: bool) -> Counting {
        Counting {
            engine: self.standing(member).engine_block_size,
            as_reported,
        }
    }

    /// Prompt tokens that an engine could find cached at best: whole blocks, and never the last token.
    pub(super) fn reusable_tokens(&self) -> u64 {
        let of_prompt = |looked: &Looked| {
            let size = looked.block_size.tokens();
            (looked.tokens.saturating_sub(1) / size * size) as u64
        };
        self.overlaps.iter().map(of_prompt).sum()
    }

    /// Most tokens that anybody has cached of the prompts who might have to compute them.
    pub(super) fn best_cached_tokens(&self, fleet: &Fleet) -> u64 {
        let Ok(members) = serving(fleet, &self.request) else {
            return 0;
        };
        let apart = members
            .iter()
            .any(|member| member.worker.role == Role::Prefill);
        let computes = |member: &&&Member| !apart || member.worker.role != Role::Decode;
        let members: Vec<_> = members.iter().filter(computes).collect();
        let best = |looked: &Looked| {
            let one = std::slice::from_ref(looked);
            let held = |member: &&&Member| self.cached_of(one, member, false);
            members.iter().map(held).max().unwrap_or(0)
        };
        self.overlaps.iter().map(best).sum()
    }

    /// Gives the prompts away; who is placed needs them no longer to be placed.
    pub(super) fn take_prompts(&mut self) -> Vec<BlockHashes> {
        match &mut self.request.prompt {
            Prompt::Hashed(prompts) => std::mem::take(prompts),
            Prompt::Beginning { known, .. } => vec![known.clone()],
            Prompt::Estimated { .. } => Vec::new(),
        }
    }

    pub(super) fn forget_overlaps(&mut self) {
        self.scratch
            .give(self.overlaps.drain(..).map(|looked| looked.table));
    }
}

impl Drop for Prepared {
    fn drop(&mut self) {
        self.forget_overlaps();
    }
}

/// The complete blocks of a request.
#[derive(Clone, Debug)]
pub(super) struct Blocks {
    /// Their names.
    pub(super) sequences: Sequences,
    /// How many the prompts have together.
    pub(super) complete: u64,
}

impl Blocks {
    /// The blocks under the names that the load uses.
    pub(super) fn of(request: &RouteRequest) -> Self {
        let prompts: Vec<Arc<[SequenceHash]>> = match &request.tracked {
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
            sequences: Sequences::of(prompts),
            complete,
        }
    }

    /// What of them live requests do not hold already; all of them where nothing is taken to be shared.
    pub(super) fn additional(&self, view: &LoadView<'_>, is_shared: bool) -> Additional {
        if is_shared {
            view.additional(&self.sequences)
        } else {
            Additional::everywhere(self.complete)
        }
    }
}
