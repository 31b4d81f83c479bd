//! Radix tree over the prompts of all running requests, with the holders of each node. A node
//! covers a run of blocks that the same requests hold. A sequence hash covers all blocks before its
//! own, so the common prefix of two prompts is found by binary search. The cost of a booking
//! therefore depends on the branches of its prompt, not on its blocks. Nodes reference a prompt
//! instead of copying blocks. External callers may supply hashes that break this assumption. Their
//! prompts then share fewer or more blocks than they hold, but a release still removes exactly what
//! was booked.

use std::cmp::Reverse;
use std::sync::Arc;

use hashbrown::HashMap;
use hashbrown::hash_map::Entry;
use slab::Slab;

use super::rows::is_departed;
use super::weight::BlockWeight;
use crate::block::SequenceHash;
use crate::worker::RankSlot;

type SequenceHashes = Arc<[SequenceHash]>;

/// Tree of all prompts.
#[derive(Debug, Default)]
pub(super) struct PromptTree {
    nodes: Slab<PromptNode>,
    /// Nodes by their first block. Hashed again with a random key, because callers may choose the
    /// sequence hashes and could force collisions. A node is missing here if an unrelated node
    /// already has the same first hash.
    starts: HashMap<SequenceHash, NodeId>,
}

/// Slab index of a node. It stays with the last blocks of a run when the run is split or merged.
type NodeId = usize;

/// Node at which a held prompt ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LeafId(NodeId);

#[derive(Debug)]
struct PromptNode {
    parent: Option<NodeId>,
    /// Prompt of one holder; `from..to` are the blocks of this node.
    prompt: SequenceHashes,
    from: usize,
    to: usize,
    children: usize,
    /// XOR of the ids of all children, so it is the id of the only child if there is one.
    child: NodeId,
    /// Sorted by slot. A holder of a node also holds its parent.
    holders: Vec<NodeHolder>,
}

/// Holders of a node on one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct NodeHolder {
    slot: RankSlot,
    /// Number of prompts of running requests.
    prompt_count: u32,
    /// Weight of each block. It stays when another request joins.
    weight: BlockWeight,
}

/// Change of the weight of a slot's blocks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct WeightChange {
    pub(super) added: u64,
    pub(super) removed: u64,
}

impl PromptTree {
    /// Adds a holder of a prompt. An empty prompt has no leaf.
    pub(super) fn add(
        &mut self,
        prompt: &SequenceHashes,
        slot: RankSlot,
    ) -> (Option<LeafId>, WeightChange) {
        let mut end = None;
        self.walk(prompt, |id, reached| end = Some((id, reached)));
        let (known, reached) = match end {
            Some((id, reached)) if reached < self.nodes[id].to => {
                (Some(self.split(id, reached)), reached)
            }
            Some((id, reached)) => (Some(id), reached),
            None => (None, 0),
        };
        let leaf = if reached < prompt.len() {
            Some(self.add_node(prompt, reached, known))
        } else {
            known
        };
        let mut change = WeightChange::default();
        let mut next = leaf;
        while let Some(node) = next.map(|id| &mut self.nodes[id]) {
            change.added += node.add_prompt(slot);
            next = node.parent;
        }
        (leaf.map(LeafId), change)
    }

    /// Removes a holder of a prompt.
    pub(super) fn remove(&mut self, LeafId(leaf): LeafId, slot: RankSlot) -> WeightChange {
        let mut change = WeightChange::default();
        let mut next = Some(leaf);
        let mut last = None;
        while let Some(id) = next {
            let node = &mut self.nodes[id];
            next = node.parent;
            change.removed += node.remove_prompt(slot);
            if node.holders.is_empty() {
                self.unlink(id);
            } else {
                last = last.or(Some(id));
            }
        }
        if let Some(id) = last {
            self.merge_child(id);
        }
        change
    }

