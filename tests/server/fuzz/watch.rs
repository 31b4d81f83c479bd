//! Observer of an exchange that checks the invariants between its input and output.

use std::collections::HashMap;

use bytes::Bytes;
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use prost::Message as _;
use proto::body_mutation::Mutation;
use proto::processing_request::Request;
use proto::processing_response::Response;
use warmroute_server::ext_proc::message::{BodyMode, BodyModes};
use warmroute_server::ext_proc::mutation::MAX_CHUNK_BYTES;
use warmroute_server::ext_proc::reply::RouteReply;
use warmroute_server::ext_proc::returned_piece::ExtProcReply;
use warmroute_server::ext_proc::{Effect, Exchange, headers};
use warmroute_tokens::openai::restore::ModelNameRestorer;

const REQUEST_HEADERS: &str = "request headers";
const REQUEST_BODY: &str = "request body";
const REQUEST_TRAILERS: &str = "request trailers";
const RESPONSE_HEADERS: &str = "response headers";
const RESPONSE_BODY: &str = "response body";
const RESPONSE_TRAILERS: &str = "response trailers";

/// Part of the request that has been sent, for a gateway that follows the protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum SentUpdate {
    Nothing,
    Headers,
    Body,
    All,
}

/// One body that passes through the exchange.
#[derive(Default)]
struct PassedBody {
    /// Bytes that the exchange must return.
    due: Vec<u8>,
    returned: Vec<u8>,
    ends: usize,
    ended: bool,
}

/// Observer of an exchange.
pub(crate) struct ExchangeWatch {
    modes: BodyModes,
    /// True if the body modes changed after the first message.
    modes_changed: bool,
    sent: HashMap<&'static str, usize>,
    replied: HashMap<&'static str, usize>,
    effects: HashMap<&'static str, usize>,
    request: SentUpdate,
    /// True if the request is well-formed and reaches a worker.
    well_formed: bool,
    ended_by_body: bool,
    replied_immediately: bool,
    /// Routing headers that the client sent.
    forged: Vec<&'static str>,
    upload: PassedBody,
    answer: PassedBody,
    restorer: Option<ModelNameRestorer>,
    answered: bool,
    content_length: Option<u64>,
    has_content_length: bool,
}

