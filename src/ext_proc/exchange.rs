//! One HTTP exchange as a pure state machine: Envoy's messages in, effects out, no clock and no I/O. The request side and
//! the response side are two enums, because a worker may answer before the request has ended; each carries what it
//! still owes. The body mode is read in one place per side. In full duplex the header answer is held until the body has
//! ended (or grown past the limit), and afterwards every byte goes back; closing earlier would lose the body silently.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::headers::{self, RequestHead, ResponseHead};
use super::message::{BodyMode, Message, Modes};
use super::mutation::{self, HeaderChanges, Immediate, To};
use crate::intake::Body;
use crate::openai::Api;
use crate::router::Steer;

/// What the outside has to do, in this order.
#[derive(Debug)]
pub enum Effect {
    /// Send this to Envoy.
    Reply(Box<ProcessingResponse>),
    /// Find a worker and call [`Exchange::on_route`].
    Route(Inbound),
    /// The answer began.
    Answered(ResponseHead),
    /// The first token of the answer was seen: the prefill is over.
    FirstToken,
    /// A piece of the answer, for whoever counts tokens.
    Answer(Bytes),
    /// The answer is complete.
    Finished,
}

/// The request as far as it was shown to us.
#[derive(Clone, Debug, PartialEq)]
pub struct Inbound {
    /// Its head.
    pub head: RequestHead,
    /// Its body.
    pub body: Body,
}

/// What the exchange is allowed to do.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Largest request body that is gathered.
    pub body_limit: usize,
    /// Whether the response says which step of the ladder was taken.
    pub mode_header: bool,
    /// Whether the response names the chosen worker rank.
    pub worker_header: bool,
    /// Whether the response tells the prediction.
    pub prediction_header: bool,
    /// Whether the response says in short why.
    pub why_header: bool,
}

/// One HTTP exchange.
#[derive(Debug)]
pub struct Exchange {
    options: Arc<Options>,
    modes: Modes,
    steered: Option<Steer>,
    request: RequestSide,
    response: ResponseSide,
}

#[derive(Debug)]
enum RequestSide {
    /// Nothing came yet.
    Start,
    /// The body is coming.
    Gather { head: RequestHead, body: BytesMut },
    /// A route was asked for; this is owed when it comes.
    Routing(Owed),
    /// Answered; the rest of the body passes through us.
    Relay,
    /// Nothing more to answer.
    Ended,
}

#[derive(Debug)]
enum Owed {
    /// The answer to the headers.
    Headers { head: RequestHead, then: Then },
    /// The answer to the whole body.
    Body,
    /// The answer to the headers, every byte gathered, and what came after that.
    Duplex { head: RequestHead, body: Bytes, more: BytesMut, end: DuplexEnd },
}

/// What follows an answer to the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Then {
    /// Nothing that we see.
    End,
    /// A buffered body that we do not want to see.
    Spare,
    /// A body that passes through us.
    Relay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum DuplexEnd {
    Open,
    Body,
    Trailers,
}

#[derive(Debug)]
enum ResponseSide {
    /// The response has not begun.
    Waiting,
    /// The body comes unseen; its end is the end of the stream.
    Hidden,
    /// The body passes through us.
    Watched { first_token_due: bool },
    /// Complete.
    Ended,
}

impl Options {
    /// What the response says of how the request was routed.
    fn tell(&self, steer: &Steer, changes: &mut HeaderChanges) {
        if self.mode_header {
            changes.set(headers::MODE, steer.mode.as_str().to_owned());
        }
        if let Some(to) = steer.to.filter(|_| self.worker_header) {
            changes.set(headers::WORKER_ID, to.rank.worker.to_string());
            changes.set(headers::DP_RANK, to.rank.rank.to_string());
        }
        if let Some(to) = steer.prefill.filter(|_| self.worker_header) {
            changes.set(headers::PREFILL_ID, to.rank.worker.to_string());
            changes.set(headers::PREFILL_RANK, to.rank.rank.to_string());
        }
        if let Some(tokens) = steer.predicted_cached_tokens.filter(|_| self.prediction_header) {
            changes.set(headers::PREDICTED, tokens.to_string());
        }
        if let Some(why) = steer.why.as_ref().filter(|_| self.why_header) {
            changes.set(headers::WHY, why.to_string());
        }
    }
}

