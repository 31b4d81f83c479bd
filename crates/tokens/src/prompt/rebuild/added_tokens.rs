//! Added and special tokens, in the order in which transformers adds them to a tokenizer: the
//! tokens that the configuration lists, those that it names (`bos_token` and the like) or that a
//! class has by default, and additional special tokens. Tokens missing in `tokenizer.json` are
//! appended in this order and get the next free ids.

use serde_json::{Map, Value};
use tokenizers::{AddedToken, Tokenizer};

use super::TokenizerClass;

/// Names of the special tokens in templates.
pub(crate) const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// Tokens to append to the vocabulary.
pub(crate) struct AddedTokens {
    /// Listed tokens, ordered by id.
    listed: Vec<AddedToken>,
    /// Special tokens, the named ones first.
    special: Vec<AddedToken>,
    /// Number of named special tokens.
    named_count: usize,
    class: TokenizerClass,
}

impl AddedTokens {
    /// Reads the tokens of the configuration, or of `tokenizer.json` if it lists none.
    pub(crate) fn new(class: TokenizerClass, settings: &Map<String, Value>, whole: &Value) -> Self {
        let mut listed = match settings
            .get("added_tokens_decoder")
            .and_then(Value::as_object)
        {
            Some(list) => {
                let numbered =
                    |(id, token): (&String, &Value)| Some((id.parse().ok()?, parse_token(token)?));
                list.iter()
                    .filter_map(numbered)
                    .collect::<Vec<(u32, AddedToken)>>()
            }
            None => {
                let list = whole["added_tokens"]
                    .as_array()
                    .map_or(&[][..], Vec::as_slice);
                list.iter()
                    .filter_map(|token| Some((token["id"].as_u64()? as u32, parse_token(token)?)))
                    .collect()
            }
        };
        listed.sort_by_key(|(id, _)| *id);
        let listed: Vec<AddedToken> = listed.into_iter().map(|(_, token)| token).collect();
        let (special, named_count) = special_tokens(class, settings);
        // The properties of a named token are those in the list, if it is listed.
        let special = special.into_iter().map(|token| {
            listed
                .iter()
                .find(|one| one.content == token.content)
                .cloned()
                .unwrap_or(token)
        });
        Self {
            special: special.collect(),
            named_count,
            listed,
            class,
        }
    }

    pub(crate) fn add_to(&self, tokenizer: &mut Tokenizer) -> tokenizers::Result<()> {
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
            token.special |= self.special[..self.named_count]
                .iter()
                .any(|one| one.content == token.content);
        }
        tokenizer.add_tokens(adding)?;
        match self.class {
            TokenizerClass::Qwen2 => {
                tokenizer.add_tokens(
                    self.special
                        .iter()
                        .map(|token| AddedToken::from(token.content.as_str(), true)),
                )?;
            }
            TokenizerClass::Cohere => {
                tokenizer.add_special_tokens(self.special.iter().cloned())?;
            }
            _ => {}
        }
        Ok(())
    }
}

/// Returns the special tokens and the number of named ones. The order is: tokens with names of the
/// library, tokens with names of the model, and tokens without names.
fn special_tokens(
    class: TokenizerClass,
    settings: &Map<String, Value>,
) -> (Vec<AddedToken>, usize) {
    let named = SPECIAL_TOKENS
        .into_iter()
        .filter_map(|name| match settings.get(name) {
            Some(token) => parse_token(token),
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
        .filter_map(|(_, value)| parse_token(value));
    let by_name = |tokens: Option<&Value>| -> Vec<AddedToken> {
        tokens
            .and_then(Value::as_object)
            .into_iter()
            .flatten()
            .filter_map(|(_, token)| parse_token(token))
            .collect()
    };
    let listed = unnamed
        .and_then(Value::as_array)
        .into_iter()
        .flatten()
        .filter_map(parse_token);
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

/// Parses a token. A plain string is a special token.
fn parse_token(value: &Value) -> Option<AddedToken> {
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
