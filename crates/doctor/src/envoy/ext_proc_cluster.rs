//! Checks of the clusters that the ext_proc filters call, including those in route overrides.

use std::time::Duration;

use serde_json::Value;
use warmroute_http2_filter::service_of_authority;
use warmroute_settings::DurationSetting;

use super::cluster::EnvoyCluster;
use super::config_node::{ConfigNode, list};
use super::dump::EnvoyAddress;
use super::ext_proc_filter::{FilterConfig, service_addresses, service_cluster};
use super::fixes::settings;
use super::site::{ClusterFacts, FilterSite};
use crate::finding::{
    CheckFacts, CheckVerdict, Finding, FindingLevel, error, ok, row, run_checks, warning,
};
use FindingLevel::{Error, Warning};

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

/// A gRPC server that the main filter calls.
struct ServiceFacts<'s, 'd> {
    site: &'s FilterSite<'d>,
    service: ConfigNode<'s>,
}

impl CheckFacts for ServiceFacts<'_, '_> {
    fn subject(&self) -> String {
        format!(
            "cluster {}",
            service_cluster(self.service).unwrap_or_default()
        )
    }
}

impl<'d> ServiceFacts<'_, 'd> {
    fn cluster(&self) -> Option<EnvoyCluster<'d>> {
        self.site.dump.cluster(service_cluster(self.service)?)
    }

    /// Returns the `:authority` of its calls. Without a configured authority, Envoy sends the
    /// cluster name.
    fn authority(&self) -> Option<&str> {
        let grpc = self.service.at("envoy_grpc").present()?;
        Some(match grpc.text("authority") {
            "" => grpc.text("cluster_name"),
            authority => authority,
        })
    }
}

/// Returns the findings about the clusters of both filters.
pub(super) fn check(site: &FilterSite<'_>) -> Vec<Finding> {
    let mut services: Vec<ConfigNode<'_>> = Vec::new();
    for service in site
        .variants()
        .into_iter()
        .filter_map(FilterConfig::service)
    {
        if !services.contains(&service) {
            services.push(service);
        }
    }
    let servers = services
        .iter()
        .map(|&service| ServiceFacts { site, service });
    let servers: Vec<ServiceFacts<'_, '_>> = servers.collect();
    let mut findings: Vec<Finding> = servers.iter().filter_map(check_address).collect();
    let of_probe = site.probe.iter();
    let of_probe = of_probe.filter_map(|probe| Some((&probe.name, probe.config.cluster()?)));
    let of_main = services
        .iter()
        .filter_map(|service| Some((&site.main.name, service_cluster(*service)?)));
    let mut visited: Vec<&str> = Vec::new();
    for (filter, name) in of_main.chain(of_probe) {
        if !visited.contains(&name) {
            visited.push(name);
            findings.extend(check_cluster(site, filter, name));
        }
    }
    let rows = [
        row("envoy.server_name", check_server_name),
        row("envoy.pool_authority", check_pool_authority),
    ];
    findings.extend(servers.iter().flat_map(|server| run_checks(server, &rows)));
    findings
}

fn check_cluster(site: &FilterSite<'_>, filter: &str, name: &str) -> Vec<Finding> {
    let Some(cluster) = site.dump.cluster(name) else {
        let missing = error(
            format!(
                "the filter {filter} calls the cluster {name}, which is not configured in Envoy"
            ),
            format!("add the cluster `{name}`, as cluster `ext_proc` in envoy/standalone.yaml"),
        );
        return vec![missing.about("envoy.ext_proc_cluster", format!("cluster {name}"))];
    };
    let rows = [
        row("envoy.http2", check_http2),
        row("envoy.tls", check_tls),
        row("envoy.circuit_breakers", check_exchange_limits),
        row("envoy.keepalive", check_keepalive),
        row("envoy.stream_window", check_stream_window),
        row("envoy.connect_timeout", check_connect_timeout),
        row("envoy.dns", check_single_address),
    ];
    run_checks(&ClusterFacts::new(site, cluster), &rows)
}

/// Checks the pool that the authority of a call selects.
fn check_pool_authority(at: &ServiceFacts<'_, '_>) -> Option<CheckVerdict> {
    let pools = Some(&at.site.expected.authority_pools).filter(|pools| !pools.is_empty())?;
    let authority = at.authority()?;
    Some(match pools.get(&service_of_authority(authority)) {
        Some(pool) => ok(format!(
            "its authority `{authority}` selects the pool `{pool}`"
        )),
        None => warning(
            format!(
                "its calls have the authority `{authority}`, \
                which has no pool in `routing.pool_routes.authorities`: \
                their requests may be routed to workers of every pool"
            ),
            "write `routing: {pool_routes: {authorities: {<service>.<namespace>: <pool>}}}` in the \
            configuration of warmroute, with the Service of this cluster",
        ),
    })
}

