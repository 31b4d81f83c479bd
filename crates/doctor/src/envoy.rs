//! Checks of Envoy's configuration from its admin page: pure functions from the configuration dump
//! and the expected settings to findings.

mod control_plane;
pub mod counters;
pub mod dump;
mod endpoints;
pub mod expected;
mod ext_proc_cluster;
mod filter;
mod fixes;
mod host_selection;
mod mirror;
mod overrides;
mod probe;
mod retry;
mod routes;
mod schema;
mod site;
mod transport;
mod xds;

use super::finding::{Finding, FindingBuilder, FindingLevel};
use dump::ConfigDump;
use expected::ExpectedEnvoy;
use fixes::{EnvoySetting, REQUEST_HEADERS};
use site::{ActiveRoute, FilterSite};
use warmroute_settings::format_count;

/// Returns all findings about one Envoy.
pub fn check_envoy(dump: &ConfigDump, expected: &ExpectedEnvoy) -> Vec<Finding> {
    let sites = FilterSite::find_all(dump, expected);
    if sites.is_empty() {
        return vec![missing_filter(dump, expected)];
    }
    let mut findings: Vec<Finding> = Vec::new();
    for site in &sites {
        for finding in check_site(site) {
            // Connection managers may share clusters and routes, so each finding is reported once.
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    findings
}

fn check_site(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut findings = vec![check_filter_routes(site)];
    findings.extend(overrides::check(site));
    findings.extend(ext_proc_cluster::check(site));
    findings.extend(filter::check(site));
    findings.extend(probe::check(site));
    findings.extend(host_selection::check(site));
    findings.extend(mirror::check(site));
    findings.extend(retry::check(site));
    findings.extend(routes::check(site));
    findings.extend(endpoints::check(site));
    findings.extend(xds::check(site));
    findings
}

fn missing_filter(dump: &ConfigDump, expected: &ExpectedEnvoy) -> Finding {
    let servers = dump.listeners.len();
    let (listen, _) = expected.listen_text();
    FindingBuilder::new("envoy.filter", "Envoy").error(
        format!(
            "none of its {servers} HTTP connection managers has an ext_proc filter that calls \
        warmroute, which listens at {listen}"
        ),
        "add the filter `envoy.filters.http.ext_proc` and the cluster `ext_proc` of \
        envoy/standalone.yaml",
    )
}

fn check_filter_routes(site: &FilterSite<'_>) -> Finding {
    let at = site.filter_check("envoy.filter", &site.main);
    if site.listener.routes.is_none() {
        return at.skipped(
            "its routes are not in the configuration dump: only the filter itself was checked",
        );
    }
    match site.active.iter().flat_map(ActiveRoute::routes).count() {
        0 if site.main.config.is_idle() => site.report(
            at,
            FindingLevel::Error,
            "it sends warmroute neither headers nor bodies, and no route overrides it: no request \
            is routed",
            &EnvoySetting::Filter(REQUEST_HEADERS),
        ),
        0 => at.error(
            "it is disabled on every route: warmroute is never called",
            format!(
                "remove `disabled: true` for `{}` from the `typed_per_filter_config` of the \
                inference routes",
                site.main.name
            ),
        ),
        count => at.ok(format!("active on {}", format_count(count, "route"))),
    }
}
