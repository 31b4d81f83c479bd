//! Input and output of an exchange, and the invariants between them.

use std::collections::HashMap;

use bytes::Bytes;
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use proto::body_mutation::Mutation;
use proto::processing_request::Request;
use proto::processing_response::Response;
use warmroute::ext_proc::message::{BodyMode, BodyModes};
use warmroute::ext_proc::mutation::MAX_CHUNK_BYTES;
use warmroute::ext_proc::reply::RouteReply;
use warmroute::ext_proc::{Effect, Exchange, headers};
use warmroute_tokens::openai::restore::ModelNameRestorer;

const REQUEST_HEADERS: &str = "request headers";
const REQUEST_BODY: &str = "request body";
const REQUEST_TRAILERS: &str = "request trailers";
const RESPONSE_HEADERS: &str = "response headers";
const RESPONSE_BODY: &str = "response body";
const RESPONSE_TRAILERS: &str = "response trailers";

/// State of the request as a well-behaved gateway sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SentUpdate {
    Nothing,
    Headers,
    Body,
    All,
}

/// One body on its way through the exchange.
#[derive(Default)]
struct PassedBody {
    /// Bytes that must be returned.
    due: Vec<u8>,
    back: Vec<u8>,
    ends: usize,
    ended: bool,
}

/// An exchange observed from outside.
pub(crate) struct ExchangeWatch {
    modes: BodyModes,
    /// True if the modes changed before the first message.
    remodelled: bool,
    sent: HashMap<&'static str, usize>,
    replied: HashMap<&'static str, usize>,
    effects: HashMap<&'static str, usize>,
    request: SentUpdate,
    /// True if the request is well-formed and gets a worker's response.
    sensible: bool,
    ended_by_body: bool,
    refused: bool,
    /// Routing headers that the client sent.
    forged: Vec<&'static str>,
    upload: PassedBody,
    answer: PassedBody,
    restorer: Option<ModelNameRestorer>,
    answered: bool,
    content_length: Option<u64>,
    has_content_length: bool,
}

/// Body mode that the exchange will use, computed independently.
fn expected_mode(wire: i32) -> BodyMode {
    match wire {
        2 => BodyMode::Buffered,
        3 => BodyMode::BufferedPartial,
        1 => BodyMode::Streamed,
        4 => BodyMode::FullDuplex,
        0 => BodyMode::None,
        _ => BodyMode::Grpc,
    }
}

impl ExchangeWatch {
    pub(crate) fn new(modes: BodyModes) -> Self {
        Self {
            modes,
            remodelled: false,
            sent: HashMap::new(),
            replied: HashMap::new(),
            effects: HashMap::new(),
            request: SentUpdate::Nothing,
            sensible: true,
            ended_by_body: false,
            refused: false,
            forged: Vec::new(),
            upload: PassedBody::default(),
            answer: PassedBody::default(),
            restorer: None,
            answered: false,
            content_length: None,
            has_content_length: false,
        }
    }

    /// Sets the body modes after the message that may change them.
    pub(crate) fn modes(&mut self, modes: BodyModes) {
        if modes != self.modes && self.sent.values().sum::<usize>() > 1 {
            self.remodelled = true;
            self.sensible = false;
        }
        self.modes = modes;
    }

    /// Records a message before the exchange processes it.
    pub(crate) fn sends(&mut self, wire: &proto::ProcessingRequest, exchange: &Exchange) {
        if let Some(config) = &wire.protocol_config
            && self.sent.is_empty()
        {
            self.modes = BodyModes {
                request: expected_mode(config.request_body_mode),
                response: expected_mode(config.response_body_mode),
            };
        }
        let Some(request) = &wire.request else { return };
        *self.sent.entry(name_of(request)).or_default() += 1;
        let waits = exchange.is_routing() && self.modes.request != BodyMode::FullDuplex;
        match request {
            Request::RequestHeaders(sent) => self.sends_request_headers(sent),
            Request::RequestBody(body) => {
                let end = body.end_of_stream || body.end_of_stream_without_message;
                self.sensible &= !waits && self.body_fits();
                self.request = if end {
                    SentUpdate::All
                } else {
                    SentUpdate::Body
                };
                self.ended_by_body |= end;
                self.upload.due.extend_from_slice(&body.body);
            }
            Request::RequestTrailers(_) => {
                self.sensible &=
                    !waits && matches!(self.request, SentUpdate::Headers | SentUpdate::Body);
                self.request = SentUpdate::All;
            }
            Request::ResponseHeaders(_) => {
                // The gateway responds itself and needs no route.
                self.sensible &= !exchange.is_routing() && self.request != SentUpdate::Nothing;
            }
            Request::ResponseBody(body) => {
                let end = body.end_of_stream || body.end_of_stream_without_message;
                self.answers(&body.body, end);
            }
            Request::ResponseTrailers(_) if self.answer.ended => {}
            Request::ResponseTrailers(_) => {
                self.answer.due.extend(
                    self.restorer
                        .as_mut()
                        .filter(|_| self.answered)
                        .map(ModelNameRestorer::finish)
                        .unwrap_or_default(),
                );
                self.answer.ended = true;
            }
        }
    }

