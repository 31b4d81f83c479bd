//! The response side of an exchange: what is shown of the answer, what is told with it, and when its first token comes.

use super::{Context, Effect, reply};
use crate::ext_proc::config::Observe;
use crate::ext_proc::headers::{self, AnsweredBy, ResponseHead};
use crate::ext_proc::message::BodyMode;
use crate::ext_proc::mutation::{self, HeaderChanges, To};
use crate::ext_proc::wire::Piece;
use crate::openai::restore::Restorer;

#[derive(Debug)]
pub(super) enum ResponseSide {
    /// The response has not begun.
    Waiting,
    /// The body comes unseen; its end is the end of the stream.
    Hidden { first_token_due: bool },
    /// The body passes through us.
    Watched {
        first_token_due: bool,
        /// Whether what is shown is also looked at.
        whole: bool,
        restore: Option<Box<Restorer>>,
    },
    /// Complete.
    Ended,
}

/// Why a body has to be shown.
struct Wish {
    /// The first token is not in the headers.
    first_token: bool,
    /// Nobody else sees it.
    ourselves: bool,
    /// All of it counts.
    whole: bool,
}

impl Wish {
    fn of(context: &Context, head: &ResponseHead) -> Self {
        let none = Self {
            first_token: false,
            ourselves: false,
            whole: false,
        };
        let Some(directions) = context
            .directions
            .as_ref()
            .filter(|found| found.steer.to.is_some())
        else {
            return none;
        };
        let (options, start) = (&context.options, &context.start);
        // Engines send the headers of a stream before they have computed anything, those of a unary answer after all.
        let seen = start.probed_as.is_some() || can_be_shown(context);
        let later = head.event_stream && !directions.first_token_with_headers;
        let first_token = seen && later && options.observe != Observe::Off;
        let well = (200..300).contains(&head.status);
        Self {
            first_token,
            ourselves: first_token && start.probed_as.is_none(),
            whole: well
                && (options.observe == Observe::Usage || start.sampled || options.output_blocks),
        }
    }
}

impl ResponseSide {
    pub(super) fn awaits_first_token(&self) -> bool {
        match self {
            ResponseSide::Hidden { first_token_due }
            | ResponseSide::Watched {
                first_token_due, ..
            } => *first_token_due,
            ResponseSide::Waiting | ResponseSide::Ended => false,
        }
    }

    pub(super) fn on_headers(
        &mut self,
        context: &Context,
        head: ResponseHead,
        end: bool,
    ) -> Vec<Effect> {
        if !matches!(self, ResponseSide::Waiting) {
            return Vec::new();
        }
        let mut changes = answer_headers(context, &head);
        if end {
            *self = ResponseSide::Ended;
            let answer = mutation::go_on(To::ResponseHeaders, changes);
            return vec![
                reply(answer),
                Effect::Answered(head),
                Effect::FirstToken { seen: false },
                Effect::Finished,
            ];
        }
        let renamed = context
            .directions
            .as_ref()
            .and_then(|found| found.edit.as_ref()?.restore.as_ref());
        // A gRPC message is not JSON.
        let renamed = renamed.filter(|_| context.modes.response != BodyMode::Grpc);
        let restore = renamed.map(|names| Box::new(Restorer::new(&names.served, &names.asked)));
        let wish = Wish::of(context, &head);
        let shown = context.modes.response != BodyMode::None;
        let asked =
            !shown && can_be_shown(context) && (wish.ourselves || wish.whole || restore.is_some());
        if restore.is_some() && (shown || asked) {
            // The client's name for the model may be longer or shorter.
            changes.remove("content-length");
        }
        let first_token_due = wish.first_token;
        *self = match shown || asked {
            true => ResponseSide::Watched {
                first_token_due,
                whole: wish.whole,
                restore,
            },
            false => ResponseSide::Hidden { first_token_due },
        };
        let answer = mutation::go_on(To::ResponseHeaders, changes);
        let answer = if asked {
            mutation::with_response_body(answer, context.modes.request)
        } else {
            answer
        };
        let mut effects = vec![reply(answer), Effect::Answered(head)];
        if !first_token_due {
            effects.push(Effect::FirstToken { seen: false });
        }
        effects
    }

    pub(super) fn on_body(&mut self, context: &Context, piece: Piece) -> Vec<Effect> {
        let end = piece.is_last();
        let mut effects = Vec::new();
        let passed = match self {
            ResponseSide::Ended => return effects,
            ResponseSide::Watched {
                restore: Some(restore),
                ..
            } => {
                let mut changed = restore.push(&piece.body).into_owned();
                if end {
                    changed.extend(restore.finish());
                }
                Some(changed)
            }
            _ => None,
        };
        let replies = match (context.modes.response, passed) {
            (mode, None) => mutation::unchanged(To::ResponseBody, mode, &piece),
            (BodyMode::FullDuplex, Some(changed)) => {
                mutation::pieces(To::ResponseBody, &changed, end).collect()
            }
            (_, Some(changed)) => {
                let go_on = mutation::go_on(To::ResponseBody, HeaderChanges::default());
                vec![mutation::with_body(go_on, changed)]
            }
        };
        effects.extend(replies.into_iter().map(reply));
        let Piece { body, .. } = piece;
        if !body.is_empty() {
            effects.extend(self.on_first_token());
            if matches!(self, ResponseSide::Watched { whole: true, .. }) {
                effects.push(Effect::Answer(body));
            }
        }
        if end {
            *self = ResponseSide::Ended;
            effects.push(Effect::Finished);
        }
        effects
    }

    pub(super) fn on_first_token(&mut self) -> Vec<Effect> {
        match self {
            ResponseSide::Hidden {
                first_token_due: due @ true,
            }
            | ResponseSide::Watched {
                first_token_due: due @ true,
                ..
            } => {
                *due = false;
                vec![Effect::FirstToken { seen: true }]
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn on_trailers(&mut self, context: &Context) -> Vec<Effect> {
        let mut effects = Vec::new();
        // Only in full duplex is there still a way for what was held back of the body.
        if let (
            BodyMode::FullDuplex,
            ResponseSide::Watched {
                restore: Some(restore),
                ..
            },
        ) = (context.modes.response, &mut *self)
        {
            let held = restore.finish();
            if !held.is_empty() {
                effects.extend(mutation::pieces(To::ResponseBody, &held, false).map(reply));
            }
        }
        effects.push(reply(mutation::response_trailers()));
        if !matches!(self, ResponseSide::Ended) {
            *self = ResponseSide::Ended;
            effects.push(Effect::Finished);
        }
        effects
    }
}

/// Whether the body of the answer comes to us, or would if we asked for it: Envoy takes no such wish in an exchange whose
/// request body is in full duplex.
fn can_be_shown(context: &Context) -> bool {
    context.modes.response != BodyMode::None || !context.modes.request.is_sent_back()
}

fn answer_headers(context: &Context, head: &ResponseHead) -> HeaderChanges {
    let mut changes = HeaderChanges::default();
    if let Some(directions) = &context.directions {
        context
            .options
            .tell(&directions.steer, context.served_by, &mut changes);
    }
    if context.options.conformance {
        let served = match head.from {
            AnsweredBy::Worker(address) => address.to_string(),
            _ => "fail: missing destination endpoint served metadata".to_owned(),
        };
        changes.set(headers::CONFORMANCE_SERVED, served);
    }
    changes
}
