//! Whether our tokens are the engines' tokens, per model, and what follows from it. A router that tokenises otherwise than
//! the engine finds nothing in any cache and nobody notices, so there are two proofs: what workers answer to a set of
//! canaries, and whether the blocks that were predicted for real requests appear in the events of who computed them.
//! Whoever differs differs at the first proof, and agrees again only after a whole round.
//!
//! As long as one worker agrees the model's tokens are believed: the blocks of a worker that differs are other blocks, so it
//! is never credited with a prefix it does not have. Where nobody agrees, hashes are worth nothing, and requests go by load
//! or with the engine's own tokens.

mod sighting;
mod verdict;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use arc_swap::ArcSwap;
use parking_lot::Mutex;
use serde::Serialize;

pub use sighting::{Evidence, Foretold, Sighting};
pub use verdict::{Difference, EventsVerdict, ModelParity, Verdict, What};

use crate::block::BlockHashes;
use crate::worker::{ModelName, WorkerId, WorkerRank};

/// Requests of one model that are looked after at a time.
const MOST_SIGHTINGS: usize = 32;

/// What is known of one model; shared by those who find out and those who believe it.
#[derive(Debug, Default)]
pub struct Standing {
    mistrusted: AtomicBool,
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

    /// A worker's answers were compared.
    pub fn tested(&self, worker: WorkerId, verdict: Verdict) -> Change {
        self.change(|parity| parity.tested(worker, verdict))
    }

    /// Whether canaries showed that a worker makes other tokens than we do, where others do not.
    pub fn is_known_to_differ(&self, worker: WorkerId) -> bool {
        !self.is_mistrusted() && matches!(self.parity.lock().workers.get(&worker), Some(Verdict::Differs { .. }))
    }

    /// These workers are all there are; what was found out of others is forgotten.
    pub fn retain(&self, keep: impl Fn(WorkerId) -> bool) -> Change {
        self.change(|parity| parity.workers.retain(|worker, _| keep(*worker)))
    }

    /// Events are not compared any more.
    pub fn forget_events(&self) -> Change {
        self.change(|parity| parity.events = EventsVerdict::default())
    }

    /// A worker may be another engine than before.
    pub fn restarted(&self, worker: WorkerId) {
        // It keeps its verdict until the next round: what was wrong before is more likely wrong than right.
        self.parity.lock().doubted.insert(worker);
    }

    /// A real request's blocks were looked for.
    pub fn seen(&self, evidence: Evidence) -> Change {
        match &evidence {
            Evidence::Confirmed => self.confirmed.fetch_add(1, Ordering::Relaxed),
            Evidence::Unconfirmed { .. } => self.unconfirmed.fetch_add(1, Ordering::Relaxed),
        };
        self.change(|parity| parity.events.note(evidence))
    }

    /// A place for one more request to be looked after, if there is any.
    pub fn sighting(self: &Arc<Self>, rank: WorkerRank, hashes: BlockHashes, stores: u64) -> Option<Sighting> {
        if self.sightings.fetch_add(1, Ordering::Relaxed) >= MOST_SIGHTINGS {
            self.sightings.fetch_sub(1, Ordering::Relaxed);
            return None;
        }
        Some(Sighting::new(self.clone(), (rank, hashes), stores))
    }

    /// The requests that have been answered and are to be looked after.
    pub fn take_ready(&self) -> Vec<Sighting> {
        std::mem::take(&mut self.ready.lock())
    }

    fn change(&self, by: impl FnOnce(&mut ModelParity)) -> Change {
        let mut parity = self.parity.lock();
        by(&mut parity);
        // Under the lock, so that two findings are believed in the order in which they came.
        let now = parity.is_mistrusted();
        match (self.mistrusted.swap(now, Ordering::Relaxed), now) {
            (false, true) => Change::Mistrusted,
            (true, false) => Change::Trusted,
            _ => Change::None,
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
        self.models.load().iter().map(|(model, standing)| (model.clone(), standing.clone())).collect()
    }
}

#[cfg(test)]
mod tests;
