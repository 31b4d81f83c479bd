//! The filter that only observes the first token. It replies before it reports the first token, and
//! it ends its stream after the first content of the response body. It also replies on streams of
//! unknown exchanges, such as Envoy's own responses, so that it never blocks a response.
//!
//! Decision 0004.

use warmroute_tokens::openai::usage::ContentDetector;

use super::header_changes::HeaderChanges;
use super::message::{BodyModes, ExchangeMessage, IncomingMessage, is_sent_back};
use super::mutation::{self, MessageKind};
use super::response_content::{ContentReport, MissingContent};
use super::returned_piece::ExtProcReply;
use super::wire::BodyPiece;

/// Maximum number of pieces of a response body that are observed before its first content. Pings
/// and comments of a front end fit, and an event of some megabytes that repeats the request.
const MAX_PIECES: usize = 256;

/// Replies to one message.
#[derive(Debug)]
pub(super) struct ProbeReply {
    /// Replies in order.
    pub(super) replies: Vec<ExtProcReply>,
    /// Key of an exchange, and the report about its response.
    pub(super) report: Option<(String, ContentReport)>,
    /// Whether the stream may end.
    pub(super) ends_stream: bool,
}

/// One stream of the filter.
#[derive(Debug, Default)]
pub(super) struct FirstTokenProbe {
    exchange_key: Option<String>,
    detector: ContentDetector,
    /// Number of observed pieces.
    pieces: usize,
    /// Whether a report was made.
    has_reported: bool,
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
        let (replies, report) = match incoming.message {
            None => (Vec::new(), None),
            Some(ExchangeMessage::RequestHeaders { .. }) => {
                (continued(MessageKind::RequestHeaders), None)
            }
            Some(ExchangeMessage::RequestBody(piece)) => {
                (self.pass_body(MessageKind::RequestBody, &piece), None)
            }
            Some(ExchangeMessage::RequestTrailers) => {
                (vec![mutation::request_trailers().into()], None)
            }
            Some(ExchangeMessage::ResponseHeaders {
                end_of_stream: end, ..
            }) => (
                continued(MessageKind::ResponseHeaders),
                end.then(|| self.report_at_end()),
            ),
            Some(ExchangeMessage::ResponseBody(piece)) => (
                self.pass_body(MessageKind::ResponseBody, &piece),
                self.observe(&piece),
            ),
            Some(ExchangeMessage::ResponseTrailers) => (
                vec![mutation::response_trailers().into()],
                Some(self.report_at_end()),
            ),
        };
        // If the response passes through warmroute, ending the stream early would lose the rest of
        // it.
        let duplex = self.modes.is_some_and(|modes| is_sent_back(modes.response));
        let is_first = report.is_some() && !std::mem::replace(&mut self.has_reported, true);
        ProbeReply {
            replies,
            ends_stream: report.is_some() && !duplex,
            report: self.exchange_key.clone().zip(report).filter(|_| is_first),
        }
    }

    /// Observes a piece of the response body. Returns the report that it permits.
    fn observe(&mut self, piece: &BodyPiece) -> Option<ContentReport> {
        if self.has_reported {
            return None;
        }
        self.pieces += 1;
        if self.detector.push(&piece.body) {
            Some(ContentReport::Content)
        } else if piece.is_last() {
            Some(self.report_at_end())
        } else {
            (self.pieces >= MAX_PIECES).then_some(ContentReport::Stopped)
        }
    }

    fn report_at_end(&mut self) -> ContentReport {
        self.detector.finish();
        MissingContent::from_evidence(self.detector.evidence())
            .map_or(ContentReport::Content, ContentReport::Ended)
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

    fn report(report: ContentReport) -> Option<(String, ContentReport)> {
        Some(("7".to_owned(), report))
    }

    const CONTENT: &[u8] = b"data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n";

    #[test]
    fn probe_ends_with_first_content() {
        let mut probe = FirstTokenProbe::default();
        let head = ExchangeMessage::ResponseHeaders {
            head: ResponseHead::default(),
            end_of_stream: false,
        };
        let (begin, end) = CONTENT.split_at(20);
        let steps = [
            (head, None),
            (body(b"", false), None),
            (body(b": ping\n\nevent: response.created\n", false), None),
            (
                body(b"data: {\"type\":\"response.created\"}\n\n", false),
                None,
            ),
            (body(begin, false), None),
            (body(end, false), report(ContentReport::Content)),
        ];
        for (message, expected) in steps {
            let reply = probe.on_message(incoming(message, Some("7")));
            assert_eq!(
                (reply.replies.len(), reply.ends_stream),
                (1, expected.is_some())
            );
            assert_eq!(reply.report, expected);
        }
    }

    #[test]
    fn probe_reports_end_without_content() {
        let cases: [(&[u8], MissingContent); 5] = [
            (b"", MissingContent::Empty),
            (b"data: [DONE]\n\n", MissingContent::Empty),
            (
                b"data: {\"error\":{\"code\":500}}\n\n",
                MissingContent::Error,
            ),
            (
                b"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n",
                MissingContent::OutputEnded,
            ),
            (
                b"data: {\"choices\":[],\"usage\":{\"completion_tokens\":1}}\n\n",
                MissingContent::OutputCounted,
            ),
        ];
        for (bytes, missing) in cases {
            let end = ExchangeMessage::ResponseTrailers;
            for (bytes, last) in [
                (bytes, body(b"", true)),
                (bytes, end),
                (b"", body(bytes, true)),
            ] {
                let mut probe = FirstTokenProbe::default();
                let first = probe.on_message(incoming(body(bytes, false), Some("7")));
                assert_eq!((first.report, first.ends_stream), (None, false));
                let reply = probe.on_message(incoming(last, Some("7")));
                assert!(reply.ends_stream);
                assert_eq!(reply.report, report(ContentReport::Ended(missing)));
            }
        }
    }

    #[test]
    fn probe_stops_after_many_pieces_without_content() {
        let mut probe = FirstTokenProbe::default();
        for piece in 1..=MAX_PIECES {
            let reply = probe.on_message(incoming(body(b": ping\n\n", false), Some("7")));
            let stops = piece == MAX_PIECES;
            assert_eq!(reply.ends_stream, stops, "{piece}");
            assert_eq!(reply.report.is_some(), stops);
        }
    }

    #[test]
    fn unknown_exchange_gets_replies_and_full_duplex_continues() {
        let reply = FirstTokenProbe::default().on_message(incoming(body(b"own", true), None));
        assert_eq!(
            (reply.replies.len(), reply.report, reply.ends_stream),
            (1, None, true)
        );
        let mut duplex = FirstTokenProbe::default();
        let modes = BodyModes {
            request: BodyMode::None,
            response: BodyMode::FullDuplexStreamed,
        };
        let first = IncomingMessage {
            modes: Some(modes),
            ..incoming(body(b"x", false), Some("7"))
        };
        let reply = duplex.on_message(first);
        assert_eq!(
            (reply.report, reply.ends_stream),
            (report(ContentReport::Content), false)
        );
        let reply = duplex.on_message(incoming(body(b"y", true), Some("7")));
        assert_eq!(
            (reply.replies.len(), reply.report, reply.ends_stream),
            (1, None, false),
            "only once"
        );
    }
}
