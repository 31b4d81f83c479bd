//! Copies of requests for prefill workers: whether Envoy makes them, and only for whom they are meant. Without one a decode
//! worker waits in vain for somebody who was never told.

use std::collections::BTreeSet;

use serde_json::Value;

use super::dump::{Address, is, part};
use super::endpoints::misreads;
use super::parts::{Cluster, MirrorPolicy, OverrideHost};
use super::retry::carried;
use super::server::{Held, breakers};
use super::site::{Active, Site};
use super::ways::{Way, ours, way, written};
use crate::cmd::doctor::finding::{At, Finding};
use crate::ext_proc::headers::{PREFILL_CLUSTER, PREFILL_DESTINATION};
use crate::worker::{ModelName, Role, Worker};

/// Every check of it; none where no model has its prefills mirrored.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    if site.expected.mirrors.is_empty() {
        return Vec::new();
    }
    let routes = site
        .active
        .iter()
        .filter(|active| wanted(site, active))
        .map(|active| route(site, active));
    let clusters = site.expected.mirrors.iter().flat_map(|(name, models)| match site.dump.clusters.get(name) {
        Some(cluster) => of_cluster(site, cluster, models),
        None => vec![At::new("envoy.mirror_cluster", format!("cluster {name}")).error(
            "there is no such cluster, and copies for it are not made: decode workers wait in vain",
            format!("add the cluster `{name}`, as cluster `prefill` in envoy/disaggregated-mirror.yaml"),
        )],
    });
    routes.chain(clusters).collect()
}

/// Whether requests come by this route that are copied: not where other APIs do, nor where it leads to workers of other
/// models alone.
fn wanted(site: &Site<'_>, active: &Active<'_>) -> bool {
    let meets = |worker: &&Worker| {
        site.expected
            .mirrors
            .values()
            .any(|models| models.contains(&worker.model))
    };
    let leads_there = |name: &str| {
        let told = site
            .dump
            .clusters
            .get(name)
            .and_then(|cluster| site.dump.endpoints_of(cluster));
        let known = told.filter(|told| {
            !told.is_empty() && told.iter().all(|address| address.numeric().is_some())
        });
        known.is_none_or(|told| {
            site.expected
                .workers
                .iter()
                .filter(meets)
                .any(|worker| has(&told, worker))
        })
    };
    let mut clusters = active.action.clusters().peekable();
    carried(site, active) && (clusters.peek().is_none() || clusters.any(leads_there))
}

fn has(told: &[Address], worker: &Worker) -> bool {
    let endpoint = worker.endpoint.canonical().0;
    told.iter()
        .any(|address| address.numeric() == Some(endpoint))
}

/// The policies that hold for a route: the most specific ones, and those of the clusters it leads to.
fn policies(site: &Site<'_>, active: &Active<'_>) -> Vec<MirrorPolicy> {
    let of_all = site
        .server
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
        part(cluster.http()?.get("request_mirror_policies")?, "a policy").ok()
    });
    own.into_iter()
        .chain(of_clusters.flat_map(|policies: Vec<MirrorPolicy>| policies))
        .collect()
}

fn route(site: &Site<'_>, active: &Active<'_>) -> Finding {
    let at = site.at_route("envoy.mirror", active);
    let policies = policies(site, active);
    let by_header = policies
        .iter()
        .find(|policy| policy.cluster_header.eq_ignore_ascii_case(PREFILL_CLUSTER));
    let always = policies
        .iter()
        .find(|policy| site.expected.mirrors.contains_key(&policy.cluster));
    let mend = format!(
        "in the {} write `request_mirror_policies: [{{cluster_header: {PREFILL_CLUSTER}}}]` and no other policy",
        active.title()
    );
    if let Some(policy) = always {
        let seen = format!(
            "every request is copied to {}, also those that nobody is to prefill",
            policy.cluster
        );
        return at.error(seen, mend);
    }
    let Some(policy) = by_header else {
        return at.error(
            "no copies are made: decode workers wait in vain for a prefill",
            mend,
        );
    };
    if let Some(share) = &policy.runtime_fraction
        && !is_whole(share)
    {
        return at.error(
            "runtime_fraction: copies of a share of the requests are made: the other decode workers wait in vain",
            format!("take `runtime_fraction` out of the `request_mirror_policies` of the {}", active.title()),
        );
    }
    let of_all = site
        .server
        .routes
        .as_ref()
        .map(|routes| &routes.request_headers_to_remove);
    let own = active
        .routes()
        .map(|route| &route.request_headers_to_remove);
    let mut removed = own
        .chain([&active.host.request_headers_to_remove])
        .chain(of_all)
        .flatten();
    if removed.any(|name| name.eq_ignore_ascii_case(PREFILL_CLUSTER)) {
        return at.error(
            format!("request_headers_to_remove has {PREFILL_CLUSTER}, and that happens first: no copies are made"),
            format!("take `{PREFILL_CLUSTER}` out of `request_headers_to_remove`; clients' own are removed early"),
        );
    }
    at.ok("copies are made where we name a prefill worker")
}

