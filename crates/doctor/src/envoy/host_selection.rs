//! Checks of Envoy's host selection. The host is selected by a load balancer that reads warmroute's
//! metadata or header, by an address in a header, or by routes that match headers. Each method has
//! its own requirements. A cluster without any of them ignores the chosen worker, which is correct
//! only for front ends that read the worker's id from the headers.

use warmroute_core::envoy_names::{ENDPOINT, LB_NAMESPACE, SERVED_KEY};

use super::cluster::{HostSelection, OverridePolicy, metadata_source_yaml};
use super::config_node::{ConfigNode, has_header, list};
use super::control_plane::ControlPlane;
use super::fixes::settings;
use super::site::{ActiveRoute, ClusterFacts, FilterSite};
use crate::finding::{CheckVerdict, Finding, FindingLevel, error, ok, row, run_checks, warning};
use FindingLevel::{Error, Warning};

/// Attribute with the endpoint that served the request.
const UPSTREAM_ADDRESS: &str = "upstream.address";

/// Returns the findings about the host selection of all routed clusters.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let rows = [
        row("envoy.override_host", check_override_host),
        row("envoy.host_selection", check_selection),
        row("envoy.served", check_served),
    ];
    let clusters = site.routed_clusters();
    let mut findings: Vec<Finding> = Vec::new();
    for cluster in &clusters {
        findings.extend(run_checks(cluster, &rows));
    }
    let site_rows = [
        row("envoy.metadata", check_metadata),
        row("envoy.clear_route_cache", check_route_cache),
    ];
    findings.extend(run_checks(site, &site_rows));
    findings
}

/// Returns whether the policy reads a header of warmroute.
fn reads_our_header(site: &FilterSite<'_>, policy: OverridePolicy<'_>) -> bool {
    policy.reads_header(&site.expected.endpoint_headers)
}

/// Returns whether Envoy drops the endpoint in the metadata that the policy reads.
fn loses_metadata(site: &FilterSite<'_>, policy: OverridePolicy<'_>) -> bool {
    let mut variants = site.variants().into_iter();
    policy.reads_metadata(ENDPOINT)
        && !reads_our_header(site, policy)
        && !variants.all(|filter| filter.receives(LB_NAMESPACE))
}

fn check_override_host(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let policy = at.cluster.override_policy()?;
    let sources = list(policy.describe_sources());
    if policy.reads_metadata(ENDPOINT) || reads_our_header(at.site, policy) {
        let is_read = !loses_metadata(at.site, policy);
        return is_read.then(|| ok(format!("override_host reads {sources}")));
    }
    let own = format!(
        "in the `override_host_sources` of cluster `{}` write `{}`",
        at.cluster.name(),
        metadata_source_yaml(ENDPOINT)
    );
    let message = format!(
        "override_host reads {sources}, and warmroute writes {LB_NAMESPACE}: {ENDPOINT}: \
        the chosen worker is ignored"
    );
    let setting = settings::ENDPOINT_OVERRIDE.of(at.cluster).with("own", own);
    Some(at.site.report(Error, message, setting))
}

/// Checks that Envoy accepts the metadata by which a cluster selects the host.
fn check_metadata(site: &FilterSite<'_>) -> Option<CheckVerdict> {
    let clusters = site.routed_clusters();
    let mut policies = clusters
        .iter()
        .filter_map(|routed| routed.cluster.override_policy());
    policies.find(|policy| loses_metadata(site, *policy))?;
    let message = format!(
        "the receiving_namespaces of the filter have no {LB_NAMESPACE}: \
        Envoy drops the chosen endpoint"
    );
    let setting = settings::RECEIVED_NAMESPACE.with("namespace", LB_NAMESPACE);
    Some(site.report(Error, message, setting))
}

/// Checks that Envoy reports the endpoint that served the request.
fn check_served(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let policy = at.cluster.override_policy()?;
    if !policy.reads_metadata(ENDPOINT) && !reads_our_header(at.site, policy) {
        return None;
    }
    let variants = at.site.variants();
    let is_forwarded = variants.iter().all(|filter| filter.forwards(LB_NAMESPACE));
    let is_noted = policy.writes_metadata(SERVED_KEY);
    if is_noted && is_forwarded {
        return Some(ok("Envoy reports the endpoint that served"));
    }
    // Generated clusters have no such setting, but the attribute names the same endpoint.
    let has_attribute = |attribute| {
        let mut nodes = variants.iter().map(|filter| filter.node());
        nodes.all(|filter| filter.contains("response_attributes", attribute))
    };
    if at.site.plane != ControlPlane::Other && has_attribute(UPSTREAM_ADDRESS) {
        return Some(ok(format!(
            "{UPSTREAM_ADDRESS} names the endpoint that served"
        )));
    }
    let message = "Envoy does not report the endpoint that served: \
        after a retry the load is counted at the wrong worker";
    if is_noted {
        let setting = settings::FORWARDED_NAMESPACE.with("namespace", LB_NAMESPACE);
        return Some(at.site.report(Warning, message, setting));
    }
    let key = metadata_source_yaml(SERVED_KEY).replace("- metadata: ", "selected_host_key: ");
    let name = at.cluster.name();
    Some(warning(
        message,
        format!("in cluster `{name}` beside `override_host_sources` write `{key}`"),
    ))
}

fn check_selection(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    match at.cluster.host_selection() {
        HostSelection::Override(_) => None,
        HostSelection::Subset(config) => Some(judge_subset(at.site, config)),
        HostSelection::OriginalDst(header) => Some(judge_original_dst(at.site, &header)),
        HostSelection::ClusterPolicy => Some(judge_cluster_policy(at)),
    }
}

