//! Copies of requests for prefill workers: whether Envoy makes them, and only for whom they are meant. Without one a decode
//! worker waits in vain for somebody who was never told.

use super::parts::Cluster;
use super::site::{Active, Site};
use super::ways::{Way, ours, way, written};
use crate::cmd::doctor::finding::{At, Finding};
use crate::ext_proc::headers::{PREFILL_CLUSTER, PREFILL_DESTINATION};

/// Every check of it; none where no model has its prefills mirrored.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    if site.expected.mirrors.is_empty() {
        return Vec::new();
    }
    let routes = site.active.iter().map(|active| route(site, active));
    let clusters = site.expected.mirrors.iter().map(|name| match site.dump.clusters.get(name) {
        Some(cluster) => finds(cluster),
        None => At::new("envoy.mirror_cluster", format!("cluster {name}")).error(
            "there is no such cluster, and copies for it are not made: decode workers wait in vain",
            format!("add the cluster `{name}`, as cluster `prefill` in envoy/disaggregated-mirror.yaml"),
        ),
    });
    routes.chain(clusters).collect()
}

fn route(site: &Site<'_>, active: &Active<'_>) -> Finding {
    let at = site.at_route("envoy.mirror", active);
    let policies = &active.action.request_mirror_policies;
    let by_header = policies.iter().any(|policy| policy.cluster_header.eq_ignore_ascii_case(PREFILL_CLUSTER));
    let always = policies.iter().find(|policy| site.expected.mirrors.contains(&policy.cluster));
    let mend = format!(
        "in the {} write `request_mirror_policies: [{{cluster_header: {PREFILL_CLUSTER}}}]` and no other policy",
        active.route.title()
    );
    match always {
        Some(policy) => at.error(
            format!("every request is copied to {}, also those that nobody is to prefill", policy.cluster),
            mend,
        ),
        None if by_header => at.ok("copies are made where we name a prefill worker"),
        None => at.error("no copies are made: decode workers wait in vain for a prefill", mend),
    }
}

/// Whether a copy gets to the worker that it is meant for.
fn finds(cluster: &Cluster) -> Finding {
    let at = At::new("envoy.mirror_cluster", format!("cluster {}", cluster.name));
    let found = match way(cluster) {
        Way::Override(policy) => policy
            .override_host_sources
            .iter()
            .any(|source| source.metadata.as_ref() == Some(&ours(PREFILL_DESTINATION))),
        Way::Address(header) => header == PREFILL_DESTINATION,
        Way::Subset(_) | Way::Own => false,
    };
    if found {
        return at.ok("copies get to the prefill worker that we name");
    }
    at.error(
        "copies get to any of its workers, and none but the one that we name knows the room",
        format!(
            "in the `override_host_sources` of cluster `{}` write `{}`",
            cluster.name,
            written(PREFILL_DESTINATION)
        ),
    )
}
