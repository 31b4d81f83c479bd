//! The body of `/v1/completions`. Its prompt has four shapes (a text, texts, tokens, lists of tokens), told apart while
//! reading instead of by trial, because a prompt of a hundred thousand tokens should be read once. Of more prompts than an
//! honest client sends at once none is kept: each costs memory and time far beyond the few bytes it has in the body.

use std::fmt;

use serde::Deserialize;
use serde::de::{Deserializer, Error as _, IgnoredAny, SeqAccess, Unexpected, Visitor};
use serde_json::value::RawValue;

use super::{ParseError, Prompt, Request, Tokenization};

/// Most prompts of one request that are looked at.
const MOST_PROMPTS: usize = 1024;

/// How long an answer engines give where the request does not say: chats have as much as there is room for.
const ANSWER: u64 = 16;

#[derive(Deserialize)]
struct Body<'a> {
    #[serde(default)]
    model: Option<String>,
    #[serde(default)]
    stream: Option<bool>,
    #[serde(default)]
    cache_salt: Option<String>,
    #[serde(default)]
    max_tokens: Option<u64>,
    #[serde(default)]
    prompt: Option<Prompts>,
    #[serde(default)]
    prompt_embeds: Option<IgnoredAny>,
    #[serde(default)]
    add_special_tokens: Option<bool>,
    #[serde(default)]
    truncate_prompt_tokens: Option<i64>,
    #[serde(default, borrow)]
    nvext: Option<&'a RawValue>,
    #[serde(default)]
    truncation_side: Option<super::Side>,
}

pub(super) fn parse(text: &str) -> Result<Request, ParseError> {
    let body: Body<'_> = serde_json::from_str(text)?;
    let prompt = match (body.prompt_embeds, body.prompt) {
        (Some(IgnoredAny), _) => Prompt::Embeddings,
        (None, Some(Prompts(prompt))) => prompt,
        (None, None) => return Err(ParseError::Missing("prompt")),
    };
    if matches!(&prompt, Prompt::Texts(texts) if texts.is_empty()) {
        return Err(ParseError::Empty("prompt"));
    }
    Ok(Request {
        model: body.model,
        stream: body.stream.unwrap_or(false),
        prompt,
        cache_salt: body.cache_salt,
        max_output_tokens: Some(body.max_tokens.unwrap_or(ANSWER)),
        tokenization: Tokenization {
            add_special_tokens: body.add_special_tokens,
            truncate_prompt_tokens: body.truncate_prompt_tokens,
            truncation_side: body.truncation_side,
            ..Tokenization::default()
        },
        extension: body.nvext.map(|raw| raw.get().into()),
    })
}

/// Whether a body has more prompts than are looked at.
pub(super) fn has_too_many(text: &str) -> bool {
    #[derive(Deserialize)]
    struct Only {
        prompt: Option<Prompts>,
    }
    // Each has a byte, and another that separates it from the next.
    text.len() > 2 * MOST_PROMPTS
        && serde_json::from_str::<Only>(text)
            .is_ok_and(|only| matches!(only.prompt, Some(Prompts(Prompt::TooMany))))
}

/// The prompts of a request, in any of the four shapes.
pub(super) struct Prompts(pub(super) Prompt);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a list of texts, a list of tokens or a list of lists of tokens")
    }

    fn visit_str<E>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(Prompt::Texts(vec![text.to_owned()])))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Prompts, A::Error> {
        let mixed =
            || A::Error::invalid_type(Unexpected::Other("another entry"), &"entries of one kind");
        let mut prompt = match seq.next_element()? {
            None => return Ok(Prompts(Prompt::Texts(Vec::new()))),
            Some(Entry::Text(text)) => Prompt::Texts(vec![text]),
            Some(Entry::Token(token)) => Prompt::Tokens(vec![vec![token]]),
            Some(Entry::Tokens(tokens)) => {
                let mut lists = vec![tokens];
                while let Some(tokens) = seq.next_element()? {
                    if lists.len() == MOST_PROMPTS {
                        return too_many(seq);
                    }
                    lists.push(tokens);
                }
                return Ok(Prompts(Prompt::Tokens(lists)));
            }
        };
        while let Some(entry) = seq.next_element()? {
            match (&mut prompt, entry) {
                (Prompt::Texts(texts), Entry::Text(_)) if texts.len() == MOST_PROMPTS => {
                    return too_many(seq);
                }
                (Prompt::Texts(texts), Entry::Text(text)) => texts.push(text),
                (Prompt::Tokens(lists), Entry::Token(token)) => lists[0].push(token),
                _ => return Err(mixed()),
            }
        }
        Ok(Prompts(prompt))
    }
}

/// Reads past the rest without keeping it.
fn too_many<'de, A: SeqAccess<'de>>(mut seq: A) -> Result<Prompts, A::Error> {
    while seq.next_element::<IgnoredAny>()?.is_some() {}
    Ok(Prompts(Prompt::TooMany))
}

/// One entry of a prompt list.
enum Entry {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Entry {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(EntryVisitor)
    }
}

struct EntryVisitor;

impl<'de> Visitor<'de> for EntryVisitor {
    type Value = Entry;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a text, a token or a list of tokens")
    }

    fn visit_str<E>(self, text: &str) -> Result<Entry, E> {
        Ok(Entry::Text(text.to_owned()))
    }

    fn visit_u64<E: serde::de::Error>(self, token: u64) -> Result<Entry, E> {
        u32::try_from(token)
            .map(Entry::Token)
            .map_err(|_| E::invalid_value(Unexpected::Unsigned(token), &"a token"))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Entry, A::Error> {
        let mut tokens = Vec::new();
        while let Some(token) = seq.next_element()? {
            tokens.push(token);
        }
        Ok(Entry::Tokens(tokens))
    }
}
