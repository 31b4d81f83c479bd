//! Checks of Envoy's host selection. The host is selected by a load balancer that reads warmroute's
//! metadata or header, by an address in a header, or by routes that match headers. Each method has
//! its own requirements. A cluster without any of them ignores the chosen worker, which is correct
//! only for front ends that read the worker's id from the headers.

use serde_json::Value;
use warmroute_core::envoy_names::{ENDPOINT, LB_NAMESPACE, SERVED_KEY};

use super::control_plane::ControlPlane;
use super::dump::parse_part;
use super::fixes::{EnvoySetting, FilterField};
use super::schema::{
    EnvoyCluster, ExternalProcessor, MetadataKey, OverrideHostPolicy, OverrideHostSource, has_type,
};
use super::site::{ActiveRoute, FilterSite};
use crate::finding::{Finding, FindingBuilder, FindingLevel};

/// Attribute with the endpoint that served the request.
const UPSTREAM_ADDRESS: &str = "upstream.address";

/// Host selection of a cluster.
#[derive(Clone, Debug)]
pub(super) enum HostSelection {
    /// `override_host`.
    Override(OverrideHostPolicy),
    /// Subset load balancing.
    Subset(Value),
    /// `ORIGINAL_DST` with the address in this header.
    OriginalDst(String),
    /// The cluster's own load balancing policy.
    ClusterPolicy,
}

/// Returns the host selection of a cluster.
pub(super) fn host_selection(cluster: &EnvoyCluster) -> HostSelection {
    let original = cluster.original_dst_lb_config.as_ref();
    if let Some(original) =
        original.filter(|config| cluster.kind == "ORIGINAL_DST" && config.use_http_header)
    {
        let name = original.http_header_name.to_ascii_lowercase();
        return HostSelection::OriginalDst(if name.is_empty() {
            "x-envoy-original-dst-host".to_owned()
        } else {
            name
        });
    }
    if let Some(legacy) = &cluster.lb_subset_config {
        return HostSelection::Subset(legacy.clone());
    }
    // Envoy uses the first policy that it supports.
    let policies = cluster
        .load_balancing_policy
        .policies
        .iter()
        .map(|policy| &policy.typed_extension_config.typed_config);
    match policies.into_iter().next() {
        Some(config) if has_type(config, "OverrideHost") => {
            HostSelection::Override(parse_part(config, "a policy").unwrap_or_default())
        }
        Some(config) if has_type(config, "Subset") => HostSelection::Subset(config.clone()),
        _ => HostSelection::ClusterPolicy,
    }
}

/// Returns the headers that select a host, including headers sent by clients.
pub(super) fn selection_headers(selection: &HostSelection) -> Vec<String> {
    match selection {
        HostSelection::Override(policy) => policy
            .override_host_sources
            .iter()
            .filter_map(|source| source.header.clone())
            .collect(),
        HostSelection::OriginalDst(header) => vec![header.clone()],
        HostSelection::Subset(_) | HostSelection::ClusterPolicy => Vec::new(),
    }
}

/// Returns the findings about the host selection of all routed clusters.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = Vec::new();
    for (cluster, actives) in routed_clusters(site) {
        let at =
            || FindingBuilder::new("envoy.host_selection", format!("cluster {}", cluster.name));
        let found = match host_selection(cluster) {
            HostSelection::Override(policy) => check_override_host(site, cluster, &policy),
            HostSelection::Subset(config) => check_subset(site, at(), &config),
            HostSelection::OriginalDst(header) => vec![check_original_dst(site, at(), &header)],
            HostSelection::ClusterPolicy => {
                vec![check_cluster_policy(site, at(), cluster, &actives)]
            }
        };
        findings.extend(found);
    }
    findings.extend(check_route_cache(site));
    findings
}

