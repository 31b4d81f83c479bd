//! The response side of an exchange: observation of the body, response headers, and the first
//! token, which is the first content of the body.

use warmroute_tokens::openai::ResponseIdReader;
use warmroute_tokens::openai::restore::ModelNameRestorer;
use warmroute_tokens::openai::usage::ContentDetector;

use super::context::ExchangeContext;
use super::effect::{Effect, reply_effect};
use crate::ext_proc::config::ObserveMode;
use crate::ext_proc::header_changes::HeaderChanges;
use crate::ext_proc::headers::{self, ResponseHead, ResponseSource};
use crate::ext_proc::message::{BodyMode, is_sent_back};
use crate::ext_proc::mutation::{self, MessageKind};
use crate::ext_proc::response_content::{ContentReport, MissingContent};
use crate::ext_proc::wire::BodyPiece;

#[derive(Debug)]
pub(super) enum ResponseSide {
    /// The response has not begun.
    Waiting,
    /// Envoy does not send the body. The response ends with the gRPC stream.
    Unobserved { first_token_due: bool },
    /// Envoy sends the body.
    Observed {
        first_token_due: bool,
        detector: ContentDetector,
        /// Whether the usage scanner reads the body.
        scans_usage: bool,
        /// Reads the id of a response that the engine may store.
        id_reader: Option<ResponseIdReader>,
        restorer: Option<Box<ModelNameRestorer>>,
    },
    /// The response is complete.
    Ended,
}

/// Reasons to observe the body.
struct ObservationNeeds {
    /// The first token does not arrive with the headers.
    first_token: bool,
    /// This filter has to observe the first token, because there is no probe filter.
    by_this_filter: bool,
    /// The usage scanner needs the whole body.
    usage: bool,
    /// The engine may store the response under its id.
    response_id: bool,
}

impl ObservationNeeds {
    fn new(context: &ExchangeContext, head: &ResponseHead) -> Self {
        let none = Self {
            first_token: false,
            by_this_filter: false,
            usage: false,
            response_id: false,
        };
        let Some(route_reply) = context
            .route_reply
            .as_ref()
            .filter(|reply| reply.target.to.is_some())
        else {
            return none;
        };
        let options = &context.options;
        let start = &context.start;
        // Engines send the headers of an event stream before the computation, and those of a unary
        // response after it.
        let can_observe = start.exchange_key.is_some() || can_observe_body(context);
        let is_late = head.is_event_stream && !route_reply.first_token_with_headers;
        let first_token = can_observe && is_late && options.observe != ObserveMode::Off;
        let is_success = (200..300).contains(&head.status);
        Self {
            first_token,
            by_this_filter: first_token && start.exchange_key.is_none(),
            usage: is_success
                && (options.observe == ObserveMode::Usage
                    || start.is_sampled
                    || options.output_blocks),
            response_id: is_success && route_reply.may_store_response,
        }
    }
}

impl ResponseSide {
    /// Returns whether this filter observes the body and has seen no content.
    pub(super) fn observes_no_content(&self) -> bool {
        matches!(
            self,
            ResponseSide::Observed {
                first_token_due: true,
                ..
            }
        )
    }

    pub(super) fn on_headers(
        &mut self,
        context: &ExchangeContext,
        head: ResponseHead,
        end: bool,
    ) -> Vec<Effect> {
        if !matches!(self, ResponseSide::Waiting) {
            return Vec::new();
        }
        let mut changes = response_header_changes(context, &head);
        if end {
            *self = ResponseSide::Ended;
            let continued = mutation::continue_with(MessageKind::ResponseHeaders, changes);
            return vec![
                reply_effect(continued),
                Effect::ResponseStarted(head),
                Effect::ContentMissing(MissingContent::Empty),
                Effect::Completed,
            ];
        }
        let rename = context
            .route_reply
            .as_ref()
            .and_then(|reply| reply.body_edit.as_ref()?.model_rename.as_ref());
        // A gRPC message is not JSON.
        let rename = rename.filter(|_| context.modes.response != BodyMode::Grpc);
        let restorer =
            rename.map(|names| Box::new(ModelNameRestorer::new(&names.served, &names.requested)));
        let needs = ObservationNeeds::new(context, &head);
        let is_shown = context.modes.response != BodyMode::None;
        let requests_body = !is_shown
            && can_observe_body(context)
            && (needs.by_this_filter
                || needs.usage
                || restorer.is_some()
                || (needs.response_id && context.options.observe != ObserveMode::Off));
        if restorer.is_some() && (is_shown || requests_body) {
            // The restored model name may differ in length.
            changes.remove("content-length");
        }
        let first_token_due = needs.first_token;
        *self = if is_shown || requests_body {
            ResponseSide::Observed {
                first_token_due,
                detector: ContentDetector::default(),
                scans_usage: needs.usage,
                id_reader: needs.response_id.then(ResponseIdReader::default),
                restorer,
            }
        } else {
            ResponseSide::Unobserved { first_token_due }
        };
        let continued = mutation::continue_with(MessageKind::ResponseHeaders, changes);
        let continued = if requests_body {
            mutation::with_response_body_sent(continued, context.modes.request)
        } else {
            continued
        };
        // Some engines send the headers of an event stream with the first token.
        let observed = head.is_event_stream
            && context
                .route_reply
                .as_ref()
                .is_some_and(|reply| reply.first_token_with_headers);
        let mut effects = vec![reply_effect(continued), Effect::ResponseStarted(head)];
        if !first_token_due {
            effects.push(Effect::FirstToken { observed });
        }
        effects
    }

