//! Checks of the inference routes: body limits, timeouts, retries, and routing headers of clients.

use std::cmp::Ordering;
use std::collections::BTreeSet;
use std::time::Duration;

use warmroute_settings::{ByteSize, DurationSetting};

use super::cluster::{EnvoyCluster, HostSelection};
use super::control_plane::ControlPlane;
use super::ext_proc_cluster::check_request_limits;
use super::fixes::{client_headers_fix, settings};
use super::retry::{has_remote_prefill, late_conditions};
use super::site::{ActiveRoute, ClusterFacts, FilterSite, RouteFacts};
use crate::finding::{
    CheckVerdict, Finding, FindingLevel, error, note, ok, row, run_checks, warning,
};
use FindingLevel::Warning;

/// Envoy's default for buffered bodies, in bytes.
const DEFAULT_BUFFER: u64 = 1 << 20;
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(15);
const DEFAULT_IDLE_TIMEOUT: Duration = Duration::from_secs(300);
/// Envoy's default idle timeout of upstream connections.
const DEFAULT_CONNECTION_IDLE_TIMEOUT: Duration = Duration::from_secs(3600);
/// Time after which vLLM closes an idle connection (`VLLM_HTTP_TIMEOUT_KEEP_ALIVE`).
const VLLM_KEEP_ALIVE: Duration = Duration::from_secs(5);

/// Returns the findings about the routes.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let site_rows = [
        row("envoy.client_headers", check_client_headers),
        row("envoy.idle_timeout", check_idle_timeout),
    ];
    let route_rows = [
        row("envoy.body_limit", check_body_limit),
        row("envoy.route_timeout", check_timeout),
        row("envoy.retry", check_retry),
    ];
    let cluster_rows = [
        row("envoy.circuit_breakers", check_request_limits),
        row("envoy.worker_idle_timeout", check_worker_idle_timeout),
    ];
    let mut findings = run_checks(site, &site_rows);
    for active in &site.active {
        findings.extend(run_checks(&RouteFacts { site, active }, &route_rows));
    }
    for cluster in site.routed_clusters() {
        findings.extend(run_checks(&cluster, &cluster_rows));
    }
    findings
}

/// Compares the body limits. If Envoy's limit is larger, longer bodies are forwarded unrouted. If
/// it is smaller, Envoy rejects requests.
fn check_body_limit(at: &RouteFacts<'_, '_>) -> Option<CheckVerdict> {
    if !at.active.filter.is_buffered() {
        return None;
    }
    let (limit, name) = buffer_limit(at);
    let ours = at.site.expected.body_limit;
    let message = format!(
        "{} ({name}), requests.limits.max_body_size: {}",
        ByteSize(limit),
        ByteSize(ours)
    );
    let setting = settings::BODY_LIMIT.with("limit", ours.to_string());
    let setting = setting.with("host", at.active.host.text("name"));
    let fix = at.site.fix(setting).unwrap_or_default();
    let fix_or_limit = format!(
        "{fix}, or in the configuration of warmroute `requests: {{limits: {{max_body_size: {}}}}}`",
        ByteSize(limit)
    );
    Some(match limit.cmp(&ours) {
        Ordering::Equal => ok(message),
        // The connection buffers of Envoy Gateway are too small even for average prompts.
        Ordering::Less if limit < DEFAULT_BUFFER => error(
            format!(
                "{message}; longer bodies get 413, \
                and prompts of a few thousand tokens exceed the limit"
            ),
            fix,
        ),
        Ordering::Less => warning(
            format!("{message}; longer bodies get 413, although warmroute accepts them"),
            fix_or_limit,
        ),
        Ordering::Greater => error(
            format!("{message}; bodies between the two limits are forwarded unrouted"),
            fix_or_limit,
        ),
    })
}

/// Returns the limit of a buffered body on a route, and the name of the setting.
fn buffer_limit(at: &RouteFacts<'_, '_>) -> (u64, String) {
    let keys = [
        "request_body_buffer_limit",
        "per_request_buffer_limit_bytes",
    ];
    let levels = [(at.active.route, "route"), (at.active.host, "virtual host")];
    let settings = keys
        .iter()
        .flat_map(|key| levels.map(|(node, level)| (key, node, level)));
    let mut limits = settings.filter_map(|(key, node, level)| {
        Some((node.number(key)?, format!("{key} of the {level}")))
    });
    let of_listener = at.site.listener.connection_buffer.map(|limit| {
        let name = "per_connection_buffer_limit_bytes of the listener";
        (limit, name.to_owned())
    });
    let limit = limits.next().or(of_listener);
    limit.unwrap_or((DEFAULT_BUFFER, "the default".to_owned()))
}

