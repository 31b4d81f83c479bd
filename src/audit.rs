//! Did it come true? Every answer that says how much of its prompt its engine found cached is held against what was foreseen
//! when the request was routed. What came as foreseen is counted at once; of the rest the cause is looked for a moment
//! later, when the engine's events of that time have arrived: either they tell what the engine found, or the index was wrong.

mod judge;
mod totals;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use judge::{Cause, Evidence, Foreseen, Said, Told, Verdict, judge};
pub use totals::{ModelTotals, Totals, share};

use crate::block::BlockHashes;
use crate::index::{Overlaps, PrefixIndex};
use crate::metrics::{
    CauseLabels, Metrics, ModelLabel, ModelOutcomeLabels, ModelRoleLabels, ModelTokensLabels,
};
use crate::router::{Mode, Route, Router};
use crate::worker::{BlockSize, ModelName, Slot};

/// How long the events of an engine may take.
const GRACE: Duration = Duration::from_secs(1);

/// Answers that may wait for their events; of more the cause is told by what is known at once.
const MOST_WAITING: usize = 4096;
/// Blocks of their prompts, which are kept so long.
const MOST_BLOCKS: usize = 1 << 20;

/// An answer as it ended.
#[derive(Clone, Debug)]
pub struct Answered {
    /// What was foreseen.
    pub foreseen: Foreseen,
    /// What the engine said.
    pub said: Said,
    /// The prompts of the request, as far as they are known.
    pub prompts: Vec<BlockHashes>,
    /// Whether somebody else served it.
    pub moved: bool,
    /// Tokens per block of the chosen engine, if its events report them.
    engine_block_size: Option<BlockSize>,
    /// Leading blocks of the prompts that the chosen rank held when the answer ended. Read only if the engine found more
    /// than was predicted.
    held_at_end: u64,
}

/// All answers so far.
pub struct Audit {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    totals: Mutex<Totals>,
    waiting: Mutex<Waiting>,
}

/// Answers whose events are on their way.
#[derive(Default)]
struct Waiting {
    answers: VecDeque<(Instant, Answered)>,
    /// Blocks of their prompts.
    blocks: usize,
}

impl Waiting {
    /// Keeps an answer, or gives it back where too many wait.
    fn keep(&mut self, due: Instant, answered: Answered) -> Option<Answered> {
        let blocks = answered.blocks();
        if self.answers.len() >= MOST_WAITING || self.blocks + blocks > MOST_BLOCKS {
            return Some(answered);
        }
        self.blocks += blocks;
        self.answers.push_back((due, answered));
        None
    }

    fn due(&mut self, now: Instant) -> Option<Answered> {
        self.answers.front().filter(|(due, _)| *due <= now)?;
        let (_, answered) = self.answers.pop_front()?;
        self.blocks -= answered.blocks();
        Some(answered)
    }
}

impl Answered {
    /// An answer of the chosen worker.
    pub fn new(foreseen: Foreseen, said: Said, prompts: Vec<BlockHashes>) -> Self {
        Self {
            foreseen,
            said,
            prompts,
            moved: false,
            engine_block_size: None,
            held_at_end: 0,
        }
    }

    /// Sets whether another worker than the chosen one served the answer.
    #[must_use]
    pub fn moved(self, moved: bool) -> Self {
        Self { moved, ..self }
    }

    fn blocks(&self) -> usize {
        self.prompts.iter().map(BlockHashes::len).sum()
    }

    /// The engine found so many blocks of the only prompt cached.
    fn confirm(&self, index: &PrefixIndex, slot: Slot) {
        let (foreseen, said) = (&self.foreseen, self.said);
        let same = match foreseen.mode {
            Mode::Exact => said.prompt == foreseen.prompt,
            mode => mode == Mode::Partial,
        };
        if let ([only], Some(since)) = (
            &self.prompts[..],
            foreseen.since.filter(|_| same && !self.moved),
        ) {
            index.found(
                only,
                (said.cached / foreseen.block_size.tokens() as u64) as usize,
                slot,
                since,
            );
        }
    }

    /// Leading blocks of the prompts that a slot holds now.
    fn held(&self, index: &PrefixIndex, slot: Slot) -> u64 {
        let mut scratch = Overlaps::new();
        let mut holds = |hashes| {
            index.overlaps(hashes, &mut scratch);
            u64::from(scratch.get(slot).total())
        };
        self.prompts.iter().map(&mut holds).sum()
    }

    /// Tokens that an engine with smaller blocks may find beyond the whole predicted blocks, over all prompts.
    fn rounding(&self) -> u64 {
        let ours = self.foreseen.block_size.tokens();
        let rest = self
            .engine_block_size
            .map_or(0, |engine| ours.saturating_sub(engine.tokens()));
        rest as u64 * self.prompts.len() as u64
    }

    /// Whether the chosen one's events tell what its engine found. What was missing was computed and stored again, so it is
    /// held now in any case: but not all the time, if it was told to be gone.
    fn told(&self, index: &PrefixIndex, slot: Slot) -> Told {
        let foreseen = &self.foreseen;
        let Some(since) = foreseen.since else {
            return Told::No;
        };
        let size = foreseen.block_size.tokens() as u64;
        let (found, captured) = (self.said.cached / size, foreseen.captured / size);
        let held = self.held(index, slot);
        if found > captured {
            // Blocks that another request stored may have been evicted since.
            return Told::from(held.max(self.held_at_end) >= found);
        }
        if held < captured {
            return Told::Yes;
        }
        let told = self.prompts.iter().map(|hashes| {
            let foreseen = if self.prompts.len() == 1 {
                captured as usize
            } else {
                hashes.len()
            };
            index
                .regained_since(hashes, foreseen, slot, since)
                .map_or(Told::Forgotten, Told::from)
        });
        told.max().unwrap_or_default()
    }
}

