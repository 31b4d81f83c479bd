//! `/`: overview of the process in HTML, without scripts and external files.

mod overview;
mod page;

use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, header};
use axum::response::{Html, IntoResponse as _, Response};
use warmroute_core::wall_time::WallTime;

use super::{AdminState, pages};
use overview::ProcessOverview;

/// Content security policy of the page: permits only its inline style.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; style-src 'unsafe-inline'; \
    base-uri 'none'; form-action 'none'; frame-ancestors 'none'";

pub(super) async fn home_page(State(admin): State<AdminState>, headers: HeaderMap) -> Response {
    if prefers_json(&headers) {
        return Json(pages::page_list(&admin)).into_response();
    }
    let policy = [
        (header::CONTENT_SECURITY_POLICY, CONTENT_SECURITY_POLICY),
        (header::REFERRER_POLICY, "no-referrer"),
    ];
    (policy, Html(render_at(&admin, SystemTime::now().into()))).into_response()
}

/// Renders the overview as of `now`.
pub(super) fn render_at(admin: &AdminState, now: WallTime) -> String {
    page::render(&ProcessOverview::read(admin, now))
}

/// Returns whether a client accepts JSON and not HTML.
fn prefers_json(headers: &HeaderMap) -> bool {
    let accepts = |media_type: &str| {
        headers
            .get_all(header::ACCEPT)
            .iter()
            .filter_map(|value| value.to_str().ok())
            .any(|value| value.contains(media_type))
    };
    accepts("application/json") && !accepts("text/html")
}
