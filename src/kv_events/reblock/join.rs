//! Small blocks of an engine in larger ones of ours. A block of ours is a stretch of an engine's chain that begins at a
//! multiple of our size; it bears the name of its last part, and lies in a tier where all its parts lie there. Parts may be
//! stored in pieces, several chains may share them, and each may come and go on its own, so every part keeps its content as
//! long as something may follow it, and its copies are counted here: the index sees one of each of our blocks.

use hashbrown::HashMap;

use super::{Regrouped, Run, local_of};
use crate::block::{EngineHash, LocalHash};
use crate::index::{Forgotten, KvEvent, Outcome, StoredBlock};
use crate::tier::Tier;
use crate::worker::BlockSize;

/// Parts that are remembered per rank; what follows others is dropped.
const MOST: usize = if cfg!(test) { 1 << 12 } else { 1 << 21 };
const TIERS: usize = Tier::ALL.len();

/// Everything that is known of the parts.
#[derive(Debug)]
pub(super) struct Chains {
    engine: BlockSize,
    ours: BlockSize,
    parts: HashMap<EngineHash, Part>,
    /// How often events were lost.
    gaps: u32,
}

/// One block of the engine.
#[derive(Debug)]
struct Part {
    parent: Option<EngineHash>,
    /// Those that follow it.
    children: Vec<EngineHash>,
    /// Its place in our block, from 0.
    place: usize,
    content: Content,
    copies: [u32; TIERS],
    /// The gap since which the copies were counted, by tier.
    counted: [u32; TIERS],
}

/// What a part holds.
#[derive(Debug)]
enum Content {
    /// A beginning or a middle: what follows needs its tokens.
    Tokens {
        ids: Box<[u32]>,
        objects: Box<[u64]>,
    },
    /// The last part: our block.
    Whole(Block),
}

/// A block of ours.
#[derive(Clone, Copy, Debug)]
struct Block {
    local: LocalHash,
    /// Where the index was told to have it.
    told: [bool; TIERS],
    /// The gap since which that was so; the index counts its copies anew after another one.
    counted: [u32; TIERS],
}

impl Block {
    fn new(local: LocalHash) -> Self {
        Self {
            local,
            told: [false; TIERS],
            counted: [0; TIERS],
        }
    }

    fn is_placed(&self) -> bool {
        self.told.contains(&true)
    }
}

impl Part {
    fn block(&self) -> Option<&Block> {
        match &self.content {
            Content::Whole(block) => Some(block),
            Content::Tokens { .. } => None,
        }
    }

    fn block_mut(&mut self) -> Option<&mut Block> {
        match &mut self.content {
            Content::Whole(block) => Some(block),
            Content::Tokens { .. } => None,
        }
    }

    fn is_held(&self) -> bool {
        self.copies.iter().any(|copies| *copies > 0)
    }
}

/// What the index is to be told, in order.
#[derive(Debug, Default)]
struct Told(Vec<KvEvent>);

impl Told {
    fn stored(&mut self, after: Option<EngineHash>, block: StoredBlock, tier: Tier) {
        if let Some(KvEvent::Stored {
            blocks, tier: last, ..
        }) = self.0.last_mut()
            && *last == tier
            && blocks.last().map(|block| block.engine) == after
        {
            return blocks.push(block);
        }
        self.0.push(KvEvent::Stored {
            parent: after,
            blocks: vec![block],
            tier,
        });
    }

    fn removed(&mut self, block: EngineHash, tier: Tier) {
        if let Some(KvEvent::Removed { blocks, tier: last }) = self.0.last_mut()
            && *last == tier
        {
            return blocks.push(block);
        }
        self.0.push(KvEvent::Removed {
            blocks: vec![block],
            tier,
        });
    }
}

impl Chains {
    pub(super) fn new(engine: BlockSize, ours: BlockSize, gaps: u32) -> Self {
        Self {
            engine,
            ours,
            parts: HashMap::new(),
            gaps,
        }
    }

    pub(super) fn engine(&self) -> BlockSize {
        self.engine
    }

