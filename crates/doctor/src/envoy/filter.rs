//! Checks of the main ext_proc filter: its processing modes, its timeouts, and the behavior of
//! Envoy without warmroute.

use std::time::Duration;

use warmroute_core::envoy_names::{LB_NAMESPACE, SERVED_KEY};
use warmroute_settings::DurationSetting;

use super::control_plane::ControlPlane;
use super::ext_proc_filter::{BUFFERED, FULL_DUPLEX};
use super::fixes::settings;
use super::site::{FilterFacts, FilterSite};
use crate::finding::{
    CheckVerdict, Finding, FindingLevel, error, note, ok, row, run_checks, warning,
};
use FindingLevel::{Error, Warning};

/// Envoy's default `message_timeout`.
const DEFAULT_MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);

/// Attributes that identify the upstream host.
const UPSTREAM_ATTRIBUTES: [&str; 2] = ["upstream.address", "response.flags"];

/// Returns the findings about the filter, for each variant of its configuration on the routes.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let rows = [
        row("envoy.observability", check_observability),
        row("envoy.request_headers", check_request_headers),
        row("envoy.request_body", check_request_body),
        row("envoy.full_duplex", check_full_duplex),
        row("envoy.response_headers", check_response_headers),
        row("envoy.response_body", check_response_body),
        row("envoy.response_trailers", check_response_trailers),
        row("envoy.failure_mode", check_failure_mode),
        row("envoy.message_timeout", check_message_timeout),
        row("envoy.max_message_timeout", check_max_message_timeout),
        row("envoy.mode_override", check_mode_override),
        row("envoy.suppressed_headers", check_suppressed_headers),
        row("envoy.response_attributes", check_attributes),
    ];
    let variants = site.variants().into_iter();
    variants
        .flat_map(|filter| run_checks(&FilterFacts { site, filter }, &rows))
        .collect()
}

fn check_observability(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let message = "observability_mode: true: Envoy ignores the replies of warmroute";
    let is_set = at.filter.node().flag("observability_mode");
    is_set.then(|| at.site.report(Error, message, &settings::OBSERVABILITY))
}

fn check_request_headers(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    if at.filter.sends_headers("request_header_mode") {
        return None;
    }
    let message = "request_header_mode: SKIP: warmroute gets neither path nor headers, \
        and routes no request";
    Some(at.site.report(Error, message, &settings::REQUEST_HEADERS))
}

fn check_request_body(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let mode = at.filter.mode("request_body_mode");
    let effect = match mode {
        BUFFERED | FULL_DUPLEX => return Some(ok(format!("request_body_mode: {mode}"))),
        "NONE" => "warmroute gets no prompt, so every request is routed by load only",
        "STREAMED" => {
            "a part of the body is forwarded before the worker is chosen: the choice comes too late"
        }
        _ => "warmroute gets only the beginning of long bodies",
    };
    let message = format!("request_body_mode: {mode}: {effect}");
    Some(at.site.report(Error, message, &settings::REQUEST_BODY))
}

/// Checks the requirements of full-duplex mode.
fn check_full_duplex(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    if !at.filter.is_full_duplex() {
        return None;
    }
    if !at.filter.sends_trailers("request_trailer_mode") {
        let message = "request_body_mode: FULL_DUPLEX_STREAMED without request trailers: \
            a body followed by trailers never ends for warmroute";
        return Some(at.site.report(Error, message, &settings::REQUEST_TRAILERS));
    }
    let message =
        "allow_content_length_header: false: workers get every body in chunks, without its length";
    Some(if at.filter.node().flag("allow_content_length_header") {
        ok("trailers are sent and content-length is preserved")
    } else if at.site.plane == ControlPlane::Other {
        at.site.report(Warning, message, &settings::CONTENT_LENGTH)
    } else {
        // Engines accept chunked bodies, so patching a generated configuration is not worthwhile.
        note(message)
    })
}

fn check_response_headers(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    if at.filter.sends_headers("response_header_mode") {
        return Some(ok("response_header_mode: SEND"));
    }
    let message = "response_header_mode: SKIP: warmroute detects neither worker failures nor \
        the end of a prefill, and responses lack the routing headers";
    Some(
        at.site
            .report(Warning, message, &settings::RESPONSE_HEADERS),
    )
}

