//! The request side of an exchange: from its headers to the answer that steers it, and the body that passes through.

use bytes::{Bytes, BytesMut};
use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::{Context, Copied, Directions, Effect, reply, reply_with};
use crate::ext_proc::headers::{self, RequestHead};
use crate::ext_proc::message::BodyMode;
use crate::ext_proc::mutation::{self, HeaderChanges, To};
use crate::ext_proc::wire::Piece;
use crate::intake::Body;
use crate::openai::Api;

#[derive(Debug)]
pub(super) enum RequestSide {
    /// Nothing came yet.
    Start,
    /// The body is coming.
    Gather { head: RequestHead, body: Pieces },
    /// A route was asked for; this is owed when it comes.
    Routing(Owed),
    /// Answered; the rest of the body passes through us.
    Relay,
    /// Nothing more to answer.
    Ended,
}

#[derive(Debug)]
pub(super) enum Owed {
    /// The answer to the headers.
    Headers { head: RequestHead, then: Then },
    /// The answer to the whole body.
    Body,
    /// The answer to the headers, every byte gathered, and what came after that.
    Duplex {
        head: RequestHead,
        body: Bytes,
        more: BytesMut,
        end: DuplexEnd,
    },
}

/// What follows an answer to the headers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Then {
    /// Nothing that we see.
    End,
    /// A buffered body that we do not want to see.
    Spare,
    /// A body that passes through us.
    Relay,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum DuplexEnd {
    Open,
    Body,
    Trailers,
}

impl RequestSide {
    pub(super) fn is_gathering(&self, context: &Context) -> bool {
        matches!(self, RequestSide::Gather { .. }) && context.modes.request == BodyMode::FullDuplex
    }

    /// Whether Envoy waits, and gives up after a time.
    pub(super) fn is_waited_for(&self) -> bool {
        matches!(
            self,
            RequestSide::Routing(Owed::Headers { .. } | Owed::Body)
        )
    }

    pub(super) fn held(&self) -> usize {
        match self {
            RequestSide::Gather { body, .. } => body.len(),
            RequestSide::Routing(Owed::Duplex { body, more, .. }) => body.len() + more.len(),
            _ => 0,
        }
    }

    pub(super) fn stop_routing(&mut self) {
        if matches!(self, RequestSide::Routing(_)) {
            *self = RequestSide::Ended;
        }
    }

    pub(super) fn on_headers(
        &mut self,
        context: &Context,
        mut head: RequestHead,
        end: bool,
    ) -> Vec<Effect> {
        if !matches!(self, RequestSide::Start) {
            return Vec::new();
        }
        if head.request_id.is_empty() {
            head.request_id.clone_from(&context.start.request_id);
        }
        let wanted = context
            .options
            .paths
            .of(&head.path, |name| head.get(name))
            .is_some_and(Api::wants_body);
        let then = match context.modes.request {
            _ if end => Then::End,
            BodyMode::None => Then::End,
            BodyMode::Streamed | BodyMode::Grpc => Then::Relay,
            BodyMode::FullDuplex if !wanted => {
                let (body, more) = (Bytes::new(), BytesMut::new());
                *self = RequestSide::Routing(Owed::Duplex {
                    head: head.clone(),
                    body,
                    more,
                    end: DuplexEnd::Open,
                });
                return vec![context.inbound(head, Body::Unseen)];
            }
            BodyMode::Buffered | BodyMode::BufferedPartial if !wanted => Then::Spare,
            BodyMode::FullDuplex => {
                *self = RequestSide::Gather {
                    head,
                    body: Pieces::default(),
                };
                return Vec::new();
            }
            BodyMode::Buffered | BodyMode::BufferedPartial => {
                let mut changes = HeaderChanges::removing(context.options.contract.forged(&head));
                name(&head, &mut changes);
                *self = RequestSide::Gather {
                    head,
                    body: Pieces::default(),
                };
                return reply_with(mutation::go_on(To::RequestHeaders, changes));
            }
        };
        let body = match then {
            Then::End if end => Body::Absent,
            Then::Relay => Body::Streamed,
            Then::End | Then::Spare => Body::Unseen,
        };
        *self = RequestSide::Routing(Owed::Headers {
            head: head.clone(),
            then,
        });
        vec![context.inbound(head, body)]
    }

