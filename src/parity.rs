//! Whether our tokens are the engines' tokens, per model, and what follows from it. A router that tokenises otherwise than
//! the engine finds nothing in any cache and nobody notices, so there are two proofs: what workers answer to a set of
//! canaries, and whether the blocks that were predicted for real requests appear in the events of who computed them.
//! Whoever differs differs at the first proof, and agrees again only after a whole round.
//!
//! Both are kept worker by worker. A worker that differs is never credited with a prefix, and a request that goes to it goes
//! by load, while those who agree are compared as ever. Where nobody agrees and somebody differs, hashes are worth nothing,
//! and requests go by load or with the engine's own tokens.

mod sighting;
mod verdict;

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde::Serialize;

pub use sighting::{Evidence, Foretold, PromptCheck, Sighting, Told, WatchedPrompt};
pub use verdict::{Difference, EventsVerdict, ModelParity, Verdict, What, WorkerParity};

use crate::worker::{ModelName, WorkerId, WorkerRank};

/// Requests of one model that are looked after at a time.
const MOST_SIGHTINGS: usize = 32;

/// What is known of one model; shared by those who find out and those who believe it.
#[derive(Debug, Default)]
pub struct Standing {
    mistrusted: AtomicBool,
    /// Why the tokenizers library makes our tokens.
    slow: Mutex<Option<&'static str>>,
    differing: ArcSwap<BTreeSet<WorkerId>>,
    parity: Mutex<ModelParity>,
    sightings: AtomicUsize,
    confirmed: AtomicU64,
    unconfirmed: AtomicU64,
    ready: Mutex<Vec<Sighting>>,
}

/// What a new finding changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// Our tokens are as believed as before.
    None,
    /// That worker makes others, while somebody makes ours.
    Differs,
    /// It does not any more.
    Agrees,
    /// They are believed no longer.
    Mistrusted,
    /// They are believed again.
    Trusted,
}

/// One model on the pages.
#[derive(Clone, Debug, Serialize)]
pub struct Shown {
    /// Which model.
    pub model: ModelName,
    /// Whether our own tokens are not believed now.
    pub mistrusted: bool,
    /// Why the tokenizers library makes our tokens, many times slower; nothing while the fast way agrees with it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenized_by_library: Option<&'static str>,
    /// What was found out.
    #[serde(flatten)]
    pub parity: ModelParity,
    /// Requests whose blocks appeared as predicted.
    pub confirmed: u64,
    /// Requests whose blocks did not.
    pub unconfirmed: u64,
}

impl Standing {
    /// Whether our own tokens are not believed now.
    pub fn is_mistrusted(&self) -> bool {
        self.mistrusted.load(Ordering::Relaxed)
    }

    /// What was found out.
    pub fn parity(&self) -> ModelParity {
        self.parity.lock().clone()
    }

    /// The workers whose tokens are known to be others than ours.
    pub fn differing(&self) -> Arc<BTreeSet<WorkerId>> {
        self.differing.load_full()
    }

    /// Why the tokenizers library makes our tokens, or that it does not.
    pub fn tokenized(&self, slow_because: Option<&'static str>) {
        *self.slow.lock() = slow_because;
    }

    /// A worker's answers were compared.
    pub fn tested(&self, worker: WorkerId, verdict: Verdict) -> Change {
        self.change(Some(worker), |parity| parity.tested(worker, verdict))
    }

    /// These workers are all there are; what was found out of others is forgotten.
    pub fn retain(&self, keep: impl Fn(WorkerId) -> bool) -> Change {
        self.change(None, |parity| parity.retain(keep))
    }

    /// Other tokens of ours are to be compared, or none: what answers to canaries said is forgotten.
    pub fn forget_canaries(&self) -> Change {
        self.change(None, |parity| {
            parity
                .workers
                .values_mut()
                .for_each(|known| known.canaries = Verdict::Untested)
        })
    }

    /// Events are not compared any more, or told of other tokens of ours.
    pub fn forget_events(&self) -> Change {
        self.change(None, |parity| {
            parity
                .workers
                .values_mut()
                .for_each(|known| known.events = EventsVerdict::default());
        })
    }

    /// A worker may be another engine than before.
    pub fn restarted(&self, worker: WorkerId) {
        // It keeps its verdict until the next round: what was wrong before is more likely wrong than right.
        self.parity.lock().doubted.insert(worker);
    }

