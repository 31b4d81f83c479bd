//! The two variants of the protocol, each as what its messages mean.

use std::collections::BTreeMap;

use envoy_types::pb::envoy::config::core::v3::{ControlPlane, Node};
use envoy_types::pb::envoy::config::endpoint::v3::ClusterLoadAssignment;
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse, Resource,
};
use envoy_types::pb::google::rpc::Status;
use prost::Name as _;

use super::assignments::{Assignment, Version};
use super::subscription::{Heard, News, Wants};

/// Messages of a stream.
pub(super) trait Variant: Send + 'static {
    type Request: Send + 'static;
    type Response: Send + 'static;
    /// As operators know it.
    const NAME: &'static str;
    /// Whether Envoy is told of what we do not know.
    const TELLS_ABSENT: bool;

    fn heard(request: Self::Request) -> Received;
    fn said(news: News<'_>, of: Version) -> Self::Response;
}

/// A request and who sent it.
pub(super) struct Received {
    /// Only told in the first request of a stream.
    pub(super) node: Option<Node>,
    /// What is asked for; empty where the service has only one thing to tell.
    pub(super) type_url: String,
    pub(super) heard: Heard,
}

/// Each request names all that is wanted.
pub(super) struct StateOfTheWorld;

/// Each request names what is wanted otherwise.
pub(super) struct Delta;

impl Variant for StateOfTheWorld {
    type Request = DiscoveryRequest;
    type Response = DiscoveryResponse;
    const NAME: &'static str = "state_of_the_world";
    const TELLS_ABSENT: bool = false;

    fn heard(request: DiscoveryRequest) -> Received {
        let wants = Wants::Exactly(request.resource_names.into_iter().collect());
        let heard = Heard {
            nonce: request.response_nonce,
            refusal: request.error_detail.map(reason),
            wants,
        };
        Received {
            node: request.node,
            type_url: request.type_url,
            heard,
        }
    }

    fn said(news: News<'_>, of: Version) -> DiscoveryResponse {
        DiscoveryResponse {
            version_info: of.to_string(),
            resources: news
                .clusters
                .into_iter()
                .map(|(_, assignment)| assignment.resource.clone())
                .collect(),
            type_url: ClusterLoadAssignment::type_url(),
            nonce: news.nonce,
            control_plane: Some(ourselves()),
            ..Default::default()
        }
    }
}

impl Variant for Delta {
    type Request = DeltaDiscoveryRequest;
    type Response = DeltaDiscoveryResponse;
    const NAME: &'static str = "delta";
    const TELLS_ABSENT: bool = true;

    fn heard(request: DeltaDiscoveryRequest) -> Received {
        let wants = Wants::Change {
            more: request.resource_names_subscribe,
            less: request.resource_names_unsubscribe,
            has: request
                .initial_resource_versions
                .into_iter()
                .collect::<BTreeMap<_, _>>(),
        };
        let heard = Heard {
            nonce: request.response_nonce,
            refusal: request.error_detail.map(reason),
            wants,
        };
        Received {
            node: request.node,
            type_url: request.type_url,
            heard,
        }
    }

    fn said(news: News<'_>, of: Version) -> DeltaDiscoveryResponse {
        let resource = |(name, assignment): (String, &Assignment)| Resource {
            name,
            version: assignment.version.to_string(),
            resource: Some(assignment.resource.clone()),
            ..Default::default()
        };
        DeltaDiscoveryResponse {
            system_version_info: of.to_string(),
            resources: news.clusters.into_iter().map(resource).collect(),
            removed_resources: news.absent,
            type_url: ClusterLoadAssignment::type_url(),
            nonce: news.nonce,
            control_plane: Some(ourselves()),
            ..Default::default()
        }
    }
}

/// The type of resource that we know.
pub(super) fn is_ours(type_url: &str) -> bool {
    type_url.is_empty() || type_url == ClusterLoadAssignment::type_url()
}

fn reason(status: Status) -> String {
    status.message
}

fn ourselves() -> ControlPlane {
    ControlPlane {
        identifier: concat!("warmroute ", env!("CARGO_PKG_VERSION")).to_owned(),
    }
}
