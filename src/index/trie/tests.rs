use super::*;

/// Limits the length of runs, so that short prompts reach the limit.
pub(in crate::index) fn limit(trie: &mut Trie, longest: usize) {
    trie.longest = longest;
}

/// Panics if the trie contradicts itself or keeps anything it should not.
pub(in crate::index) fn check(trie: &Trie) {
    let mut stack: Vec<(u32, u32, u32)> = trie.roots.runs().map(|run| (NOWHERE, 0, run)).collect();
    let (mut runs, mut blocks) = (0, 0);
    while let Some((parent, depth, id)) = stack.pop() {
        let run = &trie.runs[id as usize];
        runs += 1;
        blocks += run.blocks.len();
        assert_eq!((run.parent, run.start), (parent, depth));
        assert!(!run.locals.is_empty() && run.locals.len() <= trie.longest);
        assert_eq!(run.locals.len(), run.blocks.len());
        assert!(!run.is_bare(), "a leaf that nobody holds stayed");
        for (at, block) in run.blocks.iter().enumerate() {
            assert_eq!(trie.home(*block), Home { run: id, depth: depth + at as u32 });
        }
        if let Some(only) = run.children.only() {
            let child = &trie.runs[only as usize];
            // With a short limit, runs that were too long to be joined may have become shorter since.
            let alike = child.owners == run.owners && trie.longest == LONGEST_RUN;
            assert!(!alike, "two runs that nothing tells apart were not joined");
        }
        for child in run.children.runs() {
            let first = trie.runs[child as usize].locals[0];
            assert_eq!(run.children.get(first), Some(child));
            stack.push((id, run.end(), child));
        }
    }
    assert_eq!(trie.runs(), runs);
    assert_eq!(trie.blocks(), blocks);
    let unused = trie.homes.iter().filter(|home| home.run == NOWHERE).count();
    assert_eq!(unused, trie.free_blocks.len());
}

/// Blocks that the runs have room for.
pub(in crate::index) fn room(trie: &Trie) -> usize {
    trie.runs.iter().map(|run| run.locals.capacity().max(run.blocks.capacity())).sum()
}
