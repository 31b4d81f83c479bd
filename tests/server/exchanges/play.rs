//! Playback of a transcript to a running process. Records the replies.

use std::collections::BTreeMap;
use std::time::Duration;

use envoy_types::pb::envoy::service::ext_proc::v3::{ProcessingRequest, ProcessingResponse};
use serde_json::{Map, Value, json};
use tokio::sync::mpsc;
use tokio::time::{Instant, timeout, timeout_at};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::metadata::{MetadataKey, MetadataValue};
use tonic::{Request, Streaming};
use warmroute_testbed::ports::PATIENCE;

use crate::exchanges::compare::differences;
use crate::exchanges::script::{ExchangeScript, ReturnedBody, ScriptStep, SendStep, StreamEnd};
use crate::exchanges::site::ExchangeSite;
use crate::exchanges::wire;

/// Time to wait for unexpected replies. Later ones are found at the end of the stream.
const SILENCE: Duration = Duration::from_millis(20);

/// Results of the steps.
pub(crate) struct PlaybackResult {
    pub(crate) found: Vec<Value>,
    /// Unexpected replies after the script.
    late: Vec<String>,
}

impl PlaybackResult {
    /// Returns every difference from the transcript.
    pub(crate) fn mismatches(&self, script: &ExchangeScript) -> Vec<String> {
        let steps = script.steps.iter().zip(&self.found).enumerate();
        let wrong = steps.flat_map(|(at, (step, found))| {
            differences(&step.expected(), found)
                .into_iter()
                .map(move |what| format!("step {at}{what}"))
        });
        wrong.chain(self.late.iter().cloned()).collect()
    }
}

impl ScriptStep {
    /// Returns the expected result of a step in the form of a recorded one.
    pub(crate) fn expected(&self) -> Value {
        match self {
            ScriptStep::Send(SendStep { replies, .. }) => json!({ "replies": replies }),
            ScriptStep::End { .. } => json!({ "late": [] }),
            ScriptStep::Returned {
                returned: ReturnedBody { request, response },
                ..
            } => {
                let bytes = |written: &Value| wire::canonical_bytes(&wire::bytes(written));
                json!({ "request": request.as_ref().map(bytes), "response": response.as_ref().map(bytes) })
            }
            ScriptStep::Busy { .. } | ScriptStep::Workers { .. } => Value::Null,
            ScriptStep::Load { load } => json!(load),
            ScriptStep::Metrics { metrics } => json!(metrics),
            ScriptStep::Ready { ready } => json!(ready),
            ScriptStep::Health { health } => json!(health),
        }
    }
}

/// One stream of the gateway.
struct RecordedStream {
    requests_tx: Option<mpsc::UnboundedSender<ProcessingRequest>>,
    replies: Option<Streaming<ProcessingResponse>>,
    /// The server has ended the stream.
    ended: bool,
    request: Vec<u8>,
    response: Vec<u8>,
}

impl RecordedStream {
    async fn open(site: &ExchangeSite, opening: &BTreeMap<String, String>) -> Self {
        let (requests_tx, messages) = mpsc::unbounded_channel();
        let mut request = Request::new(UnboundedReceiverStream::new(messages));
        for (key, value) in opening {
            let key = MetadataKey::from_bytes(key.as_bytes()).unwrap();
            request
                .metadata_mut()
                .insert(key, MetadataValue::try_from(value).unwrap());
        }
        let replies = site
            .gateway
            .clone()
            .process(request)
            .await
            .unwrap()
            .into_inner();
        Self {
            requests_tx: Some(requests_tx),
            replies: Some(replies),
            ended: false,
            request: Vec::new(),
            response: Vec::new(),
        }
    }

    fn send(&self, message: ProcessingRequest) {
        // Sending fails if the server has ended the stream. Its replies show that.
        _ = self
            .requests_tx
            .as_ref()
            .expect("the stream is still open")
            .send(message);
    }

    /// Returns the next reply, or `None` after the end of the stream or the deadline.
    async fn next(&mut self, until: Instant) -> Option<Value> {
        let answer = timeout_at(until, self.replies.as_mut()?.message())
            .await
            .ok()?;
        let wire = match answer {
            Ok(Some(wire)) => wire,
            Ok(None) => {
                self.ended = true;
                return None;
            }
            Err(status) => return Some(json!({ "status": status.code().to_string() })),
        };
        match wire::returned(&wire) {
            Some((true, bytes)) => self.request.extend_from_slice(bytes),
            Some((false, bytes)) => self.response.extend_from_slice(bytes),
            None => {}
        }
        Some(wire::reply(wire))
    }

