//! The routes of generations: how large a body may be, how long an answer may take, when it is tried again, and what a
//! client may say for us.

use std::collections::BTreeSet;
use std::time::Duration;

use serde_json::Value;

use super::control_plane::ControlPlane;
use super::dump::is;
use super::filter::buffers;
use super::parts::RetryPolicy;
use super::remedy::EnvoySetting;
use super::retry::{carried, late};
use super::server::{Held, breakers};
use super::site::{Active, Site};
use super::ways::{Way, clusters, deciding_headers, way};
use crate::cmd::doctor::finding::{Finding, Level};
use crate::settings::{Period, Size};

/// Envoy's defaults.
const BUFFER: u64 = 1 << 20;
const TIMEOUT: Duration = Duration::from_secs(15);
const IDLE: Duration = Duration::from_secs(300);

/// Every check of the routes.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = client_headers(site).into_iter().chain(idle(site)).collect();
    for active in &site.active {
        let checks = [
            body_limit(site, active),
            Some(timeout(site, active)),
            retry(site, active),
        ];
        for finding in checks.into_iter().flatten() {
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    for (cluster, _) in clusters(site) {
        findings.push(breakers(site, cluster, Held::Requests));
    }
    findings
}

/// Bodies that Envoy gathers and we refuse go on unrouted; those that it refuses never come.
fn body_limit(site: &Site<'_>, active: &Active<'_>) -> Option<Finding> {
    if !buffers(&active.filter) {
        return None;
    }
    let at = site.at_route("envoy.body_limit", active);
    let (route, host) = (active.route, active.host);
    let said = [
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
            site.server.connection_buffer,
            "per_connection_buffer_limit_bytes of the listener",
        ),
    ];
    let said = said
        .into_iter()
        .find_map(|(limit, name)| Some((limit?, name)));
    let (limit, name) = said.unwrap_or((BUFFER, "the default"));
    let seen = format!(
        "{} ({name}), limits.body: {}",
        Size(limit),
        Size(site.expected.body)
    );
    let own = format!(
        "in the virtual host `{}` write `request_body_buffer_limit: {}`",
        host.name, site.expected.body
    );
    let ours = format!("in our configuration `limits: {{body: {}}}`", Size(limit));
    let fix = site
        .fix(&EnvoySetting::BodyLimit(site.expected.body, own))
        .unwrap_or_default();
    let mend = format!("{fix}, or {ours}");
    Some(match limit.cmp(&site.expected.body) {
        std::cmp::Ordering::Equal => at.ok(seen),
        // The connection buffers of Envoy Gateway: not even prompts of usual length fit.
        std::cmp::Ordering::Less if limit < BUFFER => at.error(
            format!("{seen}; longer bodies get 413, and prompts of a few thousand tokens exceed the limit"),
            fix,
        ),
        std::cmp::Ordering::Less => {
            at.warning(format!("{seen}; longer bodies are a 413, though we would take them"), mend)
        }
        std::cmp::Ordering::Greater => {
            at.error(format!("{seen}; bodies between the two go to any worker, unrouted"), mend)
        }
    })
}

fn timeout(site: &Site<'_>, active: &Active<'_>) -> Finding {
    let at = site.at_route("envoy.route_timeout", active);
    let mend = site
        .fix(&EnvoySetting::RouteTimeout(active.title()))
        .unwrap_or_default();
    match active.action.timeout.map(|given| given.0) {
        Some(Duration::ZERO) => at.ok("a generation may take as long as it takes"),
        Some(given) => at.warning(
            format!("timeout: {}; longer generations are cut", Period(given)),
            mend,
        ),
        None => at.error(
            format!(
                "timeout: {}, the default; longer generations are cut",
                Period(TIMEOUT)
            ),
            mend,
        ),
    }
}

fn retry(site: &Site<'_>, active: &Active<'_>) -> Option<Finding> {
    let at = site.at_route("envoy.retry", active);
    let policy = active.retry_policy();
    let to: Vec<Way> = active
        .action
        .clusters()
        .filter_map(|name| site.dump.clusters.get(name))
        .map(way)
        .collect();
    let several = to.iter().any(|way| matches!(way, Way::Override(_)));
    let Some(
        policy @ RetryPolicy {
            retry_on,
            retry_host_predicate,
            ..
        },
    ) = policy
    else {
        let one = to.iter().any(|way| matches!(way, Way::Address(_)))
            && site.plane != ControlPlane::Other;
        let own = format!(
            "write the `retry_policy` of envoy/standalone.yaml in the {}",
            active.title()
        );
        let cluster = active
            .action
            .clusters()
            .find_map(|name| site.dump.clusters.get(name))?;
        let seen = "no retry_policy: requests to a dead worker get 503 until warmroute excludes it";
        return (several || one)
            .then(|| site.report(at, Level::Warning, seen, &EnvoySetting::Retry(cluster, own)));
    };
    let late = late(policy);
    // Where workers share the prompts it is meant, because either of them may be lost; what it needs is looked at by itself.
    if !late.is_empty() && !carried(site, active) {
        return Some(at.warning(
            format!(
                "retry_on: {retry_on}: after {} a prompt that a worker has begun is computed again",
                late.join(" and ")
            ),
            own_retry(
                site,
                active,
                "`retry_on: connect-failure,refused-stream,reset-before-request`",
            ),
        ));
    }
    let elsewhere = retry_host_predicate
        .iter()
        .any(|predicate| predicate.name.contains("previous_hosts"));
    Some(if elsewhere || !several {
        at.ok(format!("retry_on: {retry_on}"))
    } else {
        at.warning(
            "no previous_hosts predicate: a retry may go to the same dead worker again",
            own_retry(
                site,
                active,
                "the `retry_host_predicate` and the `host_selection_retry_max_attempts` of envoy/standalone.yaml",
            ),
        )
    })
}

