//! Did it come true? Every answer that says how much of its prompt its engine found cached is held against what was foreseen
//! when the request was routed. What came as foreseen is counted at once; of the rest the cause is looked for a moment
//! later, when the engine's events of that time have arrived.

mod judge;
mod totals;

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

pub use judge::{Cause, Evidence, Foreseen, Said, Verdict, judge};
pub use totals::{ModelTotals, Totals, share};

use crate::metrics::{CauseLabels, Metrics, ModelLabel, ModelOutcomeLabels, ModelTokensLabels};
use crate::router::Router;
use crate::trust::Trust;
use crate::worker::ModelName;

/// How long the events of an engine may take.
const GRACE: Duration = Duration::from_secs(1);

/// Answers that may wait for their events; of more the cause is told by what is known at once.
const MOST_WAITING: usize = 4096;

/// An answer as it ended.
#[derive(Clone, Debug)]
pub struct Answered {
    /// What was foreseen.
    pub foreseen: Foreseen,
    /// What the engine said.
    pub said: Said,
    /// When the request came.
    pub arrived: Instant,
    /// Whether somebody else served it.
    pub moved: bool,
}

/// All answers so far.
pub struct Audit {
    router: Arc<Router>,
    metrics: Arc<Metrics>,
    totals: Mutex<Totals>,
    waiting: Mutex<VecDeque<(Instant, Answered)>>,
}

impl Audit {
    /// Nothing heard yet.
    pub fn new(router: Arc<Router>, metrics: Arc<Metrics>) -> Arc<Self> {
        Arc::new(Self { router, metrics, totals: Mutex::default(), waiting: Mutex::default() })
    }

    /// An answer ended and said what it found cached.
    pub fn answered(&self, answered: Answered, now: Instant) {
        let certain = judge::is_as_foreseen(&answered.foreseen, answered.said) && !answered.moved;
        if !certain {
            let mut waiting = self.waiting.lock();
            if waiting.len() < MOST_WAITING {
                waiting.push_back((now + GRACE, answered));
                return;
            }
        }
        self.settle(&answered);
    }

    /// An answer ended well and did not say what it found cached.
    pub fn silent(&self, model: &ModelName, said_usage: bool) {
        let outcome = if said_usage { "no_details" } else { "no_usage" };
        self.totals.lock().of(model).silent(said_usage);
        self.metrics.audit_answers.get_or_create(&ModelOutcomeLabels::new(model, outcome)).inc();
    }

    /// Looks for the causes that are due.
    pub fn look(&self, now: Instant) {
        loop {
            let due = {
                let mut waiting = self.waiting.lock();
                let due = waiting.front().is_some_and(|(due, _)| *due <= now);
                if due { waiting.pop_front() } else { None }
            };
            let Some((_, answered)) = due else { return };
            self.settle(&answered);
        }
    }

    /// The sums by model, and how many answers wait for their causes.
    pub fn totals(&self) -> Totals {
        let waiting = self.waiting.lock().len();
        let mut totals = self.totals.lock().clone();
        totals.waiting = waiting as u64;
        totals
    }

    fn settle(&self, answered: &Answered) {
        let chosen = answered.foreseen.chosen;
        let churn = self.router.churn(chosen);
        let evidence = Evidence {
            trusted: [answered.foreseen.trust, self.router.trust(chosen).trust] == [Trust::Exact; 2],
            removed: churn.as_ref().is_some_and(|churn| churn.removed_since(answered.arrived)),
            stored: churn.as_ref().is_some_and(|churn| churn.stored_since(answered.arrived)),
            moved: answered.moved,
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
            metrics.audit_tokens.get_or_create(&ModelTokensLabels { model: model.to_owned(), kind }).inc_by(count);
        }
        for &(cause, count) in &verdict.missed {
            metrics.audit_missed_tokens.get_or_create(&CauseLabels::new(model, cause.as_str())).inc_by(count);
        }
        let outcome = verdict.outcome();
        metrics.audit_answers.get_or_create(&ModelOutcomeLabels::new(&verdict.model, outcome)).inc();
        if !verdict.foreseen {
            return;
        }
        let blocks = verdict.error.map_or(0, |(blocks, _)| blocks);
        metrics.audit_error_blocks.get_or_create(&ModelLabel::from(&verdict.model)).observe(blocks as f64);
        if let Some((_, cause)) = verdict.error {
            metrics.audit_errors.get_or_create(&CauseLabels::new(model, cause.as_str())).inc();
        }
    }
}

#[cfg(test)]
mod tests;
