//! Envoy's side of a deployment, read from its admin page: pure, from what it tells and what we expect to findings.

mod control_plane;
pub mod dump;
mod endpoints;
pub mod expected;
mod filter;
mod mirror;
mod overrides;
mod parts;
mod probe;
mod remedy;
mod retry;
mod routes;
mod server;
mod site;
#[cfg(test)]
mod tests;
mod transport;
mod ways;
mod xds;

use super::finding::{At, Finding, Level};
use dump::Dump;
use expected::Expected;
use remedy::{EnvoySetting, REQUEST_HEADERS};
use site::{Active, Site};

/// Everything that is to be said of one Envoy.
pub fn examine(dump: &Dump, expected: &Expected) -> Vec<Finding> {
    let sites = Site::all(dump, expected);
    if sites.is_empty() {
        return vec![absent(dump, expected)];
    }
    let mut findings: Vec<Finding> = Vec::new();
    for site in &sites {
        for finding in of_site(site) {
            // What several connection managers share is said once.
            if !findings.contains(&finding) {
                findings.push(finding);
            }
        }
    }
    findings
}

fn of_site(site: &Site<'_>) -> Vec<Finding> {
    let mut findings = vec![at_work(site)];
    findings.extend(overrides::check(site));
    findings.extend(server::check(site));
    findings.extend(filter::check(site));
    findings.extend(probe::check(site));
    findings.extend(ways::check(site));
    findings.extend(mirror::check(site));
    findings.extend(retry::check(site));
    findings.extend(routes::check(site));
    findings.extend(endpoints::check(site));
    findings.extend(xds::check(site));
    findings
}

fn absent(dump: &Dump, expected: &Expected) -> Finding {
    let servers = dump.servers.len();
    let (words, _) = expected.listening();
    At::new("envoy.filter", "Envoy").error(
        format!("none of its {servers} HTTP connection managers has an ext_proc filter: nobody asks us, and we listen at {words}"),
        "add the filter `envoy.filters.http.ext_proc` and the cluster `ext_proc` of envoy/standalone.yaml",
    )
}

fn at_work(site: &Site<'_>) -> Finding {
    let at = site.at_filter("envoy.filter", &site.main);
    if site.server.routes.is_none() {
        return at.skipped(
            "its routes come from elsewhere and are not on the page: nothing of them was looked at, and the filter as it \
             stands in the list",
        );
    }
    match site.active.iter().flat_map(Active::routes).count() {
        0 if site.main.config.is_idle() => site.report(
            at,
            Level::Error,
            "it sends warmroute neither headers nor bodies, and no route overrides it: no request is routed",
            &EnvoySetting::Filter(REQUEST_HEADERS),
        ),
        0 => at.error(
            "no route has it switched on: nobody asks us",
            format!(
                "take `disabled: true` for `{}` out of the `typed_per_filter_config` of the routes of generations",
                site.main.name
            ),
        ),
        count => at.ok(format!("at work on {count} of the routes")),
    }
}
