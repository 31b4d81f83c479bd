//! Checks of Envoy's configuration from its admin page: pure functions from the configuration dump
//! and the expected settings to findings.

mod cluster;
mod config_node;
mod control_plane;
pub mod counters;
pub mod dump;
mod endpoints;
pub mod expected;
mod ext_proc_cluster;
mod ext_proc_filter;
mod filter;
mod fixes;
mod host_selection;
mod mirror;
mod probe;
mod retry;
mod routes;
mod site;

use super::finding::{
    CheckFacts as _, CheckVerdict, Finding, FindingLevel, add_new, error, ok, skipped,
};
use config_node::ConfigNode;
use control_plane::ControlPlane;
use dump::ConfigDump;
use expected::ExpectedEnvoy;
use fixes::settings::REQUEST_HEADERS;
use site::{ActiveRoute, FilterSite, action_clusters, route_title};
use warmroute_core::envoy_names::ENDPOINT;
use warmroute_settings::format_count;

/// Filters whose settings on a route replace the settings of all others in Istio, see
/// `pilot/pkg/networking/core/route/route.go`.
const REPLACING_FILTERS: [(&str, &str); 2] = [
    ("envoy.filters.http.cors", "CORS"),
    ("envoy.filters.http.fault", "fault injection"),
];

/// Returns all findings about one Envoy.
pub fn check_envoy(dump: &ConfigDump, expected: &ExpectedEnvoy) -> Vec<Finding> {
    let sites = FilterSite::find_all(dump, expected);
    if sites.is_empty() {
        return vec![missing_filter(dump, expected)];
    }
    let mut findings: Vec<Finding> = Vec::new();
    for site in &sites {
        // Connection managers may share clusters and routes, so each finding is reported once.
        add_new(&mut findings, [check_filter_routes(site)]);
        add_new(&mut findings, check_route_overrides(site));
        add_new(&mut findings, ext_proc_cluster::check(site));
        add_new(&mut findings, filter::check(site));
        add_new(&mut findings, probe::check(site));
        add_new(&mut findings, host_selection::check(site));
        add_new(&mut findings, mirror::check(site));
        add_new(&mut findings, retry::check(site));
        add_new(&mut findings, routes::check(site));
        add_new(&mut findings, endpoints::check(site));
    }
    findings
}

fn missing_filter(dump: &ConfigDump, expected: &ExpectedEnvoy) -> Finding {
    let managers = dump.listeners.len();
    let (listen, _) = expected.listen_text();
    let message = format!(
        "none of its {managers} HTTP connection managers has an ext_proc filter \
        that calls warmroute, which listens at {listen}"
    );
    let fix = "add the filter `envoy.filters.http.ext_proc` and the cluster `ext_proc` \
        of envoy/standalone.yaml";
    error(message, fix).about("envoy.filter", "Envoy")
}

fn check_filter_routes(site: &FilterSite<'_>) -> Finding {
    let subject = format!("{}, filter {}", site.subject(), site.main.name);
    judge_filter_routes(site).about("envoy.filter", subject)
}

fn judge_filter_routes(site: &FilterSite<'_>) -> CheckVerdict {
    if site.listener.routes().is_none() {
        return skipped(
            "its routes are not in the configuration dump: only the filter itself was checked",
        );
    }
    match site.active.iter().flat_map(ActiveRoute::routes).count() {
        0 if site.main.config.is_idle() => site.report(
            FindingLevel::Error,
            "it sends warmroute neither headers nor bodies, and no route overrides it: \
            no request is routed",
            &REQUEST_HEADERS,
        ),
        0 => error(
            "it is disabled on every route: warmroute is never called",
            format!(
                "remove `disabled: true` for `{}` from the `typed_per_filter_config` \
                of the inference routes",
                site.main.name
            ),
        ),
        count => ok(format!("active on {}", format_count(count, "route"))),
    }
}

/// Returns a finding for each route that selects workers but lacks the override that activates the
/// filter. Without an override, Istio's filter sends warmroute nothing.
fn check_route_overrides(site: &FilterSite<'_>) -> Vec<Finding> {
    // Other routes of the Gateway do not concern warmroute.
    let leads_to_workers = |route: &&ConfigNode<'_>| {
        let mut clusters = action_clusters(**route).filter_map(|name| site.dump.cluster(name));
        clusters.any(|cluster| {
            let policy = cluster.override_policy();
            policy.is_some_and(|policy| policy.reads_metadata(ENDPOINT))
        })
    };
    let idle = site.idle.iter().filter(leads_to_workers);
    idle.map(|route| missing_override(site, *route)).collect()
}

fn missing_override(site: &FilterSite<'_>, route: ConfigNode<'_>) -> Finding {
    let name = match route.text("name") {
        "" => route_title(route),
        name => format!("route {name}"),
    };
    let settings = route.at("typed_per_filter_config");
    let mut replacing = REPLACING_FILTERS.iter();
    let replacing = replacing.find(|(filter, _)| settings.0.get(filter).is_some());
    let filter = &site.main.name;
    let verdict = match (&site.plane, replacing) {
        (ControlPlane::Istio(_), Some((_, kind))) => error(
            format!(
                "it selects workers and has no override of `{filter}`: Istio drops the override \
                of a rule with {kind}, and its requests are served unrouted"
            ),
            format!(
                "remove the {kind} filter from the rule of the HTTPRoute, or add the override \
                again by an EnvoyFilter with `applyTo: HTTP_ROUTE` that names the route `{}`",
                route.text("name")
            ),
        ),
        _ => error(
            format!(
                "it selects workers, and `{filter}` sends warmroute nothing on it: \
                its requests are served unrouted"
            ),
            format!(
                "write the `overrides` of `{filter}` in the `typed_per_filter_config` of the {name}"
            ),
        ),
    };
    verdict.about(
        "envoy.route_override",
        format!("{}, {name}", site.subject()),
    )
}
