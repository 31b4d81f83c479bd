//! Added tokens and special tokens as transformers brings them into a tokenizer: those that the configuration lists, those
//! that it names (`bos_token` and the like) or that a class has by default, and those that are special beside them. What is
//! not among the added tokens of `tokenizer.json` yet is added, in the same order, because it gets the next free id.

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use super::Class;
use crate::prompt::files::SPECIAL_TOKENS;

/// The tokens that are added behind the vocabulary.
pub(in crate::prompt) struct Added {
    /// Those that are listed, by their ids.
    listed: Vec<AddedToken>,
    /// Those that have names, then the rest.
    special: Vec<AddedToken>,
    /// How many have names.
    named: usize,
    class: Class,
}

impl Added {
    /// What the configuration says, or `tokenizer.json` where it lists nothing.
    pub(in crate::prompt) fn new(
        class: Class,
        settings: &Map<String, Value>,
        whole: &Value,
    ) -> Self {
        let mut listed = match settings
            .get("added_tokens_decoder")
            .and_then(Value::as_object)
        {
            Some(list) => {
                let numbered =
                    |(id, token): (&String, &Value)| Some((id.parse().ok()?, token_of(token)?));
                list.iter()
                    .filter_map(numbered)
                    .collect::<Vec<(u32, AddedToken)>>()
            }
            None => {
                let list = whole["added_tokens"]
                    .as_array()
                    .map_or(&[][..], Vec::as_slice);
                list.iter()
                    .filter_map(|token| Some((token["id"].as_u64()? as u32, token_of(token)?)))
                    .collect()
            }
        };
        listed.sort_by_key(|(id, _)| *id);
        let listed: Vec<AddedToken> = listed.into_iter().map(|(_, token)| token).collect();
        let (special, named) = special(class, settings);
        // Names are looked up among the listed ones, and have their properties.
        let special = special.into_iter().map(|token| {
            listed
                .iter()
                .find(|one| one.content == token.content)
                .cloned()
                .unwrap_or(token)
        });
        Self {
            special: special.collect(),
            named,
            listed,
            class,
        }
    }

    pub(in crate::prompt) fn add_to(&self, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
        let there = tokenizer.get_added_tokens_decoder();
        let known = |token: &AddedToken| there.values().any(|one| one.content == token.content);
        let mut adding: Vec<AddedToken> = self
            .listed
            .iter()
            .filter(|token| !there.values().any(|one| one == *token))
            .cloned()
            .collect();
        for token in &self.special {
            if !known(token) && !adding.iter().any(|one| one.content == token.content) {
                adding.push(token.clone());
            }
        }
        for token in &mut adding {
            token.special |= self.special[..self.named]
                .iter()
                .any(|one| one.content == token.content);
        }
        tokenizer.add_tokens(adding)?;
        match self.class {
            Class::Qwen2 => {
                tokenizer.add_tokens(
                    self.special
                        .iter()
                        .map(|token| AddedToken::from(token.content.as_str(), true)),
                )?;
            }
            Class::Cohere => {
                tokenizer.add_special_tokens(self.special.iter().cloned())?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// The special tokens by the names of the library, those that this model names besides, and those without names; and how
/// many have names.
fn special(class: Class, settings: &Map<String, Value>) -> (Vec<AddedToken>, usize) {
    let named = SPECIAL_TOKENS
        .into_iter()
        .filter_map(|name| match settings.get(name) {
            Some(said) => token_of(said),
            None => {
                let (_, token) = class
                    .special_tokens()
                    .iter()
                    .find(|(known, _)| *known == name)?;
                Some(AddedToken::from(*token, true))
            }
        });
    let unnamed = settings
        .get("extra_special_tokens")
        .filter(|extra| !is_empty(extra));
    let unnamed = unnamed.or_else(|| settings.get("additional_special_tokens"));
    let own = settings
        .iter()
        .filter(|(key, value)| {
            key.ends_with("_token") && value.is_string() && !SPECIAL_TOKENS.contains(&key.as_str())
        })
        .filter_map(|(_, value)| token_of(value));
    let by_name = |tokens: Option<&Value>| -> Vec<AddedToken> {
        tokens
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .filter_map(|(_, token)| token_of(token))
            .collect()
    };
    let listed = unnamed
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(token_of);
    let own = own
        .chain(by_name(unnamed))
        .chain(by_name(settings.get("model_specific_special_tokens")));
    let mut all: Vec<AddedToken> = named.chain(own).collect();
    let named = all.len();
    all.extend(listed);
    (all, named)
}

fn is_empty(value: &Value) -> bool {
    value.is_null()
        || value.as_array().is_some_and(Vec::is_empty)
        || value.as_object().is_some_and(Map::is_empty)
}

/// A token as files write it: a text alone is a special one.
fn token_of(value: &Value) -> Option<AddedToken> {
    if let Some(text) = value.as_str() {
        return Some(AddedToken::from(text, true));
    }
    let flag = |name: &str| value.get(name).and_then(Value::as_bool);
    let special = flag("special").unwrap_or(false);
    Some(AddedToken {
        content: value.get("content")?.as_str()?.to_owned(),
        single_word: flag("single_word").unwrap_or(false),
        lstrip: flag("lstrip").unwrap_or(false),
        rstrip: flag("rstrip").unwrap_or(false),
        normalized: flag("normalized").unwrap_or(!special),
        special,
    })
}
