//! Answers to the request for a route: a route with changes of the request, or an immediate
//! response.

use warmroute_core::router::RouteTarget;

use crate::prefill::MirrorTarget;
use crate::request::BodyEdit;

/// The answer to [`Effect::Route`](super::Effect::Route): the chosen endpoints, and further changes
/// of the request.
#[derive(Clone, Debug, PartialEq)]
pub struct RouteReply {
    /// The chosen endpoints.
    pub target: RouteTarget,
    /// Replacement of the body. Set only if the whole body was received.
    pub body_edit: Option<BodyEdit>,
    /// Endpoint that receives a mirrored copy of the request.
    pub mirror_to: Option<MirrorTarget>,
    /// Whether the engine sends the response headers together with the first token.
    pub first_token_with_headers: bool,
    /// Whether the engine may store the response under its id.
    pub may_store_response: bool,
}

impl From<RouteTarget> for RouteReply {
    fn from(target: RouteTarget) -> Self {
        Self {
            target,
            body_edit: None,
            mirror_to: None,
            first_token_with_headers: false,
            may_store_response: false,
        }
    }
}

/// A response that warmroute sends in place of a worker's.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImmediateReply {
    /// HTTP status.
    pub status: u16,
    /// Headers in addition to the content type.
    pub headers: Vec<(&'static str, String)>,
    /// Body, in JSON.
    pub body: Vec<u8>,
    /// Response details for Envoy's logs.
    pub details: &'static str,
}

impl ImmediateReply {
    pub(super) fn new(status: u16, body: &serde_json::Value, details: &'static str) -> Self {
        Self {
            status,
            headers: Vec::new(),
            body: body.to_string().into_bytes(),
            details,
        }
    }
}
