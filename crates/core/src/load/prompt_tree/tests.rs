use std::collections::{BTreeMap, HashSet};

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

const SLOTS: u32 = 3;

/// Chains the hashes, so that two are equal only after equal prefixes.
fn chained(locals: &[u64]) -> SequenceHashes {
    let step = |last: &mut u64, local: &u64| {
        *last = *last * 4 + local + 1;
        Some(SequenceHash(*last))
    };
    locals.iter().scan(0, step).collect()
}

/// Held prompt, with the blocks that the tree must know.
struct Live {
    prompt: SequenceHashes,
    slot: RankSlot,
    leaf: Option<LeafId>,
}

/// Returns the held blocks of a slot, with the number of holders.
fn held(live: &[Live], slot: RankSlot) -> BTreeMap<SequenceHash, usize> {
    let mut held = BTreeMap::new();
    for live in live.iter().filter(|live| live.slot == slot) {
        live.prompt
            .iter()
            .for_each(|block| *held.entry(*block).or_default() += 1);
    }
    held
}

impl PromptTree {
    /// Checks the invariants of the tree.
    fn check(&self) {
        for (id, node) in &self.nodes {
            assert!(node.from < node.to && node.to <= node.prompt.len());
            assert!(
                !node.holders.is_empty()
                    && node
                        .holders
                        .is_sorted_by(|one, other| one.slot < other.slot)
            );
            let children: Vec<_> = self
                .nodes
                .iter()
                .filter(|(_, child)| child.parent == Some(id))
                .collect();
            assert_eq!(node.children, children.len());
            assert_eq!(
                node.child,
                children.iter().fold(0, |all, (child, _)| all ^ child)
            );
            for holder in &node.holders {
                let below = children.iter().filter_map(|(_, child)| {
                    Some(child.holders[child.find_holder(holder.slot).ok()?])
                });
                assert!(below.map(|below| below.prompt_count).sum::<u32>() <= holder.prompt_count);
            }
            assert!(children.iter().all(|(_, child)| child.from == node.to));
            assert!(children.iter().all(|(_, child)| {
                child
                    .holders
                    .iter()
                    .all(|below| node.find_holder(below.slot).is_ok())
            }));
        }
        assert!(
            self.starts
                .iter()
                .all(|(name, id)| self.nodes[*id].prompt[self.nodes[*id].from] == *name)
        );
    }
}

fn run(
    script: Vec<(u8, u32, SequenceHashes, u16)>,
    mut look: impl FnMut(&PromptTree, &[Live], &[u64], &SequenceHashes),
) {
    let mut tree = PromptTree::default();
    let mut live = Vec::<Live>::new();
    let mut weights = vec![0; SLOTS as usize];
    let take = |slot: RankSlot, change: WeightChange, weights: &mut Vec<u64>| {
        weights[slot.index()] = weights[slot.index()] + change.added - change.removed;
    };
    for (kind, slot, prompt, pick) in script {
        let slot = RankSlot(slot);
        match kind {
            0..5 => {
                let (leaf, change) = tree.add(&prompt, slot);
                take(slot, change, &mut weights);
                live.push(Live {
                    prompt: prompt.clone(),
                    slot,
                    leaf,
                });
            }
            5..9 if !live.is_empty() => {
                let gone = live.swap_remove(usize::from(pick) % live.len());
                if let Some(leaf) = gone.leaf {
                    take(gone.slot, tree.remove(leaf, gone.slot), &mut weights);
                }
            }
            _ => {}
        }
        tree.check();
        look(&tree, &live, &weights, &prompt);
    }
    for gone in live {
        gone.leaf
            .into_iter()
            .for_each(|leaf| take(gone.slot, tree.remove(leaf, gone.slot), &mut weights));
        tree.check();
    }
    assert!(tree.nodes.is_empty() && tree.starts.is_empty());
    assert_eq!(weights, [0; SLOTS as usize]);
}

proptest! {
    #![proptest_config(property_config(5_000))]

    #[test]
    fn load_table_matches_map_model(
        script in vec((0..10u8, 0..SLOTS, vec(0..3u64, 0..9).prop_map(|locals| chained(&locals)), any::<u16>()), 1..60),
    ) {
        run(script, |tree, live, weights, queried| {
            let found = tree.held_blocks(std::slice::from_ref(queried));
            for slot in (0..SLOTS).map(RankSlot) {
                let held = held(live, slot);
                assert_eq!(weights[slot.index()], BlockWeight::ONE.times(held.len()));
                let common = queried.iter().take_while(|block| held.contains_key(block)).count();
                assert_eq!(found.get(slot.index()).map_or(0, |found| *found as usize), common);
            }
            // A node ends only where two prompts diverge or one ends.
            let ends: HashSet<_> = live.iter().filter_map(|live| live.prompt.last()).collect();
            assert!(tree.nodes.len() <= 2 * ends.len() + SLOTS as usize);
        });
    }

    /// Uses hashes that do not depend on the blocks before them.
    #[test]
    fn mirrored_blocks_with_foreign_hashes_are_released(
        script in vec((0..10u8, 0..SLOTS, vec((0..5u64).prop_map(SequenceHash), 0..7), any::<u16>()), 1..60),
    ) {
        let script = script.into_iter().map(|(kind, slot, names, pick)| (kind, slot, names.into(), pick)).collect();
        run(script, |tree, live, weights, queried| {
            for slot in (0..SLOTS).map(RankSlot) {
                let names: usize = live.iter().filter(|live| live.slot == slot).map(|live| live.prompt.len()).sum();
                assert!(weights[slot.index()] <= BlockWeight::ONE.times(names));
                let found = tree.held_blocks(std::slice::from_ref(queried));
                assert!(found.get(slot.index()).is_none_or(|found| *found as usize <= queried.len()));
            }
        });
    }
}
