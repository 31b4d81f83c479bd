//! The gRPC service: one task per stream feeds the exchange and carries out its effects. The reservation is a value of
//! that task, so that whatever ends the stream (the answer's end, the client, Envoy, us) releases the load by drop.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Instant;

use envoy_types::pb::envoy::service::ext_proc::v3::external_processor_server::ExternalProcessor;
use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse, processing_request};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status, Streaming};
use tracing::trace;

use super::exchange::{Effect, Exchange, Inbound, Options};
use super::message::Message;
use super::pipeline::{Pipeline, Routed};
use crate::load::Reservation;
use crate::metrics::{Metrics, ModelLabel, OutcomeLabel};
use crate::openai::usage::UsageScanner;
use crate::router::Route;

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
            record: Record::open(service.metrics.clone()),
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
                Effect::Route(inbound) => {
                    let Some(routed) = self.route(inbound, early).await? else { continue };
                    effects.extend(self.exchange.on_route(&routed.steer));
                    self.record.routed(routed);
                }
                Effect::Status(status) => self.record.status = status,
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
        let route = pipeline.route(inbound);
        tokio::pin!(route);
        loop {
            let room = early.len() < EARLY;
            tokio::select! {
                biased;
                routed = &mut route => return Ok(Some(routed)),
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

/// What one exchange holds and what is noted of it when it ends.
struct Record {
    metrics: Arc<Metrics>,
    arrived: Instant,
    booked: Option<(Route, Reservation)>,
    label: Option<ModelLabel>,
    usage: UsageScanner,
    status: u16,
    end: End,
}

/// How far the exchange came.
#[derive(Clone, Copy, PartialEq, Eq)]
enum End {
    /// The answer has not begun.
    Abandoned,
    /// The answer had begun and its body was not shown to us: it ended, or the client left.
    Closed,
    /// The answer's end was seen.
    Complete,
}

impl Record {
    fn open(metrics: Arc<Metrics>) -> Self {
        metrics.exchanges_open.inc();
        let usage = UsageScanner::default();
        Self { metrics, arrived: Instant::now(), booked: None, label: None, usage, status: 0, end: End::Abandoned }
    }

    fn routed(&mut self, routed: Routed) {
        self.label = routed.booked.as_ref().map(|(route, _)| ModelLabel::from(&route.model));
        self.booked = routed.booked;
    }

    fn first_token(&mut self) {
        self.end = self.end_at_least(End::Closed);
        if let Some((_, reservation)) = &mut self.booked {
            reservation.first_token();
        }
        // An error has no first token.
        if let Some(label) = self.label.as_ref().filter(|_| (200..300).contains(&self.status)) {
            let took = self.arrived.elapsed().as_secs_f64();
            self.metrics.time_to_first_token_seconds.get_or_create(label).observe(took);
        }
    }

    fn answer(&mut self, chunk: &[u8]) {
        self.usage.push(chunk);
    }

    /// The answer is complete: nothing is booked any longer, though Envoy may keep the stream a little.
    fn finished(&mut self) {
        self.end = End::Complete;
        self.booked = None;
        self.note_duration();
        // The last event may lack its empty line.
        self.usage.finish();
    }

    fn note_duration(&self) {
        let Some(label) = &self.label else { return };
        let took = self.arrived.elapsed().as_secs_f64();
        self.metrics.request_duration_seconds.get_or_create(label).observe(took);
    }

    fn end_at_least(&self, end: End) -> End {
        if self.end == End::Complete { End::Complete } else { end }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        self.booked = None;
        self.metrics.exchanges_open.dec();
        let outcome = match self.end {
            End::Abandoned => "abandoned",
            End::Closed => "closed",
            End::Complete => "complete",
        };
        self.metrics.exchanges.get_or_create(&OutcomeLabel { outcome }).inc();
        if self.end == End::Closed {
            self.note_duration();
        }
        let Some(label) = &self.label else { return };
        let usage = self.usage.usage();
        let output = usage.map_or(self.usage.content_events(), |usage| usage.completion_tokens);
        if output > 0 {
            self.metrics.output_tokens.get_or_create(label).observe(output as f64);
        }
        if let Some(cached) = usage.and_then(|usage| usage.cached_tokens) {
            self.metrics.delivered_cached_tokens.get_or_create(label).inc_by(cached);
        }
    }
}