    pub(super) fn on_body(&mut self, context: &Context, piece: Piece) -> Vec<Effect> {
        let end = piece.is_last();
        match self {
            RequestSide::Gather { body, .. } => {
                body.push(piece.body);
                let duplex = context.modes.request == BodyMode::FullDuplex;
                if !duplex || end || body.len() > context.options.body_limit {
                    // A buffered body without an end is followed by trailers; one that did not fit, by its rest.
                    let cut = context.modes.request == BodyMode::BufferedPartial && !end;
                    return self.route_gathered(
                        context,
                        if end {
                            DuplexEnd::Body
                        } else {
                            DuplexEnd::Open
                        },
                        cut,
                    );
                }
                Vec::new()
            }
            RequestSide::Routing(Owed::Duplex {
                more,
                end: ended @ DuplexEnd::Open,
                ..
            }) => {
                more.extend_from_slice(&piece.body);
                if end {
                    *ended = DuplexEnd::Body;
                }
                Vec::new()
            }
            // A configuration that skips the request headers lets the exchange begin with the body.
            RequestSide::Relay | RequestSide::Start => {
                if end {
                    *self = RequestSide::Ended;
                }
                let replies = mutation::unchanged(To::RequestBody, context.modes.request, &piece);
                replies.into_iter().map(reply).collect()
            }
            // A second end of stream, or a body nobody announced.
            RequestSide::Routing(_) | RequestSide::Ended => Vec::new(),
        }
    }

    pub(super) fn on_trailers(&mut self, context: &Context) -> Vec<Effect> {
        match self {
            RequestSide::Gather { .. } if context.modes.request == BodyMode::FullDuplex => {
                self.route_gathered(context, DuplexEnd::Trailers, false)
            }
            RequestSide::Routing(Owed::Duplex { end, .. }) => {
                *end = DuplexEnd::Trailers;
                Vec::new()
            }
            RequestSide::Routing(_) => Vec::new(),
            // While a buffered body is waited for, trailers mean that there is none.
            RequestSide::Gather { .. }
            | RequestSide::Start
            | RequestSide::Relay
            | RequestSide::Ended => {
                *self = RequestSide::Ended;
                reply_with(mutation::request_trailers())
            }
        }
    }

    pub(super) fn on_deadline(&mut self, context: &Context) -> Vec<Effect> {
        match self.is_gathering(context) {
            true => self.route_gathered(context, DuplexEnd::Open, true),
            false => Vec::new(),
        }
    }

    /// Whether nothing of the request is left to answer.
    pub(super) fn has_ended(&self) -> bool {
        matches!(self, RequestSide::Ended)
    }

    /// Whether a route was asked for and has not been found yet.
    pub(super) fn awaits_route(&self) -> bool {
        matches!(self, RequestSide::Routing(_))
    }

    /// Asks for a route without the body, if Envoy buffers it. The body exceeds the size limit of messages.
    pub(super) fn on_oversize_body(&mut self, context: &Context) -> Vec<Effect> {
        let RequestSide::Gather { head, .. } = self else {
            return Vec::new();
        };
        if context.modes.request.is_sent_back() {
            return Vec::new();
        }
        let head = std::mem::take(head);
        *self = RequestSide::Routing(Owed::Body);
        let bytes = head
            .content_length
            .unwrap_or(0)
            .max(context.options.body_limit as u64 + 1);
        vec![context.inbound(
            head,
            Body::TooLarge {
                shown: Bytes::new(),
                bytes,
            },
        )]
    }

    /// Asks for a route with the body gathered so far.
    fn route_gathered(&mut self, context: &Context, end: DuplexEnd, cut: bool) -> Vec<Effect> {
        let RequestSide::Gather { head, body } = std::mem::replace(self, RequestSide::Ended) else {
            return Vec::new();
        };
        let body = body.whole();
        let shown = match body.len() {
            length if length > context.options.body_limit => {
                let bytes = head.content_length.unwrap_or(0).max(length as u64);
                Body::TooLarge {
                    shown: body.clone(),
                    bytes,
                }
            }
            _ if cut => Body::Cut {
                shown: body.clone(),
                length: head.content_length,
            },
            _ => Body::Whole(body.clone()),
        };
        *self = RequestSide::Routing(match context.modes.request {
            BodyMode::FullDuplex => Owed::Duplex {
                head: head.clone(),
                body,
                more: BytesMut::new(),
                end,
            },
            _ => Owed::Body,
        });
        vec![context.inbound(head, shown)]
    }

    pub(super) fn on_route(&mut self, context: &Context, directions: &Directions) -> Vec<Effect> {
        let RequestSide::Routing(owed) = std::mem::replace(self, RequestSide::Ended) else {
            return Vec::new();
        };
        match owed {
            Owed::Headers { head, then } => {
                if then != Then::End {
                    // A spared body comes all the same where `allow_mode_override` is off, and waits for an answer.
                    *self = RequestSide::Relay;
                }
                let reply = header_answer(context, &head, directions, None);
                reply_with(if then == Then::Spare {
                    mutation::without_request_body(reply)
                } else {
                    reply
                })
            }
            Owed::Body => {
                // What the client forged was removed in the answer to the headers.
                let mut changes = HeaderChanges::default();
                let edit = directions.edit.as_ref();
                if let Some(edit) = edit {
                    changes.set(CONTENT_LENGTH, edit.body.len().to_string());
                }
                let reply = steered(context, To::RequestBody, changes, directions);
                reply_with(match edit {
                    Some(edit) => mutation::with_body(reply, edit.body.to_vec()),
                    None => reply,
                })
            }
            Owed::Duplex {
                head,
                body,
                more,
                end,
            } => {
                let (effects, open) =
                    duplex(context, &head, directions, Gathered { body, more, end });
                if open {
                    *self = RequestSide::Relay;
                }
                effects
            }
        }
    }
}

