//! Events that engines publish while a trace is served. Each request goes to the rank with the
//! lowest cost, which is the missing blocks plus a decaying load. The rank stores the missing
//! blocks in runs of at most 512, and then one block for every 16 tokens of the answer. With a
//! limited capacity, a rank evicts the least recently used leaf blocks.

use std::cmp::Reverse;
use std::collections::{BTreeSet, HashMap};
use std::iter::Peekable;

use warmroute_core::block::{LocalHash, SequenceHash};

use crate::trace::{TraceRequest, mix};

/// Maximum number of blocks of an event: a prefill step of 8,192 tokens.
const MAX_RUN: usize = 512;

/// Milliseconds per decoded token.
const MILLIS_PER_TOKEN: u64 = 25;

/// Half-life of a rank's load in milliseconds.
const LOAD_HALF_LIFE: f64 = 5_000.0;

/// One event of one rank.
#[derive(Clone, Debug)]
pub struct WorkerEvent {
    pub rank: u32,
    pub change: CacheChange,
}

#[derive(Clone, Debug)]
pub enum CacheChange {
    Stored {
        parent: Option<SequenceHash>,
        blocks: Vec<(LocalHash, SequenceHash)>,
    },
    Removed(Vec<SequenceHash>),
}

impl WorkerEvent {
    /// Returns the number of blocks in the event.
    pub fn blocks(&self) -> usize {
        match &self.change {
            CacheChange::Stored { blocks, .. } => blocks.len(),
            CacheChange::Removed(blocks) => blocks.len(),
        }
    }
}

/// Returns the number of blocks in all events.
pub fn blocks(events: &[WorkerEvent]) -> usize {
    events.iter().map(WorkerEvent::blocks).sum()
}

/// Returns the rank of each request.
pub fn place_all(requests: &[TraceRequest], ranks: u32) -> Vec<u32> {
    let mut fleet = RequestPlacer::new(ranks);
    requests
        .iter()
        .map(|request| fleet.place(request).0)
        .collect()
}

/// Serves all requests with unlimited capacity. Returns the events of the prompts and of the
/// answers.
pub fn unbounded(requests: &[TraceRequest], ranks: u32) -> (Vec<WorkerEvent>, Vec<WorkerEvent>) {
    let mut stored = Vec::new();
    let mut decoded = Vec::new();
    let mut fleet = RequestPlacer::new(ranks);
    for (number, request) in requests.iter().enumerate() {
        let (rank, cached) = fleet.place(request);
        push_stores(request, rank, cached, &mut stored);
        decoded.extend(
            AnswerBlocks::new(number, request, rank)
                .map(|(at, block, event)| (at, number, block, event)),
        );
    }
    decoded.sort_by_key(|(at, number, block, _)| (*at, *number, *block));
    (
        stored,
        decoded.into_iter().map(|(.., event)| event).collect(),
    )
}

/// Serves all requests with a limited capacity per rank. Returns all events.
pub fn bounded(requests: &[TraceRequest], ranks: u32, capacity: usize) -> Vec<WorkerEvent> {
    let caches = (0..ranks).map(|_| RankCache::new(capacity)).collect();
    let mut run = BoundedRun {
        caches,
        placer: RequestPlacer::new(ranks),
        due: BTreeSet::new(),
        answers: HashMap::new(),
        events: Vec::new(),
    };
    for (number, request) in requests.iter().enumerate() {
        run.answer_until(request.at);
        run.accept(number, request);
    }
    run.answer_until(u64::MAX);
    run.events
}

fn push_stores(request: &TraceRequest, rank: u32, cached: usize, events: &mut Vec<WorkerEvent>) {
    let locals = request.prompt.locals();
    let sequences = request.prompt.sequences();
    for start in (cached..locals.len()).step_by(MAX_RUN) {
        let run = start..locals.len().min(start + MAX_RUN);
        let blocks = run.map(|at| (locals[at], sequences[at])).collect();
        let parent = start.checked_sub(1).map(|before| sequences[before]);
        events.push(WorkerEvent {
            rank,
            change: CacheChange::Stored { parent, blocks },
        });
    }
}

