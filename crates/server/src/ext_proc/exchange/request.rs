//! The request side of an exchange: from the request headers to the reply with the route, and the
//! rest of the body.

use bytes::Bytes;
use warmroute_tokens::openai::ApiKind;

use super::context::ExchangeContext;
use super::effect::{Effect, reply_effect, reply_effects};
use super::request_body::{BufferedBody, DuplexBody, DuplexEnd};
use super::request_reply::{body_reply, full_duplex_reply, header_reply, set_request_id};
use crate::ext_proc::header_changes::HeaderChanges;
use crate::ext_proc::headers::RequestHead;
use crate::ext_proc::message::{BodyMode, is_sent_back};
use crate::ext_proc::mutation::{self, MessageKind};
use crate::ext_proc::reply::RouteReply;
use crate::ext_proc::wire::BodyPiece;
use crate::request::RequestBody;

#[derive(Debug)]
pub(super) enum RequestSide {
    /// No message has been received.
    Start,
    /// The body is being received.
    Buffering {
        head: RequestHead,
        body: BufferedBody,
    },
    /// A route was requested. The reply is due when the route is known.
    Routing(PendingReply),
    /// The reply to the headers was sent. The rest of the body passes through.
    PassThrough,
    /// No further reply is due.
    Ended,
}

#[derive(Debug)]
pub(super) enum PendingReply {
    /// The reply to the headers.
    Headers {
        head: RequestHead,
        after_headers: BodyAfterHeaders,
    },
    /// The reply to the whole body.
    Body,
    /// The reply to the headers, the buffered body, and the bytes received since the route was
    /// requested.
    Duplex {
        head: RequestHead,
        gathered: DuplexBody,
    },
}

/// Body messages that follow the reply to the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum BodyAfterHeaders {
    /// None.
    NoBody,
    /// A buffered body, which the reply suppresses.
    SuppressedBody,
    /// A body that passes through.
    PassThrough,
}

impl RequestSide {
    pub(super) fn is_gathering(&self, context: &ExchangeContext) -> bool {
        matches!(self, RequestSide::Buffering { .. })
            && context.modes.request == BodyMode::FullDuplexStreamed
    }

    /// Returns whether Envoy's message timeout applies to the reply that is due.
    pub(super) fn has_message_timeout(&self) -> bool {
        matches!(
            self,
            RequestSide::Routing(PendingReply::Headers { .. } | PendingReply::Body)
        )
    }

    pub(super) fn buffered_bytes(&self) -> usize {
        match self {
            RequestSide::Buffering { body, .. } => body.len(),
            RequestSide::Routing(PendingReply::Duplex { gathered, .. }) => gathered.len(),
            _ => 0,
        }
    }

    pub(super) fn cancel_routing(&mut self) {
        if matches!(self, RequestSide::Routing(_)) {
            *self = RequestSide::Ended;
        }
    }

    pub(super) fn on_headers(
        &mut self,
        context: &ExchangeContext,
        mut head: RequestHead,
        end: bool,
    ) -> Vec<Effect> {
        if !matches!(self, RequestSide::Start) {
            return Vec::new();
        }
        if head.request_id.is_empty() {
            head.request_id.clone_from(&context.start.request_id);
        }
        let api = context
            .options
            .paths
            .api_of_request(&head.path, |name| head.get(name));
        let needs_body = api.is_some_and(ApiKind::wants_body) && !head.opens_tunnel();
        let after_headers = match context.modes.request {
            _ if end => BodyAfterHeaders::NoBody,
            BodyMode::None => BodyAfterHeaders::NoBody,
            BodyMode::Streamed | BodyMode::Grpc => BodyAfterHeaders::PassThrough,
            BodyMode::FullDuplexStreamed if !needs_body => {
                *self = RequestSide::Routing(PendingReply::Duplex {
                    head: head.clone(),
                    gathered: DuplexBody::new(Bytes::new(), DuplexEnd::Open),
                });
                return vec![context.route_effect(head, RequestBody::NotReceived)];
            }
            BodyMode::Buffered | BodyMode::BufferedPartial if !needs_body => {
                BodyAfterHeaders::SuppressedBody
            }
            BodyMode::FullDuplexStreamed => {
                let body = BufferedBody::with_announced_length(head.content_length);
                *self = RequestSide::Buffering { head, body };
                return Vec::new();
            }
            BodyMode::Buffered | BodyMode::BufferedPartial => {
                let mut changes =
                    HeaderChanges::removing(context.options.routing_headers.forged_headers(&head));
                set_request_id(&head, &mut changes);
                let body = BufferedBody::with_announced_length(head.content_length);
                *self = RequestSide::Buffering { head, body };
                return reply_effects(mutation::continue_with(
                    MessageKind::RequestHeaders,
                    changes,
                ));
            }
        };
        let body = match after_headers {
            BodyAfterHeaders::NoBody if end => RequestBody::Absent,
            BodyAfterHeaders::PassThrough => RequestBody::Streamed,
            BodyAfterHeaders::NoBody | BodyAfterHeaders::SuppressedBody => RequestBody::NotReceived,
        };
        *self = RequestSide::Routing(PendingReply::Headers {
            head: head.clone(),
            after_headers,
        });
        vec![context.route_effect(head, body)]
    }

