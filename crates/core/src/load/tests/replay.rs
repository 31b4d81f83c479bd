//! Compares the load table with a log of events, from which the load is recomputed after each step.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;

/// Unit of weights, so that halves, eighths and tenths add up exactly.
const PARTS: u64 = 40;

/// Entry of the log.
#[derive(Clone, Debug)]
enum LogEntry {
    /// A request was booked, with or without an estimate.
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
    /// A request moved to another slot with this many cached tokens, or to none.
    Moved {
        id: usize,
        to: Option<u32>,
        request: LoggedRequest,
        millis: Option<u64>,
        at: u64,
    },
    /// The slot was closed and opened again.
    Emptied {
        slot: u32,
    },
}

/// State of a request, as another replica would restore it.
#[derive(Clone, Debug)]
struct LoggedRequest {
    slot: u32,
    prompt: Vec<u64>,
    /// Outstanding prefill tokens.
    tokens: u64,
    has_first_token: bool,
    outputs: Vec<u64>,
    parts: Option<u64>,
    /// Whether it is booked in a row that still exists.
    counts: bool,
}

#[derive(Clone, Debug)]
struct Live {
    id: usize,
    prompt: Vec<u64>,
    outputs: Vec<u64>,
    /// Weight of each discounted block.
    parts: Option<u64>,
}

#[derive(Clone, Debug)]
struct Prefill {
    id: usize,
    tokens: u64,
    millis: Option<u64>,
}

/// Slot in the log.
#[derive(Default)]
struct Naive {
    live: Vec<Live>,
    prefills: Vec<Prefill>,
    since: u64,
    /// Discounted blocks.
    faded: BTreeMap<u64, u64>,
}

impl Naive {
    fn of(log: &[LogEntry], slot: u32) -> Self {
        let mut naive = Self::default();
        log.iter().for_each(|line| naive.read(line, slot));
        naive
    }

