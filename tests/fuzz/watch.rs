//! What has gone into an exchange and come out of it, and what has to hold between the two.

use std::collections::HashMap;

use bytes::Bytes;
use envoy_types::pb::envoy::service::ext_proc::v3 as proto;
use proto::body_mutation::Mutation;
use proto::processing_request::Request;
use proto::processing_response::Response;
use warmroute::ext_proc::exchange::Directions;
use warmroute::ext_proc::headers;
use warmroute::ext_proc::message::{BodyMode, Modes};
use warmroute::ext_proc::mutation::CHUNK;
use warmroute::ext_proc::{Effect, Exchange};
use warmroute::openai::restore::Restorer;

const REQUEST_HEADERS: &str = "request headers";
const REQUEST_BODY: &str = "request body";
const REQUEST_TRAILERS: &str = "request trailers";
const RESPONSE_HEADERS: &str = "response headers";
const RESPONSE_BODY: &str = "response body";
const RESPONSE_TRAILERS: &str = "response trailers";

/// The request as a sensible gateway sends it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Sent {
    Nothing,
    Headers,
    Body,
    All,
}

/// One body on its way through.
#[derive(Default)]
struct Passed {
    /// What has to go back.
    due: Vec<u8>,
    back: Vec<u8>,
    ends: usize,
    ended: bool,
}

/// An exchange from outside.
pub(crate) struct Watch {
    modes: Modes,
    /// Whether the modes were other ones when the first message came.
    remodelled: bool,
    sent: HashMap<&'static str, usize>,
    replied: HashMap<&'static str, usize>,
    effects: HashMap<&'static str, usize>,
    request: Sent,
    /// Whether the request came in an order that makes sense, and gets a worker's answer.
    sensible: bool,
    ended_by_body: bool,
    refused: bool,
    /// Routing headers that the client sent.
    forged: Vec<&'static str>,
    upload: Passed,
    answer: Passed,
    restorer: Option<Restorer>,
    answered: bool,
    content_length: Option<u64>,
    told_length: bool,
}

impl Watch {
    pub(crate) fn new(modes: Modes) -> Self {
        Self {
            modes,
            remodelled: false,
            sent: HashMap::new(),
            replied: HashMap::new(),
            effects: HashMap::new(),
            request: Sent::Nothing,
            sensible: true,
            ended_by_body: false,
            refused: false,
            forged: Vec::new(),
            upload: Passed::default(),
            answer: Passed::default(),
            restorer: None,
            answered: false,
            content_length: None,
            told_length: false,
        }
    }

    /// How bodies travel, after the message that may say so.
    pub(crate) fn modes(&mut self, modes: Modes) {
        if modes != self.modes && self.sent.values().sum::<usize>() > 1 {
            self.remodelled = true;
            self.sensible = false;
        }
        self.modes = modes;
    }