fn check_response_body(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let mode = at.filter.mode("response_body_mode");
    let message = format!("response_body_mode: {mode}");
    Some(match mode {
        "NONE" | FULL_DUPLEX => ok(message),
        "STREAMED" => {
            let fixes = [&settings::RESPONSE_BODY, &settings::MODE_OVERRIDE];
            let fixes = fixes.map(|setting| at.site.fix(setting).unwrap_or_default());
            let message = format!(
                "{message}: every token passes warmroute and costs some microseconds; \
                warmroute requests bodies only when it needs them"
            );
            warning(message, fixes.join("; and "))
        }
        _ => {
            let message =
                format!("{message}: Envoy buffers whole responses, including event streams");
            at.site.report(Error, message, &settings::RESPONSE_BODY)
        }
    })
}

fn check_response_trailers(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    if at.filter.sends_trailers("response_trailer_mode") {
        return Some(ok("response_trailer_mode: SEND"));
    }
    let message = "response_trailer_mode: SKIP: Envoy closes the stream when a response begins, \
        so its load is released too early, and disconnected clients are not detected";
    Some(at.site.report(Error, message, &settings::RESPONSE_TRAILERS))
}

fn check_failure_mode(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let allow = at.filter.allows_failure();
    let is_closed = at.site.expected.fail_closed;
    let ours = if is_closed {
        "fail_closed"
    } else {
        "fail_open"
    };
    let message = format!("failure_mode_allow: {allow}, gateway.failure.mode: {ours}");
    Some(match (allow, is_closed, at.filter.is_full_duplex()) {
        (_, false, true) => warning(
            format!(
                "{message}; in full duplex clients get 500 while warmroute is unavailable, \
                regardless of this setting"
            ),
            "write `gateway: {failure: {mode: fail_closed}}` in the configuration of warmroute, \
            or set BUFFERED bodies and `failure_mode_allow: true` in the filter, \
            to serve requests without warmroute",
        ),
        // Envoy applies the setting only if the stream to warmroute fails before a part of the body
        // is sent. While an endpoint is listed, this is not the case.
        (true, true, true) => note(format!(
            "{message}; in full duplex Envoy serves requests without warmroute only if it has no \
            endpoint of warmroute. If it has one, most requests get 500 while warmroute is down. \
            While warmroute is frozen, requests wait until keepalive pings close the connection, \
            or without a limit if there are no pings. With buffered bodies, \
            Envoy serves requests in both cases"
        )),
        (false, false, false) => {
            let ours = "`gateway: {failure: {mode: fail_closed}}` in the configuration of \
                warmroute, if requests should fail without it";
            let fix = at.site.fix(&settings::FAILURE_MODE);
            warning(
                format!(
                    "{message}; without warmroute every request gets 500, \
                    and open responses are cut"
                ),
                fix.map_or(format!("write {ours}"), |fix| format!("{fix}; or {ours}")),
            )
        }
        _ => ok(message),
    })
}

fn check_message_timeout(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    if at.filter.is_full_duplex() {
        return None;
    }
    let given = at.filter.node().duration("message_timeout");
    let given = given.unwrap_or(DEFAULT_MESSAGE_TIMEOUT);
    let needed = at.site.expected.exchange_deadline;
    let message = format!(
        "message_timeout: {}, requests.limits.decision_timeout: {}",
        DurationSetting(given),
        DurationSetting(needed)
    );
    if given > needed {
        return Some(ok(message));
    }
    let ours = format!(
        "in the configuration of warmroute a `requests.limits.decision_timeout` below {}",
        DurationSetting(given)
    );
    let length = needed + Duration::from_millis(200);
    let fix = at.site.fix(settings::MESSAGE_TIMEOUT.lasting(length));
    Some(error(
        format!(
            "{message}; Envoy forwards long prompts unrouted before warmroute falls back \
            to load-only routing"
        ),
        fix.map_or(ours.clone(), |fix| format!("{fix}, or {ours}")),
    ))
}