/// Returns the body mode that the exchange must use, computed independently of it.
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
            modes_changed: false,
            sent: HashMap::new(),
            replied: HashMap::new(),
            effects: HashMap::new(),
            request: SentUpdate::Nothing,
            well_formed: true,
            ended_by_body: false,
            replied_immediately: false,
            forged: Vec::new(),
            upload: PassedBody::default(),
            answer: PassedBody::default(),
            restorer: None,
            answered: false,
            content_length: None,
            has_content_length: false,
        }
    }

    /// Sets the body modes after each message that may change them.
    pub(crate) fn modes(&mut self, modes: BodyModes) {
        if modes != self.modes && self.sent.values().sum::<usize>() > 1 {
            self.modes_changed = true;
            self.well_formed = false;
        }
        self.modes = modes;
    }

    /// Records a message before the exchange processes it.
    pub(crate) fn on_message(&mut self, wire: &proto::ProcessingRequest, exchange: &Exchange) {
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
                self.well_formed &= !waits && self.body_fits();
                self.request = if end {
                    SentUpdate::All
                } else {
                    SentUpdate::Body
                };
                self.ended_by_body |= end;
                self.upload.due.extend_from_slice(&body.body);
            }
            Request::RequestTrailers(_) => {
                self.well_formed &=
                    !waits && matches!(self.request, SentUpdate::Headers | SentUpdate::Body);
                self.request = SentUpdate::All;
            }
            Request::ResponseHeaders(_) => {
                // If a route is pending, the gateway responds itself.
                self.well_formed &= !exchange.is_routing() && self.request != SentUpdate::Nothing;
            }
            Request::ResponseBody(body) => {
                let end = body.end_of_stream || body.end_of_stream_without_message;
                self.on_client_bytes(&body.body, end);
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
        self.well_formed &= self.request == SentUpdate::Nothing;
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

    fn on_client_bytes(&mut self, body: &[u8], end: bool) {
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

    /// Records the reply to the effect `Route` before it is applied.
    pub(crate) fn on_route(
        &mut self,
        route_reply: &RouteReply,
        whole: Option<&Bytes>,
        exchange: &Exchange,
    ) {
        let (Some(edit), true) = (&route_reply.body_edit, exchange.is_routing()) else {
            return;
        };
        let replaced = whole.map_or(0, Bytes::len);
        // The exchange has already returned the bytes before the edited body.
        let from = self.upload.returned.len();
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
    pub(crate) fn on_effect(&mut self, effect: Effect) {
        let finished = self.effects.contains_key("finished");
        let name = match effect {
            Effect::Reply(reply) => {
                return self.reply(
                    message_of(&reply)
                        .response
                        .expect("only a timeout extension has no response"),
                );
            }
            Effect::Route(_) => "route",
            Effect::ResponseStarted(_) => "answered",
            Effect::FirstToken { .. } => "first token",
            Effect::ContentMissing(_) => "content missing",
            Effect::Completed => "finished",
            Effect::ResponseStored(_) => "response stored",
            Effect::ResponseChunk(_) => {
                return assert!(!finished, "a response chunk after the end");
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
                    !std::mem::replace(&mut self.replied_immediately, true),
                    "two immediate responses"
                );
                self.well_formed = false;
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

    /// Checks that every reply belongs to a message, and that unique events happen once.
    pub(crate) fn check(&self) {
        for (name, replied) in &self.replied {
            let sent = self.sent.get(name).copied().unwrap_or(0);
            let (passed, mode) = match *name {
                REQUEST_BODY => (&self.upload, self.modes.request),
                _ => (&self.answer, self.modes.response),
            };
            // In full-duplex mode, a body is returned in chunks of its own.
            let pieces = if mode == BodyMode::FullDuplex {
                2 + passed.due.len() / MAX_CHUNK_BYTES
            } else {
                0
            };
            let limit = if sent == 0 { 0 } else { sent + pieces };
            assert!(
                self.modes_changed || *replied <= limit,
                "{replied} replies to {sent} {name}"
            );
        }
        for (name, times) in &self.effects {
            assert_eq!(*times, 1, "{name}");
        }
        if self.modes_changed {
            return;
        }
        if self.modes.request == BodyMode::FullDuplex {
            let PassedBody { due, returned, .. } = &self.upload;
            assert!(
                due.starts_with(returned),
                "the returned request body differs from the sent one"
            );
        }
        if self.modes.response.is_sent_back() {
            assert_eq!(
                self.answer.returned, self.answer.due,
                "the returned response body differs from the sent one"
            );
        }
        assert!(
            self.upload.ends <= 1 && self.answer.ends <= 1,
            "a body ends twice"
        );
    }

    /// Returns true if the request has begun and has not ended.
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

    /// Checks a finished request. If it was well-formed, every message has a reply and every byte
    /// was returned.
    pub(crate) fn request_ended(&self) {
        if !self.well_formed || self.request == SentUpdate::Nothing {
            return;
        }
        let count = |of: &HashMap<&str, usize>, name| of.get(name).copied().unwrap_or(0);
        assert_eq!(
            count(&self.replied, REQUEST_HEADERS),
            1,
            "the request headers have no reply"
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
                "a request body message has no reply"
            );
        }
        if !self.modes.request.is_sent_back() {
            return;
        }
        assert_eq!(
            self.upload.returned, self.upload.due,
            "a part of the request body is lost"
        );
        assert_eq!(
            self.upload.ends,
            usize::from(self.ended_by_body),
            "the end of the request body"
        );
        if let Some(length) = self.content_length.filter(|_| !self.has_content_length) {
            assert_eq!(
                length,
                self.upload.returned.len() as u64,
                "the content length that the engine receives"
            );
        }
    }

    /// Checks a finished exchange.
    pub(crate) fn assert_ended(&self) {
        assert_eq!(
            self.effects.get("finished"),
            Some(&1),
            "the exchange is not completed"
        );
    }
}

impl PassedBody {
    fn accept_reply(&mut self, reply: Option<proto::CommonResponse>, mode: BodyMode) {
        match reply
            .and_then(|common| common.body_mutation)
            .and_then(|body| body.mutation)
        {
            Some(Mutation::StreamedResponse(piece)) => {
                assert!(mode.is_sent_back(), "only some body modes return chunks");
                assert!(piece.body.len() <= MAX_CHUNK_BYTES || mode == BodyMode::Grpc);
                assert_eq!(self.ends, 0, "a chunk after the end");
                self.returned.extend_from_slice(&piece.body);
                self.ends +=
                    usize::from(piece.end_of_stream || piece.end_of_stream_without_message);
            }
            Some(_) => assert!(!mode.is_sent_back(), "the body must be returned in chunks"),
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

/// Returns the message that Envoy decodes.
pub(crate) fn message_of(reply: &ExtProcReply) -> proto::ProcessingResponse {
    proto::ProcessingResponse::decode(&reply.encode_to_vec()[..]).unwrap()
}
