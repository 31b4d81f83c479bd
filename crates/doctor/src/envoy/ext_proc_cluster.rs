//! Checks of the clusters that the ext_proc filters call, including those in route overrides.

use std::time::Duration;

use warmroute_http2_filter::service_of_authority;
use warmroute_settings::DurationSetting;

use super::dump::{ConfigDump, EnvoyAddress};
use super::filter::is_full_duplex;
use super::fixes::EnvoySetting;
use super::schema::{BreakerThreshold, EnvoyCluster, EnvoyGrpc, GrpcService};
use super::site::FilterSite;
use super::transport::{check_server_name, check_tls};
use crate::finding::{Finding, FindingBuilder, FindingLevel};

/// Envoy's default circuit breaker threshold.
const DEFAULT_BREAKER_LIMIT: u64 = 1024;
/// Envoy's default HTTP/2 window of a stream, in bytes.
const DEFAULT_STREAM_WINDOW: u64 = 16 << 20;
/// Maximum recommended HTTP/2 window of a stream in full-duplex mode, in bytes.
const MAX_STREAM_WINDOW: u64 = 1 << 20;
/// Envoy's default connect timeout.
const DEFAULT_CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum recommended connect timeout. With a longer one, requests to a replica on an unreachable
/// machine are delayed.
const MAX_CONNECT_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the findings about the clusters of both filters.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut services: Vec<&GrpcService> = Vec::new();
    for service in site
        .variants()
        .into_iter()
        .filter_map(|filter| filter.grpc_service.as_ref())
    {
        if !services.contains(&service) {
            services.push(service);
        }
    }
    let mut findings: Vec<Finding> = services
        .iter()
        .filter_map(|service| check_address(site, service))
        .collect();
    let of_probe = site
        .probe
        .as_ref()
        .and_then(|probe| Some((probe.name.as_str(), probe.cluster()?)));
    let of_main = services
        .iter()
        .filter_map(|service| Some((site.main.name.as_str(), service.cluster()?)));
    let mut visited: Vec<&str> = Vec::new();
    for (filter, name) in of_main.chain(of_probe) {
        if visited.contains(&name) {
            continue;
        }
        visited.push(name);
        match site.dump.clusters.get(name) {
            Some(cluster) => findings.extend(check_cluster(site, cluster)),
            None => findings.push(missing_cluster(filter, name)),
        }
    }
    for service in services
        .iter()
        .filter_map(|service| service.envoy_grpc.as_ref())
    {
        let cluster = site.dump.clusters.get(&service.cluster_name);
        findings.extend(cluster.and_then(|cluster| check_server_name(site, cluster, service)));
        findings.extend(check_pool_authority(site, service));
    }
    findings
}

/// Checks the pool that the authority of a call selects.
fn check_pool_authority(site: &FilterSite<'_>, service: &EnvoyGrpc) -> Option<Finding> {
    let pools = &site.expected.authority_pools;
    if pools.is_empty() {
        return None;
    }
    let authority = service.sent_authority();
    let at = FindingBuilder::new(
        "envoy.pool_authority",
        format!("cluster {}", service.cluster_name),
    );
    let Some(pool) = pools.get(&service_of_authority(authority)) else {
        return Some(at.warning(
            format!(
                "its calls have the authority `{authority}`, which has no pool in \
                `routing.pool_routes.authorities`: their requests may be routed to \
                 workers of every pool"
            ),
            "write `routing: {pool_routes: {authorities: {<service>.<namespace>: <pool>}}}` in the configuration \
            of warmroute, with the Service of this \
             cluster",
        ));
    };
    Some(at.ok(format!(
        "its authority `{authority}` selects the pool `{pool}`"
    )))
}

fn missing_cluster(filter: &str, name: &str) -> Finding {
    FindingBuilder::new("envoy.ext_proc_cluster", format!("cluster {name}")).error(
        format!("the filter {filter} calls the cluster {name}, which is not configured in Envoy"),
        format!("add the cluster `{name}`, as cluster `ext_proc` in envoy/standalone.yaml"),
    )
}

