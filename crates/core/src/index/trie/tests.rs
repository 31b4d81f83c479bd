use std::collections::BTreeMap;

use super::*;
use crate::index::arena;

/// Limits the length of runs, so that short prompts reach the limit.
pub(in crate::index) fn limit(trie: &mut BlockTrie, max_run_len: usize) {
    trie.max_run_len = max_run_len;
}

/// Limits the number of chunks of memory.
pub(in crate::index) fn limit_chunks(trie: &mut BlockTrie, chunks: usize) {
    arena::tests::limit(&mut trie.arena, chunks);
}

/// Panics if the trie is inconsistent, or if a run could be removed or merged.
pub(in crate::index) fn check(trie: &BlockTrie) {
    let mut stack: Vec<(u32, u32, u32)> = trie.roots.runs().map(|run| (NO_RUN, 0, run)).collect();
    let mut runs = 0;
    let mut blocks = 0;
    let mut used = BTreeMap::new();
    while let Some((parent, depth, id)) = stack.pop() {
        let run = &trie.runs[id];
        runs += 1;
        blocks += run.blocks.len() as usize;
        assert_eq!((run.parent, run.start), (parent, depth));
        assert!(run.blocks.len() > 0 && run.blocks.len() as usize <= trie.max_run_len);
        assert!(!run.is_unused(), "a leaf without owner was not removed");
        let positions = run
            .blocks
            .iter()
            .flat_map(|extent| extent.first..extent.end());
        for (at, block) in positions.enumerate() {
            assert_eq!(
                trie.position_of(BlockId(block)),
                RunPosition {
                    run: id,
                    depth: depth + at as u32
                }
            );
            assert_eq!(run.blocks.position(at as u32), Some(block));
        }
        let room = run.blocks.reserved_extent();
        assert!(
            (room.first..room.end()).all(|at| trie.arena.run_at(at).is_none()),
            "free positions are in use"
        );
        assert!(
            room.len <= 128.max(run.blocks.len()),
            "too much memory is reserved"
        );
        for extent in run
            .blocks
            .iter()
            .chain([room])
            .filter(|extent| extent.len > 0)
        {
            assert!(
                used.insert(extent.first, extent.len).is_none(),
                "two runs share a position"
            );
        }
        if let Some(only) = run.children.only_child() {
            let child = &trie.runs[only];
            // With a short limit, runs that were too long to be merged may have become shorter.
            let are_equal = child.owners == run.owners && trie.max_run_len == MAX_RUN_LEN;
            assert!(!are_equal, "two equal neighbouring runs were not merged");
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

/// Returns the number of blocks with memory.
pub(in crate::index) fn room(trie: &BlockTrie) -> usize {
    arena::tests::capacity(&trie.arena)
}
