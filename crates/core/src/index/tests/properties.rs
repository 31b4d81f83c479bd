//! Compares the index with its naive model under random events of several ranks, tiers and cache
//! groups.

use std::collections::BTreeSet;
use std::num::NonZeroU32;

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::index::dump::order_free_content;
use crate::worker::{DpRank, WorkerId, WorkerRank};

const RANKS: usize = 3;
const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(7),
    rank: DpRank(0),
};

/// Requirements of the groups in scripts. There are fewer kinds than a rank may have, because the
/// model has no limit.
const NEEDS: [(u32, u32); 4] = [(1, 1), (2, 1), (u32::MAX, 1), (1, 2)];

/// One step of a script. Picks are taken modulo the number of choices.
#[derive(Clone, Debug)]
enum Step {
    Store {
        rank: usize,
        parent: Parent,
        locals: Vec<u8>,
        naming: Naming,
        tier: StorageTier,
    },
    Remove {
        rank: usize,
        picks: Vec<u8>,
        unknown: bool,
        tier: StorageTier,
    },
    RemoveRun {
        rank: usize,
        pick: u8,
        count: usize,
        reverse: bool,
        tier: StorageTier,
    },
    Group {
        rank: usize,
        group: u32,
        need: usize,
        pick: u8,
        count: usize,
        stored: bool,
    },
    Clear {
        rank: usize,
    },
    Gap {
        rank: usize,
    },
    Reconcile {
        rank: usize,
    },
    Rejoin {
        rank: usize,
    },
    Restore {
        rank: usize,
        rejoin: bool,
    },
}

/// Parent of a stored run.
#[derive(Clone, Debug)]
enum Parent {
    None,
    /// Hash of a held block or of an orphan.
    Known(u8),
    /// Hash of this prompt by content, known or not.
    Prompt(Vec<u8>),
    /// Any small number.
    Number(u8),
}

/// Choice of engine hashes.
#[derive(Clone, Debug)]
enum Naming {
    /// By content, as real engines do. The variant creates several hashes for one block.
    Content(u8),
    /// Arbitrary hashes.
    Arbitrary(Vec<u8>),
}

fn tiers() -> impl Strategy<Value = StorageTier> {
    prop_oneof![6 => Just(StorageTier::Device), 3 => Just(StorageTier::HostPinned), 1 => Just(StorageTier::Disk), 1 => Just(StorageTier::External)]
}

fn stores() -> impl Strategy<Value = Step> {
    let naming = prop_oneof![
        5 => Just(Naming::Content(0)),
        2 => (0..3u8).prop_map(Naming::Content),
        1 => vec(0..12u8, 9).prop_map(Naming::Arbitrary),
    ];
    let parent = prop_oneof![
        5 => Just(Parent::None),
        5 => any::<u8>().prop_map(Parent::Known),
        3 => vec(0..3u8, 1..4).prop_map(Parent::Prompt),
        1 => (0..12u8).prop_map(Parent::Number),
    ];
    (0..RANKS, parent, vec(0..3u8, 0..7), naming, tiers()).prop_map(
        |(rank, parent, locals, naming, tier)| Step::Store {
            rank,
            parent,
            locals,
            naming,
            tier,
        },
    )
}

fn steps() -> impl Strategy<Value = Step> {
    let remove = (
        0..RANKS,
        vec(any::<u8>(), 0..5),
        prop::bool::weighted(0.1),
        tiers(),
    )
        .prop_map(|(rank, picks, unknown, tier)| Step::Remove {
            rank,
            picks,
            unknown,
            tier,
        });
    let remove_run = (0..RANKS, any::<u8>(), 1..6usize, any::<bool>(), tiers()).prop_map(
        |(rank, pick, count, reverse, tier)| Step::RemoveRun {
            rank,
            pick,
            count,
            reverse,
            tier,
        },
    );
    prop_oneof![
        24 => stores(),
        8 => remove,
        8 => remove_run,
        1 => (0..RANKS).prop_map(|rank| Step::Clear { rank }),
        2 => (0..RANKS).prop_map(|rank| Step::Gap { rank }),
        4 => (0..RANKS).prop_map(|rank| Step::Reconcile { rank }),
        1 => (0..RANKS).prop_map(|rank| Step::Rejoin { rank }),
        2 => (0..RANKS, any::<bool>()).prop_map(|(rank, rejoin)| Step::Restore { rank, rejoin }),
    ]
}

