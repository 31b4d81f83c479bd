//! Native generation APIs: SGLang's `/generate` with text or token ids, and vLLM's
//! `/inference/v1/generate` with token ids.
//!
//! SGLang requests name no model, only an adapter. SGLang is assumed to add the tokenizer's special
//! tokens to texts, as for completions. This was not verified with an engine. Token ids are parsed
//! as leniently as in vLLM 0.32.

use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::Value;
use serde_json::value::RawValue;

use super::completion::PromptList;
use super::error::ParseError;
use super::lax::{LaxBool, LaxInteger};
use super::request::{ApiRequest, PromptInput, UnknownPromptReason};
use super::untokenized::BYTES_PER_TOKEN;

#[derive(Deserialize)]
struct SglangGenerateBody<'a> {
    model: Option<String>,
    lora_path: Option<Value>,
    stream: Option<bool>,
    text: Option<PromptList>,
    input_ids: Option<PromptList>,
    input_embeds: Option<IgnoredAny>,
    image_data: Option<IgnoredAny>,
    video_data: Option<IgnoredAny>,
    audio_data: Option<IgnoredAny>,
    /// Extension of the cache key. KV events do not report it.
    extra_key: Option<IgnoredAny>,
    session_params: Option<IgnoredAny>,
    #[serde(borrow)]
    sampling_params: Option<&'a RawValue>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
}

#[derive(Deserialize)]
struct VllmGenerateBody<'a> {
    model: Option<String>,
    stream: Option<LaxBool>,
    token_ids: Option<Vec<LaxInteger<u32>>>,
    /// Media features. Some of the tokens are their placeholders.
    features: Option<IgnoredAny>,
    /// Parts from which the tokens were computed. Text parts have no effect.
    content_parts: Option<Vec<GenerateContentPart>>,
    cache_salt: Option<String>,
    #[serde(borrow)]
    sampling_params: Option<&'a RawValue>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
}

/// A content part of a request with token ids.
#[derive(Deserialize)]
struct GenerateContentPart {
    #[serde(rename = "type")]
    kind: Option<String>,
}

/// Sampling parameters of a request.
#[derive(Default, Deserialize)]
struct SamplingParams {
    #[serde(alias = "max_new_tokens")]
    max_tokens: Option<LaxInteger<u64>>,
    prompt_logprobs: Option<IgnoredAny>,
}

/// Reads the sampling parameters. A list, with one entry per prompt, is ignored.
fn sampling_params(raw: Option<&RawValue>) -> SamplingParams {
    raw.and_then(|raw| serde_json::from_str(raw.get()).ok())
        .unwrap_or_default()
}

pub(super) fn parse_sglang(text: &str) -> Result<ApiRequest, ParseError> {
    let body: SglangGenerateBody<'_> = serde_json::from_str(text)?;
    let adapter = body
        .lora_path
        .and_then(|path| path.as_str().map(str::to_owned));
    let model = adapter.or(body.model);
    let media = [&body.image_data, &body.video_data, &body.audio_data]
        .into_iter()
        .any(Option::is_some);
    let prompt = match (body.text, body.input_ids) {
        _ if body.session_params.is_some() => {
            let unknown = PromptInput::unknown(text.len(), UnknownPromptReason::StoredInEngine);
            return Ok(ApiRequest::with_prompt(model, unknown));
        }
        (prompt, _) if media || body.extra_key.is_some() => {
            let texts = prompt.map_or(0, |PromptList(prompt)| prompt.text_bytes());
            return Ok(ApiRequest::untokenized(model, texts));
        }
        _ if body.input_embeds.is_some() => PromptInput::Embeddings,
        (Some(PromptList(prompt)), _) => prompt,
        (None, Some(PromptList(prompt @ (PromptInput::Tokens(_) | PromptInput::OverLimit)))) => {
            prompt
        }
        (None, Some(_)) => return Err(ParseError::Empty("input_ids")),
        (None, None) => return Err(ParseError::Missing("text")),
    };
    if matches!(&prompt, PromptInput::Texts(texts) if texts.is_empty()) {
        return Err(ParseError::Empty("text"));
    }
    Ok(ApiRequest {
        stream: body.stream.unwrap_or(false),
        max_output_tokens: sampling_params(body.sampling_params)
            .max_tokens
            .map(LaxInteger::get),
        nvext: body.nvext.map(|raw| raw.get().into()),
        ..ApiRequest::with_prompt(model, prompt)
    })
}

pub(super) fn parse_vllm(text: &str) -> Result<ApiRequest, ParseError> {
    let body: VllmGenerateBody<'_> = serde_json::from_str(text)?;
    let tokens = body.token_ids.ok_or(ParseError::Missing("token_ids"))?;
    if tokens.is_empty() {
        return Err(ParseError::Empty("token_ids"));
    }
    let is_text = |part: &GenerateContentPart| part.kind.as_deref() == Some("text");
    let text_only = body.features.is_none() && body.content_parts.iter().flatten().all(is_text);
    let prompt = if text_only {
        PromptInput::Tokens(vec![tokens.into_iter().map(LaxInteger::get).collect()])
    } else {
        let text_bytes = tokens.len() * BYTES_PER_TOKEN;
        PromptInput::unknown(text_bytes, UnknownPromptReason::BuiltByEngine)
    };
    let sampling = sampling_params(body.sampling_params);
    Ok(ApiRequest {
        stream: body.stream.is_some_and(LaxBool::get),
        cache_salt: body.cache_salt,
        max_output_tokens: sampling.max_tokens.map(LaxInteger::get),
        returns_prompt_logprobs: sampling.prompt_logprobs.is_some(),
        nvext: body.nvext.map(|raw| raw.get().into()),
        ..ApiRequest::with_prompt(body.model, prompt)
    })
}
