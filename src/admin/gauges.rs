//! Metric series whose values are read from other components at each scrape.

use std::collections::BTreeSet;
use std::time::{SystemTime, UNIX_EPOCH};

use crate::entrance::Entrance;
use crate::metrics::{
    ClassLabel, ClassOutcomeLabels, Metrics, ModelRoleLabels, RankLabels, RankTierLabels,
    RankTrustLabels, SettingLabel,
};
use crate::router::Router;
use crate::tier::Tier;
use crate::trust::Trust;
use crate::worker::WorkerRank;

/// Sets the series to the current state.
pub(super) fn refresh(metrics: &Metrics, entrance: &Entrance) {
    let router = entrance.router();
    start_roles_at_zero(metrics, router);
    refresh_ranks(metrics, router);
    refresh_sources(metrics, router);
    refresh_predictions(metrics, router);
    refresh_queue(metrics, entrance);
    metrics.workers_out.set(router.out().len() as i64);
    if let Some(sessions) = entrance.sessions() {
        let counts = sessions.counts();
        metrics.sessions.set(counts.sessions as i64);
        metrics.session_requests.set(counts.running as i64);
    }
    for (model, role, error) in router.prefill_time_errors() {
        metrics
            .prefill_time_error
            .get_or_create(&ModelRoleLabels::new(&model, Some(role)))
            .set(error);
    }
}

/// The labels of a rank of the fleet in use.
fn labels_of(router: &Router, rank: WorkerRank) -> RankLabels {
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

/// Sets the series of the event sources; ranks that left disappear.
fn refresh_sources(metrics: &Metrics, router: &Router) {
    let lag = &metrics.kv_event_source_lag_seconds;
    let age = &metrics.kv_event_source_last_event_age_seconds;
    let gaps = &metrics.kv_event_source_gaps;
    let lost = &metrics.kv_event_source_lost_batches;
    let stale_blocks = &metrics.kv_event_source_doubted_blocks;
    metrics.kv_event_source_trust.clear();
    lag.clear();
    age.clear();
    gaps.clear();
    lost.clear();
    stale_blocks.clear();
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64());
    for member in router.fleet().members() {
        let label = RankLabels::new(member.rank, Some(member.worker.role));
        let trust = router.trust(member.rank).trust;
        for state in Trust::ALL {
            let labels = RankTrustLabels::new(&label, state.as_str());
            metrics
                .kv_event_source_trust
                .get_or_create(&labels)
                .set(i64::from(state == trust));
        }
        let Some(facts) = router.sources().facts(member.rank) else {
            continue;
        };
        if let Some(seconds) = facts.lag_seconds {
            lag.get_or_create(&label).set(seconds);
        }
        if let Some(last) = facts.last_event {
            age.get_or_create(&label).set(now - last);
        }
        gaps.get_or_create(&label).inc_by(facts.gaps);
        lost.get_or_create(&label).inc_by(facts.lost_batches);
        stale_blocks
            .get_or_create(&label)
            .set(gauge(facts.doubted_blocks));
    }
    metrics.setting_mismatches.clear();
    for setting in crate::learned::SETTINGS {
        metrics.start_setting_at_zero(setting);
    }
    for mismatch in router
        .sources()
        .all_learned()
        .values()
        .flat_map(|(_, mismatches)| mismatches)
    {
        metrics
            .setting_mismatches
            .get_or_create(&SettingLabel {
                setting: mismatch.setting,
            })
            .inc();
    }
}

fn refresh_predictions(metrics: &Metrics, router: &Router) {
    metrics.worker_predicted_blocks.clear();
    for rank in router.predictions().stats() {
        // Two predictors may cover one rank. The one that retains blocks longer also holds the blocks of the other.
        let blocks = metrics
            .worker_predicted_blocks
            .get_or_create_owned(&labels_of(router, rank.rank));
        blocks.set(blocks.get().max(gauge(rank.blocks)));
    }
}

fn refresh_queue(metrics: &Metrics, entrance: &Entrance) {
    metrics.queue_outcomes.clear();
    for standing in entrance.admission().standing() {
        let label = ClassLabel {
            class: standing.class.to_string(),
        };
        let pending = standing.pending;
        let tally = standing.tally;
        metrics
            .queue_requests
            .get_or_create(&label)
            .set(gauge(pending.requests));
        metrics
            .queue_prompt_tokens
            .get_or_create(&label)
            .set(gauge(pending.prompt_tokens));
        metrics
            .queue_cached_tokens
            .get_or_create(&label)
            .set(gauge(pending.cached_tokens));
        let outcomes = [
            ("waited", tally.waited),
            ("over_requests", tally.over_requests),
            ("over_prompt_tokens", tally.over_prompt_tokens),
            ("over_cached_tokens", tally.over_cached_tokens),
            ("expired", tally.expired),
            ("left", tally.left),
        ];
        for (outcome, count) in outcomes {
            let labels = ClassOutcomeLabels {
                class: label.class.clone(),
                outcome,
            };
            metrics.queue_outcomes.get_or_create(&labels).inc_by(count);
        }
    }
}

/// Sets the series of the worker ranks; ranks that left disappear.
fn refresh_ranks(metrics: &Metrics, router: &Router) {
    let blocks = &metrics.worker_active_decode_blocks;
    let prefill = &metrics.worker_active_prefill_tokens;
    let requests = &metrics.worker_active_requests;
    let cached = &metrics.worker_cached_blocks;
    for family in [blocks, prefill, requests] {
        family.clear();
    }
    cached.clear();
    metrics.worker_cached_blocks_limit.clear();
    let held = router.index().stats().slots;
    for load in router.load().snapshot() {
        let label = labels_of(router, load.rank);
        blocks.get_or_create(&label).set(gauge(load.active_blocks));
        prefill
            .get_or_create(&label)
            .set(gauge(load.active_prefill_tokens));
        requests
            .get_or_create(&label)
            .set(gauge(load.active_requests));
        // A rank without an event source has no row in the index: unknown is not zero.
        let Some(held) = held.iter().find(|held| held.slot == load.slot) else {
            continue;
        };
        let counts = held.counts;
        let tiers = [counts.device, counts.host, counts.disk, counts.external];
        for (tier, count) in Tier::ALL.into_iter().zip(tiers) {
            let labels = RankTierLabels::new(&label, tier);
            cached.get_or_create(&labels).set(gauge(count));
            metrics
                .worker_cached_blocks_limit
                .get_or_create(&labels)
                .set(gauge(held.limits.of(tier)));
        }
    }
}

fn gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
