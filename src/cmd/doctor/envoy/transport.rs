//! The transport sockets of the connections to warmroute: whether both sides agree on TLS, and the server name that Envoy sends.

use std::collections::BTreeMap;

use serde::Deserialize;
use serde_json::Value;

use super::dump::{Address, is, part};
use super::parts::{Cluster, EnvoyGrpc, Extension};
use super::remedy::EnvoySetting;
use super::site::Site;
use crate::cmd::doctor::finding::{At, Finding, Level};

/// A transport socket for the endpoints whose metadata match.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct SocketMatch {
    #[serde(rename = "match")]
    criteria: BTreeMap<String, Value>,
    transport_socket: Extension,
}

impl SocketMatch {
    fn covers(&self, metadata: &Value) -> bool {
        self.criteria
            .iter()
            .all(|(key, value)| metadata.get(key) == Some(value))
    }
}

/// The transport sockets that the endpoints of a cluster use, `None` for plaintext.
fn sockets<'c>(site: &Site<'_>, cluster: &'c Cluster) -> Vec<Option<&'c Extension>> {
    let of_host = |metadata: &Value| {
        let matched = cluster
            .transport_socket_matches
            .iter()
            .find(|one| one.covers(metadata));
        matched
            .map(|one| &one.transport_socket)
            .or(cluster.transport_socket.as_ref())
    };
    let hosts = site.dump.hosts_of(cluster).unwrap_or_default();
    let by_tcp = hosts
        .iter()
        .filter(|host| matches!(host.address, Address::Socket(..)));
    by_tcp.map(|host| of_host(&host.socket_metadata)).collect()
}

/// Whether a transport socket encrypts, itself or inside another one.
fn is_tls(socket: &Extension) -> bool {
    let inner = socket
        .typed_config
        .get("transport_socket")
        .and_then(|inner| part(inner, "a transport socket").ok());
    socket.name.ends_with("tls")
        || is(&socket.typed_config, "UpstreamTlsContext")
        || inner.is_some_and(|inner: Extension| is_tls(&inner))
}

/// Whether this is the mutual TLS of Istio's mesh, which the sidecar of warmroute ends: warmroute gets plaintext.
fn is_mesh_tls(socket: &Extension) -> bool {
    let protocols = socket.typed_config["common_tls_context"]["alpn_protocols"].as_array();
    protocols.is_some_and(|protocols| protocols.iter().any(|name| name == "istio"))
}

/// Whether Envoy and warmroute agree on TLS.
pub(super) fn tls(site: &Site<'_>, cluster: &Cluster) -> Option<Finding> {
    let at = At::new("envoy.tls", format!("cluster {}", cluster.name));
    let sockets = sockets(site, cluster);
    let encrypted = sockets
        .iter()
        .filter(|socket| socket.is_some_and(|one| is_tls(one) && !is_mesh_tls(one)))
        .count();
    if sockets.is_empty() {
        // Unix sockets, or a name without an address yet: the socket of the cluster decides.
        let unix = site
            .dump
            .endpoints_of(cluster)
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
            Level::Error,
            "Envoy connects in plaintext, and `listen.tls` is set: no exchange succeeds",
            &EnvoySetting::PickerTls(cluster),
        )),
        (_, _, false) => Some(encrypted_to_plaintext(site, at, cluster)),
    }
}

fn encrypted_to_plaintext(site: &Site<'_>, at: At, cluster: &Cluster) -> Finding {
    let fix = site.fix(&EnvoySetting::PickerPlaintext(cluster));
    let ours =
        "write `tls: {self_signed: true}`, or a certificate, under `listen` in our configuration";
    at.error(
        "Envoy connects with TLS, and warmroute listens in plaintext there: no exchange succeeds",
        fix.map_or(ours.to_owned(), |fix| format!("{ours}; or {fix}")),
    )
}

/// With `auto_sni` Envoy sends the `:authority` as server name, whatever `sni` says: the name of the cluster unless the filter sets one.
pub(super) fn server_name(
    site: &Site<'_>,
    cluster: &Cluster,
    service: &EnvoyGrpc,
) -> Option<Finding> {
    let mut used = sockets(site, cluster)
        .into_iter()
        .flatten()
        .chain(&cluster.transport_socket);
    let uses_tls = used.any(|socket| is_tls(socket) && !is_mesh_tls(socket));
    let is_automatic = cluster
        .http()
        .is_some_and(|http| http["upstream_http_protocol_options"]["auto_sni"] == true);
    let sent = service.sent_authority();
    let host = sent.rsplit_once(':').map_or(sent, |(host, _)| host);
    if !uses_tls || !is_automatic || rustls::pki_types::ServerName::try_from(host).is_ok() {
        return None;
    }
    let at = At::new("envoy.server_name", format!("cluster {}", cluster.name));
    let seen = format!(
        "it sends the server name (SNI) `{host}`, which is not a DNS name: warmroute refuses every handshake"
    );
    Some(site.report(at, Level::Error, seen, &EnvoySetting::ServerName(cluster)))
}
