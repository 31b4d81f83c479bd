//! Status of the event source of each worker rank. Statuses change rarely and every decision reads
//! them, so they are kept in a table that is replaced as a whole. One decision uses one table from
//! its lookup to its explanation.

use std::cmp::Ordering;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::time::Instant;

use arc_swap::ArcSwap;
use dashmap::DashMap;
use parking_lot::Mutex;

use crate::adapters::SharedAdapters;
use crate::block::BlockWindows;
use crate::engine_settings::{CommonSettings, EngineSettings, SettingMismatch};
use crate::fleet::Fleet;
use crate::freshness::{EventSourceState, SourceFacts, SourceStatus};
use crate::worker::{ModelName, WorkerId, WorkerRank};

/// Event source, shared by the components that report its events.
pub type SharedSource = Arc<Mutex<EventSourceState>>;

/// All event sources.
#[derive(Debug, Default)]
pub struct EventSources {
    table: ArcSwap<FreshnessTable>,
    registered: DashMap<WorkerRank, SharedSource>,
    engine_settings: ArcSwap<EngineSettingsByWorker>,
    /// Settings common to each model.
    pub common_settings: SharedCommonSettings,
    /// Adapters of all workers.
    pub adapters: SharedAdapters,
    /// Learned tokens that the hash of each block covers, by model.
    pub windows: SharedWindows,
}

/// Tokens that the hash of each block covers by most engines of each model, as their events show it.
pub type SharedWindows = Arc<ArcSwap<BTreeMap<ModelName, BlockWindows>>>;

/// Settings on which all engines of a model agree, by model.
pub type SharedCommonSettings = Arc<ArcSwap<HashMap<ModelName, CommonSettings>>>;

/// Settings that each engine reports, with the differences to the configuration.
pub type EngineSettingsByWorker = BTreeMap<WorkerId, (EngineSettings, Vec<SettingMismatch>)>;

/// Status of every rank with an event source. Every decision reads it for every candidate, hence
/// hashbrown's faster hash; worker ids are not client data.
#[derive(Clone, Debug, Default)]
pub(super) struct FreshnessTable(hashbrown::HashMap<WorkerRank, SourceStatus>);

impl FreshnessTable {
    pub(super) fn status(&self, rank: WorkerRank) -> SourceStatus {
        self.0.get(&rank).copied().unwrap_or_default()
    }
    pub(super) fn iter(&self) -> impl Iterator<Item = (WorkerRank, SourceStatus)> {
        self.0.iter().map(|(rank, status)| (*rank, *status))
    }
}

impl FromIterator<(WorkerRank, SourceStatus)> for FreshnessTable {
    fn from_iter<T: IntoIterator<Item = (WorkerRank, SourceStatus)>>(statuses: T) -> Self {
        Self(statuses.into_iter().collect())
    }
}

impl EventSources {
    /// Registers the source of a rank.
    pub fn register(&self, rank: WorkerRank, source: SharedSource) {
        self.registered.insert(rank, source);
    }

    /// Removes the source of a rank.
    pub fn remove(&self, rank: WorkerRank) {
        self.registered.remove(&rank);
        self.set(rank, SourceStatus::default());
    }

    /// Returns the observed facts of a rank's source, if it has one.
    pub fn facts(&self, rank: WorkerRank) -> Option<SourceFacts> {
        let source = self.registered.get(&rank)?.clone();
        Some(source.lock().facts())
    }

    /// Returns the settings that an engine reports, if it has reported any.
    pub fn engine_settings(
        &self,
        worker: WorkerId,
    ) -> Option<(EngineSettings, Vec<SettingMismatch>)> {
        self.engine_settings.load().get(&worker).cloned()
    }

    /// Returns the settings that all engines report.
    pub fn all_engine_settings(&self) -> Arc<EngineSettingsByWorker> {
        self.engine_settings.load_full()
    }

    /// Replaces the settings that the engines report, and those common to each model.
    pub fn set_engine_settings(
        &self,
        engine_settings: EngineSettingsByWorker,
        common_settings: HashMap<ModelName, CommonSettings>,
    ) {
        self.engine_settings.store(Arc::new(engine_settings));
        self.common_settings.store(Arc::new(common_settings));
    }

    /// Determines again which tokens block hashes cover, by most engines of each model. A model is
    /// absent if no events show it, or if both counts are equal.
    pub(super) fn update_windows(&self, fleet: &ArcSwap<Fleet>) {
        self.windows.rcu(|_| {
            let fleet = fleet.load();
            let table = self.table.load();
            let mut counts: BTreeMap<ModelName, (usize, usize)> = BTreeMap::new();
            for member in fleet.members() {
                let (plain, eagle) = counts.entry(member.worker.model.clone()).or_default();
                match table.status(member.rank).windows {
                    Some(BlockWindows::Plain) => *plain += 1,
                    Some(BlockWindows::Eagle) => *eagle += 1,
                    None => {}
                }
            }
            let most_frequent = counts.into_iter().filter_map(|(model, (plain, eagle))| {
                let windows = match plain.cmp(&eagle) {
                    Ordering::Greater => BlockWindows::Plain,
                    Ordering::Less => BlockWindows::Eagle,
                    Ordering::Equal => return None,
                };
                Some((model, windows))
            });
            most_frequent.collect::<BTreeMap<_, _>>()
        });
    }

    /// Notifies the source of a rank that a request routed at `routed` has stored blocks there.
    pub(super) fn on_response(&self, rank: WorkerRank, routed: Instant, now: Instant) {
        let Some(source) = self.registered.get(&rank).map(|source| source.clone()) else {
            return;
        };
        source.lock().record_answer(routed, now);
    }

    pub(super) fn set(&self, rank: WorkerRank, status: SourceStatus) {
        if self.table.load().status(rank) == status {
            return;
        }
        self.table.rcu(|table| {
            let mut table = FreshnessTable::clone(table);
            if status == SourceStatus::default() {
                table.0.remove(&rank);
            } else {
                table.0.insert(rank, status);
            }
            table
        });
    }

    pub(super) fn table(&self) -> Arc<FreshnessTable> {
        self.table.load_full()
    }
}
