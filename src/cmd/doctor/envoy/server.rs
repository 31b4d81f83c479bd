//! Checks of the clusters that ext_proc filters call, including those in route overrides.

use std::time::Duration;

use super::dump::{Address, Dump};
use super::parts::{Cluster, EnvoyGrpc, Grpc, Threshold};
use super::remedy::EnvoySetting;
use super::site::Site;
use super::transport::{server_name, tls};
use crate::cmd::doctor::finding::{At, Finding, Level};
use crate::settings::Period;

/// What a cluster takes at a time where nothing is said.
const BREAKER: u64 = 1024;
/// Envoy's default time to connect.
const CONNECT: Duration = Duration::from_secs(5);
/// A longer time to connect holds requests for a replica whose machine is gone.
const LONGEST_CONNECT: Duration = Duration::from_secs(2);

/// Every check of the clusters of both filters.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let mut services: Vec<&Grpc> = Vec::new();
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
        .filter_map(|service| address(site, service))
        .collect();
    let of_probe = site
        .probe
        .as_ref()
        .and_then(|probe| Some((probe.name.as_str(), probe.cluster()?)));
    let of_main = services
        .iter()
        .filter_map(|service| Some((site.main.name.as_str(), service.cluster()?)));
    let mut seen: Vec<&str> = Vec::new();
    for (filter, name) in of_main.chain(of_probe) {
        if seen.contains(&name) {
            continue;
        }
        seen.push(name);
        match site.dump.clusters.get(name) {
            Some(cluster) => findings.extend(cluster_checks(site, cluster)),
            None => findings.push(missing(filter, name)),
        }
    }
    for service in services
        .iter()
        .filter_map(|service| service.envoy_grpc.as_ref())
    {
        let cluster = site.dump.clusters.get(&service.cluster_name);
        findings.extend(cluster.and_then(|cluster| server_name(site, cluster, service)));
        findings.extend(pool_authority(site, service));
    }
    findings
}

/// The pool that the authority of a call selects.
fn pool_authority(site: &Site<'_>, service: &EnvoyGrpc) -> Option<Finding> {
    let authorities = &site.expected.pool_authorities;
    if authorities.is_empty() {
        return None;
    }
    let authority = service.sent_authority();
    let at = At::new(
        "envoy.pool_authority",
        format!("cluster {}", service.cluster_name),
    );
    let Some(pool) = authorities.pool_of(authority) else {
        return Some(at.warning(
            format!(
                "its calls have the authority `{authority}`, which has no pool in `confine.authority`: their requests may be routed to \
                 workers of every pool"
            ),
            "write `confine: {authority: {<service>.<namespace>: <pool>}}` in the configuration of warmroute, with the Service of this \
             cluster",
        ));
    };
    Some(at.ok(format!(
        "its authority `{authority}` selects the pool `{pool}`"
    )))
}

fn missing(filter: &str, name: &str) -> Finding {
    At::new("envoy.ext_proc_cluster", format!("cluster {name}")).error(
        format!("the filter {filter} calls the cluster {name}, which is not configured in Envoy"),
        format!("add the cluster `{name}`, as cluster `ext_proc` in envoy/standalone.yaml"),
    )
}

fn address(site: &Site<'_>, service: &Grpc) -> Option<Finding> {
    if service
        .cluster()
        .is_some_and(|name| !site.dump.clusters.contains_key(name))
    {
        return None;
    }
    let asks = service.addresses(site.dump);
    let at = site.at_filter("envoy.address", &site.main);
    let (words, text) = site.expected.listening();
    let told = asks
        .iter()
        .map(ToString::to_string)
        .collect::<Vec<_>>()
        .join(", ");
    if asks.iter().any(|address| site.expected.is_ours(address)) {
        return Some(at.ok(format!("it calls {told}, where warmroute listens")));
    }
    let mend = match service.cluster() {
        Some(cluster) => format!("in the endpoints of cluster `{cluster}` write `{text}`"),
        None => format!(
            "in the `grpc_service` of the filter `{}` write the address {words}",
            site.main.name
        ),
    };
    let ours = asks.first().map(|address| match address {
        Address::Socket(host, port) => format!("tcp: {host}:{port}"),
        Address::Pipe(path) => format!("unix: {path}"),
    });
    let ours = ours
        .map(|ours| format!(", or in our configuration `listen: {{{ours}}}`"))
        .unwrap_or_default();
    let seen = if asks.is_empty() {
        format!("Envoy has no address of warmroute, which listens at {words}")
    } else {
        format!("the filter calls {told}, and warmroute listens at {words}")
    };
    let own = format!("{mend}{ours}");
    let cluster = service
        .cluster()
        .and_then(|name| site.dump.clusters.get(name));
    Some(match cluster {
        Some(cluster) => site.report(
            at,
            Level::Error,
            seen,
            &EnvoySetting::PickerAddress(cluster, own),
        ),
        None => at.error(seen, own),
    })
}

fn cluster_checks(site: &Site<'_>, cluster: &Cluster) -> Vec<Finding> {
    let subject = || format!("cluster {}", cluster.name);
    let mut findings = vec![http2(site, At::new("envoy.http2", subject()), cluster)];
    findings.extend(tls(site, cluster));
    findings.push(breakers(site, cluster, Held::Exchanges));
    findings.push(keepalive(
        site,
        At::new("envoy.keepalive", subject()),
        cluster,
    ));
    findings.extend(connect_timeout(
        site,
        At::new("envoy.connect_timeout", subject()),
        cluster,
    ));
    findings.extend(single_address(
        site,
        At::new("envoy.dns", subject()),
        cluster,
    ));
    findings
}

