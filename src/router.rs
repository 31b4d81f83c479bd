//! The answer to one request. [`Router::route`] reads three pieces of state, costs the candidates and books the winner
//! in one critical section; it never waits and never fails for a reason that Envoy could not route around. What it
//! returns is a [`Route`] (where to go, and why) and a reservation, whose drop releases the load.

mod answer;

use std::collections::HashSet;
use std::iter;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use arc_swap::ArcSwap;
use dashmap::DashSet;
use parking_lot::Mutex;
use rand::SeedableRng;
use rand::rngs::SmallRng;

pub use answer::{Destination, Mode, Prompt, Reason, Route, RouteError, RouteRequest, Steer};

use crate::block::SequenceHash;
use crate::fleet::{Fleet, Member};
use crate::index::{Overlaps, PrefixIndex, TierBlocks};
use crate::load::{Booking, LoadTracker, LoadView, Reservation, Until};
use crate::schedule::{self, Candidate, Choice, Question, Weights};
use crate::worker::{BlockSize, ModelName, Role, WorkerRank};

/// Tables of overlaps that are kept to be used again.
const MOST_SCRATCH: usize = 64;

/// Prompts of one request whose blocks are looked for among the live requests' blocks. That happens for every candidate
/// while nobody else can book; the blocks of further prompts count as new.
const MOST_SEARCHED: usize = 256;

/// The three pieces of state and the weights.
pub struct Router {
    fleet: ArcSwap<Fleet>,
    index: Arc<PrefixIndex>,
    load: Arc<LoadTracker>,
    weights: ArcSwap<Weights>,
    live: DashSet<WorkerRank>,
    random: Mutex<SmallRng>,
    scratch: Mutex<Vec<Overlaps>>,
}

impl Router {
    /// A router with an empty fleet. `seed` makes the choice between ties repeatable.
    pub fn new(index: Arc<PrefixIndex>, load: Arc<LoadTracker>, weights: Weights, seed: u64) -> Self {
        Self {
            fleet: ArcSwap::from_pointee(Fleet::empty()),
            index,
            load,
            weights: ArcSwap::from_pointee(weights),
            live: DashSet::new(),
            random: Mutex::new(SmallRng::seed_from_u64(seed)),
            scratch: Mutex::new(Vec::new()),
        }
    }

    /// The fleet at this instant.
    pub fn fleet(&self) -> Arc<Fleet> {
        self.fleet.load_full()
    }

    /// Puts another fleet in its place.
    pub fn publish(&self, fleet: Arc<Fleet>) {
        self.fleet.store(fleet);
    }

    /// The prefix index.
    pub fn index(&self) -> &Arc<PrefixIndex> {
        &self.index
    }

    /// The load table.
    pub fn load(&self) -> &Arc<LoadTracker> {
        &self.load
    }

    /// Notes whether the event source of a worker rank has caught up.
    pub fn set_live(&self, rank: WorkerRank, live: bool) {
        if live {
            self.live.insert(rank);
        } else {
            self.live.remove(&rank);
        }
    }

    /// Chooses a worker rank and books the request there.
    pub fn route(&self, request: &RouteRequest) -> Result<(Route, Reservation), RouteError> {
        let fleet = self.fleet.load();
        if fleet.is_empty() {
            return Err(RouteError::NoFleet);
        }
        let members = eligible(&fleet, request.model.as_ref());
        let first = members.first().ok_or(RouteError::NoCandidate)?;
        let started = Instant::now();
        let overlaps = self.overlaps(&request.prompt);
        let index_time = started.elapsed();
        let Blocks { sequences, stretches, complete } = blocks(&request.prompt);
        let decision = Decision {
            question: Question {
                tracked_blocks: complete,
                ..Question::new(prompt_tokens(&request.prompt), first.worker.block_size)
            },
            sequences,
            stretches,
            overlaps: &overlaps,
            members: &members,
        };
        let booked = self.choose_and_book(&decision, &request.prompt);
        let choose_time = started.elapsed().saturating_sub(index_time);
        let result = booked.map(|(mut route, reservation)| {
            route.index_time = index_time;
            route.choose_time = choose_time;
            (route, reservation)
        });
        let mut scratch = self.scratch.lock();
        scratch.extend(overlaps.into_iter().map(|looked| looked.table));
        // A request may hold thousands of prompts; their tables are not kept for ever.
        scratch.truncate(MOST_SCRATCH);
        drop(scratch);
        result
    }

