//! Gauges that are refreshed from other components at each scrape.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use prometheus_client::metrics::family::Family;
use warmroute_core::block::StorageTier;
use warmroute_core::fleet::Fleet;
use warmroute_core::health::HealthState;
use warmroute_core::load::ModelCalibration;
use warmroute_core::router::Router;
use warmroute_core::wall_time::WallTime;
use warmroute_core::worker::WorkerRank;
use warmroute_metrics::{
    ClassLabel, ClassOutcomeLabels, LatencyMetrics, Metrics, ModelCoefficientLabels, ModelLabel,
    RankFailureLabels, RankFreshnessLabels, RankLabels, RankPhaseLabels, RankTierLabels,
    SettingLabel, WorkerLabels,
};

use crate::dispatch::Dispatcher;

/// Sets all gauges to the current state.
pub(super) fn refresh_gauges(metrics: &Metrics, dispatcher: &Dispatcher) {
    let router = dispatcher.router();
    start_roles_at_zero(metrics, router);
    refresh_workers(metrics, router, &router.fleet());
    refresh_ranks(metrics, router);
    refresh_engine_loads(metrics, router);
    refresh_latency(metrics, router);
    refresh_sources(metrics, router);
    refresh_predictions(metrics, router);
    refresh_queue(metrics, dispatcher);
    refresh_health(metrics, router);
    let stored = dispatcher.stored_responses().counts();
    metrics
        .sessions
        .stored_responses
        .set(stored.sessions as i64);
    if let Some(sessions) = dispatcher.sessions() {
        let counts = sessions.counts();
        metrics.sessions.sessions.set(counts.sessions as i64);
        metrics.sessions.requests.set(counts.running as i64);
    }
}

/// Sets the metrics of the workers' health. Series of removed ranks disappear.
fn refresh_health(metrics: &Metrics, router: &Router) {
    let metrics = &metrics.workers;
    metrics.ejected.set(router.ejected_workers().len() as i64);
    metrics.health_state.clear();
    for (rank, health) in router.unhealthy_ranks() {
        let state = match health {
            HealthState::Healthy => continue,
            HealthState::Suspect => 1,
            HealthState::ProbeDue | HealthState::ProbeForced => 2,
            HealthState::Probing => 3,
            HealthState::Ejected => 4,
        };
        let labels = rank_labels(router, rank);
        metrics.health_state.get_or_create(&labels).set(state);
    }
    metrics.failed_requests.clear();
    for (rank, outcome, count) in router.failed_requests() {
        let labels = RankFailureLabels {
            rank: rank_labels(router, rank),
            kind: outcome.as_str(),
        };
        metrics.failed_requests.get_or_create(&labels).inc_by(count);
    }
}

/// Returns the labels of a rank in the current fleet.
fn rank_labels(router: &Router, rank: WorkerRank) -> RankLabels {
    RankLabels::new(rank, router.role_of(rank))
}

fn start_roles_at_zero(metrics: &Metrics, router: &Router) {
    let fleet = router.fleet();
    let roles: BTreeSet<_> = fleet
        .workers()
        .map(|worker| (&worker.model, worker.role))
        .collect();
    for (model, role) in roles {
        metrics.start_role_at_zero(model, role);
    }
}

/// Lists the workers of the fleet. Counters of ranks without requests start at zero.
fn refresh_workers(metrics: &Metrics, router: &Router, fleet: &Fleet) {
    metrics.workers.info.clear();
    for worker in fleet.workers() {
        let labels = WorkerLabels::from(&**worker);
        metrics.workers.info.get_or_create(&labels).set(1);
    }
    for member in fleet.members() {
        let labels = RankLabels::new(member.rank, Some(member.worker.role));
        drop(metrics.requests.worker_requests.get_or_create(&labels));
        // The series of a rank that left the fleet meanwhile were removed before.
        if router.role_of(member.rank) != Some(member.worker.role) {
            metrics.remove_rank(&labels);
        }
    }
}

