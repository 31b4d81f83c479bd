//! The workers that Envoy knows against those that we know, and the file that carries them from us to it.

use std::collections::BTreeSet;
use std::path::Path;

use super::control_plane::ControlPlane;
use super::dump::{Address, is};
use super::parts::{Cluster, PathSource};
use super::remedy::EnvoySetting;
use super::site::Site;
use super::ways::{Way, clusters, way};
use crate::cmd::doctor::finding::{At, Finding};

/// Every check of the endpoints.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let files = files(site);
    // Of a file that Envoy does not read, the endpoints are missing for that reason.
    let wrong = files.iter().any(|finding| finding.mend.is_some());
    let known = if wrong { None } else { known(site) };
    files.into_iter().chain(known).chain(alone(site)).collect()
}

/// The file that we write must be the one that Envoy reads, for the cluster that we write it for, and its folder watched.
fn files(site: &Site<'_>) -> Vec<Finding> {
    let Some((file, name)) = site.expected.endpoints_file.as_ref() else {
        return Vec::new();
    };
    let reads =
        |cluster: &&Cluster| source(cluster).is_some_and(|source| Path::new(&source.path) == file);
    let readers: Vec<&Cluster> = site.dump.clusters.values().filter(reads).collect();
    if readers.is_empty() {
        return vec![unread(site, file, name)];
    }
    let told = readers.iter().any(|cluster| cluster.asked_for() == name);
    readers
        .into_iter()
        .map(|cluster| reader(site, cluster, told))
        .collect()
}

/// Whether a cluster reads our file under another name, and so nothing.
pub(super) fn misreads(site: &Site<'_>, cluster: &Cluster) -> bool {
    let ours = site.expected.endpoints_file.as_ref();
    ours.is_some_and(|(file, name)| {
        source(cluster).is_some_and(|source| Path::new(&source.path) == file)
            && cluster.asked_for() != name
    })
}

fn unread(site: &Site<'_>, file: &Path, name: &str) -> Finding {
    let eds = clusters(site)
        .into_iter()
        .map(|(cluster, _)| cluster)
        .find(|cluster| cluster.kind == "EDS");
    let from = eds.and_then(source).map(|source| source.path);
    let seen = match &from {
        Some(from) => format!("Envoy reads {from}, and we write {}", file.display()),
        None => format!("no cluster reads {}, which we write", file.display()),
    };
    let mend = format!(
        "in cluster `{name}` write `eds_cluster_config: {{eds_config: {{resource_api_version: V3, path_config_source: {{path: {}, \
         watched_directory: {{path: {}}}}}}}}}`{}",
        file.display(),
        folder(file),
        from.map(|from| format!(", or in our configuration `envoy: {{endpoints_file: {from}}}`"))
            .unwrap_or_default()
    );
    At::new("envoy.endpoints_file", format!("cluster {name}")).error(seen, mend)
}

/// One cluster that reads our file; `told`: one of them asks for what we write.
fn reader(site: &Site<'_>, cluster: &Cluster, told: bool) -> Finding {
    let at = At::new("envoy.endpoints_file", format!("cluster {}", cluster.name));
    let Some((file, name)) = site.expected.endpoints_file.as_ref() else {
        return at.ok("we write none");
    };
    if cluster.asked_for() != name {
        let seen = format!(
            "it asks for the endpoints of {}, and we write those of {name}: Envoy refuses the file",
            cluster.asked_for()
        );
        let mend = if told || site.expected.mirrors.contains_key(&cluster.name) {
            format!(
                "in the `eds_cluster_config` of cluster `{}` write `service_name: {name}`",
                cluster.name
            )
        } else {
            format!(
                "in our configuration write `envoy: {{cluster: {}}}`",
                cluster.asked_for()
            )
        };
        return at.error(seen, mend);
    }
    let watched = source(cluster)
        .and_then(|source| source.watched_directory)
        .map(|folder| folder.path);
    if watched
        .as_deref()
        .is_some_and(|watched| Path::new(watched) == Path::new(&folder(file)))
    {
        at.ok(format!("Envoy reads {}, which we write", file.display()))
    } else {
        at.error(
            format!(
                "watched_directory: {}; Envoy does not notice that we rename a new list into {}",
                watched.as_deref().unwrap_or("none"),
                folder(file)
            ),
            format!(
                "in its `path_config_source` write `watched_directory: {{path: {}}}`",
                folder(file)
            ),
        )
    }
}

