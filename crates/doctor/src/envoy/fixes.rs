//! Settings that findings refer to, and the field of a control plane's resource that changes each
//! of them.

mod envoy_gateway;
mod filter_field;
mod istio;
mod own_config;

use std::time::Duration;

use super::control_plane::ControlPlane;
use super::schema::EnvoyCluster;
use super::site::FilterSite;
use crate::finding::{Finding, FindingBuilder, FindingLevel};

pub(super) use filter_field::{
    CONTENT_LENGTH, FAILURE_MODE, FilterField, MODE_OVERRIDE, OBSERVABILITY, REQUEST_BODY,
    REQUEST_HEADERS, REQUEST_TRAILERS, RESPONSE_ATTRIBUTES, RESPONSE_BODY, RESPONSE_HEADERS,
    RESPONSE_TRAILERS,
};

/// Port of warmroute in the example manifests.
const DEFAULT_PORT: u16 = 9002;

/// HTTP/2 options for pings, and for a small part of each body on the connection.
const KEEPALIVE: &str = "connection_keepalive: {interval: 2s, timeout: 2s}";
const WINDOWS: &str = "initial_stream_window_size: 65536, initial_connection_window_size: 1048576";

/// A setting of Envoy.
pub(super) enum EnvoySetting<'a> {
    /// A field of the ext_proc filter.
    Filter(FilterField<'a>),
    /// Circuit breakers of the cluster of warmroute.
    PickerLimits(&'a EnvoyCluster),
    /// HTTP/2 pings on the connections to warmroute.
    PickerKeepalive(&'a EnvoyCluster),
    /// HTTP/2 windows of the connections to warmroute.
    PickerWindow(&'a EnvoyCluster),
    /// Connect timeout of the connections to warmroute.
    PickerConnectTimeout(&'a EnvoyCluster),
    /// TLS to warmroute.
    PickerTls(&'a EnvoyCluster),
    /// No TLS to warmroute.
    PickerPlaintext(&'a EnvoyCluster),
    /// The server name (SNI) of the connections to warmroute.
    ServerName(&'a EnvoyCluster),
    /// Circuit breakers of the cluster of the workers.
    WorkerLimits(&'a EnvoyCluster),
    /// Idle timeout of the connections to the workers.
    WorkerIdleTimeout(&'a EnvoyCluster),
    /// Retries of requests to unreachable workers, with the fix in Envoy's configuration.
    Retry(&'a EnvoyCluster, String),
    /// The `x-envoy-*` headers of responses.
    EnvoyHeaders,
    /// Request headers that Envoy removes early.
    ClientHeaders(&'a [&'a str]),
    /// Maximum size of a buffered body, with the fix in Envoy's configuration.
    BodyLimit(u64, String),
    /// The idle timeout of streams.
    IdleTimeout(Duration),
    /// HTTP/2 to warmroute, with the fix in Envoy's configuration.
    PickerHttp2(&'a EnvoyCluster, String),
    /// Address of warmroute, with the fix in Envoy's configuration.
    PickerAddress(&'a EnvoyCluster, String),
    /// Endpoints of the workers, with the fix in Envoy's configuration.
    WorkerEndpoints(String),
    /// Selection of the worker by the endpoint from warmroute, with the fix in Envoy's
    /// configuration.
    EndpointOverride(&'a EnvoyCluster, String),
    /// Timeout of the named route.
    RouteTimeout(String),
}

impl FilterSite<'_> {
    /// Returns the text of a fix; `None` if the control plane has no field for the setting.
    pub(super) fn fix(&self, setting: &EnvoySetting<'_>) -> Option<String> {
        match &self.plane {
            ControlPlane::Istio { routes } => Some(self.istio_fix(routes, setting)),
            ControlPlane::EnvoyGateway { policy, .. } => self.envoy_gateway_fix(policy, setting),
            ControlPlane::EnvoyAiGateway { .. } => self.ai_gateway_fix(setting),
            ControlPlane::Other => Some(self.envoy_fix(setting)),
        }
    }

    /// Returns a finding with its fix. A warning without a fix becomes a note about a limit of the
    /// control plane.
    pub(super) fn report(
        &self,
        at: FindingBuilder,
        level: FindingLevel,
        message: impl Into<String>,
        setting: &EnvoySetting<'_>,
    ) -> Finding {
        let message = message.into();
        match (self.fix(setting), level) {
            (Some(fix), FindingLevel::Error) => at.error(message, fix),
            (Some(fix), _) => at.warning(message, fix),
            (None, FindingLevel::Error) => at.error(
                message,
                format!(
                    "{} has no field for it; in Envoy's own configuration: {}",
                    self.plane_name(),
                    self.envoy_fix(setting)
                ),
            ),
            (None, _) => at.note(format!(
                "{message}; {} has no field for it",
                self.plane_name()
            )),
        }
    }

    fn picker_port(&self) -> u16 {
        self.expected.tcp.map_or(DEFAULT_PORT, |tcp| tcp.port())
    }

    fn plane_name(&self) -> &'static str {
        match self.plane {
            ControlPlane::Istio { .. } => "Istio",
            ControlPlane::EnvoyGateway { .. } => "Envoy Gateway",
            ControlPlane::EnvoyAiGateway { .. } => "Envoy AI Gateway",
            ControlPlane::Other => "Envoy",
        }
    }
}

/// Formats the entries that remove request headers early.
fn early_removal(names: &[&str]) -> String {
    let lines = names
        .iter()
        .map(|name| format!("- remove: {name}"))
        .collect::<Vec<_>>()
        .join("; ");
    format!("under `early_header_mutation_extensions` as in envoy/standalone.yaml, write {lines}")
}
