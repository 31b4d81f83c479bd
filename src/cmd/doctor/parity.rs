//! The tokens of a few conversations and texts, ours against the engine's.

use std::sync::Arc;

use serde_json::{Value, json};

use super::engine::facts::{Parity, why};
use crate::engine_client::{EngineClient, EngineError, EngineUrl};
use crate::openai::{self, Api};
use crate::prompt::Encoder;
use crate::worker::ModelName;

/// Asks the engine for the tokens of every canary, and compares.
pub(super) async fn compare(
    client: &EngineClient,
    engine: &EngineUrl,
    model: &ModelName,
    encoder: Option<&Arc<Encoder>>,
) -> Parity {
    let Some(encoder) = encoder else { return Parity::Untested("the model has no tokenizer here".to_owned()) };
    let (mut canaries, mut skipped) = (0, Vec::new());
    for (name, mut body) in canary_set() {
        body["model"] = json!(model.as_str());
        let api = if body["messages"].is_array() { Api::ChatCompletions } else { Api::Completions };
        let text = body.to_string();
        let request = openai::parse(api, text.as_bytes()).ok();
        let ours =
            request.and_then(|request| encoder.encode(&request).ok()).and_then(|one| one.prompts.into_iter().next());
        let Some(ours) = ours else {
            skipped.push(name.to_owned());
            continue;
        };
        match client.tokenize(engine, text.into(), client.deadline()).await {
            Ok(told) if told.tokens == ours => canaries += 1,
            Ok(told) => {
                let at = ours.iter().zip(&told.tokens).take_while(|(ours, theirs)| ours == theirs).count();
                let (ours, theirs) = (ours.get(at).copied(), told.tokens.get(at).copied());
                return Parity::Differs { canary: name.to_owned(), at, ours, theirs, around: None };
            }
            Err(error) if error.is_refusal() => skipped.push(name.to_owned()),
            Err(EngineError::NotOffered(status)) => {
                return Parity::Untested(format!("the engine has no /tokenize (status {status})"));
            }
            Err(error) => return Parity::Untested(format!("/tokenize: {}", why(&error))),
        }
    }
    if canaries == 0 {
        Parity::Untested("the engine took none of the canaries".to_owned())
    } else {
        Parity::Agrees { canaries, skipped }
    }
}

fn canary_set() -> Vec<(&'static str, Value)> {
    vec![
        (
            "chat",
            json!({"messages": [{"role": "system", "content": "Be short."}, {"role": "user", "content": "Who are you?"}]}),
        ),
        ("completion", json!({"prompt": "The quick brown fox, 12345, naïve café."})),
    ]
}