/// Generates scripts of models with one cache group, and with several.
fn scripts() -> impl Strategy<Value = Vec<Step>> {
    let group = (
        0..RANKS,
        0..5u32,
        0..24usize,
        any::<u8>(),
        0..5usize,
        prop::bool::weighted(0.75),
    )
        .prop_map(|(rank, group, need, pick, count, stored)| Step::Group {
            rank,
            group,
            need,
            pick,
            count,
            stored,
        });
    prop_oneof![
        vec(steps(), 1..32),
        vec(prop_oneof![2 => steps(), 1 => group], 1..32)
    ]
}

fn engine_hash(path: &[LocalHash], variant: u8) -> EngineHash {
    EngineHash(
        prompt(path).sequences()[path.len() - 1]
            .0
            .wrapping_add(1_000_003 * u64::from(variant)),
    )
}

/// Returns the hashes of the blocks up to `end`, last one first.
fn prefix_hashes(rank: &model::Rank, end: EngineHash) -> Vec<EngineHash> {
    let end = rank
        .blocks
        .get(&end)
        .map(|block| block.path.clone())
        .unwrap_or_default();
    let mut prefix: Vec<_> = rank
        .blocks
        .iter()
        .filter(|(_, block)| end.starts_with(&block.path))
        .collect();
    prefix.sort_by_key(|(_, block)| std::cmp::Reverse(block.path.len()));
    prefix.into_iter().map(|(engine, _)| *engine).collect()
}

/// Returns the event of a step, given the content of the rank.
fn event(step: &Step, rank: &model::Rank) -> Option<KvEvent> {
    let pick = |number: u8| known_hash(rank, number);
    Some(match step {
        Step::Store { .. } => store_event(step, rank),
        Step::Remove {
            picks,
            unknown,
            tier,
            ..
        } => {
            let mut blocks: Vec<_> = picks.iter().map(|&at| pick(at)).collect();
            if *unknown {
                blocks.insert(blocks.len() / 2, EngineHash(777));
            }
            KvEvent::Removed {
                blocks,
                tier: *tier,
            }
        }
        Step::RemoveRun {
            pick: at,
            count,
            reverse,
            tier,
            ..
        } => {
            let mut blocks: Vec<_> = prefix_hashes(rank, pick(*at))
                .into_iter()
                .take(*count)
                .collect();
            if *reverse {
                blocks.reverse();
            }
            KvEvent::Removed {
                blocks,
                tier: *tier,
            }
        }
        Step::Group { .. } => group_event(step, rank),
        Step::Clear { .. } => KvEvent::Cleared,
        Step::Gap { .. } | Step::Reconcile { .. } | Step::Rejoin { .. } | Step::Restore { .. } => {
            return None;
        }
    })
}

/// Returns the event of a [`Step::Group`].
fn group_event(step: &Step, rank: &model::Rank) -> KvEvent {
    let Step::Group {
        group,
        need,
        pick,
        count,
        stored,
        ..
    } = step
    else {
        panic!("{step:?} changes no cache group");
    };
    let group = *group;
    let blocks = prefix_hashes(rank, known_hash(rank, *pick))
        .into_iter()
        .take(*count)
        .collect();
    if !*stored {
        return KvEvent::GroupRemoved { group, blocks };
    }
    KvEvent::GroupStored {
        group,
        need: group_need(group, *need),
        blocks,
    }
}

/// Returns a hash that the rank knows, or an unknown one if it knows none.
fn known_hash(rank: &model::Rank, number: u8) -> EngineHash {
    let known: Vec<_> = rank.blocks.keys().chain(rank.orphans.keys()).collect();
    known
        .get(usize::from(number) % known.len().max(1))
        .map_or(EngineHash(999), |engine| **engine)
}

