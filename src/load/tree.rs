//! The prompts of all live requests as one tree, and who holds which part of it. A node is a stretch of blocks that the same
//! requests hold. Sequence hashes name all blocks before their own, so how far two prompts agree is searched for and not
//! counted out, and a booking takes as long as its prompt has branches, not blocks. Nodes keep a prompt that came their way
//! and their place in it: nothing is copied. Who names blocks otherwise (callers may say anything) shares less, or more,
//! than he holds; what is released is what was booked all the same.

use std::cmp::Reverse;
use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use slab::Slab;

use super::weight::Weight;
use crate::block::SequenceHash;
use crate::worker::Slot;

type Prompt = Arc<[SequenceHash]>;

/// All prompts.
#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: Slab<Node>,
    /// Nodes by their first block. Hashed once more, with a key nobody knows: callers may choose the names, and so could
    /// make them collide. A node is missing here if another that is nowhere near it had the name before.
    starts: HashMap<SequenceHash, Id>,
}

/// Names a node. It stays with the end of a stretch when that is divided or joined.
type Id = usize;

/// Where a prompt ends that is held.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Leaf(Id);

#[derive(Debug)]
struct Node {
    parent: Option<Id>,
    /// Of somebody who came this way; `from..to` are the blocks of this node.
    prompt: Prompt,
    from: usize,
    to: usize,
    children: usize,
    /// Exclusive or of the children: where there is only one, this is it.
    child: Id,
    /// By slot. Whoever holds a node holds its parent too.
    holders: Vec<Holder>,
}

/// Who holds a node on one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Holder {
    slot: Slot,
    /// How many prompts of live requests.
    prompts: u32,
    /// Of each block. Stays when others join.
    weight: Weight,
}

/// What a change made of the weight of a slot's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) more: u64,
    pub(super) less: u64,
}

impl Tree {
    /// One more holder of a prompt. An empty one needs none.
    pub(super) fn add(&mut self, prompt: &Prompt, slot: Slot) -> (Option<Leaf>, Change) {
        let mut end = None;
        self.walk(prompt, |id, reached| end = Some((id, reached)));
        let (known, reached) = match end {
            Some((id, reached)) if reached < self.nodes[id].to => {
                (Some(self.divide(id, reached)), reached)
            }
            Some((id, reached)) => (Some(id), reached),
            None => (None, 0),
        };
        let leaf = if reached < prompt.len() {
            Some(self.grow(prompt, reached, known))
        } else {
            known
        };
        let (mut change, mut next) = (Change::default(), leaf);
        while let Some(node) = next.map(|id| &mut self.nodes[id]) {
            change.more += node.join(slot);
            next = node.parent;
        }
        (leaf.map(Leaf), change)
    }

    /// One holder less.
    pub(super) fn remove(&mut self, Leaf(leaf): Leaf, slot: Slot) -> Change {
        let mut change = Change::default();
        let (mut next, mut last) = (Some(leaf), None);
        while let Some(id) = next {
            let node = &mut self.nodes[id];
            next = node.parent;
            change.less += node.leave(slot);
            if node.holders.is_empty() {
                self.unlink(id);
            } else {
                last = last.or(Some(id));
            }
        }
        last.into_iter().for_each(|id| self.join_child(id));
        change
    }

    /// Lets those blocks of a request count for so much that nobody else holds on the slot.
    pub(super) fn fade(&mut self, leaves: &[Leaf], slot: Slot, weight: Weight) -> Change {
        let mut change = Change::default();
        let mut path = self.path_of(leaves);
        path.sort_unstable();
        for own in path.chunk_by(|one, other| one == other) {
            let node = &mut self.nodes[own[0]];
            let blocks = node.to - node.from;
            let alone = |holder: &&mut Holder| holder.prompts as usize == own.len();
            if let Some(holder) = node
                .holder(slot)
                .ok()
                .map(|at| &mut node.holders[at])
                .filter(alone)
            {
                change.less += holder.weight.times(blocks);
                change.more += weight.times(blocks);
                holder.weight = weight;
            }
        }
        change
    }

    /// A slot is nobody's any more.
    pub(super) fn forget(&mut self, slot: Slot) {
        let mut empty = Vec::new();
        for (id, node) in &mut self.nodes {
            node.holders.retain(|holder| holder.slot != slot);
            if node.holders.is_empty() {
                empty.push((Reverse(node.from), id));
            }
        }
        // Children before their parents.
        empty.sort_unstable();
        let parents: Vec<_> = empty
            .iter()
            .filter_map(|(_, id)| self.nodes[*id].parent)
            .collect();
        empty.iter().for_each(|(_, id)| self.unlink(*id));
        parents.into_iter().for_each(|id| self.join_child(id));
    }

    /// How many of the blocks of these prompts each slot holds, by slot, as far as anybody holds any.
    pub(super) fn held(&self, prompts: &[Prompt]) -> Vec<u32> {
        let mut path = Vec::new();
        prompts
            .iter()
            .for_each(|prompt| self.walk(prompt, |id, reached| path.push((id, Reverse(reached)))));
        if prompts.len() > 1 {
            path.sort_unstable();
            path.dedup_by_key(|(id, _)| *id);
        }
        let mut held = Vec::new();
        for (id, Reverse(reached)) in path {
            let node = &self.nodes[id];
            let most = node.holders.last().map_or(0, |holder| holder.slot.at() + 1);
            if held.len() < most {
                held.resize(most, 0);
            }
            let blocks = (reached - node.from) as u32;
            node.holders
                .iter()
                .for_each(|holder| held[holder.slot.at()] += blocks);
        }
        held
    }