fn check_timeout(at: &RouteFacts<'_, '_>) -> Option<CheckVerdict> {
    let setting = settings::ROUTE_TIMEOUT.with("route", at.active.title());
    let fix = at.site.fix(setting).unwrap_or_default();
    Some(match at.active.route.duration("route.timeout") {
        Some(Duration::ZERO) => ok("no timeout for responses"),
        Some(given) => {
            let given = DurationSetting(given);
            warning(
                format!("timeout: {given}; longer responses are cut off"),
                fix,
            )
        }
        None => {
            let given = DurationSetting(DEFAULT_TIMEOUT);
            error(
                format!("timeout: {given}, the default; longer responses are cut off"),
                fix,
            )
        }
    })
}

fn check_retry(at: &RouteFacts<'_, '_>) -> Option<CheckVerdict> {
    let clusters = at.active.clusters(at.site.dump);
    let selections: Vec<HostSelection<'_>> = clusters.map(EnvoyCluster::host_selection).collect();
    let mut found = selections.iter();
    let overrides = found.any(|selection| matches!(selection, HostSelection::Override(_)));
    let Some(policy) = at.active.retry_policy() else {
        let mut found = selections.iter();
        let by_address = found.any(|selection| matches!(selection, HostSelection::OriginalDst(_)));
        let is_needed = overrides || (by_address && at.site.plane != ControlPlane::Other);
        return if is_needed {
            missing_retry_policy(at)
        } else {
            None
        };
    };
    let retry_on = policy.text("retry_on");
    let late = late_conditions(policy);
    // With disaggregated prefill, such retries are intended, because either worker may fail. The
    // retry filter is checked separately.
    if !late.is_empty() && !has_remote_prefill(at.site, at.active) {
        let message = format!(
            "retry_on: {retry_on}: \
            after {} a prompt that a worker has already started is computed again",
            late.join(" and ")
        );
        let fix = "`retry_on: connect-failure,refused-stream,reset-before-request`";
        return Some(warning(message, retry_fix(at, fix)));
    }
    let mut predicates = policy.items("retry_host_predicate");
    if !overrides || predicates.any(|one| one.text("name").contains("previous_hosts")) {
        return Some(ok(format!("retry_on: {retry_on}")));
    }
    let fix = "the `retry_host_predicate` and the `host_selection_retry_max_attempts` \
        of envoy/standalone.yaml";
    let message = "no previous_hosts predicate: a retry may go to the same dead worker";
    Some(warning(message, retry_fix(at, fix)))
}

fn missing_retry_policy(at: &RouteFacts<'_, '_>) -> Option<CheckVerdict> {
    let cluster = at.active.clusters(at.site.dump).next()?;
    let own = format!(
        "write the `retry_policy` of envoy/standalone.yaml in the {}",
        at.active.title()
    );
    let message = "no retry_policy: requests to a dead worker get 503 until warmroute excludes it";
    let setting = settings::RETRY.of(cluster).with("own", own);
    Some(at.site.report(Warning, message, setting))
}

fn retry_fix(at: &RouteFacts<'_, '_>, text: &str) -> String {
    let own = format!(
        "in the `retry_policy` of the {} write {text}",
        at.active.title()
    );
    let cluster = at.active.clusters(at.site.dump).next();
    let setting = cluster.map(|cluster| settings::RETRY.of(cluster).with("own", own.as_str()));
    setting
        .and_then(|setting| at.site.fix(setting))
        .unwrap_or(own)
}

/// Checks the idle timeout. A queued request transfers no data, so the timeout must exceed the
/// longest wait.
fn check_idle_timeout(site: &FilterSite<'_>) -> Option<CheckVerdict> {
    let of_all = site.listener.manager().duration("stream_idle_timeout");
    let of_all = of_all.unwrap_or(DEFAULT_IDLE_TIMEOUT);
    // A route may override it, and zero disables it.
    let routes = site.active.iter().map(|active| active.route);
    let of_routes = routes.map(|route| route.duration("route.idle_timeout").unwrap_or(of_all));
    let shortest = of_routes.filter(|given| !given.is_zero()).min();
    let unused = if site.active.is_empty() {
        of_all
    } else {
        Duration::ZERO
    };
    let given = shortest.unwrap_or(unused);
    let needed = site.expected.longest_wait.unwrap_or_default();
    let message = format!("stream_idle_timeout: {}", DurationSetting(given));
    if given.is_zero() || given > needed {
        return Some(ok(message));
    }
    let setting = settings::IDLE_TIMEOUT.lasting(needed + Duration::from_secs(600));
    Some(error(
        format!(
            "{message}, the longest wait: {}; waiting requests are ended",
            DurationSetting(needed)
        ),
        site.fix(setting).unwrap_or_default(),
    ))
}

