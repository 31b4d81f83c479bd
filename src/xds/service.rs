//! The discovery service that Envoy calls: the endpoints of clusters, for themselves or within the aggregated service, each in
//! both variants of the protocol. A stream has no task of its own: it is what the connection polls, and ends by drop.

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

use super::assignments::Assignments;
use super::envoys::{Envoys, Seat};
use super::subscription::{MOST_NAMES, Subscription, Word};
use super::variant::{Delta, Received, StateOfTheWorld, Variant, is_ours};

/// The services over the same Envoys.
#[derive(Clone)]
pub struct Discovery {
    envoys: Arc<Envoys>,
    /// Ends the streams, which else would never end.
    closing: CancellationToken,
}

/// Most types of resources of one stream that are logged, and the longest name of a type that is.
const MOST_TYPES: usize = 64;
const LONGEST_TYPE: usize = 256;

type Answers<T> = Pin<Box<dyn Stream<Item = Result<T, Status>> + Send>>;

impl Discovery {
    /// Tells Envoys until `closing`.
    pub fn new(envoys: Arc<Envoys>, closing: CancellationToken) -> Self {
        Self { envoys, closing }
    }

    /// Adds the services to those of a listener.
    pub fn beside(&self, routes: Routes) -> Routes {
        routes
            .add_service(AggregatedDiscoveryServiceServer::new(self.clone()))
            .add_service(EndpointDiscoveryServiceServer::new(self.clone()))
    }

    fn converse<V: Variant>(
        &self,
        requests: Streaming<V::Request>,
    ) -> Response<Answers<V::Response>> {
        let conversation = Conversation::<V> {
            requests,
            news: self.envoys.follow(),
            subscription: Subscription::default(),
            seat: self.envoys.join(V::NAME),
            closing: self.closing.clone(),
            strange: Vec::new(),
        };
        let answers = stream::unfold(conversation, |mut conversation| async {
            let answer = conversation.next().await?;
            Some((answer, conversation))
        });
        Response::new(Box::pin(answers))
    }
}

/// One stream.
struct Conversation<V: Variant> {
    requests: Streaming<V::Request>,
    news: watch::Receiver<Option<Arc<Assignments>>>,
    subscription: Subscription,
    seat: Seat,
    closing: CancellationToken,
    /// What was asked for that we know nothing of.
    strange: Vec<String>,
}

impl<V: Variant> Conversation<V> {
    /// The next answer; `None` where the stream has ended. An error ends the stream.
    async fn next(&mut self) -> Option<Result<V::Response, Status>> {
        loop {
            if let Some(answer) = self.owed() {
                return Some(Ok(answer));
            }
            tokio::select! {
                () = self.closing.cancelled() => return None,
                request = self.requests.message() => match request {
                    Ok(Some(request)) => if let Err(status) = self.hear(V::heard(request)) {
                        return Some(Err(status));
                    },
                    // How it ended is of no interest: Envoy comes back, and says what it has.
                    Ok(None) | Err(_) => return None,
                },
                changed = self.news.changed() => changed.ok()?,
            }
        }
    }

    fn owed(&mut self) -> Option<V::Response> {
        let now = self.news.borrow_and_update().clone()?;
        let answer = self
            .subscription
            .next(&now, V::TELLS_ABSENT)
            .map(|news| V::said(news, now.version));
        if answer.is_some() {
            self.seat.envoys().count("sent");
        } else if self.subscription.wants_something() && self.subscription.is_settled(&now) {
            let before = self.seat.tell(|listener| {
                listener.is_slow = false;
                listener.generation.replace(now.generation)
            });
            if before.is_some_and(|before| before < now.generation) {
                self.seat.envoys().accepted(now.since);
            }
        }
        answer
    }

