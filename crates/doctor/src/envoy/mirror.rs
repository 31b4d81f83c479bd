//! Checks of mirrored requests for prefill workers: Envoy must mirror them, and only to the
//! intended worker. Without the mirrored request, the decode worker waits for a prefill that never
//! starts.

use std::collections::BTreeSet;

use serde_json::Value;
use warmroute_core::envoy_names::{PREFILL_CLUSTER, PREFILL_DESTINATION};
use warmroute_core::worker::{ModelName, Worker, WorkerRole};

use super::dump::{EnvoyAddress, parse_part};
use super::endpoints::reads_wrong_name;
use super::ext_proc_cluster::{ClusterTraffic, check_breakers};
use super::host_selection::{HostSelection, host_selection, metadata_source_yaml, ours};
use super::retry::has_remote_prefill;
use super::schema::{EnvoyCluster, MirrorPolicy, OverrideHostPolicy, has_type};
use super::site::{ActiveRoute, FilterSite};
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings about mirroring; empty without mirrored models.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    if site.expected.mirror_clusters.is_empty() {
        return Vec::new();
    }
    let routes = site
        .active
        .iter()
        .filter(|active| is_mirrored(site, active))
        .map(|active| check_route(site, active));
    let clusters = site
        .expected
        .mirror_clusters
        .iter()
        .flat_map(|(name, models)| match site.dump.clusters.get(name) {
            Some(cluster) => check_cluster(site, cluster, models),
            None => {
                vec![FindingBuilder::new("envoy.mirror_cluster", format!("cluster {name}")).error(
            "the cluster does not exist, so requests are not mirrored: decode workers wait in vain",
            format!("add the cluster `{name}`, as cluster `prefill` in \
            envoy/disaggregated-mirror.yaml"),
        )]
            }
        });
    routes.chain(clusters).collect()
}