/// Sets the gauges of the learned latency. Series of removed ranks disappear.
fn refresh_latency(metrics: &Metrics, router: &Router) {
    let metrics = &metrics.latency;
    metrics.factor.clear();
    metrics.observations.clear();
    metrics.predicted_first_token_seconds.clear();
    metrics.observed_first_token_seconds.clear();
    let report = router.load().calibration();
    for model in &report.models {
        refresh_model_latency(metrics, model);
    }
    for rank in &report.ranks {
        let labels = rank_labels(router, rank.rank);
        let phases = [
            (
                "prefill",
                rank.slowdown.prefill_factor,
                rank.slowdown.prefill_observations,
            ),
            (
                "decode",
                rank.slowdown.decode_factor,
                rank.slowdown.decode_observations,
            ),
        ];
        for (phase, factor, observations) in phases {
            let labels = RankPhaseLabels {
                rank: labels,
                phase,
            };
            metrics.factor.get_or_create(&labels).set(factor);
            let counter = metrics.observations.get_or_create(&labels);
            counter.inc_by(observations);
        }
        let totals = &rank.slowdown.time_to_first_token;
        let predicted = metrics.predicted_first_token_seconds.get_or_create(&labels);
        predicted.inc_by(totals.predicted_seconds);
        let observed = metrics.observed_first_token_seconds.get_or_create(&labels);
        observed.inc_by(totals.observed_seconds);
    }
}

fn refresh_model_latency(metrics: &LatencyMetrics, model: &ModelCalibration) {
    let estimate = &model.estimate;
    let coefficients = [
        ("prefill_base", estimate.coefficients.prefill_base),
        ("prefill_token", estimate.coefficients.prefill_token),
        ("prefill_pair", estimate.coefficients.prefill_pair),
        ("decode_step", estimate.coefficients.decode_step),
        ("decode_request", estimate.coefficients.decode_request),
        (
            "decode_context_token",
            estimate.coefficients.decode_context_token,
        ),
        ("transfer_token", estimate.transfer_token),
    ];
    for (coefficient, seconds) in coefficients {
        let labels = ModelCoefficientLabels {
            model: model.model.as_str().into(),
            coefficient,
        };
        let gauge = metrics.coefficient_seconds.get_or_create_owned(&labels);
        gauge.set(seconds);
    }
    let label = ModelLabel::from(&model.model);
    let gauges = [
        (&metrics.output_tokens, estimate.output_tokens),
        (&metrics.request_rate, estimate.request_rate),
        (&metrics.prefill_rate, estimate.prefill_rate),
    ];
    for (family, value) in gauges {
        family.get_or_create(&label).set(value);
    }
}

/// Sets the gauges of the KV event sources. Series of removed ranks disappear.
fn refresh_sources(metrics: &Metrics, router: &Router) {
    let events = &metrics.kv_events;
    events.source_freshness.clear();
    events.source_lag_seconds.clear();
    events.source_last_event_age_seconds.clear();
    events.source_gaps.clear();
    events.source_lost_batches.clear();
    events.source_stale_blocks.clear();
    let now = WallTime::from(SystemTime::now()).as_unix_seconds();
    for member in router.fleet().members() {
        let label = RankLabels::new(member.rank, Some(member.worker.role));
        let freshness = router.source_status(member.rank).freshness;
        let labels = RankFreshnessLabels {
            rank: label,
            freshness: freshness.as_str(),
        };
        events.source_freshness.get_or_create(&labels).set(1);
        let Some(facts) = router.sources().facts(member.rank) else {
            continue;
        };
        if let Some(seconds) = facts.lag_seconds {
            let lag = events.source_lag_seconds.get_or_create(&label);
            lag.set(seconds);
        }
        if let Some(last) = facts.last_event {
            let age = events.source_last_event_age_seconds.get_or_create(&label);
            age.set(now - last.as_unix_seconds());
        }
        let gaps = events.source_gaps.get_or_create(&label);
        gaps.inc_by(facts.gaps);
        let lost = events.source_lost_batches.get_or_create(&label);
        lost.inc_by(facts.lost_batches);
        let stale_blocks = events.source_stale_blocks.get_or_create(&label);
        stale_blocks.set(to_gauge(facts.stale_blocks));
    }
    let mismatch_counts = &metrics.workers.engine_setting_mismatches;
    mismatch_counts.clear();
    for setting in warmroute_core::engine_settings::COMPARED_SETTINGS {
        metrics.start_setting_at_zero(setting);
    }
    let settings = router.sources().all_engine_settings();
    for mismatch in settings.values().flat_map(|(_, mismatches)| mismatches) {
        let label = SettingLabel {
            setting: mismatch.setting,
        };
        mismatch_counts.get_or_create(&label).inc();
    }
}