    /// The blocks of a real request to a worker were looked for.
    pub fn seen(&self, worker: WorkerId, evidence: Evidence) -> Change {
        match &evidence {
            Evidence::Confirmed => self.confirmed.fetch_add(1, Ordering::Relaxed),
            Evidence::Unconfirmed { .. } => self.unconfirmed.fetch_add(1, Ordering::Relaxed),
        };
        self.change(Some(worker), |parity| parity.seen(worker, evidence))
    }

    /// Blocks of a request to a worker were missing whose events do not tell all, so that it proves nothing.
    fn undecided(&self, worker: WorkerId) {
        self.parity
            .lock()
            .workers
            .entry(worker)
            .or_default()
            .events
            .undecided += 1;
    }

    /// Reserves a slot for one more checked request and begins to watch its prompt. Returns `None` if no slot is free, or there
    /// is nothing to check.
    pub fn sighting(
        self: &Arc<Self>,
        rank: WorkerRank,
        watch: impl FnOnce() -> Option<WatchedPrompt>,
    ) -> Option<Sighting> {
        let reserved = self.sightings.fetch_add(1, Ordering::Relaxed) < MOST_SIGHTINGS;
        let prompt = if reserved { watch() } else { None };
        if prompt.is_none() {
            self.sightings.fetch_sub(1, Ordering::Relaxed);
        }
        Some(Sighting::new(self.clone(), rank, prompt?))
    }

    /// The requests that have been answered and are to be looked after.
    pub fn take_ready(&self) -> Vec<Sighting> {
        std::mem::take(&mut self.ready.lock())
    }

    fn change(&self, worker: Option<WorkerId>, by: impl FnOnce(&mut ModelParity)) -> Change {
        let mut parity = self.parity.lock();
        by(&mut parity);
        // Under the lock, so that two findings are believed in the order in which they came.
        let (now, differing) = (parity.is_mistrusted(), parity.differing());
        let among = |all: &BTreeSet<WorkerId>| worker.is_some_and(|worker| all.contains(&worker));
        let (before, after) = (among(&self.differing.load()), among(&differing));
        if **self.differing.load() != differing {
            self.differing.store(Arc::new(differing));
        }
        match (self.mistrusted.swap(now, Ordering::Relaxed), now) {
            (false, true) => Change::Mistrusted,
            (true, false) => Change::Trusted,
            _ if now || before == after => Change::None,
            _ if after => Change::Differs,
            _ => Change::Agrees,
        }
    }
}

/// What is known of all models.
#[derive(Debug, Default)]
pub struct Parity {
    models: ArcSwap<HashMap<ModelName, Arc<Standing>>>,
}

impl Parity {
    /// The standing of a model, if it is configured.
    pub fn of(&self, model: &ModelName) -> Option<Arc<Standing>> {
        self.models.load().get(model).cloned()
    }

    /// The workers whose tokens of a model, or of any, are known to be others than ours.
    pub fn differing(&self, model: Option<&ModelName>) -> Arc<BTreeSet<WorkerId>> {
        let models = self.models.load();
        match model {
            Some(model) => models
                .get(model)
                .map(|standing| standing.differing())
                .unwrap_or_default(),
            None => Arc::new(
                models
                    .values()
                    .flat_map(|standing| standing.differing().iter().copied().collect::<Vec<_>>())
                    .collect(),
            ),
        }
    }

    /// These models are configured from now on; what is known of those that stay is kept.
    pub fn configure(&self, models: impl IntoIterator<Item = (ModelName, Arc<Standing>)>) {
        self.models.store(Arc::new(models.into_iter().collect()));
    }

    /// Everything, by name.
    pub fn shown(&self) -> Vec<Shown> {
        let models = self.models.load();
        let one = |(model, standing): (&ModelName, &Arc<Standing>)| Shown {
            model: model.clone(),
            mistrusted: standing.is_mistrusted(),
            tokenized_by_library: *standing.slow.lock(),
            parity: standing.parity(),
            confirmed: standing.confirmed.load(Ordering::Relaxed),
            unconfirmed: standing.unconfirmed.load(Ordering::Relaxed),
        };
        let mut shown: Vec<_> = models.iter().map(one).collect();
        shown.sort_by(|a, b| a.model.cmp(&b.model));
        shown
    }

    /// All standings.
    pub fn standings(&self) -> Vec<(ModelName, Arc<Standing>)> {
        self.models
            .load()
            .iter()
            .map(|(model, standing)| (model.clone(), standing.clone()))
            .collect()
    }
}

#[cfg(test)]
mod tests;
