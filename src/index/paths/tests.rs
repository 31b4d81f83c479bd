use std::collections::BTreeMap;
use std::ops::Range;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::block::{BlockHashes, EngineHash};
use crate::index::arena::CHUNK;
use crate::index::event::{KvEvent, Outcome, StoredBlock};
use crate::index::trie::tests::{check, limit, limit_chunks};
use crate::index::{IndexStats, Overlaps, RankWriter};
use crate::worker::BlockSize;

/// Slots with a writer of paths. The one after them has a writer of events, whose blocks lie among those of the paths.
const WRITERS: usize = 3;

type Path = Vec<u64>;

fn locals(path: &[u64]) -> Vec<LocalHash> {
    path.iter().copied().map(LocalHash).collect()
}

fn prompt(path: &[u64]) -> BlockHashes {
    BlockHashes::chain(path.len() * 16, BlockSize::new(16).unwrap(), locals(path))
}

fn common(a: &[u64], b: &[u64]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// What one writer holds, by the plainest means: the prompts that no other of them goes on from.
#[derive(Debug, Default)]
struct Plain(BTreeMap<Path, Option<PathEnd>>);

impl Plain {
    fn known(&self, path: &[u64]) -> usize {
        self.0
            .keys()
            .map(|other| common(path, other))
            .max()
            .unwrap_or(0)
    }

    /// Blocks at the end of the one at `at` that no other has.
    fn alone(&self, at: usize) -> (Path, usize) {
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

/// Scripts whose prompts consist of pieces of some length, at most so many each.
fn steps(most: usize, pieces: usize, length: Range<u64>) -> impl Strategy<Value = Vec<Step>> {
    let piece = (0..2u64, length)
        .prop_map(|(kind, blocks)| (0..blocks).map(move |at| 1 + kind * 10_000 + at));
    let path =
        vec(piece, 1..=pieces).prop_map(|pieces| pieces.into_iter().flatten().collect::<Path>());
    let step = prop_oneof![
        6 => (0..=WRITERS, path).prop_map(|(slot, path)| Step::Enter { slot, path }),
        6 => (0..=WRITERS, any::<usize>(), 0.0..1.0).prop_map(|(slot, pick, share)| Step::Cut { slot, pick, share }),
        1 => (0..=WRITERS).prop_map(|slot| Step::Leave { slot }),
    ];
    vec(step, 1..most)
}

struct Bed {
    index: Arc<PrefixIndex>,
    writers: Vec<PathWriter>,
    events: RankWriter,
    models: Vec<Plain>,
    seen: Vec<Path>,
}

impl Bed {
    fn new(longest: Option<usize>) -> Self {
        let index = PrefixIndex::new();
        if let Some(longest) = longest {
            index
                .shards
                .iter()
                .for_each(|shard| limit(&mut shard.write(), longest));
        }
        let writers = (0..WRITERS)
            .map(|slot| index.paths(Slot(slot as u32)))
            .collect();
        let models = (0..=WRITERS).map(|_| Plain::default()).collect();
        Self {
            events: index.join(Slot(WRITERS as u32)),
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
                let (path, most) = self.models[*slot].alone(pick % self.models[*slot].0.len());
                self.cut(*slot, &path, (most as f64 * share).ceil() as usize);
            }
            Step::Cut { .. } => {}
            Step::Leave { slot: WRITERS } => {
                self.events = self.index.join(Slot(WRITERS as u32));
                self.models[WRITERS] = Plain::default();
            }
            Step::Leave { slot } => {
                self.empty(*slot);
                self.writers[*slot] = self.index.paths(Slot(*slot as u32));
            }
        }
    }

    fn enter(&mut self, slot: usize, path: &[u64]) {
        let known = self.models[slot].known(path);
        let new = &path[known..];
        let end = if slot == WRITERS {
            let names = prompt(path);
            let name = |at: usize| EngineHash(names.sequences()[at].0);
            let blocks = (known..path.len()).map(|at| StoredBlock {
                engine: name(at),
                local: LocalHash(path[at]),
            });
            let parent = known.checked_sub(1).map(name);
            let stored = KvEvent::Stored {
                parent,
                blocks: blocks.collect(),
                tier: Tier::Device,
            };
            assert_eq!(self.events.apply(&stored), Outcome::Ok);
            None
        } else {
            assert_eq!(self.writers[slot].known(&locals(path)), known);
            let after = self.end_of(slot, &path[..known]);
            assert_eq!(after.is_some(), known > 0);
            let entered = self.writers[slot].enter(after, &locals(new));
            assert_eq!(entered.blocks, new.len());
            entered.end
        };
        self.models[slot].enter(path, end);
        self.seen.push(path.to_vec());
    }

    /// The end of a path that was entered, as found from the end of one that goes on from it.
    fn end_of(&self, slot: usize, path: &[u64]) -> Option<PathEnd> {
        let (longer, &end) = self.models[slot]
            .0
            .iter()
            .find(|(longer, _)| longer.starts_with(path))?;
        let beyond = longer.len() - path.len();
        if beyond == 0 {
            return end;
        }
        let (before, next) = self.writers[slot].before(end?, beyond as u64);
        assert_eq!(next.0, longer[path.len()]);
        before
    }

    fn cut(&mut self, slot: usize, path: &Path, blocks: usize) {
        let (left, end) = (path.len() - blocks, self.models[slot].0[path]);
        let new = if slot == WRITERS {
            let names = prompt(path).sequences()[left..]
                .iter()
                .map(|name| EngineHash(name.0))
                .collect();
            assert_eq!(
                self.events.apply(&KvEvent::Removed {
                    blocks: names,
                    tier: Tier::Device
                }),
                Outcome::Ok
            );
            None
        } else {
            let new = self.writers[slot].cut(end.unwrap(), blocks as u64);
            assert_eq!(new.is_some(), left > 0);
            new
        };
        let model = &mut self.models[slot];
        model.0.remove(path);
        model.enter(&path[..left], new);
    }

    fn empty(&mut self, slot: usize) {
        while !self.models[slot].0.is_empty() {
            let (path, alone) = self.models[slot].alone(0);
            self.cut(slot, &path, alone);
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
            self.index.overlaps(&prompt(path), &mut overlaps);
            for (slot, model) in self.models.iter().enumerate() {
                let known = model.known(path);
                assert_eq!(overlaps.get(Slot(slot as u32)).total() as usize, known);
                if let Some(writer) = self.writers.get(slot) {
                    assert_eq!(writer.known(&locals(path)), known);
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
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn paths_are_held_exactly_as_a_plain_set_of_prompts_has_them(
        longest in prop_oneof![Just(None), (1..6usize).prop_map(Some)],
        steps in steps(40, 4, 1..4),
    ) {
        Bed::new(longest).run(&steps);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn so_are_paths_of_many_runs_that_are_entered_and_cut_in_steps(steps in steps(25, 3, 1..1_500)) {
        // Where runs are longest, whether they could be longer is not checked.
        Bed::new(Some(1_000)).run(&steps);
    }
}

#[test]
fn a_writer_that_is_hidden_is_not_reported_and_one_that_was_emptied_gives_its_seat_back() {
    let index = PrefixIndex::new();
    let (hashes, mut overlaps) = (prompt(&[1, 2, 3]), Overlaps::new());
    let mut writer = index.paths(Slot(5));
    let seat = writer.seat;
    let end = writer.enter(None, hashes.locals()).end.unwrap();
    index.overlaps(&hashes, &mut overlaps);
    assert_eq!(overlaps.get(Slot(5)).device, 3);
    writer.hide();
    index.overlaps(&hashes, &mut overlaps);
    assert_eq!(
        (overlaps.get(Slot(5)).device, index.stats().slots.len()),
        (0, 0)
    );
    assert_ne!(index.paths(Slot(5)).seat, seat, "it is still mentioned");
    assert_eq!(writer.cut(end, 3), None);
    drop(writer);
    assert_eq!(index.stats(), IndexStats::default());
    assert!(
        [index.paths(Slot(6)), index.paths(Slot(7))]
            .iter()
            .any(|writer| writer.seat == seat)
    );
}

#[test]
fn an_empty_path_is_known_and_entered_without_effect() {
    let index = PrefixIndex::new();
    let mut writer = index.paths(Slot(0));
    assert_eq!(
        (writer.known(&[]), writer.enter(None, &[])),
        (
            0,
            Entered {
                blocks: 0,
                end: None
            }
        )
    );
    let end = writer.enter(None, &[LocalHash(7)]).end;
    assert_eq!(writer.enter(end, &[]), Entered { blocks: 0, end });
    let end = end.unwrap();
    assert_eq!(writer.cut(end, 1), None);
}

#[test]
fn what_the_index_has_no_room_for_is_not_entered_and_may_be_later() {
    let index = PrefixIndex::new();
    index
        .shards
        .iter()
        .for_each(|shard| limit_chunks(&mut shard.write(), 2));
    let (mut writer, mut other) = (index.paths(Slot(0)), index.paths(Slot(1)));
    let locals: Vec<_> = (1..=3 * CHUNK as u64).map(LocalHash).collect();
    let Entered { blocks, end } = writer.enter(None, &locals);
    assert_eq!((blocks, writer.known(&locals)), (2 * CHUNK, 2 * CHUNK));
    assert_eq!(
        writer.enter(end, &locals[blocks..]),
        Entered { blocks: 0, end }
    );
    // What somebody else holds takes no room.
    let shared = other.enter(None, &locals);
    assert_eq!(
        (shared.blocks, other.known(&locals)),
        (2 * CHUNK, 2 * CHUNK)
    );
    let shared = other
        .cut(shared.end.unwrap(), 2 * CHUNK as u64 - 1)
        .unwrap();
    let rest = writer.cut(end.unwrap(), CHUNK as u64).unwrap();
    let again = other.enter(Some(shared), &[LocalHash(7)]);
    assert_eq!(again.blocks, 1);
    index.shards.iter().for_each(|shard| check(&shard.read()));
    assert_eq!(other.cut(again.end.unwrap(), 2), None);
    assert_eq!(writer.cut(rest, CHUNK as u64), None);
    drop((writer, other));
    assert_eq!(index.stats(), IndexStats::default());
}
