//! Fixes in the resources of Envoy Gateway and of Envoy AI Gateway.

use warmroute_core::envoy_names::ENDPOINT;

use super::EnvoySetting;
use crate::envoy::control_plane::{ControlPlane, ResourceName, http_route};
use crate::envoy::schema::EnvoyCluster;
use crate::envoy::site::FilterSite;

/// Circuit breaker limits that no deployment reaches.
const BREAKER_LIMITS: &str =
    "{maxConnections: 100000, maxPendingRequests: 100000, maxParallelRequests: 100000}";

impl FilterSite<'_> {
    /// Returns a fix in the resources of Envoy Gateway. `policy` is the EnvoyExtensionPolicy of the
    /// filter.
    pub(super) fn envoy_gateway_fix(
        &self,
        policy: &ResourceName,
        setting: &EnvoySetting<'_>,
    ) -> Option<String> {
        match setting {
            EnvoySetting::Filter(field) => {
                let field = field.policy.as_ref()?;
                Some(format!(
                    "in `extProc` of the EnvoyExtensionPolicy{policy} write \
                    `{field}`"
                ))
            }
            EnvoySetting::PickerLimits(_) => Some(backend_settings(
                policy,
                &format!("circuitBreaker: {BREAKER_LIMITS}"),
            )),
            EnvoySetting::PickerKeepalive(_) => Some(backend_settings(
                policy,
                "http2: {connectionKeepalive: {interval: 2s, timeout: 1s}}",
            )),
            EnvoySetting::PickerWindow(_) => Some(backend_settings(
                policy,
                "http2: {initialStreamWindowSize: 64Ki, initialConnectionWindowSize: 1Mi}",
            )),
            EnvoySetting::PickerConnectTimeout(_) => Some(backend_settings(
                policy,
                "timeout: {tcp: {connectTimeout: 1s}}",
            )),
            EnvoySetting::PickerTls(_) => Some(
                "write `tls: {insecureSkipVerify: true}` in \
                the Backend that the EnvoyExtensionPolicy \
                     refers to, or attach a BackendTLSPolicy to the Service"
                    .to_owned(),
            ),
            EnvoySetting::PickerPlaintext(_) => Some(
                "remove `tls` from the Backend that the EnvoyExtensionPolicy refers \
                    to"
                .to_owned(),
            ),
            other => self.gateway_fix(other),
        }
    }

    /// Returns a fix in the resources of Envoy AI Gateway.
    pub(super) fn ai_gateway_fix(&self, setting: &EnvoySetting<'_>) -> Option<String> {
        match setting {
            EnvoySetting::Filter(field) => Some(format!(
                "annotate the InferencePool with `{}`",
                field.annotation?
            )),
            // Envoy AI Gateway adds this cluster after it applies all policies. Runtime keys still
            // affect the cluster.
            EnvoySetting::PickerLimits(cluster) => Some(format!(
                "in the EnvoyProxy that the Gateway{} refers to write `bootstrap: {{type: \
                    JSONPatch, jsonPatches: [{{op: add, path: \
                     /layered_runtime/layers/0/static_layer/circuit_breakers.{}.default.max_requests, value: 100000}}]}}`, and \
                     the same for max_pending_requests",
                self.gateway_name(),
                cluster.name
            )),
            EnvoySetting::PickerKeepalive(_)
            | EnvoySetting::PickerWindow(_)
            | EnvoySetting::PickerConnectTimeout(_)
            | EnvoySetting::PickerTls(_)
            | EnvoySetting::PickerPlaintext(_)
            | EnvoySetting::ServerName(_)
            | EnvoySetting::EndpointOverride(..)
            | EnvoySetting::Retry(..) => None,
            EnvoySetting::BodyLimit(..) => Some(
                "remove the annotation `aigateway.envoyproxy.io/processing-body-mode: \
                    buffered` from the InferencePool: with \
                     full duplex no body is buffered"
                    .to_owned(),
            ),
            other => self.gateway_fix(other),
        }
    }

    /// Returns a fix that applies to Envoy Gateway and Envoy AI Gateway: a policy for clients or
    /// routes.
    fn gateway_fix(&self, setting: &EnvoySetting<'_>) -> Option<String> {
        if let Some(fix) = traffic_policy_fix(setting) {
            return Some(fix);
        }
        if let Some(field) = client_policy_field(setting) {
            return Some(format!(
                "in a ClientTrafficPolicy for the Gateway{} write `{field}`",
                self.gateway_name()
            ));
        }
        match setting {
            EnvoySetting::WorkerEndpoints(_) => Some(
                "in the Service of the HTTPRoute's `backendRefs` write a `selector` that selects \
                these pods"
                    .to_owned(),
            ),
            EnvoySetting::PickerAddress(..) => Some(format!(
                "in the Service of warmroute write the port {} as `targetPort`, and refer to that \
                Service and its port",
                self.picker_port()
            )),
            EnvoySetting::RouteTimeout(_) => {
                Some("in the rule of the HTTPRoute write `timeouts: {request: 0s}`".to_owned())
            }
            _ => None,
        }
    }

    fn gateway_name(&self) -> String {
        match &self.plane {
            ControlPlane::EnvoyGateway { gateway, .. }
            | ControlPlane::EnvoyAiGateway { gateway } => gateway.to_string(),
            ControlPlane::Istio { .. } | ControlPlane::Other => String::new(),
        }
    }
}

fn backend_settings(policy: &impl std::fmt::Display, field: &str) -> String {
    format!("in `extProc` of the EnvoyExtensionPolicy{policy} write `backendSettings: {{{field}}}`")
}

/// Returns a fix for a cluster setting that has a field in BackendTrafficPolicy.
fn traffic_policy_fix(setting: &EnvoySetting<'_>) -> Option<String> {
    let policy = |cluster: &EnvoyCluster, field: &str| {
        Some(format!(
            "in a BackendTrafficPolicy for the HTTPRoute{} write `{field}`",
            http_route(cluster)
        ))
    };
    match setting {
        EnvoySetting::WorkerLimits(cluster) => {
            policy(cluster, &format!("circuitBreaker: {BREAKER_LIMITS}"))
        }
        EnvoySetting::WorkerIdleTimeout(cluster) => {
            policy(cluster, "timeout: {http: {connectionIdleTimeout: 4s}}")
        }
        EnvoySetting::Retry(cluster, _) => policy(
            cluster,
            "retry: {numRetries: 5, retryOn: {triggers: [connect-failure, refused-stream, \
            reset-before-request]}}",
        ),
        EnvoySetting::EndpointOverride(cluster, _) => policy(
            cluster,
            &format!(
                "loadBalancer: {{type: LeastRequest, endpointOverride: {{extractFrom: \
                [{{header: {ENDPOINT}}}]}}}}"
            ),
        ),
        _ => None,
    }
}

/// Returns the field of a ClientTrafficPolicy that changes a setting.
fn client_policy_field(setting: &EnvoySetting<'_>) -> Option<String> {
    match setting {
        EnvoySetting::EnvoyHeaders => Some("headers: {enableEnvoyHeaders: true}".to_owned()),
        EnvoySetting::ClientHeaders(names) => Some(format!(
            "headers: {{earlyRequestHeaders: {{remove: [{}]}}}}",
            names.join(", ")
        )),
        EnvoySetting::BodyLimit(length, _) => {
            Some(format!("connection: {{bufferLimit: \"{length}\"}}"))
        }
        EnvoySetting::IdleTimeout(length) => Some(format!(
            "timeout: {{http: {{streamIdleTimeout: {}s}}}}",
            length.as_secs()
        )),
        _ => None,
    }
}