/// Whether a fraction stands for all, and nobody can change it.
fn is_whole(share: &Value) -> bool {
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

/// Whether copies get to the worker that they are meant for, however many they are, and to nobody else.
fn of_cluster(site: &Site<'_>, cluster: &Cluster, models: &BTreeSet<ModelName>) -> Vec<Finding> {
    let at = |check| At::new(check, format!("cluster {}", cluster.name));
    let policy = way(cluster);
    let found = match &policy {
        Way::Override(policy) => policy
            .override_host_sources
            .iter()
            .any(|source| source.metadata.as_ref() == Some(&ours(PREFILL_DESTINATION))),
        Way::Address(header) => header == PREFILL_DESTINATION,
        Way::Subset(_) | Way::Own => false,
    };
    let mut findings = vec![if found {
        at("envoy.mirror_cluster").ok("copies get to the prefill worker that we name")
    } else {
        at("envoy.mirror_cluster").error(
            "copies get to any of its workers, and none but the one that we name knows the room",
            format!(
                "in the `override_host_sources` of cluster `{}` write `{}`",
                cluster.name,
                written(PREFILL_DESTINATION)
            ),
        )
    }];
    if let Way::Override(policy) = &policy {
        findings.extend(falls_back(at("envoy.mirror_fallback"), cluster, policy));
        findings.extend(known(site, at("envoy.endpoints"), cluster, models));
    }
    findings.push(breakers(site, cluster, Held::Copies));
    findings
}

/// A copy for an endpoint that Envoy does not know is to be lost: elsewhere it waits for somebody who never comes.
fn falls_back(at: At, cluster: &Cluster, policy: &OverrideHost) -> Option<Finding> {
    let first = policy
        .fallback_policy
        .policies
        .first()
        .map(|policy| &policy.typed_extension_config.typed_config)?;
    let nobody = is(first, "Subset")
        && matches!(
            first["fallback_policy"].as_str(),
            None | Some("NO_FALLBACK")
        );
    (!nobody).then(|| {
        at.warning(
            "where Envoy does not know the prefill worker that we name, another one gets the copy, and waits in a room where \
             nobody comes",
            format!("write the `fallback_policy` of cluster `{}` as in envoy/disaggregated-mirror.yaml", cluster.name),
        )
    })
}

/// Whether each prefill worker is among its endpoints.
fn known(
    site: &Site<'_>,
    at: At,
    cluster: &Cluster,
    models: &BTreeSet<ModelName>,
) -> Option<Finding> {
    // That is said of its file.
    if misreads(site, cluster) {
        return None;
    }
    let told = site.dump.endpoints_of(cluster).unwrap_or_default();
    if told.iter().any(|address| address.numeric().is_none()) {
        return Some(at.skipped("endpoints by name, which may be anybody's"));
    }
    let prefills = site
        .expected
        .workers
        .iter()
        .filter(|one| one.role == Role::Prefill && models.contains(&one.model));
    let missing: Vec<String> = prefills
        .filter(|worker| !has(&told, worker))
        .map(|worker| format!("{} at {}", worker.id, worker.endpoint))
        .collect();
    (!missing.is_empty()).then(|| {
        at.error(
            format!("it does not know the prefill workers {}: copies for them are not made", missing.join(", ")),
            format!("have cluster `{}` read the endpoints that we write, as cluster `prefill` in envoy/disaggregated-mirror.yaml", cluster.name),
        )
    })
}