fn check_address(site: &FilterSite<'_>, service: &GrpcService) -> Option<Finding> {
    if service
        .cluster()
        .is_some_and(|name| !site.dump.clusters.contains_key(name))
    {
        return None;
    }
    let addresses = service.addresses(site.dump);
    let at = site.filter_check("envoy.address", &site.main);
    let (listen, text) = site.expected.listen_text();
    let called = addresses
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if addresses
        .iter()
        .any(|address| site.expected.is_ours(address))
    {
        return Some(at.ok(format!("it calls {called}, where warmroute listens")));
    }
    let fix = match service.cluster() {
        Some(cluster) => format!("in the endpoints of cluster `{cluster}` write `{text}`"),
        None => format!(
            "in the `grpc_service` of the filter `{}` write the address {listen}",
            site.main.name
        ),
    };
    let ours = addresses.first().map(|address| match address {
        EnvoyAddress::Socket(host, port) => format!("address: '{host}:{port}'"),
        EnvoyAddress::Pipe(path) => format!("unix_socket: {path}"),
    });
    let ours = ours
        .map(|ours| {
            format!(", or in the configuration of warmroute `listeners: {{ext_proc: {{{ours}}}}}`")
        })
        .unwrap_or_default();
    let message = if addresses.is_empty() {
        format!("Envoy has no address of warmroute, which listens at {listen}")
    } else {
        format!("the filter calls {called}, and warmroute listens at {listen}")
    };
    let own = format!("{fix}{ours}");
    let cluster = service
        .cluster()
        .and_then(|name| site.dump.clusters.get(name));
    Some(match cluster {
        Some(cluster) => site.report(
            at,
            FindingLevel::Error,
            message,
            &EnvoySetting::PickerAddress(cluster, own),
        ),
        None => at.error(message, own),
    })
}

fn check_cluster(site: &FilterSite<'_>, cluster: &EnvoyCluster) -> Vec<Finding> {
    let subject = || format!("cluster {}", cluster.name);
    let mut findings = vec![check_http2(
        site,
        FindingBuilder::new("envoy.http2", subject()),
        cluster,
    )];
    findings.extend(check_tls(site, cluster));
    let traffic = ClusterTraffic::Exchanges(OverflowEffect::of_cluster(site, &cluster.name));
    findings.push(check_breakers(site, cluster, traffic));
    findings.push(check_keepalive(
        site,
        FindingBuilder::new("envoy.keepalive", subject()),
        cluster,
    ));
    findings.extend(check_stream_window(
        site,
        FindingBuilder::new("envoy.stream_window", subject()),
        cluster,
    ));
    findings.extend(check_connect_timeout(
        site,
        FindingBuilder::new("envoy.connect_timeout", subject()),
        cluster,
    ));
    findings.extend(check_single_address(
        site,
        FindingBuilder::new("envoy.dns", subject()),
        cluster,
    ));
    findings
}

fn check_http2(site: &FilterSite<'_>, at: FindingBuilder, cluster: &EnvoyCluster) -> Finding {
    if cluster.http2_options().is_some() {
        return at.ok("HTTP/2");
    }
    let own = format!(
        "in cluster `{}` write `typed_extension_protocol_options` as in cluster `ext_proc` of \
        envoy/standalone.yaml",
        cluster.name
    );
    let message = "it speaks HTTP/1, and gRPC is HTTP/2: every exchange fails";
    site.report(
        at,
        FindingLevel::Error,
        message,
        &EnvoySetting::PickerHttp2(cluster, own),
    )
}

fn check_keepalive(site: &FilterSite<'_>, at: FindingBuilder, cluster: &EnvoyCluster) -> Finding {
    let interval = cluster
        .http2_options()
        .and_then(|options| options["connection_keepalive"]["interval"].as_str());
    match interval {
        Some(interval) => at.ok(format!("connection_keepalive: {interval}")),
        None => site.report(
            at,
            FindingLevel::Warning,
            "no connection_keepalive: requests hang while warmroute is frozen; after the loss of \
            its node they hang until the connection times out",
            &EnvoySetting::PickerKeepalive(cluster),
        ),
    }
}

