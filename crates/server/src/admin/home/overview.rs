//! State of the process for the overview, as values of the template `page.html`.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute_core::fleet::FleetMember;
use warmroute_core::freshness::{IndexFreshness, SourceStatus};
use warmroute_core::health::{FailingPeerGroup, HealthState};
use warmroute_core::load::RankSpeed;
use warmroute_core::router::Router;
use warmroute_core::wall_time::WallTime;
use warmroute_core::worker::{RankSlot, WorkerId};

use super::super::pages::{AdminPage, PAGES};
use super::super::{AdminState, ProcessStatus, TokenizerKind};

/// Maximum number of worker ranks in the table.
const MAX_ROWS: usize = 300;

/// Reads the state at one time.
pub(super) fn read(admin: &AdminState, now: WallTime) -> Value {
    let process = (admin.process)();
    let router = admin.dispatcher.router();
    let pending = admin.readiness.pending();
    let is_draining = admin.readiness.is_draining();
    let is_loading = !is_draining && !pending.is_empty();
    let mut rows = describe_ranks(router, now);
    let sources = rows.iter().filter(|row| row["reason"] != "no_source");
    let exact = sources.clone().filter(|row| row["freshness"] == "exact");
    let active_requests = rows
        .iter()
        .filter_map(|row| row["active_requests"].as_u64());
    let uptime = now.as_unix_seconds() - process.started_at.as_unix_seconds();
    let uptime = Duration::from_secs(uptime.max(0.0) as u64);
    let mut overview = json!({
        "now": now,
        "pending": pending,
        "is_draining": is_draining,
        "unreachable": router.unreachable_workers().len(),
        "failing": router.failing_groups().first().map(describe_failing),
        "version": process.version.text,
        "started_at": process.started_at,
        "uptime": humantime::format_duration(uptime).to_string(),
        "config_file": process.config_file.as_deref().map(Path::to_string_lossy),
        "last_reload": process.last_reload,
        "generation": process.generation,
        "needs_restart": process.needs_restart,
        "pool": process.pool,
        "workers": router.fleet().workers().count(),
        "ranks": rows.len(),
        "active_requests": active_requests.sum::<u64>(),
        "sources": sources.count(),
        "exact_sources": exact.count(),
        "indexed_blocks": router.index().stats().distinct_blocks,
        "models": describe_models(&process, router, is_loading),
        "has_names": rows.iter().any(|row| row["name"].is_string()),
        "hidden": rows.len().saturating_sub(MAX_ROWS),
        "pages": PAGES.iter().map(|page| describe_page(page, admin, &process)).collect::<Vec<_>>(),
    });
    // The sort is stable: ranks with problems, and those without, keep the order of the fleet.
    rows.sort_by_key(|row| row["has_problem"] == false);
    rows.truncate(MAX_ROWS);
    overview["rows"] = rows.into();
    overview
}

fn describe_failing(failing: &FailingPeerGroup) -> String {
    let kind = if failing.group.is_prefill {
        "prefill worker"
    } else {
        "worker"
    };
    format!("{kind} of {}", failing.group.model)
}

/// Returns the row of a page, with the instruction that enables its feature if that is off.
fn describe_page(page: &AdminPage, admin: &AdminState, process: &ProcessStatus) -> Value {
    json!({
        "path": page.path,
        "method": page.method,
        "content": page.content,
        "hint": page.hint_if_off(admin, process),
        "is_optional": page.hint.is_some(),
    })
}

/// Returns the configured models and those of the workers.
fn describe_models(process: &ProcessStatus, router: &Router, is_loading: bool) -> Vec<Value> {
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
        let mut workers: BTreeMap<&str, usize> = BTreeMap::new();
        for worker in fleet
            .workers()
            .filter(|worker| worker.model.as_str() == name)
        {
            *workers.entry(worker.role.as_str()).or_default() += 1;
        }
        let report = reports.iter().find(|report| report.model.as_str() == name);
        let model = process.models.iter().find(|model| model.name == name);
        let comparison = match model.map(|model| model.tokenizer) {
            None => Some("unknown"),
            Some(None) => Some("no_tokenizer"),
            Some(Some(TokenizerKind::Remote)) => Some("remote"),
            Some(Some(TokenizerKind::Local)) => report
                .map(|report| report.parity.state())
                .or(is_loading.then_some("loading")),
        };
        json!({"name": name, "workers": workers, "comparison": comparison})
    };
    names.into_iter().map(row).collect()
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

/// Returns the state of all ranks.
fn describe_ranks(router: &Router, now: WallTime) -> Vec<Value> {
    let load = router.load();
    let active: HashMap<RankSlot, u64> = load
        .snapshot()
        .into_iter()
        .map(|row| (row.slot, row.active_requests))
        .collect();
    let engines = load.engine_loads().snapshot(load.now()).into_iter();
    let engines: HashMap<RankSlot, (u64, u64)> = engines
        .map(|row| (row.slot, (row.report.running, row.report.waiting)))
        .collect();
    let slots = router.index().stats().slots.into_iter();
    let counts: HashMap<RankSlot, _> = slots.map(|row| (row.slot, row.counts)).collect();
    let states = worker_states(router, now);
    let row = |member: &FleetMember| {
        let SourceStatus {
            freshness, reason, ..
        } = router.source_status(member.rank);
        let reason = reason.map(|reason| reason.as_str());
        let worker = &member.worker;
        let states = states.get(&worker.id).map(Vec::as_slice);
        let blocks = counts.get(&member.slot).map(|counts| {
            let lower = counts.host + counts.disk + counts.external;
            [counts.device, lower]
        });
        // A missing event source is not a problem: predictions may be intended for the rank.
        let has_problem = states.is_some()
            || !matches!(freshness, IndexFreshness::Exact | IndexFreshness::Absent)
            || reason.is_some_and(|reason| reason != "no_source");
        json!({
            "rank": member.rank.to_string(),
            "name": worker.name,
            "endpoint": worker.endpoint.to_string(),
            "role": worker.role.as_str(),
            "model": worker.model.as_str(),
            "active_requests": active.get(&member.slot).copied().unwrap_or_default(),
            "engine_requests": engines.get(&member.slot),
            "freshness": freshness.as_str(),
            "reason": reason,
            "since": router.sources().facts(member.rank).map(|facts| facts.since),
            "states": states,
            "has_problem": has_problem,
            "blocks": blocks,
        })
    };
    router.fleet().members().map(row).collect()
}