impl Exchange {
    /// An exchange of which nothing is known yet.
    pub fn new(options: Arc<Options>) -> Self {
        let modes = Modes::default();
        Self { options, modes, steered: None, request: RequestSide::Start, response: ResponseSide::Waiting }
    }

    /// Takes over what Envoy says of its configuration, with its first message.
    pub fn configure(&mut self, modes: Modes) {
        // Later on it would change what is owed already.
        if matches!((&self.request, &self.response), (RequestSide::Start, ResponseSide::Waiting)) {
            self.modes = modes;
        }
    }

    /// Whether a route was asked for and has not come.
    pub fn is_routing(&self) -> bool {
        matches!(self.request, RequestSide::Routing(_))
    }

    /// Takes one message.
    pub fn on_message(&mut self, message: Message) -> Vec<Effect> {
        match message {
            Message::RequestHeaders { head, end } => self.on_request_headers(head, end),
            Message::RequestBody { body, end } => self.on_request_body(body, end),
            Message::RequestTrailers => self.on_request_trailers(),
            Message::ResponseHeaders { head, end } => self.on_response_headers(head, end),
            Message::ResponseBody { body, end } => self.on_response_body(body, end),
            Message::ResponseTrailers => self.on_response_trailers(),
        }
    }

    /// Takes the answer to [`Effect::Route`]. Late answers, after the exchange went on without, change nothing.
    pub fn on_route(&mut self, steer: &Steer) -> Vec<Effect> {
        let owed = match std::mem::replace(&mut self.request, RequestSide::Ended) {
            RequestSide::Routing(owed) => owed,
            other => {
                self.request = other;
                return Vec::new();
            }
        };
        self.steered = Some(steer.clone());
        match owed {
            Owed::Headers { head, then } => {
                if then != Then::End {
                    // A spared body comes all the same where `allow_mode_override` is off, and waits for an answer.
                    self.request = RequestSide::Relay;
                }
                let reply = header_answer(&head, steer);
                reply_with(if then == Then::Spare { mutation::without_request_body(reply) } else { reply })
            }
            Owed::Body => {
                // What the client forged was removed in the answer to the headers.
                reply_with(steered(To::RequestBody, HeaderChanges::default(), steer))
            }
            Owed::Duplex { head, body, more, end } => {
                let mut effects = reply_with(header_answer(&head, steer));
                let body_ends = end == DuplexEnd::Body;
                // Without a single byte before the trailers there may have been no body message to answer.
                if !body.is_empty() || (body_ends && more.is_empty()) {
                    effects.extend(mutation::pieces(To::RequestBody, &body, body_ends && more.is_empty()).map(reply));
                }
                if !more.is_empty() {
                    effects.extend(mutation::pieces(To::RequestBody, &more, body_ends).map(reply));
                }
                match end {
                    DuplexEnd::Open => self.request = RequestSide::Relay,
                    DuplexEnd::Body => {}
                    DuplexEnd::Trailers => effects.push(reply(mutation::request_trailers())),
                }
                effects
            }
        }
    }

    /// Takes the other answer to [`Effect::Route`]: there will be no worker, the client gets this.
    pub fn on_immediate(&mut self, answer: &Immediate) -> Vec<Effect> {
        if !self.is_routing() {
            return Vec::new();
        }
        self.request = RequestSide::Ended;
        reply_with(mutation::immediate(answer))
    }

    /// Asks Envoy to wait so long for the route. It listens once only, and where it waits without limit anyway there is
    /// nothing to ask.
    pub fn hold(&self, wait: Duration) -> Option<Effect> {
        let waits = match &self.request {
            RequestSide::Routing(Owed::Headers { .. } | Owed::Body) => true,
            RequestSide::Routing(Owed::Duplex { .. }) => false,
            RequestSide::Start | RequestSide::Gather { .. } | RequestSide::Relay | RequestSide::Ended => false,
        };
        waits.then(|| reply(mutation::hold(wait)))
    }