    pub(super) fn on_body(&mut self, context: &ExchangeContext, piece: BodyPiece) -> Vec<Effect> {
        let end = piece.is_last();
        match self {
            RequestSide::Buffering { body, .. } => {
                body.push(piece.body);
                let duplex = context.modes.request == BodyMode::FullDuplexStreamed;
                if !duplex || end || body.len() > context.options.body_limit {
                    // In buffered mode, a body without an end is followed by trailers. In partial
                    // mode, the rest of the body follows.
                    let is_truncated = context.modes.request == BodyMode::BufferedPartial && !end;
                    return self.route_gathered(
                        context,
                        if end {
                            DuplexEnd::Body
                        } else {
                            DuplexEnd::Open
                        },
                        is_truncated,
                    );
                }
                Vec::new()
            }
            RequestSide::Routing(PendingReply::Duplex { gathered, .. })
                if gathered.end == DuplexEnd::Open =>
            {
                gathered.late_body.extend_from_slice(&piece.body);
                if end {
                    gathered.end = DuplexEnd::Body;
                }
                Vec::new()
            }
            // If Envoy is configured to skip the request headers, the exchange begins with the
            // body.
            RequestSide::PassThrough | RequestSide::Start => {
                if end {
                    *self = RequestSide::Ended;
                }
                let replies =
                    mutation::pass_body(MessageKind::RequestBody, context.modes.request, &piece);
                replies.into_iter().map(reply_effect).collect()
            }
            // A second end of stream, or a body that was not announced.
            RequestSide::Routing(_) | RequestSide::Ended => Vec::new(),
        }
    }

    pub(super) fn on_trailers(&mut self, context: &ExchangeContext) -> Vec<Effect> {
        match self {
            RequestSide::Buffering { .. }
                if context.modes.request == BodyMode::FullDuplexStreamed =>
            {
                self.route_gathered(context, DuplexEnd::Trailers, false)
            }
            RequestSide::Routing(PendingReply::Duplex { gathered, .. }) => {
                gathered.end = DuplexEnd::Trailers;
                Vec::new()
            }
            RequestSide::Routing(_) => Vec::new(),
            // Trailers in place of a buffered body mean that there is no body.
            RequestSide::Buffering { .. }
            | RequestSide::Start
            | RequestSide::PassThrough
            | RequestSide::Ended => {
                *self = RequestSide::Ended;
                reply_effects(mutation::request_trailers())
            }
        }
    }

    pub(super) fn on_deadline(&mut self, context: &ExchangeContext) -> Vec<Effect> {
        if self.is_gathering(context) {
            self.route_gathered(context, DuplexEnd::Open, true)
        } else {
            Vec::new()
        }
    }

    /// Returns whether no further reply is due.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, RequestSide::Ended)
    }

    /// Returns whether a route was requested and has not been received.
    pub(super) fn awaits_route(&self) -> bool {
        matches!(self, RequestSide::Routing(_))
    }

    /// Requests a route without the body, if Envoy buffers it. The body exceeds the size limit of
    /// messages.
    pub(super) fn on_oversize_body(&mut self, context: &ExchangeContext) -> Vec<Effect> {
        let RequestSide::Buffering { head, .. } = self else {
            return Vec::new();
        };
        if is_sent_back(context.modes.request) {
            return Vec::new();
        }
        let head = std::mem::take(head);
        *self = RequestSide::Routing(PendingReply::Body);
        let bytes = head
            .content_length
            .unwrap_or(0)
            .max(context.options.body_limit as u64 + 1);
        vec![context.route_effect(
            head,
            RequestBody::TooLarge {
                received: Bytes::new(),
                bytes,
            },
        )]
    }

    /// Requests a route with the bytes received so far.
    fn route_gathered(
        &mut self,
        context: &ExchangeContext,
        end: DuplexEnd,
        is_truncated: bool,
    ) -> Vec<Effect> {
        let RequestSide::Buffering { head, body } = std::mem::replace(self, RequestSide::Ended)
        else {
            return Vec::new();
        };
        let body = body.into_bytes();
        let received = match body.len() {
            length if length > context.options.body_limit => {
                let bytes = head.content_length.unwrap_or(0).max(length as u64);
                RequestBody::TooLarge {
                    received: body.clone(),
                    bytes,
                }
            }
            _ if is_truncated => RequestBody::Truncated {
                received: body.clone(),
                length: head.content_length,
            },
            _ => RequestBody::Whole(body.clone()),
        };
        *self = RequestSide::Routing(match context.modes.request {
            BodyMode::FullDuplexStreamed => PendingReply::Duplex {
                head: head.clone(),
                gathered: DuplexBody::new(body, end),
            },
            _ => PendingReply::Body,
        });
        vec![context.route_effect(head, received)]
    }

    pub(super) fn on_route(
        &mut self,
        context: &ExchangeContext,
        route_reply: &RouteReply,
    ) -> Vec<Effect> {
        let RequestSide::Routing(pending) = std::mem::replace(self, RequestSide::Ended) else {
            return Vec::new();
        };
        match pending {
            PendingReply::Headers {
                head,
                after_headers,
            } => {
                if after_headers != BodyAfterHeaders::NoBody {
                    // With `allow_mode_override: false`, Envoy sends the suppressed body
                    // nevertheless, and waits for a reply.
                    *self = RequestSide::PassThrough;
                }
                let reply = header_reply(context, &head, route_reply, None);
                reply_effects(if after_headers == BodyAfterHeaders::SuppressedBody {
                    mutation::without_request_body(reply)
                } else {
                    reply
                })
            }
            PendingReply::Body => reply_effects(body_reply(context, route_reply)),
            PendingReply::Duplex { head, gathered } => {
                if gathered.end == DuplexEnd::Open {
                    *self = RequestSide::PassThrough;
                }
                full_duplex_reply(context, &head, route_reply, gathered)
            }
        }
    }
}
