//! Checks of Envoy's endpoints against the workers, and of their sources: the endpoints file that
//! warmroute writes for Envoy, and its xDS server.

use std::collections::BTreeSet;
use std::path::Path;

use warmroute_core::worker::Worker;

use super::cluster::{EnvoyCluster, HostSelection};
use super::config_node::{ConfigNode, list};
use super::control_plane::ControlPlane;
use super::dump::EnvoyAddress;
use super::ext_proc_filter::service_cluster;
use super::fixes::settings;
use super::mirror::contains_worker;
use super::site::{ClusterFacts, FilterSite};
use crate::finding::{CheckVerdict, Finding, error, ok, row, run_checks, skipped, warning};

/// Returns the findings about endpoints.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut findings = check_files(site);
    // If Envoy does not read the file, missing endpoints are only a consequence.
    if findings.iter().all(|finding| finding.fix.is_none()) {
        findings.extend(check_workers_known(site));
    }
    for cluster in site.routed_clusters() {
        findings.extend(run_checks(
            &cluster,
            &[row("envoy.fallback", check_fallback)],
        ));
    }
    findings.extend(check_xds(site));
    findings
}

/// Checks that Envoy reads the file that warmroute writes, for the same cluster, and watches its
/// directory.
fn check_files(site: &FilterSite<'_>) -> Vec<Finding> {
    let Some((file, name)) = site.expected.endpoints_file.as_ref() else {
        return Vec::new();
    };
    let clusters = site.dump.clusters();
    let readers: Vec<ClusterFacts<'_, '_>> = clusters
        .filter(|cluster| reads_file(*cluster, file))
        .map(|cluster| ClusterFacts::new(site, cluster))
        .collect();
    if readers.is_empty() {
        let subject = format!("cluster {name}");
        return vec![judge_unread_file(site, file, name).about("envoy.endpoints_file", subject)];
    }
    let rows = [row("envoy.endpoints_file", check_reader)];
    readers
        .iter()
        .flat_map(|reader| run_checks(reader, &rows))
        .collect()
}

/// Returns the path of the endpoints file of a cluster.
fn file_path(cluster: EnvoyCluster<'_>) -> Option<&str> {
    let config = cluster.node.at("eds_cluster_config.eds_config");
    let path = config.given_text("path_config_source.path");
    path.or(config.given_text("path"))
}

fn reads_file(cluster: EnvoyCluster<'_>, file: &Path) -> bool {
    file_path(cluster).is_some_and(|path| Path::new(path) == file)
}

/// Returns whether a cluster reads the endpoints file but uses another service name. Such a cluster
/// gets no endpoints.
pub(super) fn reads_wrong_name(site: &FilterSite<'_>, cluster: EnvoyCluster<'_>) -> bool {
    let ours = site.expected.endpoints_file.as_ref();
    ours.is_some_and(|(file, name)| reads_file(cluster, file) && cluster.eds_service_name() != name)
}

fn judge_unread_file(site: &FilterSite<'_>, file: &Path, name: &str) -> CheckVerdict {
    let path = file.display();
    let clusters = site.routed_clusters();
    let mut clusters = clusters.iter().map(|routed| routed.cluster);
    let eds = clusters.find(|cluster| cluster.kind() == "EDS");
    let fix = format!(
        "in cluster `{name}` write `eds_cluster_config: {{eds_config: {{resource_api_version: V3, \
        path_config_source: {{path: {path}, watched_directory: {{path: {}}}}}}}}}`",
        parent_directory(file)
    );
    match eds.and_then(file_path) {
        Some(other) => error(
            format!("Envoy reads {other}, and warmroute writes {path}"),
            format!(
                "{fix}, or in the configuration of warmroute `envoy: {{endpoints_file: {other}}}`"
            ),
        ),
        None => error(
            format!("no cluster reads {path}, which warmroute writes"),
            fix,
        ),
    }
}

