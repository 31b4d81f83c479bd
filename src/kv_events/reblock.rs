//! Blocks of another size than ours. All workers of a model are compared by blocks of one size, but engines cut as they
//! like; where one size divides the other nothing is lost by that but the edges. A larger block of the engine is several of
//! ours, under names made of its own, so that nothing has to be remembered. A smaller one is a part of ours, and ours is
//! held where all its parts are: that takes a memory of the chains, [`join`].

mod join;

use std::borrow::Cow;
use std::num::NonZeroU32;

use xxhash_rust::xxh3::xxh3_64;

use super::media::{self, MediaTokens};
use crate::block::hash::{Windows, locals};
use crate::block::{EngineHash, LocalHash, Salt};
use crate::index::{Forgotten, KvEvent, Outcome, StoredBlock};
use crate::tier::Tier;
use crate::worker::BlockSize;
use join::Chains;

/// How an engine's blocks lie on ours.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fit {
    /// They are the same.
    Same,
    /// One of the engine's is so many of ours.
    Split(NonZeroU32),
    /// So many of the engine's are one of ours.
    Join(NonZeroU32),
}

impl Fit {
    /// `None` where neither divides the other.
    pub(super) fn of(engine: BlockSize, ours: BlockSize) -> Option<Self> {
        let (engine, ours) = (engine.0.get(), ours.0.get());
        // A size that no engine has would be as many names for every block.
        if engine.max(ours) / engine.min(ours) > MOST_PARTS {
            return None;
        }
        match (
            NonZeroU32::new(engine / ours),
            NonZeroU32::new(ours / engine),
        ) {
            _ if engine == ours => Some(Fit::Same),
            (Some(parts), _) if engine.is_multiple_of(ours) => Some(Fit::Split(parts)),
            (_, Some(parts)) if ours.is_multiple_of(engine) => Some(Fit::Join(parts)),
            _ => None,
        }
    }
}

/// Blocks of one side in a block of the other, at most.
const MOST_PARTS: u32 = 1024;

/// A run of the engine's blocks with what they hold.
#[derive(Clone, Debug)]
pub(super) struct Run<'a> {
    pub(super) parent: Option<EngineHash>,
    pub(super) names: &'a [EngineHash],
    /// Token ids; of bigrams one more than the blocks hold.
    pub(super) tokens: &'a [u32],
    pub(super) bigrams: bool,
    pub(super) salt: &'a Salt,
    /// Per block of the engine, the multimodal objects in it.
    pub(super) objects: Vec<Vec<u64>>,
    pub(super) tier: Tier,
}

impl<'a> Run<'a> {
    fn windows(&self) -> Windows {
        if self.bigrams {
            Windows::Eagle
        } else {
            Windows::Plain
        }
    }

    /// The tokens that the blocks hold, with pad tokens in place of the objects that these explain.
    fn content(&mut self, size: BlockSize, media: MediaTokens) -> Cow<'a, [u32]> {
        let wanted = self.names.len() * size.tokens() + usize::from(self.bigrams);
        let tokens = &self.tokens[..self.tokens.len().min(wanted)];
        let padded = if self.bigrams || self.objects.is_empty() {
            None
        } else {
            media::normalize(tokens, &mut self.objects, size, media)
        };
        padded.map_or(Cow::Borrowed(tokens), Cow::Owned)
    }
}

/// What a change of the engine's blocks means for ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Regrouped {
    pub(super) events: Vec<KvEvent>,
    /// What became of the engine's event where the index is not asked.
    pub(super) outcome: Outcome,
}

/// Blocks of one worker rank on their way to another size.
#[derive(Debug)]
pub(super) struct Reblocker {
    ours: BlockSize,
    media: MediaTokens,
    /// Tokens per block of the engine, by tier.
    sizes: [Option<BlockSize>; Tier::ALL.len()],
    chains: Option<Chains>,
    /// How often events were lost.
    gaps: u32,
}

impl Reblocker {
    pub(super) fn new(ours: BlockSize, media: MediaTokens) -> Self {
        Self {
            ours,
            media,
            sizes: Default::default(),
            chains: None,
            gaps: 0,
        }
    }

    /// Forgets everything: the cache is empty.
    pub(super) fn clear(&mut self) {
        *self = Self {
            gaps: self.gaps,
            ..Self::new(self.ours, self.media)
        };
    }

    /// Sizes of the engine's blocks by tier; `None` where parts of our blocks are remembered here, which nobody else knows.
    pub(super) fn sizes(&self) -> Option<[Option<u32>; Tier::ALL.len()]> {
        self.chains
            .is_none()
            .then(|| self.sizes.map(|size| size.map(|size| size.0.get())))
    }

    /// Goes on with sizes that another reader has met.
    pub(super) fn resume(&mut self, sizes: [Option<u32>; Tier::ALL.len()]) {
        self.sizes = sizes.map(|size| BlockSize::new(size?));
    }

    /// Tokens per block of the engine on the device, once it has told.
    pub(super) fn engine(&self) -> Option<BlockSize> {
        self.sizes[Tier::Device as usize]
    }

