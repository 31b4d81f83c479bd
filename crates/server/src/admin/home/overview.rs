//! State of the process for the overview.

use std::collections::{BTreeMap, BTreeSet, HashMap};

use warmroute_core::fleet::FleetMember;
use warmroute_core::freshness::{IndexFreshness, SourceStatus};
use warmroute_core::health::{FailingPeerGroup, HealthState};
use warmroute_core::load::RankSpeed;
use warmroute_core::router::Router;
use warmroute_core::wall_time::WallTime;
use warmroute_core::worker::{RankSlot, WorkerId, WorkerRank};

use super::super::pages::{AdminPage, PAGES};
use super::super::{AdminState, ProcessStatus, TokenizerKind};

/// Maximum number of worker ranks in the table.
pub(super) const MAX_ROWS: usize = 300;

/// State of the process at one time.
pub(super) struct ProcessOverview {
    pub(super) now: WallTime,
    pub(super) process: ProcessStatus,
    /// Pending startup steps, or `draining`.
    pub(super) pending: Vec<String>,
    pub(super) is_draining: bool,
    pub(super) models: Vec<ModelRow>,
    pub(super) workers: usize,
    /// Number of workers whose engine does not answer.
    pub(super) unreachable: usize,
    /// Models of which no worker delivers.
    pub(super) failing: Vec<FailingPeerGroup>,
    pub(super) ranks: usize,
    pub(super) active_requests: u64,
    /// Number of ranks with an event source, and number of those whose source is exact.
    pub(super) event_sources: (usize, usize),
    pub(super) indexed_blocks: u64,
    /// Rows of the worker table. Those with a problem come first.
    pub(super) rows: Vec<WorkerRankRow>,
    /// Pages, each with the instruction that enables its feature if the feature is off.
    pub(super) pages: Vec<(&'static AdminPage, Option<&'static str>)>,
}

/// Row of one model.
pub(super) struct ModelRow {
    pub(super) name: String,
    pub(super) is_configured: bool,
    pub(super) tokenizer: Option<TokenizerKind>,
    /// Number of workers by role.
    pub(super) workers: BTreeMap<&'static str, usize>,
    /// State of the token comparison. `None` until the tokenizer is loaded.
    pub(super) parity: Option<&'static str>,
}

/// Row of one worker rank.
pub(super) struct WorkerRankRow {
    pub(super) rank: WorkerRank,
    pub(super) name: Option<String>,
    pub(super) endpoint: String,
    pub(super) role: &'static str,
    pub(super) model: String,
    pub(super) active_requests: u64,
    /// Running and waiting requests that the engine reports.
    pub(super) engine_requests: Option<(u64, u64)>,
    pub(super) freshness: IndexFreshness,
    pub(super) stale_reason: Option<&'static str>,
    /// Time of the last status change of the event source.
    pub(super) since: Option<WallTime>,
    /// Observed states that exclude the worker or reduce its use.
    pub(super) states: Vec<String>,
    /// Blocks on the device, and in all other tiers.
    pub(super) blocks: Option<(u64, u64)>,
}

impl WorkerRankRow {
    /// Returns whether an operator should inspect the rank. A missing event source is not a
    /// problem: predictions may be intended for the rank.
    pub(super) fn has_problem(&self) -> bool {
        let is_behind = !matches!(
            self.freshness,
            IndexFreshness::Exact | IndexFreshness::Absent
        );
        is_behind
            || !self.states.is_empty()
            || self
                .stale_reason
                .is_some_and(|reason| reason != "no_source")
    }
}

impl ProcessOverview {
    /// Returns whether a startup step is pending.
    pub(super) fn is_loading(&self) -> bool {
        !self.is_draining && !self.pending.is_empty()
    }

    /// Reads the state.
    pub(super) fn read(admin: &AdminState, now: WallTime) -> Self {
        let process = (admin.process)();
        let router = admin.dispatcher.router();
        let mut rows = rank_rows(router, now);
        let fleet = router.fleet();
        let has_source = |row: &&WorkerRankRow| row.stale_reason != Some("no_source");
        let sources = rows.iter().filter(has_source);
        let exact = |row: &&WorkerRankRow| row.freshness == IndexFreshness::Exact;
        let event_sources = (sources.clone().count(), sources.filter(exact).count());
        // The sort is stable: ranks with problems, and those without, keep the order of the fleet.
        rows.sort_by_key(|row| !row.has_problem());
        Self {
            now,
            pending: admin.readiness.pending(),
            is_draining: admin.readiness.is_draining(),
            models: model_rows(&process, router),
            workers: fleet.workers().count(),
            unreachable: router.unreachable_workers().len(),
            failing: router.failing_groups(),
            ranks: rows.len(),
            active_requests: rows.iter().map(|row| row.active_requests).sum(),
            event_sources,
            indexed_blocks: router.index().stats().distinct_blocks,
            rows,
            pages: PAGES
                .iter()
                .map(|page| (page, page.hint_if_off(admin, &process)))
                .collect(),
            process,
        }
    }
}