    fn on_request_headers(&mut self, head: RequestHead, end: bool) -> Vec<Effect> {
        if !matches!(self.request, RequestSide::Start) {
            return Vec::new();
        }
        let inference = Api::of_path(&head.path).is_some_and(Api::wants_body);
        let then = match self.modes.request {
            _ if end => Then::End,
            BodyMode::None => Then::End,
            BodyMode::Streamed => Then::Relay,
            BodyMode::FullDuplex if !inference => {
                let (body, more) = (Bytes::new(), BytesMut::new());
                let owed = Owed::Duplex { head: head.clone(), body, more, end: DuplexEnd::Open };
                self.request = RequestSide::Routing(owed);
                return vec![Effect::Route(Inbound { head, body: Body::Unseen })];
            }
            BodyMode::Buffered | BodyMode::BufferedPartial if !inference => Then::Spare,
            BodyMode::FullDuplex => {
                self.request = RequestSide::Gather { head, body: BytesMut::new() };
                return Vec::new();
            }
            BodyMode::Buffered | BodyMode::BufferedPartial => {
                let changes = HeaderChanges::removing(&head.forged);
                self.request = RequestSide::Gather { head, body: BytesMut::new() };
                return reply_with(mutation::go_on(To::RequestHeaders, changes));
            }
        };
        let body = if end { Body::Absent } else { Body::Unseen };
        self.request = RequestSide::Routing(Owed::Headers { head: head.clone(), then });
        vec![Effect::Route(Inbound { head, body })]
    }

    fn on_request_body(&mut self, chunk: Bytes, end: bool) -> Vec<Effect> {
        match &mut self.request {
            RequestSide::Gather { body, .. } => {
                // A buffered body comes whole, and is not copied.
                if body.is_empty() {
                    *body = chunk.into();
                } else {
                    body.extend_from_slice(&chunk);
                }
                let duplex = self.modes.request == BodyMode::FullDuplex;
                if !duplex || end || body.len() > self.options.body_limit {
                    return self.route_gathered(if end { DuplexEnd::Body } else { DuplexEnd::Open });
                }
                Vec::new()
            }
            RequestSide::Routing(Owed::Duplex { more, end: ended @ DuplexEnd::Open, .. }) => {
                more.extend_from_slice(&chunk);
                if end {
                    *ended = DuplexEnd::Body;
                }
                Vec::new()
            }
            // A configuration that skips the request headers lets the exchange begin with the body.
            RequestSide::Relay | RequestSide::Start => {
                if end {
                    self.request = RequestSide::Ended;
                }
                match self.modes.request {
                    BodyMode::FullDuplex => mutation::pieces(To::RequestBody, &chunk, end).map(reply).collect(),
                    _ => reply_with(mutation::go_on(To::RequestBody, HeaderChanges::default())),
                }
            }
            // A second end of stream, or a body nobody announced.
            RequestSide::Routing(_) | RequestSide::Ended => Vec::new(),
        }
    }

    fn on_request_trailers(&mut self) -> Vec<Effect> {
        match &mut self.request {
            RequestSide::Gather { .. } if self.modes.request == BodyMode::FullDuplex => {
                self.route_gathered(DuplexEnd::Trailers)
            }
            RequestSide::Routing(Owed::Duplex { end, .. }) => {
                *end = DuplexEnd::Trailers;
                Vec::new()
            }
            RequestSide::Routing(_) => Vec::new(),
            // While a buffered body is waited for, trailers mean that there is none.
            RequestSide::Gather { .. } | RequestSide::Start | RequestSide::Relay | RequestSide::Ended => {
                self.request = RequestSide::Ended;
                reply_with(mutation::request_trailers())
            }
        }
    }

