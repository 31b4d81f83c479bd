use std::collections::BTreeMap;
use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::block::{BlockHashes, EngineHash};
use crate::index::arena::CHUNK;
use crate::index::event::{ApplyOutcome, KvEvent, StoredBlock};
use crate::index::trie::tests::{check, limit, limit_chunks};
use crate::index::{IndexStats, Overlaps, RankWriter};
use crate::worker::BlockSize;

/// Slots with a path writer. The slot after them has an event writer with blocks of the same
/// prompts.
const WRITERS: usize = 3;

type Path = Vec<u64>;

fn locals(path: &[u64]) -> Vec<LocalHash> {
    path.iter().copied().map(LocalHash).collect()
}

fn prompt(path: &[u64]) -> BlockHashes {
    BlockHashes::from_locals(path.len() * 16, BlockSize::new(16).unwrap(), locals(path))
}

fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// Naive model of one writer: the prompts that are not a prefix of another one.
#[derive(Debug, Default)]
struct PathModel(BTreeMap<Path, Option<PathEnd>>);

impl PathModel {
    fn known(&self, path: &[u64]) -> usize {
        self.0
            .keys()
            .map(|other| common(path, other))
            .max()
            .unwrap_or(0)
    }

    /// Returns the number of blocks at the end of a prompt that no other one has.
    fn exclusive_tail(&self, at: usize) -> (Path, usize) {
        let path = self.0.keys().nth(at).unwrap();
        let shared = self
            .0
            .keys()
            .filter(|other| *other != path)
            .map(|other| common(path, other))
            .max();
        (path.clone(), path.len() - shared.unwrap_or(0))
    }

    fn enter(&mut self, path: &[u64], end: Option<PathEnd>) {
        if self.known(path) < path.len() {
            self.0.retain(|other, _| !path.starts_with(other));
            self.0.insert(path.to_vec(), end);
        }
    }
}

fn count<'a>(paths: impl Iterator<Item = &'a Path>) -> u64 {
    let mut sorted: Vec<&[u64]> = std::iter::once(&[][..])
        .chain(paths.map(Vec::as_slice))
        .collect();
    sorted.sort_unstable();
    sorted
        .windows(2)
        .map(|pair| (pair[1].len() - common(pair[0], pair[1])) as u64)
        .sum()
}

#[derive(Clone, Debug)]
enum Step {
    Enter {
        slot: usize,
        path: Path,
    },
    Cut {
        slot: usize,
        pick: usize,
        share: f64,
    },
    Leave {
        slot: usize,
    },
}

/// Generates scripts whose prompts consist of at most `segments` segments of this length.
fn steps(
    max_steps: usize,
    segments: usize,
    length: Range<u64>,
) -> impl Strategy<Value = Vec<Step>> {
    let segment = (0..2u64, length)
        .prop_map(|(kind, blocks)| (0..blocks).map(move |at| 1 + kind * 10_000 + at));
    let path = vec(segment, 1..=segments)
        .prop_map(|segments| segments.into_iter().flatten().collect::<Path>());
    let step = prop_oneof![
        6 => (0..=WRITERS, path).prop_map(|(slot, path)| Step::Enter { slot, path }),
        6 => (0..=WRITERS, any::<usize>(), 0.0..1.0).prop_map(|(slot, pick, share)| Step::Cut { slot, pick, share }),
        1 => (0..=WRITERS).prop_map(|slot| Step::Leave { slot }),
    ];
    vec(step, 1..max_steps)
}

struct TestBed {
    index: Arc<PrefixIndex>,
    writers: Vec<PathWriter>,
    events: RankWriter,
    models: Vec<PathModel>,
    seen: Vec<Path>,
}