    fn parts_per_block(&self) -> usize {
        self.ours.tokens() / self.engine.tokens()
    }

    /// Stores a run; `tokens` is its content, read already.
    pub(super) fn store(&mut self, run: &Run<'_>, tokens: &[u32]) -> Regrouped {
        let (mut told, size) = (Told::default(), self.engine.tokens());
        let mut outcome = Outcome::DuplicateStore;
        let mut parent = run.parent;
        if parent.is_some_and(|parent| !self.parts.contains_key(&parent)) {
            return Regrouped {
                events: Vec::new(),
                outcome: Outcome::ParentNotFound,
            };
        }
        for (at, &name) in run.names.iter().enumerate() {
            let end = (at + 1) * size + usize::from(run.bigrams);
            let Some(ids) = tokens.get(at * size..end) else {
                break;
            };
            let objects = run.objects.get(at).map_or(&[][..], Vec::as_slice);
            if self
                .parts
                .get(&name)
                .is_some_and(|part| part.parent != parent)
            {
                self.purge(name, &mut told);
            }
            if !self.parts.contains_key(&name) && !self.insert(name, parent, run, (ids, objects)) {
                outcome = Outcome::TooManyWaiting;
                break;
            }
            if self.add_copy(name, run.tier, &mut told) && outcome == Outcome::DuplicateStore {
                outcome = Outcome::Ok;
            }
            parent = Some(name);
        }
        if run.names.is_empty() {
            outcome = Outcome::Ok;
        }
        Regrouped {
            events: told.0,
            outcome,
        }
    }

    /// Enters a part that no tier holds yet; false where there are too many.
    fn insert(
        &mut self,
        name: EngineHash,
        parent: Option<EngineHash>,
        run: &Run<'_>,
        (ids, objects): (&[u32], &[u64]),
    ) -> bool {
        if self.parts.len() >= MOST {
            return false;
        }
        let place = match parent.and_then(|parent| self.parts.get(&parent)) {
            Some(parent) => (parent.place + 1) % self.parts_per_block(),
            None => 0,
        };
        let content = if place + 1 == self.parts_per_block() {
            let Some(local) = self.local(parent, run, (ids, objects)) else {
                return false;
            };
            Content::Whole(Block::new(local))
        } else {
            Content::Tokens {
                ids: ids.into(),
                objects: objects.into(),
            }
        };
        if let Some(parent) = parent.and_then(|parent| self.parts.get_mut(&parent)) {
            parent.children.push(name);
        }
        let part = Part {
            parent,
            children: vec![],
            place,
            content,
            copies: [0; TIERS],
            counted: [0; TIERS],
        };
        self.parts.insert(name, part);
        true
    }

    /// The hash of the block of ours that a part completes.
    fn local(
        &self,
        parent: Option<EngineHash>,
        run: &Run<'_>,
        (ids, objects): (&[u32], &[u64]),
    ) -> Option<LocalHash> {
        let mut before: Vec<(&[u32], &[u64])> = vec![(ids, objects)];
        let mut next = parent;
        while before.len() < self.parts_per_block() {
            let part = self.parts.get(&next?)?;
            let Content::Tokens { ids, objects } = &part.content else {
                return None;
            };
            // Bigrams overlap: the last token of one part is the first of the next.
            before.push((&ids[..self.engine.tokens()], objects));
            next = part.parent;
        }
        let tokens: Vec<u32> = before
            .iter()
            .rev()
            .flat_map(|(ids, _)| ids.iter().copied())
            .collect();
        let mut all: Vec<u64> = Vec::new();
        for (_, objects) in before.iter().rev() {
            // What goes on from one part into the next is one object.
            let goes_on = all.last().is_some() && all.last() == objects.first();
            all.extend(&objects[usize::from(goes_on)..]);
        }
        local_of(&tokens, self.ours, run, all)
    }

