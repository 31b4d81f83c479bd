//! The engines' own APIs of generation: SGLang's `/generate` with a text or tokens, and vLLM's `/inference/v1/generate`
//! with tokens. SGLang names no model there, only an adapter. Its texts are taken to get the tokenizer's special tokens, as
//! completions do; this was not verified with an engine. Token ids are parsed as leniently as in vLLM 0.32.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use super::by_load::BYTES_OF_A_TOKEN;
use super::completion::Prompts;
use super::lax::{self, LaxInteger};
use super::{Hidden, Opaque, ParseError, Prompt, Request};

#[derive(Deserialize)]
struct Sglang<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    lora_path: Option<Value>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    text: Option<Prompts>,
    #[serde(default)]
    input_ids: Option<Prompts>,
    #[serde(default)]
    input_embeds: Option<IgnoredAny>,
    #[serde(default)]
    image_data: Option<IgnoredAny>,
    #[serde(default)]
    video_data: Option<IgnoredAny>,
    #[serde(default)]
    audio_data: Option<IgnoredAny>,
    /// Separates equal prompts in a way that no event tells.
    #[serde(default)]
    extra_key: Option<IgnoredAny>,
    #[serde(default)]
    session_params: Option<IgnoredAny>,
    #[serde(default, borrow)]
    sampling_params: Option<&'a RawValue>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct Vllm<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default, deserialize_with = "lax::flag")]
    stream: Option<bool>,
    #[serde(default)]
    token_ids: Option<Vec<LaxInteger<u32>>>,
    /// Images and the like that stand for some of the tokens.
    #[serde(default)]
    features: Option<IgnoredAny>,
    /// The same before they were turned into tokens. Texts among them change nothing.
    #[serde(default)]
    content_parts: Option<Vec<ContentPart>>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default, borrow)]
    sampling_params: Option<&'a RawValue>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
}

/// A part that tokens may stand for.
#[derive(Deserialize)]
struct ContentPart {
    #[serde(default, rename = "type")]
    kind: Option<String>,
}

/// How the answer is made.
#[derive(Deserialize)]
struct Sampling {
    #[serde(default, alias = "max_new_tokens", deserialize_with = "lax::integer")]
    max_tokens: Option<u64>,
}

/// How long the answer may be. Of a list each prompt has its own, and nothing is said of all.
fn most_tokens(sampling: Option<&RawValue>) -> Option<u64> {
    serde_json::from_str::<Sampling>(sampling?.get())
        .ok()?
        .max_tokens
}

pub(super) fn sglang(text: &str) -> Result<Request, ParseError> {
    let body: Sglang<'_> = serde_json::from_str(text)?;
    let adapter = body
        .lora_path
        .and_then(|path| path.as_str().map(str::to_owned));
    let model = adapter.or(body.model);
    let media = [&body.image_data, &body.video_data, &body.audio_data]
        .into_iter()
        .any(Option::is_some);
    let prompt = match (body.text, body.input_ids) {
        _ if body.session_params.is_some() => return Ok(Request::remembered(model, text.len())),
        (prompt, _) if media || body.extra_key.is_some() => {
            let texts = prompt.map_or(0, |Prompts(prompt)| prompt.text_bytes());
            return Ok(Request::by_load(model, texts));
        }
        _ if body.input_embeds.is_some() => Prompt::Embeddings,
        (Some(Prompts(prompt)), _) => prompt,
        (None, Some(Prompts(prompt @ (Prompt::Tokens(_) | Prompt::TooMany)))) => prompt,
        (None, Some(_)) => return Err(ParseError::Empty("input_ids")),
        (None, None) => return Err(ParseError::Missing("text")),
    };
    if matches!(&prompt, Prompt::Texts(texts) if texts.is_empty()) {
        return Err(ParseError::Empty("text"));
    }
    Ok(Request {
        stream: body.stream.unwrap_or(false),
        max_output_tokens: most_tokens(body.sampling_params),
        extension: body.nvext.map(|raw| raw.get().into()),
        ..Request::of(model, prompt)
    })
}

pub(super) fn vllm(text: &str) -> Result<Request, ParseError> {
    let body: Vllm<'_> = serde_json::from_str(text)?;
    let tokens = body.token_ids.ok_or(ParseError::Missing("token_ids"))?;
    if tokens.is_empty() {
        return Err(ParseError::Empty("token_ids"));
    }
    let is_text = |part: &ContentPart| part.kind.as_deref() == Some("text");
    let text_only = body.features.is_none() && body.content_parts.iter().flatten().all(is_text);
    let prompt = match text_only {
        true => Prompt::Tokens(vec![
            tokens.into_iter().map(|LaxInteger(token)| token).collect(),
        ]),
        false => Prompt::Opaque(Opaque {
            text_bytes: tokens.len() * BYTES_OF_A_TOKEN,
            because: Hidden::Assembled,
        }),
    };
    Ok(Request {
        stream: body.stream.unwrap_or(false),
        cache_salt: body.cache_salt,
        max_output_tokens: most_tokens(body.sampling_params),
        extension: body.nvext.map(|raw| raw.get().into()),
        ..Request::of(body.model, prompt)
    })
}
