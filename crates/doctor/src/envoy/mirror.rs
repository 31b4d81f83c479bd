//! Checks of mirrored requests for prefill workers: Envoy must mirror them, and only to the
//! intended worker. Without the mirrored request, the decode worker waits for a prefill that never
//! starts.

use warmroute_core::envoy_names::{PREFILL_CLUSTER, PREFILL_DESTINATION};
use warmroute_core::worker::{Worker, WorkerRole};

use super::cluster::{EnvoyCluster, HostSelection, metadata_source_yaml};
use super::config_node::ConfigNode;
use super::dump::EnvoyAddress;
use super::endpoints::{describe_missing, reads_wrong_name};
use super::ext_proc_cluster::check_mirror_limits;
use super::retry::has_remote_prefill;
use super::site::{ActiveRoute, ClusterFacts, FilterSite, RouteFacts, action_clusters};
use crate::finding::{CheckVerdict, Finding, error, ok, row, run_checks, warning};

/// Returns the findings about mirroring; empty without mirrored models.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let active = site
        .active
        .iter()
        .filter(|active| is_mirrored(site, active));
    let route_rows = [row("envoy.mirror", check_route)];
    let routes = active.flat_map(|active| run_checks(&RouteFacts { site, active }, &route_rows));
    let rows = [
        row("envoy.mirror_cluster", check_selection),
        row("envoy.mirror_fallback", check_fallback),
        row("envoy.endpoints", check_workers_known),
        row("envoy.circuit_breakers", check_mirror_limits),
    ];
    let names = site.expected.mirror_clusters.keys();
    let clusters = names.flat_map(|name| match site.dump.cluster(name) {
        Some(cluster) => run_checks(&ClusterFacts::new(site, cluster), &rows),
        None => {
            let missing = error(
                "the cluster does not exist, so requests are not mirrored: \
                decode workers wait in vain",
                format!(
                    "add the cluster `{name}`, \
                    as cluster `prefill` in envoy/disaggregated-mirror.yaml"
                ),
            );
            vec![missing.about("envoy.mirror_cluster", format!("cluster {name}"))]
        }
    });
    routes.chain(clusters).collect()
}

/// Returns whether requests on this route are mirrored. Requests of other APIs are not, nor are
/// routes that lead only to workers of other models.
fn is_mirrored(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> bool {
    let models = site.expected.mirror_clusters.values();
    let has_mirrored_model =
        |worker: &Worker| models.clone().any(|models| models.contains(&worker.model));
    let leads_to_mirrored_model = |name: &str| {
        let cluster = site.dump.cluster(name);
        let addresses = cluster
            .and_then(EnvoyCluster::addresses)
            .unwrap_or_default();
        let is_known =
            !addresses.is_empty() && addresses.iter().all(|address| address.numeric().is_some());
        let mut workers = site.expected.workers.iter();
        !is_known || workers.any(|one| has_mirrored_model(one) && contains_worker(&addresses, one))
    };
    let mut clusters = action_clusters(active.route).peekable();
    models.clone().next().is_some()
        && has_remote_prefill(site, active)
        && (clusters.peek().is_none() || clusters.any(leads_to_mirrored_model))
}

/// Returns whether a worker is among the endpoints.
pub(super) fn contains_worker(addresses: &[EnvoyAddress], worker: &Worker) -> bool {
    let endpoint = Some(worker.endpoint.canonical().0);
    addresses
        .iter()
        .any(|address| address.numeric() == endpoint)
}

/// Returns the mirror policies of a route: the most specific ones, together with those of its
/// clusters.
fn mirror_policies<'d>(at: &RouteFacts<'_, 'd>) -> Vec<ConfigNode<'d>> {
    const FIELD: &str = "request_mirror_policies";
    let levels = [
        Some(at.active.route.at("route")),
        Some(at.active.host),
        at.site.listener.routes(),
    ];
    let levels = levels.into_iter().flatten();
    let mut levels = levels.map(|level| level.items(FIELD).collect::<Vec<_>>());
    let own = levels
        .find(|policies| !policies.is_empty())
        .unwrap_or_default();
    let clusters = at.active.clusters(at.site.dump);
    let options = clusters.filter_map(EnvoyCluster::http_options);
    own.into_iter()
        .chain(options.flat_map(|options| options.items(FIELD)))
        .collect()
}

fn check_route(at: &RouteFacts<'_, '_>) -> Option<CheckVerdict> {
    let title = at.active.title();
    let policies = mirror_policies(at);
    let targets = &at.site.expected.mirror_clusters;
    let fix = format!(
        "in the {title} write `request_mirror_policies: [{{cluster_header: {PREFILL_CLUSTER}}}]` \
        and no other policy"
    );
    let mut names = policies.iter().map(|policy| policy.text("cluster"));
    if let Some(always) = names.find(|name| targets.contains_key(*name)) {
        let message = format!(
            "every request is mirrored to {always}, including those without remote prefill"
        );
        return Some(error(message, fix));
    }
    let by_header = |policy: &&ConfigNode<'_>| {
        policy
            .text("cluster_header")
            .eq_ignore_ascii_case(PREFILL_CLUSTER)
    };
    let Some(policy) = policies.iter().find(by_header) else {
        let message = "requests are not mirrored: decode workers wait in vain for a prefill";
        return Some(error(message, fix));
    };
    let share = policy.at("runtime_fraction").present();
    Some(if share.is_some_and(|share| !is_always(share)) {
        error(
            "runtime_fraction: only a fraction of the requests is mirrored: \
            the other decode workers wait in vain",
            format!("remove `runtime_fraction` from the `request_mirror_policies` of the {title}"),
        )
    } else if removes_header(at, PREFILL_CLUSTER) {
        error(
            format!(
                "request_headers_to_remove has {PREFILL_CLUSTER}, which is applied first: \
                requests are not mirrored"
            ),
            format!(
                "remove `{PREFILL_CLUSTER}` from `request_headers_to_remove`; \
                headers of clients are removed early"
            ),
        )
    } else {
        ok("requests with a prefill worker are mirrored")
    })
}