    /// One more copy of a part; whether it is the first in this tier.
    fn add_copy(&mut self, name: EngineHash, tier: Tier, told: &mut Told) -> bool {
        let Some(part) = self.parts.get_mut(&name) else {
            return false;
        };
        let (copies, counted) = (
            &mut part.copies[tier as usize],
            &mut part.counted[tier as usize],
        );
        let (first, confirmed) = (
            *copies == 0,
            std::mem::replace(counted, self.gaps) != self.gaps,
        );
        *copies = if first || confirmed {
            1
        } else {
            copies.saturating_add(1)
        };
        if first || confirmed {
            self.tell_from(name, told);
        }
        first
    }

    /// Tells what can be told now of our blocks that a part belongs to, and of what follows them.
    fn tell_from(&mut self, name: EngineHash, told: &mut Told) {
        let mut open = vec![name];
        while let Some(name) = open.pop() {
            let Some(part) = self.parts.get(&name) else {
                continue;
            };
            if part.block().is_none() {
                open.extend(part.children.iter().rev());
                continue;
            }
            let was_placed = part.block().is_some_and(Block::is_placed);
            for tier in Tier::ALL {
                self.tell(name, tier, told);
            }
            let Some(part) = self.parts.get(&name) else {
                continue;
            };
            if !was_placed && part.block().is_some_and(Block::is_placed) {
                open.extend(part.children.iter().rev());
            }
        }
    }

    /// Tells of one block of ours in one tier, if that is news and its place is known to the index.
    fn tell(&mut self, name: EngineHash, tier: Tier, told: &mut Told) {
        let Some((before, held, doubted)) = self.stretch(name, tier) else {
            return;
        };
        if !held || before.is_some_and(|before| !self.is_placed(before)) {
            return;
        }
        let Some(block) = self.parts.get_mut(&name).and_then(Part::block_mut) else {
            return;
        };
        let (is_told, counted) = (
            &mut block.told[tier as usize],
            &mut block.counted[tier as usize],
        );
        // Told again, the index doubts it no longer.
        let is_confirmed = *counted != self.gaps && !doubted;
        if *is_told && !is_confirmed {
            return;
        }
        *is_told = true;
        *counted = self.gaps;
        let block = StoredBlock {
            engine: name,
            local: block.local,
        };
        told.stored(before, block, tier);
    }

    fn is_placed(&self, name: EngineHash) -> bool {
        self.parts
            .get(&name)
            .and_then(Part::block)
            .is_some_and(Block::is_placed)
    }

    /// Of the block of ours that ends with a part: the one before it, whether all parts are held, and whether any is doubted.
    /// Nothing is stored on the device without what it follows.
    fn stretch(&self, name: EngineHash, tier: Tier) -> Option<(Option<EngineHash>, bool, bool)> {
        let (mut held, mut doubted, mut next) = (true, false, Some(name));
        for at in 0..self.parts_per_block() {
            let part = self.parts.get(&next?)?;
            held &= part.copies[tier as usize] > 0;
            doubted |=
                part.counted[tier as usize] != self.gaps && (at == 0 || tier != Tier::Device);
            next = part.parent;
        }
        Some((next, held, doubted))
    }

    /// One copy of each part left a tier.
    pub(super) fn remove(&mut self, names: &[EngineHash], tier: Tier) -> Regrouped {
        let (mut told, mut outcome) = (Told::default(), Outcome::Ok);
        for &name in names {
            let part = self
                .parts
                .get_mut(&name)
                .filter(|part| part.copies[tier as usize] > 0);
            let Some(part) = part else {
                outcome = Outcome::BlockNotFound;
                continue;
            };
            part.copies[tier as usize] -= 1;
            if part.copies[tier as usize] == 0 {
                self.untell_from(name, tier, &mut told);
                self.prune(name);
            }
        }
        Regrouped {
            events: told.0,
            outcome,
        }
    }

