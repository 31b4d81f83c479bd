//! The way from Envoy to us: the cluster that ext_proc filters ask.

use super::dump::{Address, is};
use super::parts::{Cluster, EnvoyGrpc, Threshold};
use super::site::{Filter, Site};
use crate::cmd::doctor::finding::{At, Finding};

/// What a cluster takes at a time where nothing is said.
const BREAKER: u64 = 1024;

/// Every check of the clusters of both filters.
pub(super) fn check(site: &Site<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = address(site).into_iter().collect();
    let mut seen: Vec<&str> = Vec::new();
    for filter in [Some(&site.main), site.probe.as_ref()].into_iter().flatten() {
        let Some(name) = filter.cluster().filter(|name| !seen.contains(name)) else { continue };
        seen.push(name);
        match site.dump.clusters.get(name) {
            Some(cluster) => findings.extend(cluster_checks(site, cluster)),
            None => findings.push(missing(filter, name)),
        }
    }
    findings.extend(server_names(site));
    findings
}

/// The clusters whose TLS handshakes warmroute refuses, those of the routes included.
fn server_names(site: &Site<'_>) -> Vec<Finding> {
    let mut findings = Vec::new();
    let mut seen: Vec<&str> = Vec::new();
    for filter in site.variants() {
        let Some(service) = filter.grpc_service.as_ref().and_then(|service| service.envoy_grpc.as_ref()) else {
            continue;
        };
        let Some(cluster) = site.dump.clusters.get(&service.cluster_name) else { continue };
        if !seen.contains(&service.cluster_name.as_str()) {
            seen.push(&service.cluster_name);
            findings.extend(server_name(cluster, service));
        }
    }
    findings
}

/// With `auto_sni` Envoy sends the `:authority` as server name, whatever `sni` says: the name of the cluster unless the filter sets one.
fn server_name(cluster: &Cluster, service: &EnvoyGrpc) -> Option<Finding> {
    cluster.transport_socket.as_ref().filter(|socket| is(&socket.typed_config, "UpstreamTlsContext"))?;
    let is_automatic = cluster.http().is_some_and(|http| http["upstream_http_protocol_options"]["auto_sni"] == true);
    let sent = if service.authority.is_empty() { &cluster.name } else { &service.authority };
    let host = sent.split(':').next().unwrap_or_default();
    if !is_automatic || rustls::pki_types::ServerName::try_from(host).is_ok() {
        return None;
    }
    Some(At::new("envoy.server_name", format!("cluster {}", cluster.name)).error(
        format!("it sends the server name (SNI) `{host}`, which is not a DNS name: warmroute refuses every handshake"),
        "with Istio, set `trafficPolicy.tls.sni` in the DestinationRule of warmroute's Service, as in \
         examples/kubernetes/gateway-api/istio.yaml; in Envoy's own configuration, replace \
         `auto_sni` by `sni` in the `UpstreamTlsContext`",
    ))
}

fn missing(filter: &Filter, name: &str) -> Finding {
    At::new("envoy.ext_proc_cluster", format!("cluster {name}")).error(
        format!("the filter {} asks the cluster {name}, which Envoy does not have", filter.name),
        format!("add the cluster `{name}`, as cluster `ext_proc` in envoy/standalone.yaml"),
    )
}

fn address(site: &Site<'_>) -> Option<Finding> {
    let asks = site.main.asks(site.dump);
    let known = site.main.cluster().is_none_or(|name| site.dump.clusters.contains_key(name));
    if !known {
        return None;
    }
    let at = site.at_filter("envoy.address", &site.main);
    let (words, text) = site.expected.listening();
    let told = asks.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    if asks.iter().any(|address| site.expected.is_ours(address)) {
        return Some(at.ok(format!("it asks {told}, where we listen")));
    }
    let mend = match site.main.cluster() {
        Some(cluster) => format!("in the endpoints of cluster `{cluster}` write `{text}`"),
        None => format!("in the `grpc_service` of the filter `{}` write the address {words}", site.main.name),
    };
    let ours = asks.first().map(|address| match address {
        Address::Socket(host, port) => format!("tcp: {host}:{port}"),
        Address::Pipe(path) => format!("unix: {path}"),
    });
    let other = ours.map(|ours| format!(", or in our configuration `listen: {{{ours}}}`")).unwrap_or_default();
    let told = if told.is_empty() { "nobody".to_owned() } else { told };
    Some(at.error(format!("it asks {told}, and we listen at {words}"), format!("{mend}{other}")))
}