/// Checks one cluster that reads the endpoints file.
fn check_reader(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let (file, name) = at.site.expected.endpoints_file.as_ref()?;
    let path = file.display();
    let directory = parent_directory(file);
    let cluster = at.cluster.name();
    let service_name = at.cluster.eds_service_name();
    if service_name != name {
        let mut clusters = at.site.dump.clusters();
        let has_reader =
            clusters.any(|other| reads_file(other, file) && other.eds_service_name() == name);
        let mirrors = at.site.expected.mirror_clusters.contains_key(cluster);
        let fix = if has_reader || mirrors {
            format!(
                "in the `eds_cluster_config` of cluster `{cluster}` write `service_name: {name}`"
            )
        } else {
            format!("in the configuration of warmroute write `envoy: {{cluster: {service_name}}}`")
        };
        let message = format!(
            "its EDS service name is {service_name}, and warmroute writes endpoints of {name}: \
            Envoy rejects the file"
        );
        return Some(error(message, fix));
    }
    let source = at
        .cluster
        .node
        .at("eds_cluster_config.eds_config.path_config_source");
    let watched = source.given_text("watched_directory.path");
    Some(if watched.map(Path::new) == Some(Path::new(&directory)) {
        ok(format!("Envoy reads {path}, which warmroute writes"))
    } else {
        error(
            format!(
                "watched_directory: {}; \
                Envoy does not notice a new file that is renamed into {directory}",
                watched.unwrap_or("none")
            ),
            format!("in its `path_config_source` write `watched_directory: {{path: {directory}}}`"),
        )
    })
}

fn parent_directory(file: &Path) -> String {
    let parent = file.parent().unwrap_or(Path::new("/"));
    parent.display().to_string()
}

/// Checks the workers that Envoy may choose on its own. If it selects them by role, some worker
/// must have that role.
fn check_fallback(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let expected = at.site.expected;
    let we_write = expected.endpoints_file.is_some() || expected.xds.is_some();
    let subset = at.cluster.override_policy()?.fallback()?;
    let role = subset.given_text("default_subset.role")?;
    let roles = expected
        .workers
        .iter()
        .map(|worker| worker.role.to_string());
    let roles: BTreeSet<String> = roles.collect();
    if !we_write || roles.is_empty() || roles.contains(role) || !subset.has_type("Subset") {
        return None;
    }
    let roles = list(roles);
    Some(warning(
        format!(
            "without a route Envoy chooses among workers with `role: {role}`, \
            and the workers have {roles}: 503"
        ),
        format!(
            "in the `default_subset` of cluster `{}` write a role of the workers, \
            or write `role: {role}` for some of them in the configuration of warmroute",
            at.cluster.name()
        ),
    ))
}

/// Returns the workers without an endpoint, or a verdict if the endpoints cannot be compared.
pub(super) fn describe_missing<'w>(
    addresses: &[EnvoyAddress],
    workers: impl Iterator<Item = &'w Worker>,
) -> Result<String, CheckVerdict> {
    if addresses.iter().any(|address| address.numeric().is_none()) {
        return Err(skipped("endpoints with host names cannot be compared"));
    }
    let missing = workers.filter(|worker| !contains_worker(addresses, worker));
    Ok(list(missing.map(|worker| {
        format!("{} at {}", worker.id, worker.endpoint)
    })))
}

/// Checks that Envoy has an endpoint for each worker.
fn check_workers_known(site: &FilterSite<'_>) -> Option<Finding> {
    let workers = &site.expected.workers;
    let mut own: Vec<EnvoyCluster<'_>> = Vec::new();
    for routed in site.routed_clusters() {
        if !matches!(
            routed.cluster.host_selection(),
            HostSelection::OriginalDst(_)
        ) {
            own.push(routed.cluster);
        }
    }
    if own.is_empty() || workers.is_empty() {
        return None;
    }
    let names = list(own.iter().map(|cluster| cluster.name()));
    // A control plane may generate one filter per pool, so the clusters of every pool count.
    if site.plane != ControlPlane::Other {
        let all = site.dump.clusters();
        own = all
            .filter(|cluster| cluster.override_policy().is_some())
            .collect();
    }
    let lists = own.into_iter().filter_map(EnvoyCluster::addresses);
    let addresses: Vec<EnvoyAddress> = lists.flatten().collect();
    let verdict = match describe_missing(&addresses, workers.iter()) {
        Err(verdict) => verdict,
        Ok(missing) if missing.is_empty() => {
            ok(format!("Envoy knows all {} workers", workers.len()))
        }
        Ok(missing) => error(
            format!(
                "Envoy has no endpoint for the workers {missing}: \
                requests routed to them go to other workers"
            ),
            missing_endpoints_fix(site),
        ),
    };
    Some(verdict.about("envoy.endpoints", format!("clusters {names}")))
}

