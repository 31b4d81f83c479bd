//! Admin HTTP server: an overview in HTML, health, readiness, metrics, and status pages with the live
//! state as JSON. It listens on loopback by default. Every page is read-only, including
//! `/debug/explain`.

mod compression;
pub mod config;
pub mod explain;
mod fleet;
mod gauges;
mod home;
mod html;
mod pages;
mod status;
#[cfg(test)]
mod tests;
pub mod token;

use std::sync::Arc;

use axum::extract::State;
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use axum::middleware::{from_fn, map_response};
use axum::response::{IntoResponse, Response};
use axum::routing::{MethodRouter, get};
use axum::{Json, Router as Routes};
use serde_json::{Value, json};
use warmroute_metrics::{Metrics, TextFormat};
use warmroute_runtime::lifecycle::Readiness;

use crate::dispatch::Dispatcher;
use crate::dispatch::audit::CacheAudit;

pub use status::{
    ModelStatus, ProcessStatus, ProcessStatusSource, ReloadReport, StatusPage, TokenizerKind,
};

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
    /// Version, configuration and features of the process.
    pub process: ProcessStatusSource,
    /// Active configuration.
    pub config: StatusPage,
    /// Components that explain routes; unset until the tokenizers are loaded.
    pub explain: explain::SharedExplainContext,
    /// Envoys connected to the xDS server.
    pub envoys: StatusPage,
    /// Status of the rules that the cluster defines: objectives and model rewrites.
    pub cluster: StatusPage,
    /// Status of the replicas.
    pub replicas: StatusPage,
    /// Status of the remote index servers.
    pub remote_index: StatusPage,
}

/// Returns the HTTP routes of the admin server.
pub fn admin_routes(admin: AdminState) -> Routes {
    Routes::new()
        .route("/", get(home::home_page))
        .route("/version", get(version_page))
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(readiness_page))
        .route("/metrics", get(metrics_page))
        .route("/debug", get(pages::list_page))
        .route("/debug/", get(pages::list_page))
        .route(
            "/debug/config",
            get(|State(admin): State<AdminState>| async move { Json((admin.config)()) }),
        )
        .route("/debug/fleet", get(fleet::fleet_page))
        .route(
            pages::ENVOYS_PATH,
            feature_page(|admin| &admin.envoys, pages::HINT_ENVOYS),
        )
        .route(
            pages::CLUSTER_PATH,
            feature_page(|admin| &admin.cluster, pages::HINT_CLUSTER),
        )
        .route(
            pages::REPLICAS_PATH,
            feature_page(|admin| &admin.replicas, pages::HINT_REPLICAS),
        )
        .route(
            "/debug/index",
            get(|State(admin): State<AdminState>| async move { Json(index_page(&admin)) }),
        )
        .route(
            pages::PARITY_PATH,
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
        .fallback(pages::unknown_path)
        .method_not_allowed_fallback(pages::wrong_method)
        .layer(map_response(add_headers))
        .layer(from_fn(compression::compress_large_page))
        .with_state(admin)
}

/// Adds the headers of all pages: browsers must not guess another content type, and must not store
/// the state.
async fn add_headers(mut response: Response) -> Response {
    let headers = response.headers_mut();
    let no_sniff = HeaderValue::from_static("nosniff");
    headers.insert(header::X_CONTENT_TYPE_OPTIONS, no_sniff);
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

/// Returns the page of a feature that may be off.
fn feature_page(
    page: fn(&AdminState) -> &StatusPage,
    hint: &'static str,
) -> MethodRouter<AdminState> {
    get(move |State(admin): State<AdminState>| async move {
        Json(page(&admin)().unwrap_or_else(|| pages::feature_off(hint)))
    })
}

/// Returns the index statistics with the status of the remote index servers.
fn index_page(admin: &AdminState) -> Value {
    let mut page = json!(admin.dispatcher.router().index().stats());
    page["remote"] =
        (admin.remote_index)().unwrap_or_else(|| pages::feature_off(pages::HINT_REMOTE_INDEX));
    page
}

async fn version_page(State(admin): State<AdminState>) -> Json<Value> {
    Json((admin.process)().version.to_json())
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