    /// The critical section is only costing and booking; the account of it is written afterwards.
    fn choose_and_book(&self, decision: &Decision<'_>, prompt: &Prompt) -> Result<(Route, Reservation), RouteError> {
        let weights = self.weights.load();
        let mut chosen = None;
        let reservation = self.load.book_with(|view| {
            let (members, candidates) = decision.candidates(view);
            let choice = schedule::choose(&decision.question, &candidates, &weights, &mut *self.random.lock())
                .ok_or(RouteError::NoCandidate)?;
            let member = members[choice.index];
            let booking = Booking {
                slot: member.slot,
                rank: member.rank,
                sequences: decision.sequences.clone(),
                prompt_tokens: decision.question.prompt_tokens,
                cached_tokens: decision.cached_tokens(member, false),
                track_prefill: decision.question.track_prefill,
                prefill_time: None,
                until: Until::End,
            };
            chosen = Some((member, choice));
            Ok(vec![booking])
        })?;
        let (member, choice) = chosen.ok_or(RouteError::NoCandidate)?;
        Ok((self.describe(decision, prompt, member, choice), reservation))
    }

    fn describe(&self, decision: &Decision<'_>, prompt: &Prompt, member: &Member, choice: Choice) -> Route {
        let members = decision.members;
        let reason = match prompt {
            Prompt::Estimated { because, .. } => Some(*because),
            Prompt::Hashed(_) if members.iter().any(|member| self.live.contains(&member.rank)) => None,
            Prompt::Hashed(_) => Some(Reason::IndexCold),
        };
        let cached = |member: &&Member| decision.cached_tokens(member, true);
        Route {
            to: Destination {
                rank: member.rank,
                endpoint: member.worker.endpoint,
                several_ranks: member.worker.ranks.size.get() > 1,
            },
            mode: if reason.is_none() { Mode::Exact } else { Mode::LoadOnly },
            reason,
            model: member.worker.model.clone(),
            prompt_tokens: decision.question.prompt_tokens,
            prompt_blocks: decision.question.tracked_blocks,
            overlap: decision.overlap(member),
            predicted_cached_tokens: cached(&member),
            best_cached_tokens: members.iter().map(cached).max().unwrap_or(0),
            candidates: members.len(),
            choice,
            index_time: Duration::ZERO,
            choose_time: Duration::ZERO,
        }
    }

    /// One table of overlaps per prompt, in tables that are used again.
    fn overlaps(&self, prompt: &Prompt) -> Vec<Looked> {
        let Prompt::Hashed(prompts) = prompt else { return Vec::new() };
        prompts
            .iter()
            .map(|hashes| {
                let mut table = self.scratch.lock().pop().unwrap_or_default();
                self.index.overlaps(hashes, &mut table);
                Looked { table, tokens: hashes.tokens(), block_size: hashes.block_size() }
            })
            .collect()
    }
}

/// The overlaps of one prompt and what is needed to read them as tokens.
struct Looked {
    table: Overlaps,
    tokens: usize,
    block_size: BlockSize,
}

/// Everything one choice looks at, beside the load.
struct Decision<'a> {
    question: Question,
    sequences: Arc<[SequenceHash]>,
    stretches: Vec<Range<usize>>,
    overlaps: &'a [Looked],
    members: &'a [&'a Member],
}