fn local_hashes(numbers: &[u8]) -> Vec<LocalHash> {
    let numbers = numbers.iter().copied();
    numbers.map(|number| LocalHash(number.into())).collect()
}

fn store_event(step: &Step, rank: &model::Rank) -> KvEvent {
    let Step::Store {
        parent,
        locals,
        naming,
        tier,
        ..
    } = step
    else {
        panic!("{step:?} stores nothing");
    };
    let (parent, mut path) = match parent {
        Parent::None => (None, Vec::new()),
        Parent::Known(known) => (Some(known_hash(rank, *known)), Vec::new()),
        Parent::Prompt(before) => {
            let path = local_hashes(before);
            (Some(engine_hash(&path, 0)), path)
        }
        Parent::Number(number) => (Some(EngineHash(u64::from(*number))), Vec::new()),
    };
    if let Some(held) = parent.and_then(|parent| rank.blocks.get(&parent)) {
        path = held.path.clone();
    }
    let blocks = local_hashes(locals).into_iter().enumerate();
    let blocks = blocks.map(|(at, local)| {
        path.push(local);
        let engine = match naming {
            Naming::Content(variant) => engine_hash(&path, *variant),
            Naming::Arbitrary(hashes) => EngineHash(u64::from(hashes[at])),
        };
        StoredBlock { engine, local }
    });
    KvEvent::Stored {
        parent,
        blocks: blocks.collect(),
        tier: *tier,
    }
}

/// Returns the requirement of a group. In most cases a group keeps its requirement.
fn group_need(group: u32, number: usize) -> GroupNeed {
    let index = if number < NEEDS.len() {
        number
    } else {
        group as usize % NEEDS.len()
    };
    let (blocks, stride) = NEEDS[index];
    GroupNeed::Trailing {
        blocks,
        stride: NonZeroU32::new(stride).unwrap(),
    }
}

/// Index and model.
struct IndexAndModel {
    index: Arc<PrefixIndex>,
    writers: Vec<Option<RankWriter>>,
    models: Vec<model::Rank>,
    overlaps: Overlaps,
}

impl IndexAndModel {
    fn new(max_run_len: Option<usize>) -> Self {
        let index = PrefixIndex::new();
        for shard in &index.shards {
            max_run_len
                .iter()
                .for_each(|&max_run_len| trie::tests::limit(&mut shard.write(), max_run_len));
        }
        let writers = (0..RANKS)
            .map(|rank| Some(index.create_writer(RankSlot(rank as u32))))
            .collect();
        Self {
            index,
            writers,
            models: vec![model::Rank::default(); RANKS],
            overlaps: Overlaps::new(),
        }
    }

    fn step(&mut self, step: &Step) {
        let (Step::Store { rank, .. }
        | Step::Remove { rank, .. }
        | Step::RemoveRun { rank, .. }
        | Step::Group { rank, .. }
        | Step::Clear { rank }
        | Step::Gap { rank }
        | Step::Reconcile { rank }
        | Step::Rejoin { rank }
        | Step::Restore { rank, .. }) = *step;
        let slot = RankSlot(rank as u32);
        let model = &mut self.models[rank];
        let writer = self.writers[rank].as_mut().unwrap();
        match step {
            Step::Gap { .. } => {
                model.mark_stale();
                writer.record_gap();
            }
            Step::Reconcile { .. } => reconcile(writer, model),
            Step::Rejoin { .. } => {
                *model = model::Rank::default();
                self.writers[rank] = None;
                self.writers[rank] = Some(self.index.create_writer(slot));
            }
            Step::Restore { rejoin, .. } => {
                let dump = dump_and_read(writer);
                if *rejoin {
                    self.writers[rank] = None;
                    self.writers[rank] = Some(self.index.create_writer(slot));
                }
                let writer = self.writers[rank].as_mut().unwrap();
                writer.restore(&dump);
                assert_eq!(
                    order_free_content(&dump_and_read(writer)),
                    order_free_content(&dump)
                );
            }
            _ => {
                let event = event(step, model).unwrap();
                let expected = model.apply(&event);
                assert_eq!(writer.apply(&event), expected, "{event:?}");
            }
        }
        self.writers[rank].as_ref().unwrap().check_stale();
    }

