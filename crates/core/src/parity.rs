//! Tokenizer parity: compares warmroute's tokens with those of the engines, per model. If they
//! differ, no cached prefix is ever found, and no error shows it. There are two tests. One compares
//! the responses of workers to canary prompts. The other checks whether the predicted blocks of
//! real requests appear in the events of the worker that computed them. A worker differs at the
//! first failed canary, and agrees again only after a complete round.
//!
//! Both tests are evaluated per worker. A differing worker is never credited with a prefix, so a
//! request reaches it by load only. Workers that agree are compared as usual. If no worker agrees
//! and some differ, hashes are useless, and requests are routed by load or with the engine's own
//! tokens.
//!
//! If only the generation prompt of a worker differs, its tokens agree up to there. All prompts of
//! the model are then known only up to there.
//!
//! Decision 0026.

mod check;
mod verdict;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde::Serialize;

pub use check::{
    BlockEvidence, EventCoverage, ParityCheck, ParityExpectation, PromptObservation, WatchedPrompt,
};
pub use verdict::{
    CanaryVerdict, ComparedItem, EventsVerdict, ModelParity, TokenDifference, WorkerParity,
};

use crate::worker::{ModelName, WorkerId, WorkerRank};

/// Maximum number of concurrent checks per model.
const MAX_RUNNING_CHECKS: usize = 32;

/// Parity of one model, shared by the tests and by their consumers.
#[derive(Debug, Default)]
pub struct ParityStatus {
    tokens_disabled: AtomicBool,
    differing_end_tokens: AtomicUsize,
    /// Reason why the slower `tokenizers` library produces warmroute's tokens.
    slow_reason: Mutex<Option<&'static str>>,
    differing_workers: ArcSwap<BTreeSet<WorkerId>>,
    parity: Mutex<ModelParity>,
    running_checks: AtomicUsize,
    confirmed: AtomicU64,
    unconfirmed: AtomicU64,
    ready_checks: Mutex<Vec<ParityCheck>>,
}

/// Effect of a new result.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ParityChange {
    /// No change of the use of warmroute's tokens.
    None,
    /// The worker differs now, while others agree.
    WorkerDiffers,
    /// The worker no longer differs.
    WorkerAgrees,
    /// Warmroute's tokens are no longer used for the model.
    TokensDisabled,
    /// Warmroute's tokens are used for the model again.
    TokensEnabled,
}

/// Parity of one model on status pages.
#[derive(Clone, Debug, Serialize)]
pub struct ParityReport {
    /// Model name.
    pub model: ModelName,
    /// True if warmroute's tokens are not used.
    pub tokens_disabled: bool,
    /// Reason why the slower `tokenizers` library produces warmroute's tokens. Absent while the
    /// fast tokenizer agrees with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenized_by_library: Option<&'static str>,
    /// Returns the results of the tests.
    #[serde(flatten)]
    pub parity: ModelParity,
    /// Requests whose blocks appeared as predicted.
    pub confirmed: u64,
    /// Requests whose blocks did not appear.
    pub unconfirmed: u64,
}

impl ParityStatus {
    /// Returns true if warmroute's tokens are not used.
    pub fn are_tokens_disabled(&self) -> bool {
        self.tokens_disabled.load(Ordering::Relaxed)
    }

    /// Returns the number of tokens at the end of prompts with a generation prompt that some worker
    /// computes differently. They are not used.
    pub fn differing_end_tokens(&self) -> usize {
        self.differing_end_tokens.load(Ordering::Relaxed)
    }

    /// Returns the results of the tests.
    pub fn parity(&self) -> ModelParity {
        self.parity.lock().clone()
    }

    /// Returns the workers whose tokens are known to differ from warmroute's.
    pub fn differing_workers(&self) -> Arc<BTreeSet<WorkerId>> {
        self.differing_workers.load_full()
    }

    /// Sets the reason why the slower `tokenizers` library produces warmroute's tokens.
    pub fn set_slow_reason(&self, reason: Option<&'static str>) {
        *self.slow_reason.lock() = reason;
    }

    /// Records the result of the canaries on a worker.
    pub fn record_canaries(&self, worker: WorkerId, verdict: CanaryVerdict) -> ParityChange {
        self.update(Some(worker), |parity| {
            parity.record_canaries(worker, verdict)
        })
    }

    /// Removes the results of all other workers.
    pub fn retain(&self, keep: impl Fn(WorkerId) -> bool) -> ParityChange {
        self.update(None, |parity| parity.retain(keep))
    }

    /// Clears the results of the canaries, because warmroute's tokenizer changed or was removed.
    pub fn clear_canaries(&self) -> ParityChange {
        self.update(None, |parity| {
            parity
                .workers
                .values_mut()
                .for_each(|known| known.canaries = CanaryVerdict::Untested)
        })
    }

    /// Clears the results of the events, because they are no longer compared or warmroute's
    /// tokenizer changed.
    pub fn clear_events(&self) -> ParityChange {
        self.update(None, |parity| {
            parity
                .workers
                .values_mut()
                .for_each(|known| known.events = EventsVerdict::default());
        })
    }

