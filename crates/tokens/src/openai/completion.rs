//! Request body of `/v1/completions`. The prompt has four forms: a text, texts, token ids, or lists
//! of token ids. The visitors distinguish them during parsing, so that a prompt of 100,000 tokens
//! is read only once.
//!
//! If a request has more than [`MAX_PROMPTS`] prompts, none of them is stored, because each prompt
//! takes far more memory and time than its few bytes in the body.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;

use super::error::ParseError;
use super::lax::LaxBool;
use super::request::{ApiRequest, PromptInput, TokenizationOptions, TruncationSide};

/// Maximum number of prompts per request.
const MAX_PROMPTS: usize = 1024;

/// Default output length of engines for completions.
const DEFAULT_MAX_TOKENS: u64 = 16;

#[derive(Deserialize)]
struct CompletionBody<'a> {
    model: Option<String>,
    stream: Option<bool>,
    cache_salt: Option<String>,
    max_tokens: Option<u64>,
    prompt: Option<PromptList>,
    prompt_embeds: Option<IgnoredAny>,
    add_special_tokens: Option<bool>,
    truncate_prompt_tokens: Option<i64>,
    #[serde(borrow)]
    nvext: Option<&'a RawValue>,
    truncation_side: Option<TruncationSide>,
    prompt_logprobs: Option<IgnoredAny>,
    echo: Option<LaxBool>,
    logprobs: Option<IgnoredAny>,
}

pub(super) fn parse(text: &str) -> Result<ApiRequest, ParseError> {
    let body: CompletionBody<'_> = serde_json::from_str(text)?;
    let prompt = match (body.prompt_embeds, body.prompt) {
        (Some(IgnoredAny), _) => PromptInput::Embeddings,
        (None, Some(PromptList(prompt))) => prompt,
        (None, None) => return Err(ParseError::Missing("prompt")),
    };
    if matches!(&prompt, PromptInput::Texts(texts) if texts.is_empty()) {
        return Err(ParseError::Empty("prompt"));
    }
    Ok(ApiRequest {
        stream: body.stream.unwrap_or(false),
        cache_salt: body.cache_salt,
        max_output_tokens: Some(body.max_tokens.unwrap_or(DEFAULT_MAX_TOKENS)),
        tokenization: TokenizationOptions {
            add_special_tokens: body.add_special_tokens,
            truncate_prompt_tokens: body.truncate_prompt_tokens,
            truncation_side: body.truncation_side,
            ..TokenizationOptions::default()
        },
        nvext: body.nvext.map(|raw| raw.get().into()),
        returns_prompt_logprobs: body.prompt_logprobs.is_some()
            || body.echo.is_some_and(LaxBool::get) && body.logprobs.is_some(),
        ..ApiRequest::with_prompt(body.model, prompt)
    })
}

/// Returns true if a body has more than [`MAX_PROMPTS`] prompts.
pub(super) fn exceeds_prompt_limit(text: &str) -> bool {
    #[derive(Deserialize)]
    struct PromptOnlyBody {
        prompt: Option<PromptList>,
    }
    // Each prompt has at least one byte and one separator.
    text.len() > 2 * MAX_PROMPTS
        && serde_json::from_str::<PromptOnlyBody>(text)
            .is_ok_and(|only| matches!(only.prompt, Some(PromptList(PromptInput::OverLimit))))
}

/// Prompts of a request in any of the four forms.
pub(super) struct PromptList(pub(super) PromptInput);

impl<'de> Deserialize<'de> for PromptList {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptListVisitor)
    }
}

struct PromptListVisitor;

impl<'de> Visitor<'de> for PromptListVisitor {
    type Value = PromptList;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a list of texts, a list of tokens or a list of lists of tokens")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptList, E> {
        Ok(PromptList(PromptInput::Texts(vec![text.to_owned()])))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptList, A::Error> {
        let mixed =
            || A::Error::invalid_type(Unexpected::Other("another entry"), &"entries of one kind");
        let mut prompt = match seq.next_element()? {
            None => return Ok(PromptList(PromptInput::Texts(Vec::new()))),
            Some(PromptListEntry::Text(text)) => PromptInput::Texts(vec![text]),
            Some(PromptListEntry::Token(token)) => PromptInput::Tokens(vec![vec![token]]),
            Some(PromptListEntry::Tokens(tokens)) => {
                let mut lists = vec![tokens];
                while let Some(tokens) = seq.next_element()? {
                    if lists.len() == MAX_PROMPTS {
                        return skip_excess_prompts(seq);
                    }
                    lists.push(tokens);
                }
                return Ok(PromptList(PromptInput::Tokens(lists)));
            }
        };
        while let Some(entry) = seq.next_element()? {
            match (&mut prompt, entry) {
                (PromptInput::Texts(texts), PromptListEntry::Text(_))
                    if texts.len() == MAX_PROMPTS =>
                {
                    return skip_excess_prompts(seq);
                }
                (PromptInput::Texts(texts), PromptListEntry::Text(text)) => texts.push(text),
                (PromptInput::Tokens(lists), PromptListEntry::Token(token)) => lists[0].push(token),
                _ => return Err(mixed()),
            }
        }
        Ok(PromptList(prompt))
    }
}

/// Skips the remaining prompts without storing them.
fn skip_excess_prompts<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<PromptList, A::Error> {
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(PromptList(PromptInput::OverLimit))
}

/// One entry of a prompt list.
enum PromptListEntry {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for PromptListEntry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptListEntryVisitor)
    }
}

struct PromptListEntryVisitor;

impl<'de> Visitor<'de> for PromptListEntryVisitor {
    type Value = PromptListEntry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token or a list of tokens")
    }

    fn visit_str<E>(self, text: &str) -> Result<PromptListEntry, E> {
        Ok(PromptListEntry::Text(text.to_owned()))
    }

    fn visit_u64<E: serde::de::Error>(self, token: u64) -> Result<PromptListEntry, E> {
        u32::try_from(token)
            .map(PromptListEntry::Token)
            .map_err(|_| E::invalid_value(Unexpected::Unsigned(token), &"a token"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<PromptListEntry, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = seq.next_element()? {
            tokens.push(token);
        }
        Ok(PromptListEntry::Tokens(tokens))
    }
}
