//! The control plane that generated Envoy's configuration. Its users cannot edit that
//! configuration, so a fix names a field of a resource.

use super::dump::ConfigDump;

/// Prefix of cluster names in Istio.
const ISTIO_PREFIX: &str = "outbound|";
/// Prefix of the names of clusters that Envoy AI Gateway generates for endpoint pickers.
const AI_GATEWAY_PREFIX: &str = "envoy.clusters.endpointpicker_";
/// Prefix of the names of clusters that Envoy Gateway generates for endpoint pickers.
const POLICY_PREFIX: &str = "envoyextensionpolicy/";
/// Prefixes of other cluster names in Envoy Gateway.
const ENVOY_GATEWAY_PREFIXES: [&str; 3] = ["httproute/", "grpcroute/", "securitypolicy/"];

/// A control plane, with the names of the resources that a fix may mention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlPlane {
    /// Istio, with the names of the routes that use the filter.
    Istio(Vec<String>),
    /// Envoy Gateway alone.
    EnvoyGateway {
        /// The Gateway of the listener.
        gateway: String,
        /// The EnvoyExtensionPolicy that refers to warmroute.
        policy: String,
    },
    /// Envoy Gateway with Envoy AI Gateway, and the Gateway of the listener.
    EnvoyAiGateway(String),
    /// No control plane, or an unknown one.
    Other,
}

/// Returns namespace and name of a resource, the two segments of a name that follow `skip`
/// segments, as the end of a phrase. It is empty if a generated name does not contain them.
pub(super) fn resource_name(name: &str, skip: usize) -> String {
    let found: Vec<&str> = name.split('/').skip(skip).take(2).collect();
    match found[..] {
        [namespace, name] => format!(" `{namespace}/{name}`"),
        _ => String::new(),
    }
}

/// Names in a generated configuration that identify its control plane.
#[derive(Clone, Debug)]
pub(super) struct GeneratedNames<'a> {
    /// Name of the listener.
    pub(super) listener: &'a str,
    /// Clusters of the gRPC calls to warmroute.
    pub(super) pickers: Vec<&'a str>,
    /// Names of the routes that use the filter.
    pub(super) routes: Vec<&'a str>,
    /// Clusters of all routes.
    pub(super) targets: Vec<&'a str>,
}

impl ControlPlane {
    /// Detects the control plane.
    pub(super) fn detect(dump: &ConfigDump, names: &GeneratedNames<'_>) -> Self {
        let any = |prefix: &str| {
            let mut clusters = names.pickers.iter().chain(&names.targets);
            clusters.any(|name| name.starts_with(prefix))
        };
        // Listeners are named namespace/gateway/listener.
        let gateway = resource_name(names.listener, 0);
        if any(AI_GATEWAY_PREFIX) {
            return Self::EnvoyAiGateway(gateway);
        }
        if any(POLICY_PREFIX) || ENVOY_GATEWAY_PREFIXES.into_iter().any(any) {
            let mut pickers = names.pickers.iter();
            let policy = pickers.find(|name| name.starts_with(POLICY_PREFIX));
            let policy = policy.map_or(String::new(), |name| resource_name(name, 1));
            return Self::EnvoyGateway { gateway, policy };
        }
        if any(ISTIO_PREFIX) || dump.is_istio_proxy {
            let named = names.routes.iter().filter(|name| !name.is_empty());
            let mut routes: Vec<String> = named.map(|&name| name.to_owned()).collect();
            routes.dedup();
            return Self::Istio(routes);
        }
        Self::Other
    }

    /// Returns the name of the product.
    pub(super) fn name(&self) -> &'static str {
        match self {
            Self::Istio(_) => "Istio",
            Self::EnvoyGateway { .. } => "Envoy Gateway",
            Self::EnvoyAiGateway(_) => "Envoy AI Gateway",
            Self::Other => "Envoy",
        }
    }
}