    /// Records that a worker may have been replaced by another engine.
    pub fn mark_restarted(&self, worker: WorkerId) {
        // The verdict stays until the next round: a difference is more likely to persist than to
        // vanish.
        self.parity.lock().restarted_workers.insert(worker);
    }

    /// Records the check of a real request on a worker.
    pub fn record_evidence(&self, worker: WorkerId, evidence: BlockEvidence) -> ParityChange {
        match &evidence {
            BlockEvidence::Confirmed => self.confirmed.fetch_add(1, Ordering::Relaxed),
            BlockEvidence::Unconfirmed { .. } => self.unconfirmed.fetch_add(1, Ordering::Relaxed),
        };
        self.update(Some(worker), |parity| {
            parity.record_evidence(worker, evidence)
        })
    }

    /// Records a check that proves nothing, because the worker's events are incomplete.
    fn record_undecided(&self, worker: WorkerId) {
        self.parity
            .lock()
            .workers
            .entry(worker)
            .or_default()
            .events
            .undecided += 1;
    }

    /// Reserves a slot for a check and begins to watch the prompt. Returns `None` if no slot is
    /// free, or there is nothing to check.
    pub fn start_check(
        self: &Arc<Self>,
        rank: WorkerRank,
        watch: impl FnOnce() -> Option<WatchedPrompt>,
    ) -> Option<ParityCheck> {
        let reserved = self.running_checks.fetch_add(1, Ordering::Relaxed) < MAX_RUNNING_CHECKS;
        let prompt = if reserved { watch() } else { None };
        if prompt.is_none() {
            self.running_checks.fetch_sub(1, Ordering::Relaxed);
        }
        Some(ParityCheck::new(self.clone(), rank, prompt?))
    }

    /// Takes the checks whose requests are complete.
    pub fn take_ready_checks(&self) -> Vec<ParityCheck> {
        std::mem::take(&mut self.ready_checks.lock())
    }

    fn update(
        &self,
        worker: Option<WorkerId>,
        change: impl FnOnce(&mut ModelParity),
    ) -> ParityChange {
        let mut parity = self.parity.lock();
        change(&mut parity);
        // Under the lock, so that concurrent results take effect in order.
        let now = parity.are_tokens_disabled();
        self.differing_end_tokens
            .store(parity.differing_end_tokens(), Ordering::Relaxed);
        let differing = parity.differing_workers();
        let is_affected =
            |all: &BTreeSet<WorkerId>| worker.is_some_and(|worker| all.contains(&worker));
        let before = is_affected(&self.differing_workers.load());
        let after = is_affected(&differing);
        if **self.differing_workers.load() != differing {
            self.differing_workers.store(Arc::new(differing));
        }
        match (self.tokens_disabled.swap(now, Ordering::Relaxed), now) {
            (false, true) => ParityChange::TokensDisabled,
            (true, false) => ParityChange::TokensEnabled,
            _ if now || before == after => ParityChange::None,
            _ if after => ParityChange::WorkerDiffers,
            _ => ParityChange::WorkerAgrees,
        }
    }
}

/// Parity of all models.
#[derive(Debug, Default)]
pub struct ParityRegistry {
    models: ArcSwap<HashMap<ModelName, Arc<ParityStatus>>>,
}

impl ParityRegistry {
    /// Returns the status of a model, if it is configured.
    pub fn model_status(&self, model: &ModelName) -> Option<Arc<ParityStatus>> {
        self.models.load().get(model).cloned()
    }

    /// Returns the workers whose tokens are known to differ from warmroute's, for one model or for
    /// any.
    pub fn differing_workers(&self, model: Option<&ModelName>) -> Arc<BTreeSet<WorkerId>> {
        let models = self.models.load();
        match model {
            Some(model) => models
                .get(model)
                .map(|status| status.differing_workers())
                .unwrap_or_default(),
            None => {
                let mut workers = BTreeSet::new();
                for status in models.values() {
                    workers.extend(status.differing_workers().iter());
                }
                Arc::new(workers)
            }
        }
    }

    /// Replaces the configured models.
    pub fn configure(&self, models: impl IntoIterator<Item = (ModelName, Arc<ParityStatus>)>) {
        self.models.store(Arc::new(models.into_iter().collect()));
    }

    /// Returns the reports of all models, sorted by name.
    pub fn reports(&self) -> Vec<ParityReport> {
        let models = self.models.load();
        let report = |(model, status): (&ModelName, &Arc<ParityStatus>)| ParityReport {
            model: model.clone(),
            tokens_disabled: status.are_tokens_disabled(),
            tokenized_by_library: *status.slow_reason.lock(),
            parity: status.parity(),
            confirmed: status.confirmed.load(Ordering::Relaxed),
            unconfirmed: status.unconfirmed.load(Ordering::Relaxed),
        };
        let mut reports: Vec<_> = models.iter().map(report).collect();
        reports.sort_by(|a, b| a.model.cmp(&b.model));
        reports
    }

    /// Returns the statuses of all models.
    pub fn statuses(&self) -> Vec<(ModelName, Arc<ParityStatus>)> {
        self.models
            .load()
            .iter()
            .map(|(model, status)| (model.clone(), status.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests;