    fn sends_request_headers(&mut self, sent: &proto::HttpHeaders) {
        self.sensible &= self.request == SentUpdate::Nothing;
        self.request = if sent.end_of_stream {
            SentUpdate::All
        } else {
            SentUpdate::Headers
        };
        if self.sent[REQUEST_HEADERS] > 1 {
            return;
        }
        let named = |name: &str| {
            sent.headers
                .iter()
                .flat_map(|map| &map.headers)
                .any(|header| header.key.eq_ignore_ascii_case(name))
        };
        let known = [
            headers::WORKER_ID,
            headers::ENDPOINT,
            headers::MODE,
            headers::DP_RANK,
        ];
        self.forged = known.into_iter().filter(|name| named(name)).collect();
        self.has_content_length = named("content-length");
    }

    fn body_fits(&self) -> bool {
        match self.modes.request {
            BodyMode::None => false,
            BodyMode::Buffered | BodyMode::BufferedPartial => self.request == SentUpdate::Headers,
            BodyMode::Streamed | BodyMode::FullDuplex | BodyMode::Grpc => {
                matches!(self.request, SentUpdate::Headers | SentUpdate::Body)
            }
        }
    }

    fn answers(&mut self, body: &[u8], end: bool) {
        if self.answer.ended {
            return;
        }
        match self.restorer.as_mut().filter(|_| self.answered) {
            Some(restorer) => {
                self.answer.due.extend_from_slice(&restorer.push(body));
                if end {
                    self.answer.due.extend(restorer.finish());
                }
            }
            None => self.answer.due.extend_from_slice(body),
        }
        self.answer.ended |= end;
    }

    /// Records the answer to a routing effect before it is applied.
    pub(crate) fn routes(
        &mut self,
        directions: &RouteReply,
        whole: Option<&Bytes>,
        exchange: &Exchange,
    ) {
        let (Some(edit), true) = (&directions.body_edit, exchange.is_routing()) else {
            return;
        };
        let replaced = whole.map_or(0, Bytes::len);
        // Bytes before the headers have been returned already.
        let from = self.upload.back.len();
        let to = (from + replaced).min(self.upload.due.len());
        self.upload.due.splice(from..to, edit.body.iter().copied());
        if !self.answered {
            let restore = edit
                .model_rename
                .as_ref()
                .filter(|_| self.modes.response != BodyMode::Grpc);
            self.restorer =
                restore.map(|names| ModelNameRestorer::new(&names.served, &names.requested));
        }
    }

    /// Records an effect.
    pub(crate) fn sees(&mut self, effect: Effect) {
        let finished = self.effects.contains_key("finished");
        let name = match effect {
            Effect::Reply(reply) => {
                return self.reply(reply.response.expect("only a wish to wait has no response"));
            }
            Effect::Route(_) => "route",
            Effect::ResponseStarted(_) => "answered",
            Effect::FirstToken { .. } => "first token",
            Effect::Completed => "finished",
            Effect::ResponseChunk(_) => {
                return assert!(!finished, "an answer goes on after its end");
            }
        };
        assert!(!finished || name == "route", "{name} after the end");
        *self.effects.entry(name).or_default() += 1;
        self.answered |= name == "answered";
        // Response headers without a body end the response.
        self.answer.ended |= name == "finished";
    }

    fn reply(&mut self, response: Response) {
        let name = match response {
            Response::RequestHeaders(reply) => {
                self.request_headers(reply.response.unwrap_or_default());
                REQUEST_HEADERS
            }
            Response::RequestBody(reply) => {
                self.upload.accept_reply(reply.response, self.modes.request);
                REQUEST_BODY
            }
            Response::RequestTrailers(_) => REQUEST_TRAILERS,
            Response::ResponseHeaders(_) => RESPONSE_HEADERS,
            Response::ResponseBody(reply) => {
                self.answer
                    .accept_reply(reply.response, self.modes.response);
                RESPONSE_BODY
            }
            Response::ResponseTrailers(_) => RESPONSE_TRAILERS,
            Response::ImmediateResponse(_) => {
                assert!(
                    !std::mem::replace(&mut self.refused, true),
                    "two answers of our own"
                );
                self.sensible = false;
                return;
            }
            other => panic!("unexpected {other:?}"),
        };
        *self.replied.entry(name).or_default() += 1;
    }

    fn request_headers(&mut self, common: proto::CommonResponse) {
        let changes = common.header_mutation.unwrap_or_default();
        for forged in &self.forged {
            let set = changes
                .set_headers
                .iter()
                .filter_map(|option| option.header.as_ref())
                .any(|set| set.key == *forged);
            let removed = changes.remove_headers.iter().any(|name| name == forged);
            assert!(
                set != removed,
                "{forged} of a client: set {set}, removed {removed}"
            );
        }
        let mut set = changes
            .set_headers
            .iter()
            .filter_map(|option| option.header.as_ref());
        let length = set.find(|set| set.key == "content-length");
        self.content_length =
            length.and_then(|set| std::str::from_utf8(&set.raw_value).ok()?.parse().ok());
    }

