//! What engines say while a trace is served. Each request goes to the rank where it costs least, by the blocks it misses
//! there and by the load, which fades; the rank stores what it misses in runs of at most 512 blocks, and then a block for
//! every 16 tokens of the answer. With a capacity, a rank evicts the ends of what it used longest ago.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::iter::Peekable;
use std::num::NonZeroU32;

use warmroute::block::{LocalHash, SequenceHash};
use warmroute::worker::BlockSize;

use crate::trace::{Request, mix};

/// Tokens of a block.
pub const BLOCK: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));

/// Most blocks of one event: what a prefill step of 8,192 tokens stores.
const RUN: usize = 512;

/// Milliseconds in which an engine computes one token of an answer.
const TOKEN: u64 = 25;

/// Milliseconds after which a rank's load counts half.
const FADE: f64 = 5_000.0;

/// One event of one rank.
#[derive(Clone, Debug)]
pub struct Event {
    pub rank: u32,
    pub change: Change,
}

#[derive(Clone, Debug)]
pub enum Change {
    Stored {
        parent: Option<SequenceHash>,
        blocks: Vec<(LocalHash, SequenceHash)>,
    },
    Removed(Vec<SequenceHash>),
}

impl Event {
    /// Blocks that it names.
    pub fn blocks(&self) -> usize {
        match &self.change {
            Change::Stored { blocks, .. } => blocks.len(),
            Change::Removed(blocks) => blocks.len(),
        }
    }
}

/// Blocks that some events name.
pub fn blocks(events: &[Event]) -> usize {
    events.iter().map(Event::blocks).sum()
}

/// Where each request goes.
pub fn places(requests: &[Request], ranks: u32) -> Vec<u32> {
    let mut fleet = Placing::new(ranks);
    requests
        .iter()
        .map(|request| fleet.place(request).0)
        .collect()
}

/// Serves all requests. Says what the ranks tell: of the prompts, and of the answers.
pub fn unbounded(requests: &[Request], ranks: u32) -> (Vec<Event>, Vec<Event>) {
    let (mut stored, mut decoded) = (Vec::new(), Vec::new());
    let mut fleet = Placing::new(ranks);
    for (number, request) in requests.iter().enumerate() {
        let (rank, cached) = fleet.place(request);
        store(request, rank, cached, &mut stored);
        decoded.extend(
            Decoding::of(number, request, rank)
                .map(|(at, block, event)| (at, number, block, event)),
        );
    }
    decoded.sort_by_key(|(at, number, block, _)| (*at, *number, *block));
    (
        stored,
        decoded.into_iter().map(|(.., event)| event).collect(),
    )
}

/// Serves all requests on ranks that have so much room. Says all they tell.
pub fn bounded(requests: &[Request], ranks: u32, capacity: usize) -> Vec<Event> {
    let caches = (0..ranks).map(|_| Cache::new(capacity)).collect();
    let mut serving = Serving {
        caches,
        placing: Placing::new(ranks),
        due: BTreeSet::new(),
        answers: HashMap::new(),
        events: Vec::new(),
    };
    for (number, request) in requests.iter().enumerate() {
        serving.answer_until(request.at);
        serving.accept(number, request);
    }
    serving.answer_until(u64::MAX);
    serving.events
}

fn store(request: &Request, rank: u32, cached: usize, into: &mut Vec<Event>) {
    let (locals, sequences) = (request.prompt.locals(), request.prompt.sequences());
    for start in (cached..locals.len()).step_by(RUN) {
        let run = start..locals.len().min(start + RUN);
        let blocks = run.map(|at| (locals[at], sequences[at])).collect();
        let parent = start.checked_sub(1).map(|before| sequences[before]);
        into.push(Event {
            rank,
            change: Change::Stored { parent, blocks },
        });
    }
}

/// Where requests go, and who holds what.
struct Placing {
    holders: HashMap<SequenceHash, u64>,
    load: Vec<f64>,
    now: u64,
}

impl Placing {
    fn new(ranks: u32) -> Self {
        assert!(ranks <= 64, "holders are a bit each");
        Self {
            holders: HashMap::new(),
            load: vec![0.0; ranks as usize],
            now: 0,
        }
    }

