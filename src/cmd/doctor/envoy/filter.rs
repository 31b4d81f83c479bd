//! The filter that routes: what it shows us, how long it waits for us, and what it does without us.

use std::time::Duration;

use super::parts::{ExternalProcessing, body_mode, shows_headers, shows_trailers};
use super::site::Site;
use crate::cmd::doctor::finding::Finding;
use crate::settings::Period;

/// What Envoy waits where nothing is said.
const MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);

/// The attributes that tell who answered.
const ATTRIBUTES: [&str; 2] = ["upstream.address", "response.flags"];

const BUFFERED: &str = "BUFFERED";
const FULL_DUPLEX: &str = "FULL_DUPLEX_STREAMED";

/// Every check of the filter, for each way in which routes have it.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for filter in site.variants() {
        let checks = [
            observability(site, filter),
            request_headers(site, filter),
            Some(request_body(site, filter)),
            full_duplex(site, filter),
            Some(response_headers(site, filter)),
            response_body(site, filter),
            Some(response_trailers(site, filter)),
            Some(failure_mode(site, filter)),
            message_timeout(site, filter),
            max_message_timeout(site, filter),
            mode_override(site, filter),
            Some(attributes(site, filter)),
        ];
        for finding in checks.into_iter().flatten() {
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    findings
}

/// Whether the body of requests travels through us.
pub(super) fn duplex(filter: &ExternalProcessing) -> bool {
    filter.processing_mode.request_body_mode == FULL_DUPLEX
}

/// Whether Envoy gathers the body of requests.
pub(super) fn buffers(filter: &ExternalProcessing) -> bool {
    filter.processing_mode.request_body_mode.starts_with(BUFFERED)
}

fn observability(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    filter.observability_mode.then(|| {
        site.at("envoy.observability").error(
            "observability_mode: true: Envoy shows us requests and ignores what we answer",
            site.in_main("`observability_mode: false`"),
        )
    })
}

fn request_headers(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    let mode = &filter.processing_mode.request_header_mode;
    (!shows_headers(mode)).then(|| {
        site.at("envoy.request_headers").error(
            format!("request_header_mode: {mode}: we see neither path nor headers of a request, and route none"),
            site.in_main("`request_header_mode: SEND` under `processing_mode`"),
        )
    })
}

fn request_body(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let mode = body_mode(&filter.processing_mode.request_body_mode);
    let seen = match mode {
        BUFFERED | FULL_DUPLEX => {
            return site.at("envoy.request_body").ok(format!("request_body_mode: {mode}"));
        }
        "NONE" => "no prompt is shown to warmroute, so every request is routed by load alone",
        "STREAMED" => "the worker is named when a part of the body has gone already: the choice comes too late",
        _ => "of long bodies we see the beginning only",
    };
    let mend = site.in_main(
        "`request_body_mode: BUFFERED` under `processing_mode` (or FULL_DUPLEX_STREAMED with `request_trailer_mode: SEND`, \
         for bodies of any length)",
    );
    site.at("envoy.request_body").error(format!("request_body_mode: {mode}: {seen}"), mend)
}

/// What full duplex cannot do without, and what it does not know.
fn full_duplex(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    if !duplex(filter) {
        return None;
    }
    let at = site.at("envoy.full_duplex");
    if !shows_trailers(&filter.processing_mode.request_trailer_mode) {
        return Some(at.error(
            "request_body_mode: FULL_DUPLEX_STREAMED without the request's trailers: bodies that end with some never end for us",
            site.in_main("`request_trailer_mode: SEND` under `processing_mode`"),
        ));
    }
    Some(if filter.allow_content_length_header {
        at.ok("trailers are shown and lengths are kept")
    } else {
        at.warning(
            "allow_content_length_header: false: workers get every body in chunks, without its length",
            site.in_main("`allow_content_length_header: true`"),
        )
    })
}

fn response_headers(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let mode = &filter.processing_mode.response_header_mode;
    if shows_headers(mode) {
        return site.at("envoy.response_headers").ok("response_header_mode: SEND");
    }
    site.at("envoy.response_headers").warning(
        format!(
            "response_header_mode: {mode}: we never learn that a worker failed, nor when a prefill was over, and answers do \
             not say how they were routed"
        ),
        site.in_main("`response_header_mode: SEND` under `processing_mode`"),
    )
}

fn response_body(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    let at = site.at("envoy.response_body");
    let mode = body_mode(&filter.processing_mode.response_body_mode);
    match mode {
        "NONE" | FULL_DUPLEX => Some(at.ok(format!("response_body_mode: {mode}"))),
        "STREAMED" => Some(at.warning(
            "response_body_mode: STREAMED: every token passes us and costs us and Envoy some microseconds; we ask for \
             bodies where we need them",
            site.in_main("`response_body_mode: NONE` under `processing_mode`, and `allow_mode_override: true`"),
        )),
        _ => Some(at.error(
            format!("response_body_mode: {mode}: Envoy holds answers back until they are whole, event streams too"),
            site.in_main("`response_body_mode: NONE` under `processing_mode`"),
        )),
    }
}