    /// Returns the expected number of replies, and further ones if they arrive.
    async fn answers(&mut self, expected: usize) -> Vec<Value> {
        let mut found = Vec::new();
        loop {
            let wait = if found.len() < expected {
                PATIENCE
            } else {
                SILENCE
            };
            match self.next(Instant::now() + wait).await {
                Some(answer) => found.push(answer),
                None => return found,
            }
        }
    }

    /// Returns all replies up to the end of the stream, and an error if the stream does not end.
    async fn rest(&mut self) -> Vec<Value> {
        let mut rest = Vec::new();
        let all = async {
            while let Some(answer) = self.next(Instant::now() + 2 * PATIENCE).await {
                rest.push(answer);
            }
        };
        _ = timeout(PATIENCE, all).await;
        if !self.ended {
            rest.push(json!("the stream did not end"));
        }
        self.replies = None;
        rest
    }
}

struct TranscriptPlayer {
    site: ExchangeSite,
    /// First configured model.
    model: Value,
    /// Key of the last exchange that has one.
    exchange: String,
    streams: BTreeMap<String, RecordedStream>,
    busy: Vec<RecordedStream>,
}

/// Plays one transcript, from the start of the process to its end.
pub(crate) async fn play(script: &ExchangeScript) -> PlaybackResult {
    let site = ExchangeSite::start(&script.config).await;
    let model = script.config["models"][0]["name"].clone();
    let mut player = TranscriptPlayer {
        site,
        model,
        exchange: String::new(),
        streams: BTreeMap::new(),
        busy: Vec::new(),
    };
    let mut found = Vec::new();
    for step in &script.steps {
        found.push(player.step(step).await);
    }
    let mut late = Vec::new();
    for (name, mut stream) in player.streams {
        stream.requests_tx = None;
        if stream.replies.is_some() {
            late.extend(
                stream
                    .rest()
                    .await
                    .iter()
                    .map(|answer| format!("unexpected reply on {name}: {answer}")),
            );
        }
    }
    drop(player.busy);
    player.site.stop().await;
    PlaybackResult { found, late }
}

impl TranscriptPlayer {
    async fn step(&mut self, step: &ScriptStep) -> Value {
        match step {
            ScriptStep::Send(send) => self.send(send).await,
            ScriptStep::End { on, end } => json!({ "late": self.end(on, *end).await }),
            ScriptStep::Returned { on, returned } => {
                let stream = &self.streams[on];
                let of = |wanted: &Option<Value>, bytes: &[u8]| {
                    wanted.as_ref().map(|_| wire::canonical_bytes(bytes))
                };
                json!({ "request": of(&returned.request, &stream.request),
                        "response": of(&returned.response, &stream.response) })
            }
            ScriptStep::Busy { busy } => {
                let model = self.model.clone();
                for (endpoint, count) in busy {
                    for _ in 0..*count {
                        self.occupy(endpoint, &model).await;
                    }
                }
                Value::Null
            }
            ScriptStep::Workers { workers } => {
                self.site.workers(workers).await;
                Value::Null
            }
            ScriptStep::Load { load } => {
                let expected = json!(load);
                let page = self
                    .site
                    .until("debug/load", |page| loads(load, page) == expected)
                    .await;
                loads(load, &page)
            }
            ScriptStep::Metrics { metrics } => {
                let agrees =
                    |page: &Value| differences(&json!(metrics), &series(metrics, page)).is_empty();
                let page = self.site.until("metrics", agrees).await;
                series(metrics, &page)
            }
            ScriptStep::Ready { ready } => {
                let page = self
                    .site
                    .until("readyz", |page| page["ready"] == *ready)
                    .await;
                page["ready"].clone()
            }
            ScriptStep::Health { health } => {
                let mut found = Map::new();
                for (service, expected) in health {
                    found.insert(
                        service.clone(),
                        json!(self.site.health(service, expected).await),
                    );
                }
                found.into()
            }
        }
    }

