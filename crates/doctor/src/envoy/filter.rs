//! Checks of the main ext_proc filter: its processing modes, its timeouts, and the behavior of
//! Envoy without warmroute.

use std::time::Duration;

use warmroute_core::envoy_names::{LB_NAMESPACE, SERVED_KEY};
use warmroute_settings::DurationSetting;

use super::control_plane::ControlPlane;
use super::fixes::{self, EnvoySetting, FilterField};
use super::host_selection::{HostSelection, host_selection, ours, routed_clusters};
use super::schema::{ExternalProcessor, body_mode, has_type, shows_headers, shows_trailers};
use super::site::FilterSite;
use crate::finding::{Finding, FindingLevel};

/// Envoy's default `message_timeout`.
const DEFAULT_MESSAGE_TIMEOUT: Duration = Duration::from_millis(200);

/// Attributes that identify the upstream host.
const UPSTREAM_ATTRIBUTES: [&str; 2] = ["upstream.address", "response.flags"];

const BUFFERED: &str = "BUFFERED";
const FULL_DUPLEX: &str = "FULL_DUPLEX_STREAMED";

/// Returns the findings about the filter, for each variant of its configuration on the routes.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for filter in site.variants() {
        let checks = [
            check_observability(site, filter),
            check_request_headers(site, filter),
            Some(check_request_body(site, filter)),
            check_full_duplex(site, filter),
            Some(check_response_headers(site, filter)),
            check_response_body(site, filter),
            Some(check_response_trailers(site, filter)),
            Some(check_failure_mode(site, filter)),
            check_message_timeout(site, filter),
            check_max_message_timeout(site, filter),
            check_mode_override(site, filter),
            Some(check_attributes(site, filter)),
        ];
        for finding in checks.into_iter().flatten() {
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    findings
}

/// Returns whether request bodies are streamed in full duplex.
pub(super) fn is_full_duplex(filter: &ExternalProcessor) -> bool {
    filter.processing_mode.request_body_mode == FULL_DUPLEX
}

/// Returns whether Envoy buffers request bodies.
pub(super) fn is_buffered(filter: &ExternalProcessor) -> bool {
    filter
        .processing_mode
        .request_body_mode
        .starts_with(BUFFERED)
}

fn check_observability(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    filter.observability_mode.then(|| {
        site.report(
            site.listener_check("envoy.observability"),
            FindingLevel::Error,
            "observability_mode: true: Envoy ignores the replies of warmroute",
            &EnvoySetting::Filter(fixes::OBSERVABILITY),
        )
    })
}

fn check_request_headers(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    let mode = &filter.processing_mode.request_header_mode;
    (!shows_headers(mode)).then(|| {
        site.report(
            site.listener_check("envoy.request_headers"),
            FindingLevel::Error,
            format!(
                "request_header_mode: {mode}: warmroute gets neither path nor headers, and \
            routes no request"
            ),
            &EnvoySetting::Filter(fixes::REQUEST_HEADERS),
        )
    })
}

