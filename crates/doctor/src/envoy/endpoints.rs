//! Checks of Envoy's endpoints against the workers, and of the endpoints file that warmroute writes
//! for Envoy.

use std::collections::BTreeSet;
use std::path::Path;

use super::control_plane::ControlPlane;
use super::dump::EnvoyAddress;
use super::fixes::EnvoySetting;
use super::host_selection::{HostSelection, host_selection, routed_clusters};
use super::schema::{EnvoyCluster, PathConfigSource, has_type};
use super::site::FilterSite;
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings about endpoints.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let files = check_files(site);
    // If Envoy does not read the file, missing endpoints are only a consequence.
    let has_problem = files.iter().any(|finding| finding.fix.is_some());
    let known = if has_problem {
        None
    } else {
        check_workers_known(site)
    };
    files
        .into_iter()
        .chain(known)
        .chain(check_fallback(site))
        .collect()
}

/// Checks that Envoy reads the file that warmroute writes, for the same cluster, and watches its
/// directory.
fn check_files(site: &FilterSite<'_>) -> Vec<Finding> {
    let Some((file, name)) = site.expected.endpoints_file.as_ref() else {
        return Vec::new();
    };
    let reads = |cluster: &&EnvoyCluster| {
        path_source(cluster).is_some_and(|source| Path::new(&source.path) == file)
    };
    let readers: Vec<&EnvoyCluster> = site.dump.clusters.values().filter(reads).collect();
    if readers.is_empty() {
        return vec![unread_file(site, file, name)];
    }
    let has_reader = readers
        .iter()
        .any(|cluster| cluster.eds_service_name() == name);
    readers
        .into_iter()
        .map(|cluster| check_reader(site, cluster, has_reader))
        .collect()
}

/// Returns whether a cluster reads the endpoints file but uses another service name. Such a cluster
/// gets no endpoints.
pub(super) fn reads_wrong_name(site: &FilterSite<'_>, cluster: &EnvoyCluster) -> bool {
    let ours = site.expected.endpoints_file.as_ref();
    ours.is_some_and(|(file, name)| {
        path_source(cluster).is_some_and(|source| Path::new(&source.path) == file)
            && cluster.eds_service_name() != name
    })
}

fn unread_file(site: &FilterSite<'_>, file: &Path, name: &str) -> Finding {
    let eds = routed_clusters(site)
        .into_iter()
        .map(|(cluster, _)| cluster)
        .find(|cluster| cluster.kind == "EDS");
    let from = eds.and_then(path_source).map(|source| source.path);
    let message = match &from {
        Some(from) => format!(
            "Envoy reads {from}, and warmroute writes {}",
            file.display()
        ),
        None => format!(
            "no cluster reads {}, which warmroute writes",
            file.display()
        ),
    };
    let fix = format!(
        "in cluster `{name}` write `eds_cluster_config: {{eds_config: {{resource_api_version: V3, \
        path_config_source: {{path: {}, \
         watched_directory: {{path: {}}}}}}}}}`{}",
        file.display(),
        parent_directory(file),
        from.map(|from| format!(
            ", or in the configuration of warmroute `envoy: {{endpoints_file: \
        {from}}}`"
        ))
        .unwrap_or_default()
    );
    FindingBuilder::new("envoy.endpoints_file", format!("cluster {name}")).error(message, fix)
}

/// Checks one cluster that reads the endpoints file. `has_reader` is true if some cluster uses its
/// service name.
fn check_reader(site: &FilterSite<'_>, cluster: &EnvoyCluster, has_reader: bool) -> Finding {
    let at = FindingBuilder::new("envoy.endpoints_file", format!("cluster {}", cluster.name));
    let Some((file, name)) = site.expected.endpoints_file.as_ref() else {
        return at.ok("warmroute writes none");
    };
    if cluster.eds_service_name() != name {
        let message = format!(
            "its EDS service name is {}, and warmroute writes endpoints of {name}: Envoy rejects \
            the file",
            cluster.eds_service_name()
        );
        let fix = if has_reader || site.expected.mirror_clusters.contains_key(&cluster.name) {
            format!(
                "in the `eds_cluster_config` of cluster `{}` write `service_name: {name}`",
                cluster.name
            )
        } else {
            format!(
                "in the configuration of warmroute write `envoy: {{cluster: {}}}`",
                cluster.eds_service_name()
            )
        };
        return at.error(message, fix);
    }
    let watched = path_source(cluster)
        .and_then(|source| source.watched_directory)
        .map(|directory| directory.path);
    if watched
        .as_deref()
        .is_some_and(|watched| Path::new(watched) == Path::new(&parent_directory(file)))
    {
        at.ok(format!(
            "Envoy reads {}, which warmroute writes",
            file.display()
        ))
    } else {
        at.error(
            format!(
                "watched_directory: {}; Envoy does not notice a new file that is renamed into {}",
                watched.as_deref().unwrap_or("none"),
                parent_directory(file)
            ),
            format!(
                "in its `path_config_source` write `watched_directory: {{path: {}}}`",
                parent_directory(file)
            ),
        )
    }
}