/// Checks the HTTP/2 window of streams in full-duplex mode. Envoy queues that much of each body on the
/// connection, before the messages of other requests.
fn check_stream_window(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
) -> Option<Finding> {
    let options = cluster.http2_options()?;
    if !site.callers_of(&cluster.name).any(is_full_duplex) {
        return None;
    }
    let window = &options["initial_stream_window_size"];
    let window = window.as_u64().unwrap_or(DEFAULT_STREAM_WINDOW);
    let message = format!("initial_stream_window_size: {window}");
    if window <= MAX_STREAM_WINDOW {
        return Some(at.ok(message));
    }
    Some(site.report(
        at,
        FindingLevel::Warning,
        format!("{message}; large uploads delay small requests by seconds"),
        &EnvoySetting::PickerWindow(cluster),
    ))
}

/// Checks the connect timeout of TCP connections. Unix sockets connect at once.
fn check_connect_timeout(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
) -> Option<Finding> {
    let addresses = site.dump.cluster_addresses(cluster).unwrap_or_default();
    if !addresses
        .iter()
        .any(|address| matches!(address, EnvoyAddress::Socket(..)))
    {
        return None;
    }
    let given = cluster
        .connect_timeout
        .map_or(DEFAULT_CONNECT_TIMEOUT, |given| given.0);
    let message = format!("connect_timeout: {}", DurationSetting(given));
    if given <= MAX_CONNECT_TIMEOUT {
        return Some(at.ok(message));
    }
    let message = format!(
        "{message}; a request waits this long for a replica of warmroute on an unreachable machine"
    );
    Some(site.report(
        at,
        FindingLevel::Warning,
        message,
        &EnvoySetting::PickerConnectTimeout(cluster),
    ))
}

/// Checks for a DNS name with a single address although replicas are configured. It is probably the
/// virtual IP of a Service, and HTTP/2 connections through it stay with one replica.
fn check_single_address(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
) -> Option<Finding> {
    let addresses = site.dump.cluster_addresses(cluster).unwrap_or_default();
    if !cluster.kind.ends_with("_DNS") || !site.expected.replicas {
        return None;
    }
    let fix = "write `clusterIP: None` in the Service of warmroute, so that its name resolves to \
    the address of every replica";
    match addresses.as_slice() {
        [one] if one.numeric().is_some() => Some(at.warning(
            format!(
                "its name resolves to {one} alone, and `replicas` is set: unless only one replica \
                runs, this is the address of a Service, \
                 and every connection stays with one replica"
            ),
            fix,
        )),
        [_] if cluster.kind == "LOGICAL_DNS" => Some(at.warning(
            "LOGICAL_DNS connects to one address, and `replicas` is set",
            "write \
            `type: STRICT_DNS`",
        )),
        _ => None,
    }
}

/// Treatment of a request whose ext_proc stream an open circuit breaker refuses. Envoy refuses it
/// before it sends a part of the body, so `failure_mode_allow` applies in every body mode.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OverflowEffect {
    /// Served without warmroute.
    Unrouted,
    /// Answered with status 500.
    Rejected,
}

impl OverflowEffect {
    /// Returns the effect for the requests of all filters that call a cluster.
    pub(super) fn of_cluster(site: &FilterSite<'_>, cluster: &str) -> Self {
        let rejects = site
            .callers_of(cluster)
            .any(|filter| !filter.failure_mode_allow);
        if rejects {
            Self::Rejected
        } else {
            Self::Unrouted
        }
    }
}

/// Kind of traffic that the circuit breakers of a cluster limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ClusterTraffic {
    /// One ext_proc stream per request in flight.
    Exchanges(OverflowEffect),
    /// Client requests.
    Requests,
    /// Mirrored requests. Envoy does not report when they end.
    Copies,
}

