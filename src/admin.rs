//! Admin HTTP: health, readiness, metrics, and the live state as JSON of the very structs that decide. Bound to loopback
//! by default; nothing here changes anything, not even a question why.

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

use crate::audit::Audit;
use crate::entrance::Entrance;
use crate::lifecycle::Readiness;
use crate::metrics::{Metrics, TextFormat};

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
        .route(
            "/debug/config",
            get(|State(admin): State<Admin>| async move { Json(admin.config.load_full()) }),
        )
        .route("/debug/fleet", get(fleet::page))
        .route(
            "/debug/envoys",
            get(|State(admin): State<Admin>| async move { Json((admin.envoys)()) }),
        )
        .route(
            "/debug/cluster",
            get(|State(admin): State<Admin>| async move { Json((admin.cluster)()) }),
        )
        .route(
            "/debug/replicas",
            get(|State(admin): State<Admin>| async move { Json((admin.replicas)()) }),
        )
        .route(
            "/debug/index",
            get(|State(admin): State<Admin>| async move { Json(index(&admin)) }),
        )
        .route(
            "/debug/parity",
            get(|State(admin): State<Admin>| async move {
                Json(json!(admin.entrance.router().parity().shown()))
            }),
        )
        .route(
            "/debug/load",
            get(|State(admin): State<Admin>| async move {
                Json(json!(admin.entrance.router().load().snapshot()))
            }),
        )
        .route(
            AUDIT,
            get(|State(admin): State<Admin>| async move { Json(admin.audit.totals()) }),
        )
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

async fn metrics(State(admin): State<Admin>, headers: HeaderMap) -> Response {
    let accept = headers
        .get_all(header::ACCEPT)
        .iter()
        .filter_map(|value| value.to_str().ok());
    let format = TextFormat::negotiate(accept);
    match admin
        .metrics
        .page(format, |metrics| gauges::refresh(metrics, &admin.entrance))
    {
        Ok(page) => ([(header::CONTENT_TYPE, format.content_type())], page).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}
