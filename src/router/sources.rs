//! How far the event source of each worker rank is believed. Standings change rarely and are read by every decision, so they
//! lie in a table that is replaced whole: one decision sees one table from its look-up to its explanation.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use dashmap::DashMap;
use parking_lot::Mutex;

use crate::learned::{Agreed, Learned, Mismatch};
use crate::trust::{Facts, Source, Standing};
use crate::worker::{ModelName, WorkerId, WorkerRank};

/// An event source that several parts tell what happened to it.
pub type SharedSource = Arc<Mutex<Source>>;

/// All event sources.
#[derive(Debug, Default)]
pub struct Sources {
    table: ArcSwap<Trusted>,
    watched: DashMap<WorkerRank, SharedSource>,
    learned: ArcSwap<AllLearned>,
    agreed: SharedAgreed,
}

/// What all engines of each model say alike.
pub type SharedAgreed = Arc<ArcSwap<HashMap<ModelName, Agreed>>>;

/// What engines say of themselves, and where it is configured otherwise.
pub type AllLearned = BTreeMap<WorkerId, (Learned, Vec<Mismatch>)>;

/// The standing of every rank that has a source. Looked at for every candidate of every decision, hence the quicker hash;
/// names of workers are not the clients' to choose.
#[derive(Clone, Debug, Default)]
pub(super) struct Trusted(hashbrown::HashMap<WorkerRank, Standing>);

impl Trusted {
    pub(super) fn standing(&self, rank: WorkerRank) -> Standing {
        self.0.get(&rank).copied().unwrap_or_default()
    }
}

impl Trusted {
    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerRank, Standing)> {
        self.0.iter().map(|(rank, standing)| (*rank, *standing))
    }
}

impl FromIterator<(WorkerRank, Standing)> for Trusted {
    fn from_iter<T: IntoIterator<Item = (WorkerRank, Standing)>>(standings: T) -> Self {
        Self(standings.into_iter().collect())
    }
}

impl Sources {
    /// Facts of this source are told from now on.
    pub fn watch(&self, rank: WorkerRank, source: SharedSource) {
        self.watched.insert(rank, source);
    }

    /// The rank has no source any more.
    pub fn forget(&self, rank: WorkerRank) {
        self.watched.remove(&rank);
        self.set(rank, Standing::default());
    }

    /// What happened to the source of a rank, if it has one.
    pub fn facts(&self, rank: WorkerRank) -> Option<Facts> {
        let source = self.watched.get(&rank)?.clone();
        Some(source.lock().facts())
    }

    /// What an engine says of itself, if it said anything.
    pub fn learned(&self, worker: WorkerId) -> Option<(Learned, Vec<Mismatch>)> {
        self.learned.load().get(&worker).cloned()
    }

    /// What all engines say of themselves.
    pub fn all_learned(&self) -> Arc<AllLearned> {
        self.learned.load_full()
    }

    /// Engines say this of themselves from now on, and this of their models.
    pub fn set_learned(&self, learned: AllLearned, agreed: HashMap<ModelName, Agreed>) {
        self.learned.store(Arc::new(learned));
        self.agreed.store(Arc::new(agreed));
    }

    /// What all engines of each model say alike, now and later.
    pub fn agreed(&self) -> &SharedAgreed {
        &self.agreed
    }

    /// A request that was routed at some instant had to store blocks on a rank, and was answered.
    pub(super) fn answered(&self, rank: WorkerRank, routed: Instant, now: Instant) {
        let Some(source) = self.watched.get(&rank).map(|source| source.clone()) else {
            return;
        };
        source.lock().answered(routed, now);
    }

    pub(super) fn set(&self, rank: WorkerRank, standing: Standing) {
        if self.table.load().standing(rank) == standing {
            return;
        }
        self.table.rcu(|table| {
            let mut table = Trusted::clone(table);
            if standing == Standing::default() {
                table.0.remove(&rank);
            } else {
                table.0.insert(rank, standing);
            }
            table
        });
    }

    pub(super) fn table(&self) -> Arc<Trusted> {
        self.table.load_full()
    }
}
