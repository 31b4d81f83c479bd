//! What an answer says, read as clients read it. Engines tell a failure in a stream as an event with status 200 and end the
//! stream as if nothing had happened, so that only who reads every event knows whether an answer is one. And an engine that
//! took over the KV of another request answers as if it were its own: only what one engine alone says shows that.

use std::collections::BTreeMap;

use futures_util::{StreamExt as _, stream as streams};
use serde_json::Value;
use tempfile::TempDir;

use crate::bed::{Answer, path_of, programs};
use crate::support::stack::{Engine, EngineSpec};

/// What a whole answer says.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Told {
    pub(crate) text: String,
    prompt_tokens: u64,
    completion_tokens: u64,
}

/// What a client reads; or why it is no whole and good answer.
pub(crate) fn told(body: &Value, answer: &Answer) -> Result<Told, String> {
    if answer.status != 200 || answer.cut {
        return Err("status, or cut off".to_owned());
    }
    let told = if body["stream"] == true {
        of_stream(&answer.text)?
    } else {
        of_document(&answer.text)?
    };
    let wanted = body["max_tokens"].as_u64().unwrap();
    if told.completion_tokens != wanted {
        return Err(format!("{} tokens, not {wanted}", told.completion_tokens));
    }
    Ok(told)
}

/// How many tokens of a stream were seen, whatever came of it.
pub(crate) fn tokens_seen(stream: &str) -> usize {
    stream
        .lines()
        .filter_map(|line| serde_json::from_str(line.strip_prefix("data: ")?).ok())
        .filter(is_token)
        .count()
}

/// Whether an event brings a token; the one that opens a chat does not.
fn is_token(event: &Value) -> bool {
    let choice = &event["choices"][0];
    choice["text"].is_string()
        || choice["delta"]["content"].is_string() && choice["delta"]["role"].is_null()
}

fn of_document(text: &str) -> Result<Told, String> {
    let document: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
    no_error(&document)?;
    let choice = &document["choices"][0];
    if choice["finish_reason"] != "length" {
        return Err(format!("it ended with {}", choice["finish_reason"]));
    }
    let said = choice["message"]["content"]
        .as_str()
        .or(choice["text"].as_str())
        .ok_or("no text")?;
    with_usage(said.to_owned(), &document)
}

fn of_stream(text: &str) -> Result<Told, String> {
    let events = text
        .strip_suffix("\n\n")
        .ok_or("it ends within an event")?
        .split("\n\n");
    let events: Option<Vec<&str>> = events.map(|event| event.strip_prefix("data: ")).collect();
    let mut events = events.ok_or("an event without data")?;
    if events.pop() != Some("[DONE]") {
        return Err("its end is missing".to_owned());
    }
    let (mut said, mut ended, mut usage, mut tokens) = (String::new(), 0, None, 0);
    for event in events {
        let event: Value =
            serde_json::from_str(event).map_err(|error| format!("{error}: {event}"))?;
        no_error(&event)?;
        let choice = &event["choices"][0];
        if is_token(&event) {
            tokens += 1;
            said += choice["delta"]["content"]
                .as_str()
                .or(choice["text"].as_str())
                .unwrap_or_default();
        }
        ended += u32::from(choice["finish_reason"] == "length");
        if event["usage"].is_object() {
            usage = Some(event);
        }
    }
    let told = with_usage(said, &usage.ok_or("no usage")?)?;
    if (ended, tokens) != (1, told.completion_tokens) {
        return Err(format!(
            "{tokens} tokens came of {}, and {ended} ends",
            told.completion_tokens
        ));
    }
    Ok(told)
}

fn no_error(event: &Value) -> Result<(), String> {
    if !event["error"].is_null() {
        return Err(format!("it tells an error: {event}"));
    }
    // What only a simulated engine knows and tells.
    match event["engine_kv"].as_str() {
        Some(whose @ ("stale" | "mismatch")) => Err(format!("the KV it was made of is {whose}")),
        _ => Ok(()),
    }
}

fn with_usage(text: String, event: &Value) -> Result<Told, String> {
    let tokens = |of: &str| {
        event["usage"][of]
            .as_u64()
            .ok_or_else(|| format!("no {of}"))
    };
    Ok(Told {
        text,
        prompt_tokens: tokens("prompt_tokens")?,
        completion_tokens: tokens("completion_tokens")?,
    })
}

/// An engine that does both phases and of which no router knows: what it says is right.
pub(crate) struct Alone {
    engine: Engine,
    http: reqwest::Client,
    _dir: TempDir,
}

impl Alone {
    pub(crate) async fn start() -> Self {
        let dir = tempfile::Builder::new()
            .prefix("warmroute-alone-")
            .tempdir()
            .unwrap();
        let spec = EngineSpec::new(99).with(&["--speed", "500"]);
        let engine = Engine::start(&programs(), spec, dir.path()).await.unwrap();
        Self {
            engine,
            http: warmroute::tls::client().build().unwrap(),
            _dir: dir,
        }
    }

    pub(crate) async fn says(&self, body: &Value) -> Told {
        let answer = Answer::of(self.http.post(self.engine.url(path_of(body))).json(body)).await;
        told(body, &answer).unwrap_or_else(|why| panic!("{why}: {answer:?}"))
    }

    /// Insists that answers say what they would if one engine had done it all.
    pub(crate) async fn agrees(&self, answers: impl IntoIterator<Item = (&Value, &Told)>) {
        let mut asked: BTreeMap<String, Vec<(&Value, &Told)>> = BTreeMap::new();
        for (body, told) in answers {
            asked
                .entry(body.to_string())
                .or_default()
                .push((body, told));
        }
        let agreeing = asked.values().map(async |same| {
            let (body, _) = same[0];
            let right = self.says(body).await;
            for (_, told) in same {
                assert_eq!(**told, right, "another answer than the right one: {body}");
            }
        });
        streams::iter(agreeing)
            .buffer_unordered(8)
            .collect::<Vec<()>>()
            .await;
    }
}
