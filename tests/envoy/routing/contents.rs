//! Contents of responses, as clients parse them. Engines report a failure in a stream as an event
//! with status 200 and end the stream normally, so every event is checked. An engine that used the
//! KV blocks of another request responds normally too. Only a comparison with a single engine
//! detects that.

use std::collections::{BTreeMap, BTreeSet};

use futures_util::{StreamExt as _, stream as streams};
use serde_json::Value;
use warmroute_testbed::deployment::EngineSpec;

use crate::routing::bed::{RoutedAnswer, RoutingBed, chat, essay, path_of, stream, text};
use crate::support::deployment::TestDeployment;

/// Content of a complete response.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct ResponseContent {
    pub(crate) text: String,
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// Parses a response. The error says why it is incomplete or invalid.
pub(crate) fn parse_content(
    body: &Value,
    answer: &RoutedAnswer,
) -> Result<ResponseContent, String> {
    if answer.status != 200 || answer.is_incomplete {
        return Err("error status or incomplete response".to_owned());
    }
    let content = if body["stream"] == true {
        parse_stream(&answer.text)?
    } else {
        parse_document(&answer.text)?
    };
    let wanted = body["max_tokens"].as_u64().unwrap();
    if content.completion_tokens != wanted {
        return Err(format!(
            "{} tokens, not {wanted}",
            content.completion_tokens
        ));
    }
    Ok(content)
}

/// Workers that served the phases of some requests.
pub(crate) struct PhaseWorkers {
    pub(crate) prefills: BTreeSet<u64>,
    pub(crate) decodes: BTreeSet<u64>,
}

/// Sends 20 chats, 20 completions and 20 streams with remote prefill. Asserts that a single engine
/// generates the same contents.
pub(crate) async fn assert_split_contents(bed: &RoutingBed) -> PhaseWorkers {
    let bodies = (0..60).map(|topic| match topic % 3 {
        0 => chat(&essay(topic)),
        1 => text(&essay(topic)),
        _ => stream(&essay(topic), 4),
    });
    let answers: Vec<(Value, RoutedAnswer)> = streams::iter(bodies)
        .map(async |body| (body.clone(), bed.query(&body).await))
        .buffer_unordered(8)
        .collect()
        .await;
    let mut workers = PhaseWorkers {
        prefills: BTreeSet::new(),
        decodes: BTreeSet::new(),
    };
    let mut contents = Vec::new();
    for (body, answer) in &answers {
        workers.decodes.insert(answer.engine());
        let prefill = answer.header("x-prefill-instance-id").parse();
        workers.prefills.insert(prefill.expect("a prefill worker"));
        let content = parse_content(body, answer);
        contents.push((
            body,
            content.unwrap_or_else(|reason| panic!("{reason}: {answer:?}")),
        ));
    }
    ReferenceEngine::start()
        .await
        .assert_same_contents(contents.iter().map(|(body, content)| (*body, content)))
        .await;
    workers
}

/// Returns the number of tokens in a stream, which may be incomplete.
pub(crate) fn tokens_seen(stream: &str) -> usize {
    stream
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .filter(is_token)
        .count()
}

/// Returns true if an event has a token. The first event of a chat has none.
fn is_token(event: &Value) -> bool {
    let choice = &event["choices"][0];
    choice["text"].is_string()
        || choice["delta"]["content"].is_string() && choice["delta"]["role"].is_null()
}

fn parse_document(text: &str) -> Result<ResponseContent, String> {
    let document: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    check_no_error(&document)?;
    let choice = &document["choices"][0];
    if choice["finish_reason"] != "length" {
        return Err(format!("finish reason {}", choice["finish_reason"]));
    }
    let content_text = choice["message"]["content"]
        .as_str()
        .or(choice["text"].as_str())
        .ok_or("no text")?;
    with_usage(content_text.to_owned(), &document)
}

fn parse_stream(text: &str) -> Result<ResponseContent, String> {
    let events = text
        .strip_suffix("\n\n")
        .ok_or("the stream ends within an event")?
        .split("\n\n");
    let events: Option<Vec<&str>> = events.map(|event| event.strip_prefix("data: ")).collect();
    let mut events = events.ok_or("an event without data")?;
    if events.pop() != Some("[DONE]") {
        return Err("the end of the stream is missing".to_owned());
    }
    let mut content_text = String::new();
    let mut ended = 0;
    let mut usage = None;
    let mut tokens = 0;
    for event in events {
        let event: Value =
            serde_json::from_str(event).map_err(|error| format!("{error}: {event}"))?;
        check_no_error(&event)?;
        let choice = &event["choices"][0];
        if is_token(&event) {
            tokens += 1;
            content_text += choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str())
                .unwrap_or_default();
        }
        ended += u32::from(choice["finish_reason"] == "length");
        if event["usage"].is_object() {
            usage = Some(event);
        }
    }
    let content = with_usage(content_text, &usage.ok_or("no usage")?)?;
    if (ended, tokens) != (1, content.completion_tokens) {
        return Err(format!(
            "{tokens} tokens instead of {}, and {ended} finish reasons",
            content.completion_tokens
        ));
    }
    Ok(content)
}

fn check_no_error(event: &Value) -> Result<(), String> {
    if !event["error"].is_null() {
        return Err(format!("the response contains an error: {event}"));
    }
    // Only simulated engines report this field.
    match event["engine_kv"].as_str() {
        Some(whose @ ("stale" | "mismatch")) => Err(format!("KV blocks of the response: {whose}")),
        _ => Ok(()),
    }
}

fn with_usage(text: String, event: &Value) -> Result<ResponseContent, String> {
    let tokens = |of: &str| {
        event["usage"][of]
            .as_u64()
            .ok_or_else(|| format!("no {of}"))
    };
    Ok(ResponseContent {
        text,
        prompt_tokens: tokens("prompt_tokens")?,
        completion_tokens: tokens("completion_tokens")?,
    })
}

/// Engine for both phases that no router uses. Its responses are the reference.
pub(crate) struct ReferenceEngine(TestDeployment);

impl ReferenceEngine {
    pub(crate) async fn start() -> Self {
        let spec = EngineSpec::new(99).with(&["--speed", "500"]);
        Self(TestDeployment::engines(&[spec]).await)
    }

    pub(crate) async fn respond(&self, body: &Value) -> ResponseContent {
        let url = self.0.engines[0].url(path_of(body));
        let answer = RoutedAnswer::send(self.0.http.post(url).json(body)).await;
        parse_content(body, &answer).unwrap_or_else(|why| panic!("{why}: {answer:?}"))
    }

    /// Asserts that responses equal those of the reference engine.
    pub(crate) async fn assert_same_contents(
        &self,
        answers: impl IntoIterator<Item = (&Value, &ResponseContent)>,
    ) {
        let mut by_body: BTreeMap<String, Vec<(&Value, &ResponseContent)>> = BTreeMap::new();
        for (body, content) in answers {
            by_body
                .entry(body.to_string())
                .or_default()
                .push((body, content));
        }
        let agreeing = by_body.values().map(async |same| {
            let (body, _) = same[0];
            let right = self.respond(body).await;
            for (_, content) in same {
                assert_eq!(
                    **content, right,
                    "the response differs from the reference: {body}"
                );
            }
        });
        streams::iter(agreeing)
            .buffer_unordered(8)
            .collect::<Vec<()>>()
            .await;
    }
}
