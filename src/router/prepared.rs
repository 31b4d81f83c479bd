//! A question with everything that can be found out before the load is looked at: what each worker rank has cached, and
//! under which names the load will count the prompt's blocks. It can wait for its turn in this form, and be looked up
//! again when it waited long.

use std::collections::HashSet;
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

use super::pools::serving;
use super::question::{Prompt, RouteRequest};
use super::settings::RouterSettings;
use crate::block::{BlockHashes, SequenceHash};
use crate::fleet::{Fleet, Member};
use crate::index::{Overlaps, TierBlocks};
use crate::load::LoadView;
use crate::schedule::Weights;
use crate::worker::{BlockSize, Role, Slot};

/// Tables of overlaps that are kept to be used again.
const MOST_SCRATCH: usize = 64;

/// Prompts of one request whose blocks are looked for among the live requests' blocks. That happens for every candidate
/// while nobody else can book; the blocks of further prompts count as new.
pub(super) const MOST_SEARCHED: usize = 256;

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
        Self { table, tokens: hashes.tokens(), block_size: hashes.block_size() }
    }
}

/// Cached prompt tokens on a slot; `as_reported` leaves the last token to the engine, which always computes it.
pub(super) fn cached_tokens(prompts: &[Looked], slot: Slot, as_reported: bool) -> u64 {
    let of_prompt = |looked: &Looked| {
        let size = looked.block_size.tokens();
        let held = looked.table.get(slot).total() as usize;
        let most = if as_reported { looked.tokens.saturating_sub(1) / size } else { usize::MAX };
        (held.min(most) * size) as u64
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
        self.overlaps.iter().fold(TierBlocks::default(), |sum, looked| sum.plus(looked.table.get(member.slot)))
    }

    /// Cached prompt tokens on a member; `as_reported` leaves the last token to the engine, which always computes it.
    pub(super) fn cached_tokens(&self, member: &Member, as_reported: bool) -> u64 {
        cached_tokens(&self.overlaps, member.slot, as_reported)
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
        let Ok(members) = serving(fleet, &self.request) else { return 0 };
        let apart = members.iter().any(|member| member.worker.role == Role::Prefill);
        let computes = |member: &&&Member| !apart || member.worker.role != Role::Decode;
        let slots: Vec<_> = members.iter().filter(computes).map(|member| member.slot).collect();
        let best = |looked: &Looked| {
            let held = slots.iter().map(|slot| looked.table.get(*slot).total()).max().unwrap_or(0);
            u64::from(held) * looked.block_size.tokens() as u64
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
        self.scratch.give(self.overlaps.drain(..).map(|looked| looked.table));
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
    /// Each once, however many of the prompts begin with it.
    pub(super) sequences: Arc<[SequenceHash]>,
    /// Which of them follow one another: what each prompt adds to those before it. Only within such a stretch does
    /// whoever holds a block hold all before it.
    stretches: Vec<Range<usize>>,
    /// How many the prompts have together.
    pub(super) complete: u64,
}

impl Blocks {
    /// The blocks under the names that the load uses.
    pub(super) fn of(request: &RouteRequest) -> Self {
        let prompts: Vec<Arc<[SequenceHash]>> = match &request.tracked {
            Some(tracked) => tracked.clone(),
            None => request.prompt.blocks().iter().map(BlockHashes::shared_sequences).collect(),
        };
        let complete = prompts.iter().map(|prompt| prompt.len() as u64).sum();
        if let [only] = &prompts[..] {
            return Self { sequences: only.clone(), stretches: iter::once(0..only.len()).collect(), complete };
        }
        let mut seen = HashSet::new();
        let mut sequences = Vec::new();
        let mut stretches = Vec::new();
        for prompt in &prompts {
            let start = sequences.len();
            sequences.extend(prompt.iter().copied().filter(|sequence| seen.insert(*sequence)));
            if sequences.len() > start {
                stretches.push(start..sequences.len());
            }
        }
        Self { sequences: sequences.into(), stretches, complete }
    }

    /// Blocks that a member would have to add to those of its live requests.
    pub(super) fn additional(&self, view: &LoadView<'_>, member: &Member) -> u64 {
        let of_stretch = |stretch: &Range<usize>| view.additional_blocks(member.slot, &self.sequences[stretch.clone()]);
        let (searched, others) = self.stretches.split_at(self.stretches.len().min(MOST_SEARCHED));
        searched.iter().map(of_stretch).sum::<u64>() + others.iter().map(|stretch| stretch.len() as u64).sum::<u64>()
    }
}
