//! Fixes in Envoy's own configuration.

use super::filter_field::RESPONSE_ATTRIBUTES;
use super::{EnvoySetting, KEEPALIVE, WINDOWS, early_removal};
use crate::envoy::filter::format_seconds;
use crate::envoy::schema::EnvoyCluster;
use crate::envoy::site::FilterSite;

impl FilterSite<'_> {
    /// Returns a fix in Envoy's own configuration.
    pub(super) fn envoy_fix(&self, setting: &EnvoySetting<'_>) -> String {
        match setting {
            EnvoySetting::Filter(field) => self.in_main_filter(&field.envoy),
            EnvoySetting::PickerLimits(cluster) | EnvoySetting::WorkerLimits(cluster) => format!(
                "in cluster `{}` write `circuit_breakers: {{thresholds: [{{max_connections: \
                100000, max_pending_requests: 100000, \
                 max_requests: 100000}}]}}`",
                cluster.name
            ),
            EnvoySetting::WorkerIdleTimeout(cluster) => format!(
                "in the HttpProtocolOptions of cluster `{}` write `common_http_protocol_options: \
                {{idle_timeout: 4s}}`, as in cluster `workers` of envoy/standalone.yaml",
                cluster.name
            ),
            EnvoySetting::PickerKeepalive(cluster) => http2_options(cluster, KEEPALIVE),
            EnvoySetting::PickerWindow(cluster) => http2_options(cluster, WINDOWS),
            EnvoySetting::PickerConnectTimeout(cluster) => {
                format!("in cluster `{}` write `connect_timeout: 1s`", cluster.name)
            }
            EnvoySetting::PickerTls(cluster) => format!(
                "in cluster `{}` write a `transport_socket` as in envoy/README.md, \"warmroute on \
                another machine\"",
                cluster.name
            ),
            EnvoySetting::PickerPlaintext(cluster) => {
                format!(
                    "remove the `transport_socket` from cluster `{}`",
                    cluster.name
                )
            }
            EnvoySetting::ServerName(cluster) => format!(
                "in the `UpstreamTlsContext` of cluster `{}` write `sni`, and remove `auto_sni` \
                from its HttpProtocolOptions",
                cluster.name
            ),
            EnvoySetting::Retry(_, envoy)
            | EnvoySetting::BodyLimit(_, envoy)
            | EnvoySetting::PickerHttp2(_, envoy)
            | EnvoySetting::PickerAddress(_, envoy)
            | EnvoySetting::WorkerEndpoints(envoy)
            | EnvoySetting::EndpointOverride(_, envoy) => envoy.clone(),
            EnvoySetting::EnvoyHeaders => format!(
                "remove `suppress_envoy_headers` from the router filter of listener `{}`, or {}",
                self.listener.name,
                self.in_main_filter(&RESPONSE_ATTRIBUTES.envoy)
            ),
            EnvoySetting::ClientHeaders(names) => {
                format!(
                    "in the connection manager of listener `{}`, {}",
                    self.listener.name,
                    early_removal(names)
                )
            }
            EnvoySetting::IdleTimeout(length) => format!(
                "in the connection manager of listener `{}` write `stream_idle_timeout: {}`",
                self.listener.name,
                format_seconds(*length)
            ),
            EnvoySetting::RouteTimeout(title) => format!("write `timeout: 0s` in the {title}"),
        }
    }
}

fn http2_options(cluster: &EnvoyCluster, options: &str) -> String {
    format!(
        "in the `http2_protocol_options` of cluster `{}` write `{options}`",
        cluster.name
    )
}
