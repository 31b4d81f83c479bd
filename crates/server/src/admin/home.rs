//! `/`: overview of the process in HTML, without scripts and external files.

mod overview;

use std::time::SystemTime;

use axum::Json;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use axum::response::{Html, IntoResponse as _, Response};
use minijinja::{AutoEscape, Environment};
use warmroute_core::wall_time::WallTime;
use warmroute_settings::format_count;

use super::html::EscapedText;
use super::{AdminState, pages};

/// Template of the page.
const PAGE: &str = include_str!("home/page.html");

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
    match render_at(&admin, SystemTime::now().into()) {
        Ok(page) => (policy, Html(page)).into_response(),
        Err(error) => (StatusCode::INTERNAL_SERVER_ERROR, error.to_string()).into_response(),
    }
}

/// Renders the overview as of `now`. All values are escaped.
pub(super) fn render_at(admin: &AdminState, now: WallTime) -> Result<String, minijinja::Error> {
    let mut environment = Environment::new();
    environment.set_trim_blocks(true);
    environment.set_lstrip_blocks(true);
    environment.set_keep_trailing_newline(true);
    environment.set_auto_escape_callback(|_| AutoEscape::Html);
    environment.set_formatter(|out, _, value| {
        // The output of a macro is already escaped.
        if value.is_safe() {
            write!(out, "{value}")?;
        } else {
            write!(out, "{}", EscapedText(value))?;
        }
        Ok(())
    });
    environment.add_filter("counted", |count: usize, noun: String| {
        format_count(count, &noun)
    });
    environment.render_str(PAGE, overview::read(admin, now))
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