/// Returns a threshold of a cluster. A runtime key overrides the configuration.
fn breaker_limit(
    dump: &ConfigDump,
    cluster: &EnvoyCluster,
    name: &str,
    configured: Option<u64>,
) -> Option<u64> {
    dump.runtime
        .get(&format!("circuit_breakers.{}.default.{name}", cluster.name))
        .copied()
        .or(configured)
}

/// Checks the circuit breakers. With the defaults, requests are rejected long before the cluster is
/// overloaded.
pub(super) fn check_breakers(
    site: &FilterSite<'_>,
    cluster: &EnvoyCluster,
    traffic: ClusterTraffic,
) -> Finding {
    let at = FindingBuilder::new(
        "envoy.circuit_breakers",
        format!("cluster {}", cluster.name),
    );
    let all = breaker_limits(site.dump, cluster);
    let matters =
        |name: &str| !matches!(traffic, ClusterTraffic::Exchanges(_)) || name != "max_connections";
    let low: Vec<_> = all
        .into_iter()
        .filter(|(name, given)| {
            matters(name) && given.unwrap_or(DEFAULT_BREAKER_LIMIT) <= DEFAULT_BREAKER_LIMIT
        })
        .map(|(name, given)| match given {
            Some(given) => format!("{name}: {given}"),
            None => format!("{name}: {DEFAULT_BREAKER_LIMIT}, the default"),
        })
        .collect();
    if low.is_empty() {
        return at.ok(all
            .map(|(name, given)| format!("{name}: {}", given.unwrap_or(DEFAULT_BREAKER_LIMIT)))
            .join(", "));
    }
    let limits_requests = low.iter().any(|one| one.starts_with("max_requests"));
    let (level, effect) = low_limit_effect(traffic, limits_requests);
    let setting = match traffic {
        ClusterTraffic::Exchanges(_) => EnvoySetting::PickerLimits(cluster),
        ClusterTraffic::Copies | ClusterTraffic::Requests => EnvoySetting::WorkerLimits(cluster),
    };
    site.report(at, level, format!("{}; {effect}", low.join(", ")), &setting)
}

/// Returns the effective limits of the default priority; `None` for Envoy's default.
fn breaker_limits(dump: &ConfigDump, cluster: &EnvoyCluster) -> [(&'static str, Option<u64>); 3] {
    let is_default_priority =
        |threshold: &&BreakerThreshold| matches!(threshold.priority.as_str(), "" | "DEFAULT");
    let given = cluster
        .circuit_breakers
        .thresholds
        .iter()
        .find(is_default_priority)
        .cloned()
        .unwrap_or_default();
    let effective =
        |name: &'static str, configured| (name, breaker_limit(dump, cluster, name, configured));
    [
        effective("max_connections", given.max_connections),
        effective("max_pending_requests", given.max_pending_requests),
        effective("max_requests", given.max_requests),
    ]
}

/// Returns the effect of a low limit. `limits_requests` is true if the limit of requests is low.
fn low_limit_effect(
    traffic: ClusterTraffic,
    limits_requests: bool,
) -> (FindingLevel, &'static str) {
    use OverflowEffect::{Rejected, Unrouted};
    match traffic {
        ClusterTraffic::Exchanges(Rejected) if limits_requests => {
            (FindingLevel::Error, "further requests in flight get 500")
        }
        ClusterTraffic::Exchanges(Unrouted) if limits_requests => (
            FindingLevel::Error,
            "further requests in flight are served without warmroute, so they are not routed",
        ),
        ClusterTraffic::Exchanges(Rejected) => (
            FindingLevel::Warning,
            "in a burst, further requests get 500 until Envoy is connected",
        ),
        ClusterTraffic::Exchanges(Unrouted) => (
            FindingLevel::Warning,
            "in a burst, further requests are not routed until Envoy is connected",
        ),
        ClusterTraffic::Copies => (
            FindingLevel::Error,
            "Envoy drops further mirrored requests without an error",
        ),
        ClusterTraffic::Requests => (
            FindingLevel::Warning,
            "further requests get 503 although the workers have capacity",
        ),
    }
}
