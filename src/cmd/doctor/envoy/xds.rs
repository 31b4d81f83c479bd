//! Clusters whose endpoints come by gRPC, against what we tell as an xDS server.

use super::dump::Address;
use super::parts::Cluster;
use super::site::Site;
use super::ways::clusters;
use crate::cmd::doctor::finding::{At, Finding};

/// Every cluster that is to hear of its endpoints from us must ask us, and for a name that we know.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let Some(ours) = &site.expected.xds else {
        return Vec::new();
    };
    let listening: Vec<(&Cluster, Vec<Address>)> = clusters(site)
        .into_iter()
        .filter_map(|(cluster, _)| Some((cluster, asks(site, cluster)?)))
        .filter(|(_, asks)| {
            asks.is_empty()
                || asks
                    .iter()
                    .any(|address| ours.is_at(site.expected, address))
        })
        .collect();
    if listening.is_empty() {
        let first = &ours.clusters[0];
        return vec![At::new("envoy.xds", format!("cluster {first}")).warning(
            "no cluster asks us for its endpoints, though `envoy.xds` is there for that",
            format!(
                "in the cluster of the workers write `eds_cluster_config: {{service_name: {first}, eds_config: {{resource_api_version: V3, \
                 api_config_source: {{api_type: DELTA_GRPC, transport_api_version: V3, grpc_services: [{{envoy_grpc: {{cluster_name: \
                 xds}}}}]}}}}}}` and add the cluster `xds` of envoy/xds.yaml; or leave out `envoy.xds`"
            ),
        )];
    }
    listening
        .into_iter()
        .map(|(cluster, _)| name(site, cluster, &ours.clusters))
        .collect()
}

fn name(site: &Site<'_>, cluster: &Cluster, known: &[String]) -> Finding {
    let at = At::new("envoy.xds", format!("cluster {}", cluster.name));
    let asked = cluster.asked_for();
    if known.iter().any(|name| name == asked) {
        return at.ok(format!("it asks us for the endpoints of {asked}"));
    }
    let known = known.join(", ");
    let mirrors = site.expected.mirrors.contains_key(&cluster.name);
    let mend = if mirrors {
        format!(
            "in the `eds_cluster_config` of cluster `{}` write `service_name:` and one of {known}",
            cluster.name
        )
    } else {
        format!(
            "in our configuration write `envoy: {{cluster: {asked}}}`, or a cluster `{asked}` under `envoy.xds.clusters`"
        )
    };
    at.error(
        format!(
            "it asks us for the endpoints of {asked}, and we know {known}: it will never have any"
        ),
        mend,
    )
}

/// Whom a cluster asks by gRPC for its endpoints. Empty: whoever Envoy's `ads_config` names, which the page does not tell.
fn asks(site: &Site<'_>, cluster: &Cluster) -> Option<Vec<Address>> {
    let source = &cluster.eds_cluster_config.as_ref()?.eds_config;
    if source.ads.is_some() {
        return Some(Vec::new());
    }
    let services = &source.api_config_source.as_ref()?.grpc_services;
    let clusters = services.iter().filter_map(|service| {
        site.dump
            .clusters
            .get(&service.envoy_grpc.as_ref()?.cluster_name)
    });
    Some(
        clusters
            .filter_map(|cluster| site.dump.endpoints_of(cluster))
            .flatten()
            .collect(),
    )
}
