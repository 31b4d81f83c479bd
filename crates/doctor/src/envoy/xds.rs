//! Checks of clusters that get their endpoints by gRPC from warmroute's xDS server.

use super::dump::EnvoyAddress;
use super::host_selection::routed_clusters;
use super::schema::EnvoyCluster;
use super::site::FilterSite;
use crate::finding::{Finding, FindingBuilder};

/// Returns the findings. A cluster must call warmroute, with a service name that warmroute
/// publishes.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let Some(ours) = &site.expected.xds else {
        return Vec::new();
    };
    let listening: Vec<(&EnvoyCluster, Vec<EnvoyAddress>)> = routed_clusters(site)
        .into_iter()
        .filter_map(|(cluster, _)| Some((cluster, xds_addresses(site, cluster)?)))
        .filter(|(_, addresses)| {
            addresses.is_empty()
                || addresses
                    .iter()
                    .any(|address| ours.listens_at(site.expected, address))
        })
        .collect();
    if listening.is_empty() {
        let first = &ours.clusters[0];
        return vec![FindingBuilder::new("envoy.xds", format!("cluster {first}")).warning(
            "no cluster requests its endpoints from warmroute, although `envoy.xds` is configured",
            format!(
                "in the cluster of the workers write `eds_cluster_config: {{service_name: \
                {first}, eds_config: {{resource_api_version: V3, \
                 api_config_source: {{api_type: DELTA_GRPC, transport_api_version: V3, grpc_services: [{{envoy_grpc: {{cluster_name: \
                 xds}}}}]}}}}}}` and add the cluster `xds` of envoy/xds.yaml; or remove `envoy.xds`"
            ),
        )];
    }
    listening
        .into_iter()
        .map(|(cluster, _)| check_service_name(site, cluster, &ours.clusters))
        .collect()
}

fn check_service_name(site: &FilterSite<'_>, cluster: &EnvoyCluster, known: &[String]) -> Finding {
    let at = FindingBuilder::new("envoy.xds", format!("cluster {}", cluster.name));
    let service_name = cluster.eds_service_name();
    if known.iter().any(|name| name == service_name) {
        return at.ok(format!(
            "it requests the endpoints of {service_name} from warmroute"
        ));
    }
    let known = known.join(", ");
    let mirrors = site.expected.mirror_clusters.contains_key(&cluster.name);
    let fix = if mirrors {
        format!(
            "in the `eds_cluster_config` of cluster `{}` write `service_name:` and one of {known}",
            cluster.name
        )
    } else {
        format!(
            "in the configuration of warmroute write `envoy: {{cluster: {service_name}}}`, or a \
            cluster \
            `{service_name}` under `envoy.xds.clusters`"
        )
    };
    at.error(
        format!(
            "it requests the endpoints of {service_name} from warmroute, which publishes {known}: \
            it \
            never gets any"
        ),
        fix,
    )
}

/// Returns the gRPC servers from which a cluster requests its endpoints. An empty list means the
/// server in Envoy's `ads_config`, which the dump does not contain.
fn xds_addresses(site: &FilterSite<'_>, cluster: &EnvoyCluster) -> Option<Vec<EnvoyAddress>> {
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
            .filter_map(|cluster| site.dump.cluster_addresses(cluster))
            .flatten()
            .collect(),
    )
}