    async fn send(&mut self, send: &SendStep) -> Value {
        if !self.streams.contains_key(&send.on) {
            let stream = RecordedStream::open(&self.site, &send.opening).await;
            self.streams.insert(send.on.clone(), stream);
        }
        let stream = self.streams.get_mut(&send.on).unwrap();
        for message in &send.send {
            let message = message.to_string().replace("${exchange}", &self.exchange);
            stream.send(wire::request(&serde_json::from_str(&message).unwrap()));
        }
        let early = stream
            .ended
            .then(|| json!("the server ended the stream early"));
        let mut replies = stream.answers(send.replies.len()).await;
        replies.extend(early);
        for reply in &replies {
            if let Some(name) = reply["dynamic_metadata"]["warmroute"]["exchange"].as_str() {
                name.clone_into(&mut self.exchange);
            }
        }
        json!({ "replies": replies })
    }

    async fn end(&mut self, on: &str, end: StreamEnd) -> Vec<Value> {
        let stream = self.streams.get_mut(on).unwrap();
        match end {
            StreamEnd::Close => {
                let early = stream
                    .ended
                    .then(|| json!("the server ended the stream early"));
                stream.requests_tx = None;
                early.into_iter().chain(stream.rest().await).collect()
            }
            StreamEnd::Abort => {
                (stream.requests_tx, stream.replies) = (None, None);
                Vec::new()
            }
            // The client's side stays open, so only the server can have ended the stream.
            StreamEnd::ByWarmroute => stream.rest().await,
        }
    }

    /// Starts an exchange that is routed to this endpoint and gets no response, so that its load
    /// stays booked.
    async fn occupy(&mut self, endpoint: &str, model: &Value) {
        let mut stream = RecordedStream::open(&self.site, &BTreeMap::new()).await;
        let path = json!({ ":method": "POST", ":path": "/v1/completions", "x-request-id": "busy" });
        let only = json!({ "envoy.lb.subset_hint": { "x-gateway-destination-endpoint-subset": [endpoint] } });
        let modes = json!({ "request_body_mode": "BUFFERED", "response_body_mode": "NONE" });
        stream.send(wire::request(&json!({
            "request_headers": { "headers": path }, "metadata": only, "protocol_config": modes
        })));
        let prompt = format!("occupied {}", self.busy.len());
        let body = json!({ "model": model, "prompt": prompt }).to_string();
        let body = json!({ "body": body, "end_of_stream": true });
        stream.send(wire::request(&json!({ "request_body": body })));
        let until = Instant::now() + PATIENCE;
        stream.next(until).await.expect("a reply to the headers");
        let routed = stream.next(until).await.expect("a reply to the body");
        let to = &routed["dynamic_metadata"]["envoy.lb"]["x-gateway-destination-endpoint"];
        assert_eq!(to, endpoint, "{routed}");
        self.busy.push(stream);
    }
}

/// Returns the ranks and fields of the page that the transcript names.
fn loads(selected: &BTreeMap<String, Value>, page: &Value) -> Value {
    let of = |rank: &str| {
        let (worker, rank) = rank.split_once('/').unwrap_or((rank, "0"));
        let rank: u64 = rank.parse().unwrap();
        page.as_array()?
            .iter()
            .find(|load| load["rank"]["worker"] == worker && load["rank"]["rank"] == rank)
    };
    let ranks = selected.iter().map(|(rank, fields)| {
        let found = of(rank).unwrap_or(&Value::Null);
        let fields = fields.as_object().unwrap().keys();
        let fields: Map<_, _> = fields
            .map(|field| (field.clone(), found[format!("active_{field}")].clone()))
            .collect();
        (rank.clone(), Value::from(fields))
    });
    ranks.collect::<Map<_, _>>().into()
}

/// Returns the series of the page that the transcript names.
fn series(selected: &BTreeMap<String, f64>, page: &Value) -> Value {
    let line = |name: &str| {
        let value = page
            .as_str()?
            .lines()
            .find_map(|line| line.strip_prefix(name)?.strip_prefix(' '))?;
        value.split(' ').next()?.parse::<f64>().ok()
    };
    selected
        .keys()
        .map(|name| (name.clone(), json!(line(name).unwrap_or(0.0))))
        .collect::<Map<_, _>>()
        .into()
}
