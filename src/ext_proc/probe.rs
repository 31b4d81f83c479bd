//! The filter that only looks for the first token. It answers first and works after, and it ends its stream after the
//! first piece of the answer: the rest passes by unseen. Streams that belong to none of our exchanges, such as Envoy's own
//! answers, are answered all the same: nothing here may hold up an answer.

use envoy_types::pb::envoy::service::ext_proc::v3::ProcessingResponse;

use super::message::{Incoming, Message, Modes};
use super::mutation::{self, HeaderChanges, To};
use super::wire::Piece;

/// What is told to Envoy, and whether that was the last of it.
#[derive(Debug)]
pub(super) struct Answered {
    /// To Envoy, in order.
    pub(super) replies: Vec<ProcessingResponse>,
    /// The name of the exchange whose first token this was.
    pub(super) first_token: Option<String>,
    /// Whether the stream may end.
    pub(super) ends: bool,
}

/// One stream of the filter.
#[derive(Debug, Default)]
pub(super) struct Probe {
    name: Option<String>,
    /// The first token was seen.
    seen: bool,
    modes: Option<Modes>,
}

impl Probe {
    /// Whether a stream that begins like this is one of the filter.
    pub(super) fn begins(first: &Incoming) -> bool {
        let response = matches!(
            first.message,
            Some(Message::ResponseHeaders { .. } | Message::ResponseBody(_))
        );
        response && first.told.exchange.is_some()
    }

    /// Takes one message.
    pub(super) fn on_message(&mut self, incoming: Incoming) -> Answered {
        self.modes = self.modes.or(incoming.modes);
        if incoming.told.exchange.is_some() {
            self.name = incoming.told.exchange;
        }
        let go_on = |to| vec![mutation::go_on(to, HeaderChanges::default())];
        let (replies, seen, over) = match incoming.message {
            None => (Vec::new(), false, false),
            Some(Message::RequestHeaders { .. }) => (go_on(To::RequestHeaders), false, false),
            Some(Message::RequestBody(piece)) => (self.pass(To::RequestBody, &piece), false, false),
            Some(Message::RequestTrailers) => (vec![mutation::request_trailers()], false, false),
            Some(Message::ResponseHeaders { end, .. }) => (go_on(To::ResponseHeaders), false, end),
            Some(Message::ResponseBody(piece)) => {
                let seen = !piece.body.is_empty();
                (
                    self.pass(To::ResponseBody, &piece),
                    seen,
                    seen || piece.is_last(),
                )
            }
            Some(Message::ResponseTrailers) => (vec![mutation::response_trailers()], false, true),
        };
        // If the response passes through warmroute, ending the stream early would lose the rest of it.
        let duplex = self
            .modes
            .is_some_and(|modes| modes.response.is_sent_back());
        let first = seen && !self.seen;
        self.seen |= seen;
        Answered {
            replies,
            first_token: self.name.clone().filter(|_| first),
            ends: over && !duplex,
        }
    }

    fn pass(&self, to: To, piece: &Piece) -> Vec<ProcessingResponse> {
        let modes = self.modes.unwrap_or_default();
        let mode = if to == To::RequestBody {
            modes.request
        } else {
            modes.response
        };
        mutation::unchanged(to, mode, piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ext_proc::headers::ResponseHead;
    use crate::ext_proc::message::BodyMode;
    use crate::ext_proc::metadata::Told;

    fn incoming(message: Message, name: Option<&str>) -> Incoming {
        let told = Told {
            exchange: name.map(str::to_owned),
            ..Told::default()
        };
        Incoming {
            modes: None,
            told,
            message: Some(message),
        }
    }

    fn body(bytes: &'static [u8], end: bool) -> Message {
        Message::ResponseBody(Piece::new(bytes, end))
    }

    #[test]
    fn the_stream_ends_with_the_first_piece_and_that_is_the_first_token() {
        let mut probe = Probe::default();
        let head = Message::ResponseHeaders {
            head: ResponseHead::default(),
            end: false,
        };
        let steps = [
            (incoming(head, Some("7")), None, false),
            (incoming(body(b"", false), Some("7")), None, false),
            (incoming(body(b"data", false), Some("7")), Some("7"), true),
        ];
        for (message, first_token, ends) in steps {
            let answered = probe.on_message(message);
            assert_eq!((answered.replies.len(), answered.ends), (1, ends));
            assert_eq!(answered.first_token.as_deref(), first_token);
        }
    }

    #[test]
    fn answers_without_a_name_are_answered_and_in_full_duplex_nothing_ends_early() {
        let answered = Probe::default().on_message(incoming(body(b"own", true), None));
        assert_eq!(
            (answered.replies.len(), answered.first_token, answered.ends),
            (1, None, true)
        );
        let mut duplex = Probe::default();
        let modes = Modes {
            request: BodyMode::None,
            response: BodyMode::FullDuplex,
        };
        let first = Incoming {
            modes: Some(modes),
            ..incoming(body(b"x", false), Some("7"))
        };
        let answered = duplex.on_message(first);
        assert_eq!(
            (answered.first_token.as_deref(), answered.ends),
            (Some("7"), false)
        );
        let answered = duplex.on_message(incoming(body(b"y", true), Some("7")));
        assert_eq!(
            (answered.replies.len(), answered.first_token, answered.ends),
            (1, None, false),
            "only once"
        );
    }
}