impl TestBed {
    fn new(max_run_len: Option<usize>) -> Self {
        let index = PrefixIndex::new();
        if let Some(max_run_len) = max_run_len {
            index
                .shards
                .iter()
                .for_each(|shard| limit(&mut shard.write(), max_run_len));
        }
        let writers = (0..WRITERS)
            .map(|slot| index.create_path_writer(RankSlot(slot as u32)))
            .collect();
        let models = (0..=WRITERS).map(|_| PathModel::default()).collect();
        Self {
            events: index.create_writer(RankSlot(WRITERS as u32)),
            index,
            writers,
            models,
            seen: Vec::new(),
        }
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Enter { slot, path } => self.enter(*slot, path),
            Step::Cut { slot, pick, share } if !self.models[*slot].0.is_empty() => {
                let (path, exclusive) =
                    self.models[*slot].exclusive_tail(pick % self.models[*slot].0.len());
                self.cut(*slot, &path, (exclusive as f64 * share).ceil() as usize);
            }
            Step::Cut { .. } => {}
            Step::Leave { slot: WRITERS } => {
                self.events = self.index.create_writer(RankSlot(WRITERS as u32));
                self.models[WRITERS] = PathModel::default();
            }
            Step::Leave { slot } => {
                self.empty(*slot);
                self.writers[*slot] = self.index.create_path_writer(RankSlot(*slot as u32));
            }
        }
    }

    fn enter(&mut self, slot: usize, path: &[u64]) {
        let known = self.models[slot].known(path);
        let new = &path[known..];
        let end = if slot == WRITERS {
            let hashes = prompt(path);
            let hash = |at: usize| EngineHash(hashes.sequences()[at].0);
            let blocks = (known..path.len()).map(|at| StoredBlock {
                engine: hash(at),
                local: LocalHash(path[at]),
            });
            let parent = known.checked_sub(1).map(hash);
            let stored = KvEvent::Stored {
                parent,
                blocks: blocks.collect(),
                tier: StorageTier::Device,
            };
            assert_eq!(self.events.apply(&stored), ApplyOutcome::Ok);
            None
        } else {
            assert_eq!(self.writers[slot].known_blocks(&locals(path)), known);
            let after = self.end_of(slot, &path[..known]);
            assert_eq!(after.is_some(), known > 0);
            let entered = self.writers[slot].insert(after, &locals(new));
            assert_eq!(entered.blocks, new.len());
            entered.end
        };
        self.models[slot].enter(path, end);
        self.seen.push(path.to_vec());
    }

    /// Returns the end of a held path, found from the end of a longer one.
    fn end_of(&self, slot: usize, path: &[u64]) -> Option<PathEnd> {
        let (longer, &end) = self.models[slot]
            .0
            .iter()
            .find(|(longer, _)| longer.starts_with(path))?;
        let extra = longer.len() - path.len();
        if extra == 0 {
            return end;
        }
        let (before, next) = self.writers[slot].trace_back(end?, extra as u64);
        assert_eq!(next.0, longer[path.len()]);
        before
    }

    fn cut(&mut self, slot: usize, path: &Path, blocks: usize) {
        let remaining = path.len() - blocks;
        let end = self.models[slot].0[path];
        let new = if slot == WRITERS {
            let hashes = prompt(path).sequences()[remaining..]
                .iter()
                .map(|hash| EngineHash(hash.0))
                .collect();
            assert_eq!(
                self.events.apply(&KvEvent::Removed {
                    blocks: hashes,
                    tier: StorageTier::Device
                }),
                ApplyOutcome::Ok
            );
            None
        } else {
            let new = self.writers[slot].remove_tail(end.unwrap(), blocks as u64);
            assert_eq!(new.is_some(), remaining > 0);
            new
        };
        let model = &mut self.models[slot];
        model.0.remove(path);
        model.enter(&path[..remaining], new);
    }

    fn empty(&mut self, slot: usize) {
        while !self.models[slot].0.is_empty() {
            let (path, exclusive_tail) = self.models[slot].exclusive_tail(0);
            self.cut(slot, &path, exclusive_tail);
        }
    }

    fn check(&self) {
        self.index
            .shards
            .iter()
            .for_each(|shard| check(&shard.read()));
        let stats = self.index.stats();
        assert_eq!(
            stats.distinct_blocks,
            count(self.models.iter().flat_map(|model| model.0.keys()))
        );
        for (slot, model) in self.models.iter().enumerate() {
            assert_eq!(stats.slots[slot].counts.device, count(model.0.keys()));
            assert_eq!(stats.slots[slot].counts.copies, count(model.0.keys()));
        }
        let mut overlaps = Overlaps::new();
        for path in &self.seen {
            self.index.query_overlaps(&prompt(path), &mut overlaps);
            for (slot, model) in self.models.iter().enumerate() {
                let known = model.known(path);
                assert_eq!(overlaps.get(RankSlot(slot as u32)).total() as usize, known);
                if let Some(writer) = self.writers.get(slot) {
                    assert_eq!(writer.known_blocks(&locals(path)), known);
                }
            }
        }
    }

    fn run(mut self, steps: &[Step]) {
        for step in steps {
            self.take(step);
            self.check();
        }
        (0..WRITERS).for_each(|slot| self.empty(slot));
        self.check();
        let Self {
            index,
            writers,
            events,
            ..
        } = self;
        drop((writers, events));
        assert_eq!(index.stats(), IndexStats::default());
    }
}

