//! Fleet controller: reconciles event sources, the load table and Envoy's endpoints with each
//! desired set of workers.
//!
//! New members are opened before the fleet is published and removed ones closed after it, so that
//! no request can choose a rank without a load row.

mod event_sources;

use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};
use warmroute_core::adapters::AdapterTable;
use warmroute_core::engine_settings::{
    CommonSettings, ConfiguredSettings, EngineSettings, SettingMismatch,
};
use warmroute_core::fleet::{Fleet, FleetMember};
use warmroute_core::router::{EngineSettingsByWorker, Router, RouterSettings};
use warmroute_core::worker::{ModelName, Worker, WorkerId, WorkerRank, WorkerRole};
use warmroute_engines::kv_events::SharedResync;
use warmroute_metrics::{Metrics, RankLabels};
use warmroute_runtime::lifecycle::{Readiness, ReadyGuard};

use super::endpoint_publisher::EndpointPublisher;
use super::fleet_source::{DesiredFleet, SettingsByModel};
use super::settings_poller::{EngineKey, EngineReports};
use super::source_task;
use crate::api::RankWriters;
use crate::cluster::warm_start::WarmStart;
use crate::config::Config;
use crate::dispatch::Dispatcher;
use event_sources::SourceHandle;

/// Maximum number of workers that one log line lists.
const MAX_LISTED_WORKERS: usize = 16;

/// Controller of the fleet and of its event sources.
pub(super) struct FleetController {
    parts: FleetControllerParts,
    router: Arc<Router>,
    readiness: Readiness,
    sources: HashMap<WorkerRank, SourceHandle>,
    initial_workers: Option<(usize, ReadyGuard)>,
    /// Initial workers whose settings have not been queried yet.
    pending_settings: Option<PendingEngineSettings>,
    sources_deadline: Instant,
    models: Arc<SettingsByModel>,
    /// Reports applied to the last set.
    applied_reports: Arc<EngineReports>,
    max_event_message: usize,
    snapshot_path: Option<PathBuf>,
    /// Last desired set.
    desired: Option<DesiredFleet>,
}

/// Dependencies of the controller.
pub(super) struct FleetControllerParts {
    pub(super) dispatcher: Arc<Dispatcher>,
    pub(super) writers: Arc<RankWriters>,
    pub(super) metrics: Arc<Metrics>,
    /// Settings reported by engines.
    pub(super) engine_reports: watch::Receiver<Arc<EngineReports>>,
    /// Policy for blocks after lost batches.
    pub(super) resync: SharedResync,
    /// Publisher to Envoy.
    pub(super) publisher: EndpointPublisher,
    /// Warm start of new event sources, until startup is complete.
    pub(super) warm_start: Option<Arc<WarmStart>>,
}

/// Initial workers whose event sources may still be reported by the engine.
struct PendingEngineSettings {
    workers: HashSet<EngineKey>,
    /// Held until the set is empty.
    ready: ReadyGuard,
}

impl FleetController {
    pub(super) fn new(config: &Config, parts: FleetControllerParts, readiness: Readiness) -> Self {
        let min_workers = config.process.readiness.min_workers as usize;
        let prefill = if config.disaggregation().enforce {
            ", and prefill workers (`routing.disaggregation.enforce`)"
        } else {
            ""
        };
        let guard =
            readiness.begin_step(format!("initial workers: at least {min_workers}{prefill}"));
        Self {
            router: parts.dispatcher.router().clone(),
            parts,
            sources: HashMap::new(),
            initial_workers: Some((min_workers, guard)),
            pending_settings: None,
            sources_deadline: Instant::now() + config.process.readiness.event_sources_timeout.get(),
            models: Arc::default(),
            applied_reports: Arc::default(),
            max_event_message: config.engines.kv_events.max_message_size.bytes(),
            snapshot_path: config
                .index
                .warm_start
                .as_ref()
                .and_then(|warm_start| warm_start.snapshot_file.clone()),
            desired: None,
            readiness,
        }
    }

