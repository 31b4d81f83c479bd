//! Admin HTTP: health, readiness, metrics, and the live state as JSON of the very structs that decide. Bound to loopback
//! by default; nothing here changes anything, not even a question why.

pub mod config;
pub mod explain;
mod fleet;
pub mod token;

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use arc_swap::ArcSwap;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router as Routes};
use serde_json::{Value, json};

use crate::audit::Audit;
use crate::entrance::Entrance;
use crate::lifecycle::Readiness;
use crate::metrics::{
    ClassLabel, ClassOutcomeLabels, Metrics, ModelRoleLabels, RankLabels, RankTierLabels, RankTrustLabels, SettingLabel,
};
use crate::router::Router;
use crate::tier::Tier;
use crate::trust::Trust;

/// Where what was foreseen and what came is summed up.
pub const AUDIT: &str = "/debug/audit";

/// What the pages show.
#[derive(Clone)]
pub struct Admin {
    /// The router and the way to it.
    pub entrance: Arc<Entrance>,
    /// Whether it came as was foreseen.
    pub audit: Arc<Audit>,
    /// Measures.
    pub metrics: Arc<Metrics>,
    /// What is still pending.
    pub readiness: Readiness,
    /// The configuration in use.
    pub config: Arc<ArcSwap<Value>>,
    /// From a body to a question, for explanations.
    pub way_in: explain::WayIn,
    /// The Envoys that are told of the fleet.
    pub envoys: Page,
    /// What a cluster says of requests.
    pub cluster: Page,
    /// How the replicas stand.
    pub replicas: Page,
    /// Those who are asked for the index; null where it is ours.
    pub remote_index: Page,
}

/// What a page shows, asked for anew each time.
pub type Page = Arc<dyn Fn() -> Value + Send + Sync>;

/// The pages.
pub fn routes(admin: Admin) -> Routes {
    Routes::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(ready))
        .route("/metrics", get(metrics))
        .route("/debug/config", get(|State(admin): State<Admin>| async move { Json(admin.config.load_full()) }))
        .route("/debug/fleet", get(fleet::page))
        .route("/debug/envoys", get(|State(admin): State<Admin>| async move { Json((admin.envoys)()) }))
        .route("/debug/cluster", get(|State(admin): State<Admin>| async move { Json((admin.cluster)()) }))
        .route("/debug/replicas", get(|State(admin): State<Admin>| async move { Json((admin.replicas)()) }))
        .route("/debug/index", get(|State(admin): State<Admin>| async move { Json(index(&admin)) }))
        .route(
            "/debug/parity",
            get(|State(admin): State<Admin>| async move { Json(json!(admin.entrance.router().parity().shown())) }),
        )
        .route(
            "/debug/load",
            get(|State(admin): State<Admin>| async move { Json(json!(admin.entrance.router().load().snapshot())) }),
        )
        .route(AUDIT, get(|State(admin): State<Admin>| async move { Json(admin.audit.totals()) }))
        .route(explain::PAGE, explain::page())
        .with_state(admin)
}

/// What the index holds, and who is asked for what it does not.
fn index(admin: &Admin) -> Value {
    let mut page = json!(admin.entrance.router().index().stats());
    page["remote"] = (admin.remote_index)();
    page
}

async fn ready(State(admin): State<Admin>) -> Response {
    let pending = admin.readiness.pending();
    let status = if pending.is_empty() { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
    (status, Json(json!({ "ready": pending.is_empty(), "pending": pending }))).into_response()
}

async fn metrics(State(admin): State<Admin>) -> Response {
    match admin.metrics.page(|metrics| gauges(metrics, &admin.entrance)) {
        Ok(page) => {
            let content_type = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, content_type)], page).into_response()
        }
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Sets the gauges to what is decided by at this instant.
fn gauges(metrics: &Metrics, entrance: &Entrance) {
    gauge_ranks(metrics, entrance.router());
    gauge_sources(metrics, entrance.router());
    gauge_predictions(metrics, entrance.router());
    gauge_queue(metrics, entrance);
    metrics.workers_out.set(entrance.router().out().len() as i64);
    if let Some(sessions) = entrance.sessions() {
        let counts = sessions.counts();
        metrics.sessions.set(counts.sessions as i64);
        metrics.session_requests.set(counts.running as i64);
    }
    for (model, role, error) in entrance.router().prefill_time_errors() {
        let label = ModelRoleLabels { model: model.as_str().to_owned(), role: role.to_string() };
        metrics.prefill_time_error.get_or_create(&label).set(error);
    }
}