    fn hear(&mut self, received: Received) -> Result<(), Status> {
        let Received {
            node,
            type_url,
            heard,
        } = received;
        if let Some(node) = node {
            self.seat
                .tell(|listener| (listener.node, listener.node_cluster) = (node.id, node.cluster));
        }
        if !is_ours(&type_url) {
            self.wonder(type_url);
            return Ok(());
        }
        match self.subscription.hear(heard) {
            Word::Asks | Word::Stale => {}
            Word::Accepts => {
                self.seat.envoys().count("accepted");
                self.seat.tell(|listener| listener.refused = None);
            }
            Word::Refuses(reason) => self.refused(reason),
            Word::TooManyNames => {
                self.seat.envoys().count("too_many_names");
                let text = format!("a stream may name {MOST_NAMES} clusters, with 1 MiB of names");
                warn!(
                    node = self.seat.tell(|listener| listener.node.clone()),
                    reason = text,
                    "xDS stream refused"
                );
                return Err(Status::resource_exhausted(text));
            }
        }
        self.note_clusters();
        Ok(())
    }

    /// Envoy goes on with what it has; there is nothing that could be told otherwise before the fleet changes.
    fn refused(&self, reason: String) {
        self.seat.envoys().count("refused");
        self.seat.tell(|listener| {
            warn!(
                node = listener.node,
                reason, "an Envoy cannot use the endpoints that it was told; it keeps those it has"
            );
            listener.refused = Some(reason);
        });
    }

    fn note_clusters(&mut self) {
        let clusters: Vec<String> = self.subscription.names().map(str::to_owned).collect();
        let now = self.news.borrow().clone();
        let is_unknown = |name: &&String| {
            *name != "*"
                && now
                    .as_ref()
                    .is_some_and(|now| !now.clusters.contains_key(*name))
        };
        let unknown: Vec<String> = clusters.iter().filter(is_unknown).cloned().collect();
        self.seat.tell(|listener| {
            let news = listener.clusters != clusters;
            if news && !unknown.is_empty() {
                warn!(
                    node = listener.node,
                    clusters = unknown.join(", "),
                    "an Envoy asks for clusters that we do not know"
                );
            } else if news {
                info!(
                    node = listener.node,
                    clusters = clusters.join(", "),
                    "an Envoy asks for endpoints"
                );
            }
            (listener.clusters, listener.unknown) = (clusters, unknown);
        });
    }

    /// Somebody else has to tell Envoy of these; it goes on without after its `initial_fetch_timeout`.
    fn wonder(&mut self, type_url: String) {
        let can_be_logged = self.strange.len() < MOST_TYPES && type_url.len() <= LONGEST_TYPE;
        if can_be_logged && !self.strange.contains(&type_url) {
            self.seat.tell(|listener| {
                warn!(
                    node = listener.node,
                    type_url,
                    "an Envoy asks for something else than endpoints, which we do not have"
                );
            });
            self.strange.push(type_url);
        }
    }
}

#[tonic::async_trait]
impl AggregatedDiscoveryService for Discovery {
    type StreamAggregatedResourcesStream = Answers<DiscoveryResponse>;
    type DeltaAggregatedResourcesStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_aggregated_resources(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamAggregatedResourcesStream>, Status> {
        Ok(self.converse::<StateOfTheWorld>(request.into_inner()))
    }

    async fn delta_aggregated_resources(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaAggregatedResourcesStream>, Status> {
        Ok(self.converse::<Delta>(request.into_inner()))
    }
}

#[tonic::async_trait]
impl EndpointDiscoveryService for Discovery {
    type StreamEndpointsStream = Answers<DiscoveryResponse>;
    type DeltaEndpointsStream = Answers<DeltaDiscoveryResponse>;

    async fn stream_endpoints(
        &self,
        request: Request<Streaming<DiscoveryRequest>>,
    ) -> Result<Response<Self::StreamEndpointsStream>, Status> {
        Ok(self.converse::<StateOfTheWorld>(request.into_inner()))
    }

    async fn delta_endpoints(
        &self,
        request: Request<Streaming<DeltaDiscoveryRequest>>,
    ) -> Result<Response<Self::DeltaEndpointsStream>, Status> {
        Ok(self.converse::<Delta>(request.into_inner()))
    }

    async fn fetch_endpoints(
        &self,
        _request: Request<DiscoveryRequest>,
    ) -> Result<Response<DiscoveryResponse>, Status> {
        Err(Status::unimplemented(
            "endpoints are told by streams; set `api_type: GRPC` or `DELTA_GRPC`",
        ))
    }
}
