//! Fixes in the resources of Istio.

use super::filter_field::FieldScope;
use super::{EnvoySetting, KEEPALIVE, WINDOWS, early_removal};
use crate::envoy::control_plane::istio_host;
use crate::envoy::filter::format_seconds;
use crate::envoy::schema::EnvoyCluster;
use crate::envoy::site::FilterSite;

impl FilterSite<'_> {
    /// Returns a fix in the resources of Istio. `routes` are the names of the inference routes.
    pub(super) fn istio_fix(&self, routes: &[String], setting: &EnvoySetting<'_>) -> String {
        if let Some(fix) = destination_rule(setting).or_else(|| self.istio_resource_fix(setting)) {
            return fix;
        }
        match setting {
            EnvoySetting::Filter(field) if field.scope == FieldScope::Route => route_filter(
                routes,
                &format!("{} in the `overrides` of `{}`", field.envoy, self.main.name),
            ),
            EnvoySetting::Filter(field) => envoy_filter(
                "HTTP_FILTER",
                &format!(
                    "{} in the `typed_config` of `{}`",
                    field.envoy, self.main.name
                ),
            ),
            EnvoySetting::PickerKeepalive(cluster) => http2_options(cluster, KEEPALIVE),
            EnvoySetting::PickerWindow(cluster) => http2_options(cluster, WINDOWS),
            EnvoySetting::Retry(_, envoy) | EnvoySetting::BodyLimit(_, envoy) => {
                route_filter(routes, envoy)
            }
            EnvoySetting::ClientHeaders(names) => {
                envoy_filter("NETWORK_FILTER", &early_removal(names))
            }
            EnvoySetting::IdleTimeout(length) => envoy_filter(
                "NETWORK_FILTER",
                &format!("`stream_idle_timeout: {}`", format_seconds(*length)),
            ),
            other => self.envoy_fix(other),
        }
    }

    /// Returns a fix in a Service, an InferencePool, an HTTPRoute or the MeshConfig.
    fn istio_resource_fix(&self, setting: &EnvoySetting<'_>) -> Option<String> {
        let fix = match setting {
            EnvoySetting::PickerHttp2(cluster, _) => format!(
                "in the Service `{}` write `appProtocol: grpc` for the port of warmroute",
                istio_host(cluster)
            ),
            EnvoySetting::PickerAddress(cluster, _) => format!(
                "in the Service `{}` write the port {} as `targetPort`",
                istio_host(cluster),
                self.picker_port()
            ),
            EnvoySetting::WorkerEndpoints(_) => {
                "in the InferencePool write a `selector` and `targetPorts` that select these \
                pods, as `workers.kubernetes.pools` in the configuration of warmroute does"
                    .to_owned()
            }
            EnvoySetting::EndpointOverride(..) => {
                "in the rule of the HTTPRoute refer to the InferencePool in `backendRefs`"
                    .to_owned()
            }
            EnvoySetting::EnvoyHeaders => {
                "remove `proxyHeaders: {envoyDebugHeaders: {disabled: true}}` from the MeshConfig \
                or from the annotation `proxy.istio.io/config`"
                    .to_owned()
            }
            EnvoySetting::RouteTimeout(_) => {
                "in the rule of the HTTPRoute write `timeouts: {request: 0s}`".to_owned()
            }
            _ => return None,
        };
        Some(fix)
    }
}

/// Formats a fix in an EnvoyFilter that applies to `kind`.
fn envoy_filter(kind: &str, text: &str) -> String {
    format!("in an EnvoyFilter with `applyTo: {kind}` write {text}")
}

/// Formats a fix in the HTTP/2 options of a cluster.
fn http2_options(cluster: &EnvoyCluster, options: &str) -> String {
    let text = format!(
        "`{options}` in the `http2_protocol_options` of `{}`",
        cluster.name
    );
    envoy_filter("CLUSTER", &text)
}

/// Formats a fix in an EnvoyFilter that applies to the named routes.
fn route_filter(routes: &[String], text: &str) -> String {
    let named = match routes {
        [] => "HTTP_ROUTE`".to_owned(),
        [one] => format!("HTTP_ROUTE` that names the route `{one}`"),
        several => format!(
            "HTTP_ROUTE` that names the routes `{}`",
            several.join("`, `")
        ),
    };
    format!("in an EnvoyFilter with `applyTo: {named} write {text}")
}

/// Returns the fix for a cluster setting that has a field in DestinationRule.
fn destination_rule(setting: &EnvoySetting<'_>) -> Option<String> {
    let rule = |cluster: &EnvoyCluster, policy: &str| {
        let host = istio_host(cluster);
        Some(format!(
            "in the DestinationRule of the host `{host}` write `trafficPolicy: {policy}`"
        ))
    };
    match setting {
        EnvoySetting::PickerLimits(cluster) => rule(
            cluster,
            "{connectionPool: {http: {http1MaxPendingRequests: 100000, http2MaxRequests: 100000}}}",
        ),
        EnvoySetting::PickerConnectTimeout(cluster) => {
            rule(cluster, "{connectionPool: {tcp: {connectTimeout: 1s}}}")
        }
        EnvoySetting::PickerTls(cluster) => {
            let sni = istio_host(cluster);
            rule(
                cluster,
                &format!("{{tls: {{mode: SIMPLE, insecureSkipVerify: true, sni: {sni}}}}}"),
            )
        }
        EnvoySetting::PickerPlaintext(cluster) => rule(cluster, "{tls: {mode: DISABLE}}"),
        EnvoySetting::ServerName(cluster) => rule(
            cluster,
            &format!("{{tls: {{sni: {}}}}}", istio_host(cluster)),
        ),
        EnvoySetting::WorkerLimits(cluster) => rule(
            cluster,
            "{connectionPool: {tcp: {maxConnections: 100000}, http: {http1MaxPendingRequests: \
            100000, http2MaxRequests: 100000}}}",
        ),
        EnvoySetting::WorkerIdleTimeout(cluster) => {
            rule(cluster, "{connectionPool: {http: {idleTimeout: 4s}}}")
        }
        _ => None,
    }
}