fn refresh_predictions(metrics: &Metrics, router: &Router) {
    metrics.workers.predicted_blocks.clear();
    for rank in router.predictors().stats() {
        // Two predictors may cover one rank. The one with the longer retention also holds the
        // blocks of the other.
        let blocks = metrics
            .workers
            .predicted_blocks
            .get_or_create_owned(&rank_labels(router, rank.rank));
        blocks.set(blocks.get().max(to_gauge(rank.blocks)));
    }
}

fn refresh_queue(metrics: &Metrics, dispatcher: &Dispatcher) {
    let metrics = &metrics.queue;
    metrics.outcomes.clear();
    for status in dispatcher.queue().class_statuses() {
        let label = ClassLabel {
            class: status.class.to_string().into(),
        };
        let depth = status.depth;
        let counters = status.counters;
        let depths = [
            (&metrics.requests, depth.requests),
            (&metrics.prompt_tokens, depth.prompt_tokens),
            (&metrics.cached_tokens, depth.cached_tokens),
        ];
        for (family, depth) in depths {
            family.get_or_create(&label).set(to_gauge(depth));
        }
        let outcomes = [
            ("admitted", counters.waited),
            ("request_limit", counters.over_requests),
            ("prompt_token_limit", counters.over_prompt_tokens),
            ("cached_token_limit", counters.over_cached_tokens),
            ("timeout", counters.expired),
            ("cancelled", counters.cancelled),
        ];
        for (outcome, count) in outcomes {
            let labels = ClassOutcomeLabels {
                class: label.class.clone(),
                outcome,
            };
            metrics.outcomes.get_or_create(&labels).inc_by(count);
        }
    }
}

/// Sets the gauges of the worker ranks. Series of removed ranks disappear.
fn refresh_ranks(metrics: &Metrics, router: &Router) {
    let metrics = &metrics.workers;
    let families = [
        &metrics.active_decode_blocks,
        &metrics.active_prefill_tokens,
        &metrics.active_requests,
    ];
    families.into_iter().for_each(Family::clear);
    metrics.cached_blocks.clear();
    metrics.cached_blocks_limit.clear();
    let slots = router.index().stats().slots;
    let slots: HashMap<_, _> = slots.iter().map(|slot| (slot.slot, slot)).collect();
    for load in router.load().snapshot() {
        let label = rank_labels(router, load.rank);
        let values = [
            load.active_blocks,
            load.active_prefill_tokens,
            load.active_requests,
        ];
        for (family, value) in families.into_iter().zip(values) {
            family.get_or_create(&label).set(to_gauge(value));
        }
        // A rank without an event source has no entry in the index. Its gauge is absent, because an
        // unknown value is not zero.
        let Some(slot) = slots.get(&load.slot) else {
            continue;
        };
        let counts = slot.counts;
        let tiers = [counts.device, counts.host, counts.disk, counts.external];
        for (tier, count) in StorageTier::ALL.into_iter().zip(tiers) {
            // Most engines use only the device.
            if tier != StorageTier::Device && count == 0 {
                continue;
            }
            let labels = RankTierLabels {
                rank: label,
                tier: tier.as_str(),
            };
            let limit = to_gauge(slot.limits.for_tier(tier));
            let cached = metrics.cached_blocks.get_or_create(&labels);
            cached.set(to_gauge(count));
            let allowed = metrics.cached_blocks_limit.get_or_create(&labels);
            allowed.set(limit);
        }
    }
}

