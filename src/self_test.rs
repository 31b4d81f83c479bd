//! Asks a worker to tokenise canaries and compares. Nothing of a user is in it, so what differs may be shown: the first token
//! on both sides, and the texts around it.

pub mod canaries;
pub mod config;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::engine_client::{EngineClient, EngineError, EngineUrl, RenderApi};
use crate::intake::Model;
use crate::openai::{self, Api};
use crate::parity::{Difference, Verdict, What};
use crate::prompt::{Encoder, Tokens};
use crate::worker::{BlockSize, ModelName};
use canaries::{Canary, canaries};

/// Tokens before and behind the first difference whose text is shown.
const AROUND: usize = 8;

/// Why a canary is not compared where an engine does not render.
const NOT_READ: &str = "only render does with it as the chat does, and it is not offered";

/// Keeps canaries' beginnings apart from those of requests.
const APART: &str = "self-test";

/// A canary with our tokens of it.
struct Prepared {
    canary: Canary,
    /// Or why there are none.
    ours: Result<Vec<u32>, String>,
}

/// The canaries of one model, tokenised by us.
pub struct Subject {
    name: ModelName,
    encoder: Arc<Encoder>,
    block_size: BlockSize,
    canaries: Vec<Prepared>,
}

/// How a worker is asked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Tokenize,
    Render,
}

impl Subject {
    /// Tokenises the canaries, which takes some milliseconds; `None` where the model has no tokenizer.
    pub fn new(model: &Model) -> Option<Self> {
        let encoder = model.encoder.clone()?;
        let prepare = |canary: Canary| Prepared {
            ours: ours(&encoder, &canary),
            canary,
        };
        let canaries = canaries(model.name.as_str(), encoder.engine())
            .into_iter()
            .map(prepare)
            .collect();
        Some(Self {
            name: model.name.clone(),
            encoder,
            block_size: model.block_size,
            canaries,
        })
    }

    /// Whether it is what would be made of this model.
    pub fn is_of(&self, model: &Model) -> bool {
        let same = model
            .encoder
            .as_ref()
            .is_some_and(|encoder| Arc::ptr_eq(encoder, &self.encoder));
        same && self.name == model.name && self.block_size == model.block_size
    }

    /// Whether both compare the same tokens of ours.
    pub fn has_tokens_of(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.encoder, &other.encoder)
    }

    /// Compares with what one worker makes of the canaries.
    pub async fn test(
        &self,
        client: &EngineClient,
        engine: &EngineUrl,
        deadline: Duration,
    ) -> Verdict {
        // What `/tokenize` does is not all that the chat does; but not everybody renders, or for everybody.
        let mut way = Way::Render;
        let mut compared = 0;
        let mut skipped = BTreeMap::new();
        for prepared in &self.canaries {
            let name = prepared.canary.name.to_owned();
            let ours = match &prepared.ours {
                Ok(ours) => ours,
                Err(why) => {
                    skipped.insert(name, why.clone());
                    continue;
                }
            };
            if way == Way::Tokenize && prepared.canary.render_only {
                skipped.insert(name, NOT_READ.to_owned());
                continue;
            }
            let mut answered = ask(client, engine, (way, &prepared.canary), deadline).await;
            let closed = |error: &EngineError| {
                matches!(error, EngineError::NotOffered(_)) || error.is_denied()
            };
            if way == Way::Render && answered.as_ref().is_err_and(closed) {
                way = Way::Tokenize;
                answered = ask(client, engine, (way, &prepared.canary), deadline).await;
            }
            match answered {
                Ok(theirs) => match self.difference(&name, ours, &theirs) {
                    Some(difference) => {
                        return Verdict::Differs {
                            difference: Box::new(difference),
                        };
                    }
                    None => compared += 1,
                },
                Err(error @ EngineError::Status { .. }) if error.is_refusal() => {
                    let said = if let EngineError::Status {
                        message: Some(said),
                        ..
                    } = &error
                    {
                        said
                    } else {
                        ""
                    };
                    skipped.insert(name, format!("{error}: {said}"));
                }
                Err(error) => {
                    return Verdict::CannotTest {
                        why: why(&error),
                        passes: error.passes(),
                    };
                }
            }
        }
        match (compared, skipped.values().next()) {
            (0, Some(first)) => Verdict::CannotTest {
                why: format!("every canary was skipped; the first: {first}"),
                passes: false,
            },
            _ => Verdict::Agrees { compared, skipped },
        }
    }

    fn difference(&self, canary: &str, ours: &[u32], theirs: &[u32]) -> Option<Difference> {
        let at = ours
            .iter()
            .zip(theirs)
            .take_while(|(ours, theirs)| ours == theirs)
            .count();
        if at == ours.len() && at == theirs.len() {
            return None;
        }
        let around = |ids: &[u32]| {
            let (start, end) = (
                at.saturating_sub(AROUND).min(ids.len()),
                (at + AROUND).min(ids.len()),
            );
            Some(self.encoder.text_of(&ids[start..end]))
        };
        Some(Difference {
            what: if at < ours.len().min(theirs.len()) {
                What::Tokens
            } else {
                What::Length
            },
            canary: Some(canary.to_owned()),
            at,
            block: at / self.block_size.tokens(),
            ours: ours.get(at).copied(),
            theirs: theirs.get(at).copied(),
            our_text: around(ours),
            their_text: around(theirs),
        })
    }
}

/// Our tokens, as requests get them: the second time some are taken over from the first.
fn ours(encoder: &Encoder, canary: &Canary) -> Result<Vec<u32>, String> {
    let request = openai::parse(canary.api, &canary.body).map_err(|error| error.to_string())?;
    let rendered = encoder
        .render(&request)
        .map_err(|error| format!("we cannot: {error}"))?;
    let tokens = || {
        encoder
            .tokenize_resuming(&rendered, Some(APART))
            .map_err(|error| format!("we cannot: {error}"))
    };
    tokens()?;
    let prompt = tokens()?.pop().ok_or("it has no prompt")?;
    Ok(Tokens::into_ids(prompt))
}

async fn ask(
    client: &EngineClient,
    engine: &EngineUrl,
    (way, canary): (Way, &Canary),
    deadline: Duration,
) -> Result<Vec<u32>, EngineError> {
    let body: Bytes = canary.body.clone();
    match way {
        Way::Tokenize => Ok(client.tokenize(engine, body, deadline).await?.tokens),
        Way::Render => {
            let api = if canary.api == Api::Completions {
                RenderApi::Completions
            } else {
                RenderApi::Chat
            };
            let mut prompts = client.render(engine, api, body, deadline).await?;
            prompts
                .pop()
                .map(|prompt| prompt.token_ids)
                .ok_or(EngineError::Unreadable("no prompt"))
        }
    }
}

fn why(error: &EngineError) -> String {
    match error {
        EngineError::NotOffered(status) => {
            format!(
                "it offers neither /tokenize nor /v1/*/render (status {status}); vLLM offers the first by default"
            )
        }
        error if error.is_denied() => {
            "it wants a token; name its file in `engines.token_file`".to_owned()
        }
        error => error.to_string(),
    }
}

#[cfg(test)]
mod tests;
