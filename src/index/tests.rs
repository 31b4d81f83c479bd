mod model;
mod stress;

use std::collections::BTreeSet;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::block::{EngineHash, LocalHash};
use crate::tier::Tier;
use crate::worker::BlockSize;

const RANKS: usize = 3;

/// One step of a script; picks are taken modulo what there is to pick from.
#[derive(Clone, Debug)]
enum Step {
    Store { rank: usize, parent: Option<u8>, locals: Vec<u8>, naming: Naming, tier: Tier },
    Remove { rank: usize, picks: Vec<u8>, unknown: bool, tier: Tier },
    RemoveRun { rank: usize, pick: u8, count: usize, reverse: bool, tier: Tier },
    Clear { rank: usize },
    Doubt { rank: usize },
    Rejoin { rank: usize },
}

/// How an engine names what it stores.
#[derive(Clone, Debug)]
enum Naming {
    /// By content, as real engines do; the variant makes several names for one content.
    Content(u8),
    /// Whatever.
    Arbitrary(Vec<u8>),
}

fn prompt(locals: &[LocalHash]) -> BlockHashes {
    BlockHashes::chain(locals.len() * 16, BlockSize::new(16).unwrap(), locals.to_vec())
}

fn tiers() -> impl Strategy<Value = Tier> {
    prop_oneof![6 => Just(Tier::Device), 2 => Just(Tier::HostPinned), 1 => Just(Tier::Disk), 1 => Just(Tier::External)]
}

fn steps() -> impl Strategy<Value = Step> {
    let naming = prop_oneof![
        5 => Just(Naming::Content(0)),
        2 => (0..3u8).prop_map(Naming::Content),
        1 => vec(0..12u8, 9).prop_map(Naming::Arbitrary),
    ];
    let store = (0..RANKS, any::<Option<u8>>(), vec(0..3u8, 0..9), naming, tiers())
        .prop_map(|(rank, parent, locals, naming, tier)| Step::Store { rank, parent, locals, naming, tier });
    let remove = (0..RANKS, vec(any::<u8>(), 0..5), prop::bool::weighted(0.1), tiers())
        .prop_map(|(rank, picks, unknown, tier)| Step::Remove { rank, picks, unknown, tier });
    let remove_run = (0..RANKS, any::<u8>(), 1..6usize, any::<bool>(), tiers())
        .prop_map(|(rank, pick, count, reverse, tier)| Step::RemoveRun { rank, pick, count, reverse, tier });
    prop_oneof![
        12 => store,
        5 => remove,
        5 => remove_run,
        1 => (0..RANKS).prop_map(|rank| Step::Clear { rank }),
        1 => (0..RANKS).prop_map(|rank| Step::Doubt { rank }),
        1 => (0..RANKS).prop_map(|rank| Step::Rejoin { rank }),
    ]
}

/// The event of a step, given what the rank holds.
fn event(step: &Step, rank: &model::Rank) -> Option<KvEvent> {
    let known: Vec<EngineHash> = rank.names.keys().copied().collect();
    let pick = |pick: u8| known.get(usize::from(pick) % known.len().max(1)).copied().unwrap_or(EngineHash(999));
    Some(match step {
        Step::Store { parent, locals, naming, tier, .. } => {
            let parent = parent.map(pick);
            let before = parent.and_then(|parent| rank.names.get(&parent)).map(|name| name.path.clone());
            let mut path = before.unwrap_or_default();
            let blocks = locals.iter().enumerate().map(|(at, &local)| {
                let local = LocalHash(u64::from(local));
                path.push(local);
                let engine = match naming {
                    Naming::Content(variant) => {
                        prompt(&path).sequences()[path.len() - 1].0.wrapping_add(1_000_003 * u64::from(*variant))
                    }
                    Naming::Arbitrary(names) => u64::from(names[at]),
                };
                StoredBlock { engine: EngineHash(engine), local }
            });
            KvEvent::Stored { parent, blocks: blocks.collect(), tier: *tier }
        }
        Step::Remove { picks, unknown, tier, .. } => {
            let mut blocks: Vec<_> = picks.iter().map(|&at| pick(at)).collect();
            if *unknown {
                blocks.insert(blocks.len() / 2, EngineHash(777));
            }
            KvEvent::Removed { blocks, tier: *tier }
        }
        Step::RemoveRun { pick: at, count, reverse, tier, .. } => {
            let end = rank.names.get(&pick(*at)).map(|name| name.path.clone()).unwrap_or_default();
            let mut line: Vec<_> = rank.names.iter().filter(|(_, name)| end.starts_with(&name.path)).collect();
            line.sort_by_key(|(_, name)| name.path.len());
            let mut blocks: Vec<_> = line.iter().rev().take(*count).map(|(engine, _)| **engine).collect();
            if *reverse {
                blocks.reverse();
            }
            KvEvent::Removed { blocks, tier: *tier }
        }
        Step::Clear { .. } => KvEvent::Cleared,
        Step::Doubt { .. } | Step::Rejoin { .. } => return None,
    })
}

