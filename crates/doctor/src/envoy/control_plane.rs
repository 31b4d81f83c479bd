//! The control plane that generated Envoy's configuration. Its users cannot edit that
//! configuration, so a fix names a field of a resource.

use std::fmt;

use super::dump::ConfigDump;
use super::schema::EnvoyCluster;

/// Prefix of cluster names in Istio.
const ISTIO_PREFIX: &str = "outbound|";
/// Prefix of the names of clusters that Envoy AI Gateway generates for endpoint pickers.
const AI_GATEWAY_PREFIX: &str = "envoy.clusters.endpointpicker_";
/// Prefixes of cluster names in Envoy Gateway.
const ENVOY_GATEWAY_PREFIXES: [&str; 4] = [
    "httproute/",
    "grpcroute/",
    "envoyextensionpolicy/",
    "securitypolicy/",
];

/// A control plane, with the names of the resources that a fix may mention.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ControlPlane {
    /// Istio.
    Istio {
        /// Names of the routes that use the filter.
        routes: Vec<String>,
    },
    /// Envoy Gateway alone.
    EnvoyGateway {
        /// The Gateway of the listener.
        gateway: ResourceName,
        /// The EnvoyExtensionPolicy that refers to warmroute.
        policy: ResourceName,
    },
    /// Envoy Gateway with Envoy AI Gateway.
    EnvoyAiGateway {
        /// The Gateway of the listener.
        gateway: ResourceName,
    },
    /// No control plane, or an unknown one.
    Other,
}

/// Namespace and name of a resource; empty if a generated name does not contain them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct ResourceName(String);

impl ResourceName {
    /// Returns the two segments of a name that follow `skip` segments.
    fn segments(name: &str, skip: usize) -> Self {
        let found: Vec<&str> = name.split('/').skip(skip).take(2).collect();
        Self(if found.len() == 2 {
            found.join("/")
        } else {
            String::new()
        })
    }
}

impl fmt::Display for ResourceName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            Ok(())
        } else {
            write!(f, " `{}`", self.0)
        }
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
            names
                .pickers
                .iter()
                .chain(&names.targets)
                .any(|name| name.starts_with(prefix))
        };
        // Listeners are named namespace/gateway/listener.
        let gateway = ResourceName::segments(names.listener, 0);
        if any(AI_GATEWAY_PREFIX) {
            return Self::EnvoyAiGateway { gateway };
        }
        if ENVOY_GATEWAY_PREFIXES.iter().any(|prefix| any(prefix)) {
            let policy = names
                .pickers
                .iter()
                .find(|name| name.starts_with(ENVOY_GATEWAY_PREFIXES[2]));
            let policy = policy
                .map(|name| ResourceName::segments(name, 1))
                .unwrap_or_default();
            return Self::EnvoyGateway { gateway, policy };
        }
        if any(ISTIO_PREFIX) || dump.is_istio_proxy {
            let mut routes: Vec<String> =
                names.routes.iter().map(|name| (*name).to_owned()).collect();
            routes.retain(|name| !name.is_empty());
            routes.dedup();
            return Self::Istio { routes };
        }
        Self::Other
    }
}

/// Returns the HTTPRoute of an Envoy Gateway cluster.
pub(super) fn http_route(cluster: &EnvoyCluster) -> ResourceName {
    ResourceName::segments(&cluster.name, 1)
}

/// Returns the host of an Istio cluster, whose name is `outbound|port|subset|host`.
pub(super) fn istio_host(cluster: &EnvoyCluster) -> &str {
    cluster.name.rsplit('|').next().unwrap_or(&cluster.name)
}
