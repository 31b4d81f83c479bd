//! One HTTP exchange as a pure state machine: Envoy's messages in, effects out, no clock and no
//! I/O. The request side and the response side are separate enums, because a worker may respond
//! before the request has ended. Each state contains the replies that are still due. In full-duplex
//! mode the reply to the headers is held until the body has ended, has exceeded the limit, or has
//! timed out. Afterwards, every byte is returned to Envoy: closing the stream earlier would
//! silently lose the body.
//!
//! Decision 0001.

mod context;
mod effect;
mod options;
mod request;
mod request_body;
mod request_reply;
mod response;

use std::sync::Arc;
use std::time::Duration;

use super::message::{BodyModes, ExchangeMessage, is_sent_back};
use super::metadata::GatewayMetadata;
use super::mutation;
use super::reply::{ImmediateReply, RouteReply};
use super::response_content::ContentReport;

use context::ExchangeContext;
pub use effect::{Effect, InboundRequest};
use effect::{reply_effect, reply_effects};
pub use options::{ExchangeOptions, ExchangeStart, ServingWorker};
use request::RequestSide;
use response::ResponseSide;

/// One HTTP exchange.
#[derive(Debug)]
pub struct Exchange {
    context: ExchangeContext,
    request: RequestSide,
    response: ResponseSide,
}

impl Exchange {
    /// Creates an exchange that has received no message.
    pub fn new(options: Arc<ExchangeOptions>, start: ExchangeStart) -> Self {
        Self {
            context: ExchangeContext::new(options, start),
            request: RequestSide::Start,
            response: ResponseSide::Waiting,
        }
    }

    /// Applies the body modes that Envoy reports with its first message.
    pub fn configure(&mut self, modes: BodyModes) {
        // A later change would contradict the replies that are already due.
        if matches!(
            (&self.request, &self.response),
            (RequestSide::Start, ResponseSide::Waiting)
        ) {
            self.context.modes = modes;
        }
    }

    /// Applies the gateway's metadata from a message.
    pub fn apply_metadata(&mut self, metadata: GatewayMetadata) {
        if metadata.subset.is_some() {
            self.context.subset = metadata.subset;
        }
        if metadata.pool.is_some() {
            self.context.pool = metadata.pool;
        }
    }

    /// Returns the body modes of both directions.
    pub fn modes(&self) -> BodyModes {
        self.context.modes
    }

    /// Returns whether a route was requested and has not been received.
    pub fn is_routing(&self) -> bool {
        matches!(self.request, RequestSide::Routing(_))
    }

    /// Returns whether the request body is being buffered in full-duplex mode, in which Envoy has
    /// no timeout for it.
    pub fn is_gathering(&self) -> bool {
        self.request.is_gathering(&self.context)
    }

    /// Returns the number of buffered request bytes.
    pub fn buffered_bytes(&self) -> usize {
        self.request.buffered_bytes()
    }

    /// Handles one message.
    pub fn on_message(&mut self, message: ExchangeMessage) -> Vec<Effect> {
        let context = &self.context;
        match message {
            ExchangeMessage::RequestHeaders {
                head,
                end_of_stream: end,
            } => self.request.on_headers(context, head, end),
            ExchangeMessage::RequestBody(piece) => self.request.on_body(context, piece),
            ExchangeMessage::RequestTrailers => self.request.on_trailers(context),
            ExchangeMessage::ResponseHeaders {
                head,
                end_of_stream: end,
            } => {
                // Envoy has responded itself. A route must not be sent any more.
                self.request.cancel_routing();
                self.response.on_headers(context, head, end)
            }
            ExchangeMessage::ResponseBody(piece) => self.response.on_body(context, piece),
            ExchangeMessage::ResponseTrailers => self.response.on_trailers(context),
        }
    }

    /// Routes with the bytes received so far, because the body is late or the budget for bodies is
    /// exhausted.
    pub fn on_deadline(&mut self) -> Vec<Effect> {
        self.request.on_deadline(&self.context)
    }

    /// Handles a message that exceeds the size limit. No message follows it. Returns `None` if the
    /// stream must end with an error, because Envoy forwards only the bytes that are returned to
    /// it.
    pub fn on_oversize_message(&mut self) -> Option<Vec<Effect>> {
        let effects = self.request.on_oversize_body(&self.context);
        let BodyModes { request, response } = self.context.modes;
        let request_bytes = is_sent_back(request) && !self.request.has_ended();
        let is_lost = effects.is_empty()
            && (self.request.awaits_route() || request_bytes || is_sent_back(response));
        (!is_lost).then_some(effects)
    }

    /// Returns whether this filter observes the response body and has seen no content.
    pub fn observes_no_content(&self) -> bool {
        self.response.observes_no_content()
    }

    /// Handles the report of the probe filter about the response body.
    pub fn on_content_report(&mut self, report: ContentReport) -> Vec<Effect> {
        self.response.on_content_report(report)
    }

    /// Handles the answer to [`Effect::Route`]. A route that is not awaited any more has no effect.
    pub fn on_route(&mut self, route_reply: impl Into<RouteReply>) -> Vec<Effect> {
        if !self.is_routing() {
            return Vec::new();
        }
        let route_reply = route_reply.into();
        let effects = self.request.on_route(&self.context, &route_reply);
        self.context.route_reply = Some(route_reply);
        effects
    }

    /// Handles the other answer to [`Effect::Route`]: the client receives `response`, and no worker
    /// is chosen.
    pub fn on_immediate(&mut self, response: &ImmediateReply) -> Vec<Effect> {
        if !self.is_routing() {
            return Vec::new();
        }
        self.request = RequestSide::Ended;
        reply_effects(mutation::immediate_response(response))
    }

    /// Ends the exchange with `response`, unless the worker's response has begun.
    pub fn on_abort(&mut self, response: &ImmediateReply) -> Vec<Effect> {
        if !matches!(self.response, ResponseSide::Waiting) {
            return Vec::new();
        }
        self.request = RequestSide::Ended;
        self.response = ResponseSide::Ended;
        reply_effects(mutation::immediate_response(response))
    }

    /// Records that another worker than the chosen one sent the response. Called before the
    /// response headers are handled, because the reply to them names the worker.
    pub fn on_served_elsewhere(&mut self, by: ServingWorker) {
        self.context.served_by = Some(by);
    }

    /// Returns the effect that asks Envoy to extend its message timeout to `wait`; `None` in modes
    /// without a message timeout. Envoy accepts one extension per message.
    pub fn extend_timeout(&self, wait: Duration) -> Option<Effect> {
        self.request
            .has_message_timeout()
            .then(|| reply_effect(mutation::extend_timeout(wait)))
    }
}

#[cfg(test)]
mod tests;
