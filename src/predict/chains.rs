//! The prompts of one rank as a tree of runs. All blocks of a run were used last at the same time and by the same live
//! requests, because a prompt that stops or turns off inside a run splits it. Which blocks there are is known to the index
//! alone: a run keeps its length and where it ends there, so however long it is, it costs the same. A run is found by
//! the one before it and its first block. Only runs that nothing follows and nobody holds may be evicted; these are kept
//! in the order of their last use.

use std::collections::{BTreeSet, HashMap};

use crate::block::LocalHash;
use crate::index::{Entered, PathEnd, PathWriter};

/// Number of a run. A split leaves it with the part that ends where the run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(super) struct RunId(u32);

/// When a run was last used. Later uses are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp {
    pub(super) end_of_life: u64,
    pub(super) use_number: u64,
}

/// What becomes of the runs of a prompt that is recorded.
#[derive(Clone, Copy, Debug)]
pub(super) struct Use {
    pub(super) stamp: Stamp,
    /// Whether a live request holds them until it is released.
    pub(super) lease: bool,
}

/// What became of a prompt.
#[derive(Clone, Copy, Debug)]
pub(super) struct Recorded {
    /// The run that it ends with, if it has any block.
    pub(super) tail: Option<RunId>,
    /// Blocks that are new.
    pub(super) added: usize,
}

/// Blocks that follow one another.
#[derive(Debug)]
struct Run {
    content: Content,
    /// Number of blocks.
    blocks: u64,
    stamp: Stamp,
    parent: Option<RunId>,
    /// The child that stands for what was generated after this run.
    offspring: Option<RunId>,
    children: u32,
    leases: u32,
}

/// What a run consists of.
#[derive(Clone, Copy, Debug)]
enum Content {
    /// Blocks of prompts, which the index has.
    Prompt { first: LocalHash, end: PathEnd },
    /// Generated blocks, of unknown content.
    Generated,
}

impl Run {
    fn is_end(&self) -> bool {
        self.children == 0 && self.leases == 0
    }

    fn end(&self) -> Option<PathEnd> {
        match self.content {
            Content::Prompt { end, .. } => Some(end),
            Content::Generated => None,
        }
    }
}

/// The tree.
#[derive(Debug)]
pub(super) struct Chains {
    paths: PathWriter,
    runs: Vec<Run>,
    free: Vec<RunId>,
    heads: HashMap<(Option<RunId>, LocalHash), RunId>,
    /// Exactly the runs that may be evicted.
    ends: BTreeSet<(Stamp, RunId)>,
    /// What was generated after prompts without a complete block.
    offspring: Option<RunId>,
    blocks: u64,
    generated: u64,
}

impl Chains {
    /// No run yet; the writer holds nothing.
    pub(super) fn new(paths: PathWriter) -> Self {
        Self {
            paths,
            runs: Vec::new(),
            free: Vec::new(),
            heads: HashMap::new(),
            ends: BTreeSet::new(),
            offspring: None,
            blocks: 0,
            generated: 0,
        }
    }

    /// Blocks of prompts.
    pub(super) fn blocks(&self) -> u64 {
        self.blocks
    }

    /// Blocks that finished requests generated.
    pub(super) fn generated(&self) -> u64 {
        self.generated
    }

    /// Runs of prompt blocks.
    pub(super) fn runs(&self) -> u64 {
        self.heads.len() as u64
    }

    /// The run that may be evicted and was used least recently.
    pub(super) fn oldest(&self) -> Option<(Stamp, RunId)> {
        self.ends.first().copied()
    }

    /// Leading blocks of a prompt that are there.
    pub(super) fn known(&self, prompt: &[LocalHash]) -> usize {
        self.paths.known(prompt)
    }

    /// Marks a prompt as used, of which the first `known` blocks are there, and adds the others.
    pub(super) fn record(&mut self, prompt: &[LocalHash], known: usize, used: Use) -> Recorded {
        let (mut tail, mut reached) = (None, 0);
        while let Some(found) = self.next(tail, &prompt[reached..known]) {
            let left = (known - reached) as u64;
            let run = if left < self.run(found).blocks {
                self.split(found, left)
            } else {
                found
            };
            self.touch(run, used);
            tail = Some(run);
            reached += self.run(run).blocks as usize;
        }
        match &prompt[reached..] {
            [] => Recorded { tail, added: 0 },
            rest => self.add(tail, rest, used),
        }
    }