    /// Reconciles each desired set until the channel is closed or the token is cancelled, then
    /// stops the event sources.
    pub(super) async fn run(
        mut self,
        mut sets: mpsc::UnboundedReceiver<DesiredFleet>,
        stop: CancellationToken,
    ) {
        loop {
            let next = tokio::select! {
                () = stop.cancelled() => break,
                set = sets.recv() => set,
                Ok(()) = self.parts.engine_reports.changed(), if self.desired.is_some() => self.desired.clone(),
                () = tokio::time::sleep_until(self.sources_deadline), if self.pending_settings.is_some() => {
                    self.finish_startup();
                    continue;
                }
            };
            let Some(mut desired) = next else { break };
            // Each set is complete, so only the newest one matters.
            while let Ok(newer) = sets.try_recv() {
                desired = newer;
            }
            self.desired = Some(desired.clone());
            self.set_models(desired.models).await;
            let workers = self.apply_engine_settings(desired.workers);
            if self.parts.publisher.is_enabled()
                && let Some(retained) = without_removed(&self.router.fleet(), &workers)
            {
                self.apply_fleet(retained).await;
            }
            self.apply_fleet(workers).await;
            self.check_pending_settings();
        }
        // If startup is not complete, the existing snapshot is more complete than the index.
        if let Some(file) = self
            .snapshot_path
            .take()
            .filter(|_| self.parts.warm_start.is_none())
        {
            let writers = self.parts.writers.clone();
            let router = self.router.clone();
            let written = tokio::task::spawn_blocking(move || {
                source_task::save_snapshot(&file, &writers, &router)
            })
            .await;
            if let Err(problem) = written {
                warn!(%problem, "warm start: snapshot not written");
            }
        }
        let members: Vec<WorkerRank> = self.sources.keys().copied().collect();
        for rank in members {
            self.stop_source(rank).await;
        }
    }

    /// Fills in the settings reported by engines, and logs differences from the configuration.
    fn apply_engine_settings(&mut self, mut workers: Vec<Worker>) -> Vec<Worker> {
        let reports = self.parts.engine_reports.borrow_and_update().clone();
        self.applied_reports = reports.clone();
        let before = self.router.sources().all_engine_settings();
        let mut all = EngineSettingsByWorker::new();
        let mut by_model: HashMap<ModelName, Vec<&EngineSettings>> = HashMap::new();
        let unconfigured = ConfiguredSettings::default();
        for worker in &mut workers {
            let Some(settings) = reports.settings.get(&(worker.id, worker.endpoint)) else {
                continue;
            };
            let model = self.models.get(&worker.model);
            let configured = model.map_or(&unconfigured, |model| &model.configured);
            let mismatches = settings.fill_missing(worker, configured);
            let known = before
                .get(&worker.id)
                .map(|(_, known)| &known[..])
                .unwrap_or_default();
            for mismatch in mismatches
                .iter()
                .filter(|mismatch| !known.contains(mismatch))
            {
                let SettingMismatch {
                    setting,
                    configured,
                    engine,
                } = mismatch;
                warn!(worker = %worker.id, name = worker.display_name(), setting, configured, engine, "engine setting differs from the configuration");
            }
            by_model
                .entry(worker.model.clone())
                .or_default()
                .push(settings);
            all.insert(worker.id, (settings.clone(), mismatches));
        }
        let common = by_model
            .into_iter()
            .map(|(model, all)| (model, CommonSettings::common_to(all.into_iter())))
            .collect();
        self.router.sources().set_engine_settings(all, common);
        let adapters = AdapterTable::of_workers(&workers);
        self.router.sources().adapters.store(Arc::new(adapters));
        workers
    }

    /// Applies a set of workers: opens new members, publishes the fleet, and closes removed
    /// members.
    async fn apply_fleet(&mut self, desired: Vec<Worker>) {
        let before = self.router.fleet();
        let change = before.reconcile(desired);
        let moved = change.moved_ranks();
        let has_moved = |member: &&FleetMember| moved.contains(&member.rank);
        let load = self.router.load().clone();
        let fleet = Arc::new(change.fleet);
        // Event sources stop first, because a bound socket or a slot can only be reused afterwards.
        for member in &change.removed {
            self.stop_source(member.rank).await;
        }
        for member in &change.added {
            if !has_moved(&member) {
                load.join(member);
            }
            self.router.predictors().open_rank(member);
            self.start_source(member);
        }
        self.router.update_capacity(&before, &change.updated);
        if !before.is_empty() && !change.added.is_empty() && self.parts.publisher.is_enabled() {
            // Envoy must know new endpoints before they are chosen. Removed endpoints stay
            // published until they are no longer chosen.
            let receipt = self
                .parts
                .publisher
                .publish(before.workers().chain(fleet.workers()));
            self.parts.publisher.wait_applied(receipt).await;
        }
        // A rank takes its bookings to its new slot when decisions begin to use it.
        for member in change.removed.iter().filter(has_moved) {
            load.leave(member);
        }
        for member in change.added.iter().filter(has_moved) {
            load.join(member);
        }
        self.router.set_fleet(fleet.clone());
        self.parts.writers.publish_fleet(&fleet);
        // Not waited for: removed endpoints are no longer chosen, so additional ones in Envoy do no
        // harm.
        let _receipt = self.parts.publisher.publish(fleet.workers());
        for member in &change.removed {
            if !has_moved(&member) {
                load.leave(member);
            }
            self.router.predictors().close_rank(member);
            self.parts
                .metrics
                .remove_rank(&RankLabels::new(member.rank, Some(member.worker.role)));
        }
        if let Some(sessions) = self.parts.dispatcher.sessions() {
            sessions.retain(|worker| fleet.worker(worker).is_some());
        }
        // Queued requests may have a worker now.
        self.parts.dispatcher.queue().wake();
        if fleet.generation() != before.generation() {
            let workers = fleet.workers().count();
            let [added, updated, removed] =
                [&change.added, &change.updated, &change.removed].map(|list| list_workers(list));
            info!(
                generation = fleet.generation(),
                workers, added, updated, removed, "fleet changed"
            );
        }
        self.set_fleet_gauges(&fleet);
        self.check_initial_workers(&fleet);
    }