/// Checks that Envoy closes idle connections before the worker does. Otherwise a request can be
/// sent on a connection that the worker is closing. Zero disables the timeout.
fn check_worker_idle_timeout(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let given = at.cluster.idle_timeout();
    let timeout = given.unwrap_or(DEFAULT_CONNECTION_IDLE_TIMEOUT);
    let source = if given.is_some() { "" } else { ", the default" };
    let message = format!("idle_timeout: {}{source}", DurationSetting(timeout));
    if !timeout.is_zero() && timeout < VLLM_KEEP_ALIVE {
        return Some(ok(message));
    }
    let message = format!(
        "{message}; vLLM closes idle connections after {}, \
        and a request sent at that moment gets 503",
        DurationSetting(VLLM_KEEP_ALIVE)
    );
    let setting = settings::WORKER_IDLE_TIMEOUT.of(at.cluster);
    Some(at.site.report(Warning, message, setting))
}

/// Checks that clients cannot set routing headers. warmroute removes them from the requests that it
/// receives. If a header selects the worker while warmroute is bypassed, Envoy must remove the
/// header.
fn check_client_headers(site: &FilterSite<'_>) -> Option<CheckVerdict> {
    let removed = removed_headers(site);
    let reserved = site.expected.reserved_headers.iter().map(String::as_str);
    let missing: Vec<&str> = reserved.filter(|name| !removed.contains(*name)).collect();
    let Some(first) = missing.first() else {
        let count = site.expected.reserved_headers.len();
        return Some(ok(format!(
            "Envoy removes all {count} routing headers of clients"
        )));
    };
    let selecting = routing_headers(site);
    let mut dangerous = missing.clone();
    dangerous.retain(|name| selecting.contains(*name));
    let fix = site.fix(client_headers_fix(&missing)).unwrap_or_default();
    let count = missing.len();
    let variants = site.variants();
    Some(if !dangerous.is_empty() {
        let message = format!(
            "Envoy accepts {} from clients: \
            a client can choose its worker while warmroute is unavailable",
            dangerous.join(", ")
        );
        error(message, fix)
    } else if site.plane == ControlPlane::Other {
        let message = format!(
            "Envoy accepts {} from clients: they reach the workers while warmroute is unavailable",
            missing.join(", ")
        );
        warning(message, fix)
    // A generated configuration selects the worker by metadata, or by a header that it removes
    // later.
    } else if variants.iter().any(|filter| filter.allows_failure()) {
        note(format!(
            "Envoy accepts {count} routing headers from clients, such as {first}: \
            they select no worker, but without warmroute they reach the workers"
        ))
    } else {
        ok(format!(
            "warmroute removes {count} routing headers of clients, and no request passes without it"
        ))
    })
}

/// Returns the headers that are removed before the filter or a route reads them.
fn removed_headers(site: &FilterSite<'_>) -> BTreeSet<String> {
    let manager = site.listener.manager();
    let early = manager.items("early_header_mutation_extensions");
    let early = early.flat_map(|extension| extension.items("typed_config.mutations"));
    let before = site.listener.filters().take(site.main.index);
    let before = before.map(|filter| filter.at("typed_config"));
    let before = before.filter(|config| config.has_type("HeaderMutation"));
    let before = before.flat_map(|config| config.items("mutations.request_mutations"));
    let mutations = early.chain(before);
    let removed = mutations.filter_map(|mutation| mutation.given_text("remove"));
    removed.map(str::to_ascii_lowercase).collect()
}

/// Returns the headers by which Envoy selects a host or a route.
fn routing_headers(site: &FilterSite<'_>) -> BTreeSet<String> {
    let mut headers = BTreeSet::new();
    for routed in site.routed_clusters() {
        match routed.cluster.host_selection() {
            HostSelection::Override(policy) => {
                headers.extend(policy.headers().map(str::to_ascii_lowercase));
            }
            HostSelection::OriginalDst(header) => _ = headers.insert(header),
            HostSelection::Subset(_) | HostSelection::ClusterPolicy => {}
        }
    }
    let by_route = site.active.iter().flat_map(ActiveRoute::matched_headers);
    let filters = site.listener.filters();
    let rules = filters.flat_map(|filter| filter.items("typed_config.request_rules"));
    let by_rule = rules.filter_map(|rule| rule.given_text("header"));
    headers.extend(by_route.chain(by_rule).map(str::to_ascii_lowercase));
    headers
}
