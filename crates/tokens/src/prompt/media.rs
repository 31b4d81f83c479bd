//! Prompts with media items. At the position of an item, the engine inserts a number of placeholder
//! tokens that depends on the size of the item. It identifies the item by a content hash or by the
//! client's id. The placeholder tokens and the id are part of the block hashes.
//!
//! If warmroute cannot determine the size or the id of an item, the prompt is known only up to that
//! item.

pub mod config;
mod content;
mod expand;
mod identity;
mod image_header;
mod size;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::resume::prompt_tokens::PromptTokens;
use crate::openai::{MediaItem, MediaModality};
use warmroute_core::block::{ObjectHash, PromptObject};

pub use config::{ImageRule, MediaConfig, MediaItemRule};
pub(super) use expand::{common_prefix, expand_placeholders};
use size::MediaTokenCounter;

/// All or the first tokens of a prompt with media items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MultimodalPrompt {
    /// Token ids, with the resume points before the first item.
    pub tokens: PromptTokens,
    /// Items in these tokens, in order.
    pub items: Vec<PlacedMediaItem>,
    /// Minimum number of tokens of the whole prompt; an item of unknown size counts as one.
    pub min_tokens: usize,
    /// True if these are all tokens of the prompt.
    pub is_complete: bool,
}

/// An item at its position in a prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlacedMediaItem {
    /// Modality of the item.
    pub modality: MediaModality,
    /// The engine's id of the item.
    pub id: String,
    /// Positions of its tokens.
    pub range: Range<usize>,
}

impl MultimodalPrompt {
    /// Removes the last `count` tokens of the prompt.
    pub fn remove_end(&mut self, count: usize) {
        self.is_complete = false;
        let remaining = self.tokens.len().saturating_sub(count);
        self.tokens.truncate(remaining);
    }

    /// Returns the items in the form that block hashing needs.
    pub fn objects(&self) -> Vec<PromptObject> {
        let object = |item: &PlacedMediaItem| {
            Some(PromptObject {
                object: ObjectHash::from_identifier(&item.id)?,
                ranges: vec![item.range.clone()],
            })
        };
        self.items.iter().filter_map(object).collect()
    }
}

/// Model argument with which the engines of a model were started. It is part of the hash that
/// identifies media content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum EngineModelName {
    /// No engine reported it. The model's name is assumed.
    #[default]
    Unreported,
    /// All engines report this value.
    Same(String),
    /// The engines report different values, so an item has several ids.
    Different,
}

/// An item with known id and size.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ResolvedMediaItem {
    pub(super) id: String,
    pub(super) tokens: usize,
}

/// Placeholder rules of a model; empty if not configured.
#[derive(Clone, Debug, Default)]
pub(super) struct MediaRules {
    /// Configured model argument of the engine.
    configured_model: Option<String>,
    /// Name of the model.
    model_name: String,
    /// Rules in the order of [`MediaModality`].
    rules: [Option<ModalityRule>; 3],
}

/// Placeholder rule of one modality.
#[derive(Clone, Debug)]
pub(super) struct ModalityRule {
    pub(super) token: u32,
    placeholder: Option<String>,
    counter: MediaTokenCounter,
}

impl MediaRules {
    /// Creates the rules of a configuration.
    pub(super) fn new(
        config: &MediaConfig,
        name: &str,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self, String> {
        let token_id = |token: &str| {
            let text = || format!("the tokenizer has no token `{token}` for media placeholders");
            id_of(token).ok_or_else(text)
        };
        let rule = |token: &str, placeholder: &Option<String>, counter| -> Result<_, String> {
            Ok(ModalityRule {
                token: token_id(token)?,
                placeholder: placeholder.clone(),
                counter,
            })
        };
        let fixed = |fixed: &MediaItemRule| {
            let counter = MediaTokenCounter::fixed(fixed.tokens_per_item);
            rule(&fixed.token, &fixed.placeholder, counter)
        };
        let image = |image: &ImageRule| {
            let counter = MediaTokenCounter::from_image_rule(image)?;
            rule(&image.token, &image.placeholder, counter)
        };
        let rules = [
            config.image.as_ref().map(image).transpose()?,
            config.audio.as_ref().map(fixed).transpose()?,
            config.video.as_ref().map(fixed).transpose()?,
        ];
        let tokens: Vec<u32> = rules.iter().flatten().map(|placed| placed.token).collect();
        if tokens
            .iter()
            .enumerate()
            .any(|(at, token)| tokens[..at].contains(token))
        {
            return Err("one token is the placeholder of two modalities".to_owned());
        }
        Ok(Self {
            configured_model: config.model.clone(),
            model_name: name.to_owned(),
            rules,
        })
    }

    /// Returns the rule of a modality.
    pub(super) fn rule_for(&self, modality: MediaModality) -> Option<&ModalityRule> {
        self.rules[modality as usize].as_ref()
    }

    /// Returns the text that the engine inserts for an item, for templates that take strings.
    /// `number` counts the items of the modality from 1.
    pub(super) fn placeholder(&self, modality: MediaModality, number: usize) -> Option<String> {
        let text = self.rule_for(modality)?.placeholder.as_ref()?;
        Some(text.replace("{i}", &number.to_string()))
    }

    /// Returns the engine's id and token count of an item, if both are known. For an item without
    /// content, the engine may not know the id and then rejects the request.
    pub(super) fn resolve_item(
        &self,
        media: &MediaItem,
        engine_model: &EngineModelName,
    ) -> Option<ResolvedMediaItem> {
        let count = self.rule_for(media.modality)?.counter;
        let data = content::base64_of(media.source.as_ref()?);
        if let Some(id) = &media.uuid {
            let picture = data
                .filter(|_| count.needs_size())
                .and_then(content::read_image_header);
            return Some(ResolvedMediaItem {
                id: id.clone(),
                tokens: count.count_tokens(picture)?,
            });
        }
        // The engine's id of audio and video depends on its decoder.
        let data = data.filter(|_| media.modality == MediaModality::Image)?;
        let picture = content::read_image_header(data)?;
        let tokens = count.count_tokens(Some(picture))?;
        let model = match (&self.configured_model, engine_model) {
            (Some(model), _) | (None, EngineModelName::Same(model)) => model,
            (None, EngineModelName::Unreported) => &self.model_name,
            (None, EngineModelName::Different) => return None,
        };
        Some(ResolvedMediaItem {
            id: identity::image_id(model, picture.is_rgb?, data)?,
            tokens,
        })
    }
}
