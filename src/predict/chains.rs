//! The prompts of one rank as a tree of runs. All blocks of a run were used last at the same time and by the same live
//! requests, because a prompt that stops or turns off inside a run splits it. A run is found by the sequence hash of its
//! first block, which names everything before it as well, and whether a prompt covers a run shows in a single comparison.
//! Only runs that nothing follows and nobody holds may be evicted; these are kept in the order of their last use.

use std::collections::{BTreeSet, HashMap};

use crate::block::SequenceHash;

/// Number of a run. A split leaves it with the part that ends where the run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct RunId(u32);

/// When a run was last used. Later uses are greater.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Stamp {
    pub(super) end_of_life: u64,
    pub(super) use_number: u64,
}

/// What became of a prompt.
pub(super) struct Recorded {
    /// The run that the prompt ends with, if it has any block.
    pub(super) tail: Option<RunId>,
    /// Leading blocks that were there already.
    pub(super) known: usize,
}

/// Blocks that follow one another.
#[derive(Debug)]
struct Run {
    /// Empty where the blocks are generated ones.
    names: Vec<SequenceHash>,
    /// Blocks of unknown content.
    generated: u64,
    stamp: Stamp,
    parent: Option<RunId>,
    /// The child that stands for what was generated after this run.
    offspring: Option<RunId>,
    children: u32,
    leases: u32,
}

impl Run {
    fn is_end(&self) -> bool {
        self.children == 0 && self.leases == 0
    }
}

/// The tree.
#[derive(Debug, Default)]
pub(super) struct Chains {
    runs: Vec<Run>,
    free: Vec<RunId>,
    heads: HashMap<SequenceHash, RunId>,
    /// Exactly the runs that may be evicted.
    ends: BTreeSet<(Stamp, RunId)>,
    /// What was generated after prompts without a complete block.
    offspring: Option<RunId>,
    blocks: u64,
    generated: u64,
}

impl Chains {
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
    pub(super) fn known(&self, prompt: &[SequenceHash]) -> usize {
        let mut rest = prompt;
        while let Some(&found) = rest.first().and_then(|first| self.heads.get(first)) {
            let names = &self.run(found).names;
            let same = common(names, rest);
            rest = &rest[same..];
            if same < names.len() {
                break;
            }
        }
        prompt.len() - rest.len()
    }

