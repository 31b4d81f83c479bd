//! One HTTP exchange as a pure state machine: Envoy's messages in, effects out, no clock and no I/O. The request side and
//! the response side are two enums, because a worker may answer before the request has ended; each carries what it
//! still owes. The body mode is read in one place per side. In full duplex the header answer is held until the body has
//! ended (or grown past the limit, or taken too long), and afterwards every byte goes back; closing earlier would lose the
//! body silently.

mod options;
mod request;
mod response;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::headers::{RequestHead, ResponseHead};
use super::message::{Message, Modes};
use super::metadata::Told;
use super::mutation::{self, Immediate};
use crate::intake::Body;
use crate::router::Steer;
use crate::schedule::Subset;
use crate::worker::Endpoint;

pub use options::{Answers, Options, ServingWorker, Start};
use request::RequestSide;
use response::ResponseSide;

/// What the outside has to do, in this order.
#[derive(Debug)]
pub enum Effect {
    /// Send this to Envoy.
    Reply(Box<ProcessingResponse>),
    /// Find a worker and call [`Exchange::on_route`].
    Route(Inbound),
    /// The answer began.
    Answered(ResponseHead),
    /// The first token of the answer came: the prefill is over.
    FirstToken {
        /// Whether it was seen, and not only taken to come with the headers.
        seen: bool,
    },
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
    /// The only endpoints that will do.
    pub subset: Option<Subset>,
    /// The only pool whose workers may serve the request, by the metadata or the authority of the call.
    pub pool: Option<Arc<str>>,
}

/// The answer to [`Effect::Route`]: where to, and what else changes on the way.
#[derive(Clone, Debug, PartialEq)]
pub struct Directions {
    /// Where to.
    pub steer: Steer,
    /// What goes on in place of the body that came; only where all of it was shown.
    pub edit: Option<Edit>,
    /// Who gets a copy of the request.
    pub copy: Option<Copied>,
    /// The answer's headers come together with its first token.
    pub first_token_with_headers: bool,
}

/// Who gets a copy of a request, by the gateway.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copied {
    /// The gateway's cluster.
    pub cluster: Arc<str>,
    /// Who of it.
    pub to: Endpoint,
}

/// A change of the body.
#[derive(Clone, Debug, PartialEq)]
pub struct Edit {
    /// The body that goes on.
    pub body: Bytes,
    /// What has to be changed back in the answer.
    pub restore: Option<Renamed>,
}

impl Edit {
    /// The same with another body in place of what there was.
    pub(super) fn with(before: Option<Self>, body: Option<Bytes>) -> Option<Self> {
        let Some(body) = body else { return before };
        Some(Self {
            body,
            restore: before.and_then(|edit| edit.restore),
        })
    }
}

/// A model that is served under another name than the client asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Renamed {
    /// As the engine calls it.
    pub served: String,
    /// As the client does.
    pub asked: String,
}

impl From<Steer> for Directions {
    fn from(steer: Steer) -> Self {
        Self {
            steer,
            edit: None,
            copy: None,
            first_token_with_headers: false,
        }
    }
}

/// One HTTP exchange.
#[derive(Debug)]
pub struct Exchange {
    context: Context,
    request: RequestSide,
    response: ResponseSide,
}

/// What both sides look at.
#[derive(Debug)]
struct Context {
    options: Arc<Options>,
    start: Start,
    modes: Modes,
    subset: Option<Subset>,
    pool: Option<String>,
    directions: Option<Directions>,
    /// The worker that sent the response, if it is not the chosen one.
    served_by: Option<ServingWorker>,
}

impl Context {
    fn inbound(&self, head: RequestHead, body: Body) -> Effect {
        let pool = self
            .pool
            .as_deref()
            .map(Arc::from)
            .or_else(|| self.start.pool.clone());
        Effect::Route(Inbound {
            head,
            body,
            subset: self.subset.clone(),
            pool,
        })
    }
}

impl Exchange {
    /// An exchange of which nothing is known yet.
    pub fn new(options: Arc<Options>, start: Start) -> Self {
        let modes = options.assumed;
        Self {
            context: Context {
                options,
                start,
                modes,
                subset: None,
                pool: None,
                directions: None,
                served_by: None,
            },
            request: RequestSide::Start,
            response: ResponseSide::Waiting,
        }
    }

    /// Takes over what Envoy says of its configuration, with its first message.
    pub fn configure(&mut self, modes: Modes) {
        // Later on it would change what is owed already.
        if matches!(
            (&self.request, &self.response),
            (RequestSide::Start, ResponseSide::Waiting)
        ) {
            self.context.modes = modes;
        }
    }