    /// Every answer belongs to a message, and unique events happen once.
    pub(crate) fn check(&self) {
        for (name, replied) in &self.replied {
            let sent = self.sent.get(name).copied().unwrap_or(0);
            let (passed, mode) = match *name {
                REQUEST_BODY => (&self.upload, self.modes.request),
                _ => (&self.answer, self.modes.response),
            };
            // In full-duplex mode a body is returned in separate chunks.
            let pieces = if mode == BodyMode::FullDuplex {
                2 + passed.due.len() / MAX_CHUNK_BYTES
            } else {
                0
            };
            let most = if sent == 0 { 0 } else { sent + pieces };
            assert!(
                self.remodelled || *replied <= most,
                "{replied} replies to {sent} {name}"
            );
        }
        for (name, times) in &self.effects {
            assert_eq!(*times, 1, "{name}");
        }
        if self.remodelled {
            return;
        }
        if self.modes.request == BodyMode::FullDuplex {
            let PassedBody { due, back, .. } = &self.upload;
            assert!(
                due.starts_with(back),
                "the request goes on as something else"
            );
        }
        if self.modes.response.is_sent_back() {
            assert_eq!(
                self.answer.back, self.answer.due,
                "the answer goes on as something else"
            );
        }
        assert!(
            self.upload.ends <= 1 && self.answer.ends <= 1,
            "two ends of a body"
        );
    }

    /// Returns true if the request has begun and not ended.
    pub(crate) fn request_open(&self) -> bool {
        let buffered = matches!(
            self.modes.request,
            BodyMode::Buffered | BodyMode::BufferedPartial
        );
        match self.request {
            SentUpdate::Headers => self.modes.request != BodyMode::None,
            SentUpdate::Body => !buffered,
            SentUpdate::Nothing | SentUpdate::All => false,
        }
    }

    /// Checks a finished request: if it was well-formed, everything was answered and every byte was
    /// returned.
    pub(crate) fn request_ended(&self) {
        if !self.sensible || self.request == SentUpdate::Nothing {
            return;
        }
        let count = |of: &HashMap<&str, usize>, name| of.get(name).copied().unwrap_or(0);
        assert_eq!(
            count(&self.replied, REQUEST_HEADERS),
            1,
            "the request's headers wait for ever"
        );
        assert_eq!(
            count(&self.replied, REQUEST_TRAILERS),
            count(&self.sent, REQUEST_TRAILERS),
            "trailers"
        );
        if self.modes.request != BodyMode::FullDuplex {
            assert_eq!(
                count(&self.replied, REQUEST_BODY),
                count(&self.sent, REQUEST_BODY),
                "bodies wait for ever"
            );
        }
        if !self.modes.request.is_sent_back() {
            return;
        }
        assert_eq!(
            self.upload.back, self.upload.due,
            "a part of the request is lost"
        );
        assert_eq!(
            self.upload.ends,
            usize::from(self.ended_by_body),
            "the end of the request"
        );
        if let Some(length) = self.content_length.filter(|_| !self.has_content_length) {
            assert_eq!(
                length,
                self.upload.back.len() as u64,
                "the length that the engine is told"
            );
        }
    }

    /// Checks a finished exchange.
    pub(crate) fn ended(&self) {
        assert_eq!(self.effects.get("finished"), Some(&1), "no end");
    }
}

impl PassedBody {
    fn accept_reply(&mut self, reply: Option<proto::CommonResponse>, mode: BodyMode) {
        match reply
            .and_then(|common| common.body_mutation)
            .and_then(|body| body.mutation)
        {
            Some(Mutation::StreamedResponse(piece)) => {
                assert!(
                    mode.is_sent_back(),
                    "pieces are for modes in which the body is sent back"
                );
                assert!(piece.body.len() <= MAX_CHUNK_BYTES || mode == BodyMode::Grpc);
                assert_eq!(self.ends, 0, "a piece after the end");
                self.back.extend_from_slice(&piece.body);
                self.ends +=
                    usize::from(piece.end_of_stream || piece.end_of_stream_without_message);
            }
            Some(_) => assert!(!mode.is_sent_back(), "the body is sent back in pieces"),
            None => {}
        }
    }
}

fn name_of(request: &Request) -> &'static str {
    match request {
        Request::RequestHeaders(_) => REQUEST_HEADERS,
        Request::RequestBody(_) => REQUEST_BODY,
        Request::RequestTrailers(_) => REQUEST_TRAILERS,
        Request::ResponseHeaders(_) => RESPONSE_HEADERS,
        Request::ResponseBody(_) => RESPONSE_BODY,
        Request::ResponseTrailers(_) => RESPONSE_TRAILERS,
    }
}