    fn set_fleet_gauges(&self, fleet: &Fleet) {
        let metrics = &self.parts.metrics.workers;
        metrics.workers.set(fleet.workers().count() as i64);
        metrics.fleet_generation.set(fleet.generation() as i64);
    }

    /// Ends the startup step of the initial workers when there are enough, and begins the step of
    /// their engine settings.
    fn check_initial_workers(&mut self, fleet: &Fleet) {
        let found = fleet.workers().count();
        let lacks_prefill = lacks_prefill(fleet, &self.router.settings());
        let is_enough =
            |min_workers: usize| found >= min_workers && (min_workers == 0 || !lacks_prefill);
        if let Some((_, guard)) = self
            .initial_workers
            .take_if(|(min_workers, _)| is_enough(*min_workers))
        {
            let workers = fleet
                .workers()
                .map(|worker| (worker.id, worker.endpoint))
                .collect();
            let ready = guard.then("engine settings of the initial workers");
            self.pending_settings = Some(PendingEngineSettings { workers, ready });
        }
    }

    /// Ends the startup step when the settings of all initial workers were queried, with or without
    /// a response. Event sources from these settings have separate startup steps by then.
    fn check_pending_settings(&mut self) {
        let Some(pending) = &mut self.pending_settings else {
            return;
        };
        let fleet = self.router.fleet();
        let reports = &self.applied_reports;
        let is_member = |engine: &EngineKey| {
            fleet
                .worker(engine.0)
                .is_some_and(|worker| worker.endpoint == engine.1)
        };
        pending.workers.retain(|engine| {
            is_member(engine) && !reports.is_disabled && !reports.queried.contains(engine)
        });
        if pending.workers.is_empty() || Instant::now() >= self.sources_deadline {
            self.finish_startup();
        }
    }

    /// Completes startup. Workers that join later do not affect readiness.
    fn finish_startup(&mut self) {
        if let Some(PendingEngineSettings { workers, ready }) = self.pending_settings.take() {
            if workers.is_empty() {
                ready.complete()
            } else {
                ready.give_up()
            }
        }
        self.parts.warm_start = None;
    }
}

/// Lists the workers of some ranks for the log, by id and name. `None` without ranks.
fn list_workers(members: &[FleetMember]) -> Option<String> {
    let workers: BTreeMap<WorkerId, &Worker> = members
        .iter()
        .map(|member| (member.rank.worker, &*member.worker))
        .collect();
    let named = workers
        .values()
        .take(MAX_LISTED_WORKERS)
        .map(|worker| format!("{} ({})", worker.id, worker.display_name()));
    let mut list = named.collect::<Vec<_>>().join(", ");
    if workers.len() > MAX_LISTED_WORKERS {
        list.push_str(&format!(" and {} more", workers.len() - MAX_LISTED_WORKERS));
    }
    (!list.is_empty()).then_some(list)
}