/// Whom Envoy chooses among by itself: where these are the workers of a role, as we write it, somebody must have it.
fn alone(site: &Site<'_>) -> Vec<Finding> {
    let workers = &site.expected.workers;
    let we_write = site.expected.endpoints_file.is_some() || site.expected.xds.is_some();
    if !we_write || workers.is_empty() {
        return Vec::new();
    }
    let of_cluster = |cluster: &Cluster| {
        let Way::Override(policy) = way(cluster) else {
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
            .filter(|_| is(subset, "Subset"))?;
        if workers.iter().any(|worker| worker.role.to_string() == role) {
            return None;
        }
        let others: BTreeSet<String> = workers
            .iter()
            .map(|worker| worker.role.to_string())
            .collect();
        let others = others.into_iter().collect::<Vec<_>>().join(", ");
        Some(At::new("envoy.fallback", format!("cluster {}", cluster.name)).warning(
            format!("where Envoy chooses it chooses among workers with `role: {role}`, and ours have {others}: 503"),
            format!(
                "in the `default_subset` of cluster `{}` write a role that workers have, or write `role: {role}` for some of them \
                 in our configuration",
                cluster.name
            ),
        ))
    };
    clusters(site)
        .into_iter()
        .filter_map(|(cluster, _)| of_cluster(cluster))
        .collect()
}

fn source(cluster: &Cluster) -> Option<PathSource> {
    let config = &cluster.eds_cluster_config.as_ref()?.eds_config;
    let plain = || {
        config.path.as_ref().map(|path| PathSource {
            path: path.clone(),
            watched_directory: None,
        })
    };
    config.path_config_source.clone().or_else(plain)
}

fn folder(file: &Path) -> String {
    file.parent()
        .unwrap_or(Path::new("/"))
        .display()
        .to_string()
}

/// The clusters that have workers as endpoints: `own`, or those of every pool, for which a control plane may generate a filter each.
fn with_workers<'d>(site: &Site<'d>, own: Vec<&'d Cluster>) -> Vec<&'d Cluster> {
    if site.plane == ControlPlane::Other {
        return own;
    }
    site.dump
        .clusters
        .values()
        .filter(|cluster| matches!(way(cluster), Way::Override(_)))
        .collect()
}

/// Whether each of our workers is an endpoint of Envoy's.
fn known(site: &Site<'_>) -> Option<Finding> {
    let to = clusters(site);
    let listed: Vec<_> = to
        .iter()
        .filter(|(cluster, _)| !matches!(way(cluster), Way::Address(_)))
        .collect();
    let names = listed
        .iter()
        .map(|(cluster, _)| cluster.name.as_str())
        .collect::<Vec<_>>()
        .join(", ");
    let own: Vec<&Cluster> = listed.iter().map(|(cluster, _)| *cluster).collect();
    let told: Vec<Address> = with_workers(site, own)
        .into_iter()
        .filter_map(|cluster| site.dump.endpoints_of(cluster))
        .flatten()
        .collect();
    let at = At::new("envoy.endpoints", format!("clusters {names}"));
    if listed.is_empty() || site.expected.workers.is_empty() {
        return None;
    }
    if told.iter().any(|address| address.numeric().is_none()) {
        return Some(at.skipped("endpoints by name, which may be anybody's"));
    }
    let has = |address: &std::net::SocketAddr| {
        told.iter()
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
    let mend = match &site.expected.endpoints_file {
        Some((file, _)) => format!(
            "start warmroute, which writes {}; where it runs, look in its log why it does not, and whether Envoy may read the file",
            file.display()
        ),
        None if site.expected.xds.is_some() => {
            "start warmroute, which tells them; where it runs, look at its /debug/envoys whether this Envoy listens"
                .to_owned()
        }
        None => {
            let own = "write them into the cluster, or have us do it: `envoy: {endpoints_file: .., cluster: ..}` in our configuration";
            site.fix(&EnvoySetting::WorkerEndpoints(own.to_owned())).unwrap_or_default()
        }
    };
    let seen = format!(
        "Envoy does not know the workers {}, and goes elsewhere when we name them",
        missing.join(", ")
    );
    Some(at.error(seen, mend))
}