impl<'a> Decision<'a> {
    /// The members whose slot is still theirs, with their costs' inputs.
    fn candidates(&self, view: &LoadView<'_>) -> (Vec<&'a Member>, Vec<Candidate>) {
        let candidate = |member: &'a Member| {
            let load = view.load(member.slot, member.rank)?;
            let candidate = Candidate {
                slot: member.slot,
                rank: member.rank,
                overlap: self.overlap(member),
                load,
                additional_blocks: self.additional_blocks(view, member),
                preference: 0.0,
            };
            Some((member, candidate))
        };
        self.members.iter().copied().filter_map(candidate).unzip()
    }

    fn additional_blocks(&self, view: &LoadView<'_>, member: &Member) -> u64 {
        let of_stretch = |stretch: &Range<usize>| view.additional_blocks(member.slot, &self.sequences[stretch.clone()]);
        let (searched, others) = self.stretches.split_at(self.stretches.len().min(MOST_SEARCHED));
        searched.iter().map(of_stretch).sum::<u64>() + others.iter().map(|stretch| stretch.len() as u64).sum::<u64>()
    }

    fn overlap(&self, member: &Member) -> TierBlocks {
        self.overlaps.iter().fold(TierBlocks::default(), |sum, looked| sum.plus(looked.table.get(member.slot)))
    }

    /// Cached prompt tokens on a member; `as_reported` leaves the last token to the engine, which always computes it.
    fn cached_tokens(&self, member: &Member, as_reported: bool) -> u64 {
        let of_prompt = |looked: &Looked| {
            let size = looked.block_size.tokens();
            let held = looked.table.get(member.slot).total() as usize;
            let most = if as_reported { looked.tokens.saturating_sub(1) / size } else { usize::MAX };
            (held.min(most) * size) as u64
        };
        self.overlaps.iter().map(of_prompt).sum()
    }
}

/// Members that serve the model and decode.
fn eligible<'a>(fleet: &'a Fleet, model: Option<&ModelName>) -> Vec<&'a Member> {
    let decodes = |member: &&Member| member.worker.role != Role::Prefill;
    match model {
        Some(model) => fleet.serving(model).iter().filter_map(|slot| fleet.member(*slot)).filter(decodes).collect(),
        None => fleet.members().filter(decodes).collect(),
    }
}

fn prompt_tokens(prompt: &Prompt) -> u64 {
    match prompt {
        Prompt::Hashed(prompts) => prompts.iter().map(|hashes| hashes.tokens() as u64).sum(),
        Prompt::Estimated { tokens, .. } => *tokens,
    }
}

/// The complete blocks of a request.
struct Blocks {
    /// Each once, however many of the prompts begin with it.
    sequences: Arc<[SequenceHash]>,
    /// Which of them follow one another: what each prompt adds to those before it. Only within such a stretch does
    /// whoever holds a block hold all before it.
    stretches: Vec<Range<usize>>,
    /// How many the prompts have together.
    complete: u64,
}

fn blocks(prompt: &Prompt) -> Blocks {
    let prompts = match prompt {
        Prompt::Hashed(prompts) => prompts.as_slice(),
        Prompt::Estimated { .. } => &[],
    };
    let complete = prompts.iter().map(|hashes| hashes.len() as u64).sum();
    if let [only] = prompts {
        return Blocks { sequences: only.sequences().into(), stretches: iter::once(0..only.len()).collect(), complete };
    }
    let mut seen = HashSet::new();
    let mut sequences = Vec::new();
    let mut stretches = Vec::new();
    for hashes in prompts {
        let start = sequences.len();
        sequences.extend(hashes.sequences().iter().copied().filter(|sequence| seen.insert(*sequence)));
        if sequences.len() > start {
            stretches.push(start..sequences.len());
        }
    }
    Blocks { sequences: sequences.into(), stretches, complete }
}

#[cfg(test)]
mod tests;