/// The index and the model side by side.
struct Pair {
    index: Arc<PrefixIndex>,
    writers: Vec<Option<RankWriter>>,
    models: Vec<model::Rank>,
    overlaps: Overlaps,
}

impl Pair {
    fn new(longest: Option<usize>) -> Self {
        let index = PrefixIndex::new();
        for shard in &index.shards {
            longest.iter().for_each(|&longest| trie::tests::limit(&mut shard.write(), longest));
        }
        let writers = (0..RANKS).map(|rank| Some(index.join(Slot(rank as u32)))).collect();
        Self { index, writers, models: vec![model::Rank::default(); RANKS], overlaps: Overlaps::new() }
    }

    fn step(&mut self, step: &Step) {
        let (Step::Store { rank, .. }
        | Step::Remove { rank, .. }
        | Step::RemoveRun { rank, .. }
        | Step::Clear { rank }
        | Step::Doubt { rank }
        | Step::Rejoin { rank }) = *step;
        let slot = Slot(rank as u32);
        match event(step, &self.models[rank]) {
            Some(event) => {
                let expected = self.models[rank].apply(&event);
                assert_eq!(self.writers[rank].as_mut().unwrap().apply(&event), expected, "{event:?}");
            }
            None if matches!(step, Step::Doubt { .. }) => {
                self.models[rank].doubt();
                self.writers[rank].as_mut().unwrap().doubt();
            }
            None => {
                self.models[rank] = model::Rank::default();
                self.writers[rank] = None;
                self.writers[rank] = Some(self.index.join(slot));
            }
        }
    }

    fn compare(&mut self, prompt: &BlockHashes) {
        self.index.overlaps(prompt, &mut self.overlaps);
        let mut found = 0;
        for (rank, model) in self.models.iter().enumerate() {
            let expected = model.overlap(prompt.locals());
            found += usize::from(expected.total() > 0);
            assert_eq!(self.overlaps.get(Slot(rank as u32)), expected, "rank {rank} {:?}", prompt.locals());
        }
        assert_eq!(self.overlaps.iter().filter(|(_, blocks)| blocks.total() > 0).count(), found);
        assert_eq!(self.overlaps.iter().count(), found);
    }

    fn compare_all(&mut self) {
        let held = self.models.iter().flat_map(|model| model.names.values());
        let prompts: BTreeSet<Vec<LocalHash>> = held.map(|name| name.path.clone()).collect();
        for path in prompts {
            self.compare(&prompt(&path));
            let beyond: Vec<_> = path.iter().copied().chain([LocalHash(1), LocalHash(2)]).collect();
            self.compare(&prompt(&beyond));
        }
        self.compare(&prompt(&[]));
        let stats = self.index.stats();
        for (rank, model) in self.models.iter().enumerate() {
            assert_eq!(stats.slots[rank].counts, model.counts(), "rank {rank}");
        }
        for shard in &self.index.shards {
            trie::tests::check(&shard.read());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_index_says_what_the_naive_model_says(
        script in vec(steps(), 1..40),
        probe in vec(0..3u64, 8),
        longest in prop_oneof![Just(None), (1..6usize).prop_map(Some)],
    ) {
        let mut pair = Pair::new(longest);
        let probe: Vec<_> = probe.into_iter().map(LocalHash).collect();
        for (at, step) in script.iter().enumerate() {
            pair.step(step);
            pair.compare(&prompt(&probe));
            if at % 12 == 0 {
                pair.compare_all();
            }
        }
        pair.compare_all();
        pair.writers.clear();
        let stats = pair.index.stats();
        prop_assert_eq!(stats, IndexStats::default());
    }
}

fn stored(parent: Option<u64>, blocks: &[(u64, u64)], tier: Tier) -> KvEvent {
    let blocks =
        blocks.iter().map(|&(local, engine)| StoredBlock { engine: EngineHash(engine), local: LocalHash(local) });
    KvEvent::Stored { parent: parent.map(EngineHash), blocks: blocks.collect(), tier }
}

fn removed(blocks: &[u64]) -> KvEvent {
    KvEvent::Removed { blocks: blocks.iter().copied().map(EngineHash).collect(), tier: Tier::Device }
}

fn device(index: &PrefixIndex, slot: Slot, locals: &[u64]) -> u32 {
    let mut overlaps = Overlaps::new();
    index.overlaps(&prompt(&locals.iter().copied().map(LocalHash).collect::<Vec<_>>()), &mut overlaps);
    overlaps.get(slot).device
}

#[test]
fn a_block_stored_three_times_leaves_at_the_third_removal() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let event = stored(None, &[(1, 100)], Tier::Device);
    assert_eq!(writer.apply(&event), Outcome::Ok);
    assert_eq!(writer.apply(&event), Outcome::DuplicateStore);
    assert_eq!(writer.apply(&event), Outcome::DuplicateStore);
    for (left, outcome) in [(1, Outcome::Ok), (1, Outcome::Ok), (0, Outcome::Ok), (0, Outcome::BlockNotFound)] {
        assert_eq!(writer.apply(&removed(&[100])), outcome);
        assert_eq!(device(&index, Slot(0), &[1]), left);
    }
}

#[test]
fn two_names_of_one_content_hold_it_together() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    writer.apply(&stored(None, &[(1, 101), (2, 201)], Tier::Device));
    assert_eq!(index.stats().total, BlockCounts { device: 2, copies: 4, ..BlockCounts::default() });
    writer.apply(&removed(&[200, 100]));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 2);
    writer.apply(&removed(&[201]));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 1);
}