    /// Where a request goes, and how many of its leading blocks are there.
    fn place(&mut self, request: &Request) -> (u32, usize) {
        let faded = 0.5_f64.powf((request.at - self.now) as f64 / FADE);
        self.now = request.at;
        self.load.iter_mut().for_each(|load| *load *= faded);
        let sequences = request.prompt.sequences();
        let mut cached = vec![0; self.load.len()];
        let mut still = u64::MAX;
        for (at, sequence) in sequences.iter().enumerate() {
            let now = still & self.holders.get(sequence).copied().unwrap_or(0);
            mark(still & !now, at, &mut cached);
            still = now;
            if still == 0 {
                break;
            }
        }
        mark(still, sequences.len(), &mut cached);
        let cost = |rank: usize| (sequences.len() - cached[rank]) as f64 + self.load[rank];
        let rank = (0..cached.len())
            .min_by(|a, b| cost(*a).total_cmp(&cost(*b)))
            .unwrap_or(0);
        self.load[rank] += (sequences.len() - cached[rank]) as f64;
        let bit = 1 << rank;
        sequences[cached[rank]..]
            .iter()
            .for_each(|sequence| *self.holders.entry(*sequence).or_default() |= bit);
        (rank as u32, cached[rank])
    }

    fn evicted(&mut self, rank: u32, block: SequenceHash) {
        if let Some(bits) = self.holders.get_mut(&block) {
            *bits &= !(1 << rank);
        }
    }
}

fn mark(ranks: u64, reached: usize, cached: &mut [usize]) {
    for (rank, cached) in cached.iter_mut().enumerate() {
        if ranks & (1 << rank) != 0 {
            *cached = reached;
        }
    }
}

/// The blocks of an answer, as they come.
struct Decoding {
    rank: u32,
    number: usize,
    start: u64,
    blocks: u64,
    next: u64,
    parent: Option<SequenceHash>,
}

impl Decoding {
    fn of(number: usize, request: &Request, rank: u32) -> Self {
        let parent = request.prompt.sequences().last().copied();
        Self {
            rank,
            number,
            start: request.at,
            blocks: request.output / 16,
            next: 0,
            parent,
        }
    }
}

impl Iterator for Decoding {
    type Item = (u64, u64, Event);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.blocks {
            return None;
        }
        let block = self.next;
        self.next += 1;
        let local = LocalHash(mix(mix(self.number as u64 | 1 << 40).wrapping_add(block)));
        let sequence = self
            .parent
            .map_or_else(|| SequenceHash::root(local), |parent| parent.then(local));
        let change = Change::Stored {
            parent: self.parent,
            blocks: vec![(local, sequence)],
        };
        self.parent = Some(sequence);
        Some((
            self.start + self.next * 16 * TOKEN,
            block,
            Event {
                rank: self.rank,
                change,
            },
        ))
    }
}

/// Ranks with little room at work.
struct Serving {
    caches: Vec<Cache>,
    placing: Placing,
    /// When the next block of an answer is full.
    due: BTreeSet<(u64, usize)>,
    answers: HashMap<usize, Peekable<Decoding>>,
    events: Vec<Event>,
}

impl Serving {
    fn accept(&mut self, number: usize, request: &Request) {
        let (rank, cached) = self.placing.place(request);
        self.caches[rank as usize].touch(request.at, request.prompt.sequences(), cached);
        let mut runs = Vec::new();
        store(request, rank, cached, &mut runs);
        let fits = runs.into_iter().all(|run| self.admit(request.at, run));
        assert!(fits, "a prompt is larger than a cache");
        self.wait(number, Decoding::of(number, request, rank).peekable());
    }

    fn answer_until(&mut self, time: u64) {
        while let Some((at, number)) = self.due.pop_first() {
            if at > time {
                self.due.insert((at, number));
                return;
            }
            let Some(mut answer) = self.answers.remove(&number) else {
                continue;
            };
            let Some((_, _, event)) = answer.next() else {
                continue;
            };
            if self.admit(at, event) {
                self.wait(number, answer);
            }
        }
    }

