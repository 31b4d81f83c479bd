//! Checks for routes to workers that lack the override that activates the filter. Without an
//! override, Istio's filter sends warmroute nothing.

use warmroute_core::envoy_names::ENDPOINT;

use super::control_plane::ControlPlane;
use super::host_selection::{HostSelection, host_selection, ours};
use super::schema::EnvoyRoute;
use super::site::FilterSite;
use crate::finding::{Finding, FindingBuilder};

/// Filters whose settings on a route replace the settings of all others in Istio, see
/// `pilot/pkg/networking/core/route/route.go`.
const REPLACING_FILTERS: [(&str, &str); 2] = [
    ("envoy.filters.http.cors", "CORS"),
    ("envoy.filters.http.fault", "fault injection"),
];

/// Returns a finding for each route that selects workers but sends warmroute nothing.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    site.idle
        .iter()
        .filter(|route| leads_to_workers(site, route))
        .map(|route| missing_override(site, route))
        .collect()
}

/// Returns whether the cluster of a route selects its host by warmroute's metadata. Other routes of
/// the Gateway do not concern warmroute.
fn leads_to_workers(site: &FilterSite<'_>, route: &EnvoyRoute) -> bool {
    let reads_endpoint = |name: &str| {
        let Some(HostSelection::Override(policy)) =
            site.dump.clusters.get(name).map(host_selection)
        else {
            return false;
        };
        policy.reads_metadata(&ours(ENDPOINT))
    };
    route
        .route
        .as_ref()
        .is_some_and(|action| action.clusters().any(reads_endpoint))
}

fn missing_override(site: &FilterSite<'_>, route: &EnvoyRoute) -> Finding {
    let name = if route.name.is_empty() {
        route.title()
    } else {
        format!("route {}", route.name)
    };
    let at = FindingBuilder::new(
        "envoy.route_override",
        format!("listener {}, {name}", site.listener.name),
    );
    let replacing = REPLACING_FILTERS
        .iter()
        .find(|(filter, _)| route.typed_per_filter_config.contains_key(*filter));
    let filter = &site.main.name;
    match (&site.plane, replacing) {
        (ControlPlane::Istio { .. }, Some((_, kind))) => at.error(
            format!(
                "it selects workers and has no override of `{filter}`: Istio drops the override \
                of a rule with {kind}, and its requests \
                 are served unrouted"
            ),
            format!(
                "remove the {kind} filter from the rule of the HTTPRoute, or add the override \
                again by an EnvoyFilter with `applyTo: \
                 HTTP_ROUTE` that names the route `{}`",
                route.name
            ),
        ),
        _ => at.error(
            format!(
                "it selects workers, and `{filter}` sends warmroute nothing on it: its \
            requests are served unrouted"
            ),
            format!(
                "write the `overrides` of `{filter}` in the `typed_per_filter_config` of the \
            {name}"
            ),
        ),
    }
}
