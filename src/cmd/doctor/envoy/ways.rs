//! How Envoy gets from our word to a worker: by a load balancer that reads our metadata or header, by an address in a
//! header, or by routes that match our headers. Each way needs something else, and a cluster without one ignores us.

use serde_json::Value;

use super::control_plane::ControlPlane;
use super::dump::{is, part};
use super::parts::{Cluster, HostSource, MetadataKey, OverrideHost};
use super::remedy::{EnvoySetting, FilterField};
use super::site::{Active, Site};
use crate::cmd::doctor::finding::{At, Finding, Level};
use crate::ext_proc::headers::ENDPOINT;
use crate::ext_proc::metadata::{LB, SERVED};

/// Attribute of the endpoint that served.
const UPSTREAM: &str = "upstream.address";

/// The way a cluster takes.
#[derive(Clone, Debug)]
pub(super) enum Way {
    /// `override_host`.
    Override(OverrideHost),
    /// Subsets of the hosts.
    Subset(Value),
    /// `ORIGINAL_DST` by this header.
    Address(String),
    /// Its own balancer alone.
    Own,
}

/// The way of a cluster.
pub(super) fn way(cluster: &Cluster) -> Way {
    let original = cluster.original_dst_lb_config.as_ref();
    if let Some(original) =
        original.filter(|config| cluster.kind == "ORIGINAL_DST" && config.use_http_header)
    {
        let name = original.http_header_name.to_ascii_lowercase();
        return Way::Address(if name.is_empty() {
            "x-envoy-original-dst-host".to_owned()
        } else {
            name
        });
    }
    if let Some(legacy) = &cluster.lb_subset_config {
        return Way::Subset(legacy.clone());
    }
    // Envoy takes the first it knows.
    let policies = cluster
        .load_balancing_policy
        .policies
        .iter()
        .map(|policy| &policy.typed_extension_config.typed_config);
    match policies.into_iter().next() {
        Some(config) if is(config, "OverrideHost") => {
            Way::Override(part(config, "a policy").unwrap_or_default())
        }
        Some(config) if is(config, "Subset") => Way::Subset(config.clone()),
        _ => Way::Own,
    }
}

/// The header whose value decides, where a client's would do as well.
pub(super) fn deciding_headers(way: &Way) -> Vec<String> {
    match way {
        Way::Override(policy) => policy
            .override_host_sources
            .iter()
            .filter_map(|source| source.header.clone())
            .collect(),
        Way::Address(header) => vec![header.clone()],
        Way::Subset(_) | Way::Own => Vec::new(),
    }
}

/// Whether Envoy follows us to the clusters of its routes.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (cluster, actives) in clusters(site) {
        let at = || At::new("envoy.way", format!("cluster {}", cluster.name));
        let found = match way(cluster) {
            Way::Override(policy) => override_host(site, cluster, &policy),
            Way::Subset(config) => subset(site, at(), &config),
            Way::Address(header) => vec![by_address(site, at(), &header)],
            Way::Own => vec![own(site, at(), cluster, &actives)],
        };
        findings.extend(found);
    }
    findings.extend(by_route(site));
    findings
}