fn response_trailers(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let at = site.at("envoy.response_trailers");
    if shows_trailers(&filter.processing_mode.response_trailer_mode) {
        return at.ok("response_trailer_mode: SEND");
    }
    at.error(
        "response_trailer_mode: SKIP: Envoy leaves us when an answer begins, so that its load is released long before its \
         end, and clients that leave are not noticed",
        site.in_main("`response_trailer_mode: SEND` under `processing_mode`"),
    )
}

fn failure_mode(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let at = site.at("envoy.failure_mode");
    let allow = filter.failure_mode_allow;
    let ours = if site.expected.fail_closed { "fail_closed" } else { "fail_open" };
    let seen = format!("failure_mode_allow: {allow}, failure.mode: {ours}");
    match (allow, site.expected.fail_closed, duplex(filter)) {
        (_, false, true) => at.warning(
            format!("{seen}; in full duplex clients get 500 whenever we are away, whatever is said here"),
            "write `failure: {mode: fail_closed}` in our configuration to say so, or `request_body_mode: BUFFERED` and \
             `failure_mode_allow: true` in the filter to be served without us",
        ),
        (false, false, false) => at.warning(
            format!("{seen}; while we are away every request is a 500, and answers under way are cut"),
            format!("{}; or `failure: {{mode: fail_closed}}` in our configuration, if that is meant", {
                site.in_main("`failure_mode_allow: true`")
            }),
        ),
        _ => at.ok(seen),
    }
}

fn message_timeout(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    if duplex(filter) {
        return None;
    }
    let at = site.at("envoy.message_timeout");
    let (given, needed) =
        (filter.message_timeout.map_or(MESSAGE_TIMEOUT, |given| given.0), site.expected.exchange_deadline);
    let seen = format!("message_timeout: {}, limits.exchange_deadline: {}", Period(given), Period(needed));
    Some(if given > needed {
        at.ok(seen)
    } else {
        at.error(
            format!("{seen}; long prompts go on unrouted before we give up on them and route them by load"),
            format!(
                "{}, or in our configuration a `limits.exchange_deadline` below {}",
                site.in_main(&format!("`message_timeout: {}`", seconds(needed + Duration::from_millis(200)))),
                Period(given)
            ),
        )
    })
}

fn max_message_timeout(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    let needed = site.expected.wait.filter(|_| !duplex(filter))?;
    let at = site.at("envoy.max_message_timeout");
    let given = filter.max_message_timeout.map(|given| given.0).filter(|given| !given.is_zero());
    let seen = given.map_or("none".to_owned(), |given| Period(given).to_string());
    let seen = format!("max_message_timeout: {seen}, the longest wait with its margin: {}", Period(needed));
    if given.is_some_and(|given| given >= needed) {
        return Some(at.ok(seen));
    }
    let mend = site.in_main(&format!("`max_message_timeout: {}`", seconds(needed)));
    Some(at.error(format!("{seen}; requests that wait for a turn, a session or a prefill go on unrouted"), mend))
}

fn mode_override(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    if duplex(filter) {
        return None;
    }
    let at = site.at("envoy.mode_override");
    if filter.allow_mode_override {
        return Some(at.ok("allow_mode_override: true"));
    }
    let lost = match site.probe {
        Some(_) => "bodies that we need not read are gathered and sent all the same",
        None => {
            "we cannot ask for the bodies of event streams, so that a prefill counts as over when the engine sends its headers"
        }
    };
    let seen = format!("allow_mode_override: false: {lost}");
    Some(at.warning(seen, site.in_main("`allow_mode_override: true`")))
}

fn attributes(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let at = site.at("envoy.response_attributes");
    let missing: Vec<&str> =
        ATTRIBUTES.into_iter().filter(|name| !filter.response_attributes.iter().any(|one| one == name)).collect();
    if missing.is_empty() {
        return at.ok(format!("response_attributes: [{}]", ATTRIBUTES.join(", ")));
    }
    at.warning(
        format!(
            "response_attributes has no {}: a dead worker behind a retry looks well, and Envoy's own 503 like a busy worker",
            missing.join(" and no ")
        ),
        site.in_main(&format!("`response_attributes: [{}]`", ATTRIBUTES.join(", "))),
    )
}

/// A length of time as Envoy's YAML takes it.
pub(super) fn seconds(length: Duration) -> String {
    format!("{}s", length.as_secs_f64())
}
