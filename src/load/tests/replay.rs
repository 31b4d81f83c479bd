//! The load against a log of what happened, from which everything is computed anew after each step.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Weights are counted in these, so that halves, eighths and tenths add up exactly.
const PARTS: u64 = 40;

/// One line of the log.
#[derive(Clone, Debug)]
enum Line {
    /// A request came, with an estimate or without.
    Came {
        id: usize,
        slot: u32,
        prompt: Vec<u64>,
        tokens: u64,
        millis: Option<u64>,
        at: u64,
    },
    Token {
        id: usize,
        at: u64,
    },
    Output {
        id: usize,
        parts: Option<u64>,
    },
    Left {
        id: usize,
        at: u64,
    },
    /// A request turned out to be served by another slot, where so much of it was cached, or by nobody.
    Moved {
        id: usize,
        to: Option<u32>,
        request: Asked,
        millis: Option<u64>,
        at: u64,
    },
    /// The slot was closed, and opened again.
    Emptied {
        slot: u32,
    },
}

/// A request as it would be known to somebody who takes it over.
#[derive(Clone, Debug)]
struct Asked {
    slot: u32,
    prompt: Vec<u64>,
    /// Tokens that are left to prefill.
    tokens: u64,
    begun: bool,
    outputs: Vec<u64>,
    parts: Option<u64>,
    /// Whether it is booked, in a row that is still there.
    counts: bool,
}

#[derive(Clone, Debug)]
struct Live {
    id: usize,
    prompt: Vec<u64>,
    outputs: Vec<u64>,
    /// For how much each block of it counts.
    parts: Option<u64>,
}

#[derive(Clone, Debug)]
struct Prefill {
    id: usize,
    tokens: u64,
    millis: Option<u64>,
}

/// One slot as the log has it.
#[derive(Default)]
struct Naive {
    live: Vec<Live>,
    prefills: Vec<Prefill>,
    since: u64,
    /// Blocks that count for less than one.
    faded: BTreeMap<u64, u64>,
}

impl Naive {
    fn of(log: &[Line], slot: u32) -> Self {
        let mut naive = Self::default();
        log.iter().for_each(|line| naive.read(line, slot));
        naive
    }

    fn read(&mut self, line: &Line, slot: u32) {
        match line {
            Line::Came {
                id,
                slot: there,
                prompt,
                tokens,
                millis,
                at,
            } if *there == slot => {
                let live = Live {
                    id: *id,
                    prompt: prompt.clone(),
                    outputs: Vec::new(),
                    parts: None,
                };
                self.came(live, *tokens, *millis, *at);
            }
            Line::Token { id, at } => self.end_prefill(*id, *at),
            Line::Output { id, parts } => self.output(*id, *parts),
            Line::Left { id, at } => {
                self.end_prefill(*id, *at);
                self.leave(*id);
            }
            Line::Emptied { slot: there } if *there == slot => *self = Self::default(),
            Line::Moved {
                id,
                to,
                request,
                millis,
                at,
            } => {
                self.end_prefill(*id, *at);
                self.leave(*id);
                if *to == Some(slot) {
                    let (prompt, outputs) = (request.prompt.clone(), request.outputs.clone());
                    self.came(
                        Live {
                            id: *id,
                            prompt,
                            outputs,
                            parts: request.parts,
                        },
                        request.tokens,
                        *millis,
                        *at,
                    );
                    request
                        .parts
                        .into_iter()
                        .for_each(|parts| self.fade(*id, parts));
                }
            }
            Line::Came { .. } | Line::Emptied { .. } => {}
        }
    }

    fn came(&mut self, live: Live, tokens: u64, millis: Option<u64>, at: u64) {
        if tokens > 0 {
            self.since = if self.prefills.is_empty() {
                at
            } else {
                self.since
            };
            self.prefills.push(Prefill {
                id: live.id,
                tokens,
                millis,
            });
        }
        self.live.push(live);
    }

    fn leave(&mut self, id: usize) {
        self.live.retain(|live| live.id != id);
        let held = self.held();
        self.faded.retain(|block, _| held.contains(block));
    }

    fn end_prefill(&mut self, id: usize, at: u64) {
        let Some(place) = self.prefills.iter().position(|prefill| prefill.id == id) else {
            return;
        };
        let ended = self.prefills.remove(place);
        match (place, ended.millis) {
            (0, _) => self.since = at,
            (_, Some(millis)) => self.since = at.min(self.since + millis),
            (_, None) => {}
        }
    }

