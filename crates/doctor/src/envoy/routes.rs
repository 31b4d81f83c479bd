//! Checks of the inference routes: body limits, timeouts, retries, and routing headers of clients.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;
use warmroute_settings::{ByteSize, DurationSetting};

use super::control_plane::ControlPlane;
use super::ext_proc_cluster::{ClusterTraffic, check_breakers};
use super::filter::is_buffered;
use super::fixes::EnvoySetting;
use super::host_selection::{HostSelection, host_selection, routed_clusters, selection_headers};
use super::retry::{has_remote_prefill, late_conditions};
use super::schema::{EnvoyCluster, RetryPolicy, has_type};
use super::site::{ActiveRoute, FilterSite};
use crate::finding::{Finding, FindingBuilder, FindingLevel};

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
    let mut findings: Vec<Finding> = check_client_headers(site)
        .into_iter()
        .chain(check_idle_timeout(site))
        .collect();
    for active in &site.active {
        let checks = [
            check_body_limit(site, active),
            Some(check_timeout(site, active)),
            check_retry(site, active),
        ];
        for finding in checks.into_iter().flatten() {
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    for (cluster, _) in routed_clusters(site) {
        findings.push(check_breakers(site, cluster, ClusterTraffic::Requests));
        findings.push(check_worker_idle_timeout(site, cluster));
    }
    findings
}

/// Compares the body limits. If Envoy's limit is larger, longer bodies are forwarded unrouted. If
/// it is smaller, Envoy rejects requests.
fn check_body_limit(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> Option<Finding> {
    if !is_buffered(&active.filter) {
        return None;
    }
    let at = site.route_check("envoy.body_limit", active);
    let (limit, name) = buffer_limit(site, active);
    let message = format!(
        "{} ({name}), requests.limits.max_body_size: {}",
        ByteSize(limit),
        ByteSize(site.expected.body_limit)
    );
    let own = format!(
        "in the virtual host `{}` write `request_body_buffer_limit: {}`",
        active.host.name, site.expected.body_limit
    );
    let ours = format!(
        "in the configuration of warmroute `requests: {{limits: {{max_body_size: {}}}}}`",
        ByteSize(limit)
    );
    let fix = site
        .fix(&EnvoySetting::BodyLimit(site.expected.body_limit, own))
        .unwrap_or_default();
    let fix_or_limit = format!("{fix}, or {ours}");
    Some(match limit.cmp(&site.expected.body_limit) {
        std::cmp::Ordering::Equal => at.ok(message),
        // The connection buffers of Envoy Gateway are too small even for average prompts.
        std::cmp::Ordering::Less if limit < DEFAULT_BUFFER => at.error(
            format!(
                "{message}; longer bodies get 413, and prompts of a few thousand tokens \
            exceed the limit"
            ),
            fix,
        ),
        std::cmp::Ordering::Less => at.warning(
            format!(
                "{message}; longer bodies get 413, although warmroute accepts \
            them"
            ),
            fix_or_limit,
        ),
        std::cmp::Ordering::Greater => at.error(
            format!("{message}; bodies between the two limits are forwarded unrouted"),
            fix_or_limit,
        ),
    })
}

/// Returns the limit of a buffered body on a route, and the name of the setting.
fn buffer_limit(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> (u64, &'static str) {
    let route = active.route;
    let host = active.host;
    let limits = [
        (
            route.request_body_buffer_limit,
            "request_body_buffer_limit of the route",
        ),
        (
            host.request_body_buffer_limit,
            "request_body_buffer_limit of the virtual host",
        ),
        (
            route.per_request_buffer_limit_bytes,
            "per_request_buffer_limit_bytes of the route",
        ),
        (
            host.per_request_buffer_limit_bytes,
            "per_request_buffer_limit_bytes of the virtual host",
        ),
        (
            site.listener.connection_buffer,
            "per_connection_buffer_limit_bytes of the listener",
        ),
    ];
    limits
        .into_iter()
        .find_map(|(limit, name)| Some((limit?, name)))
        .unwrap_or((DEFAULT_BUFFER, "the default"))
}

fn check_timeout(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> Finding {
    let at = site.route_check("envoy.route_timeout", active);
    let fix = site
        .fix(&EnvoySetting::RouteTimeout(active.title()))
        .unwrap_or_default();
    match active.action.timeout.map(|given| given.0) {
        Some(Duration::ZERO) => at.ok("no timeout for responses"),
        Some(given) => at.warning(
            format!(
                "timeout: {}; longer responses are cut off",
                DurationSetting(given)
            ),
            fix,
        ),
        None => at.error(
            format!(
                "timeout: {}, the default; longer responses are cut off",
                DurationSetting(DEFAULT_TIMEOUT)
            ),
            fix,
        ),
    }
}

fn check_retry(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> Option<Finding> {
    let at = site.route_check("envoy.retry", active);
    let to: Vec<HostSelection> = active
        .action
        .clusters()
        .filter_map(|name| site.dump.clusters.get(name))
        .map(host_selection)
        .collect();
    let several = to
        .iter()
        .any(|selection| matches!(selection, HostSelection::Override(_)));
    let Some(policy) = active.retry_policy() else {
        let by_address = to
            .iter()
            .any(|selection| matches!(selection, HostSelection::OriginalDst(_)));
        let is_needed = several || (by_address && site.plane != ControlPlane::Other);
        return if is_needed {
            missing_retry_policy(site, active, at)
        } else {
            None
        };
    };
    let RetryPolicy {
        retry_on,
        retry_host_predicate,
        ..
    } = policy;
    let late = late_conditions(policy);
    // With disaggregated prefill, such retries are intended, because either worker may fail. The
    // retry filter is checked separately.
    if !late.is_empty() && !has_remote_prefill(site, active) {
        return Some(at.warning(
            format!(
                "retry_on: {retry_on}: after {} a prompt that a worker has already started is \
                computed again",
                late.join(" and ")
            ),
            retry_fix(
                site,
                active,
                "`retry_on: connect-failure,refused-stream,reset-before-request`",
            ),
        ));
    }
    let avoids_previous_hosts = retry_host_predicate
        .iter()
        .any(|predicate| predicate.name.contains("previous_hosts"));
    Some(if avoids_previous_hosts || !several {
        at.ok(format!("retry_on: {retry_on}"))
    } else {
        at.warning(
            "no previous_hosts predicate: a retry may go to the same dead worker",
            retry_fix(
                site,
                active,
                "the `retry_host_predicate` and the `host_selection_retry_max_attempts` of \
                envoy/standalone.yaml",
            ),
        )
    })
}

fn missing_retry_policy(
    site: &FilterSite<'_>,
    active: &ActiveRoute<'_>,
    at: FindingBuilder,
) -> Option<Finding> {
    let cluster = active
        .action
        .clusters()
        .find_map(|name| site.dump.clusters.get(name))?;
    let fix = format!(
        "write the `retry_policy` of envoy/standalone.yaml in the {}",
        active.title()
    );
    Some(site.report(
        at,
        FindingLevel::Warning,
        "no retry_policy: requests to a dead worker get 503 until warmroute excludes it",
        &EnvoySetting::Retry(cluster, fix),
    ))
}

fn retry_fix(site: &FilterSite<'_>, active: &ActiveRoute<'_>, text: &str) -> String {
    let own = format!(
        "in the `retry_policy` of the {} write {text}",
        active.title()
    );
    let cluster = active
        .action
        .clusters()
        .find_map(|name| site.dump.clusters.get(name));
    cluster
        .and_then(|cluster| site.fix(&EnvoySetting::Retry(cluster, own.clone())))
        .unwrap_or(own)
}

/// Checks the idle timeout. A queued request transfers no data, so the timeout must exceed the
/// longest wait.
fn check_idle_timeout(site: &FilterSite<'_>) -> Option<Finding> {
    let at = site.listener_check("envoy.idle_timeout");
    let of_all = site
        .listener
        .hcm
        .stream_idle_timeout
        .map_or(DEFAULT_IDLE_TIMEOUT, |given| given.0);
    // A route may override it, and zero disables it.
    let of_routes = site
        .active
        .iter()
        .map(|active| active.action.idle_timeout.map_or(of_all, |given| given.0));
    let given =
        of_routes
            .filter(|given| !given.is_zero())
            .min()
            .unwrap_or(if site.active.is_empty() {
                of_all
            } else {
                Duration::ZERO
            });
    let needed = site.expected.longest_wait.unwrap_or_default();
    Some(if given.is_zero() || given > needed {
        at.ok(format!("stream_idle_timeout: {}", DurationSetting(given)))
    } else {
        at.error(
            format!(
                "stream_idle_timeout: {}, the longest wait: {}; waiting requests are ended",
                DurationSetting(given),
                DurationSetting(needed)
            ),
            site.fix(&EnvoySetting::IdleTimeout(
                needed + Duration::from_secs(600),
            ))
            .unwrap_or_default(),
        )
    })
}

/// Checks that Envoy closes idle connections before the worker does. Otherwise a request can be sent
/// on a connection that the worker is closing. Zero disables the timeout.
fn check_worker_idle_timeout(site: &FilterSite<'_>, cluster: &EnvoyCluster) -> Finding {
    let at = FindingBuilder::new(
        "envoy.worker_idle_timeout",
        format!("cluster {}", cluster.name),
    );
    let given = cluster.idle_timeout();
    let timeout = given.unwrap_or(DEFAULT_CONNECTION_IDLE_TIMEOUT);
    let source = if given.is_some() { "" } else { ", the default" };
    let message = format!("idle_timeout: {}{source}", DurationSetting(timeout));
    if !timeout.is_zero() && timeout < VLLM_KEEP_ALIVE {
        return at.ok(message);
    }
    site.report(
        at,
        FindingLevel::Warning,
        format!(
            "{message}; vLLM closes idle connections after {}, and a request sent at that moment \
            gets 503",
            DurationSetting(VLLM_KEEP_ALIVE)
        ),
        &EnvoySetting::WorkerIdleTimeout(cluster),
    )
}

/// Checks that clients cannot set routing headers. warmroute removes them from the requests that it
/// receives. If a header selects the worker while warmroute is bypassed, Envoy must remove the
/// header.
fn check_client_headers(site: &FilterSite<'_>) -> Option<Finding> {
    let at = site.listener_check("envoy.client_headers");
    let stripped = removed_headers(site);
    let missing: Vec<&str> = site
        .expected
        .reserved_headers
        .iter()
        .map(String::as_str)
        .filter(|name| !stripped.contains(*name))
        .collect();
    if missing.is_empty() {
        return Some(at.ok(format!(
            "Envoy removes all {} routing headers of clients",
            site.expected.reserved_headers.len()
        )));
    }
    let fix = site
        .fix(&EnvoySetting::ClientHeaders(&missing))
        .unwrap_or_default();
    let decide = routing_headers(site);
    let dangerous: Vec<&str> = missing
        .iter()
        .copied()
        .filter(|name| decide.contains(*name))
        .collect();
    if !dangerous.is_empty() {
        return Some(at.error(
            format!(
                "Envoy accepts {} from clients: a client can choose its worker while warmroute is \
                 unavailable",
                dangerous.join(", ")
            ),
            fix,
        ));
    }
    if site.plane == ControlPlane::Other {
        return Some(at.warning(
            format!(
                "Envoy accepts {} from clients: they reach the workers while warmroute is \
                 unavailable",
                missing.join(", ")
            ),
            fix,
        ));
    }
    Some(unremoved_headers(site, at, &missing))
}

/// Reports headers that a generated configuration does not remove early. Such a configuration
/// selects the worker by metadata, or by a header that it removes later.
fn unremoved_headers(site: &FilterSite<'_>, at: FindingBuilder, missing: &[&str]) -> Finding {
    let fails_open = site
        .variants()
        .iter()
        .any(|filter| filter.failure_mode_allow);
    if fails_open {
        at.note(format!(
            "Envoy accepts {} routing headers from clients, such as {}: they select no worker, but \
             without warmroute they reach the workers",
            missing.len(),
            missing[0]
        ))
    } else {
        at.ok(format!(
            "warmroute removes {} routing headers of clients, and no request passes without it",
            missing.len()
        ))
    }
}

/// Returns the headers that are removed before the filter or a route reads them.
fn removed_headers(site: &FilterSite<'_>) -> BTreeSet<String> {
    let early = site
        .listener
        .hcm
        .early_header_mutation_extensions
        .iter()
        .map(|extension| &extension.typed_config["mutations"]);
    let before = site
        .listener
        .hcm
        .http_filters
        .iter()
        .take(site.main.index)
        .map(|filter| &filter.typed_config);
    let before = before
        .filter(|config| has_type(config, "HeaderMutation"))
        .map(|config| &config["mutations"]["request_mutations"]);
    let removed = |mutations: &Value| {
        let list = mutations.as_array().into_iter().flatten();
        list.filter_map(|mutation| mutation["remove"].as_str())
            .map(str::to_ascii_lowercase)
            .collect::<Vec<_>>()
    };
    early.chain(before).flat_map(removed).collect()
}

/// Returns the headers by which Envoy selects a host or a route.
fn routing_headers(site: &FilterSite<'_>) -> BTreeSet<String> {
    let by_cluster = routed_clusters(site)
        .into_iter()
        .flat_map(|(cluster, _)| selection_headers(&host_selection(cluster)));
    let by_route = site.active.iter().flat_map(|active| {
        let matched = active
            .route
            .matches
            .headers
            .iter()
            .map(|header| header.name.clone());
        matched.chain(active.action.cluster_header.clone())
    });
    let rules = site
        .listener
        .hcm
        .http_filters
        .iter()
        .filter_map(|filter| filter.typed_config["request_rules"].as_array());
    let by_rule = rules
        .flatten()
        .filter_map(|rule| rule["header"].as_str())
        .map(str::to_owned);
    by_cluster
        .chain(by_route)
        .chain(by_rule)
        .map(|name| name.to_ascii_lowercase())
        .collect()
}