/// Returns the clusters of all active routes, each with its routes.
pub(super) fn routed_clusters<'s, 'd>(
    site: &'s FilterSite<'d>,
) -> Vec<(&'d EnvoyCluster, Vec<&'s ActiveRoute<'d>>)> {
    let mut found: Vec<(&EnvoyCluster, Vec<&ActiveRoute<'_>>)> = Vec::new();
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

fn check_override_host(
    site: &FilterSite<'_>,
    cluster: &EnvoyCluster,
    policy: &OverrideHostPolicy,
) -> Vec<Finding> {
    let at = |check| FindingBuilder::new(check, format!("cluster {}", cluster.name));
    let from_metadata = policy.reads_metadata(&ours(ENDPOINT));
    let from_header = policy.reads_header(&site.expected.endpoint_headers);
    let listed = policy
        .override_host_sources
        .iter()
        .map(describe_source)
        .collect::<Vec<_>>()
        .join(", ");
    if !from_metadata && !from_header {
        let own = format!(
            "in the `override_host_sources` of cluster `{}` write `{}`",
            cluster.name,
            metadata_source_yaml(ENDPOINT)
        );
        let message = format!(
            "override_host reads {listed}, and warmroute writes {LB_NAMESPACE}: {ENDPOINT}: the chosen \
            worker is ignored"
        );
        let setting = EnvoySetting::EndpointOverride(cluster, own);
        return vec![site.report(
            at("envoy.override_host"),
            FindingLevel::Error,
            message,
            &setting,
        )];
    }
    let mut findings = Vec::new();
    let received = site.variants().iter().all(|filter| receives_lb(filter));
    if !received && !from_header {
        findings.push(site.report(
            site.listener_check("envoy.metadata"),
            FindingLevel::Error,
            format!(
                "the receiving_namespaces of the filter have no {LB_NAMESPACE}: Envoy drops the chosen \
            endpoint"
            ),
            &EnvoySetting::Filter(FilterField::receiving(LB_NAMESPACE)),
        ));
    } else {
        findings.push(at("envoy.override_host").ok(format!("override_host reads {listed}")));
    }
    findings.extend(check_served(site, at("envoy.served"), cluster, policy));
    findings
}

/// Checks that Envoy reports the endpoint that served the request.
fn check_served(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
    policy: &OverrideHostPolicy,
) -> Option<Finding> {
    let forwarded = site.variants().iter().all(|filter| {
        filter
            .metadata_options
            .forwarding_namespaces
            .contains(LB_NAMESPACE)
    });
    let noted = policy
        .selected_host_key
        .as_ref()
        .is_some_and(|key| *key == ours(SERVED_KEY));
    let message = "Envoy does not report the endpoint that served: after a retry the load is \
    counted at the wrong worker";
    let fix = match (noted, forwarded) {
        (true, true) => return Some(at.ok("Envoy reports the endpoint that served")),
        // Generated clusters have no such setting, but the attribute names the same endpoint.
        _ if site.plane != ControlPlane::Other && reports_upstream(site) => {
            return Some(at.ok(format!("{UPSTREAM_ADDRESS} names the endpoint that served")));
        }
        (false, _) => {
            let key = metadata_source_yaml(SERVED_KEY).replace("metadata: ", "selected_host_key: ");
            format!(
                "in cluster `{}` beside `override_host_sources` write `{}`",
                cluster.name,
                key.trim_start_matches("- ")
            )
        }
        (true, false) => {
            return Some(site.report(
                at,
                FindingLevel::Warning,
                message,
                &EnvoySetting::Filter(FilterField::forwarding(LB_NAMESPACE)),
            ));
        }
    };
    Some(at.warning(message, fix))
}

fn reports_upstream(site: &FilterSite<'_>) -> bool {
    site.variants().iter().all(|filter| {
        filter
            .response_attributes
            .iter()
            .any(|name| name == UPSTREAM_ADDRESS)
    })
}

pub(super) fn ours(key: &str) -> MetadataKey {
    MetadataKey {
        key: LB_NAMESPACE.to_owned(),
        path: vec![super::schema::MetadataPathSegment {
            key: key.to_owned(),
        }],
    }
}

pub(super) fn metadata_source_yaml(key: &str) -> String {
    format!("- metadata: {{key: {LB_NAMESPACE}, path: [{{key: {key}}}]}}")
}

fn describe_source(source: &OverrideHostSource) -> String {
    match (&source.metadata, &source.header) {
        (Some(key), _) => format!("the metadata {key}"),
        (None, Some(header)) => format!("the header {header}"),
        (None, None) => "nothing".to_owned(),
    }
}

/// Checks subsets by worker id. A host must match all metadata of the namespace, so Envoy must not
/// receive other metadata of warmroute in it.
fn check_subset(site: &FilterSite<'_>, at: FindingBuilder, config: &Value) -> Vec<Finding> {
    let selectors = config["subset_selectors"]
        .as_array()
        .map(Vec::as_slice)
        .unwrap_or_default();
    if selectors
        .iter()
        .any(|selector| selector["single_host_per_subset"] == true)
    {
        return vec![at.error(
            "single_host_per_subset: true ignores health, and drops the second host of an id",
            "remove `single_host_per_subset` from the `subset_selectors`",
        )];
    }
    let keys: Vec<Vec<&str>> = selectors.iter().map(selector_keys).collect();
    if !keys.contains(&vec!["worker_id"]) {
        let keys = keys
            .iter()
            .map(|keys| keys.join("+"))
            .collect::<Vec<_>>()
            .join(", ");
        return vec![at.error(
            format!("the subsets are by {keys}, but must be by worker_id"),
            "write `subset_selectors: [{keys: [worker_id]}]`",
        )];
    }
    let received = site.variants().iter().any(|filter| receives_lb(filter));
    vec![match (converts_worker_id(site), received) {
        (true, false) => at.ok("subsets by worker_id, from the header of warmroute"),
        (_, true) => at.error(
            format!(
                "{LB_NAMESPACE} is among the receiving_namespaces: the metadata then contain the endpoint \
                beside the id, and no host matches: 503"
            ),
            format!(
                "remove `{LB_NAMESPACE}` from the `receiving_namespaces` of the filter `{}`; \
                header_to_metadata sets the id",
                site.main.name
            ),
        ),
        (false, false) => at.error(
            "no header_to_metadata filter after the ext_proc filter converts the header of \
            warmroute to worker_id: 503",
            format!(
                "add the filter `envoy.filters.http.header_to_metadata` of envoy/subset.yaml \
                after `{}`",
                site.main.name
            ),
        ),
    }]
}

fn selector_keys(selector: &Value) -> Vec<&str> {
    let keys = selector["keys"].as_array();
    keys.into_iter()
        .flatten()
        .filter_map(Value::as_str)
        .collect()
}

/// Returns whether a filter after the main filter converts a header of warmroute to the worker id.
fn converts_worker_id(site: &FilterSite<'_>) -> bool {
    let later = site
        .listener
        .hcm
        .http_filters
        .iter()
        .skip(site.main.index + 1);
    later
        .filter(|filter| has_type(&filter.typed_config, "Config"))
        .filter_map(|filter| worker_id_header(&filter.typed_config))
        .any(|header| {
            let headers = &site.expected.headers;
            headers.iter().any(|set| set.eq_ignore_ascii_case(&header))
        })
}

/// Returns whether Envoy accepts metadata for its load balancers from a filter.
fn receives_lb(filter: &ExternalProcessor) -> bool {
    filter
        .metadata_options
        .receiving_namespaces
        .contains(LB_NAMESPACE)
}

/// Returns the header that a header_to_metadata filter converts to the worker id.
fn worker_id_header(config: &Value) -> Option<String> {
    let mut rules = config["request_rules"].as_array()?.iter();
    let rule = rules.find(|rule| {
        let put = &rule["on_header_present"];
        put["key"] == "worker_id"
            && matches!(put["metadata_namespace"].as_str(), Some(LB_NAMESPACE))
    })?;
    Some(rule["header"].as_str()?.to_ascii_lowercase())
}

fn check_original_dst(site: &FilterSite<'_>, at: FindingBuilder, header: &str) -> Finding {
    if site.expected.fallbacks > 0 {
        return at.error(
            format!(
                "gateway.fallback_endpoints: {}, and ORIGINAL_DST accepts one address in {header}: every \
                request gets 503",
                site.expected.fallbacks
            ),
            "write `gateway: {fallback_endpoints: 0}` in the configuration of warmroute",
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
        format!("the address comes from {header}, which warmroute does not set: 503"),
        format!(
            "write `http_header_name: {ENDPOINT}` in its `original_dst_lb_config`, or \
        `gateway: {{header_names: {{endpoint: [{header}]}}}}` in the configuration of warmroute"
        ),
    )
}

/// Checks a cluster without host selection. It is correct only if its routes match headers of
/// warmroute, or follow routes that do.
fn check_cluster_policy(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
    actives: &[&ActiveRoute<'_>],
) -> Finding {
    let behind_headers = actives.iter().all(|active| {
        is_matched_by_header(site, active)
            || site.active.iter().any(|other| {
                std::ptr::eq(active.host, other.host) && is_matched_by_header(site, other)
            })
    });
    if behind_headers {
        return at.ok("its routes match headers of warmroute");
    }
    let mut workers = site.expected.workers.iter().peekable();
    if workers.peek().is_some() && workers.all(|worker| !worker.via.is_direct()) {
        return at.ok("front ends send each request to the worker that the headers name");
    }
    let text = "write the `load_balancing_policy` of cluster `workers` in envoy/standalone.yaml \
    (override_host), or another host selection in envoy/README.md";
    let message = "its load balancer ignores the chosen worker";
    site.report(
        at,
        FindingLevel::Error,
        message,
        &EnvoySetting::EndpointOverride(cluster, text.to_owned()),
    )
}

fn is_matched_by_header(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> bool {
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

/// Checks that Envoy evaluates its routes again. Otherwise routes that match headers of warmroute
/// have no effect.
fn check_route_cache(site: &FilterSite<'_>) -> Option<Finding> {
    site.active
        .iter()
        .find(|active| is_matched_by_header(site, active))?;
    let at = site.listener_check("envoy.clear_route_cache");
    let kept = site.main.config.disable_clear_route_cache
        || site.main.config.route_cache_action == "RETAIN";
    Some(if !site.expected.clear_route_cache {
        at.error(
            "gateway.clear_route_cache: false, but routes match headers of warmroute: none is \
            ever selected",
            "write `gateway: {clear_route_cache: true}` in the configuration of warmroute",
        )
    } else if kept {
        at.error(
            "the filter retains the route cache: headers of warmroute are never matched",
            format!(
                "remove `disable_clear_route_cache` and `route_cache_action` from the filter \
            `{}`",
                site.main.name
            ),
        )
    } else {
        at.ok("Envoy evaluates its routes again with the headers of warmroute")
    })
}