    fn output(&mut self, id: usize, parts: Option<u64>) {
        let Some(at) = self.live.iter().position(|live| live.id == id) else {
            return;
        };
        self.live[at].outputs.push(PARTS);
        let Some(parts) = parts else { return };
        self.live[at].outputs.fill(parts);
        self.live[at].parts = Some(parts);
        self.fade(id, parts);
    }

    fn fade(&mut self, id: usize, parts: u64) {
        let others = |block: &u64, live: &[Live]| {
            live.iter()
                .any(|other| other.id != id && other.prompt.contains(block))
        };
        let Some(at) = self.live.iter().position(|live| live.id == id) else {
            return;
        };
        let alone = self.live[at]
            .prompt
            .iter()
            .filter(|block| !others(block, &self.live))
            .copied();
        self.faded
            .extend(alone.map(|block| (block, parts)).collect::<Vec<_>>());
    }

    fn held(&self) -> BTreeSet<u64> {
        self.live
            .iter()
            .flat_map(|live| live.prompt.iter().copied())
            .collect()
    }

    fn load(&self, now: u64) -> Load {
        let prompts: u64 = self
            .held()
            .iter()
            .map(|block| self.faded.get(block).unwrap_or(&PARTS))
            .sum();
        let outputs: u64 = self.live.iter().flat_map(|live| &live.outputs).sum();
        Load {
            active_blocks: (prompts + outputs + PARTS / 2) / PARTS,
            active_prefill_tokens: self.prefill(now),
            active_requests: self.live.len() as u64,
        }
    }

    fn prefill(&self, now: u64) -> u64 {
        let sum: u64 = self.prefills.iter().map(|prefill| prefill.tokens).sum();
        let Some(Prefill {
            tokens,
            millis: Some(millis),
            ..
        }) = self.prefills.first()
        else {
            return sum;
        };
        let done = if *millis == 0 {
            *tokens
        } else {
            tokens * (now - self.since) / millis
        };
        if self.prefills.iter().all(|prefill| prefill.millis.is_some()) {
            sum.saturating_sub(done)
        } else {
            sum - tokens + tokens.saturating_sub(done)
        }
    }

    fn additional(&self, prompt: &[u64]) -> u64 {
        let held = self.held();
        prompt.iter().filter(|block| !held.contains(block)).count() as u64
    }
}

/// Chained names, as sequence hashes are: equal only after equal prefixes.
fn chained(locals: &[u64]) -> Vec<u64> {
    let step = |last: &mut u64, local: &u64| {
        *last = *last * 4 + local + 1;
        Some(*last)
    };
    locals.iter().scan(0, step).collect()
}

/// The prompts of a request: one, or two that begin alike.
fn sequences(locals: &[u64], fork: usize) -> Sequences {
    let hashes = |locals: &[u64]| chained(locals).into_iter().map(SequenceHash).collect();
    match fork.checked_sub(3) {
        Some(at) if at < locals.len() => Sequences::of(vec![
            hashes(locals),
            hashes(
                &[
                    &locals[..at],
                    &locals[at..]
                        .iter()
                        .map(|local| (local + 1) % 3)
                        .collect::<Vec<_>>(),
                ]
                .concat(),
            ),
        ]),
        _ => Sequences::of(vec![hashes(locals)]),
    }
}

/// Each block of a request once.
fn distinct(sequences: &Sequences) -> Vec<u64> {
    let blocks: BTreeSet<_> = sequences
        .prompts()
        .iter()
        .flat_map(|prompt| prompt.iter())
        .collect();
    blocks.into_iter().map(|block| block.0).collect()
}

/// What is read of the three slots, for one more request.
fn read(tracker: &Arc<LoadTracker>, sequences: &Sequences) -> [(Load, u64); 3] {
    let looked = tracker.book_with(|view| {
        let additional = view.additional(sequences);
        let row = |slot: u32| {
            let load = view.load(Slot(slot), rank(u64::from(slot))).unwrap();
            (load, additional.of(Slot(slot)))
        };
        Err::<Vec<Booking>, _>([row(0), row(1), row(2)])
    });
    looked.unwrap_err()
}

/// How long a prefill should take.
fn millis(pick: u16) -> Option<u64> {
    [None, Some(0), Some(7), Some(100), Some(1000)][usize::from(pick) % 5]
}

