//! Routes of workers that lack the override which switches the filter on. Istio's filter shows warmroute nothing by itself.

use super::control_plane::ControlPlane;
use super::parts::Route;
use super::site::Site;
use super::ways::{Way, ours, way};
use crate::cmd::doctor::finding::{At, Finding};
use crate::ext_proc::headers::ENDPOINT;

/// Filters whose settings on a route replace all others there: Istio, `pilot/pkg/networking/core/route/route.go`.
const REPLACING: [(&str, &str); 2] = [
    ("envoy.filters.http.cors", "CORS"),
    ("envoy.filters.http.fault", "fault injection"),
];

/// Every route that selects workers and sends warmroute nothing.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    site.idle
        .iter()
        .filter(|route| leads_to_workers(site, route))
        .map(|route| without_override(site, route))
        .collect()
}

/// Whether the cluster of a route selects its host by warmroute's metadata. Other routes of the Gateway are not warmroute's.
fn leads_to_workers(site: &Site<'_>, route: &Route) -> bool {
    let reads_endpoint = |name: &str| {
        let Some(Way::Override(policy)) = site.dump.clusters.get(name).map(way) else {
            return false;
        };
        policy
            .override_host_sources
            .iter()
            .any(|source| source.metadata.as_ref() == Some(&ours(ENDPOINT)))
    };
    route
        .route
        .as_ref()
        .is_some_and(|action| action.clusters().any(reads_endpoint))
}

fn without_override(site: &Site<'_>, route: &Route) -> Finding {
    let name = if route.name.is_empty() {
        route.title()
    } else {
        format!("route {}", route.name)
    };
    let at = At::new(
        "envoy.route_override",
        format!("listener {}, {name}", site.server.listener),
    );
    let replacing = REPLACING
        .iter()
        .find(|(filter, _)| route.typed_per_filter_config.contains_key(*filter));
    let filter = &site.main.name;
    match (&site.plane, replacing) {
        (ControlPlane::Istio { .. }, Some((_, kind))) => at.error(
            format!(
                "it selects workers and has no override of `{filter}`: Istio drops the override of a rule with {kind}, and its requests \
                 are served unrouted"
            ),
            format!(
                "remove the {kind} filter from the rule of the HTTPRoute, or add the override again by an EnvoyFilter with `applyTo: \
                 HTTP_ROUTE` that names the route `{}`",
                route.name
            ),
        ),
        _ => at.error(
            format!("it selects workers, and `{filter}` sends warmroute nothing on it: its requests are served unrouted"),
            format!("write the `overrides` of `{filter}` in the `typed_per_filter_config` of the {name}"),
        ),
    }
}
