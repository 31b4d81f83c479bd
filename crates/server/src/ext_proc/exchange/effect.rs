//! Actions that an exchange requests from its caller.

use std::sync::Arc;

use bytes::Bytes;
use warmroute_core::policy::EndpointSubset;

use crate::ext_proc::headers::{RequestHead, ResponseHead};
use crate::ext_proc::response_content::MissingContent;
use crate::ext_proc::returned_piece::ExtProcReply;
use crate::request::RequestBody;

/// Action for the caller. Effects are applied in order.
#[derive(Debug)]
pub enum Effect {
    /// Send this reply to Envoy.
    Reply(ExtProcReply),
    /// Choose a worker and call [`Exchange::on_route`](super::Exchange::on_route).
    Route(InboundRequest),
    /// The response headers were received.
    ResponseStarted(ResponseHead),
    /// The first token of the response was received, so the prefill has ended.
    FirstToken {
        /// Whether the token itself was observed. Otherwise it is assumed to arrive with the
        /// headers.
        observed: bool,
    },
    /// The response has ended without content.
    ContentMissing(MissingContent),
    /// The engine may store the response under this id.
    ResponseStored(String),
    /// A piece of the response body, for the usage scanner.
    ResponseChunk(Bytes),
    /// The response is complete.
    Completed,
}

/// The part of a request that Envoy has sent.
#[derive(Clone, Debug, PartialEq)]
pub struct InboundRequest {
    /// The request head.
    pub head: RequestHead,
    /// The request body.
    pub body: RequestBody,
    /// Endpoints that may serve the request; `None` allows every endpoint.
    pub subset: Option<EndpointSubset>,
    /// Pool whose workers may serve the request, from the metadata or the authority of the call.
    pub pool: Option<Arc<str>>,
}

pub(super) fn reply_effect(reply: impl Into<ExtProcReply>) -> Effect {
    Effect::Reply(reply.into())
}

pub(super) fn reply_effects(reply: impl Into<ExtProcReply>) -> Vec<Effect> {
    vec![reply_effect(reply)]
}
