//! Compares the load table with a log of events, from which the load is recomputed after each step.

use std::collections::{BTreeMap, BTreeSet};

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

/// Unit of weights, so that halves, eighths and tenths add up exactly.
const PARTS: u64 = 40;

/// Entry of the log.
#[derive(Clone, Debug)]
enum LogEntry {
    /// A request was booked, with or without an estimate.
    Booked {
        id: usize,
        slot: u32,
        prompt: Vec<u64>,
        tokens: u64,
        millis: Option<u64>,
        at: u64,
    },
    FirstToken {
        id: usize,
        at: u64,
    },
    Output {
        id: usize,
        parts: Option<u64>,
    },
    Released {
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
    /// Whether it is booked in a slot that was not reopened since.
    is_booked: bool,
}

#[derive(Clone, Debug)]
struct ModelRequest {
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

/// Model of one slot, computed from the log.
#[derive(Default)]
struct SlotModel {
    live: Vec<ModelRequest>,
    prefills: Vec<Prefill>,
    since: u64,
    /// Weights of the discounted blocks.
    discounted: BTreeMap<u64, u64>,
}

impl SlotModel {
    fn of(log: &[LogEntry], slot: u32) -> Self {
        let mut model = Self::default();
        log.iter().for_each(|entry| model.apply(entry, slot));
        model
    }