/// Returns whether a route, its virtual host or the route configuration removes a request header.
fn removes_header(at: &RouteFacts<'_, '_>, header: &str) -> bool {
    let levels = at.active.routes().chain([at.active.host]);
    let levels = levels.chain(at.site.listener.routes());
    let mut removed = levels.flat_map(|level| level.texts("request_headers_to_remove"));
    removed.any(|name| name.eq_ignore_ascii_case(header))
}

/// Returns whether a fraction is 100 % and has no runtime key.
fn is_always(share: ConfigNode<'_>) -> bool {
    let denominator = match share.text("default_value.denominator") {
        "TEN_THOUSAND" => 10_000,
        "MILLION" => 1_000_000,
        _ => 100,
    };
    let numerator = share.number("default_value.numerator");
    numerator.is_some_and(|numerator| numerator >= denominator)
        && share.text("runtime_key").is_empty()
}

/// Checks that mirrored requests reach the intended worker.
fn check_selection(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let reads_destination = match at.cluster.host_selection() {
        HostSelection::Override(policy) => policy.reads_metadata(PREFILL_DESTINATION),
        HostSelection::OriginalDst(header) => header == PREFILL_DESTINATION,
        HostSelection::Subset(_) | HostSelection::ClusterPolicy => false,
    };
    Some(if reads_destination {
        ok("mirrored requests reach the chosen prefill worker")
    } else {
        error(
            "mirrored requests reach any of its workers, \
            but only the chosen one has the bootstrap room",
            format!(
                "in the `override_host_sources` of cluster `{}` write `{}`",
                at.cluster.name(),
                metadata_source_yaml(PREFILL_DESTINATION)
            ),
        )
    })
}

/// Checks that a mirrored request for an unknown endpoint is dropped. On another worker, it would
/// wait forever for its decode worker.
fn check_fallback(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let fallback = at.cluster.override_policy()?.fallback()?;
    let is_dropped = fallback.has_type("Subset")
        && matches!(fallback.text("fallback_policy"), "" | "NO_FALLBACK");
    (!is_dropped).then(|| {
        warning(
            "if Envoy does not know the chosen prefill worker, \
            another one gets the request and waits for a decode worker that never connects",
            format!(
                "write the `fallback_policy` of cluster `{}` as in envoy/disaggregated-mirror.yaml",
                at.cluster.name()
            ),
        )
    })
}

/// Checks that each prefill worker is an endpoint of the cluster.
fn check_workers_known(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let name = at.cluster.name();
    at.cluster.override_policy()?;
    // The check of the endpoints file reports this problem.
    if reads_wrong_name(at.site, at.cluster) {
        return None;
    }
    let models = at.site.expected.mirror_clusters.get(name)?;
    let workers = at.site.expected.workers.iter();
    let prefills =
        workers.filter(|one| one.role == WorkerRole::Prefill && models.contains(&one.model));
    let addresses = at.cluster.addresses().unwrap_or_default();
    match describe_missing(&addresses, prefills) {
        Err(verdict) => Some(verdict),
        Ok(missing) if missing.is_empty() => None,
        Ok(missing) => Some(error(
            format!(
                "it has no endpoint for the prefill workers {missing}: \
                their requests are not mirrored"
            ),
            format!(
                "let cluster `{name}` read the endpoints that warmroute writes, \
                as cluster `prefill` in envoy/disaggregated-mirror.yaml"
            ),
        )),
    }
}