    /// Asks for a route with the body gathered so far.
    fn route_gathered(&mut self, end: DuplexEnd) -> Vec<Effect> {
        let RequestSide::Gather { head, body } = std::mem::replace(&mut self.request, RequestSide::Ended) else {
            return Vec::new();
        };
        let body = body.freeze();
        let shown = match body.len() {
            len if len > self.options.body_limit => Body::TooLarge(len),
            _ => Body::Whole(body.clone()),
        };
        self.request = RequestSide::Routing(match self.modes.request {
            BodyMode::FullDuplex => Owed::Duplex { head: head.clone(), body, more: BytesMut::new(), end },
            _ => Owed::Body,
        });
        vec![Effect::Route(Inbound { head, body: shown })]
    }

    fn on_response_headers(&mut self, head: ResponseHead, end: bool) -> Vec<Effect> {
        if !matches!(self.response, ResponseSide::Waiting) {
            return Vec::new();
        }
        if self.is_routing() {
            // Envoy answered by itself; a route that comes later must not be sent.
            self.request = RequestSide::Ended;
        }
        let mut changes = HeaderChanges::default();
        if let Some(steer) = &self.steered {
            self.options.tell(steer, &mut changes);
        }
        let destination = self.steered.as_ref().and_then(|steer| steer.to);
        let answer = mutation::go_on(To::ResponseHeaders, changes);
        if end {
            self.response = ResponseSide::Ended;
            return vec![reply(answer), Effect::Answered(head), Effect::FirstToken, Effect::Finished];
        }
        // Engines send the headers of a stream before they have computed anything, those of a unary answer after all.
        let stream = head.event_stream && destination.is_some();
        let shown = !matches!(self.modes.response, BodyMode::None);
        self.response = match (shown, stream) {
            (false, false) => ResponseSide::Hidden,
            (_, first_token_due) => ResponseSide::Watched { first_token_due },
        };
        let answer = if stream && !shown { mutation::with_response_body(answer, self.modes.request) } else { answer };
        let mut effects = vec![reply(answer), Effect::Answered(head)];
        if !stream {
            effects.push(Effect::FirstToken);
        }
        effects
    }

    fn on_response_body(&mut self, body: Bytes, end: bool) -> Vec<Effect> {
        if matches!(self.response, ResponseSide::Ended) {
            return Vec::new();
        }
        let mut effects: Vec<Effect> = match self.modes.response {
            BodyMode::FullDuplex => mutation::pieces(To::ResponseBody, &body, end).map(reply).collect(),
            _ => reply_with(mutation::go_on(To::ResponseBody, HeaderChanges::default())),
        };
        if let ResponseSide::Watched { first_token_due: due @ true } = &mut self.response
            && !body.is_empty()
        {
            *due = false;
            effects.push(Effect::FirstToken);
        }
        if !body.is_empty() {
            effects.push(Effect::Answer(body));
        }
        if end {
            self.response = ResponseSide::Ended;
            effects.push(Effect::Finished);
        }
        effects
    }

    fn on_response_trailers(&mut self) -> Vec<Effect> {
        let mut effects = reply_with(mutation::response_trailers());
        if !matches!(self.response, ResponseSide::Ended) {
            self.response = ResponseSide::Ended;
            effects.push(Effect::Finished);
        }
        effects
    }
}

fn header_answer(head: &RequestHead, steer: &Steer) -> ProcessingResponse {
    steered(To::RequestHeaders, HeaderChanges::removing(&head.forged), steer)
}

/// Lets a message go on to where the route leads.
fn steered(message: To, mut changes: HeaderChanges, steer: &Steer) -> ProcessingResponse {
    let Some(to) = &steer.to else { return mutation::go_on(message, changes) };
    changes.steer(to);
    if let Some(prefill) = &steer.prefill {
        changes.prefill(prefill);
    }
    mutation::with_destination(mutation::go_on(message, changes), to)
}

fn reply(wire: ProcessingResponse) -> Effect {
    Effect::Reply(Box::new(wire))
}

fn reply_with(wire: ProcessingResponse) -> Vec<Effect> {
    vec![reply(wire)]
}

#[cfg(test)]
mod tests;