fn check_max_message_timeout(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let needed = at.site.expected.longest_wait;
    let needed = needed.filter(|_| !at.filter.is_full_duplex())?;
    let given = at.filter.node().duration("max_message_timeout");
    let message = format!(
        "max_message_timeout: {}, the longest wait with its margin: {}",
        format_timeout(given),
        DurationSetting(needed)
    );
    if given.is_some_and(|given| !given.is_zero() && given >= needed) {
        return Some(ok(message));
    }
    let message = format!(
        "{message}; requests that wait in the queue, \
        for a session or for a prefill are forwarded unrouted"
    );
    let setting = settings::MAX_MESSAGE_TIMEOUT.lasting(needed);
    Some(at.site.report(Error, message, setting))
}

/// Formats a timeout that Envoy ignores if it is zero.
pub(super) fn format_timeout(timeout: Option<Duration>) -> String {
    let timeout = timeout.filter(|timeout| !timeout.is_zero());
    timeout.map_or("none".to_owned(), |timeout| {
        DurationSetting(timeout).to_string()
    })
}

fn check_mode_override(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    if at.filter.is_full_duplex() {
        return None;
    }
    if at.filter.node().flag("allow_mode_override") {
        return Some(ok("allow_mode_override: true"));
    }
    let lost = match at.site.probe {
        Some(_) => "bodies that warmroute does not need are buffered and sent anyway",
        None => {
            "warmroute cannot request the bodies of event streams, \
            so a prefill counts as complete when the engine sends its headers"
        }
    };
    let message = format!("allow_mode_override: false: {lost}");
    Some(at.site.report(Warning, message, &settings::MODE_OVERRIDE))
}

/// Describes the attributes that a response lacks; `None` if it has all.
fn missing_attributes(at: &FilterFacts<'_, '_>) -> Option<String> {
    let mut missing = UPSTREAM_ATTRIBUTES.to_vec();
    missing.retain(|name| !at.filter.node().contains("response_attributes", name));
    let mut ignored = at.filter.ignored_attributes.iter();
    let ignored = if ignored.any(|name| missing.contains(&name.as_str())) {
        " (Envoy ignores those in the `overrides` of a route)"
    } else {
        ""
    };
    (!missing.is_empty()).then(|| {
        format!(
            "response_attributes has no {}{ignored}",
            missing.join(" and no ")
        )
    })
}

/// Checks that Envoy's headers identify the source of a response that lacks attributes.
fn check_suppressed_headers(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let missing = missing_attributes(at).filter(|_| suppresses_headers(at.site))?;
    let message = format!(
        "{missing}, and `suppress_envoy_headers` removes x-envoy-upstream-service-time: warmroute \
        cannot tell the 503 of an overloaded worker from Envoy's 503 for an unreachable one"
    );
    Some(at.site.report(Warning, message, &settings::ENVOY_HEADERS))
}

/// Checks that a response identifies its source, a worker or Envoy, by attributes or by Envoy's
/// headers.
fn check_attributes(at: &FilterFacts<'_, '_>) -> Option<CheckVerdict> {
    let site = at.site;
    let Some(missing) = missing_attributes(at) else {
        let names = UPSTREAM_ATTRIBUTES.join(", ");
        return Some(ok(format!("response_attributes: [{names}]")));
    };
    if suppresses_headers(site) {
        return None;
    }
    let mut active = site.active.iter();
    let has_retries = active.any(|active| active.retry_policy().is_some());
    if site.plane != ControlPlane::Other && (!has_retries || reports_served_endpoint(at)) {
        return Some(ok(format!(
            "{missing}; Envoy's headers and metadata identify the source of a response"
        )));
    }
    let message = format!(
        "{missing}: after a retry the failed worker is not detected, \
        and a 503 of Envoy counts as the response of an overloaded worker"
    );
    Some(site.report(Warning, message, &settings::RESPONSE_ATTRIBUTES))
}

fn suppresses_headers(site: &FilterSite<'_>) -> bool {
    let mut configs = site
        .listener
        .filters()
        .map(|filter| filter.at("typed_config"));
    configs.any(|config| config.has_type("Router") && config.flag("suppress_envoy_headers"))
}

/// Returns whether every worker cluster reports the endpoint that served a request.
fn reports_served_endpoint(at: &FilterFacts<'_, '_>) -> bool {
    let clusters = at.site.routed_clusters();
    let mut policies = clusters
        .iter()
        .map(|routed| routed.cluster.override_policy());
    at.filter.forwards(LB_NAMESPACE)
        && policies.all(|policy| policy.is_some_and(|policy| policy.writes_metadata(SERVED_KEY)))
}
