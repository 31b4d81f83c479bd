//! Prompts with images and the like. The engine puts a row of placeholder tokens where an item stands, as many as the
//! item's size asks for, and names the item by its content or as the client does; both enter its block hashes. Where
//! size or name of an item cannot be known here, the prompt is known up to that item and no further.

pub mod config;
mod content;
mod expand;
mod identity;
mod picture;
mod size;
#[cfg(test)]
mod tests;

use std::ops::Range;

use super::Tokens;
use crate::block::{ObjectHash, PromptObject};
use crate::openai::{Media, Modality};

pub use config::{ItemRule, MediaConfig, Rule};
pub(super) use expand::{common, expand};
use size::Count;

/// The tokens of a prompt with images and the like, all of them or the first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Illustrated {
    /// The engine's tokens, which know from where others may go on before the first item.
    pub tokens: Tokens,
    /// The items among them, in their order.
    pub items: Vec<Item>,
    /// How many tokens the whole prompt has, as far as that is known: items of unknown size count one each.
    pub at_least: usize,
    /// Whether these are all tokens of the prompt.
    pub whole: bool,
}

/// An item of a prompt, as the engine knows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Item {
    /// What it is.
    pub modality: Modality,
    /// The engine's name for it.
    pub id: String,
    /// Its tokens.
    pub range: Range<usize>,
}

impl Illustrated {
    /// The items, as block hashes want them.
    pub fn objects(&self) -> Vec<PromptObject> {
        let object = |item: &Item| {
            Some(PromptObject {
                object: ObjectHash::of(&item.id)?,
                ranges: vec![item.range.clone()],
            })
        };
        self.items.iter().filter_map(object).collect()
    }
}

/// What the engines of a model say they were started with; it enters the names that they give to content.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Root {
    /// Nobody said: most likely the name of the model.
    #[default]
    Unsaid,
    /// All of them say this.
    Alike(String),
    /// They say different things, and so one item has several names.
    Different,
}

/// What is known of an item before it stands anywhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Known {
    pub(super) id: String,
    pub(super) tokens: usize,
}

/// What stands for items in the prompts of a model; nothing, where that is not configured.
#[derive(Clone, Debug, Default)]
pub(super) struct Rules {
    /// What the engine was started with, as it enters the names of items, where that is configured.
    model: Option<String>,
    /// The name of the model.
    name: String,
    image: Option<Placed>,
    audio: Option<Placed>,
    video: Option<Placed>,
}

/// The rule of one modality, with everything it needs.
#[derive(Clone, Debug)]
pub(super) struct Placed {
    pub(super) token: u32,
    placeholder: Option<String>,
    count: Count,
}

impl Rules {
    /// The rules of a configuration for the model of a name.
    pub(super) fn new(
        config: &MediaConfig,
        name: &str,
        id_of: impl Fn(&str) -> Option<u32>,
    ) -> Result<Self, String> {
        let placed = |rule: &Option<ItemRule>| -> Result<Option<Placed>, String> {
            let Some(rule) = rule else { return Ok(None) };
            let token = id_of(&rule.token).ok_or_else(|| {
                format!(
                    "the tokenizer has no token `{}`, which is to stand for media",
                    rule.token
                )
            })?;
            Ok(Some(Placed {
                token,
                placeholder: rule.placeholder.clone(),
                count: Count::of(rule)?,
            }))
        };
        let rules = [
            placed(&config.image)?,
            placed(&config.audio)?,
            placed(&config.video)?,
        ];
        let tokens: Vec<u32> = rules.iter().flatten().map(|placed| placed.token).collect();
        if tokens
            .iter()
            .enumerate()
            .any(|(at, token)| tokens[..at].contains(token))
        {
            return Err("one token stands for two kinds of media".to_owned());
        }
        let [image, audio, video] = rules;
        Ok(Self {
            model: config.model.clone(),
            name: name.to_owned(),
            image,
            audio,
            video,
        })
    }

    /// The rule of a modality.
    pub(super) fn of(&self, modality: Modality) -> Option<&Placed> {
        match modality {
            Modality::Image => self.image.as_ref(),
            Modality::Audio => self.audio.as_ref(),
            Modality::Video => self.video.as_ref(),
        }
    }

    /// What the engine writes into prompts whose template takes strings, for the item of this number.
    pub(super) fn placeholder(&self, modality: Modality, number: usize) -> Option<String> {
        let text = self.of(modality)?.placeholder.as_ref()?;
        Some(text.replace("{i}", &number.to_string()))
    }

    /// The engine's name of an item and its tokens, if both are known. Of an item that is named but not sent the engine
    /// may remember nothing, and then it refuses.
    pub(super) fn known(&self, media: &Media, root: &Root) -> Option<Known> {
        let count = self.of(media.modality)?.count;
        let data = content::base64_of(media.source.as_ref()?);
        if let Some(id) = &media.uuid {
            let picture = data
                .filter(|_| count.needs_size())
                .and_then(content::picture);
            return Some(Known {
                id: id.clone(),
                tokens: count.tokens(picture)?,
            });
        }
        // Of sound and moving images the engine's name depends on how it decodes them.
        let data = data.filter(|_| media.modality == Modality::Image)?;
        let picture = content::picture(data)?;
        let tokens = count.tokens(Some(picture))?;
        let model = match (&self.model, root) {
            (Some(model), _) | (None, Root::Alike(model)) => model,
            (None, Root::Unsaid) => &self.name,
            (None, Root::Different) => return None,
        };
        Some(Known {
            id: identity::of_image(model, picture.is_rgb?, data)?,
            tokens,
        })
    }
}
