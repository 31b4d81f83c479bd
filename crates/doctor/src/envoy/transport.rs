//! Checks of the transport sockets to warmroute: TLS on both sides, and the server name that Envoy
//! sends.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::dump::{EnvoyAddress, parse_part};
use super::fixes::EnvoySetting;
use super::schema::{EnvoyCluster, EnvoyGrpc, TypedExtension, has_type};
use super::site::FilterSite;
use crate::finding::{Finding, FindingBuilder, FindingLevel};

/// Transport socket for the endpoints with matching metadata.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct SocketMatch {
    #[serde(rename = "match")]
    criteria: BTreeMap<String, Value>,
    transport_socket: TypedExtension,
}

impl SocketMatch {
    fn matches(&self, metadata: &Value) -> bool {
        self.criteria
            .iter()
            .all(|(key, value)| metadata.get(key) == Some(value))
    }
}

/// Returns the transport sockets of the endpoints of a cluster; `None` for plaintext.
fn transport_sockets<'c>(
    site: &FilterSite<'_>,
    cluster: &'c EnvoyCluster,
) -> Vec<Option<&'c TypedExtension>> {
    let of_host = |metadata: &Value| {
        let matched = cluster
            .transport_socket_matches
            .iter()
            .find(|one| one.matches(metadata));
        matched
            .map(|one| &one.transport_socket)
            .or(cluster.transport_socket.as_ref())
    };
    let hosts = site.dump.cluster_hosts(cluster).unwrap_or_default();
    let by_tcp = hosts
        .iter()
        .filter(|host| matches!(host.address, EnvoyAddress::Socket(..)));
    by_tcp.map(|host| of_host(&host.socket_metadata)).collect()
}

/// Returns whether a transport socket is TLS, or wraps TLS.
fn is_tls(socket: &TypedExtension) -> bool {
    let inner = socket
        .typed_config
        .get("transport_socket")
        .and_then(|inner| parse_part(inner, "a transport socket").ok());
    socket.name.ends_with("tls")
        || has_type(&socket.typed_config, "UpstreamTlsContext")
        || inner.is_some_and(|inner: TypedExtension| is_tls(&inner))
}

/// Returns whether this is mutual TLS of Istio. The sidecar of warmroute terminates it, so
/// warmroute gets plaintext.
fn is_mesh_tls(socket: &TypedExtension) -> bool {
    let protocols = socket.typed_config["common_tls_context"]["alpn_protocols"].as_array();
    protocols.is_some_and(|protocols| protocols.iter().any(|name| name == "istio"))
}

/// Checks that Envoy and warmroute agree on TLS.
pub(super) fn check_tls(site: &FilterSite<'_>, cluster: &EnvoyCluster) -> Option<Finding> {
    let at = FindingBuilder::new("envoy.tls", format!("cluster {}", cluster.name));
    let sockets = transport_sockets(site, cluster);
    let encrypted = sockets
        .iter()
        .filter(|socket| socket.is_some_and(|one| is_tls(one) && !is_mesh_tls(one)))
        .count();
    if sockets.is_empty() {
        // For unix sockets, or a name without an address yet, the socket of the cluster applies.
        let unix = site
            .dump
            .cluster_addresses(cluster)
            .is_some_and(|addresses| !addresses.is_empty());
        let is_encrypted = cluster.transport_socket.as_ref().is_some_and(is_tls);
        return (unix && is_encrypted).then(|| encrypted_to_plaintext(site, at, cluster));
    }
    match (
        encrypted == sockets.len(),
        encrypted == 0,
        site.expected.tls,
    ) {
        (true, _, true) => Some(at.ok("TLS on both sides")),
        (_, true, false) => None,
        (_, _, true) => Some(site.report(
            at,
            FindingLevel::Error,
            "Envoy connects in plaintext, and `listeners.ext_proc.tls` is set: no exchange succeeds",
            &EnvoySetting::PickerTls(cluster),
        )),
        (_, _, false) => Some(encrypted_to_plaintext(site, at, cluster)),
    }
}

fn encrypted_to_plaintext(
    site: &FilterSite<'_>,
    at: FindingBuilder,
    cluster: &EnvoyCluster,
) -> Finding {
    let fix = site.fix(&EnvoySetting::PickerPlaintext(cluster));
    let ours = "write `tls: {self_signed: true}`, or a certificate, under `listeners: {ext_proc: ..}` in the \
        configuration of warmroute";
    at.error(
        "Envoy connects with TLS, and warmroute listens in plaintext there: no exchange succeeds",
        fix.map_or(ours.to_owned(), |fix| format!("{ours}; or {fix}")),
    )
}

/// Checks the server name. With `auto_sni`, Envoy sends the `:authority` as server name and ignores
/// `sni`. The authority is the cluster name unless the filter sets one.
pub(super) fn check_server_name(
    site: &FilterSite<'_>,
    cluster: &EnvoyCluster,
    service: &EnvoyGrpc,
) -> Option<Finding> {
    let mut used = transport_sockets(site, cluster)
        .into_iter()
        .flatten()
        .chain(&cluster.transport_socket);
    let uses_tls = used.any(|socket| is_tls(socket) && !is_mesh_tls(socket));
    let is_automatic = cluster
        .http_options()
        .is_some_and(|http| http["upstream_http_protocol_options"]["auto_sni"] == true);
    let sent = service.sent_authority();
    let host = sent.rsplit_once(':').map_or(sent, |(host, _)| host);
    if !uses_tls || !is_automatic || rustls::pki_types::ServerName::try_from(host).is_ok() {
        return None;
    }
    let at = FindingBuilder::new("envoy.server_name", format!("cluster {}", cluster.name));
    let message = format!(
        "it sends the server name (SNI) `{host}`, which is not a DNS name: warmroute refuses \
        every handshake"
    );
    Some(site.report(
        at,
        FindingLevel::Error,
        message,
        &EnvoySetting::ServerName(cluster),
    ))
}