/// The clusters of all active routes, each with the routes that lead to it.
pub(super) fn clusters<'s, 'd>(site: &'s Site<'d>) -> Vec<(&'d Cluster, Vec<&'s Active<'d>>)> {
    let mut found: Vec<(&Cluster, Vec<&Active<'_>>)> = Vec::new();
    for active in &site.active {
        for name in active.action.clusters() {
            let Some(cluster) = site.dump.clusters.get(name) else {
                continue;
            };
            match found
                .iter_mut()
                .find(|(known, _)| known.name == cluster.name)
            {
                Some((_, routes)) => routes.push(active),
                None => found.push((cluster, vec![active])),
            }
        }
    }
    found
}

fn override_host(site: &Site<'_>, cluster: &Cluster, policy: &OverrideHost) -> Vec<Finding> {
    let at = |check| At::new(check, format!("cluster {}", cluster.name));
    let sources = &policy.override_host_sources;
    let from_metadata = sources.iter().any(|source| {
        source
            .metadata
            .as_ref()
            .is_some_and(|key| *key == ours(ENDPOINT))
    });
    let from_header = sources
        .iter()
        .filter_map(|source| source.header.as_deref())
        .any(|name| {
            site.expected
                .endpoint_headers
                .iter()
                .any(|set| set.eq_ignore_ascii_case(name))
        });
    let listed = sources.iter().map(words).collect::<Vec<_>>().join(", ");
    if !from_metadata && !from_header {
        let own = format!(
            "in the `override_host_sources` of cluster `{}` write `{}`",
            cluster.name,
            written(ENDPOINT)
        );
        let seen = format!(
            "override_host reads {listed}, and we write {LB}: {ENDPOINT}: our choice is never followed"
        );
        let setting = EnvoySetting::EndpointOverride(cluster, own);
        return vec![site.report(at("envoy.override_host"), Level::Error, seen, &setting)];
    }
    let mut findings = Vec::new();
    let received = site
        .variants()
        .iter()
        .all(|filter| filter.metadata_options.receiving_namespaces.has(LB));
    if !received && !from_header {
        findings.push(site.report(
            site.at("envoy.metadata"),
            Level::Error,
            format!("the receiving_namespaces of the filter have no {LB}: Envoy drops the endpoint that we name"),
            &EnvoySetting::Filter(FilterField::receiving(LB)),
        ));
    } else {
        findings.push(at("envoy.override_host").ok(format!("override_host reads {listed}")));
    }
    findings.extend(served(site, at("envoy.served"), cluster, policy));
    findings
}

/// Whether we hear who served in the end.
fn served(site: &Site<'_>, at: At, cluster: &Cluster, policy: &OverrideHost) -> Option<Finding> {
    let forwarded = site
        .variants()
        .iter()
        .all(|filter| filter.metadata_options.forwarding_namespaces.has(LB));
    let noted = policy
        .selected_host_key
        .as_ref()
        .is_some_and(|key| *key == ours(SERVED));
    let seen = "Envoy does not report the endpoint that served: after a retry the load is counted at the wrong worker";
    let mend = match (noted, forwarded) {
        (true, true) => return Some(at.ok("the endpoint that served comes back to us")),
        // Generated clusters have no such key to set; the attribute names the same endpoint.
        _ if site.plane != ControlPlane::Other && names_upstream(site) => {
            return Some(at.ok(format!("{UPSTREAM} names the endpoint that served")));
        }
        (false, _) => {
            let key = written(SERVED).replace("metadata: ", "selected_host_key: ");
            format!(
                "in cluster `{}` beside `override_host_sources` write `{}`",
                cluster.name,
                key.trim_start_matches("- ")
            )
        }
        (true, false) => {
            return Some(site.report(
                at,
                Level::Warning,
                seen,
                &EnvoySetting::Filter(FilterField::forwarding(LB)),
            ));
        }
    };
    Some(at.warning(seen, mend))
}

fn names_upstream(site: &Site<'_>) -> bool {
    site.variants().iter().all(|filter| {
        filter
            .response_attributes
            .iter()
            .any(|name| name == UPSTREAM)
    })
}

pub(super) fn ours(key: &str) -> MetadataKey {
    MetadataKey {
        key: LB.to_owned(),
        path: vec![super::parts::Segment {
            key: key.to_owned(),
        }],
    }
}

pub(super) fn written(key: &str) -> String {
    format!("- metadata: {{key: {LB}, path: [{{key: {key}}}]}}")
}

fn words(source: &HostSource) -> String {
    match (&source.metadata, &source.header) {
        (Some(key), _) => format!("the metadata {key}"),
        (None, Some(header)) => format!("the header {header}"),
        (None, None) => "nothing".to_owned(),
    }
}

/// Subsets by the worker's id. All metadata of the namespace must match, so that ours must not be beside it.
fn subset(site: &Site<'_>, at: At, config: &Value) -> Vec<Finding> {
    let selectors = config["subset_selectors"].as_array().into_iter().flatten();
    let keys: Vec<Vec<&str>> = selectors
        .map(|selector| {
            selector["keys"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str)
                .collect()
        })
        .collect();
    let single = config["subset_selectors"].as_array().into_iter().flatten();
    if single
        .into_iter()
        .any(|selector| selector["single_host_per_subset"] == true)
    {
        return vec![at.error(
            "single_host_per_subset: true ignores health, and drops the second host of an id",
            "take `single_host_per_subset` out of the `subset_selectors`",
        )];
    }
    if !keys.contains(&vec!["worker_id"]) {
        let keys = keys
            .iter()
            .map(|keys| keys.join("+"))
            .collect::<Vec<_>>()
            .join(", ");
        return vec![at.error(
            format!("the subsets are by {keys}, and what names a worker is worker_id"),
            "write `subset_selectors: [{keys: [worker_id]}]`",
        )];
    }
    let rule = site
        .server
        .hcm
        .http_filters
        .iter()
        .enumerate()
        .filter(|(_, filter)| is(&filter.typed_config, "Config"));
    let rules: Vec<(usize, String)> = rule
        .filter_map(|(place, filter)| Some((place, id_header(&filter.typed_config)?)))
        .collect();
    let received = site
        .variants()
        .iter()
        .any(|filter| filter.metadata_options.receiving_namespaces.has(LB));
    let by_header = rules.iter().any(|(place, header)| {
        *place > site.main.at
            && site
                .expected
                .headers
                .iter()
                .any(|set| set.eq_ignore_ascii_case(header))
    });
    vec![match (by_header, received) {
        (true, false) => at.ok("subsets by worker_id, from our header"),
        (_, true) => at.error(
            format!(
                "{LB} is among the receiving_namespaces: the endpoint is beside the id then, and no host has it: 503"
            ),
            format!(
                "take `{LB}` out of the `receiving_namespaces` of the filter `{}`; the id comes by header_to_metadata",
                site.main.name
            ),
        ),
        (false, false) => at.error(
            "no header_to_metadata filter behind ours makes worker_id of the header that we set: 503",
            format!(
                "add the filter `envoy.filters.http.header_to_metadata` of envoy/subset.yaml after `{}`",
                site.main.name
            ),
        ),
    }]
}

/// The header that a header_to_metadata filter makes the worker's id of.
fn id_header(config: &Value) -> Option<String> {
    let mut rules = config["request_rules"].as_array()?.iter();
    let rule = rules.find(|rule| {
        let put = &rule["on_header_present"];
        put["key"] == "worker_id" && matches!(put["metadata_namespace"].as_str(), Some(LB))
    })?;
    Some(rule["header"].as_str()?.to_ascii_lowercase())
}

fn by_address(site: &Site<'_>, at: At, header: &str) -> Finding {
    if site.expected.fallbacks > 0 {
        return at.error(
            format!(
                "gateway.fallbacks: {}, and ORIGINAL_DST accepts one address in {header}: every request is a 503",
                site.expected.fallbacks
            ),
            "write `gateway: {fallbacks: 0}` in our configuration",
        );
    }
    if site
        .expected
        .endpoint_headers
        .iter()
        .any(|set| set.eq_ignore_ascii_case(header))
    {
        return at.ok(format!("the address comes from {header}"));
    }
    at.error(
        format!("the address comes from {header}, which we do not set: 503"),
        format!("write `http_header_name: {ENDPOINT}` in its `original_dst_lb_config`, or `gateway: {{names: {{endpoint: [{header}]}}}}` in our configuration"),
    )
}

/// A cluster of which nobody names a host: right only as the target of a route by header, or behind such.
fn own(site: &Site<'_>, at: At, cluster: &Cluster, actives: &[&Active<'_>]) -> Finding {
    let behind_headers = actives.iter().all(|active| {
        named_by_header(site, active)
            || site
                .active
                .iter()
                .any(|other| std::ptr::eq(active.host, other.host) && named_by_header(site, other))
    });
    if behind_headers {
        return at.ok("its routes match the headers that we set");
    }
    let text = "write the `load_balancing_policy` of cluster `workers` in envoy/standalone.yaml (override_host), or another of the ways in \
                envoy/README.md";
    let seen = "its load balancer asks nobody: our choice is never followed";
    site.report(
        at,
        Level::Error,
        seen,
        &EnvoySetting::EndpointOverride(cluster, text.to_owned()),
    )
}

