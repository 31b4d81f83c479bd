//! xDS endpoint discovery as a separate service (EDS) and as part of the aggregated service (ADS),
//! in both protocol variants. The task of the connection polls a stream, and dropping the stream
//! ends it.

use std::pin::Pin;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::aggregated_discovery_service_server::{
    AggregatedDiscoveryService, AggregatedDiscoveryServiceServer,
};
use envoy_types::pb::envoy::service::discovery::v3::{
    DeltaDiscoveryRequest, DeltaDiscoveryResponse, DiscoveryRequest, DiscoveryResponse,
};
use envoy_types::pb::envoy::service::endpoint::v3::endpoint_discovery_service_server::{
    EndpointDiscoveryService, EndpointDiscoveryServiceServer,
};
use futures_util::{Stream, stream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tonic::service::Routes;
use tonic::{Request, Response, Status, Streaming};
use tracing::{info, warn};

use super::assignments::AssignmentSnapshot;
use super::clients::{XdsClientGuard, XdsClients};
use super::subscription::{AckOutcome, EndpointSubscription, MAX_NAMES};
use super::variant::{DeltaXds, ReceivedRequest, StateOfTheWorld, XdsVariant, is_endpoint_type};

/// The xDS services.
#[derive(Clone)]
pub struct XdsService {
    clients: Arc<XdsClients>,
    /// Ends the streams, which would otherwise never end.
    closing: CancellationToken,
}

/// Maximum number of unsupported resource types that are logged for a stream, and maximum length of
/// a logged type.
const MAX_LOGGED_TYPES: usize = 64;
const MAX_LOGGED_TYPE_LEN: usize = 256;

type XdsResponses<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl XdsService {
    /// Creates the services. Their streams end when `closing` is cancelled.
    pub fn new(envoys: Arc<XdsClients>, closing: CancellationToken) -> Self {
        Self {
            clients: envoys,
            closing,
        }
    }

    /// Adds the services to the routes of a listener.
    pub fn add_to(&self, routes: Routes) -> Routes {
        routes
            .add_service(AggregatedDiscoveryServiceServer::new(self.clone()))
            .add_service(EndpointDiscoveryServiceServer::new(self.clone()))
    }

    fn open_stream<V: XdsVariant>(
        &self,
        requests: Streaming<V::Request>,
    ) -> Response<XdsResponses<V::Response>> {
        let xds_stream = XdsStream::<V> {
            requests,
            snapshots: self.clients.subscribe(),
            subscription: EndpointSubscription::default(),
            client: self.clients.register(V::NAME),
            closing: self.closing.clone(),
            unsupported_types: Vec::new(),
        };
        let responses = stream::unfold(xds_stream, |mut xds_stream| async {
            let response = xds_stream.next().await?;
            Some((response, xds_stream))
        });
        Response::new(Box::pin(responses))
    }
}

/// State of one stream.
struct XdsStream<V: XdsVariant> {
    requests: Streaming<V::Request>,
    snapshots: watch::Receiver<Option<Arc<AssignmentSnapshot>>>,
    subscription: EndpointSubscription,
    client: XdsClientGuard,
    closing: CancellationToken,
    /// Requested resource types that are not supported.
    unsupported_types: Vec<String>,
}

impl<V: XdsVariant> XdsStream<V> {
    /// Returns the next response, or `None` at the end of the stream. An error ends the stream.
    async fn next(&mut self) -> Option<Result<V::Response, Status>> {
        loop {
            if let Some(response) = self.next_response() {
                return Some(Ok(response));
            }
            tokio::select! {
                () = self.closing.cancelled() => return None,
                request = self.requests.message() => match request {
                    Ok(Some(request)) => if let Err(status) = self.on_request(V::parse_request(request)) {
                        return Some(Err(status));
                    },
                    // The error does not matter: Envoy reconnects and sends its versions.
                    Ok(None) | Err(_) => return None,
                },
                changed = self.snapshots.changed() => changed.ok()?,
            }
        }
    }

    fn next_response(&mut self) -> Option<V::Response> {
        let now = self.snapshots.borrow_and_update().clone()?;
        let response = self
            .subscription
            .next_update(&now, V::REPORTS_MISSING)
            .map(|update| V::build_response(update, now.version));
        if response.is_some() {
            self.client.clients().count_message("sent");
        } else if self.subscription.has_names() && self.subscription.is_synced(&now) {
            let before = self.client.update(|status| {
                status.is_slow = false;
                status.generation.replace(now.generation)
            });
            if before.is_some_and(|before| before < now.generation) {
                self.client.clients().record_acceptance(now.since);
            }
        }
        response
    }

    fn on_request(&mut self, received: ReceivedRequest) -> Result<(), Status> {
        let ReceivedRequest {
            node,
            type_url,
            request,
        } = received;
        if let Some(node) = node {
            self.client
                .update(|status| (status.node, status.node_cluster) = (node.id, node.cluster));
        }
        if !is_endpoint_type(&type_url) {
            self.on_unsupported_type(type_url);
            return Ok(());
        }
        match self.subscription.on_request(request) {
            AckOutcome::Query | AckOutcome::Stale => {}
            AckOutcome::Ack => {
                self.client.clients().count_message("acked");
                self.client.update(|status| status.rejection = None);
            }
            AckOutcome::Nack(reason) => self.on_nack(reason),
            AckOutcome::TooManyNames => {
                self.client.clients().count_message("too_many_names");
                let text = format!("a stream may name {MAX_NAMES} clusters, with 1 MiB of names");
                warn!(
                    node = self.client.update(|status| status.node.clone()),
                    reason = text,
                    "xDS stream refused"
                );
                return Err(Status::resource_exhausted(text));
            }
        }
        self.update_clusters();
        Ok(())
    }

    /// Handles a rejected response. Envoy continues with its current endpoints until the fleet
    /// changes.
    fn on_nack(&self, reason: String) {
        self.client.clients().count_message("nacked");
        self.client.update(|status| {
            warn!(
                node = status.node,
                reason, "Envoy rejected an endpoint update; its current endpoints stay in use"
            );
            status.rejection = Some(reason);
        });
    }

    fn update_clusters(&mut self) {
        let clusters: Vec<String> = self.subscription.names().map(str::to_owned).collect();
        let now = self.snapshots.borrow().clone();
        let is_unknown = |name: &&String| {
            *name != "*"
                && now
                    .as_ref()
                    .is_some_and(|now| !now.clusters.contains_key(*name))
        };
        let unknown: Vec<String> = clusters.iter().filter(is_unknown).cloned().collect();
        self.client.update(|status| {
            let changed = status.clusters != clusters;
            if changed && !unknown.is_empty() {
                warn!(
                    node = status.node,
                    clusters = unknown.join(", "),
                    "Envoy requested unknown clusters"
                );
            } else if changed {
                info!(
                    node = status.node,
                    clusters = clusters.join(", "),
                    "Envoy subscribed to endpoints"
                );
            }
            (status.clusters, status.unknown) = (clusters, unknown);
        });
    }

    /// Logs an unsupported resource type. Envoy continues without it after `initial_fetch_timeout`.
    fn on_unsupported_type(&mut self, type_url: String) {
        let can_be_logged = self.unsupported_types.len() < MAX_LOGGED_TYPES
            && type_url.len() <= MAX_LOGGED_TYPE_LEN;
        if can_be_logged && !self.unsupported_types.contains(&type_url) {
            self.client.update(|status| {
                warn!(
                    node = status.node,
                    type_url, "Envoy requested an unsupported resource type"
                );
            });
            self.unsupported_types.push(type_url);
        }
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for XdsService {
    type StreamAggregatedResourcesStream = XdsResponses<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = XdsResponses<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Ok(self.open_stream::<StateOfTheWorld>(request.into_inner()))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        Ok(self.open_stream::<DeltaXds>(request.into_inner()))
    }
}

#[tonic::async_trait]
impl EndpointDiscoveryService for XdsService {
    type StreamEndpointsStream = XdsResponses<DiscoveryResponse>;
    type DeltaEndpointsStream = XdsResponses<DeltaDiscoveryResponse>;

    async fn stream_endpoints(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamEndpointsStream>, Status> {
        Ok(self.open_stream::<StateOfTheWorld>(request.into_inner()))
    }

    async fn delta_endpoints(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaEndpointsStream>, Status> {
        Ok(self.open_stream::<DeltaXds>(request.into_inner()))
    }

    async fn fetch_endpoints(
        &self,
        _request: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented(
            "only streaming is supported; set `api_type: GRPC` or `DELTA_GRPC`",
        ))
    }
}