    /// Ends the hold on a prompt, and keeps what was generated after it.
    pub(super) fn release(&mut self, tail: Option<RunId>, generated: u64, stamp: Stamp) {
        if generated > 0 {
            self.keep(tail, generated, stamp);
        }
        let mut next = tail;
        while let Some(id) = next {
            let run = self.run_mut(id);
            run.leases -= 1;
            next = run.parent;
            if run.leases == 0 {
                run.stamp = stamp;
                self.list(id);
            }
        }
    }

    /// Takes up to `most` blocks off the end of a run from [`Chains::oldest`]; how many.
    pub(super) fn evict(&mut self, id: RunId, most: u64) -> u64 {
        let &Run {
            content,
            blocks,
            parent,
            ..
        } = self.run(id);
        let taken = most.min(blocks);
        let Content::Prompt { first, end } = content else {
            self.shrink(id, taken);
            return taken;
        };
        self.blocks -= taken;
        let end = self.paths.cut(end, taken);
        match end.filter(|_| taken < blocks) {
            Some(end) => {
                let run = self.run_mut(id);
                (run.blocks, run.content) = (blocks - taken, Content::Prompt { first, end });
            }
            None => {
                self.heads.remove(&(parent, first));
                self.remove(id);
            }
        }
        taken
    }

    /// The run that a prompt ends with and how many blocks at its end only that use has entered and nobody has used since;
    /// `known` blocks had been there before. Whoever used a part of them would have split or marked the run.
    pub(super) fn own_end(
        &self,
        prompt: &[LocalHash],
        known: usize,
        used: Use,
    ) -> Option<(RunId, u64)> {
        let there = self.known(prompt);
        let (mut last, mut end) = (None, 0);
        while let Some(found) = self.next(last, &prompt[end..there]) {
            last = Some(found);
            end += self.run(found).blocks as usize;
            if end > there {
                return None;
            }
        }
        let own = |run: &Run| {
            run.stamp == used.stamp && run.children == 0 && run.leases == u32::from(used.lease)
        };
        let id = last.filter(|id| own(self.run(*id)) && end > known)?;
        Some((id, self.run(id).blocks.min((end - known) as u64)))
    }

    /// The run that follows another with these blocks.
    fn next(&self, after: Option<RunId>, prompt: &[LocalHash]) -> Option<RunId> {
        self.heads.get(&(after, *prompt.first()?)).copied()
    }

    fn run(&self, id: RunId) -> &Run {
        &self.runs[id.0 as usize]
    }

    fn run_mut(&mut self, id: RunId) -> &mut Run {
        &mut self.runs[id.0 as usize]
    }

    fn adopt(&mut self, run: Run) -> RunId {
        if let Some(id) = self.free.pop() {
            *self.run_mut(id) = run;
            return id;
        }
        self.runs.push(run);
        RunId(self.runs.len() as u32 - 1)
    }

    /// Offers a run for eviction, if it may be evicted.
    fn list(&mut self, id: RunId) {
        let run = self.run(id);
        if run.is_end() {
            self.ends.insert((run.stamp, id));
        }
    }

    fn unlist(&mut self, id: RunId) {
        let run = self.run(id);
        if run.is_end() {
            self.ends.remove(&(run.stamp, id));
        }
    }

    fn touch(&mut self, id: RunId, used: Use) {
        self.unlist(id);
        let run = self.run_mut(id);
        // A prompt that was sent earlier may be recorded later.
        run.stamp = run.stamp.max(used.stamp);
        run.leases += u32::from(used.lease);
        self.list(id);
    }

    /// Adds blocks after a run that was just touched. They become part of it where they share its fate, because nothing else
    /// follows it and nobody else holds it: so a conversation stays one run, however many turns it has.
    fn add(&mut self, tail: Option<RunId>, blocks: &[LocalHash], used: Use) -> Recorded {
        let Entered { blocks: added, end } = self
            .paths
            .enter(tail.and_then(|run| self.run(run).end()), blocks);
        let Some(end) = end.filter(|_| added > 0) else {
            return Recorded { tail, added };
        };
        let count = added as u64;
        self.identify(tail, count);
        self.blocks += count;
        let leases = u32::from(used.lease);
        let grows = tail
            .map(|id| (id, self.run(id)))
            .filter(|(_, run)| run.children == 0 && run.leases == leases);
        if let Some((
            id,
            &Run {
                content: Content::Prompt { first, .. },
                ..
            },
        )) = grows
        {
            let run = self.run_mut(id);
            (run.blocks, run.content) = (run.blocks + count, Content::Prompt { first, end });
            return Recorded { tail, added };
        }
        let content = Content::Prompt {
            first: blocks[0],
            end,
        };
        let stamp = used.stamp;
        let run = Run {
            content,
            blocks: count,
            stamp,
            parent: tail,
            offspring: None,
            children: 0,
            leases,
        };
        let id = self.adopt(run);
        self.heads.insert((tail, blocks[0]), id);
        self.follow(tail, id);
        Recorded {
            tail: Some(id),
            added,
        }
    }

