//! The workers that Envoy knows against those that we know, and the file that carries them from us to it.

use std::path::Path;

use super::dump::Address;
use super::parts::{Cluster, PathSource};
use super::site::Site;
use super::ways::{Way, clusters, way};
use crate::cmd::doctor::finding::{At, Finding};

/// Every check of the endpoints.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let file = file(site);
    // Of a file that Envoy does not read, the endpoints are missing for that reason.
    let wrong = file.as_ref().is_some_and(|finding| finding.mend.is_some());
    let known = if wrong { None } else { known(site) };
    file.into_iter().chain(known).collect()
}

/// The file that we write must be the one that Envoy reads, for the cluster that we write it for, and its folder watched.
fn file(site: &Site<'_>) -> Option<Finding> {
    let (file, name) = site.expected.endpoints_file.as_ref()?;
    let reads = |cluster: &&Cluster| source(cluster).is_some_and(|source| Path::new(&source.path) == file);
    let to = clusters(site);
    let at = |subject: &str| At::new("envoy.endpoints_file", format!("cluster {subject}"));
    let Some(cluster) = site.dump.clusters.values().find(reads) else {
        let eds = to.iter().map(|(cluster, _)| *cluster).find(|cluster| cluster.kind == "EDS");
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
        return Some(at(name).error(seen, mend));
    };
    if cluster.asked_for() != name {
        return Some(at(&cluster.name).error(
            format!(
                "it asks for the endpoints of {}, and we write those of {name}: Envoy refuses the file",
                cluster.asked_for()
            ),
            format!("in our configuration write `envoy: {{cluster: {}}}`", cluster.asked_for()),
        ));
    }
    let watched = source(cluster).and_then(|source| source.watched_directory).map(|folder| folder.path);
    Some(if watched.as_deref().is_some_and(|watched| Path::new(watched) == Path::new(&folder(file))) {
        at(&cluster.name).ok(format!("Envoy reads {}, which we write", file.display()))
    } else {
        at(&cluster.name).error(
            format!(
                "watched_directory: {}; Envoy does not notice that we rename a new list into {}",
                watched.as_deref().unwrap_or("none"),
                folder(file)
            ),
            format!("in its `path_config_source` write `watched_directory: {{path: {}}}`", folder(file)),
        )
    })
}

fn source(cluster: &Cluster) -> Option<PathSource> {
    let config = &cluster.eds_cluster_config.as_ref()?.eds_config;
    let plain = || config.path.as_ref().map(|path| PathSource { path: path.clone(), watched_directory: None });
    config.path_config_source.clone().or_else(plain)
}

fn folder(file: &Path) -> String {
    file.parent().unwrap_or(Path::new("/")).display().to_string()
}

/// Whether each of our workers is an endpoint of Envoy's.
fn known(site: &Site<'_>) -> Option<Finding> {
    let to = clusters(site);
    let listed: Vec<_> = to.iter().filter(|(cluster, _)| !matches!(way(cluster), Way::Address(_))).collect();
    let names = listed.iter().map(|(cluster, _)| cluster.name.as_str()).collect::<Vec<_>>().join(", ");
    let told: Vec<Address> =
        listed.iter().filter_map(|(cluster, _)| site.dump.endpoints_of(cluster)).flatten().collect();
    let at = At::new("envoy.endpoints", format!("clusters {names}"));
    if listed.is_empty() || site.expected.workers.is_empty() {
        return None;
    }
    if told.iter().any(|address| address.numeric().is_none()) {
        return Some(at.skipped("endpoints by name, which may be anybody's"));
    }
    let has = |address: &std::net::SocketAddr| told.iter().any(|one| one.numeric().as_ref() == Some(address));
    let missing: Vec<String> = site
        .expected
        .workers
        .iter()
        .filter(|worker| !has(&worker.endpoint.canonical().0))
        .map(|worker| format!("{} at {}", worker.id, worker.endpoint))
        .collect();
    if missing.is_empty() {
        return Some(at.ok(format!("Envoy knows all {} workers", site.expected.workers.len())));
    }
    let mend = match &site.expected.endpoints_file {
        Some((file, _)) => format!(
            "start warmroute, which writes {}; where it runs, look in its log why it does not, and whether Envoy may read the file",
            file.display()
        ),
        None => "write them into the cluster, or have us do it: `envoy: {endpoints_file: .., cluster: ..}` in our configuration"
            .to_owned(),
    };
    let seen = format!("Envoy does not know the workers {}, and goes elsewhere when we name them", missing.join(", "));
    Some(at.error(seen, mend))
}