/// Judges subsets by worker id. A host must match all metadata of the namespace, so Envoy must not
/// receive other metadata of warmroute in it.
fn judge_subset(site: &FilterSite<'_>, config: ConfigNode<'_>) -> CheckVerdict {
    let selectors = || config.items("subset_selectors");
    if selectors().any(|selector| selector.flag("single_host_per_subset")) {
        return error(
            "single_host_per_subset: true ignores health, and drops the second host of an id",
            "remove `single_host_per_subset` from the `subset_selectors`",
        );
    }
    let keys = |selector: ConfigNode<'_>| selector.texts("keys").collect::<Vec<_>>().join("+");
    if !selectors().any(|selector| keys(selector) == "worker_id") {
        let keys = list(selectors().map(keys));
        return error(
            format!("the subsets are by {keys}, but must be by worker_id"),
            "write `subset_selectors: [{keys: [worker_id]}]`",
        );
    }
    let main = &site.main.name;
    let mut variants = site.variants().into_iter();
    if variants.any(|filter| filter.receives(LB_NAMESPACE)) {
        return error(
            format!(
                "{LB_NAMESPACE} is among the receiving_namespaces: the metadata then contain the \
                endpoint beside the id, and no host matches: 503"
            ),
            format!(
                "remove `{LB_NAMESPACE}` from the `receiving_namespaces` of the filter `{main}`; \
                header_to_metadata sets the id"
            ),
        );
    }
    if converts_worker_id(site) {
        return ok("subsets by worker_id, from the header of warmroute");
    }
    error(
        "no header_to_metadata filter after the ext_proc filter converts the header of warmroute \
        to worker_id: 503",
        format!(
            "add the filter `envoy.filters.http.header_to_metadata` of envoy/subset.yaml \
            after `{main}`"
        ),
    )
}

/// Returns whether a filter after the main filter converts a header of warmroute to the worker id.
fn converts_worker_id(site: &FilterSite<'_>) -> bool {
    let later = site.listener.filters().skip(site.main.index + 1);
    let mut configs = later.map(|filter| filter.at("typed_config"));
    configs.any(|config| {
        let rule = config.items("request_rules").find(|rule| {
            rule.text("on_header_present.key") == "worker_id"
                && rule.text("on_header_present.metadata_namespace") == LB_NAMESPACE
        });
        config.has_type("Config")
            && rule.is_some_and(|rule| has_header(&site.expected.headers, rule.text("header")))
    })
}

fn judge_original_dst(site: &FilterSite<'_>, header: &str) -> CheckVerdict {
    let fallbacks = site.expected.fallbacks;
    if fallbacks > 0 {
        return error(
            format!(
                "gateway.fallback_endpoints: {fallbacks}, \
                and ORIGINAL_DST accepts one address in {header}: every request gets 503"
            ),
            "write `gateway: {fallback_endpoints: 0}` in the configuration of warmroute",
        );
    }
    if has_header(&site.expected.endpoint_headers, header) {
        return ok(format!("the address comes from {header}"));
    }
    error(
        format!("the address comes from {header}, which warmroute does not set: 503"),
        format!(
            "write `http_header_name: {ENDPOINT}` in its `original_dst_lb_config`, or \
            `gateway: {{header_names: {{endpoint: [{header}]}}}}` in the configuration of warmroute"
        ),
    )
}

/// Judges a cluster without host selection. It is correct only if its routes match headers of
/// warmroute, or follow routes that do.
fn judge_cluster_policy(at: &ClusterFacts<'_, '_>) -> CheckVerdict {
    let site = at.site;
    let is_behind_headers = |active: &&ActiveRoute<'_>| {
        let same_host = |other: &&ActiveRoute<'_>| std::ptr::eq(active.host.0, other.host.0);
        let mut others = site.active.iter().filter(same_host);
        others.any(|other| is_matched_by_header(site, other))
    };
    if at.actives.iter().all(is_behind_headers) {
        return ok("its routes match headers of warmroute");
    }
    let workers = &site.expected.workers;
    if !workers.is_empty() && workers.iter().all(|worker| !worker.via.is_direct()) {
        return ok("front ends send each request to the worker that the headers name");
    }
    let own = "write the `load_balancing_policy` of cluster `workers` \
        in envoy/standalone.yaml (override_host), or another host selection in envoy/README.md";
    let message = "its load balancer ignores the chosen worker";
    let setting = settings::ENDPOINT_OVERRIDE.of(at.cluster).with("own", own);
    site.report(Error, message, setting)
}

fn is_matched_by_header(site: &FilterSite<'_>, active: &ActiveRoute<'_>) -> bool {
    let mut headers = active.matched_headers();
    headers.any(|header| has_header(&site.expected.headers, header))
}

/// Checks that Envoy evaluates its routes again. Otherwise routes that match headers of warmroute
/// have no effect.
fn check_route_cache(site: &FilterSite<'_>) -> Option<CheckVerdict> {
    let mut active = site.active.iter();
    active.find(|active| is_matched_by_header(site, active))?;
    let config = site.main.config.node();
    let is_retained =
        config.flag("disable_clear_route_cache") || config.text("route_cache_action") == "RETAIN";
    Some(if !site.expected.clear_route_cache {
        error(
            "gateway.clear_route_cache: false, but routes match headers of warmroute: \
            none is ever selected",
            "write `gateway: {clear_route_cache: true}` in the configuration of warmroute",
        )
    } else if is_retained {
        error(
            "the filter retains the route cache: headers of warmroute are never matched",
            format!(
                "remove `disable_clear_route_cache` and `route_cache_action` from the filter `{}`",
                site.main.name
            ),
        )
    } else {
        ok("Envoy evaluates its routes again with the headers of warmroute")
    })
}