    fn read(&mut self, line: &LogEntry, slot: u32) {
        match line {
            LogEntry::Came {
                id,
                slot: in_slot,
                prompt,
                tokens,
                millis,
                at,
            } if *in_slot == slot => {
                let live = Live {
                    id: *id,
                    prompt: prompt.clone(),
                    outputs: Vec::new(),
                    parts: None,
                };
                self.came(live, *tokens, *millis, *at);
            }
            LogEntry::Token { id, at } => self.end_prefill(*id, *at),
            LogEntry::Output { id, parts } => self.output(*id, *parts),
            LogEntry::Left { id, at } => {
                self.end_prefill(*id, *at);
                self.leave(*id);
            }
            LogEntry::Emptied { slot: in_slot } if *in_slot == slot => *self = Self::default(),
            LogEntry::Moved {
                id,
                to,
                request,
                millis,
                at,
            } => {
                self.end_prefill(*id, *at);
                self.leave(*id);
                if *to == Some(slot) {
                    let prompt = request.prompt.clone();
                    let outputs = request.outputs.clone();
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
            LogEntry::Came { .. } | LogEntry::Emptied { .. } => {}
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

    fn load(&self, now: u64) -> ActiveLoad {
        let prompts: u64 = self
            .held()
            .iter()
            .map(|block| self.faded.get(block).unwrap_or(&PARTS))
            .sum();
        let outputs: u64 = self.live.iter().flat_map(|live| &live.outputs).sum();
        ActiveLoad {
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

/// Chained hashes, which are equal only after equal prefixes.
fn chained(locals: &[u64]) -> Vec<u64> {
    let step = |last: &mut u64, local: &u64| {
        *last = *last * 4 + local + 1;
        Some(*last)
    };
    locals.iter().scan(0, step).collect()
}

/// Prompts of a request: one, or two with a shared prefix.
fn sequences(locals: &[u64], fork: usize) -> PromptSequences {
    let hashes = |locals: &[u64]| chained(locals).into_iter().map(SequenceHash).collect();
    match fork.checked_sub(3) {
        Some(at) if at < locals.len() => PromptSequences::from_prompts(vec![
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
        _ => PromptSequences::from_prompts(vec![hashes(locals)]),
    }
}

/// Distinct blocks of a request.
fn distinct(sequences: &PromptSequences) -> Vec<u64> {
    let blocks: BTreeSet<_> = sequences
        .prompts()
        .iter()
        .flat_map(|prompt| prompt.iter())
        .collect();
    blocks.into_iter().map(|block| block.0).collect()
}

/// Load of the three slots, and the additional blocks of one more request.
fn read(tracker: &Arc<LoadTracker>, sequences: &PromptSequences) -> [(ActiveLoad, u64); 3] {
    let looked = tracker.book_with(|view| {
        let additional = view.additional(sequences);
        let row = |slot: u32| {
            let load = view.load(RankSlot(slot), rank(u64::from(slot))).unwrap();
            (load, additional.for_slot(RankSlot(slot)))
        };
        Err::<Vec<LoadBooking>, _>([row(0), row(1), row(2)])
    });
    looked.unwrap_err()
}

/// Duration of a prefill.
fn millis(pick: u16) -> Option<u64> {
    [None, Some(0), Some(7), Some(100), Some(1000)][usize::from(pick) % 5]
}

/// Fraction for a number; rarely `None`.
fn parts(pick: u16) -> Option<u64> {
    let eighths = (0..=8).map(|of| of * PARTS / 8);
    let mut all = eighths.chain((1..10).map(|of| of * PARTS / 10));
    all.nth(usize::from(pick) % 22)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn load_matches_event_log(
        script in vec((0..15u8, 0..3u32, vec(0..3u64, 0..7), 0..100u64, any::<u16>(), 0..10usize), 1..40),
    ) {
        let now = Arc::new(Mutex::new(Instant::now()));
        let start = *now.lock();
        let clock = now.clone();
        let tracker = LoadTracker::new(move || *clock.lock());
        (0..3).for_each(|slot| tracker.open_slot(RankSlot(slot), rank(u64::from(slot))));
        let mut gone = BTreeSet::new();
        let mut log = Vec::new();
        let mut live = BTreeMap::<usize, (Reservation, LoggedRequest)>::new();
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
                    let booking = LoadBooking { prefill_time, sequences, ..booking(slot, u64::from(slot), &[], tokens) };
                    let outputs = Vec::new();
                    let parts = None;
                    let counts = true;
                    let request = LoggedRequest { slot, prompt: prompt.clone(), tokens, has_first_token: false, outputs, parts, counts };
                    live.insert(id, (book(&tracker, booking), request));
                    log.push(LogEntry::Came { id, slot, prompt: prompt.clone(), tokens, millis, at });
                }
                (4, Some(id)) => {
                    let (reservation, request) = live.get_mut(&id).unwrap();
                    reservation.on_first_token();
                    request.has_first_token = true;
                    log.push(LogEntry::Token { id, at });
                }
                (5 | 6, Some(id)) => {
                    let parts = parts(pick / 7);
                    let (reservation, request) = live.get_mut(&id).unwrap();
                    reservation.add_output_block(parts.map(|parts| parts as f64 / PARTS as f64));
                    if request.counts {
                        request.outputs.push(PARTS);
                        parts.into_iter().for_each(|parts| request.outputs.fill(parts));
                        request.parts = parts.or(request.parts);
                    }
                    log.push(LogEntry::Output { id, parts });
                }
                (7 | 8, Some(id)) => {
                    drop(live.remove(&id));
                    log.push(LogEntry::Left { id, at });
                }
                (9 | 10, _) => *now.lock() += Duration::from_millis(tokens * u64::from(pick % 20)),
                (11, _) if pick % 4 == 0 => {
                    tracker.close_slot(RankSlot(slot));
                    tracker.open_slot(RankSlot(slot), rank(u64::from(slot)));
                    let in_slot = live.values_mut().filter(|(_, request)| request.slot == slot);
                    in_slot.for_each(|(_, request)| request.counts = false);
                    log.push(LogEntry::Emptied { slot });
                }
                (12..15, Some(id)) => {
                    let (reservation, request) = live.get_mut(&id).unwrap();
                    let to = (pick % 8 > 0).then_some(slot);
                    let millis = millis(pick);
                    let before = reservation.bookings().next().cloned().unwrap();
                    let cached_tokens = tokens.min(before.prompt_tokens);
                    let moved = reservation.relocate(|view, booking| {
                        assert_eq!(booking, &before);
                        assert!(view.load(RankSlot(2), rank(2)).is_some());
                        let slot = to?;
                        let rank = rank(u64::from(slot));
                        let prefill_time = millis.map(Duration::from_millis);
                        Some(LoadBooking { slot: RankSlot(slot), rank, cached_tokens, prefill_time, ..before.clone() })
                    });
                    prop_assert_eq!(moved, to.is_some() && !gone.contains(&id));
                    if !gone.contains(&id) {
                        request.tokens = if request.has_first_token { 0 } else { before.prompt_tokens - cached_tokens };
                        request.counts = to.is_some();
                        request.slot = to.unwrap_or(request.slot);
                        log.push(LogEntry::Moved { id, to, request: request.clone(), millis, at });
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