    /// Sets the weight of the blocks that no other request holds on the slot.
    pub(super) fn discount(
        &mut self,
        leaves: &[LeafId],
        slot: RankSlot,
        weight: BlockWeight,
    ) -> WeightChange {
        let mut change = WeightChange::default();
        let mut path = self.ancestors(leaves);
        path.sort_unstable();
        for own in path.chunk_by(|one, other| one == other) {
            let node = &mut self.nodes[own[0]];
            let blocks = node.to - node.from;
            let is_only = |holder: &&mut NodeHolder| holder.prompt_count as usize == own.len();
            if let Some(holder) = node
                .find_holder(slot)
                .ok()
                .map(|at| &mut node.holders[at])
                .filter(is_only)
            {
                change.removed += holder.weight.times(blocks);
                change.added += weight.times(blocks);
                holder.weight = weight;
            }
        }
        change
    }

    /// Moves all holders on a slot to another slot, which has none.
    pub(super) fn move_slot(&mut self, from: RankSlot, to: RankSlot) {
        for (_, node) in &mut self.nodes {
            if let Ok(at) = node.find_holder(from) {
                node.holders[at].slot = to;
                node.holders.sort_unstable_by_key(|holder| holder.slot);
            }
        }
    }

    /// Returns, per slot, the number of these prompts' blocks that it holds. Slots beyond the end
    /// hold none.
    pub(super) fn held_blocks(&self, prompts: &[SequenceHashes]) -> Vec<u32> {
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
            // Departed ranks come last and are no candidates.
            let open = node
                .holders
                .partition_point(|holder| !is_departed(holder.slot));
            let holders = &node.holders[..open];
            let most = holders.last().map_or(0, |holder| holder.slot.index() + 1);
            if held.len() < most {
                held.resize(most, 0);
            }
            let blocks = (reached - node.from) as u32;
            holders
                .iter()
                .for_each(|holder| held[holder.slot.index()] += blocks);
        }
        held
    }

    /// Visits the nodes that share a prefix with a prompt, from the root down, with the end of the
    /// common prefix in each.
    fn walk(&self, prompt: &[SequenceHash], mut visit: impl FnMut(NodeId, usize)) {
        let mut parent = None;
        let mut at = 0;
        while let Some(&id) = prompt.get(at).and_then(|first| self.starts.get(first)) {
            let node = &self.nodes[id];
            if (node.parent, node.from) != (parent, at) {
                return;
            }
            let reached = node.common_end(prompt);
            visit(id, reached);
            if reached < node.to {
                return;
            }
            parent = Some(id);
            at = reached;
        }
    }

    /// Adds a node for the blocks from `from` on, which no request holds yet.
    fn add_node(&mut self, prompt: &SequenceHashes, from: usize, parent: Option<NodeId>) -> NodeId {
        let id = self.nodes.insert(PromptNode {
            parent,
            prompt: prompt.clone(),
            from,
            to: prompt.len(),
            children: 0,
            child: 0,
            holders: Vec::new(),
        });
        self.register_start(id);
        self.add_child(parent, id);
        id
    }

    /// Splits a node at `at`. Returns the new node that holds the first part.
    fn split(&mut self, id: NodeId, at: usize) -> NodeId {
        let node = &mut self.nodes[id];
        let parent = node.parent;
        let first = node.prompt[node.from];
        let begin = PromptNode {
            parent,
            prompt: node.prompt.clone(),
            from: node.from,
            to: at,
            children: 1,
            child: id,
            holders: node.holders.clone(),
        };
        node.from = at;
        let upper = self.nodes.insert(begin);
        self.nodes[id].parent = Some(upper);
        self.remove_child(parent, id);
        self.add_child(parent, upper);
        if self.starts.get(&first) == Some(&id) {
            self.starts.insert(first, upper);
            self.register_start(id);
        }
        upper
    }

    /// Merges a node with its only child if both have the same holders and the child's prompt
    /// shares the node's first hash.
    fn merge_child(&mut self, id: NodeId) {
        let Some(node) = self.nodes.get(id) else {
            return;
        };
        let parent = node.parent;
        let from = node.from;
        let first = node.prompt[from];
        let id_below = node.child;
        let Some(below) = self.nodes.get(id_below).filter(|_| node.children == 1) else {
            return;
        };
        if below.holders != node.holders || below.prompt[from] != first {
            return;
        }
        self.unregister_start(id_below);
        if self.starts.get(&first) == Some(&id) {
            self.starts.insert(first, id_below);
        }
        self.nodes.remove(id);
        self.remove_child(parent, id);
        self.add_child(parent, id_below);
        let below = &mut self.nodes[id_below];
        below.parent = parent;
        below.from = from;
    }

    /// Removes a node without children.
    fn unlink(&mut self, id: NodeId) {
        self.unregister_start(id);
        let node = self.nodes.remove(id);
        self.remove_child(node.parent, id);
    }

    fn register_start(&mut self, id: NodeId) {
        let node = &self.nodes[id];
        self.starts.entry(node.prompt[node.from]).or_insert(id);
    }

    fn unregister_start(&mut self, id: NodeId) {
        let node = &self.nodes[id];
        if let Entry::Occupied(entry) = self.starts.entry(node.prompt[node.from])
            && *entry.get() == id
        {
            entry.remove();
        }
    }

    fn add_child(&mut self, parent: Option<NodeId>, id: NodeId) {
        let Some(parent) = parent else { return };
        self.nodes[parent].children += 1;
        self.nodes[parent].child ^= id;
    }

    fn remove_child(&mut self, parent: Option<NodeId>, id: NodeId) {
        let Some(parent) = parent else { return };
        self.nodes[parent].children -= 1;
        self.nodes[parent].child ^= id;
    }

    /// Returns the nodes from each leaf up to the root. Nodes shared by several leaves occur once
    /// per leaf.
    fn ancestors(&self, leaves: &[LeafId]) -> Vec<NodeId> {
        let up =
            |LeafId(leaf): &LeafId| std::iter::successors(Some(*leaf), |id| self.nodes[*id].parent);
        leaves.iter().flat_map(up).collect()
    }
}