fn check_request_body(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Finding {
    let mode = body_mode(&filter.processing_mode.request_body_mode);
    let message = match mode {
        BUFFERED | FULL_DUPLEX => {
            return site
                .listener_check("envoy.request_body")
                .ok(format!("request_body_mode: {mode}"));
        }
        "NONE" => "warmroute gets no prompt, so every request is routed by load only",
        "STREAMED" => {
            "a part of the body is forwarded before the worker is chosen: the choice comes too late"
        }
        _ => "warmroute gets only the beginning of long bodies",
    };
    let at = site.listener_check("envoy.request_body");
    site.report(
        at,
        FindingLevel::Error,
        format!("request_body_mode: {mode}: {message}"),
        &EnvoySetting::Filter(fixes::REQUEST_BODY),
    )
}

/// Checks the requirements of full-duplex mode.
fn check_full_duplex(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    if !is_full_duplex(filter) {
        return None;
    }
    let at = site.listener_check("envoy.full_duplex");
    if !shows_trailers(&filter.processing_mode.request_trailer_mode) {
        return Some(site.report(
            at,
            FindingLevel::Error,
            "request_body_mode: FULL_DUPLEX_STREAMED without request trailers: a body followed by \
            trailers never ends for warmroute",
            &EnvoySetting::Filter(fixes::REQUEST_TRAILERS),
        ));
    }
    let message =
        "allow_content_length_header: false: workers get every body in chunks, without its length";
    Some(match (filter.allow_content_length_header, &site.plane) {
        (true, _) => at.ok("trailers are sent and content-length is preserved"),
        (false, ControlPlane::Other) => site.report(
            at,
            FindingLevel::Warning,
            message,
            &EnvoySetting::Filter(fixes::CONTENT_LENGTH),
        ),
        // Engines accept chunked bodies, so patching a generated configuration is not worthwhile.
        (false, _) => at.note(message),
    })
}

fn check_response_headers(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Finding {
    let mode = &filter.processing_mode.response_header_mode;
    if shows_headers(mode) {
        return site
            .listener_check("envoy.response_headers")
            .ok("response_header_mode: SEND");
    }
    site.report(
        site.listener_check("envoy.response_headers"),
        FindingLevel::Warning,
        format!(
            "response_header_mode: {mode}: warmroute detects neither worker failures nor the end \
            of a prefill, and responses lack the routing headers"
        ),
        &EnvoySetting::Filter(fixes::RESPONSE_HEADERS),
    )
}

fn check_response_body(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    let at = site.listener_check("envoy.response_body");
    let mode = body_mode(&filter.processing_mode.response_body_mode);
    match mode {
        "NONE" | FULL_DUPLEX => Some(at.ok(format!("response_body_mode: {mode}"))),
        "STREAMED" => Some(
            at.warning(
                "response_body_mode: STREAMED: every token passes warmroute and costs some \
            microseconds; warmroute requests bodies only when it needs them",
                [fixes::RESPONSE_BODY, fixes::MODE_OVERRIDE]
                    .map(|field| site.fix(&EnvoySetting::Filter(field)).unwrap_or_default())
                    .join("; and "),
            ),
        ),
        _ => Some(site.report(
            at,
            FindingLevel::Error,
            format!(
                "response_body_mode: {mode}: Envoy buffers whole responses, including event \
            streams"
            ),
            &EnvoySetting::Filter(fixes::RESPONSE_BODY),
        )),
    }
}

fn check_response_trailers(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Finding {
    let at = site.listener_check("envoy.response_trailers");
    if shows_trailers(&filter.processing_mode.response_trailer_mode) {
        return at.ok("response_trailer_mode: SEND");
    }
    site.report(
        at,
        FindingLevel::Error,
        "response_trailer_mode: SKIP: Envoy closes the stream when a response begins, so its load \
        is released too early, and disconnected clients are not detected",
        &EnvoySetting::Filter(fixes::RESPONSE_TRAILERS),
    )
}

fn check_failure_mode(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Finding {
    let at = site.listener_check("envoy.failure_mode");
    let allow = filter.failure_mode_allow;
    let ours = if site.expected.fail_closed {
        "fail_closed"
    } else {
        "fail_open"
    };
    let message = format!("failure_mode_allow: {allow}, gateway.failure.mode: {ours}");
    match (allow, site.expected.fail_closed, is_full_duplex(filter)) {
        (_, false, true) => at.warning(
            format!(
                "{message}; in full duplex clients get 500 while warmroute is unavailable, \
            regardless of this setting"
            ),
            "write `gateway: {failure: {mode: fail_closed}}` in the configuration of warmroute, or set \
            BUFFERED bodies and \
             `failure_mode_allow: true` in the filter, to serve requests without warmroute",
        ),
        // Envoy applies the setting only if the stream to warmroute fails before a part of the body
        // is sent. While an endpoint is listed, this is not the case.
        (true, true, true) => at.note(format!(
            "{message}; in full duplex Envoy serves requests without warmroute only if it has no \
            endpoint of warmroute. If it has one, most requests get 500 while warmroute is down. \
            While warmroute is frozen, requests wait until keepalive pings close the connection, or \
            without a limit if there are no pings. With buffered bodies, Envoy serves requests in \
            both cases"
        )),
        (false, false, false) => {
            let fix = site.fix(&EnvoySetting::Filter(fixes::FAILURE_MODE));
            let ours = "`gateway: {failure: {mode: fail_closed}}` in the configuration of warmroute, if \
            requests should fail without it";
            at.warning(
                format!(
                    "{message}; without warmroute every request gets 500, and open responses \
                are cut"
                ),
                fix.map_or(format!("write {ours}"), |fix| format!("{fix}; or {ours}")),
            )
        }
        _ => at.ok(message),
    }
}

fn check_message_timeout(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    if is_full_duplex(filter) {
        return None;
    }
    let at = site.listener_check("envoy.message_timeout");
    let given = filter
        .message_timeout
        .map_or(DEFAULT_MESSAGE_TIMEOUT, |given| given.0);
    let needed = site.expected.exchange_deadline;
    let message = format!(
        "message_timeout: {}, requests.limits.decision_timeout: {}",
        DurationSetting(given),
        DurationSetting(needed)
    );
    Some(if given > needed {
        at.ok(message)
    } else {
        let ours = format!(
            "in the configuration of warmroute a `requests.limits.decision_timeout` below {}",
            DurationSetting(given)
        );
        let length = needed + Duration::from_millis(200);
        let fix = site.fix(&EnvoySetting::Filter(FilterField::message_timeout(length)));
        at.error(
            format!(
                "{message}; Envoy forwards long prompts unrouted before warmroute falls back to \
            load-only routing"
            ),
            fix.map_or(ours.clone(), |fix| format!("{fix}, or {ours}")),
        )
    })
}

fn check_max_message_timeout(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    let needed = site
        .expected
        .longest_wait
        .filter(|_| !is_full_duplex(filter))?;
    let at = site.listener_check("envoy.max_message_timeout");
    let given = filter
        .max_message_timeout
        .map(|given| given.0)
        .filter(|given| !given.is_zero());
    let message = given.map_or("none".to_owned(), |given| {
        DurationSetting(given).to_string()
    });
    let message = format!(
        "max_message_timeout: {message}, the longest wait with its margin: {}",
        DurationSetting(needed)
    );
    if given.is_some_and(|given| given >= needed) {
        return Some(at.ok(message));
    }
    let message = format!(
        "{message}; requests that wait in the queue, for a session or for a prefill are forwarded \
        unrouted"
    );
    Some(site.report(
        at,
        FindingLevel::Error,
        message,
        &EnvoySetting::Filter(FilterField::max_message_timeout(needed)),
    ))
}

fn check_mode_override(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Option<Finding> {
    if is_full_duplex(filter) {
        return None;
    }
    let at = site.listener_check("envoy.mode_override");
    if filter.allow_mode_override {
        return Some(at.ok("allow_mode_override: true"));
    }
    let lost = match site.probe {
        Some(_) => "bodies that warmroute does not need are buffered and sent anyway",
        None => {
            "warmroute cannot request the bodies of event streams, so a prefill counts as \
            complete when the engine sends its headers"
        }
    };
    let message = format!("allow_mode_override: false: {lost}");
    Some(site.report(
        at,
        FindingLevel::Warning,
        message,
        &EnvoySetting::Filter(fixes::MODE_OVERRIDE),
    ))
}

/// Checks that a response identifies its source, a worker or Envoy, by attributes or by Envoy's
/// headers.
fn check_attributes(site: &FilterSite<'_>, filter: &ExternalProcessor) -> Finding {
    let at = site.listener_check("envoy.response_attributes");
    let missing: Vec<&str> = UPSTREAM_ATTRIBUTES
        .into_iter()
        .filter(|name| !filter.response_attributes.iter().any(|one| one == name))
        .collect();
    if missing.is_empty() {
        return at.ok(format!(
            "response_attributes: [{}]",
            UPSTREAM_ATTRIBUTES.join(", ")
        ));
    }
    let ignored = filter
        .ignored_attributes
        .iter()
        .any(|name| missing.contains(&name.as_str()));
    let message = format!(
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
            site.listener_check("envoy.suppressed_headers"),
            FindingLevel::Warning,
            format!(
                "{message}, and `suppress_envoy_headers` removes x-envoy-upstream-service-time: \
                warmroute cannot tell the 503 of an overloaded \
                 worker from Envoy's 503 for an unreachable one"
            ),
            &EnvoySetting::EnvoyHeaders,
        );
    }
    if site.plane != ControlPlane::Other
        && (!has_retries(site) || reports_served_endpoint(site, filter))
    {
        return at.ok(format!(
            "{message}; Envoy's headers and metadata identify the source of a response"
        ));
    }
    let message = format!(
        "{message}: after a retry the failed worker is not detected, and a 503 of Envoy counts as \
        the response of an overloaded worker"
    );
    site.report(
        at,
        FindingLevel::Warning,
        message,
        &EnvoySetting::Filter(fixes::RESPONSE_ATTRIBUTES),
    )
}

fn suppresses_headers(site: &FilterSite<'_>) -> bool {
    let filters = site
        .listener
        .hcm
        .http_filters
        .iter()
        .map(|filter| &filter.typed_config);
    filters
        .filter(|config| has_type(config, "Router"))
        .any(|config| config["suppress_envoy_headers"] == true)
}

fn has_retries(site: &FilterSite<'_>) -> bool {
    site.active
        .iter()
        .any(|active| active.retry_policy().is_some())
}

/// Returns whether every worker cluster reports the endpoint that served a request.
fn reports_served_endpoint(site: &FilterSite<'_>, filter: &ExternalProcessor) -> bool {
    let reported = |selection: HostSelection| matches!(selection, HostSelection::Override(policy) if policy.selected_host_key == Some(ours(SERVED_KEY)));
    let forwarded = filter
        .metadata_options
        .forwarding_namespaces
        .contains(LB_NAMESPACE);
    forwarded
        && routed_clusters(site)
            .into_iter()
            .all(|(cluster, _)| reported(host_selection(cluster)))
}

/// Formats a duration as in Envoy's YAML.
pub(super) fn format_seconds(length: Duration) -> String {
    format!("{}s", length.as_secs_f64())
}