    fn wait(&mut self, number: usize, mut answer: Peekable<Decoding>) {
        if let Some(&(at, ..)) = answer.peek() {
            self.due.insert((at, number));
            self.answers.insert(number, answer);
        }
    }

    /// Makes room for a run and stores it; false if what it follows is gone.
    fn admit(&mut self, at: u64, event: Event) -> bool {
        let Change::Stored { parent, blocks } = &event.change else {
            return false;
        };
        let cache = &mut self.caches[event.rank as usize];
        let Some(depth) = cache.follow(at, *parent) else {
            return false;
        };
        let evicted = cache.make_room(blocks.len(), *parent);
        evicted
            .iter()
            .for_each(|name| self.placing.evicted(event.rank, *name));
        if !evicted.is_empty() {
            self.events.push(Event {
                rank: event.rank,
                change: Change::Removed(evicted),
            });
        }
        if !cache.has_room(blocks.len()) {
            return false;
        }
        cache.store(at, *parent, depth, blocks);
        self.events.push(event);
        true
    }
}

/// The cache of one rank that has no room for everything.
struct Cache {
    capacity: usize,
    blocks: HashMap<SequenceHash, Cached>,
    /// Blocks that nothing follows, in the order in which they leave.
    ends: BTreeSet<End>,
}

type End = (u64, Reverse<usize>, SequenceHash);

struct Cached {
    parent: Option<SequenceHash>,
    depth: usize,
    used: u64,
    children: u32,
}

impl Cached {
    fn end(&self, name: SequenceHash) -> End {
        (self.used, Reverse(self.depth), name)
    }
}

impl Cache {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            blocks: HashMap::new(),
            ends: BTreeSet::new(),
        }
    }

    /// Marks the first blocks of a prompt as used now.
    fn touch(&mut self, at: u64, sequences: &[SequenceHash], cached: usize) {
        sequences[..cached]
            .iter()
            .for_each(|&name| _ = self.follow(at, Some(name)));
    }

    /// Marks a block as used now. Says at which depth what follows it lies; nothing if it is gone.
    fn follow(&mut self, at: u64, parent: Option<SequenceHash>) -> Option<usize> {
        let Some(name) = parent else { return Some(0) };
        let found = self.blocks.get_mut(&name)?;
        let end = self.ends.remove(&found.end(name));
        found.used = at;
        if end {
            self.ends.insert(found.end(name));
        }
        Some(found.depth + 1)
    }

    fn has_room(&self, blocks: usize) -> bool {
        self.blocks.len() + blocks <= self.capacity
    }

    /// Takes out what was used longest ago, but not what the new blocks follow.
    fn make_room(&mut self, blocks: usize, parent: Option<SequenceHash>) -> Vec<SequenceHash> {
        let mut evicted = Vec::new();
        while !self.has_room(blocks) {
            let Some(end) = self.ends.pop_first() else {
                break;
            };
            if Some(end.2) == parent {
                self.ends.insert(end);
                break;
            }
            self.remove(end.2);
            evicted.push(end.2);
        }
        evicted
    }

    fn store(
        &mut self,
        at: u64,
        parent: Option<SequenceHash>,
        depth: usize,
        blocks: &[(LocalHash, SequenceHash)],
    ) {
        let mut before = parent;
        for (offset, &(_, name)) in blocks.iter().enumerate() {
            if let Some((name, found)) =
                before.and_then(|name| Some((name, self.blocks.get_mut(&name)?)))
            {
                self.ends.remove(&found.end(name));
                found.children += 1;
            }
            self.blocks.insert(
                name,
                Cached {
                    parent: before,
                    depth: depth + offset,
                    used: at,
                    children: 0,
                },
            );
            self.ends.insert(self.blocks[&name].end(name));
            before = Some(name);
        }
    }

    /// Takes an end out; what it followed may be one now.
    fn remove(&mut self, name: SequenceHash) {
        let Some(parent) = self.blocks.remove(&name).and_then(|gone| gone.parent) else {
            return;
        };
        let Some(found) = self.blocks.get_mut(&parent) else {
            return;
        };
        found.children -= 1;
        if found.children == 0 {
            self.ends.insert(found.end(parent));
        }
    }
}
