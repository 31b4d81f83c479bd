//! The two xDS protocol variants: state of the world and delta.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::core::v3::{ControlPlane, Node};
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::rpc::Status;
use prost::Name as _;

use super::assignments::{ClusterAssignment, ResourceVersion};
use super::subscription::{EndpointUpdate, SubscriptionChange, SubscriptionRequest};

/// Messages of one variant.
pub(super) trait XdsVariant: Send + 'static {
    type Request: Send + 'static;
    type Response: Send + 'static;
    /// Name in metrics and on the status page.
    const NAME: &'static str;
    /// True if responses list requested resources that do not exist.
    const REPORTS_MISSING: bool;

    fn parse_request(request: Self::Request) -> ReceivedRequest;
    fn build_response(update: EndpointUpdate<'_>, version: ResourceVersion) -> Self::Response;
}

/// A parsed request.
pub(super) struct ReceivedRequest {
    /// Sender. Set only in the first request of a stream.
    pub(super) node: Option<Node>,
    /// Resource type; empty for a service with a single type.
    pub(super) type_url: String,
    pub(super) request: SubscriptionRequest,
}

/// State of the world: each request contains all requested names.
pub(super) struct StateOfTheWorld;

/// Delta: each request contains the change of the requested names.
pub(super) struct DeltaXds;

impl XdsVariant for StateOfTheWorld {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;
    const NAME: &'static str = "state_of_the_world";
    const REPORTS_MISSING: bool = false;

    fn parse_request(message: DiscoveryRequest) -> ReceivedRequest {
        let change = SubscriptionChange::Replace(message.resource_names.into_iter().collect());
        let request = SubscriptionRequest {
            nonce: message.response_nonce,
            error_detail: message.error_detail.map(nack_reason),
            change,
        };
        ReceivedRequest {
            node: message.node,
            type_url: message.type_url,
            request,
        }
    }

    fn build_response(update: EndpointUpdate<'_>, version: ResourceVersion) -> DiscoveryResponse {
        DiscoveryResponse {
            version_info: version.to_string(),
            resources: update
                .clusters
                .into_iter()
                .map(|(_, assignment)| assignment.resource.clone())
                .collect(),
            type_url: ClusterLoadAssignment::type_url(),
            nonce: update.nonce,
            control_plane: Some(control_plane()),
            ..Default::default()
        }
    }
}

impl XdsVariant for DeltaXds {
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;
    const NAME: &'static str = "delta";
    const REPORTS_MISSING: bool = true;

    fn parse_request(message: DeltaDiscoveryRequest) -> ReceivedRequest {
        let change = SubscriptionChange::Delta {
            subscribe: message.resource_names_subscribe,
            unsubscribe: message.resource_names_unsubscribe,
            initial_versions: message
                .initial_resource_versions
                .into_iter()
                .collect::<BTreeMap<_, _>>(),
        };
        let request = SubscriptionRequest {
            nonce: message.response_nonce,
            error_detail: message.error_detail.map(nack_reason),
            change,
        };
        ReceivedRequest {
            node: message.node,
            type_url: message.type_url,
            request,
        }
    }

    fn build_response(
        update: EndpointUpdate<'_>,
        version: ResourceVersion,
    ) -> DeltaDiscoveryResponse {
        let resource = |(name, assignment): (String, &ClusterAssignment)| Resource {
            name,
            version: assignment.version.to_string(),
            resource: Some(assignment.resource.clone()),
            ..Default::default()
        };
        DeltaDiscoveryResponse {
            system_version_info: version.to_string(),
            resources: update.clusters.into_iter().map(resource).collect(),
            removed_resources: update.missing,
            type_url: ClusterLoadAssignment::type_url(),
            nonce: update.nonce,
            control_plane: Some(control_plane()),
            ..Default::default()
        }
    }
}

/// Returns whether the resource type is supported.
pub(super) fn is_endpoint_type(type_url: &str) -> bool {
    type_url.is_empty() || type_url == ClusterLoadAssignment::type_url()
}

fn nack_reason(status: Status) -> String {
    status.message
}

fn control_plane() -> ControlPlane {
    ControlPlane {
        identifier: concat!("warmroute ", env!("CARGO_PKG_VERSION")).to_owned(),
    }
}