impl Audit {
    /// Nothing heard yet.
    pub fn new(router: Arc<Router>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self {
            router,
            metrics,
            totals: Mutex::default(),
            waiting: Mutex::default(),
        })
    }

    /// Returns the prediction for the worker rank that computes the prompt, with the event position of that rank.
    pub fn foresee(&self, route: &Route) -> Foreseen {
        let rank = route.computed_by().rank;
        let slot = self.router.fleet().slot(rank);
        let since = slot.and_then(|slot| self.router.index().moment(slot));
        Foreseen::of(route, self.router.role_of(rank), since)
    }

    /// Counts the cached tokens that the worker reported.
    pub fn count_delivered_tokens(&self, foreseen: &Foreseen, said: Said) {
        let labels = ModelRoleLabels::new(&foreseen.model, foreseen.role);
        // The reported number is not trusted, because a counter cannot be decreased.
        let most = said.prompt.min(judge::LONGEST);
        self.metrics
            .delivered_cached_tokens
            .get_or_create(&labels)
            .inc_by(said.cached.min(most));
    }

    /// An answer ended and said what it found cached.
    pub fn answered(&self, mut answered: Answered, now: Instant) {
        let rank = answered.foreseen.chosen;
        answered.engine_block_size = self.router.trust(rank).engine_block_size;
        if let Some(slot) = self.router.fleet().slot(rank) {
            answered.confirm(self.router.index(), slot);
            if answered.said.cached > answered.foreseen.captured {
                answered.held_at_end = answered.held(self.router.index(), slot);
            }
        }
        let answered = if judge::needs_events(&answered.foreseen, answered.said) && !answered.moved
        {
            self.waiting.lock().keep(now + GRACE, answered)
        } else {
            Some(answered)
        };
        answered
            .into_iter()
            .for_each(|answered| self.settle(&answered));
    }

    /// An answer ended well and did not say what it found cached.
    pub fn silent(&self, model: &ModelName, said_usage: bool) {
        let outcome = if said_usage { "no_details" } else { "no_usage" };
        self.totals.lock().of(model).silent(said_usage);
        self.metrics
            .audit_answers
            .get_or_create(&ModelOutcomeLabels::new(model, outcome))
            .inc();
    }

    /// Counts a successful response whose prompt another worker computed, if warmroute did not receive the cache report of that
    /// worker.
    pub fn count_undecided(&self, model: &ModelName) {
        self.totals.lock().of(model).undecided += 1;
        self.metrics
            .audit_answers
            .get_or_create(&ModelOutcomeLabels::new(model, "undecided"))
            .inc();
    }

    /// Looks for the causes that are due.
    pub fn look(&self, now: Instant) {
        let due = || self.waiting.lock().due(now);
        while let Some(answered) = due() {
            self.settle(&answered);
        }
    }

    /// The sums by model, and how many answers wait for their causes.
    pub fn totals(&self) -> Totals {
        let waiting = self.waiting.lock().answers.len();
        let mut totals = self.totals.lock().clone();
        totals.waiting = waiting as u64;
        totals
    }

    fn settle(&self, answered: &Answered) {
        let needed = judge::needs_events(&answered.foreseen, answered.said) && !answered.moved;
        let slot = self
            .router
            .fleet()
            .slot(answered.foreseen.chosen)
            .filter(|_| needed);
        let told = match self.router.is_remote() {
            // Whoever keeps the index hears of the events, and is not asked again for the sake of a cause.
            true => Told::Forgotten,
            false => slot.map_or(Told::No, |slot| answered.told(self.router.index(), slot)),
        };
        let evidence = Evidence {
            told,
            moved: answered.moved,
            rounding: answered.rounding(),
        };
        let verdict = judge(&answered.foreseen, answered.said, evidence);
        self.count(&verdict);
        self.totals.lock().of(&verdict.model).add(&verdict);
    }

    fn count(&self, verdict: &Verdict) {
        let metrics = &self.metrics;
        let model = verdict.model.as_str();
        let tokens = [
            ("prompt", verdict.prompt),
            ("available", verdict.available),
            ("captured", verdict.captured),
            ("by_chance", verdict.by_chance),
            ("delivered", verdict.delivered),
        ];
        for (kind, count) in tokens {
            metrics
                .audit_tokens
                .get_or_create(&ModelTokensLabels {
                    model: model.to_owned(),
                    kind,
                })
                .inc_by(count);
        }
        for &(cause, count) in &verdict.missed {
            metrics
                .audit_missed_tokens
                .get_or_create(&CauseLabels::new(model, cause.as_str()))
                .inc_by(count);
        }
        let outcome = verdict.outcome();
        metrics
            .audit_answers
            .get_or_create(&ModelOutcomeLabels::new(&verdict.model, outcome))
            .inc();
        if !verdict.foreseen {
            return;
        }
        if let Some((blocks, cause)) = verdict.error {
            let by_sign = match blocks {
                ..0 => Some(&metrics.audit_over_predicted_blocks),
                0 => None,
                1.. => Some(&metrics.audit_under_predicted_blocks),
            };
            if let Some(family) = by_sign {
                family
                    .get_or_create(&ModelLabel::from(&verdict.model))
                    .observe(blocks.unsigned_abs() as f64);
            }
            metrics
                .audit_errors
                .get_or_create(&CauseLabels::new(model, cause.as_str()))
                .inc();
        }
    }
}

#[cfg(test)]
mod tests;