/// Places requests and tracks the blocks of each rank.
struct RequestPlacer {
    holders: HashMap<SequenceHash, u64>,
    load: Vec<f64>,
    now: u64,
}

impl RequestPlacer {
    fn new(ranks: u32) -> Self {
        assert!(ranks <= 64, "holders are a bit each");
        Self {
            holders: HashMap::new(),
            load: vec![0.0; ranks as usize],
            now: 0,
        }
    }

    /// Returns the rank of a request and its number of cached leading blocks.
    fn place(&mut self, request: &TraceRequest) -> (u32, usize) {
        let faded = 0.5_f64.powf((request.at - self.now) as f64 / LOAD_HALF_LIFE);
        self.now = request.at;
        self.load.iter_mut().for_each(|load| *load *= faded);
        let sequences = request.prompt.sequences();
        let mut cached = vec![0; self.load.len()];
        let mut matching = u64::MAX;
        for (at, sequence) in sequences.iter().enumerate() {
            let now = matching & self.holders.get(sequence).copied().unwrap_or(0);
            set_cached(matching & !now, at, &mut cached);
            matching = now;
            if matching == 0 {
                break;
            }
        }
        set_cached(matching, sequences.len(), &mut cached);
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

    fn remove_holder(&mut self, rank: u32, block: SequenceHash) {
        if let Some(bits) = self.holders.get_mut(&block) {
            *bits &= !(1 << rank);
        }
    }
}

fn set_cached(ranks: u64, reached: usize, cached: &mut [usize]) {
    for (rank, cached) in cached.iter_mut().enumerate() {
        if ranks & (1 << rank) != 0 {
            *cached = reached;
        }
    }
}

/// Iterator over the blocks of an answer, with time in milliseconds, block number and event.
struct AnswerBlocks {
    rank: u32,
    number: usize,
    start: u64,
    blocks: u64,
    next: u64,
    parent: Option<SequenceHash>,
}

impl AnswerBlocks {
    fn new(number: usize, request: &TraceRequest, rank: u32) -> Self {
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

impl Iterator for AnswerBlocks {
    type Item = (u64, u64, WorkerEvent);

    fn next(&mut self) -> Option<Self::Item> {
        if self.next == self.blocks {
            return None;
        }
        let block = self.next;
        self.next += 1;
        let local = LocalHash(mix(mix(self.number as u64 | 1 << 40).wrapping_add(block)));
        let sequence = self
            .parent
            .map_or_else(|| SequenceHash::root(local), |parent| parent.child(local));
        let change = CacheChange::Stored {
            parent: self.parent,
            blocks: vec![(local, sequence)],
        };
        self.parent = Some(sequence);
        Some((
            self.start + self.next * 16 * MILLIS_PER_TOKEN,
            block,
            WorkerEvent {
                rank: self.rank,
                change,
            },
        ))
    }
}

/// The state of a run with limited capacity.
struct BoundedRun {
    caches: Vec<RankCache>,
    placer: RequestPlacer,
    /// Times at which the next block of an answer is full, with the request number.
    due: BTreeSet<(u64, usize)>,
    answers: HashMap<usize, Peekable<AnswerBlocks>>,
    events: Vec<WorkerEvent>,
}

impl BoundedRun {
    fn accept(&mut self, number: usize, request: &TraceRequest) {
        let (rank, cached) = self.placer.place(request);
        self.caches[rank as usize].touch(request.at, request.prompt.sequences(), cached);
        let mut runs = Vec::new();
        push_stores(request, rank, cached, &mut runs);
        let fits = runs.into_iter().all(|run| self.store_run(request.at, run));
        assert!(fits, "a prompt is larger than a cache");
        self.schedule(number, AnswerBlocks::new(number, request, rank).peekable());
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
            if self.store_run(at, event) {
                self.schedule(number, answer);
            }
        }
    }

    fn schedule(&mut self, number: usize, mut answer: Peekable<AnswerBlocks>) {
        if let Some(&(at, ..)) = answer.peek() {
            self.due.insert((at, number));
            self.answers.insert(number, answer);
        }
    }

    /// Evicts blocks for a run and stores the run. Returns false if the run's parent was evicted.
    fn store_run(&mut self, at: u64, event: WorkerEvent) -> bool {
        let CacheChange::Stored { parent, blocks } = &event.change else {
            return false;
        };
        let cache = &mut self.caches[event.rank as usize];
        let Some(depth) = cache.touch_block(at, *parent) else {
            return false;
        };
        let evicted = cache.make_room(blocks.len(), *parent);
        evicted
            .iter()
            .for_each(|name| self.placer.remove_holder(event.rank, *name));
        if !evicted.is_empty() {
            self.events.push(WorkerEvent {
                rank: event.rank,
                change: CacheChange::Removed(evicted),
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

/// The cache of one rank with limited capacity.
struct RankCache {
    capacity: usize,
    blocks: HashMap<SequenceHash, CachedBlock>,
    /// Leaf blocks in eviction order.
    leaves: BTreeSet<LeafKey>,
}

type LeafKey = (u64, Reverse<usize>, SequenceHash);

struct CachedBlock {
    parent: Option<SequenceHash>,
    depth: usize,
    used: u64,
    children: u32,
}

impl CachedBlock {
    fn leaf_key(&self, name: SequenceHash) -> LeafKey {
        (self.used, Reverse(self.depth), name)
    }
}

impl RankCache {
    fn new(capacity: usize) -> Self {
        Self {
            capacity,
            blocks: HashMap::new(),
            leaves: BTreeSet::new(),
        }
    }

    /// Marks the first blocks of a prompt as used now.
    fn touch(&mut self, at: u64, sequences: &[SequenceHash], cached: usize) {
        sequences[..cached]
            .iter()
            .for_each(|&name| _ = self.touch_block(at, Some(name)));
    }

    /// Marks a block as used now. Returns the depth of its children, or `None` if the block was
    /// evicted.
    fn touch_block(&mut self, at: u64, parent: Option<SequenceHash>) -> Option<usize> {
        let Some(name) = parent else { return Some(0) };
        let found = self.blocks.get_mut(&name)?;
        let end = self.leaves.remove(&found.leaf_key(name));
        found.used = at;
        if end {
            self.leaves.insert(found.leaf_key(name));
        }
        Some(found.depth + 1)
    }

    fn has_room(&self, blocks: usize) -> bool {
        self.blocks.len() + blocks <= self.capacity
    }

    /// Evicts the least recently used leaf blocks, except the parent of the new blocks.
    fn make_room(&mut self, blocks: usize, parent: Option<SequenceHash>) -> Vec<SequenceHash> {
        let mut evicted = Vec::new();
        while !self.has_room(blocks) {
            let Some(end) = self.leaves.pop_first() else {
                break;
            };
            if Some(end.2) == parent {
                self.leaves.insert(end);
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
                self.leaves.remove(&found.leaf_key(name));
                found.children += 1;
            }
            self.blocks.insert(
                name,
                CachedBlock {
                    parent: before,
                    depth: depth + offset,
                    used: at,
                    children: 0,
                },
            );
            self.leaves.insert(self.blocks[&name].leaf_key(name));
            before = Some(name);
        }
    }

    /// Removes a leaf block. Its parent may become a leaf.
    fn remove(&mut self, name: SequenceHash) {
        let Some(parent) = self.blocks.remove(&name).and_then(|removed| removed.parent) else {
            return;
        };
        let Some(found) = self.blocks.get_mut(&parent) else {
            return;
        };
        found.children -= 1;
        if found.children == 0 {
            self.leaves.insert(found.leaf_key(parent));
        }
    }
}
