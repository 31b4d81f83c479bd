//! Replies to a request for which a route was chosen.

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::context::ExchangeContext;
use super::effect::{Effect, reply_effect, reply_effects};
use super::request_body::{DuplexBody, DuplexEnd};
use crate::ext_proc::header_changes::HeaderChanges;
use crate::ext_proc::headers::{self, RequestHead};
use crate::ext_proc::mutation::{self, MessageKind};
use crate::ext_proc::reply::RouteReply;
use crate::prefill::MirrorTarget;

const CONTENT_LENGTH: &str = "content-length";

/// Returns the reply to the request headers.
pub(super) fn header_reply(
    context: &ExchangeContext,
    head: &RequestHead,
    route_reply: &RouteReply,
    length: Option<u64>,
) -> ProcessingResponse {
    let mut changes = HeaderChanges::removing(context.options.routing_headers.forged_headers(head));
    if let Some(length) = length {
        changes.set(CONTENT_LENGTH, length.to_string());
    }
    set_request_id(head, &mut changes);
    routed_reply(context, MessageKind::RequestHeaders, changes, route_reply)
}

/// Returns the reply to a buffered body.
pub(super) fn body_reply(
    context: &ExchangeContext,
    route_reply: &RouteReply,
) -> ProcessingResponse {
    // The reply to the headers has already removed forged headers.
    let mut changes = HeaderChanges::default();
    let edit = route_reply.body_edit.as_ref();
    if let Some(edit) = edit {
        changes.set(CONTENT_LENGTH, edit.body.len().to_string());
    }
    let reply = routed_reply(context, MessageKind::RequestBody, changes, route_reply);
    match edit {
        Some(edit) => mutation::with_body(reply, edit.body.to_vec()),
        None => reply,
    }
}

/// Returns the replies to a full-duplex request: headers, every byte, then the end.
pub(super) fn full_duplex_reply(
    context: &ExchangeContext,
    head: &RequestHead,
    route_reply: &RouteReply,
    gathered: DuplexBody,
) -> Vec<Effect> {
    let edit = route_reply.body_edit.as_ref().map(|edit| &edit.body);
    let length = gathered.content_length(head, edit);
    let mut effects = reply_effects(header_reply(context, head, route_reply, length));
    let DuplexBody {
        body,
        late_body,
        end,
    } = gathered;
    let body = edit.cloned().unwrap_or(body);
    let body_ends = end == DuplexEnd::Body;
    // Without a byte before the trailers, Envoy may have sent no body message to reply to.
    if !body.is_empty() || (body_ends && late_body.is_empty()) {
        effects.extend(
            mutation::body_pieces(
                MessageKind::RequestBody,
                body,
                body_ends && late_body.is_empty(),
            )
            .map(reply_effect),
        );
    }
    if !late_body.is_empty() {
        effects.extend(
            mutation::body_pieces(MessageKind::RequestBody, late_body.freeze(), body_ends)
                .map(reply_effect),
        );
    }
    if end == DuplexEnd::Trailers {
        effects.push(reply_effect(mutation::request_trailers()));
    }
    effects
}

/// Sets the request id of a request without one.
pub(super) fn set_request_id(head: &RequestHead, changes: &mut HeaderChanges) {
    if !head.request_id.is_empty()
        && head
            .get(headers::REQUEST_ID)
            .is_none_or(|sent| sent.is_empty())
    {
        changes.set(headers::REQUEST_ID, head.request_id.clone());
    }
}

/// Lets a message continue to the chosen endpoint.
fn routed_reply(
    context: &ExchangeContext,
    message: MessageKind,
    mut changes: HeaderChanges,
    route_reply: &RouteReply,
) -> ProcessingResponse {
    let target = &route_reply.target;
    let Some(to) = &target.to else {
        return mutation::continue_with(message, changes);
    };
    let options = &context.options;
    for (name, value) in options.routing_headers.route_headers(target) {
        changes.set(name.clone(), value);
    }
    if let Some(MirrorTarget {
        cluster,
        endpoint: to,
    }) = &route_reply.mirror_to
    {
        changes.set(headers::PREFILL_CLUSTER, cluster.to_string());
        changes.set(headers::PREFILL_DESTINATION, to.to_string());
    }
    if options.conformance {
        changes.set(
            headers::CONFORMANCE_ECHO,
            format!("{}:{}", headers::CONFORMANCE_SERVED, to.endpoint),
        );
    }
    let reply = mutation::continue_with(message, changes);
    let reply = if options.clear_route_cache {
        mutation::with_route_cache_cleared(reply)
    } else {
        reply
    };
    mutation::with_destination(
        reply,
        to,
        route_reply,
        context.start.exchange_key.as_deref(),
    )
}