/// Returns the configured models and those of the workers.
fn model_rows(process: &ProcessStatus, router: &Router) -> Vec<ModelRow> {
    let reports = router.parity().reports();
    let fleet = router.fleet();
    let mut names: Vec<&str> = process
        .models
        .iter()
        .map(|model| model.name.as_str())
        .collect();
    let configured: BTreeSet<&str> = names.iter().copied().collect();
    let served: BTreeSet<&str> = fleet
        .workers()
        .map(|worker| worker.model.as_str())
        .collect();
    names.extend(served.difference(&configured));
    let row = |name: &str| {
        let mut workers = BTreeMap::new();
        for worker in fleet
            .workers()
            .filter(|worker| worker.model.as_str() == name)
        {
            *workers.entry(worker.role.as_str()).or_default() += 1;
        }
        let report = reports.iter().find(|report| report.model.as_str() == name);
        ModelRow {
            name: name.to_owned(),
            is_configured: configured.contains(name),
            tokenizer: process
                .models
                .iter()
                .find(|model| model.name == name)
                .and_then(|model| model.tokenizer),
            workers,
            parity: report.map(|report| report.parity.state()),
        }
    };
    names.into_iter().map(row).collect()
}

/// State of all ranks, for lookups by rank or worker.
struct RankLookup {
    active_requests: HashMap<RankSlot, u64>,
    engine_requests: HashMap<RankSlot, (u64, u64)>,
    blocks: HashMap<RankSlot, (u64, u64)>,
    states: HashMap<WorkerId, Vec<String>>,
}

impl RankLookup {
    fn read(router: &Router, now: WallTime) -> Self {
        let load = router.load();
        let active = load.snapshot().into_iter();
        let engines = load.engine_loads().snapshot(load.now()).into_iter();
        let blocks = router.index().stats().slots.into_iter();
        Self {
            active_requests: active.map(|row| (row.slot, row.active_requests)).collect(),
            engine_requests: engines
                .map(|row| (row.slot, (row.report.running, row.report.waiting)))
                .collect(),
            blocks: blocks
                .map(|row| {
                    let counts = row.counts;
                    let lower = counts.host + counts.disk + counts.external;
                    (row.slot, (counts.device, lower))
                })
                .collect(),
            states: worker_states(router, now),
        }
    }
}

/// Returns the states that exclude a worker or reduce its use.
fn worker_states(router: &Router, now: WallTime) -> HashMap<WorkerId, Vec<String>> {
    let mut states: HashMap<WorkerId, Vec<String>> = HashMap::new();
    let mut add = |worker, state: String| states.entry(worker).or_default().push(state);
    for (worker, elapsed) in router.unreachable_workers() {
        let since = now.as_unix_seconds() - elapsed.as_secs_f64();
        let since = WallTime::from_unix_seconds(since);
        add(worker, format!("unreachable since {}", since.time_of_day()));
    }
    for row in router.health_report() {
        if row.health != HealthState::Healthy {
            let state = format!("{} for {} s", row.health.as_str(), row.age_seconds);
            add(row.rank.worker, state);
        }
    }
    for slow in router.load().slow_ranks() {
        let RankSpeed {
            phase,
            factor,
            median,
        } = slow.speed;
        let state = format!(
            "slow for {} s: {} factor {factor:.1}, median {median:.1}",
            slow.age_seconds,
            phase.as_str()
        );
        add(slow.rank.worker, state);
    }
    for (worker, remaining) in router.overload_marks() {
        let seconds = remaining.as_secs_f64().ceil();
        add(worker, format!("overloaded for {seconds} s"));
    }
    for (_, parity) in router.parity().statuses() {
        for worker in parity.differing_workers().iter() {
            add(*worker, "tokens differ".to_owned());
        }
    }
    for (worker, (_, mismatches)) in router.sources().all_engine_settings().iter() {
        if !mismatches.is_empty() {
            add(*worker, "settings differ".to_owned());
        }
    }
    for worker in router.fleet().workers().filter(|worker| worker.draining) {
        add(worker.id, "draining".to_owned());
    }
    states
}

fn rank_rows(router: &Router, now: WallTime) -> Vec<WorkerRankRow> {
    let lookup = RankLookup::read(router, now);
    let row = |member: &FleetMember| {
        let SourceStatus {
            freshness, reason, ..
        } = router.source_status(member.rank);
        let worker = &member.worker;
        WorkerRankRow {
            rank: member.rank,
            name: worker.name.clone(),
            endpoint: worker.endpoint.to_string(),
            role: worker.role.as_str(),
            model: worker.model.to_string(),
            active_requests: lookup
                .active_requests
                .get(&member.slot)
                .copied()
                .unwrap_or_default(),
            engine_requests: lookup.engine_requests.get(&member.slot).copied(),
            freshness,
            stale_reason: reason.map(|reason| reason.as_str()),
            since: router.sources().facts(member.rank).map(|facts| facts.since),
            states: lookup.states.get(&worker.id).cloned().unwrap_or_default(),
            blocks: lookup.blocks.get(&member.slot).copied(),
        }
    };
    router.fleet().members().map(row).collect()
}