    fn compare(&mut self, prompt: &BlockHashes) {
        self.index.query_overlaps(prompt, &mut self.overlaps);
        let mut found = 0;
        for (rank, model) in self.models.iter().enumerate() {
            let expected = model.overlap(prompt.locals());
            found += usize::from(expected.total() > 0);
            assert_eq!(
                self.overlaps.get(RankSlot(rank as u32)),
                expected,
                "rank {rank} {:?}",
                prompt.locals()
            );
        }
        assert_eq!(
            self.overlaps
                .iter()
                .filter(|(_, blocks)| blocks.total() > 0)
                .count(),
            found
        );
        assert_eq!(self.overlaps.iter().count(), found);
    }

    fn compare_all(&mut self) {
        let held = self.models.iter().flat_map(|model| model.blocks.values());
        let prompts: BTreeSet<Vec<LocalHash>> = held.map(|block| block.path.clone()).collect();
        // Every held path is queried as it is, and with two more blocks, which are often missing.
        for path in prompts {
            self.compare(&prompt(&path));
            let longer: Vec<_> = path
                .iter()
                .copied()
                .chain([LocalHash(1), LocalHash(2)])
                .collect();
            self.compare(&prompt(&longer));
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

/// Reconciles the writer and removes the purged blocks from the model, which checks that they were
/// stale.
fn reconcile(writer: &mut RankWriter, model: &mut model::Rank) {
    let shares = |writer: &RankWriter| -> BTreeSet<_> {
        let dump = writer.snapshot(RANK);
        let of_group = |share: dump::GroupShare| {
            (
                dump.groups[share.group as usize].0,
                share.engine,
                share.is_stale,
            )
        };
        dump.shares.into_iter().map(of_group).collect()
    };
    let before = shares(writer);
    let purged = writer.reconcile().purged.unwrap_or_default();
    let after = shares(writer);
    assert!(
        before.difference(&after).all(|(.., is_stale)| *is_stale),
        "blocks confirmed since the gap are held"
    );
    model.remove_purged(&purged.blocks);
    let held_shares: BTreeSet<_> = after
        .into_iter()
        .map(|(group, engine, _)| (group, engine))
        .collect();
    model.retain_shares(|group, engine| held_shares.contains(&(group, engine)));
}

fn dump_and_read(writer: &RankWriter) -> dump::RankDump {
    let rank = WorkerRank {
        worker: WorkerId(7),
        rank: DpRank(writer.slot().0),
    };
    let mut bytes = Vec::new();
    dump::write_header(&mut bytes).unwrap();
    writer.snapshot(rank).write(&mut bytes).unwrap();
    dump::write_end(&mut bytes, 1).unwrap();
    let mut ranks = dump::DumpReader::new(&bytes[..]).unwrap();
    let dump = ranks.next().unwrap().unwrap();
    assert!(ranks.next().is_none());
    assert_eq!(dump.rank(), rank);
    dump
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn index_matches_naive_model(
        script in scripts(),
        probe in vec(0..3u64, 8),
        max_run_len in prop_oneof![Just(None), (1..6usize).prop_map(Some)],
    ) {
        let mut pair = IndexAndModel::new(max_run_len);
        let probe: Vec<_> = probe.into_iter().map(LocalHash).collect();
        for (at, step) in script.iter().enumerate() {
            pair.step(step);
            pair.compare(&prompt(&probe));
            if at % 10 == 9 {
                pair.compare_all();
            }
        }
        pair.compare_all();
        pair.writers.clear();
        let stats = pair.index.stats();
        prop_assert_eq!(stats, IndexStats::default());
    }
}