/// A fraction that is seldom none, by a number.
fn parts(pick: u16) -> Option<u64> {
    let eighths = (0..=8).map(|of| of * PARTS / 8);
    let mut all = eighths.chain((1..10).map(|of| of * PARTS / 10));
    all.nth(usize::from(pick) % 22)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_load_is_that_of_the_log(
        script in vec((0..15u8, 0..3u32, vec(0..3u64, 0..7), 0..100u64, any::<u16>(), 0..10usize), 1..40),
    ) {
        let now = Arc::new(Mutex::new(Instant::now()));
        let (start, clock) = (*now.lock(), now.clone());
        let tracker = LoadTracker::new(move || *clock.lock());
        (0..3).for_each(|slot| tracker.open(Slot(slot), rank(u64::from(slot))));
        let mut gone = BTreeSet::new();
        let (mut log, mut live) = (Vec::new(), BTreeMap::<usize, (Reservation, Asked)>::new());
        for (id, (kind, slot, locals, tokens, pick, fork)) in script.into_iter().enumerate() {
            let at = (*now.lock() - start).as_millis() as u64;
            let sequences = sequences(&locals, fork);
            let prompt = distinct(&sequences);
            let picked = live.keys().copied().nth(usize::from(pick) % live.len().max(1));
            match (kind, picked) {
                (0..4, _) => {
                    let millis = millis(pick);
                    let prefill_time = millis.map(Duration::from_millis);
                    let sequences = sequences.clone();
                    let booking = Booking { prefill_time, sequences, ..booking(slot, u64::from(slot), &[], tokens) };
                    let (outputs, parts, counts) = (Vec::new(), None, true);
                    let asked = Asked { slot, prompt: prompt.clone(), tokens, begun: false, outputs, parts, counts };
                    live.insert(id, (book(&tracker, booking), asked));
                    log.push(Line::Came { id, slot, prompt: prompt.clone(), tokens, millis, at });
                }
                (4, Some(id)) => {
                    let (reservation, asked) = live.get_mut(&id).unwrap();
                    reservation.first_token();
                    asked.begun = true;
                    log.push(Line::Token { id, at });
                }
                (5 | 6, Some(id)) => {
                    let parts = parts(pick / 7);
                    let (reservation, asked) = live.get_mut(&id).unwrap();
                    reservation.output_block(parts.map(|parts| parts as f64 / PARTS as f64));
                    if asked.counts {
                        asked.outputs.push(PARTS);
                        parts.into_iter().for_each(|parts| asked.outputs.fill(parts));
                        asked.parts = parts.or(asked.parts);
                    }
                    log.push(Line::Output { id, parts });
                }
                (7 | 8, Some(id)) => {
                    drop(live.remove(&id));
                    log.push(Line::Left { id, at });
                }
                (9 | 10, _) => *now.lock() += Duration::from_millis(tokens * u64::from(pick % 20)),
                (11, _) if pick % 4 == 0 => {
                    tracker.close(Slot(slot));
                    tracker.open(Slot(slot), rank(u64::from(slot)));
                    let there = live.values_mut().filter(|(_, asked)| asked.slot == slot);
                    there.for_each(|(_, asked)| asked.counts = false);
                    log.push(Line::Emptied { slot });
                }
                (12..15, Some(id)) => {
                    let (reservation, asked) = live.get_mut(&id).unwrap();
                    let to = (pick % 8 > 0).then_some(slot);
                    let (millis, before) = (millis(pick), reservation.bookings().next().cloned().unwrap());
                    let cached_tokens = tokens.min(before.prompt_tokens);
                    let moved = reservation.relocate(|view, booking| {
                        assert_eq!(booking, &before);
                        assert!(view.load(Slot(2), rank(2)).is_some());
                        let slot = to?;
                        let (rank, prefill_time) = (rank(u64::from(slot)), millis.map(Duration::from_millis));
                        Some(Booking { slot: Slot(slot), rank, cached_tokens, prefill_time, ..before.clone() })
                    });
                    prop_assert_eq!(moved, to.is_some() && !gone.contains(&id));
                    if !gone.contains(&id) {
                        asked.tokens = if asked.begun { 0 } else { before.prompt_tokens - cached_tokens };
                        asked.counts = to.is_some();
                        asked.slot = to.unwrap_or(asked.slot);
                        log.push(Line::Moved { id, to, request: asked.clone(), millis, at });
                    }
                    if to.is_none() {
                        gone.insert(id);
                    }
                }
                _ => {}
            }
            let at = (*now.lock() - start).as_millis() as u64;
            let read = read(&tracker, &sequences);
            for slot in 0..3 {
                let naive = Naive::of(&log, slot);
                prop_assert_eq!(read[slot as usize], (naive.load(at), naive.additional(&prompt)), "{:?}", log);
            }
        }
        live.clear();
        let idle = |load: &RankLoad| load.active_blocks + load.active_prefill_tokens + load.active_requests == 0;
        prop_assert!(tracker.snapshot().iter().all(idle));
    }
}