/// Returns the first half of a change that adds and removes workers: the current workers without
/// the removed ones.
///
/// New workers are not chosen before Envoy knows them, and until then no request should go to a
/// removed worker. Returns `None` if a removed worker has no remaining substitute of its model and
/// role: a worker that may be gone is better than none.
fn without_removed(before: &Fleet, desired: &[Worker]) -> Option<Vec<Worker>> {
    let change = before.reconcile(desired.to_vec());
    if change.added.is_empty() || change.removed.is_empty() {
        return None;
    }
    let removed: HashSet<WorkerId> = change
        .removed
        .iter()
        .map(|member| member.rank.worker)
        .collect();
    let is_retained =
        |worker: &&Worker| before.worker(worker.id).is_some() && !removed.contains(&worker.id);
    let retained: Vec<Worker> = desired.iter().filter(is_retained).cloned().collect();
    let has_substitute = |removed_member: &FleetMember| {
        let is_substitute = |worker: &Worker| {
            worker.model == removed_member.worker.model && worker.role == removed_member.worker.role
        };
        retained.iter().any(is_substitute)
    };
    change
        .removed
        .iter()
        .all(has_substitute)
        .then_some(retained)
}

/// Returns whether a model has no prefill worker although `routing.disaggregation.enforce` requires
/// one.
fn lacks_prefill(fleet: &Fleet, settings: &RouterSettings) -> bool {
    let has_prefill = |model: &ModelName| {
        fleet
            .workers()
            .any(|worker| worker.model == *model && worker.role == WorkerRole::Prefill)
    };
    let decoded = fleet
        .workers()
        .filter(|worker| worker.role == WorkerRole::Decode)
        .map(|worker| &worker.model);
    settings.disaggregation.enforce
        && settings
            .prefill_required_models
            .iter()
            .chain(decoded)
            .any(|model| !has_prefill(model))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(list: &[(u64, &str)]) -> Vec<Worker> {
        let mut models: Vec<&str> = list.iter().map(|(_, model)| *model).collect();
        models.sort_unstable();
        models.dedup();
        let models: Vec<String> = models
            .iter()
            .map(|model| format!("{{name: {model}}}"))
            .collect();
        let list = list.iter().map(|(id, model)| {
            let port = 8000 + id % 1000;
            format!(
                "{{id: {}, model: {model}, endpoint: '127.0.0.1:{port}'}}",
                id / 1000
            )
        });
        let models = models.join(", ");
        let list = list.collect::<Vec<_>>().join(", ");
        let text = format!("models: [{models}]\nworkers: {{list: [{list}]}}\n");
        let config =
            Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes()).unwrap();
        match config.worker_source() {
            crate::config::WorkerSource::Fixed(workers) => workers,
            source => panic!("{source:?}"),
        }
    }

    #[test]
    fn log_lists_workers_by_id_and_name() {
        let mut named = workers(&[(1001, "m"), (2002, "m")]);
        named[1].name = Some("inference/vllm-b".to_owned());
        let added = Fleet::empty().reconcile(named).added;
        assert_eq!(
            list_workers(&added).as_deref(),
            Some("1 (127.0.0.1:8001), 2 (inference/vllm-b)")
        );
        let many: Vec<(u64, &str)> = (1..=20).map(|id| (id * 1001, "m")).collect();
        let added = Fleet::empty().reconcile(workers(&many)).added;
        let list = list_workers(&added).unwrap();
        assert!(list.ends_with("16 (127.0.0.1:8016) and 4 more"), "{list}");
        assert_eq!(list_workers(&[]), None);
    }

    #[test]
    fn workers_are_removed_first_unless_model_becomes_empty() {
        // Each number is 1000 times the worker id, plus the offset of its port.
        let before = workers(&[(1001, "m"), (2002, "m"), (9009, "n")]);
        let fleet = Fleet::empty().reconcile(before).fleet;
        type Case<'a> = (&'a [(u64, &'a str)], Option<&'a [u64]>);
        let cases: [Case<'_>; 6] = [
            (&[(1001, "m"), (3003, "m"), (9009, "n")], Some(&[1, 9])),
            // A worker with a new endpoint counts as removed and added.
            (&[(1001, "m"), (2005, "m"), (9009, "n")], Some(&[1, 9])),
            (&[(1001, "m"), (9009, "n")], None),
            (&[(1001, "m"), (2002, "m"), (3003, "m"), (9009, "n")], None),
            (&[(3003, "m"), (4004, "m"), (9009, "n")], None),
            (&[(1001, "m"), (2002, "m"), (8008, "n")], None),
        ];
        for (desired, expected) in cases {
            let rest = without_removed(&fleet, &workers(desired));
            let ids = rest.map(|rest| rest.iter().map(|worker| worker.id.0).collect::<Vec<_>>());
            assert_eq!(ids.as_deref(), expected, "{desired:?}");
        }
    }
}