    /// A longer prompt usually holds the answer to the shorter one: those blocks are now known by name.
    fn identify(&mut self, parent: Option<RunId>, blocks: u64) {
        if let Some(offspring) = self.offspring(parent) {
            let named = self.run(offspring).blocks.min(blocks);
            self.shrink(offspring, named);
        }
    }

    /// Keeps generated blocks after a run that is still held.
    fn keep(&mut self, parent: Option<RunId>, blocks: u64, stamp: Stamp) {
        self.generated += blocks;
        if let Some(id) = self.offspring(parent) {
            self.touch(
                id,
                Use {
                    stamp,
                    lease: false,
                },
            );
            self.run_mut(id).blocks += blocks;
            return;
        }
        let run = Run {
            content: Content::Generated,
            blocks,
            stamp,
            parent,
            offspring: None,
            children: 0,
            leases: 0,
        };
        let id = self.adopt(run);
        self.follow(parent, id);
        *self.offspring_mut(parent) = Some(id);
    }

    /// Enters a new run after its parent.
    fn follow(&mut self, parent: Option<RunId>, id: RunId) {
        if let Some(parent) = parent {
            self.unlist(parent);
            self.run_mut(parent).children += 1;
        }
        self.list(id);
    }

    fn offspring(&self, parent: Option<RunId>) -> Option<RunId> {
        parent.map_or(self.offspring, |parent| self.run(parent).offspring)
    }

    fn offspring_mut(&mut self, parent: Option<RunId>) -> &mut Option<RunId> {
        match parent {
            Some(parent) => &mut self.runs[parent.0 as usize].offspring,
            None => &mut self.offspring,
        }
    }

    /// Takes generated blocks away.
    fn shrink(&mut self, id: RunId, blocks: u64) {
        self.generated -= blocks;
        let run = self.run_mut(id);
        run.blocks -= blocks;
        if run.blocks == 0 {
            let parent = run.parent;
            *self.offspring_mut(parent) = None;
            self.remove(id);
        }
    }

    /// Removes an end that has no block left.
    fn remove(&mut self, id: RunId) {
        self.unlist(id);
        self.free.push(id);
        if let Some(parent) = self.run(id).parent {
            self.run_mut(parent).children -= 1;
            self.list(parent);
        }
    }

    /// Splits a run of prompt blocks after `at` of them; the number of the first part.
    fn split(&mut self, id: RunId, at: u64) -> RunId {
        let &Run {
            content,
            blocks,
            stamp,
            parent,
            leases,
            ..
        } = self.run(id);
        let Content::Prompt { first, end } = content else {
            unreachable!("generated blocks are in no prompt")
        };
        let (before, boundary) = self.paths.before(end, blocks - at);
        let before = before.expect("a run goes on before its last blocks");
        let upper = Content::Prompt { first, end: before };
        let upper = self.adopt(Run {
            content: upper,
            blocks: at,
            stamp,
            parent,
            offspring: None,
            children: 1,
            leases,
        });
        let lower = self.run_mut(id);
        lower.content = Content::Prompt {
            first: boundary,
            end,
        };
        (lower.blocks, lower.parent) = (blocks - at, Some(upper));
        self.heads.insert((parent, first), upper);
        self.heads.insert((Some(upper), boundary), id);
        upper
    }
}

impl Drop for Chains {
    fn drop(&mut self) {
        // Readers stop to see it at once, and what is left is taken out bit by bit.
        self.paths.hide();
        self.runs.iter_mut().for_each(|run| run.leases = 0);
        let ids: Vec<RunId> = self.heads.values().copied().collect();
        ids.into_iter().for_each(|id| self.list(id));
        while let Some((_, end)) = self.oldest() {
            self.evict(end, u64::MAX);
        }
    }
}