fn named_by_header(site: &Site<'_>, active: &Active<'_>) -> bool {
    let ours = |name: &str| {
        site.expected
            .headers
            .iter()
            .any(|set| set.eq_ignore_ascii_case(name))
    };
    active
        .route
        .matches
        .headers
        .iter()
        .any(|header| ours(&header.name))
        || active.action.cluster_header.as_deref().is_some_and(ours)
}

/// Routes by our headers are found only when Envoy looks a second time.
fn by_route(site: &Site<'_>) -> Option<Finding> {
    site.active
        .iter()
        .find(|active| named_by_header(site, active))?;
    let at = site.at("envoy.clear_route_cache");
    let kept = site.main.config.disable_clear_route_cache
        || site.main.config.route_cache_action == "RETAIN";
    Some(if !site.expected.clear_route_cache {
        at.error(
            "gateway.clear_route_cache: false, and routes match our headers: none is ever found",
            "write `gateway: {clear_route_cache: true}` in our configuration",
        )
    } else if kept {
        at.error(
            "the filter keeps Envoy from looking for its route again: none of our headers is ever matched",
            format!("take `disable_clear_route_cache` and `route_cache_action` out of the filter `{}`", site.main.name),
        )
    } else {
        at.ok("Envoy looks for its route again with our headers")
    })
}
