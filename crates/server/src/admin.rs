//! Admin HTTP server: health, readiness, metrics, and status pages with the live state as JSON. It
//! listens on loopback by default. Every page is read-only, including `/debug/explain`.

pub mod config;
pub mod explain;
mod fleet;
mod gauges;
pub mod token;

use std::sync::Arc;

use arc_swap::ArcSwap;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{IntoResponse, Response};
use axum::routing::get;
use axum::{Json, Router as Routes};
use serde_json::{Value, json};
use warmroute_metrics::{Metrics, TextFormat};
use warmroute_runtime::lifecycle::Readiness;

use crate::dispatch::Dispatcher;
use crate::dispatch::audit::CacheAudit;

/// Path of the audit totals: predicted against reported cache hits.
pub const AUDIT_PATH: &str = "/debug/audit";

/// State that the pages read.
#[derive(Clone)]
pub struct AdminState {
    /// Dispatcher, which also gives access to the router.
    pub dispatcher: Arc<Dispatcher>,
    /// Audit of the predictions.
    pub audit: Arc<CacheAudit>,
    /// Metrics.
    pub metrics: Arc<Metrics>,
    /// Readiness with its pending steps.
    pub readiness: Readiness,
    /// Active configuration.
    pub config: Arc<ArcSwap<Value>>,
    /// Preprocessor access for explanations.
    pub explain: explain::ExplainContext,
    /// Envoys connected to the xDS server.
    pub envoys: StatusPage,
    /// Status of the rules that the cluster defines: objectives and model rewrites.
    pub cluster: StatusPage,
    /// Status of the replicas.
    pub replicas: StatusPage,
    /// Status of the remote index servers; null with a local index.
    pub remote_index: StatusPage,
}

/// Content of a page, computed for each request.
pub type StatusPage = Arc<dyn Fn() -> Value + Send + Sync>;

/// Returns the HTTP routes of the admin server.
pub fn admin_routes(admin: AdminState) -> Routes {
    Routes::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readiness_page))
        .route("/metrics", get(metrics_page))
        .route(
            "/debug/config",
            get(|State(admin): State<AdminState>| async move { Json(admin.config.load_full()) }),
        )
        .route("/debug/fleet", get(fleet::fleet_page))
        .route(
            "/debug/envoys",
            get(|State(admin): State<AdminState>| async move { Json((admin.envoys)()) }),
        )
        .route(
            "/debug/cluster",
            get(|State(admin): State<AdminState>| async move { Json((admin.cluster)()) }),
        )
        .route(
            "/debug/replicas",
            get(|State(admin): State<AdminState>| async move { Json((admin.replicas)()) }),
        )
        .route(
            "/debug/index",
            get(|State(admin): State<AdminState>| async move { Json(index_page(&admin)) }),
        )
        .route(
            "/debug/parity",
            get(|State(admin): State<AdminState>| async move {
                Json(json!(admin.dispatcher.router().parity().reports()))
            }),
        )
        .route(
            "/debug/load",
            get(|State(admin): State<AdminState>| async move {
                Json(json!(admin.dispatcher.router().load().snapshot()))
            }),
        )
        .route(
            "/debug/calibration",
            get(|State(admin): State<AdminState>| async move {
                Json(json!(admin.dispatcher.router().load().calibration()))
            }),
        )
        .route(
            AUDIT_PATH,
            get(|State(admin): State<AdminState>| async move { Json(admin.audit.totals()) }),
        )
        .route(explain::EXPLAIN_PATH, explain::explain_route())
        .with_state(admin)
}

/// Returns the index statistics with the status of the remote index servers.
fn index_page(admin: &AdminState) -> Value {
    let mut page = json!(admin.dispatcher.router().index().stats());
    page["remote"] = (admin.remote_index)();
    page
}

async fn readiness_page(State(admin): State<AdminState>) -> Response {
    let pending = admin.readiness.pending();
    let status = if pending.is_empty() {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    (
        status,
        Json(json!({ "ready": pending.is_empty(), "pending": pending })),
    )
        .into_response()
}

async fn metrics_page(State(admin): State<AdminState>, headers: HeaderMap) -> Response {
    let accept = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let format = TextFormat::negotiate(accept);
    match admin.metrics.render(format, |metrics| {
        gauges::refresh_gauges(metrics, &admin.dispatcher);
        let is_ready = admin.readiness.is_ready();
        metrics.process.ready.set(i64::from(is_ready));
    }) {
        Ok(page) => ([(header::CONTENT_TYPE, format.content_type())], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