fn check_address(at: &ServiceFacts<'_, '_>) -> Option<Finding> {
    let site = at.site;
    let name = service_cluster(at.service);
    let cluster = at.cluster();
    if name.is_some() && cluster.is_none() {
        return None;
    }
    let addresses = service_addresses(at.service, site.dump);
    let called = list(&addresses);
    let (listen, text) = site.expected.listen_text();
    let subject = format!("{}, filter {}", site.subject(), site.main.name);
    let about = |verdict: CheckVerdict| Some(verdict.about("envoy.address", subject));
    if addresses
        .iter()
        .any(|address| site.expected.is_ours(address))
    {
        return about(ok(format!("it calls {called}, where warmroute listens")));
    }
    let ours = match addresses.first() {
        Some(EnvoyAddress::Socket(host, port)) => format!("address: '{host}:{port}'"),
        Some(EnvoyAddress::Pipe(path)) => format!("unix_socket: {path}"),
        None => String::new(),
    };
    let ours = if ours.is_empty() {
        ours
    } else {
        format!(", or in the configuration of warmroute `listeners: {{ext_proc: {{{ours}}}}}`")
    };
    let message = if addresses.is_empty() {
        format!("Envoy has no address of warmroute, which listens at {listen}")
    } else {
        format!("the filter calls {called}, and warmroute listens at {listen}")
    };
    about(match cluster {
        Some(cluster) => {
            let name = cluster.name();
            let own = format!("in the endpoints of cluster `{name}` write `{text}`{ours}");
            let setting = settings::PICKER_ADDRESS.of(cluster).with("own", own);
            site.report(Error, message, setting)
        }
        None => error(
            message,
            format!(
                "in the `grpc_service` of the filter `{}` write the address {listen}{ours}",
                site.main.name
            ),
        ),
    })
}

fn check_http2(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    if at.cluster.http2_options().is_some() {
        return Some(ok("HTTP/2"));
    }
    let message = "it speaks HTTP/1, and gRPC is HTTP/2: every exchange fails";
    let setting = settings::PICKER_HTTP2.of(at.cluster);
    Some(at.site.report(Error, message, setting))
}

fn check_keepalive(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let options = at.cluster.http2_options();
    let interval = options.and_then(|options| options.given_text("connection_keepalive.interval"));
    Some(match interval {
        Some(interval) => ok(format!("connection_keepalive: {interval}")),
        None => at.site.report(
            Warning,
            "no connection_keepalive: requests hang while warmroute is frozen; \
            after the loss of its node they hang until the connection times out",
            settings::PICKER_KEEPALIVE.of(at.cluster),
        ),
    })
}

/// Checks the HTTP/2 window of streams in full-duplex mode. Envoy queues that much of each body on
/// the connection, before the messages of other requests.
fn check_stream_window(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let options = at.cluster.http2_options()?;
    let mut callers = at.site.callers_of(at.cluster.name());
    callers.find(|filter| filter.is_full_duplex())?;
    let window = options.number("initial_stream_window_size");
    let window = window.unwrap_or(DEFAULT_STREAM_WINDOW);
    let message = format!("initial_stream_window_size: {window}");
    if window <= MAX_STREAM_WINDOW {
        return Some(ok(message));
    }
    let message = format!("{message}; large uploads delay small requests by seconds");
    let setting = settings::PICKER_WINDOW.of(at.cluster);
    Some(at.site.report(Warning, message, setting))
}

/// Checks the connect timeout of TCP connections. Unix sockets connect at once.
fn check_connect_timeout(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let addresses = at.cluster.addresses()?;
    let mut sockets = addresses.iter();
    sockets.find(|address| matches!(address, EnvoyAddress::Socket(..)))?;
    let given = at.cluster.node.duration("connect_timeout");
    let given = given.unwrap_or(DEFAULT_CONNECT_TIMEOUT);
    let message = format!("connect_timeout: {}", DurationSetting(given));
    if given <= MAX_CONNECT_TIMEOUT {
        return Some(ok(message));
    }
    let message = format!(
        "{message}; a request waits this long for a replica of warmroute on an unreachable machine"
    );
    let setting = settings::PICKER_CONNECT_TIMEOUT.of(at.cluster);
    Some(at.site.report(Warning, message, setting))
}