impl PromptNode {
    /// Returns the end of the common prefix with a prompt that shares the first block of this node.
    fn common_end(&self, prompt: &[SequenceHash]) -> usize {
        let to = self.to.min(prompt.len());
        // The common case: the prompt covers the whole node.
        if self.prompt[to - 1] == prompt[to - 1] {
            return to;
        }
        let own = &self.prompt[self.from..to];
        let other = &prompt[self.from..to];
        let mut range = 1..own.len();
        while !range.is_empty() {
            let middle = range.start + range.len() / 2;
            if own[middle] == other[middle] {
                range.start = middle + 1
            } else {
                range.end = middle
            }
        }
        self.from + range.start
    }

    fn find_holder(&self, slot: RankSlot) -> Result<usize, usize> {
        self.holders
            .binary_search_by_key(&slot, |holder| holder.slot)
    }

    /// Adds a prompt on a slot. Returns the increase of the slot's weight.
    fn add_prompt(&mut self, slot: RankSlot) -> u64 {
        match self.find_holder(slot) {
            Ok(at) => {
                self.holders[at].prompt_count += 1;
                0
            }
            Err(at) => {
                let weight = BlockWeight::ONE;
                self.holders.insert(
                    at,
                    NodeHolder {
                        slot,
                        prompt_count: 1,
                        weight,
                    },
                );
                weight.times(self.to - self.from)
            }
        }
    }

    /// Removes a prompt on a slot. Returns the decrease of the slot's weight.
    fn remove_prompt(&mut self, slot: RankSlot) -> u64 {
        let Ok(at) = self.find_holder(slot) else {
            return 0;
        };
        self.holders[at].prompt_count -= 1;
        if self.holders[at].prompt_count > 0 {
            return 0;
        }
        self.holders.remove(at).weight.times(self.to - self.from)
    }
}

#[cfg(test)]
mod tests;