    /// Takes over what the gateway says beside a message.
    pub fn hear(&mut self, told: Told) {
        if told.subset.is_some() {
            self.context.subset = told.subset;
        }
        if told.pool.is_some() {
            self.context.pool = told.pool;
        }
    }

    /// How bodies travel.
    pub fn modes(&self) -> Modes {
        self.context.modes
    }

    /// Whether a route was asked for and has not come.
    pub fn is_routing(&self) -> bool {
        matches!(self.request, RequestSide::Routing(_))
    }

    /// Whether the request's body is gathered here, so that nobody else watches how long that takes.
    pub fn is_gathering(&self) -> bool {
        self.request.is_gathering(&self.context)
    }

    /// Whether the first token is still to be seen by somebody else than us.
    pub fn awaits_first_token(&self) -> bool {
        self.response.awaits_first_token()
    }

    /// Bytes of the request that are held here.
    pub fn held(&self) -> usize {
        self.request.held()
    }

    /// Takes one message.
    pub fn on_message(&mut self, message: Message) -> Vec<Effect> {
        let context = &self.context;
        match message {
            Message::RequestHeaders { head, end } => self.request.on_headers(context, head, end),
            Message::RequestBody(piece) => self.request.on_body(context, piece),
            Message::RequestTrailers => self.request.on_trailers(context),
            Message::ResponseHeaders { head, end } => {
                // Where Envoy answered by itself, a route that comes later must not be sent.
                self.request.stop_routing();
                self.response.on_headers(context, head, end)
            }
            Message::ResponseBody(piece) => self.response.on_body(context, piece),
            Message::ResponseTrailers => self.response.on_trailers(context),
        }
    }

    /// The body takes too long, or there is no room for more of it: goes on with what has come.
    pub fn on_deadline(&mut self) -> Vec<Effect> {
        self.request.on_deadline(&self.context)
    }

    /// Handles a message that exceeds the size limit. No message follows it. `None` if the stream must not end without an error,
    /// because Envoy sends only the bytes that it gets back.
    pub fn on_oversize_message(&mut self) -> Option<Vec<Effect>> {
        let effects = self.request.on_oversize_body(&self.context);
        let Modes { request, response } = self.context.modes;
        let request_bytes = request.is_sent_back() && !self.request.has_ended();
        let is_lost = effects.is_empty()
            && (self.request.awaits_route() || request_bytes || response.is_sent_back());
        (!is_lost).then_some(effects)
    }

    /// The first token was seen elsewhere.
    pub fn on_first_token(&mut self) -> Vec<Effect> {
        self.response.on_first_token()
    }

    /// Takes the answer to [`Effect::Route`]. Late answers, after the exchange went on without, change nothing.
    pub fn on_route(&mut self, directions: impl Into<Directions>) -> Vec<Effect> {
        if !self.is_routing() {
            return Vec::new();
        }
        let directions = directions.into();
        let effects = self.request.on_route(&self.context, &directions);
        self.context.directions = Some(directions);
        effects
    }

    /// Takes the other answer to [`Effect::Route`]: there will be no worker, the client gets this.
    pub fn on_immediate(&mut self, answer: &Immediate) -> Vec<Effect> {
        if !self.is_routing() {
            return Vec::new();
        }
        self.request = RequestSide::Ended;
        reply_with(mutation::immediate(answer))
    }

    /// Whatever Envoy waits for, it will not come: the client gets this, if nothing has begun.
    pub fn on_give_up(&mut self, answer: &Immediate) -> Vec<Effect> {
        if !matches!(self.response, ResponseSide::Waiting) {
            return Vec::new();
        }
        self.request = RequestSide::Ended;
        self.response = ResponseSide::Ended;
        reply_with(mutation::immediate(answer))
    }

    /// Records that another worker than the chosen one sent the response. Called before the response headers are handled,
    /// because they name the worker.
    pub fn on_served_elsewhere(&mut self, by: ServingWorker) {
        self.context.served_by = Some(by);
    }

    /// Asks Envoy to wait so long for the route. It listens once only, and where it waits without limit anyway there is
    /// nothing to ask.
    pub fn hold(&self, wait: Duration) -> Option<Effect> {
        self.request
            .is_waited_for()
            .then(|| reply(mutation::hold(wait)))
    }
}

fn reply(wire: ProcessingResponse) -> Effect {
    Effect::Reply(Box::new(wire))
}

fn reply_with(wire: ProcessingResponse) -> Vec<Effect> {
    vec![reply(wire)]
}

#[cfg(test)]
mod tests;