#[test]
fn what_lies_behind_a_gap_is_seen_again_when_the_gap_is_filled() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 100), (2, 200), (3, 300)], Tier::Device));
    writer.apply(&removed(&[200]));
    assert_eq!(device(&index, Slot(0), &[1, 2, 3]), 1);
    assert_eq!(writer.apply(&stored(Some(200), &[(4, 400)], Tier::Device)), Outcome::ParentNotFound);
    writer.apply(&stored(Some(100), &[(2, 200)], Tier::Device));
    assert_eq!(device(&index, Slot(0), &[1, 2, 3]), 3);
}

#[test]
fn after_doubt_a_block_stored_again_ends_with_one_removal() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let event = stored(None, &[(1, 100)], Tier::Device);
    writer.apply(&event);
    writer.apply(&event);
    writer.doubt();
    assert_eq!(device(&index, Slot(0), &[1]), 1);
    assert_eq!(writer.apply(&event), Outcome::DuplicateStore);
    assert_eq!(writer.apply(&removed(&[100])), Outcome::Ok);
    assert_eq!(device(&index, Slot(0), &[1]), 0);
}

#[test]
fn a_slot_taken_over_reports_only_its_present_writer() {
    let index = PrefixIndex::new();
    let mut before = index.join(Slot(0));
    before.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    let mut after = index.join(Slot(0));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 0);
    after.apply(&stored(None, &[(1, 900)], Tier::Device));
    before.apply(&stored(Some(200), &[(3, 300)], Tier::Device));
    before.apply(&KvEvent::Cleared);
    before.apply(&stored(None, &[(1, 100), (2, 200)], Tier::Device));
    assert_eq!(device(&index, Slot(0), &[1, 2]), 1);
    drop(before);
    assert_eq!(device(&index, Slot(0), &[1, 2]), 1);
    assert_eq!(index.stats().total.device, 1);
}

#[test]
fn overlaps_forget_the_query_before() {
    let index = PrefixIndex::new();
    let mut writers = [index.join(Slot(3)), index.join(Slot(5))];
    writers[0].apply(&stored(None, &[(1, 100)], Tier::Device));
    writers[1].apply(&stored(None, &[(2, 100)], Tier::HostPinned));
    let mut overlaps = Overlaps::new();
    index.overlaps(&prompt(&[LocalHash(1)]), &mut overlaps);
    assert_eq!(overlaps.iter().collect::<Vec<_>>(), [(Slot(3), TierBlocks { device: 1, ..TierBlocks::default() })]);
    index.overlaps(&prompt(&[LocalHash(2)]), &mut overlaps);
    assert_eq!(overlaps.iter().collect::<Vec<_>>(), [(Slot(5), TierBlocks { host: 1, ..TierBlocks::default() })]);
    index.overlaps(&prompt(&[LocalHash(9)]), &mut overlaps);
    assert_eq!(overlaps.iter().count(), 0);
    assert_eq!(overlaps.get(Slot(3)), TierBlocks::default());
}

#[test]
fn many_branches_of_one_prefix_are_found_and_removed() {
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    writer.apply(&stored(None, &[(1, 1)], Tier::Device));
    for branch in 2..102 {
        writer.apply(&stored(Some(1), &[(branch, branch)], Tier::Device));
    }
    assert!((2..102).all(|branch| device(&index, Slot(0), &[1, branch]) == 2));
    for branch in 2..102 {
        writer.apply(&removed(&[branch]));
        assert_eq!(device(&index, Slot(0), &[1, branch]), 1);
    }
    assert_eq!(index.stats().distinct_blocks, 1);
}

#[test]
fn a_run_cut_short_gives_its_memory_back() {
    let cases: [(&str, Vec<Vec<u64>>); 3] = [
        ("one by one from the end", (2..=1000).rev().map(|block| vec![block]).collect()),
        ("at once", vec![(2..=1000).collect()]),
        ("from the middle, then the end", vec![(2..=600).collect(), (601..=1000).collect()]),
    ];
    for (case, removals) in cases {
        let index = PrefixIndex::new();
        let mut writer = index.join(Slot(0));
        let blocks: Vec<_> = (1..=1000).map(|block| (block, block)).collect();
        writer.apply(&stored(None, &blocks, Tier::Device));
        for blocks in removals {
            assert_eq!(writer.apply(&removed(&blocks)), Outcome::Ok);
        }
        assert_eq!(device(&index, Slot(0), &[1, 2]), 1, "{case}");
        let room: usize = index.shards.iter().map(|shard| trie::tests::room(&shard.read())).sum();
        assert!(room <= 64, "{case}: {room}");
    }
}
