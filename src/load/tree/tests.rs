use std::collections::{BTreeMap, BTreeSet, HashSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

const SLOTS: u32 = 3;

/// Chained names, as sequence hashes are: equal only after equal prefixes.
fn chained(locals: &[u64]) -> Prompt {
    let step = |last: &mut u64, local: &u64| {
        *last = *last * 4 + local + 1;
        Some(SequenceHash(*last))
    };
    locals.iter().scan(0, step).collect()
}

/// A prompt that is held, and what nobody but the test knows of it.
struct Live {
    prompt: Prompt,
    slot: Slot,
    leaf: Option<Leaf>,
}

/// The blocks that are held on each slot, and how many hold each.
fn held(live: &[Live], slot: Slot) -> BTreeMap<SequenceHash, usize> {
    let mut held = BTreeMap::new();
    for live in live.iter().filter(|live| live.slot == slot) {
        live.prompt
            .iter()
            .for_each(|block| *held.entry(*block).or_default() += 1);
    }
    held
}

impl Tree {
    /// What must always hold, whoever named the blocks.
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
                let below = children
                    .iter()
                    .filter_map(|(_, child)| Some(child.holders[child.holder(holder.slot).ok()?]));
                assert!(below.map(|below| below.prompts).sum::<u32>() <= holder.prompts);
            }
            assert!(children.iter().all(|(_, child)| child.from == node.to));
            assert!(children.iter().all(|(_, child)| {
                child
                    .holders
                    .iter()
                    .all(|below| node.holder(below.slot).is_ok())
            }));
        }
        assert!(
            self.starts
                .iter()
                .all(|(name, id)| self.nodes[*id].prompt[self.nodes[*id].from] == *name)
        );
    }
}

fn run(script: Vec<(u8, u32, Prompt, u16)>, mut look: impl FnMut(&Tree, &[Live], &[u64], &Prompt)) {
    let (mut tree, mut live) = (Tree::default(), Vec::<Live>::new());
    let mut weights = vec![0; SLOTS as usize];
    let take = |slot: Slot, change: Change, weights: &mut Vec<u64>| {
        weights[slot.at()] = weights[slot.at()] + change.more - change.less;
    };
    for (kind, slot, prompt, pick) in script {
        let slot = Slot(slot);
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
            9 if pick % 4 == 0 => {
                tree.forget(slot);
                live.retain(|live| live.slot != slot);
                weights[slot.at()] = 0;
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
    #![proptest_config(ProptestConfig { cases: 5_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn it_holds_what_a_map_of_blocks_holds(
        script in vec((0..10u8, 0..SLOTS, vec(0..3u64, 0..9).prop_map(|locals| chained(&locals)), any::<u16>()), 1..60),
    ) {
        run(script, |tree, live, weights, asked| {
            let found = tree.held(std::slice::from_ref(asked));
            for slot in (0..SLOTS).map(Slot) {
                let held = held(live, slot);
                assert_eq!(weights[slot.at()], Weight::ONE.times(held.len()));
                let common = asked.iter().take_while(|block| held.contains_key(block)).count();
                assert_eq!(found.get(slot.at()).map_or(0, |found| *found as usize), common);
            }
            // Where two prompts part a node ends, and where one ends: that is all.
            let ends: HashSet<_> = live.iter().filter_map(|live| live.prompt.last()).collect();
            assert!(tree.nodes.len() <= 2 * ends.len() + SLOTS as usize);
        });
    }

    /// Names that say nothing of what is before them.
    #[test]
    fn what_is_named_as_nobody_should_is_released_all_the_same(
        script in vec((0..10u8, 0..SLOTS, vec((0..5u64).prop_map(SequenceHash), 0..7), any::<u16>()), 1..60),
    ) {
        let script = script.into_iter().map(|(kind, slot, names, pick)| (kind, slot, names.into(), pick)).collect();
        run(script, |tree, live, weights, asked| {
            for slot in (0..SLOTS).map(Slot) {
                let names: usize = live.iter().filter(|live| live.slot == slot).map(|live| live.prompt.len()).sum();
                assert!(weights[slot.at()] <= Weight::ONE.times(names));
                let found = tree.held(std::slice::from_ref(asked));
                assert!(found.get(slot.at()).is_none_or(|found| *found as usize <= asked.len()));
            }
        });
    }
}

#[test]
fn a_conversation_that_others_leave_is_one_node_again() {
    let mut tree = Tree::default();
    let long = chained(&[0; 25]);
    let (kept, _) = tree.add(&long, Slot(0));
    for at in 0..25 {
        let other = chained(&[&vec![0; at][..], &[1, 2]].concat());
        let (leaf, change) = tree.add(&other, Slot(0));
        assert_eq!(
            change,
            Change {
                more: Weight::ONE.times(2),
                less: 0
            }
        );
        assert_eq!(tree.nodes.len(), if at == 0 { 2 } else { 3 });
        assert_eq!(
            tree.remove(leaf.unwrap(), Slot(0)),
            Change {
                more: 0,
                less: Weight::ONE.times(2)
            }
        );
        assert_eq!(tree.nodes.len(), 1);
    }
    assert_eq!(
        tree.remove(kept.unwrap(), Slot(0)).less,
        Weight::ONE.times(25)
    );
}

/// The names of who has gone are kept only as long as somebody else holds a beginning of them.
#[test]
fn who_shares_a_beginning_shares_it_once() {
    let mut tree = Tree::default();
    let prompts: BTreeSet<Vec<u64>> = (0..100)
        .map(|at| vec![0, 0, 0, at % 3, at / 3 % 3, at / 9 % 3, at / 27])
        .collect();
    let leaves: Vec<_> = prompts
        .iter()
        .map(|prompt| tree.add(&chained(prompt), Slot(7)).0.unwrap())
        .collect();
    assert_eq!(tree.held(&[chained(&[0, 0, 0])]), [0, 0, 0, 0, 0, 0, 0, 3]);
    leaves
        .into_iter()
        .for_each(|leaf| _ = tree.remove(leaf, Slot(7)));
    assert!(tree.nodes.is_empty() && tree.starts.is_empty());
}
