//! The filter that routes: what it shows us, how long it waits for us, and what it does without us.

use std::time::Duration;

use super::control_plane::ControlPlane;
use super::dump::is;
use super::parts::{ExternalProcessing, body_mode, shows_headers, shows_trailers};
use super::remedy::{self, EnvoySetting, FilterField};
use super::site::Site;
use super::ways::{Way, clusters, ours, way};
use crate::cmd::doctor::finding::{Finding, Level};
use crate::ext_proc::metadata::{LB, SERVED};
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
    filter
        .processing_mode
        .request_body_mode
        .starts_with(BUFFERED)
}

fn observability(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    filter.observability_mode.then(|| {
        site.report(
            site.at("envoy.observability"),
            Level::Error,
            "observability_mode: true: Envoy shows us requests and ignores what we answer",
            &EnvoySetting::Filter(remedy::OBSERVABILITY),
        )
    })
}

fn request_headers(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    let mode = &filter.processing_mode.request_header_mode;
    (!shows_headers(mode)).then(|| {
        site.report(
            site.at("envoy.request_headers"),
            Level::Error,
            format!("request_header_mode: {mode}: we see neither path nor headers of a request, and route none"),
            &EnvoySetting::Filter(remedy::REQUEST_HEADERS),
        )
    })
}

fn request_body(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let mode = body_mode(&filter.processing_mode.request_body_mode);
    let seen = match mode {
        BUFFERED | FULL_DUPLEX => {
            return site
                .at("envoy.request_body")
                .ok(format!("request_body_mode: {mode}"));
        }
        "NONE" => "no prompt is shown to warmroute, so every request is routed by load alone",
        "STREAMED" => {
            "the worker is named when a part of the body has gone already: the choice comes too late"
        }
        _ => "of long bodies we see the beginning only",
    };
    let at = site.at("envoy.request_body");
    site.report(
        at,
        Level::Error,
        format!("request_body_mode: {mode}: {seen}"),
        &EnvoySetting::Filter(remedy::REQUEST_BODY),
    )
}

/// What full duplex cannot do without, and what it does not know.
fn full_duplex(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    if !duplex(filter) {
        return None;
    }
    let at = site.at("envoy.full_duplex");
    if !shows_trailers(&filter.processing_mode.request_trailer_mode) {
        return Some(site.report(
            at,
            Level::Error,
            "request_body_mode: FULL_DUPLEX_STREAMED without the request's trailers: bodies that end with some never end for us",
            &EnvoySetting::Filter(remedy::REQUEST_TRAILERS),
        ));
    }
    let seen =
        "allow_content_length_header: false: workers get every body in chunks, without its length";
    Some(match (filter.allow_content_length_header, &site.plane) {
        (true, _) => at.ok("trailers are shown and lengths are kept"),
        (false, ControlPlane::Other) => site.report(
            at,
            Level::Warning,
            seen,
            &EnvoySetting::Filter(remedy::CONTENT_LENGTH),
        ),
        // Engines read chunked bodies: not worth a patch of generated configuration.
        (false, _) => at.note(seen),
    })
}

fn response_headers(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let mode = &filter.processing_mode.response_header_mode;
    if shows_headers(mode) {
        return site
            .at("envoy.response_headers")
            .ok("response_header_mode: SEND");
    }
    site.report(
        site.at("envoy.response_headers"),
        Level::Warning,
        format!(
            "response_header_mode: {mode}: we never learn that a worker failed, nor when a prefill was over, and answers do \
             not say how they were routed"
        ),
        &EnvoySetting::Filter(remedy::RESPONSE_HEADERS),
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
            [remedy::RESPONSE_BODY, remedy::MODE_OVERRIDE].map(|field| site.fix(&EnvoySetting::Filter(field)).unwrap_or_default()).join("; and "),
        )),
        _ => Some(site.report(
            at,
            Level::Error,
            format!("response_body_mode: {mode}: Envoy holds answers back until they are whole, event streams too"),
            &EnvoySetting::Filter(remedy::RESPONSE_BODY),
        )),
    }
}

fn response_trailers(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let at = site.at("envoy.response_trailers");
    if shows_trailers(&filter.processing_mode.response_trailer_mode) {
        return at.ok("response_trailer_mode: SEND");
    }
    site.report(
        at,
        Level::Error,
        "response_trailer_mode: SKIP: Envoy leaves us when an answer begins, so that its load is released long before its \
         end, and clients that leave are not noticed",
        &EnvoySetting::Filter(remedy::RESPONSE_TRAILERS),
    )
}

fn failure_mode(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let at = site.at("envoy.failure_mode");
    let allow = filter.failure_mode_allow;
    let ours = if site.expected.fail_closed {
        "fail_closed"
    } else {
        "fail_open"
    };
    let seen = format!("failure_mode_allow: {allow}, failure.mode: {ours}");
    match (allow, site.expected.fail_closed, duplex(filter)) {
        (_, false, true) => at.warning(
            format!("{seen}; in full duplex clients get 500 whenever we are away, whatever is said here"),
            "write `failure: {mode: fail_closed}` in the configuration of warmroute, or set BUFFERED bodies and \
             `failure_mode_allow: true` in the filter, to serve requests without warmroute",
        ),
        // Envoy applies it only when the stream to warmroute ends before the body is sent. While an endpoint is listed it is not.
        (true, true, true) => at.note(format!(
            "{seen}; in full duplex Envoy serves requests without warmroute only when it has no endpoint of warmroute. While an endpoint is \
             listed, requests get 500 after warmroute was killed, and hang while it is frozen. With buffered bodies they are served in both \
             cases"
        )),
        (false, false, false) => {
            let fix = site.fix(&EnvoySetting::Filter(remedy::FAILURE_MODE));
            let ours = "`failure: {mode: fail_closed}` in the configuration of warmroute, if requests should fail without it";
            at.warning(
                format!("{seen}; without warmroute every request gets 500, and open responses are cut"),
                fix.map_or(format!("write {ours}"), |fix| format!("{fix}; or {ours}")),
            )
        }
        _ => at.ok(seen),
    }
}

