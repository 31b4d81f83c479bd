//! Kubernetes Service names in authorities.

use super::authority::normalize_authority;

/// Returns the Service of an authority as `name.namespace`, regardless of the gateway. For example,
/// it is `a.b` for `outbound|9002||a.b.svc.cluster.local` (Istio), `a.b.svc:9002` (Envoy AI
/// Gateway), `a.b:9002` (Envoy Gateway) and `A.b.svc`.
pub fn service_of_authority(authority: &str) -> String {
    // The authorities of requests have passed the filter, so configured names are normalized too.
    let authority = normalize_authority(authority).to_ascii_lowercase();
    let host = match authority.strip_prefix("outbound+") {
        // An Istio cluster name consists of direction, port, subset and host.
        Some(cluster) => cluster.rsplit('+').next().unwrap_or(cluster),
        None => &authority,
    };
    let host = host_without_port(host);
    let mut labels = host.split('.');
    match (labels.next(), labels.next(), labels.next()) {
        (Some(service), Some(namespace), Some("svc")) => format!("{service}.{namespace}"),
        _ => host.to_owned(),
    }
}

/// Returns a host without its port.
pub fn host_without_port(host: &str) -> &str {
    match host.rsplit_once(':') {
        Some((name, port))
            if !port.is_empty()
                && port.bytes().all(|byte| byte.is_ascii_digit())
                && !is_ipv6(name) =>
        {
            name
        }
        _ => host,
    }
}

/// Returns whether the text before the last colon belongs to an IPv6 address without a port.
fn is_ipv6(name: &str) -> bool {
    name.contains(':') && !name.ends_with(']')
}