const CONTENT_LENGTH: &str = "content-length";

/// A body as it comes. A buffered one comes whole, and is not copied.
#[derive(Debug, Default)]
pub(super) struct Pieces {
    first: Bytes,
    /// All of it, once there is more than one piece.
    more: BytesMut,
}

impl Pieces {
    fn len(&self) -> usize {
        self.first.len() + self.more.len()
    }

    fn push(&mut self, piece: Bytes) {
        if self.len() == 0 {
            self.first = piece;
            return;
        }
        self.more
            .extend_from_slice(&std::mem::take(&mut self.first));
        self.more.extend_from_slice(&piece);
    }

    fn whole(self) -> Bytes {
        if self.more.is_empty() {
            self.first
        } else {
            self.more.freeze()
        }
    }
}

/// What a full-duplex request had sent when its route came.
struct Gathered {
    body: Bytes,
    more: BytesMut,
    end: DuplexEnd,
}

impl Gathered {
    /// How long the body will be in the end, where that is known.
    fn length(&self, head: &RequestHead, edit: Option<&Bytes>) -> Option<u64> {
        match (self.end, edit) {
            (DuplexEnd::Body, Some(edit)) => Some(edit.len() as u64),
            (DuplexEnd::Body, None) => Some((self.body.len() + self.more.len()) as u64),
            // Envoy takes the client's word out; nothing has changed about it.
            (DuplexEnd::Open, None) => head.content_length,
            // A message with trailers has no fixed length.
            (DuplexEnd::Open | DuplexEnd::Trailers, _) => None,
        }
    }
}

/// The answers to a full-duplex request: headers, then every byte, then the end. Beside them whether more will come.
fn duplex(
    context: &Context,
    head: &RequestHead,
    directions: &Directions,
    gathered: Gathered,
) -> (Vec<Effect>, bool) {
    let edit = directions.edit.as_ref().map(|edit| &edit.body);
    let length = gathered.length(head, edit);
    let mut effects = reply_with(header_answer(context, head, directions, length));
    let Gathered { body, more, end } = gathered;
    let body = edit.cloned().unwrap_or(body);
    let body_ends = end == DuplexEnd::Body;
    // Without a single byte before the trailers there may have been no body message to answer.
    if !body.is_empty() || (body_ends && more.is_empty()) {
        effects.extend(
            mutation::pieces(To::RequestBody, &body, body_ends && more.is_empty()).map(reply),
        );
    }
    if !more.is_empty() {
        effects.extend(mutation::pieces(To::RequestBody, &more, body_ends).map(reply));
    }
    if end == DuplexEnd::Trailers {
        effects.push(reply(mutation::request_trailers()));
    }
    (effects, end == DuplexEnd::Open)
}

fn header_answer(
    context: &Context,
    head: &RequestHead,
    directions: &Directions,
    length: Option<u64>,
) -> ProcessingResponse {
    let mut changes = HeaderChanges::removing(context.options.contract.forged(head));
    if let Some(length) = length {
        changes.set(CONTENT_LENGTH, length.to_string());
    }
    name(head, &mut changes);
    steered(context, To::RequestHeaders, changes, directions)
}

/// Tells the worker the name of a request that came without one.
fn name(head: &RequestHead, changes: &mut HeaderChanges) {
    if !head.request_id.is_empty()
        && head
            .get(headers::REQUEST_ID)
            .is_none_or(|sent| sent.is_empty())
    {
        changes.set(headers::REQUEST_ID, head.request_id.clone());
    }
}

/// Lets a message go on to where the route leads.
fn steered(
    context: &Context,
    message: To,
    mut changes: HeaderChanges,
    directions: &Directions,
) -> ProcessingResponse {
    let steer = &directions.steer;
    let Some(to) = &steer.to else {
        return mutation::go_on(message, changes);
    };
    let options = &context.options;
    options.contract.tell(steer, &mut changes);
    if let Some(Copied { cluster, to }) = &directions.copy {
        changes.set(headers::PREFILL_CLUSTER, cluster.to_string());
        changes.set(headers::PREFILL_DESTINATION, to.to_string());
    }
    if options.conformance {
        changes.set(
            headers::CONFORMANCE_ECHO,
            format!("{}:{}", headers::CONFORMANCE_SERVED, to.endpoint),
        );
    }
    let reply = mutation::go_on(message, changes);
    let reply = if options.clear_route_cache {
        mutation::with_new_route(reply)
    } else {
        reply
    };
    mutation::with_destination(reply, to, directions, context.start.probed_as.as_deref())
}