    fn apply(&mut self, entry: &LogEntry, slot: u32) {
        match entry {
            LogEntry::Booked {
                id,
                slot: in_slot,
                prompt,
                tokens,
                millis,
                at,
            } if *in_slot == slot => {
                let live = ModelRequest {
                    id: *id,
                    prompt: prompt.clone(),
                    outputs: Vec::new(),
                    parts: None,
                };
                self.add(live, *tokens, *millis, *at);
            }
            LogEntry::FirstToken { id, at } => self.end_prefill(*id, *at),
            LogEntry::Output { id, parts } => self.output(*id, *parts),
            LogEntry::Released { id, at } => {
                self.end_prefill(*id, *at);
                self.remove(*id);
            }
            LogEntry::Moved {
                id,
                to,
                request,
                millis,
                at,
            } => {
                self.end_prefill(*id, *at);
                self.remove(*id);
                if *to == Some(slot) {
                    let prompt = request.prompt.clone();
                    let outputs = request.outputs.clone();
                    self.add(
                        ModelRequest {
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
                        .for_each(|parts| self.discount(*id, parts));
                }
            }
            LogEntry::Booked { .. } => {}
        }
    }

    fn add(&mut self, live: ModelRequest, tokens: u64, millis: Option<u64>, at: u64) {
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

    fn remove(&mut self, id: usize) {
        self.live.retain(|live| live.id != id);
        let held = self.held();
        self.discounted.retain(|block, _| held.contains(block));
    }

    fn end_prefill(&mut self, id: usize, at: u64) {
        let Some(index) = self.prefills.iter().position(|prefill| prefill.id == id) else {
            return;
        };
        let ended = self.prefills.remove(index);
        match (index, ended.millis) {
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
        self.discount(id, parts);
    }

    fn discount(&mut self, id: usize, parts: u64) {
        let others = |block: &u64, live: &[ModelRequest]| {
            live.iter()
                .any(|other| other.id != id && other.prompt.contains(block))
        };
        let Some(at) = self.live.iter().position(|live| live.id == id) else {
            return;
        };
        let exclusive = self.live[at]
            .prompt
            .iter()
            .filter(|block| !others(block, &self.live))
            .copied();
        self.discounted
            .extend(exclusive.map(|block| (block, parts)).collect::<Vec<_>>());
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
            .map(|block| self.discounted.get(block).unwrap_or(&PARTS))
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

/// Chains the hashes, so that two are equal only after equal prefixes.
fn chained(locals: &[u64]) -> Vec<u64> {
    let step = |last: &mut u64, local: &u64| {
        *last = *last * 4 + local + 1;
        Some(*last)
    };
    locals.iter().scan(0, step).collect()
}

/// Returns the prompts of a request: one, or two with a shared prefix.
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

/// Returns the distinct blocks of a request.
fn distinct(sequences: &PromptSequences) -> Vec<u64> {
    let blocks: BTreeSet<_> = sequences
        .prompts()
        .iter()
        .flat_map(|prompt| prompt.iter())
        .collect();
    blocks.into_iter().map(|block| block.0).collect()
}

/// Returns the load of the three slots, and the additional blocks of one more request.
fn read(tracker: &Arc<LoadTracker>, sequences: &PromptSequences) -> [(ActiveLoad, u64); 3] {
    let result = tracker.book_with(|view| {
        let additional = view.additional(sequences);
        let row = |slot: u32| {
            let load = view.load(RankSlot(slot), rank(u64::from(slot))).unwrap();
            (load, additional.for_slot(RankSlot(slot)))
        };
        Err::<(_, ()), _>([row(0), row(1), row(2)])
    });
    result.unwrap_err()
}

/// Returns the duration of a prefill in milliseconds, or `None` for an unknown one.
fn millis(pick: u16) -> Option<u64> {
    [None, Some(0), Some(7), Some(100), Some(1000)][usize::from(pick) % 5]
}

/// Returns the fraction for a number, in units of `1 / PARTS`. Rarely returns `None`.
fn parts(pick: u16) -> Option<u64> {
    let eighths = (0..=8).map(|count| count * PARTS / 8);
    let mut all = eighths.chain((1..10).map(|count| count * PARTS / 10));
    all.nth(usize::from(pick) % 22)
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn load_matches_event_log(
        script in vec((0..14u8, 0..3u32, vec(0..3u64, 0..7), 0..100u64, any::<u16>(), 0..10usize), 1..40),
    ) {
        let now = Arc::new(Mutex::new(Instant::now()));
        let start = *now.lock();
        let clock = now.clone();
        let tracker = LoadTracker::new(move || *clock.lock());
        (0..3).for_each(|slot| tracker.join(&member(slot, slot.into(), 1)));
        let mut released = BTreeSet::new();
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
                    let is_booked = true;
                    let request = LoggedRequest { slot, prompt: prompt.clone(), tokens, has_first_token: false, outputs, parts, is_booked };
                    live.insert(id, (book(&tracker, booking), request));
                    log.push(LogEntry::Booked { id, slot, prompt: prompt.clone(), tokens, millis, at });
                }
                (4, Some(id)) => {
                    let (reservation, request) = live.get_mut(&id).unwrap();
                    reservation.on_first_token();
                    request.has_first_token = true;
                    log.push(LogEntry::FirstToken { id, at });
                }
                (5 | 6, Some(id)) => {
                    let parts = parts(pick / 7);
                    let (reservation, request) = live.get_mut(&id).unwrap();
                    reservation.add_output_block(parts.map(|parts| parts as f64 / PARTS as f64));
                    if request.is_booked {
                        request.outputs.push(PARTS);
                        parts.into_iter().for_each(|parts| request.outputs.fill(parts));
                        request.parts = parts.or(request.parts);
                    }
                    log.push(LogEntry::Output { id, parts });
                }
                (7 | 8, Some(id)) => {
                    drop(live.remove(&id));
                    log.push(LogEntry::Released { id, at });
                }
                (9 | 10, _) => *now.lock() += Duration::from_millis(tokens * u64::from(pick % 20)),
                (11..14, Some(id)) => {
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
                    prop_assert_eq!(moved, to.is_some() && !released.contains(&id));
                    if !released.contains(&id) {
                        request.tokens = if request.has_first_token { 0 } else { before.prompt_tokens - cached_tokens };
                        request.is_booked = to.is_some();
                        request.slot = to.unwrap_or(request.slot);
                        log.push(LogEntry::Moved { id, to, request: request.clone(), millis, at });
                    }
                    if to.is_none() {
                        released.insert(id);
                    }
                }
                _ => {}
            }
            let at = (*now.lock() - start).as_millis() as u64;
            let read = read(&tracker, &sequences);
            for slot in 0..3 {
                let model = SlotModel::of(&log, slot);
                prop_assert_eq!(read[slot as usize], (model.load(at), model.additional(&prompt)), "{:?}", log);
            }
        }
        live.clear();
        let idle = |load: &RankLoad| load.active_blocks + load.active_prefill_tokens + load.active_requests == 0;
        prop_assert!(tracker.snapshot().iter().all(idle));
    }
}
