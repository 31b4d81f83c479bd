//! The control plane that generated Envoy's configuration. Its users cannot edit that
//! configuration, so a fix names a field of a resource.

use super::cluster::EnvoyCluster;
use super::dump::{ConfigDump, HttpListener};
use super::site::{ActiveRoute, action_clusters};

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

impl ControlPlane {
    /// Detects the control plane of a listener by the clusters that its filter calls, and by those
    /// of its routes.
    pub(super) fn detect(
        dump: &ConfigDump,
        listener: &HttpListener,
        pickers: &[&str],
        active: &[ActiveRoute<'_>],
    ) -> Self {
        let targets = target_clusters(dump, listener);
        let any = |prefix: &str| {
            let mut clusters = pickers.iter().chain(&targets);
            clusters.any(|name| name.starts_with(prefix))
        };
        // Listeners are named namespace/gateway/listener.
        let gateway = resource_name(&listener.name, 0);
        if any(AI_GATEWAY_PREFIX) {
            return Self::EnvoyAiGateway(gateway);
        }
        if any(POLICY_PREFIX) || ENVOY_GATEWAY_PREFIXES.into_iter().any(any) {
            let policy = pickers.iter().find(|name| name.starts_with(POLICY_PREFIX));
            let policy = policy.map_or(String::new(), |name| resource_name(name, 1));
            return Self::EnvoyGateway { gateway, policy };
        }
        if any(ISTIO_PREFIX) || dump.is_istio_proxy {
            let names = active.iter().flat_map(ActiveRoute::routes);
            let names = names.filter_map(|route| route.given_text("name"));
            let mut routes: Vec<String> = names.map(str::to_owned).collect();
            routes.retain(|name| !name.is_empty());
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

/// Returns the clusters of all routes, or every cluster if the dump does not contain the routes.
fn target_clusters<'d>(dump: &'d ConfigDump, listener: &'d HttpListener) -> Vec<&'d str> {
    let Some(routes) = listener.routes() else {
        return dump.clusters().map(EnvoyCluster::name).collect();
    };
    let hosts = routes.items("virtual_hosts");
    let routes = hosts.flat_map(|host| host.items("routes"));
    routes.flat_map(action_clusters).collect()
}