/// Sets the gauges of the load that engines report. Series without a recent report disappear,
/// because an unknown value is not zero.
fn refresh_engine_loads(metrics: &Metrics, router: &Router) {
    let workers = &metrics.workers;
    let families = [
        &workers.engine_running_requests,
        &workers.engine_waiting_requests,
        &workers.engine_request_drift,
        &workers.unbooked_requests,
    ];
    families.into_iter().for_each(Family::clear);
    workers.engine_kv_usage_ratio.clear();
    let load = router.load();
    for engine in load.engine_loads().snapshot(load.now()) {
        let label = rank_labels(router, engine.rank);
        let report = engine.report;
        let values = [
            to_gauge(report.running),
            to_gauge(report.waiting),
            engine.drift,
            to_gauge(engine.unbooked_requests),
        ];
        for (family, value) in families.into_iter().zip(values) {
            family.get_or_create(&label).set(value);
        }
        if let Some(usage) = report.kv_usage {
            workers
                .engine_kv_usage_ratio
                .get_or_create(&label)
                .set(usage);
        }
    }
}

fn to_gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

#[cfg(test)]
mod tests {
    use warmroute_metrics::TextFormat;

    use super::*;
    use crate::app::OfflineRouter;
    use crate::config::Config;

    #[tokio::test]
    async fn scrape_creates_no_series_of_removed_ranks() {
        let text = "models: [{name: m, block_size: 4}]\n\
                    workers: {list: [{id: 1, endpoint: '10.0.0.1:80'}, {id: 2, endpoint: '10.0.0.2:80'}]}\n";
        let config = Config::parse(std::path::Path::new("w.yaml"), text.as_bytes()).unwrap();
        let workers = crate::app::listed_workers(&config).unwrap();
        let offline = OfflineRouter::new(&config, workers).await.unwrap();
        let router = offline.dispatcher.router();
        let before = router.fleet();
        let stays: Vec<_> = before
            .workers()
            .filter(|worker| worker.id.0 == 1)
            .map(|worker| (**worker).clone())
            .collect();
        router.set_fleet(std::sync::Arc::new(before.reconcile(stays).fleet));
        let metrics = Metrics::new();
        refresh_workers(&metrics, router, &before);
        let page = metrics.render(TextFormat::Prometheus, |_| {}).unwrap();
        let has_rank = |id| page.contains(&format!("worker_requests_total{{worker_id=\"{id}\""));
        assert!(has_rank(1) && !has_rank(2), "{page}");
    }

    #[tokio::test]
    async fn rank_has_one_freshness_and_only_used_tiers() {
        let text = "models: [{name: m, block_size: 4}]\n\
                    workers: {list: [{id: 1, endpoint: '10.0.0.1:80', kv_events: {endpoint: 'tcp://10.0.0.1:5557'}}]}\n";
        let config = Config::parse(std::path::Path::new("w.yaml"), text.as_bytes()).unwrap();
        let workers = crate::app::listed_workers(&config).unwrap();
        let offline = OfflineRouter::new(&config, workers).await.unwrap();
        let router = offline.dispatcher.router();
        let slot = router.fleet().members().next().unwrap().slot;
        let _writer = router.index().create_writer(slot);
        let metrics = Metrics::new();
        refresh_gauges(&metrics, &offline.dispatcher);
        let page = metrics.render(TextFormat::Prometheus, |_| {}).unwrap();
        let series = |name: &str| page.lines().filter(|line| line.starts_with(name)).count();
        assert_eq!(series("warmroute_kv_event_source_freshness{"), 1, "{page}");
        assert_eq!(series("warmroute_worker_cached_blocks{"), 1, "{page}");
        assert_eq!(series("warmroute_worker_cached_blocks_limit{"), 1, "{page}");
    }
}
