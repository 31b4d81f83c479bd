//! The filter that only observes the first token. It replies before it reports the first token, and
//! it ends its stream after the first piece of the response body. It also replies on streams of
//! unknown exchanges, such as Envoy's own responses, so that it never blocks a response.

use super::header_changes::HeaderChanges;
use super::message::{BodyModes, ExchangeMessage, IncomingMessage};
use super::mutation::{self, MessageKind};
use super::returned_piece::ExtProcReply;
use super::wire::BodyPiece;

/// Replies to one message.
#[derive(Debug)]
pub(super) struct ProbeReply {
    /// Replies in order.
    pub(super) replies: Vec<ExtProcReply>,
    /// Key of the exchange whose first token the message carries.
    pub(super) first_token_of: Option<String>,
    /// Whether the stream may end.
    pub(super) ends_stream: bool,
}

/// One stream of the filter.
#[derive(Debug, Default)]
pub(super) struct FirstTokenProbe {
    exchange_key: Option<String>,
    /// Whether the first token was observed.
    first_token_seen: bool,
    modes: Option<BodyModes>,
}

impl FirstTokenProbe {
    /// Returns whether a stream with this first message belongs to the probe filter.
    pub(super) fn is_probe_stream(first: &IncomingMessage) -> bool {
        let response = matches!(
            first.message,
            Some(ExchangeMessage::ResponseHeaders { .. } | ExchangeMessage::ResponseBody(_))
        );
        response && first.metadata.exchange_key.is_some()
    }

    /// Handles one message.
    pub(super) fn on_message(&mut self, incoming: IncomingMessage) -> ProbeReply {
        self.modes = self.modes.or(incoming.modes);
        if incoming.metadata.exchange_key.is_some() {
            self.exchange_key = incoming.metadata.exchange_key;
        }
        let continued = |to| vec![mutation::continue_with(to, HeaderChanges::default()).into()];
        let (replies, seen, is_over) = match incoming.message {
            None => (Vec::new(), false, false),
            Some(ExchangeMessage::RequestHeaders { .. }) => {
                (continued(MessageKind::RequestHeaders), false, false)
            }
            Some(ExchangeMessage::RequestBody(piece)) => (
                self.pass_body(MessageKind::RequestBody, &piece),
                false,
                false,
            ),
            Some(ExchangeMessage::RequestTrailers) => {
                (vec![mutation::request_trailers().into()], false, false)
            }
            Some(ExchangeMessage::ResponseHeaders {
                end_of_stream: end, ..
            }) => (continued(MessageKind::ResponseHeaders), false, end),
            Some(ExchangeMessage::ResponseBody(piece)) => {
                let seen = !piece.body.is_empty();
                (
                    self.pass_body(MessageKind::ResponseBody, &piece),
                    seen,
                    seen || piece.is_last(),
                )
            }
            Some(ExchangeMessage::ResponseTrailers) => {
                (vec![mutation::response_trailers().into()], false, true)
            }
        };
        // If the response passes through warmroute, ending the stream early would lose the rest of
        // it.
        let duplex = self
            .modes
            .is_some_and(|modes| modes.response.is_sent_back());
        let first = seen && !self.first_token_seen;
        self.first_token_seen |= seen;
        ProbeReply {
            replies,
            first_token_of: self.exchange_key.clone().filter(|_| first),
            ends_stream: is_over && !duplex,
        }
    }

    fn pass_body(&self, to: MessageKind, piece: &BodyPiece) -> Vec<ExtProcReply> {
        let modes = self.modes.unwrap_or_default();
        let mode = if to == MessageKind::RequestBody {
            modes.request
        } else {
            modes.response
        };
        mutation::pass_body(to, mode, piece)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ext_proc::headers::ResponseHead;
    use crate::ext_proc::message::BodyMode;
    use crate::ext_proc::metadata::GatewayMetadata;

    fn incoming(message: ExchangeMessage, exchange_key: Option<&str>) -> IncomingMessage {
        let metadata = GatewayMetadata {
            exchange_key: exchange_key.map(str::to_owned),
            ..GatewayMetadata::default()
        };
        IncomingMessage {
            modes: None,
            metadata,
            message: Some(message),
        }
    }

    fn body(bytes: &'static [u8], end: bool) -> ExchangeMessage {
        ExchangeMessage::ResponseBody(BodyPiece::new(bytes, end))
    }

    #[test]
    fn probe_ends_with_first_piece_of_body() {
        let mut probe = FirstTokenProbe::default();
        let head = ExchangeMessage::ResponseHeaders {
            head: ResponseHead::default(),
            end_of_stream: false,
        };
        let steps = [
            (incoming(head, Some("7")), None, false),
            (incoming(body(b"", false), Some("7")), None, false),
            (incoming(body(b"data", false), Some("7")), Some("7"), true),
        ];
        for (message, first_token, ends) in steps {
            let reply = probe.on_message(message);
            assert_eq!((reply.replies.len(), reply.ends_stream), (1, ends));
            assert_eq!(reply.first_token_of.as_deref(), first_token);
        }
    }

    #[test]
    fn unknown_exchange_gets_replies_and_full_duplex_continues() {
        let reply = FirstTokenProbe::default().on_message(incoming(body(b"own", true), None));
        assert_eq!(
            (reply.replies.len(), reply.first_token_of, reply.ends_stream),
            (1, None, true)
        );
        let mut duplex = FirstTokenProbe::default();
        let modes = BodyModes {
            request: BodyMode::None,
            response: BodyMode::FullDuplex,
        };
        let first = IncomingMessage {
            modes: Some(modes),
            ..incoming(body(b"x", false), Some("7"))
        };
        let reply = duplex.on_message(first);
        assert_eq!(
            (reply.first_token_of.as_deref(), reply.ends_stream),
            (Some("7"), false)
        );
        let reply = duplex.on_message(incoming(body(b"y", true), Some("7")));
        assert_eq!(
            (reply.replies.len(), reply.first_token_of, reply.ends_stream),
            (1, None, false),
            "only once"
        );
    }
}