fn http2(site: &Site<'_>, at: At, cluster: &Cluster) -> Finding {
    if cluster.http2().is_some() {
        return at.ok("HTTP/2");
    }
    let own = format!(
        "in cluster `{}` write `typed_extension_protocol_options` as in cluster `ext_proc` of envoy/standalone.yaml",
        cluster.name
    );
    let seen = "it speaks HTTP/1, and gRPC is HTTP/2: every exchange fails";
    site.report(
        at,
        Level::Error,
        seen,
        &EnvoySetting::PickerHttp2(cluster, own),
    )
}

fn keepalive(site: &Site<'_>, at: At, cluster: &Cluster) -> Finding {
    let interval = cluster
        .http2()
        .and_then(|options| options["connection_keepalive"]["interval"].as_str());
    match interval {
        Some(interval) => at.ok(format!("connection_keepalive: {interval}")),
        None => site.report(
            at,
            Level::Warning,
            "no connection_keepalive: requests hang while warmroute is frozen; after the loss of its node they hang until the connection times out",
            &EnvoySetting::PickerKeepalive(cluster),
        ),
    }
}

/// Only TCP connections take time to connect.
fn connect_timeout(site: &Site<'_>, at: At, cluster: &Cluster) -> Option<Finding> {
    let addresses = site.dump.endpoints_of(cluster).unwrap_or_default();
    if !addresses
        .iter()
        .any(|address| matches!(address, Address::Socket(..)))
    {
        return None;
    }
    let given = cluster.connect_timeout.map_or(CONNECT, |given| given.0);
    let seen = format!("connect_timeout: {}", Period(given));
    if given <= LONGEST_CONNECT {
        return Some(at.ok(seen));
    }
    let seen = format!(
        "{seen}; a request waits this long for a replica of warmroute whose machine is gone"
    );
    Some(site.report(
        at,
        Level::Warning,
        seen,
        &EnvoySetting::PickerConnectTimeout(cluster),
    ))
}

/// A DNS name with one address, although replicas are configured, is probably the virtual address of a Service: behind it HTTP/2
/// connections stay with one replica.
fn single_address(site: &Site<'_>, at: At, cluster: &Cluster) -> Option<Finding> {
    let addresses = site.dump.endpoints_of(cluster).unwrap_or_default();
    if !cluster.kind.ends_with("_DNS") || !site.expected.replicas {
        return None;
    }
    let fix = "write `clusterIP: None` in the Service of warmroute, so that its name resolves to the address of every replica";
    match addresses.as_slice() {
        [one] if one.numeric().is_some() => Some(at.warning(
            format!(
                "its name resolves to {one} alone, and `replicas` is set: unless only one replica runs, this is the address of a Service, \
                 and every connection stays with one replica"
            ),
            fix,
        )),
        [_] if cluster.kind == "LOGICAL_DNS" => {
            Some(at.warning("LOGICAL_DNS connects to one address, and `replicas` is set", "write `type: STRICT_DNS`"))
        }
        _ => None,
    }
}

/// What a cluster holds at a time, and so what its breakers cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// A stream to us for every request in flight.
    Exchanges,
    /// The requests themselves.
    Requests,
    /// Copies of requests. Envoy does not report their end.
    Copies,
}

/// The limit of a cluster, from the runtime if a key of it is set.
fn limit(dump: &Dump, cluster: &Cluster, name: &str, configured: Option<u64>) -> Option<u64> {
    dump.runtime
        .get(&format!("circuit_breakers.{}.default.{name}", cluster.name))
        .copied()
        .or(configured)
}

/// Breakers at their default answer long before anybody has too much to do.
pub(super) fn breakers(site: &Site<'_>, cluster: &Cluster, held: Held) -> Finding {
    let at = At::new(
        "envoy.circuit_breakers",
        format!("cluster {}", cluster.name),
    );
    let normal = |threshold: &&Threshold| matches!(threshold.priority.as_str(), "" | "DEFAULT");
    let given = cluster
        .circuit_breakers
        .thresholds
        .iter()
        .find(normal)
        .cloned()
        .unwrap_or_default();
    let effective =
        |name: &'static str, configured| (name, limit(site.dump, cluster, name, configured));
    let all = [
        effective("max_connections", given.max_connections),
        effective("max_pending_requests", given.max_pending_requests),
        effective("max_requests", given.max_requests),
    ];
    let matters = |name: &str| held != Held::Exchanges || name != "max_connections";
    let low: Vec<_> = all
        .into_iter()
        .filter(|(name, given)| matters(name) && given.unwrap_or(BREAKER) <= BREAKER)
        .map(|(name, given)| match given {
            Some(given) => format!("{name}: {given}"),
            None => format!("{name}: {BREAKER}, the default"),
        })
        .collect();
    if low.is_empty() {
        return at.ok(all
            .map(|(name, given)| format!("{name}: {}", given.unwrap_or(BREAKER)))
            .join(", "));
    }
    let seen = low.join(", ");
    match held {
        Held::Exchanges if low.iter().any(|one| one.starts_with("max_requests")) => {
            let seen = format!("{seen}; further requests in flight get 500");
            site.report(at, Level::Error, seen, &EnvoySetting::PickerLimits(cluster))
        }
        Held::Exchanges => {
            let seen =
                format!("{seen}; in a burst, further requests get 500 until Envoy is connected");
            site.report(
                at,
                Level::Warning,
                seen,
                &EnvoySetting::PickerLimits(cluster),
            )
        }
        Held::Copies => {
            let seen = format!("{seen}; Envoy drops further copies without an error");
            site.report(at, Level::Error, seen, &EnvoySetting::WorkerLimits(cluster))
        }
        Held::Requests => {
            let seen =
                format!("{seen}; further requests get 503 although the workers have capacity");
            site.report(
                at,
                Level::Warning,
                seen,
                &EnvoySetting::WorkerLimits(cluster),
            )
        }
    }
}