fn message_timeout(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    if duplex(filter) {
        return None;
    }
    let at = site.at("envoy.message_timeout");
    let (given, needed) = (
        filter
            .message_timeout
            .map_or(MESSAGE_TIMEOUT, |given| given.0),
        site.expected.exchange_deadline,
    );
    let seen = format!(
        "message_timeout: {}, limits.exchange_deadline: {}",
        Period(given),
        Period(needed)
    );
    Some(if given > needed {
        at.ok(seen)
    } else {
        let ours = format!(
            "in our configuration a `limits.exchange_deadline` below {}",
            Period(given)
        );
        let length = needed + Duration::from_millis(200);
        let fix = site.fix(&EnvoySetting::Filter(FilterField::message_timeout(length)));
        at.error(
            format!("{seen}; long prompts go on unrouted before we give up on them and route them by load"),
            fix.map_or(ours.clone(), |fix| format!("{fix}, or {ours}")),
        )
    })
}

fn max_message_timeout(site: &Site<'_>, filter: &ExternalProcessing) -> Option<Finding> {
    let needed = site.expected.wait.filter(|_| !duplex(filter))?;
    let at = site.at("envoy.max_message_timeout");
    let given = filter
        .max_message_timeout
        .map(|given| given.0)
        .filter(|given| !given.is_zero());
    let seen = given.map_or("none".to_owned(), |given| Period(given).to_string());
    let seen = format!(
        "max_message_timeout: {seen}, the longest wait with its margin: {}",
        Period(needed)
    );
    if given.is_some_and(|given| given >= needed) {
        return Some(at.ok(seen));
    }
    let seen = format!(
        "{seen}; requests that wait in the queue, for a session or for a prefill are forwarded unrouted"
    );
    Some(site.report(
        at,
        Level::Error,
        seen,
        &EnvoySetting::Filter(FilterField::max_message_timeout(needed)),
    ))
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
    Some(site.report(
        at,
        Level::Warning,
        seen,
        &EnvoySetting::Filter(remedy::MODE_OVERRIDE),
    ))
}

/// Whether a response says which worker answered, or whether Envoy did: by attributes, or else by Envoy's headers.
fn attributes(site: &Site<'_>, filter: &ExternalProcessing) -> Finding {
    let at = site.at("envoy.response_attributes");
    let missing: Vec<&str> = ATTRIBUTES
        .into_iter()
        .filter(|name| !filter.response_attributes.iter().any(|one| one == name))
        .collect();
    if missing.is_empty() {
        return at.ok(format!("response_attributes: [{}]", ATTRIBUTES.join(", ")));
    }
    let ignored = filter
        .ignored_attributes
        .iter()
        .any(|name| missing.contains(&name.as_str()));
    let seen = format!(
        "response_attributes has no {}{}",
        missing.join(" and no "),
        if ignored {
            " (Envoy ignores those in the `overrides` of a route)"
        } else {
            ""
        }
    );
    if suppresses_headers(site) {
        return site.report(
            site.at("envoy.suppressed_headers"),
            Level::Warning,
            format!(
                "{seen}, and `suppress_envoy_headers` removes x-envoy-upstream-service-time: warmroute cannot tell the 503 of an overloaded \
                 worker from Envoy's 503 for an unreachable one"
            ),
            &EnvoySetting::EnvoyHeaders,
        );
    }
    if site.plane != ControlPlane::Other && (!retries(site) || names_served(site, filter)) {
        return at.ok(format!(
            "{seen}; Envoy's headers and metadata identify the source of a response"
        ));
    }
    let seen = format!(
        "{seen}: after a retry the failed worker is not detected, and a 503 of Envoy counts as the response of an overloaded worker"
    );
    site.report(
        at,
        Level::Warning,
        seen,
        &EnvoySetting::Filter(remedy::RESPONSE_ATTRIBUTES),
    )
}

fn suppresses_headers(site: &Site<'_>) -> bool {
    let filters = site
        .server
        .hcm
        .http_filters
        .iter()
        .map(|filter| &filter.typed_config);
    filters
        .filter(|config| is(config, "Router"))
        .any(|config| config["suppress_envoy_headers"] == true)
}

fn retries(site: &Site<'_>) -> bool {
    site.active
        .iter()
        .any(|active| active.retry_policy().is_some())
}

/// Whether every cluster of the workers reports the endpoint that served.
fn names_served(site: &Site<'_>, filter: &ExternalProcessing) -> bool {
    let reported = |way: Way| matches!(way, Way::Override(policy) if policy.selected_host_key == Some(ours(SERVED)));
    let forwarded = filter.metadata_options.forwarding_namespaces.has(LB);
    forwarded
        && clusters(site)
            .into_iter()
            .all(|(cluster, _)| reported(way(cluster)))
}

/// A length of time as Envoy's YAML takes it.
pub(super) fn seconds(length: Duration) -> String {
    format!("{}s", length.as_secs_f64())
}