    /// Tells which nodes hold the beginning of a prompt, from the root on, and where in the prompt each one ends to agree.
    fn walk(&self, prompt: &[SequenceHash], mut visit: impl FnMut(Id, usize)) {
        let (mut parent, mut at) = (None, 0);
        while let Some(&id) = prompt.get(at).and_then(|first| self.starts.get(first)) {
            let node = &self.nodes[id];
            if (node.parent, node.from) != (parent, at) {
                return;
            }
            let reached = node.agrees(prompt);
            visit(id, reached);
            if reached < node.to {
                return;
            }
            (parent, at) = (Some(id), reached);
        }
    }

    /// A new node for what of a prompt nobody holds.
    fn grow(&mut self, prompt: &Prompt, from: usize, parent: Option<Id>) -> Id {
        let (prompt, to) = (prompt.clone(), prompt.len());
        let id = self.nodes.insert(Node {
            parent,
            prompt,
            from,
            to,
            children: 0,
            child: 0,
            holders: Vec::new(),
        });
        self.enlist(id);
        self.adopt(parent, id);
        id
    }

    /// Makes a node of its own of the beginning of another, up to `at`.
    fn divide(&mut self, id: Id, at: usize) -> Id {
        let node = &mut self.nodes[id];
        let (prompt, holders) = (node.prompt.clone(), node.holders.clone());
        let begin = Node {
            parent: node.parent,
            prompt,
            from: node.from,
            to: at,
            children: 1,
            child: id,
            holders,
        };
        let (parent, first) = (node.parent, node.prompt[node.from]);
        node.from = at;
        let upper = self.nodes.insert(begin);
        self.nodes[id].parent = Some(upper);
        self.disown(parent, id);
        self.adopt(parent, upper);
        if self.starts.get(&first) == Some(&id) {
            self.starts.insert(first, upper);
            self.enlist(id);
        }
        upper
    }

    /// Joins a node with its only child, if whoever holds the one holds the other and they are named as one.
    fn join_child(&mut self, id: Id) {
        let Some(node) = self.nodes.get(id) else {
            return;
        };
        let (parent, from, first) = (node.parent, node.from, node.prompt[node.from]);
        let id_below = node.child;
        let Some(below) = self.nodes.get(id_below).filter(|_| node.children == 1) else {
            return;
        };
        if below.holders != node.holders || below.prompt[from] != first {
            return;
        }
        self.delist(id_below);
        if self.starts.get(&first) == Some(&id) {
            self.starts.insert(first, id_below);
        }
        self.nodes.remove(id);
        self.disown(parent, id);
        self.adopt(parent, id_below);
        let below = &mut self.nodes[id_below];
        (below.parent, below.from) = (parent, from);
    }

    /// Takes out a node that has no children.
    fn unlink(&mut self, id: Id) {
        self.delist(id);
        let node = self.nodes.remove(id);
        self.disown(node.parent, id);
    }

    fn enlist(&mut self, id: Id) {
        let node = &self.nodes[id];
        self.starts.entry(node.prompt[node.from]).or_insert(id);
    }

    fn delist(&mut self, id: Id) {
        let node = &self.nodes[id];
        if let Entry::Occupied(entry) = self.starts.entry(node.prompt[node.from])
            && *entry.get() == id
        {
            entry.remove();
        }
    }

    fn adopt(&mut self, parent: Option<Id>, id: Id) {
        let Some(parent) = parent else { return };
        self.nodes[parent].children += 1;
        self.nodes[parent].child ^= id;
    }

    fn disown(&mut self, parent: Option<Id>, id: Id) {
        let Some(parent) = parent else { return };
        self.nodes[parent].children -= 1;
        self.nodes[parent].child ^= id;
    }

    /// All nodes from these up to the root; those of several as often.
    fn path_of(&self, leaves: &[Leaf]) -> Vec<Id> {
        let up =
            |Leaf(leaf): &Leaf| std::iter::successors(Some(*leaf), |id| self.nodes[*id].parent);
        leaves.iter().flat_map(up).collect()
    }
}

impl Node {
    /// How far a prompt that has the first block of this node agrees with it.
    fn agrees(&self, prompt: &[SequenceHash]) -> usize {
        let to = self.to.min(prompt.len());
        // Mostly it does as far as it can.
        if self.prompt[to - 1] == prompt[to - 1] {
            return to;
        }
        let (own, asked) = (&self.prompt[self.from..to], &prompt[self.from..to]);
        let mut known = 1..own.len();
        while !known.is_empty() {
            let middle = known.start + known.len() / 2;
            if own[middle] == asked[middle] {
                known.start = middle + 1
            } else {
                known.end = middle
            }
        }
        self.from + known.start
    }

    fn holder(&self, slot: Slot) -> Result<usize, usize> {
        self.holders
            .binary_search_by_key(&slot, |holder| holder.slot)
    }

    /// One more prompt of a slot; what that makes of the slot's weight.
    fn join(&mut self, slot: Slot) -> u64 {
        match self.holder(slot) {
            Ok(at) => {
                self.holders[at].prompts += 1;
                0
            }
            Err(at) => {
                let weight = Weight::ONE;
                self.holders.insert(
                    at,
                    Holder {
                        slot,
                        prompts: 1,
                        weight,
                    },
                );
                weight.times(self.to - self.from)
            }
        }
    }

    /// One prompt less; what that takes off the slot's weight.
    fn leave(&mut self, slot: Slot) -> u64 {
        let Ok(at) = self.holder(slot) else { return 0 };
        self.holders[at].prompts -= 1;
        if self.holders[at].prompts > 0 {
            return 0;
        }
        self.holders.remove(at).weight.times(self.to - self.from)
    }
}

#[cfg(test)]
mod tests;