fn own_retry(site: &Site<'_>, active: &Active<'_>, text: &str) -> String {
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

/// Who waits for a turn moves nothing.
fn idle(site: &Site<'_>) -> Option<Finding> {
    let at = site.at("envoy.idle_timeout");
    let of_all = site
        .server
        .hcm
        .stream_idle_timeout
        .map_or(IDLE, |given| given.0);
    // A route overrides it; zero is no timeout.
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
    let needed = site.expected.wait.unwrap_or_default();
    Some(if given.is_zero() || given > needed {
        at.ok(format!("stream_idle_timeout: {}", Period(given)))
    } else {
        at.error(
            format!(
                "stream_idle_timeout: {}, the longest wait: {}; requests are ended while they wait",
                Period(given),
                Period(needed)
            ),
            site.fix(&EnvoySetting::IdleTimeout(
                needed + Duration::from_secs(600),
            ))
            .unwrap_or_default(),
        )
    })
}

/// Our headers are ours to set. What a client sends is removed by us, where we are asked; Envoy has to do it where a
/// header decides and nobody asks us.
fn client_headers(site: &Site<'_>) -> Option<Finding> {
    let at = site.at("envoy.client_headers");
    let stripped = stripped(site);
    let missing: Vec<&str> = site
        .expected
        .reserved
        .iter()
        .map(String::as_str)
        .filter(|name| !stripped.contains(*name))
        .collect();
    if missing.is_empty() {
        return Some(at.ok(format!(
            "Envoy takes all {} routing headers from clients",
            site.expected.reserved.len()
        )));
    }
    let mend = site
        .fix(&EnvoySetting::ClientHeaders(&missing))
        .unwrap_or_default();
    let decide = deciding(site);
    let dangerous: Vec<&str> = missing
        .iter()
        .copied()
        .filter(|name| decide.contains(*name))
        .collect();
    let is_passed = site
        .variants()
        .iter()
        .any(|filter| filter.failure_mode_allow);
    Some(
        if dangerous.is_empty() && site.plane != ControlPlane::Other {
            // A generated configuration selects the worker by metadata or by a header that it removes.
            if is_passed {
                let seen = format!(
                    "Envoy leaves clients {} routing headers, such as {}",
                    missing.len(),
                    missing[0]
                );
                at.note(format!(
                    "{seen}: they select no worker, but without warmroute they reach the workers"
                ))
            } else {
                at.ok(format!(
                "warmroute removes {} routing headers of clients, and no request passes without it",
                missing.len()
            ))
            }
        } else if dangerous.is_empty() {
            at.warning(
                format!(
                    "Envoy leaves clients {}: workers see them while we are away",
                    missing.join(", ")
                ),
                mend,
            )
        } else {
            at.error(
                format!(
                    "Envoy leaves clients {}: while we are away a client chooses its worker by it",
                    dangerous.join(", ")
                ),
                mend,
            )
        },
    )
}

/// Headers that are removed before our filter or a route sees them.
fn stripped(site: &Site<'_>) -> BTreeSet<String> {
    let early = site
        .server
        .hcm
        .early_header_mutation_extensions
        .iter()
        .map(|extension| &extension.typed_config["mutations"]);
    let before = site
        .server
        .hcm
        .http_filters
        .iter()
        .take(site.main.at)
        .map(|filter| &filter.typed_config);
    let before = before
        .filter(|config| is(config, "HeaderMutation"))
        .map(|config| &config["mutations"]["request_mutations"]);
    let removed = |mutations: &Value| {
        let list = mutations.as_array().into_iter().flatten();
        list.filter_map(|mutation| mutation["remove"].as_str())
            .map(str::to_ascii_lowercase)
            .collect::<Vec<_>>()
    };
    early.chain(before).flat_map(removed).collect()
}

/// Headers by which Envoy itself chooses a host or a route.
fn deciding(site: &Site<'_>) -> BTreeSet<String> {
    let by_cluster = clusters(site)
        .into_iter()
        .flat_map(|(cluster, _)| deciding_headers(&way(cluster)));
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
        .server
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
