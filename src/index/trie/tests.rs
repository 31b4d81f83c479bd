use std::collections::BTreeMap;

use super::*;
use crate::index::arena;

/// Limits the length of runs, so that short prompts reach the limit.
pub(in crate::index) fn limit(trie: &mut Trie, longest: usize) {
    trie.longest = longest;
}

/// Limits the memory.
pub(in crate::index) fn limit_chunks(trie: &mut Trie, chunks: usize) {
    arena::tests::limit(&mut trie.arena, chunks);
}

/// Panics if the trie contradicts itself or keeps anything it should not.
pub(in crate::index) fn check(trie: &Trie) {
    let mut stack: Vec<(u32, u32, u32)> = trie.roots.runs().map(|run| (NOWHERE, 0, run)).collect();
    let (mut runs, mut blocks, mut used) = (0, 0, BTreeMap::new());
    while let Some((parent, depth, id)) = stack.pop() {
        let run = &trie.runs[id];
        runs += 1;
        blocks += run.blocks.len() as usize;
        assert_eq!((run.parent, run.start), (parent, depth));
        assert!(run.blocks.len() > 0 && run.blocks.len() as usize <= trie.longest);
        assert!(!run.is_bare(), "a leaf that nobody holds stayed");
        let positions = run
            .blocks
            .iter()
            .flat_map(|stretch| stretch.first..stretch.end());
        for (at, block) in positions.enumerate() {
            assert_eq!(
                trie.home(BlockId(block)),
                Home {
                    run: id,
                    depth: depth + at as u32
                }
            );
            assert_eq!(run.blocks.at(at as u32), Some(block));
        }
        let room = run.blocks.room();
        assert!(
            (room.first..room.end()).all(|at| trie.arena.home(at).is_none()),
            "somebody lives in the room"
        );
        assert!(room.len <= 128.max(run.blocks.len()), "too much room");
        for stretch in run
            .blocks
            .iter()
            .chain([room])
            .filter(|stretch| stretch.len > 0)
        {
            assert!(
                used.insert(stretch.first, stretch.len).is_none(),
                "two runs lie at one place"
            );
        }
        if let Some(only) = run.children.only() {
            let child = &trie.runs[only];
            // With a short limit, runs that were too long to be joined may have become shorter since.
            let alike = child.owners == run.owners && trie.longest == LONGEST_RUN;
            assert!(!alike, "two runs that nothing tells apart were not joined");
        }
        for child in run.children.runs() {
            let first = trie.arena.local(trie.runs[child].blocks.first());
            assert_eq!(run.children.get(first), Some(child));
            stack.push((id, run.end(), child));
        }
    }
    assert_eq!(trie.runs(), runs);
    assert_eq!(trie.blocks(), blocks);
    arena::tests::check(&trie.arena, &used);
}

/// Blocks that there is memory for.
pub(in crate::index) fn room(trie: &Trie) -> usize {
    arena::tests::capacity(&trie.arena)
}