/// Returns the fix for workers without an endpoint in Envoy.
fn missing_endpoints_fix(site: &FilterSite<'_>) -> String {
    match &site.expected.endpoints_file {
        Some((file, _)) => format!(
            "start warmroute, which writes {}; if it runs, check its log, \
            and that Envoy may read the file",
            file.display()
        ),
        None if site.expected.xds.is_some() => {
            "start warmroute, which publishes them; if it runs, \
            check in its /debug/envoys that this Envoy is connected"
                .to_owned()
        }
        None => site.fix(&settings::WORKER_ENDPOINTS).unwrap_or_default(),
    }
}

/// Checks clusters that get their endpoints by gRPC from warmroute's xDS server. A cluster must
/// call warmroute, with a service name that warmroute publishes.
fn check_xds(site: &FilterSite<'_>) -> Vec<Finding> {
    let Some(ours) = &site.expected.xds else {
        return Vec::new();
    };
    let clusters = site.routed_clusters();
    let mut findings: Vec<Finding> = Vec::new();
    for routed in &clusters {
        findings.extend(run_checks(routed, &[row("envoy.xds", check_service_name)]));
    }
    if findings.is_empty() {
        let first = &ours.clusters[0];
        let missing = warning(
            "no cluster requests its endpoints from warmroute, although `envoy.xds` is configured",
            format!(
                "in the cluster of the workers write `eds_cluster_config: {{service_name: {first}, \
                eds_config: {{resource_api_version: V3, \
                api_config_source: {{api_type: DELTA_GRPC, transport_api_version: V3, \
                grpc_services: [{{envoy_grpc: {{cluster_name: xds}}}}]}}}}}}` \
                and add the cluster `xds` of envoy/xds.yaml; or remove `envoy.xds`"
            ),
        );
        findings.push(missing.about("envoy.xds", format!("cluster {first}")));
    }
    findings
}

fn check_service_name(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let ours = at.site.expected.xds.as_ref()?;
    let addresses = xds_addresses(at)?;
    let mut servers = addresses.iter();
    let calls_us = servers.any(|address| ours.listens_at(at.site.expected, address));
    if !addresses.is_empty() && !calls_us {
        return None;
    }
    let service_name = at.cluster.eds_service_name();
    if ours.clusters.iter().any(|name| name == service_name) {
        return Some(ok(format!(
            "it requests the endpoints of {service_name} from warmroute"
        )));
    }
    let known = list(&ours.clusters);
    let cluster = at.cluster.name();
    let fix = if at.site.expected.mirror_clusters.contains_key(cluster) {
        format!(
            "in the `eds_cluster_config` of cluster `{cluster}` write `service_name:` and one \
            of {known}"
        )
    } else {
        format!(
            "in the configuration of warmroute write `envoy: {{cluster: {service_name}}}`, \
            or a cluster `{service_name}` under `envoy.xds.clusters`"
        )
    };
    let message = format!(
        "it requests the endpoints of {service_name} from warmroute, which publishes {known}: \
        it never gets any"
    );
    Some(error(message, fix))
}

/// Returns the gRPC servers from which a cluster requests its endpoints. An empty list means the
/// server in Envoy's `ads_config`, which the dump does not contain.
fn xds_addresses(at: &ClusterFacts<'_, '_>) -> Option<Vec<EnvoyAddress>> {
    let source = at.cluster.node.at("eds_cluster_config.eds_config");
    if source.at("ads").present().is_some() {
        return Some(Vec::new());
    }
    let services: Vec<ConfigNode<'_>> = source
        .at("api_config_source")
        .present()?
        .items("grpc_services")
        .collect();
    let names = services.into_iter().filter_map(service_cluster);
    let clusters = names.filter_map(|name| at.site.dump.cluster(name));
    Some(
        clusters
            .filter_map(EnvoyCluster::addresses)
            .flatten()
            .collect(),
    )
}