    /// How blocks of this size in a tier lie on ours; `None` where they cannot be brought to it. Removals do not tell the
    /// size, so a tier keeps the first that can be used until the cache is empty.
    pub(super) fn fit(&mut self, engine: BlockSize, tier: Tier) -> Option<Fit> {
        let fit = Fit::of(engine, self.ours)?;
        let known = self.sizes[tier as usize].get_or_insert(engine);
        if *known != engine {
            return None;
        }
        if matches!(fit, Fit::Join(_)) {
            let chains = self
                .chains
                .get_or_insert_with(|| Chains::new(engine, self.ours, self.gaps));
            return (chains.engine() == engine).then_some(fit);
        }
        Some(fit)
    }

    /// Events were lost for good, so often by now.
    pub(super) fn doubt(&mut self, gaps: u32) {
        self.gaps = gaps;
        self.chains.iter_mut().for_each(|chains| chains.doubt(gaps));
    }

    /// The index has taken blocks for gone. The engine's blocks that are gone with them, and what the index is to be told:
    /// where one is several of ours, the first of these may have stayed for the sake of others.
    pub(super) fn forgotten(
        &mut self,
        forgotten: &Forgotten,
    ) -> (Vec<(EngineHash, Tier)>, Vec<KvEvent>) {
        let parts = self
            .chains
            .as_mut()
            .map(|chains| chains.forgotten(forgotten))
            .unwrap_or_default();
        let others = Tier::ALL.into_iter().filter_map(|tier| {
            let Some(Fit::Split(parts)) =
                self.sizes[tier as usize].and_then(|engine| Fit::of(engine, self.ours))
            else {
                return None;
            };
            let names = forgotten.names.iter().filter(|(_, of)| *of == tier);
            let others = names.flat_map(|&(name, _)| {
                parts_of(name, parts.get()).filter(move |part| *part != name)
            });
            Some(KvEvent::Removed {
                blocks: others.collect(),
                tier,
            })
        });
        (parts, others.collect())
    }

    /// Blocks as large as ours or larger.
    pub(super) fn split(&self, mut run: Run<'_>, parts: NonZeroU32) -> KvEvent {
        let engine = BlockSize(self.ours.0.saturating_mul(parts));
        let (parts, size) = (parts.get(), self.ours.tokens());
        let tokens = run.content(engine, self.media);
        // Which of our blocks an object is in that has no pad token is not told.
        let clear = if parts == 1 {
            None
        } else {
            run.objects.iter().position(|objects| !objects.is_empty())
        };
        let whole = clear.unwrap_or(run.names.len()).min(run.names.len());
        let most = whole * parts as usize * size + usize::from(run.bigrams);
        let objects: &[Vec<u64>] = if parts == 1 { &run.objects } else { &[] };
        let hashes = locals(
            &tokens[..tokens.len().min(most)],
            self.ours,
            run.salt,
            run.windows(),
            objects,
        );
        let names = run.names[..whole]
            .iter()
            .flat_map(|&name| parts_of(name, parts));
        let blocks = names
            .zip(hashes)
            .map(|(engine, local)| StoredBlock { engine, local })
            .collect();
        KvEvent::Stored {
            parent: run.parent,
            blocks,
            tier: run.tier,
        }
    }

    /// Blocks smaller than ours.
    pub(super) fn join(&mut self, mut run: Run<'_>) -> Regrouped {
        let Some(chains) = &mut self.chains else {
            return Regrouped {
                events: Vec::new(),
                outcome: Outcome::ParentNotFound,
            };
        };
        let tokens = run.content(chains.engine(), self.media);
        chains.store(&run, &tokens)
    }

    /// Blocks left a tier.
    pub(super) fn removed(&mut self, names: &[EngineHash], tier: Tier) -> Regrouped {
        let fit = self.sizes[tier as usize].and_then(|engine| Fit::of(engine, self.ours));
        let blocks = match (fit, &mut self.chains) {
            (Some(Fit::Join(_)), Some(chains)) => return chains.remove(names, tier),
            (Some(Fit::Split(parts)), _) => names
                .iter()
                .flat_map(|&name| parts_of(name, parts.get()))
                .collect(),
            _ => names.to_vec(),
        };
        Regrouped {
            events: vec![KvEvent::Removed { blocks, tier }],
            outcome: Outcome::Ok,
        }
    }
}

/// The names of the blocks that one of the engine's is. The last keeps the engine's: what follows the engine's block follows
/// it.
fn parts_of(name: EngineHash, parts: u32) -> impl Iterator<Item = EngineHash> {
    let made = move |part: u32| {
        let mut bytes = [0; 12];
        bytes[..8].copy_from_slice(&name.0.to_le_bytes());
        bytes[8..].copy_from_slice(&part.to_le_bytes());
        EngineHash(xxh3_64(&bytes))
    };
    (1..parts).map(made).chain([name])
}

/// The hash of one block of ours.
fn local_of(
    tokens: &[u32],
    ours: BlockSize,
    run: &Run<'_>,
    objects: Vec<u64>,
) -> Option<LocalHash> {
    let objects = if objects.is_empty() {
        Vec::new()
    } else {
        vec![objects]
    };
    locals(tokens, ours, run.salt, run.windows(), &objects)
        .first()
        .copied()
}

#[cfg(test)]
mod tests;