fn cluster_checks(site: &Site<'_>, cluster: &Cluster) -> Vec<Finding> {
    let subject = || format!("cluster {}", cluster.name);
    let mut findings = vec![http2(At::new("envoy.http2", subject()), cluster)];
    findings.extend(tls(site, At::new("envoy.tls", subject()), cluster));
    findings.push(breakers(At::new("envoy.circuit_breakers", subject()), cluster, Held::Exchanges));
    findings.push(keepalive(At::new("envoy.keepalive", subject()), cluster));
    findings
}

fn http2(at: At, cluster: &Cluster) -> Finding {
    match cluster.http2() {
        Some(_) => at.ok("HTTP/2"),
        None => at.error(
            "it speaks HTTP/1, and gRPC is HTTP/2: every exchange fails",
            format!(
                "in cluster `{}` write `typed_extension_protocol_options` as in cluster `ext_proc` of envoy/standalone.yaml",
                cluster.name
            ),
        ),
    }
}

fn tls(site: &Site<'_>, at: At, cluster: &Cluster) -> Option<Finding> {
    let addresses = site.dump.endpoints_of(cluster)?;
    // Of several kinds of transport only one says whether there is TLS, by its name.
    let encrypts = cluster.transport_socket.as_ref().is_some_and(|socket| socket.name.ends_with("tls"));
    let by_tcp = addresses.iter().any(|address| matches!(address, Address::Socket(..)));
    let wanted = by_tcp && site.expected.tls;
    match (encrypts, wanted) {
        (true, true) => Some(at.ok("TLS on both sides")),
        (false, false) => None,
        (false, true) => Some(at.error(
            "it is in plaintext, and listen.tls is set",
            format!(
                "in cluster `{}` write a `transport_socket` as in envoy/README.md, \"warmroute on another machine\"",
                cluster.name
            ),
        )),
        (true, false) => Some(at.error(
            "it is encrypted, and we listen in plaintext there",
            "write `tls: {self_signed: true}`, or a certificate, under `listen` in our configuration, or take the \
             `transport_socket` out of the cluster",
        )),
    }
}

fn keepalive(at: At, cluster: &Cluster) -> Finding {
    let interval = cluster.http2().and_then(|options| options["connection_keepalive"]["interval"].as_str());
    match interval {
        Some(interval) => at.ok(format!("connection_keepalive: {interval}")),
        None => at.warning(
            "no connection_keepalive: the requests of a frozen warmroute, or of a dead machine, are never freed",
            format!(
                "in the `http2_protocol_options` of cluster `{}` write `connection_keepalive: {{interval: 2s, timeout: 2s}}`",
                cluster.name
            ),
        ),
    }
}

/// What a cluster holds at a time, and so what its breakers cut.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Held {
    /// A stream to us for every request in flight.
    Exchanges,
    /// The requests themselves.
    Requests,
    /// Copies of them, of whose end nobody hears.
    Copies,
}

/// Breakers at their default answer long before anybody has too much to do.
pub(super) fn breakers(at: At, cluster: &Cluster, held: Held) -> Finding {
    let normal = |threshold: &&Threshold| matches!(threshold.priority.as_str(), "" | "DEFAULT");
    let given = cluster.circuit_breakers.thresholds.iter().find(normal).cloned().unwrap_or_default();
    let all = [
        ("max_connections", given.max_connections, held != Held::Exchanges),
        ("max_pending_requests", given.max_pending_requests, true),
        ("max_requests", given.max_requests, true),
    ];
    let low: Vec<_> = all
        .into_iter()
        .filter(|(_, given, matters)| *matters && given.unwrap_or(BREAKER) <= BREAKER)
        .map(|(name, given, _)| match given {
            Some(given) => format!("{name}: {given}"),
            None => format!("{name}: {BREAKER}, the default"),
        })
        .collect();
    if low.is_empty() {
        return at.ok(all.map(|(name, given, _)| format!("{name}: {}", given.unwrap_or(BREAKER))).join(", "));
    }
    let mend = format!(
        "in cluster `{}` write `circuit_breakers: {{thresholds: [{{max_connections: 100000, max_pending_requests: 100000, \
         max_requests: 100000}}]}}`",
        cluster.name
    );
    let seen = low.join(", ");
    match held {
        Held::Exchanges => at.error(format!("{seen}; every request in flight beyond that is a 500"), mend),
        Held::Copies => at.error(format!("{seen}; copies beyond that are not made, and nobody hears of it"), mend),
        Held::Requests => at.warning(format!("{seen}; requests beyond that are a 503 while workers have room"), mend),
    }
}
