//! The gRPC service: one task per stream feeds the exchange and carries out its effects. The reservation is a value of
//! that task, so that whatever ends the stream (the answer's end, the client, Envoy, us) releases the load by drop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessor;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse, processing_request};
use tokio::sync::{mpsc, oneshot};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::trace;

use super::exchange::{Effect, Exchange, Inbound, Options};
use super::message::Message;
use super::pipeline::{Pipeline, Routed};
use super::record::Record;
use crate::metrics::Metrics;

/// Replies that may wait for Envoy to take them; beyond it we stop reading, which is what flow control is for.
const REPLIES: usize = 16;

type Replies = mpsc::Sender<Result<ProcessingResponse, Status>>;

/// The ext_proc service.
#[derive(Clone)]
pub struct Service {
    pipeline: Arc<Pipeline>,
    metrics: Arc<Metrics>,
    options: Arc<Options>,
}

impl Service {
    /// A service over the request path.
    pub fn new(pipeline: Arc<Pipeline>, metrics: Arc<Metrics>, options: Options) -> Self {
        Self { pipeline, metrics, options: Arc::new(options) }
    }
}

#[tonic::async_trait]
impl ExternalProcessor for Service {
    type ProcessStream = ReceiverStream<Result<ProcessingResponse, Status>>;

    async fn process(
        &self,
        request: Request<Streaming<ProcessingRequest>>,
    ) -> Result<Response<Self::ProcessStream>, Status> {
        let (replies, outgoing) = mpsc::channel(REPLIES);
        let stream = Stream::new(self, request.into_inner(), replies);
        tokio::spawn(stream.run());
        Ok(Response::new(ReceiverStream::new(outgoing)))
    }
}

/// Messages that are read ahead while a route is looked for; beyond it Envoy has to wait.
const EARLY: usize = 64;

/// How much longer than a request may wait Envoy is asked to wait for it.
const HOLD_MARGIN: Duration = Duration::from_millis(500);

/// One HTTP exchange.
struct Stream {
    service: Service,
    incoming: Streaming<ProcessingRequest>,
    replies: Replies,
    exchange: Exchange,
    record: Record,
}

/// The stream is over, for whichever of the reasons that all mean the same.
struct Closed;

impl Stream {
    fn new(service: &Service, incoming: Streaming<ProcessingRequest>, replies: Replies) -> Self {
        Self {
            service: service.clone(),
            incoming,
            replies,
            exchange: Exchange::new(service.options.clone()),
            record: Record::open(service.metrics.clone(), service.pipeline.router().clone()),
        }
    }

    async fn run(mut self) {
        // Messages that came while a route was looked for.
        let mut early = VecDeque::new();
        loop {
            let next = match early.pop_front() {
                Some(message) => Ok(message),
                None => receive(&mut self.incoming, &self.replies).await,
            };
            let Ok(message) = next else { return };
            if self.take(message, &mut early).await.is_err() {
                return;
            }
        }
    }

    async fn take(&mut self, wire: ProcessingRequest, early: &mut VecDeque<ProcessingRequest>) -> Result<(), Closed> {
        let (modes, message) = Message::read(wire);
        if let Some(modes) = modes {
            self.exchange.configure(modes);
        }
        let Some(message) = message else { return Ok(()) };
        let mut effects: VecDeque<Effect> = self.exchange.on_message(message).into();
        while let Some(effect) = effects.pop_front() {
            match effect {
                Effect::Reply(reply) => self.replies.send(Ok(*reply)).await.map_err(|_| Closed)?,
                Effect::Route(inbound) => match self.route(inbound, early).await? {
                    None => {}
                    Some(Routed::Answered(answer)) => {
                        effects.extend(self.exchange.on_immediate(&answer));
                        self.record.own_answer();
                    }
                    Some(Routed::Steered { steer, admitted }) => {
                        effects.extend(self.exchange.on_route(&steer));
                        self.record.routed(admitted);
                    }
                },
                Effect::Answered(head) => self.record.answered(head),
                Effect::FirstToken => self.record.first_token(),
                Effect::Answer(chunk) => self.record.answer(&chunk),
                Effect::Finished => self.record.finished(),
            }
        }
        Ok(())
    }

    /// Looks for a route while watching the stream: a client that leaves meanwhile leaves nothing booked. `None` when
    /// Envoy began to answer by itself meanwhile, so that no route is wanted any longer.
    async fn route(
        &mut self,
        inbound: Inbound,
        early: &mut VecDeque<ProcessingRequest>,
    ) -> Result<Option<Routed>, Closed> {
        let pipeline = self.service.pipeline.clone();
        let (tell, mut told) = oneshot::channel();
        let route = pipeline.route(&inbound, move |wait| _ = tell.send(wait));
        tokio::pin!(route);
        let mut holding = false;
        loop {
            let room = early.len() < EARLY;
            tokio::select! {
                biased;
                routed = &mut route => return Ok(Some(routed)),
                Ok(wait) = &mut told, if !holding => {
                    holding = true;
                    self.hold(wait).await?;
                }
                () = self.replies.closed(), if !room => return Err(Closed),
                message = receive(&mut self.incoming, &self.replies), if room => {
                    early.push_back(message?);
                    if early.back().is_some_and(begins_response) {
                        return Ok(None);
                    }
                }
            }
        }
    }

    /// Asks Envoy, once, to wait until the request has had its turn; a little longer, so that our answer is there first.
    async fn hold(&self, wait: Duration) -> Result<(), Closed> {
        match self.exchange.hold(wait + HOLD_MARGIN) {
            Some(Effect::Reply(reply)) => self.replies.send(Ok(*reply)).await.map_err(|_| Closed),
            _ => Ok(()),
        }
    }
}

/// The next message. A stream that ends, fails or is no longer listened to is over: Envoy closes in any of these ways when
/// the response has ended or the client has gone, so none of them is an error.
async fn receive(incoming: &mut Streaming<ProcessingRequest>, replies: &Replies) -> Result<ProcessingRequest, Closed> {
    tokio::select! {
        () = replies.closed() => Err(Closed),
        message = incoming.message() => match message {
            Ok(Some(message)) => Ok(message),
            Ok(None) => Err(Closed),
            Err(status) => {
                trace!(%status, "stream closed");
                Err(Closed)
            }
        },
    }
}

fn begins_response(wire: &ProcessingRequest) -> bool {
    matches!(wire.request, Some(processing_request::Request::ResponseHeaders(_)))
}