/// Checks for a DNS name with a single address although replicas are configured. It is probably the
/// virtual IP of a Service, and HTTP/2 connections through it stay with one replica.
fn check_single_address(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let kind = at.cluster.kind();
    if !kind.ends_with("_DNS") || !at.site.expected.replicas {
        return None;
    }
    match &at.cluster.addresses()?[..] {
        [one] if one.numeric().is_some() => Some(warning(
            format!(
                "its name resolves to {one} alone, and `replicas` is set: unless only one replica \
                runs, this is the address of a Service, and every connection stays with one replica"
            ),
            "write `clusterIP: None` in the Service of warmroute, \
            so that its name resolves to the address of every replica",
        )),
        [_] if kind == "LOGICAL_DNS" => Some(warning(
            "LOGICAL_DNS connects to one address, and `replicas` is set",
            "write `type: STRICT_DNS`",
        )),
        _ => None,
    }
}

/// Returns the transport sockets of the TCP endpoints of a cluster; null for plaintext.
fn transport_sockets(cluster: EnvoyCluster<'_>) -> Vec<ConfigNode<'_>> {
    let matches = |candidate: &ConfigNode<'_>, metadata: &Value| {
        let criteria = candidate.at("match").0.as_object().into_iter().flatten();
        let mut criteria = criteria.map(|(key, value)| metadata.get(key) == Some(value));
        criteria.all(|is_equal| is_equal)
    };
    let hosts = cluster.hosts().unwrap_or_default().into_iter();
    let by_tcp = hosts.filter(|host| matches!(host.address, EnvoyAddress::Socket(..)));
    by_tcp
        .map(|host| {
            let mut candidates = cluster.node.items("transport_socket_matches");
            let found = candidates.find(|one| matches(one, &host.socket_metadata));
            found.unwrap_or(cluster.node).at("transport_socket")
        })
        .collect()
}

/// Returns whether a transport socket is TLS, or wraps TLS.
fn is_tls(socket: ConfigNode<'_>) -> bool {
    let inner = socket.at("typed_config.transport_socket").present();
    socket.text("name").ends_with("tls")
        || socket.at("typed_config").has_type("UpstreamTlsContext")
        || inner.is_some_and(is_tls)
}

/// Returns whether a transport socket is TLS to warmroute itself. The sidecar of warmroute
/// terminates mutual TLS of Istio, so warmroute gets plaintext.
fn is_encrypted(socket: ConfigNode<'_>) -> bool {
    let protocols = "typed_config.common_tls_context.alpn_protocols";
    is_tls(socket) && !socket.contains(protocols, "istio")
}

/// Checks that Envoy and warmroute agree on TLS.
fn check_tls(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let sockets = transport_sockets(at.cluster);
    let encrypted = sockets
        .iter()
        .filter(|socket| is_encrypted(**socket))
        .count();
    if sockets.is_empty() {
        // For unix sockets, or a name without an address yet, the socket of the cluster applies.
        let has_unix = at.cluster.addresses().is_some_and(|list| !list.is_empty());
        let is_tls = has_unix && is_tls(at.cluster.node.at("transport_socket"));
        return is_tls.then(|| tls_to_plaintext(at));
    }
    match (encrypted, at.site.expected.tls) {
        (0, false) => None,
        (_, false) => Some(tls_to_plaintext(at)),
        (encrypted, true) if encrypted == sockets.len() => Some(ok("TLS on both sides")),
        (_, true) => Some(at.site.report(
            Error,
            "Envoy connects in plaintext, and `listeners.ext_proc.tls` is set: \
            no exchange succeeds",
            settings::PICKER_TLS.of(at.cluster),
        )),
    }
}

fn tls_to_plaintext(at: &ClusterFacts<'_, '_>) -> CheckVerdict {
    let fix = at.site.fix(settings::PICKER_PLAINTEXT.of(at.cluster));
    let ours = "write `tls: {self_signed: true}`, or a certificate, \
        under `listeners: {ext_proc: ..}` in the configuration of warmroute";
    error(
        "Envoy connects with TLS, and warmroute listens in plaintext there: no exchange succeeds",
        fix.map_or(ours.to_owned(), |fix| format!("{ours}; or {fix}")),
    )
}