/// Returns whether requests on this route are mirrored. Requests of other APIs are not, nor are
/// routes that lead only to workers of other models.
fn is_mirrored(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> bool {
    let has_mirrored_model = |worker: &&Worker| {
        site.expected
            .mirror_clusters
            .values()
            .any(|models| models.contains(&worker.model))
    };
    let leads_to_mirrored_model = |name: &str| {
        let addresses = site
            .dump
            .clusters
            .get(name)
            .and_then(|cluster| site.dump.cluster_addresses(cluster));
        let known = addresses.filter(|addresses| {
            !addresses.is_empty() && addresses.iter().all(|address| address.numeric().is_some())
        });
        known.is_none_or(|addresses| {
            site.expected
                .workers
                .iter()
                .filter(has_mirrored_model)
                .any(|worker| contains_worker(&addresses, worker))
        })
    };
    let mut clusters = active.action.clusters().peekable();
    has_remote_prefill(site, active)
        && (clusters.peek().is_none() || clusters.any(leads_to_mirrored_model))
}

fn contains_worker(addresses: &[EnvoyAddress], worker: &Worker) -> bool {
    let endpoint = worker.endpoint.canonical().0;
    addresses
        .iter()
        .any(|address| address.numeric() == Some(endpoint))
}

/// Returns the mirror policies of a route: the most specific ones, together with those of its
/// clusters.
fn mirror_policies(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> Vec<MirrorPolicy> {
    let of_all = site
        .listener
        .routes
        .as_ref()
        .map(|routes| &routes.request_mirror_policies);
    let levels = [
        Some(&active.action.request_mirror_policies),
        Some(&active.host.request_mirror_policies),
        of_all,
    ];
    let own = levels
        .into_iter()
        .flatten()
        .find(|policies| !policies.is_empty())
        .cloned()
        .unwrap_or_default();
    let clusters = active
        .action
        .clusters()
        .filter_map(|name| site.dump.clusters.get(name));
    let of_clusters = clusters.filter_map(|cluster| {
        parse_part(
            cluster.http_options()?.get("request_mirror_policies")?,
            "a policy",
        )
        .ok()
    });
    own.into_iter()
        .chain(of_clusters.flat_map(|policies: Vec<MirrorPolicy>| policies))
        .collect()
}

fn check_route(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> Finding {
    let at = site.route_check("envoy.mirror", active);
    let policies = mirror_policies(site, active);
    let by_header = policies
        .iter()
        .find(|policy| policy.cluster_header.eq_ignore_ascii_case(PREFILL_CLUSTER));
    let always = policies
        .iter()
        .find(|policy| site.expected.mirror_clusters.contains_key(&policy.cluster));
    let fix = format!(
        "in the {} write `request_mirror_policies: [{{cluster_header: {PREFILL_CLUSTER}}}]` and \
        no other policy",
        active.title()
    );
    if let Some(policy) = always {
        let message = format!(
            "every request is mirrored to {}, including those without remote prefill",
            policy.cluster
        );
        return at.error(message, fix);
    }
    let Some(policy) = by_header else {
        return at.error(
            "requests are not mirrored: decode workers wait in vain for a prefill",
            fix,
        );
    };
    if let Some(share) = &policy.runtime_fraction
        && !is_always(share)
    {
        return at.error(
            "runtime_fraction: only a fraction of the requests is mirrored: the other decode \
            workers wait in vain",
            format!(
                "remove `runtime_fraction` from the `request_mirror_policies` of the {}",
                active.title()
            ),
        );
    }
    if removes_header(site, active, PREFILL_CLUSTER) {
        return at.error(
            format!(
                "request_headers_to_remove has {PREFILL_CLUSTER}, which is applied first: \
            requests are not mirrored"
            ),
            format!(
                "remove `{PREFILL_CLUSTER}` from `request_headers_to_remove`; headers of \
            clients are removed early"
            ),
        );
    }
    at.ok("requests with a prefill worker are mirrored")
}

/// Returns whether a route, its virtual host or the route configuration removes a request header.
fn removes_header(site: &FilterSite<'_>, active: &ActiveRoute<'_>, header: &str) -> bool {
    let of_all = site
        .listener
        .routes
        .as_ref()
        .map(|routes| &routes.request_headers_to_remove);
    let mut removed = active
        .routes()
        .map(|route| &route.request_headers_to_remove)
        .chain([&active.host.request_headers_to_remove])
        .chain(of_all)
        .flatten();
    removed.any(|name| name.eq_ignore_ascii_case(header))
}

/// Returns whether a fraction is 100 % and has no runtime key.
fn is_always(share: &Value) -> bool {
    let of = match share["default_value"]["denominator"].as_str() {
        Some("TEN_THOUSAND") => 10_000,
        Some("MILLION") => 1_000_000,
        _ => 100,
    };
    let numerator = share["default_value"]["numerator"]
        .as_u64()
        .unwrap_or_default();
    numerator >= of && share["runtime_key"].as_str().is_none_or(str::is_empty)
}

/// Checks that mirrored requests reach the intended worker, within the circuit breakers.
fn check_cluster(
    site: &FilterSite<'_>,
    cluster: &EnvoyCluster,
    models: &BTreeSet<ModelName>,
) -> Vec<Finding> {
    let at = |check| FindingBuilder::new(check, format!("cluster {}", cluster.name));
    let policy = host_selection(cluster);
    let found = match &policy {
        HostSelection::Override(policy) => policy.reads_metadata(&ours(PREFILL_DESTINATION)),
        HostSelection::OriginalDst(header) => header == PREFILL_DESTINATION,
        HostSelection::Subset(_) | HostSelection::ClusterPolicy => false,
    };
    let mut findings = vec![if found {
        at("envoy.mirror_cluster").ok("mirrored requests reach the chosen prefill worker")
    } else {
        at("envoy.mirror_cluster").error(
            "mirrored requests reach any of its workers, but only the chosen one has the \
            bootstrap room",
            format!(
                "in the `override_host_sources` of cluster `{}` write `{}`",
                cluster.name,
                metadata_source_yaml(PREFILL_DESTINATION)
            ),
        )
    }];
    if let HostSelection::Override(policy) = &policy {
        findings.extend(check_fallback(at("envoy.mirror_fallback"), cluster, policy));
        findings.extend(check_workers_known(
            site,
            at("envoy.endpoints"),
            cluster,
            models,
        ));
    }
    findings.push(check_breakers(site, cluster, ClusterTraffic::Copies));
    findings
}

/// Checks that a mirrored request for an unknown endpoint is dropped. On another worker, it would
/// wait forever for its decode worker.
fn check_fallback(
    at: FindingBuilder,
    cluster: &EnvoyCluster,
    policy: &OverrideHostPolicy,
) -> Option<Finding> {
    let first = policy
        .fallback_policy
        .policies
        .first()
        .map(|policy| &policy.typed_extension_config.typed_config)?;
    let has_no_default = has_type(first, "Subset")
        && matches!(
            first["fallback_policy"].as_str(),
            None | Some("NO_FALLBACK")
        );
    (!has_no_default).then(|| {
        at.warning(
            "if Envoy does not know the chosen prefill worker, another one gets the request and \
            waits for a decode worker that never connects",
            format!(
                "write the `fallback_policy` of cluster `{}` as in envoy/disaggregated-mirror.yaml",
                cluster.name
            ),
        )
    })
}

/// Checks that each prefill worker is an endpoint of the cluster.
fn check_workers_known(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
    models: &BTreeSet<ModelName>,
) -> Option<Finding> {
    // The check of the endpoints file reports this problem.
    if reads_wrong_name(site, cluster) {
        return None;
    }
    let addresses = site.dump.cluster_addresses(cluster).unwrap_or_default();
    if addresses.iter().any(|address| address.numeric().is_none()) {
        return Some(at.skipped("endpoints with host names cannot be compared"));
    }
    let prefills = site
        .expected
        .workers
        .iter()
        .filter(|one| one.role == WorkerRole::Prefill && models.contains(&one.model));
    let missing: Vec<String> = prefills
        .filter(|worker| !contains_worker(&addresses, worker))
        .map(|worker| format!("{} at {}", worker.id, worker.endpoint))
        .collect();
    (!missing.is_empty()).then(|| {
        at.error(
            format!(
                "it has no endpoint for the prefill workers {}: their requests are not \
            mirrored",
                missing.join(", ")
            ),
            format!(
                "let cluster `{}` read the endpoints that warmroute writes, as cluster \
            `prefill` in envoy/disaggregated-mirror.yaml",
                cluster.name
            ),
        )
    })
}