    /// The blocks of ours that a part belongs to are not held any more.
    fn untell_from(&mut self, name: EngineHash, tier: Tier, told: &mut Told) {
        let mut open = vec![name];
        while let Some(name) = open.pop() {
            let Some(part) = self.parts.get_mut(&name) else {
                continue;
            };
            match &mut part.content {
                Content::Tokens { .. } => open.extend(part.children.iter().rev()),
                Content::Whole(block) if block.told[tier as usize] => {
                    block.told[tier as usize] = false;
                    told.removed(name, tier);
                }
                Content::Whole(_) => {}
            }
        }
    }

    /// Forgets a part that nobody holds and nothing follows, and those before it that were kept for its sake.
    fn prune(&mut self, name: EngineHash) {
        let mut next = Some(name);
        while let Some(name) = next {
            let Some(part) = self.parts.get(&name) else {
                return;
            };
            if part.is_held() || !part.children.is_empty() {
                return;
            }
            next = part.parent;
            self.parts.remove(&name);
            if let Some(parent) = next.and_then(|parent| self.parts.get_mut(&parent)) {
                parent.children.retain(|child| *child != name);
            }
        }
    }

    /// A name stands for something else now: what it stood for is gone, with all that follows it.
    fn purge(&mut self, name: EngineHash, told: &mut Told) {
        let before = self.parts.get(&name).and_then(|part| part.parent);
        if let Some(parent) = before.and_then(|parent| self.parts.get_mut(&parent)) {
            parent.children.retain(|child| *child != name);
        }
        let mut open = vec![name];
        while let Some(name) = open.pop() {
            let Some(part) = self.parts.remove(&name) else {
                continue;
            };
            if let Some(block) = part.block() {
                for tier in Tier::ALL
                    .into_iter()
                    .filter(|tier| block.told[*tier as usize])
                {
                    told.removed(name, tier);
                }
            }
            open.extend(part.children);
        }
        before.into_iter().for_each(|before| self.prune(before));
    }

    /// Events were lost for good, so often by now: copies are counted from one again when a part is stored, as in the index.
    pub(super) fn doubt(&mut self, gaps: u32) {
        self.gaps = gaps;
    }

    /// The index has taken blocks for gone, and with them go their parts that were not heard of since and belong to no
    /// other. Of parts that never became a block of ours it knows nothing: the last ones of a chain go by their own age.
    /// Says what is gone.
    pub(super) fn forgotten(&mut self, forgotten: &Forgotten) -> Vec<(EngineHash, Tier)> {
        for (name, tier) in &forgotten.names {
            let Some(part) = self.parts.get_mut(name) else {
                continue;
            };
            if part.counted[*tier as usize] < forgotten.before[*tier as usize] {
                part.copies[*tier as usize] = 0;
            }
            if let Some(block) = part.block_mut() {
                block.told[*tier as usize] = false;
            }
        }
        let named = forgotten.names.iter().map(|(name, _)| *name);
        let is_end = |part: &Part| part.children.is_empty() && part.block().is_none();
        let ends = self
            .parts
            .iter()
            .filter(|(_, part)| is_end(part))
            .map(|(name, _)| *name);
        let mut open: Vec<EngineHash> = named.chain(ends).collect();
        let mut gone = Vec::new();
        while let Some(name) = open.pop() {
            let Some(part) = self
                .parts
                .get_mut(&name)
                .filter(|part| part.children.is_empty())
            else {
                continue;
            };
            if part.block().is_none() {
                for tier in Tier::ALL
                    .into_iter()
                    .filter(|tier| part.counted[*tier as usize] < forgotten.before[*tier as usize])
                {
                    if std::mem::take(&mut part.copies[tier as usize]) > 0 {
                        gone.push((name, tier));
                    }
                }
            }
            if part.is_held() {
                continue;
            }
            let before = part.parent;
            self.parts.remove(&name);
            if let Some(parent) = before.and_then(|parent| self.parts.get_mut(&parent)) {
                parent.children.retain(|child| *child != name);
            }
            open.extend(before);
        }
        gone
    }

    #[cfg(test)]
    pub(super) fn holds(&self, name: EngineHash, tier: Tier) -> bool {
        self.parts
            .get(&name)
            .is_some_and(|part| part.copies[tier as usize] > 0)
    }

    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }
}