/// Checks the workers that Envoy may choose on its own. If it selects them by role, some worker
/// must have that role.
fn check_fallback(site: &FilterSite<'_>) -> Vec<Finding> {
    let workers = &site.expected.workers;
    let we_write = site.expected.endpoints_file.is_some() || site.expected.xds.is_some();
    if !we_write || workers.is_empty() {
        return Vec::new();
    }
    let of_cluster =
        |cluster: &EnvoyCluster| {
            let HostSelection::Override(policy) = host_selection(cluster) else {
                return None;
            };
            let subset = &policy
                .fallback_policy
                .policies
                .first()?
                .typed_extension_config
                .typed_config;
            let role = subset["default_subset"]["role"]
                .as_str()
                .filter(|_| has_type(subset, "Subset"))?;
            if workers.iter().any(|worker| worker.role.to_string() == role) {
                return None;
            }
            let others: BTreeSet<String> = workers
                .iter()
                .map(|worker| worker.role.to_string())
                .collect();
            let others = others.into_iter().collect::<Vec<_>>().join(", ");
            Some(FindingBuilder::new("envoy.fallback", format!("cluster {}", cluster.name)).warning(
            format!("without a route Envoy chooses among workers with `role: {role}`, and the \
            workers have {others}: 503"),
            format!(
                "in the `default_subset` of cluster `{}` write a role of the workers, or write \
                `role: {role}` for some of them in the configuration of warmroute",
                cluster.name
            ),
        ))
        };
    routed_clusters(site)
        .into_iter()
        .filter_map(|(cluster, _)| of_cluster(cluster))
        .collect()
}

fn path_source(cluster: &EnvoyCluster) -> Option<PathConfigSource> {
    let config = &cluster.eds_cluster_config.as_ref()?.eds_config;
    let plain = || {
        config.path.as_ref().map(|path| PathConfigSource {
            path: path.clone(),
            watched_directory: None,
        })
    };
    config.path_config_source.clone().or_else(plain)
}

fn parent_directory(file: &Path) -> String {
    file.parent()
        .unwrap_or(Path::new("/"))
        .display()
        .to_string()
}

/// Returns the clusters whose endpoints are workers. These are the clusters in `own`, or those of
/// every pool if a control plane may generate one filter per pool.
fn worker_clusters<'d>(site: &FilterSite<'d>, own: Vec<&'d EnvoyCluster>) -> Vec<&'d EnvoyCluster> {
    if site.plane == ControlPlane::Other {
        return own;
    }
    site.dump
        .clusters
        .values()
        .filter(|cluster| matches!(host_selection(cluster), HostSelection::Override(_)))
        .collect()
}

/// Checks that Envoy has an endpoint for each worker.
fn check_workers_known(site: &FilterSite<'_>) -> Option<Finding> {
    let routed = routed_clusters(site);
    let listed: Vec<_> = routed
        .iter()
        .filter(|(cluster, _)| !matches!(host_selection(cluster), HostSelection::OriginalDst(_)))
        .collect();
    let names = listed
        .iter()
        .map(|(cluster, _)| cluster.name.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    let own: Vec<&EnvoyCluster> = listed.iter().map(|(cluster, _)| *cluster).collect();
    let addresses: Vec<EnvoyAddress> = worker_clusters(site, own)
        .into_iter()
        .filter_map(|cluster| site.dump.cluster_addresses(cluster))
        .flatten()
        .collect();
    let at = FindingBuilder::new("envoy.endpoints", format!("clusters {names}"));
    if listed.is_empty() || site.expected.workers.is_empty() {
        return None;
    }
    if addresses.iter().any(|address| address.numeric().is_none()) {
        return Some(at.skipped("endpoints with host names cannot be compared"));
    }
    let has = |address: &std::net::SocketAddr| {
        addresses
            .iter()
            .any(|one| one.numeric().as_ref() == Some(address))
    };
    let missing: Vec<String> = site
        .expected
        .workers
        .iter()
        .filter(|worker| !has(&worker.endpoint.canonical().0))
        .map(|worker| format!("{} at {}", worker.id, worker.endpoint))
        .collect();
    if missing.is_empty() {
        return Some(at.ok(format!(
            "Envoy knows all {} workers",
            site.expected.workers.len()
        )));
    }
    let message = format!(
        "Envoy has no endpoint for the workers {}: requests routed to them go to other workers",
        missing.join(", ")
    );
    Some(at.error(message, missing_endpoints_fix(site)))
}

/// Returns the fix for workers without an endpoint in Envoy.
fn missing_endpoints_fix(site: &FilterSite<'_>) -> String {
    match &site.expected.endpoints_file {
        Some((file, _)) => format!(
            "start warmroute, which writes {}; if it runs, check its log, and that Envoy may read \
            the file",
            file.display()
        ),
        None if site.expected.xds.is_some() => {
            "start warmroute, which publishes them; if it runs, check in its /debug/envoys that \
            this Envoy is connected"
                .to_owned()
        }
        None => {
            let own = "write them into the cluster, or let warmroute do it: `envoy: \
            {endpoints_file: .., cluster: ..}` in its configuration";
            site.fix(&EnvoySetting::WorkerEndpoints(own.to_owned()))
                .unwrap_or_default()
        }
    }
}