/// Sets the gauges of the event sources; ranks that are gone disappear.
fn gauge_sources(metrics: &Metrics, router: &Router) {
    let (lag, age) = (&metrics.kv_event_source_lag_seconds, &metrics.kv_event_source_last_event_age_seconds);
    let counts =
        [&metrics.kv_event_source_gaps, &metrics.kv_event_source_lost_batches, &metrics.kv_event_source_doubted_blocks];
    metrics.kv_event_source_trust.clear();
    [lag, age].into_iter().for_each(|family| {
        family.clear();
    });
    counts.into_iter().for_each(|family| {
        family.clear();
    });
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64());
    for member in router.fleet().members() {
        let label = RankLabels::from(member.rank);
        let trust = router.trust(member.rank).trust;
        for state in Trust::ALL {
            let labels = RankTrustLabels::new(member.rank, state.as_str());
            metrics.kv_event_source_trust.get_or_create(&labels).set(i64::from(state == trust));
        }
        let Some(facts) = router.sources().facts(member.rank) else { continue };
        if let Some(seconds) = facts.lag_seconds {
            lag.get_or_create(&label).set(seconds);
        }
        if let Some(last) = facts.last_event {
            age.get_or_create(&label).set(now - last);
        }
        for (family, count) in counts.into_iter().zip([facts.gaps, facts.lost_batches, facts.doubted_blocks]) {
            family.get_or_create(&label).set(gauge(count));
        }
    }
    metrics.setting_mismatches.clear();
    for mismatch in router.sources().all_learned().values().flat_map(|(_, mismatches)| mismatches) {
        metrics.setting_mismatches.get_or_create(&SettingLabel { setting: mismatch.setting }).inc();
    }
}

fn gauge_predictions(metrics: &Metrics, router: &Router) {
    metrics.worker_predicted_blocks.clear();
    for rank in router.predictions().stats() {
        // Two may predict for one rank, and the longer memory holds what the shorter does.
        let blocks = metrics.worker_predicted_blocks.get_or_create_owned(&RankLabels::from(rank.rank));
        blocks.set(blocks.get().max(gauge(rank.blocks)));
    }
}

fn gauge_queue(metrics: &Metrics, entrance: &Entrance) {
    for standing in entrance.admission().standing() {
        let label = ClassLabel { class: standing.class.to_string() };
        let (pending, tally) = (standing.pending, standing.tally);
        metrics.queue_requests.get_or_create(&label).set(gauge(pending.requests));
        metrics.queue_prompt_tokens.get_or_create(&label).set(gauge(pending.prompt_tokens));
        metrics.queue_cached_tokens.get_or_create(&label).set(gauge(pending.cached_tokens));
        let outcomes = [
            ("waited", tally.waited),
            ("over_requests", tally.over_requests),
            ("over_prompt_tokens", tally.over_prompt_tokens),
            ("over_cached_tokens", tally.over_cached_tokens),
            ("expired", tally.expired),
            ("left", tally.left),
        ];
        for (outcome, count) in outcomes {
            let labels = ClassOutcomeLabels { class: label.class.clone(), outcome };
            metrics.queue_outcomes.get_or_create(&labels).set(gauge(count));
        }
    }
}

/// Sets the gauges of the worker ranks; ranks that are gone disappear.
fn gauge_ranks(metrics: &Metrics, router: &Router) {
    let (blocks, prefill) = (&metrics.worker_active_decode_blocks, &metrics.worker_active_prefill_tokens);
    let (requests, cached) = (&metrics.worker_active_requests, &metrics.worker_cached_blocks);
    for family in [blocks, prefill, requests] {
        family.clear();
    }
    cached.clear();
    let held = router.index().stats().slots;
    for load in router.load().snapshot() {
        let label = RankLabels::from(load.rank);
        blocks.get_or_create(&label).set(gauge(load.active_blocks));
        prefill.get_or_create(&label).set(gauge(load.active_prefill_tokens));
        requests.get_or_create(&label).set(gauge(load.active_requests));
        // A rank without event source has no seat in the index: unknown is not zero.
        let Some(held) = held.iter().find(|held| held.slot == load.slot) else { continue };
        let counts = held.counts;
        let tiers = [counts.device, counts.host, counts.disk, counts.external];
        for (tier, count) in Tier::ALL.into_iter().zip(tiers) {
            cached.get_or_create(&RankTierLabels::new(load.rank, tier)).set(gauge(count));
        }
    }
}

fn gauge(count: u64) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}