    /// A message, before it is taken.
    pub(crate) fn sends(&mut self, wire: &proto::ProcessingRequest, exchange: &Exchange) {
        if let Some(config) = &wire.protocol_config
            && self.sent.is_empty()
        {
            // What the exchange will make of it, without asking it.
            let mode = |wire| match wire {
                2 => BodyMode::Buffered,
                3 => BodyMode::BufferedPartial,
                1 => BodyMode::Streamed,
                4 => BodyMode::FullDuplex,
                0 => BodyMode::None,
                _ => BodyMode::Grpc,
            };
            self.modes = Modes {
                request: mode(config.request_body_mode),
                response: mode(config.response_body_mode),
            };
        }
        let Some(request) = &wire.request else { return };
        *self.sent.entry(name_of(request)).or_default() += 1;
        let waits = exchange.is_routing() && self.modes.request != BodyMode::FullDuplex;
        match request {
            Request::RequestHeaders(sent) => {
                self.sensible &= self.request == Sent::Nothing;
                self.request = if sent.end_of_stream {
                    Sent::All
                } else {
                    Sent::Headers
                };
                let named = |name: &str| {
                    sent.headers
                        .iter()
                        .flat_map(|map| &map.headers)
                        .any(|header| header.key.eq_ignore_ascii_case(name))
                };
                if self.sent[REQUEST_HEADERS] > 1 {
                    return;
                }
                let known = [
                    headers::WORKER_ID,
                    headers::ENDPOINT,
                    headers::MODE,
                    headers::DP_RANK,
                ];
                self.forged = known.into_iter().filter(|name| named(name)).collect();
                self.told_length = named("content-length");
            }
            Request::RequestBody(body) => {
                let end = body.end_of_stream || body.end_of_stream_without_message;
                self.sensible &= !waits && self.body_fits();
                self.request = if end { Sent::All } else { Sent::Body };
                self.ended_by_body |= end;
                self.upload.due.extend_from_slice(&body.body);
            }
            Request::RequestTrailers(_) => {
                self.sensible &= !waits && matches!(self.request, Sent::Headers | Sent::Body);
                self.request = Sent::All;
            }
            Request::ResponseHeaders(_) => {
                // The gateway answers by itself, and wants no route.
                self.sensible &= !exchange.is_routing() && self.request != Sent::Nothing;
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
                        .map(Restorer::finish)
                        .unwrap_or_default(),
                );
                self.answer.ended = true;
            }
        }
    }

    fn body_fits(&self) -> bool {
        match self.modes.request {
            BodyMode::None => false,
            BodyMode::Buffered | BodyMode::BufferedPartial => self.request == Sent::Headers,
            BodyMode::Streamed | BodyMode::FullDuplex | BodyMode::Grpc => {
                matches!(self.request, Sent::Headers | Sent::Body)
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

    /// The answer to a route, before it is given.
    pub(crate) fn routes(
        &mut self,
        directions: &Directions,
        whole: Option<&Bytes>,
        exchange: &Exchange,
    ) {
        let (Some(edit), true) = (&directions.edit, exchange.is_routing()) else {
            return;
        };
        let replaced = whole.map_or(0, Bytes::len);
        // What came before the headers has gone back already.
        let from = self.upload.back.len();
        let to = (from + replaced).min(self.upload.due.len());
        self.upload.due.splice(from..to, edit.body.iter().copied());
        if !self.answered {
            let restore = edit
                .restore
                .as_ref()
                .filter(|_| self.modes.response != BodyMode::Grpc);
            self.restorer = restore.map(|names| Restorer::new(&names.served, &names.asked));
        }
    }

    /// What comes out.
    pub(crate) fn sees(&mut self, effect: Effect) {
        let finished = self.effects.contains_key("finished");
        let name = match effect {
            Effect::Reply(reply) => {
                return self.reply(reply.response.expect("only a wish to wait has no response"));
            }
            Effect::Route(_) => "route",
            Effect::Answered(_) => "answered",
            Effect::FirstToken { .. } => "first token",
            Effect::Finished => "finished",
            Effect::Answer(_) => return assert!(!finished, "an answer goes on after its end"),
        };
        assert!(!finished || name == "route", "{name} after the end");
        *self.effects.entry(name).or_default() += 1;
        self.answered |= name == "answered";
        // A head without a body ends it.
        self.answer.ended |= name == "finished";
    }

    fn reply(&mut self, response: Response) {
        let name = match response {
            Response::RequestHeaders(reply) => {
                self.request_headers(reply.response.unwrap_or_default());
                REQUEST_HEADERS
            }
            Response::RequestBody(reply) => {
                self.upload.takes(reply.response, self.modes.request);
                REQUEST_BODY
            }
            Response::RequestTrailers(_) => REQUEST_TRAILERS,
            Response::ResponseHeaders(_) => RESPONSE_HEADERS,
            Response::ResponseBody(reply) => {
                self.answer.takes(reply.response, self.modes.response);
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

    /// Nothing is answered that was not sent, and nothing happens twice that can happen once.
    pub(crate) fn check(&self) {
        for (name, replied) in &self.replied {
            let sent = self.sent.get(name).copied().unwrap_or(0);
            let (passed, mode) = match *name {
                REQUEST_BODY => (&self.upload, self.modes.request),
                _ => (&self.answer, self.modes.response),
            };
            // In full duplex a body goes back in pieces of its own.
            let pieces = if mode == BodyMode::FullDuplex {
                2 + passed.due.len() / CHUNK
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
            let Passed { due, back, .. } = &self.upload;
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

    /// Whether the request has begun and not ended.
    pub(crate) fn request_open(&self) -> bool {
        let buffered = matches!(
            self.modes.request,
            BodyMode::Buffered | BodyMode::BufferedPartial
        );
        match self.request {
            Sent::Headers => self.modes.request != BodyMode::None,
            Sent::Body => !buffered,
            Sent::Nothing | Sent::All => false,
        }
    }

    /// The request is over: where it made sense, everything was answered and every byte went back.
    pub(crate) fn request_ended(&self) {
        if !self.sensible || self.request == Sent::Nothing {
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
        if let Some(length) = self.content_length.filter(|_| !self.told_length) {
            assert_eq!(
                length,
                self.upload.back.len() as u64,
                "the length that the engine is told"
            );
        }
    }

    /// Everything is over.
    pub(crate) fn ended(&self) {
        assert_eq!(self.effects.get("finished"), Some(&1), "no end");
    }
}

impl Passed {
    fn takes(&mut self, reply: Option<proto::CommonResponse>, mode: BodyMode) {
        match reply
            .and_then(|common| common.body_mutation)
            .and_then(|body| body.mutation)
        {
            Some(Mutation::StreamedResponse(piece)) => {
                assert!(
                    mode.is_sent_back(),
                    "pieces are for modes in which the body is sent back"
                );
                assert!(piece.body.len() <= CHUNK || mode == BodyMode::Grpc);
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