proptest! {
    #![proptest_config(property_config(2_000))]

    #[test]
    fn paths_match_model(
        max_run_len in prop_oneof![Just(None), (1..6usize).prop_map(Some)],
        steps in steps(40, 4, 1..4),
    ) {
        TestBed::new(max_run_len).run(&steps);
    }
}

proptest! {
    #![proptest_config(property_config(60))]

    #[test]
    fn long_paths_changed_in_steps_match_model(steps in steps(25, 3, 1..1_500)) {
        // With a limited run length, the check does not require that runs are merged.
        TestBed::new(Some(1_000)).run(&steps);
    }
}

#[test]
fn hidden_writer_is_unreported_and_frees_owner() {
    let index = PrefixIndex::new();
    let hashes = prompt(&[1, 2, 3]);
    let mut overlaps = Overlaps::new();
    let mut writer = index.create_path_writer(RankSlot(5));
    let owner = writer.owner;
    let end = writer.insert(None, hashes.locals()).end.unwrap();
    index.query_overlaps(&hashes, &mut overlaps);
    assert_eq!(overlaps.get(RankSlot(5)).device, 3);
    writer.hide();
    index.query_overlaps(&hashes, &mut overlaps);
    assert_eq!(
        (overlaps.get(RankSlot(5)).device, index.stats().slots.len()),
        (0, 0)
    );
    assert_ne!(
        index.create_path_writer(RankSlot(5)).owner,
        owner,
        "the slot is still reported"
    );
    assert_eq!(writer.remove_tail(end, 3), None);
    drop(writer);
    assert_eq!(index.stats(), IndexStats::default());
    assert!(
        [
            index.create_path_writer(RankSlot(6)),
            index.create_path_writer(RankSlot(7))
        ]
        .iter()
        .any(|writer| writer.owner == owner)
    );
}

#[test]
fn empty_path_has_no_effect() {
    let index = PrefixIndex::new();
    let mut writer = index.create_path_writer(RankSlot(0));
    assert_eq!(
        (writer.known_blocks(&[]), writer.insert(None, &[])),
        (
            0,
            InsertedPath {
                blocks: 0,
                end: None
            }
        )
    );
    let end = writer.insert(None, &[LocalHash(7)]).end;
    assert_eq!(writer.insert(end, &[]), InsertedPath { blocks: 0, end });
    let end = end.unwrap();
    assert_eq!(writer.remove_tail(end, 1), None);
}

#[test]
fn full_index_rejects_path_until_memory_is_freed() {
    let index = PrefixIndex::new();
    index
        .shards
        .iter()
        .for_each(|shard| limit_chunks(&mut shard.write(), 2));
    let mut writer = index.create_path_writer(RankSlot(0));
    let mut other = index.create_path_writer(RankSlot(1));
    let locals: Vec<_> = (1..=3 * CHUNK as u64).map(LocalHash).collect();
    let InsertedPath { blocks, end } = writer.insert(None, &locals);
    assert_eq!(
        (blocks, writer.known_blocks(&locals)),
        (2 * CHUNK, 2 * CHUNK)
    );
    assert_eq!(
        writer.insert(end, &locals[blocks..]),
        InsertedPath { blocks: 0, end }
    );
    // Blocks that another writer holds need no memory.
    let shared = other.insert(None, &locals);
    assert_eq!(
        (shared.blocks, other.known_blocks(&locals)),
        (2 * CHUNK, 2 * CHUNK)
    );
    let shared = other
        .remove_tail(shared.end.unwrap(), 2 * CHUNK as u64 - 1)
        .unwrap();
    let rest = writer.remove_tail(end.unwrap(), CHUNK as u64).unwrap();
    let appended = other.insert(Some(shared), &[LocalHash(7)]);
    assert_eq!(appended.blocks, 1);
    index.shards.iter().for_each(|shard| check(&shard.read()));
    assert_eq!(other.remove_tail(appended.end.unwrap(), 2), None);
    assert_eq!(writer.remove_tail(rest, CHUNK as u64), None);
    drop((writer, other));
    assert_eq!(index.stats(), IndexStats::default());
}