    /// Marks a prompt as used now, and adds what is not there. With `lease`, it is held until it is released.
    pub(super) fn record(&mut self, prompt: &[SequenceHash], stamp: Stamp, lease: bool) -> Recorded {
        let mut tail = None;
        let mut rest = prompt;
        while let Some(&found) = rest.first().and_then(|first| self.heads.get(first)) {
            let names = &self.run(found).names;
            let same = common(names, rest);
            let run = if same < names.len() { self.split(found, same) } else { found };
            self.touch(run, stamp, lease);
            tail = Some(run);
            rest = &rest[same..];
        }
        if !rest.is_empty() {
            self.identify(tail, rest.len() as u64);
            self.blocks += rest.len() as u64;
            tail = match tail.filter(|&run| self.may_grow(run, lease)) {
                Some(run) => Some(self.append(run, rest)),
                None => Some(self.sprout(tail, rest, stamp, lease)),
            };
        }
        Recorded { tail, known: prompt.len() - rest.len() }
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

    /// Takes up to `most` blocks off the end of a run from [`Chains::oldest`]; how many. `gone` gets the names of those
    /// that have one.
    pub(super) fn evict(&mut self, id: RunId, most: u64, gone: &mut Vec<SequenceHash>) -> u64 {
        let run = &mut self.runs[id.0 as usize];
        if run.names.is_empty() {
            let taken = most.min(run.generated);
            self.shrink(id, taken);
            return taken;
        }
        let taken = most.min(run.names.len() as u64);
        self.blocks -= taken;
        let keep = run.names.len() - taken as usize;
        if keep == 0 {
            self.heads.remove(&run.names[0]);
        }
        gone.extend(run.names.drain(keep..));
        if run.names.capacity() > 16 + 4 * keep {
            run.names.shrink_to_fit();
        }
        if keep == 0 {
            self.remove(id);
        }
        taken
    }

    /// The run that a prompt ends with and how many blocks at its end only the use of that stamp has entered and nobody has
    /// used since; `known` blocks had been there before. Whoever used a part of them would have split or marked the run.
    pub(super) fn own_end(
        &self,
        prompt: &[SequenceHash],
        known: usize,
        stamp: Stamp,
        lease: bool,
    ) -> Option<(RunId, u64)> {
        let (mut last, mut end) = (None, 0);
        while let Some(&found) = prompt[end..].first().and_then(|first| self.heads.get(first)) {
            let names = &self.run(found).names;
            if common(names, &prompt[end..]) < names.len() {
                return None;
            }
            last = Some(found);
            end += names.len();
        }
        let own = |run: &Run| run.stamp == stamp && run.children == 0 && run.leases == u32::from(lease);
        let id = last.filter(|id| own(self.run(*id)) && end > known)?;
        Some((id, self.run(id).names.len().min(end - known) as u64))
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

    fn touch(&mut self, id: RunId, stamp: Stamp, lease: bool) {
        self.unlist(id);
        let run = self.run_mut(id);
        run.stamp = stamp;
        run.leases += u32::from(lease);
        self.list(id);
    }

    /// A longer prompt usually holds the answer to the shorter one: those blocks are now known by name.
    fn identify(&mut self, parent: Option<RunId>, blocks: u64) {
        if let Some(offspring) = self.offspring(parent) {
            let named = self.run(offspring).generated.min(blocks);
            self.shrink(offspring, named);
        }
    }

    /// Whether blocks after a run that was just touched share its fate: nothing else follows it and nobody else holds it.
    /// So a conversation stays one run, however many turns it has.
    fn may_grow(&self, id: RunId, lease: bool) -> bool {
        let run = self.run(id);
        run.children == 0 && run.leases == u32::from(lease)
    }

    fn append(&mut self, id: RunId, names: &[SequenceHash]) -> RunId {
        let run = self.run_mut(id);
        run.names.reserve_exact(names.len());
        run.names.extend_from_slice(names);
        id
    }

    /// A new run of prompt blocks.
    fn sprout(&mut self, parent: Option<RunId>, names: &[SequenceHash], stamp: Stamp, lease: bool) -> RunId {
        let leases = u32::from(lease);
        let run = Run { names: names.into(), generated: 0, stamp, parent, offspring: None, children: 0, leases };
        let id = self.adopt(run);
        self.heads.insert(names[0], id);
        self.follow(parent, id);
        id
    }

    /// Keeps generated blocks after a run that is still held.
    fn keep(&mut self, parent: Option<RunId>, blocks: u64, stamp: Stamp) {
        self.generated += blocks;
        if let Some(id) = self.offspring(parent) {
            self.touch(id, stamp, false);
            self.run_mut(id).generated += blocks;
            return;
        }
        let run = Run { names: Vec::new(), generated: blocks, stamp, parent, offspring: None, children: 0, leases: 0 };
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
        run.generated -= blocks;
        if run.generated == 0 {
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

    /// Splits a run after `at` blocks; the number of the first part.
    fn split(&mut self, id: RunId, at: usize) -> RunId {
        let run = self.run_mut(id);
        let lower = run.names.split_off(at);
        let boundary = lower[0];
        let mut names = std::mem::replace(&mut run.names, lower);
        names.shrink_to_fit();
        let first = names[0];
        let (stamp, parent, leases) = (run.stamp, run.parent, run.leases);
        let upper = self.adopt(Run { names, generated: 0, stamp, parent, offspring: None, children: 1, leases });
        self.run_mut(id).parent = Some(upper);
        self.heads.insert(first, upper);
        self.heads.insert(boundary, id);
        upper
    }
}

/// Length of the common beginning. A name stands for all before it, so the last one tells for a whole run, and the point
/// where two prompts part can be halved in.
fn common(run: &[SequenceHash], prompt: &[SequenceHash]) -> usize {
    let most = run.len().min(prompt.len());
    if run[most - 1] == prompt[most - 1] {
        return most;
    }
    let (mut same, mut different) = (0, most);
    while same + 1 < different {
        let middle = same.midpoint(different);
        if run[middle - 1] == prompt[middle - 1] {
            same = middle;
        } else {
            different = middle;
        }
    }
    same
}