/// Checks the server name. With `auto_sni`, Envoy sends the `:authority` as server name and ignores
/// `sni`. The authority is the cluster name unless the filter sets one.
fn check_server_name(at: &ServiceFacts<'_, '_>) -> Option<CheckVerdict> {
    let cluster = at.cluster()?;
    let mut sockets = transport_sockets(cluster);
    sockets.push(cluster.node.at("transport_socket"));
    sockets.into_iter().find(|socket| is_encrypted(*socket))?;
    let options = cluster.http_options()?;
    let authority = at.authority()?;
    let host = authority
        .rsplit_once(':')
        .map_or(authority, |(host, _)| host);
    let is_valid = rustls::pki_types::ServerName::try_from(host).is_ok();
    if is_valid || !options.flag("upstream_http_protocol_options.auto_sni") {
        return None;
    }
    let message = format!(
        "it sends the server name (SNI) `{host}`, which is not a DNS name: \
        warmroute refuses every handshake"
    );
    Some(
        at.site
            .report(Error, message, settings::SERVER_NAME.of(cluster)),
    )
}

/// Returns whether Envoy answers a request with status 500 if a circuit breaker of a called cluster
/// refuses its stream. Otherwise Envoy serves it without warmroute. Envoy refuses the stream before
/// it sends a part of the body, so `failure_mode_allow` applies in every body mode.
pub(super) fn rejects_overflow(site: &FilterSite<'_>, cluster: &str) -> bool {
    let mut callers = site.callers_of(cluster);
    callers.any(|filter| !filter.allows_failure())
}

/// Checks the circuit breakers for the streams to warmroute, one per request in flight.
fn check_exchange_limits(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let limits = BreakerLimits::read(at, &["max_pending_requests", "max_requests"]);
    let rejects = rejects_overflow(at.site, at.cluster.name());
    let (level, effect) = match (limits.low.contains("max_requests"), rejects) {
        (true, true) => (Error, "further requests in flight get 500"),
        (true, false) => (
            Error,
            "further requests in flight are served without warmroute, so they are not routed",
        ),
        (false, true) => (
            Warning,
            "in a burst, further requests get 500 until Envoy is connected",
        ),
        (false, false) => (
            Warning,
            "in a burst, further requests are not routed until Envoy is connected",
        ),
    };
    Some(limits.judge(effect, |message| {
        at.site
            .report(level, message, settings::PICKER_LIMITS.of(at.cluster))
    }))
}

/// Checks the circuit breakers for the requests of clients.
pub(super) fn check_request_limits(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let effect = "further requests get 503 although the workers have capacity";
    Some(check_worker_limits(at, Warning, effect))
}

/// Checks the circuit breakers for mirrored requests. Envoy does not report when they end.
pub(super) fn check_mirror_limits(at: &ClusterFacts<'_, '_>) -> Option<CheckVerdict> {
    let effect = "Envoy drops further mirrored requests without an error";
    Some(check_worker_limits(at, Error, effect))
}

fn check_worker_limits(
    at: &ClusterFacts<'_, '_>,
    level: FindingLevel,
    effect: &str,
) -> CheckVerdict {
    let limits = BreakerLimits::read(at, &BREAKER_LIMITS);
    limits.judge(effect, |message| {
        at.site
            .report(level, message, settings::WORKER_LIMITS.of(at.cluster))
    })
}

const BREAKER_LIMITS: [&str; 3] = ["max_connections", "max_pending_requests", "max_requests"];

/// Circuit breaker limits of a cluster. With the defaults, requests are rejected long before the
/// cluster is overloaded.
struct BreakerLimits {
    /// All limits.
    all: String,
    /// Those that are too low.
    low: String,
}

impl BreakerLimits {
    /// Reads the limits. Those in `relevant` may be too low.
    fn read(at: &ClusterFacts<'_, '_>, relevant: &[&str]) -> Self {
        let mut low = Vec::new();
        let all = BREAKER_LIMITS.map(|name| {
            let given = at.cluster.breaker_limit(name);
            let limit = given.unwrap_or(DEFAULT_BREAKER_LIMIT);
            let source = if given.is_some() { "" } else { ", the default" };
            if relevant.contains(&name) && limit <= DEFAULT_BREAKER_LIMIT {
                low.push(format!("{name}: {limit}{source}"));
            }
            format!("{name}: {limit}")
        });
        let all = list(&all);
        let low = list(&low);
        Self { all, low }
    }

    /// Judges the limits. `report` returns the verdict about those that are too low.
    fn judge(&self, effect: &str, report: impl FnOnce(String) -> CheckVerdict) -> CheckVerdict {
        if self.low.is_empty() {
            ok(self.all.as_str())
        } else {
            report(format!("{}; {effect}", self.low))
        }
    }
}