    pub(super) fn on_body(&mut self, context: &ExchangeContext, piece: BodyPiece) -> Vec<Effect> {
        let end = piece.is_last();
        let mut effects = Vec::new();
        if let ResponseSide::Unobserved { first_token_due } = *self {
            // The gateway sends the body although it has reported another mode.
            *self = ResponseSide::Observed {
                first_token_due,
                detector: ContentDetector::default(),
                scans_usage: false,
                id_reader: None,
                restorer: None,
            };
        }
        let restored = match self {
            ResponseSide::Ended => return effects,
            ResponseSide::Observed {
                restorer: Some(restorer),
                ..
            } => {
                let mut changed = restorer.push(&piece.body).into_owned();
                if end {
                    changed.extend(restorer.finish());
                }
                Some(changed)
            }
            _ => None,
        };
        let replies = match (context.modes.response, restored) {
            (mode, None) => mutation::pass_body(MessageKind::ResponseBody, mode, &piece),
            (BodyMode::FullDuplexStreamed, Some(changed)) => {
                mutation::body_pieces(MessageKind::ResponseBody, changed.into(), end).collect()
            }
            (_, Some(changed)) => {
                let reply =
                    mutation::continue_with(MessageKind::ResponseBody, HeaderChanges::default());
                vec![mutation::with_body(reply, changed).into()]
            }
        };
        effects.extend(replies.into_iter().map(reply_effect));
        let BodyPiece { body, .. } = piece;
        if !body.is_empty()
            && let ResponseSide::Observed {
                detector,
                scans_usage,
                id_reader,
                ..
            } = self
        {
            let is_scanned = *scans_usage;
            let id = id_reader.as_mut().and_then(|reader| reader.push(&body));
            effects.extend(id.map(Effect::ResponseStored));
            if detector.push(&body) {
                effects.extend(self.on_first_token(true));
            }
            if is_scanned {
                effects.push(Effect::ResponseChunk(body));
            }
        }
        if end {
            effects.extend(self.end());
        }
        effects
    }

    /// Ends the response.
    fn end(&mut self) -> Vec<Effect> {
        let mut effects = Vec::new();
        if let ResponseSide::Observed { detector, .. } = self {
            let is_last_event = detector.finish();
            let missing = MissingContent::from_evidence(detector.evidence());
            if is_last_event {
                effects.extend(self.on_first_token(true));
            }
            effects.extend(missing.map(Effect::ContentMissing));
        }
        *self = ResponseSide::Ended;
        effects.push(Effect::Completed);
        effects
    }

    /// Handles the report of another filter that observes the body.
    pub(super) fn on_content_report(&mut self, report: ContentReport) -> Vec<Effect> {
        match report {
            ContentReport::Content => self.on_first_token(true),
            ContentReport::Stopped => self.on_first_token(false),
            ContentReport::Ended(missing) => {
                // Otherwise this filter observes the end itself.
                if !matches!(self, ResponseSide::Unobserved { .. }) {
                    return Vec::new();
                }
                *self = ResponseSide::Ended;
                vec![Effect::ContentMissing(missing), Effect::Completed]
            }
        }
    }

    fn on_first_token(&mut self, observed: bool) -> Vec<Effect> {
        match self {
            ResponseSide::Unobserved {
                first_token_due: due @ true,
            }
            | ResponseSide::Observed {
                first_token_due: due @ true,
                ..
            } => {
                *due = false;
                vec![Effect::FirstToken { observed }]
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn on_trailers(&mut self, context: &ExchangeContext) -> Vec<Effect> {
        let mut effects = Vec::new();
        // Only full-duplex mode accepts body bytes after the last body message.
        if let (
            BodyMode::FullDuplexStreamed,
            ResponseSide::Observed {
                restorer: Some(restorer),
                ..
            },
        ) = (context.modes.response, &mut *self)
        {
            let rest = restorer.finish();
            if !rest.is_empty() {
                effects.extend(
                    mutation::body_pieces(MessageKind::ResponseBody, rest.into(), false)
                        .map(reply_effect),
                );
            }
        }
        effects.push(reply_effect(mutation::response_trailers()));
        if !matches!(self, ResponseSide::Ended) {
            effects.extend(self.end());
        }
        effects
    }
}

/// Returns whether Envoy sends the response body, or would send it after a mode override. Envoy
/// ignores the override if the request body is in full-duplex mode.
fn can_observe_body(context: &ExchangeContext) -> bool {
    context.modes.response != BodyMode::None || !is_sent_back(context.modes.request)
}

fn response_header_changes(context: &ExchangeContext, head: &ResponseHead) -> HeaderChanges {
    let mut changes = HeaderChanges::default();
    if let Some(route_reply) = &context.route_reply {
        context
            .options
            .add_response_headers(&route_reply.target, context.served_by, &mut changes);
    }
    if context.options.conformance {
        let served = match head.source {
            ResponseSource::Worker(address) => address.to_string(),
            _ => "fail: missing destination endpoint served metadata".to_owned(),
        };
        changes.set(headers::CONFORMANCE_SERVED, served);
    }
    changes
}
