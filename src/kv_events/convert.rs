//! From an engine's words to the index's: which events count, in which tier, and under which local hashes. An engine
//! reports more than a router may use (sliding windows that keep half a prefix, storage that belongs to others), and it
//! names a salt only at the first block of a prompt, so one [`Normalizer`] per worker rank remembers what later events lean
//! on. It drops what it cannot place for certain: a missing block costs a little speed, an invented one a wrong choice.

use std::collections::HashSet;

use hashbrown::HashMap;

use super::media::{self, MediaTokens};
use super::salts::Salts;
use super::wire::{Event, ExtraKey, Kind, Locality, Medium, Origin, Ownership, Stored};
use crate::block::hash::{Windows, locals};
use crate::block::{EngineHash, Salt};
use crate::index::{KvEvent, StoredBlock};
use crate::tier::Tier;
use crate::worker::BlockSize;

/// Mark by which routers of the field hand a salt through an engine's extra keys.
const SALT_MARK: &str = "dynamo-cache-salt:";

/// What became of one engine event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Converted {
    /// It changes the index.
    Event(KvEvent),
    /// It does not concern the index.
    Filtered(Filtered),
}

/// Why an event does not concern the index.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Filtered {
    /// Blocks of a cache that does not serve prefix hits.
    UnsupportedOwnership,
    /// Blocks of an owner we do not know.
    UnknownOwnership,
    /// A placeholder.
    Ignored,
    /// Storage that is not the worker's own.
    NonLocalLocality,
    /// A medium we do not know.
    UnknownMedium,
    /// An attention kind that keeps only part of a prefix.
    NonMainKind,
    /// An attention kind we do not know.
    UnknownKind,
    /// A cache group known to keep only part of a prefix.
    NonMainGroup,
    /// A cache group that was never explained.
    UnlearnedGroup,
    /// The salt would be inherited from a block that was stored under two.
    AmbiguousSalt,
    /// The engine cuts blocks of another size than configured.
    BlockSize {
        /// Tokens per block in the event.
        engine: u32,
    },
}

impl Filtered {
    /// The reason, as named in the field's routers.
    pub fn as_str(self) -> &'static str {
        self.label().trim_start_matches("filtered_")
    }

    /// The outcome in metrics.
    pub fn label(self) -> &'static str {
        match self {
            Filtered::UnsupportedOwnership => "filtered_unsupported_ownership",
            Filtered::UnknownOwnership => "filtered_unknown_ownership",
            Filtered::Ignored => "filtered_ignored_event",
            Filtered::NonLocalLocality => "filtered_non_local_locality",
            Filtered::UnknownMedium => "filtered_unknown_medium",
            Filtered::NonMainKind => "filtered_non_main_attention_kind",
            Filtered::UnknownKind => "filtered_unknown_kind",
            Filtered::NonMainGroup => "filtered_non_main_attention_group",
            Filtered::UnlearnedGroup => "filtered_unlearned_group_idx",
            Filtered::AmbiguousSalt => "filtered_ambiguous_cache_namespace",
            Filtered::BlockSize { .. } => "filtered_block_size_mismatch",
        }
    }
}

/// Turns the events of one worker rank into index events.
#[derive(Debug)]
pub struct Normalizer {
    block_size: BlockSize,
    media: MediaTokens,
    /// Whether a cache group keeps whole prefixes, as store events taught it.
    groups: HashMap<u32, bool>,
    salts: Salts,
}

impl Normalizer {
    /// A normalizer that has learned nothing yet.
    pub fn new(block_size: BlockSize, media: MediaTokens) -> Self {
        Self { block_size, media, groups: HashMap::new(), salts: Salts::default() }
    }

    /// Forgets everything learned: the engine is a new one.
    pub fn reset(&mut self) {
        self.groups.clear();
        self.salts.clear();
    }

    /// Converts one event. Order matters: later events lean on what earlier ones taught.
    pub fn convert(&mut self, event: &Event) -> Converted {
        self.admit(event).map_or_else(Converted::Filtered, Converted::Event)
    }

    fn admit(&mut self, event: &Event) -> Result<KvEvent, Filtered> {
        match event {
            Event::Ignored => Err(Filtered::Ignored),
            Event::Cleared { ownership } => {
                owned(*ownership)?;
                self.salts.clear();
                Ok(KvEvent::Cleared)
            }
            Event::Removed { hashes, origin } => {
                let tier = self.tier(origin, false)?;
                self.salts.removed(hashes);
                Ok(KvEvent::Removed { blocks: hashes.clone(), tier })
            }
            Event::Stored(stored) => {
                let tier = self.tier(&stored.origin, true)?;
                self.stored(stored, tier)
            }
        }
    }

    /// The tier of an event that counts. A store that names both group and kind explains the group for good.
    fn tier(&mut self, origin: &Origin, teaches: bool) -> Result<Tier, Filtered> {
        owned(origin.ownership)?;
        if origin.locality == Locality::Elsewhere {
            return Err(Filtered::NonLocalLocality);
        }
        let Medium::Tier(tier) = origin.medium else { return Err(Filtered::UnknownMedium) };
        if matches!(tier, Tier::Disk | Tier::External) {
            // Storage below the host keeps whole prefixes whatever group they came from.
            return Ok(tier);
        }
        if let (true, Some(kind), Some(group)) = (teaches, origin.kind, origin.group) {
            self.groups.insert(group, kind == Kind::Main);
        }
        match (origin.kind, origin.group) {
            (Some(Kind::Main), _) | (None, None) => Ok(tier),
            (Some(Kind::Partial), _) => Err(Filtered::NonMainKind),
            (Some(Kind::Unknown), _) => Err(Filtered::UnknownKind),
            (None, Some(group)) => match self.groups.get(&group) {
                Some(true) => Ok(tier),
                Some(false) => Err(Filtered::NonMainGroup),
                None if group == 0 => Ok(tier),
                None => Err(Filtered::UnlearnedGroup),
            },
        }
    }

    fn stored(&mut self, stored: &Stored, tier: Tier) -> Result<KvEvent, Filtered> {
        let salt = self.salt(stored)?;
        if repeats(stored) {
            // A run that meets itself has no place in a prefix tree.
            return Ok(KvEvent::Removed { blocks: Vec::new(), tier });
        }
        if stored.block_size as usize != self.block_size.tokens() {
            return Err(Filtered::BlockSize { engine: stored.block_size });
        }
        self.salts.stored(&stored.hashes, salt.cache.as_deref());
        let blocks = self.blocks(stored, &salt);
        Ok(KvEvent::Stored { parent: stored.parent, blocks, tier })
    }

    /// The salt of a store: named outright, or in the first block's extra keys, or the parent's.
    fn salt(&self, stored: &Stored) -> Result<Salt, Filtered> {
        let lora = stored.lora.clone().filter(|name| !name.is_empty());
        let named = stored.cache_salt.as_deref().or_else(|| salt_in_keys(stored));
        let cache = match (named, stored.parent) {
            (Some(""), _) | (None, None) => None,
            (Some(salt), _) => Some(salt.to_owned()),
            (None, Some(parent)) => self.salts.of(parent).map_err(|_| Filtered::AmbiguousSalt)?.map(str::to_owned),
        };
        Ok(Salt { lora, cache })
    }

    fn blocks(&self, stored: &Stored, salt: &Salt) -> Vec<StoredBlock> {
        let bigrams = stored.tokens.bigrams;
        let windows = if bigrams { Windows::Eagle } else { Windows::Plain };
        let wanted = stored.hashes.len() * self.block_size.tokens() + usize::from(bigrams);
        let tokens = &stored.tokens.ids[..stored.tokens.ids.len().min(wanted)];
        let mut objects = media_of(stored);
        let padded = if bigrams || objects.is_empty() {
            None
        } else {
            media::normalize(tokens, &mut objects, self.block_size, self.media)
        };
        let tokens = padded.as_deref().unwrap_or(tokens);
        let hashes = locals(tokens, self.block_size, salt, windows, &objects);
        stored.hashes.iter().zip(hashes).map(|(&engine, local)| StoredBlock { engine, local }).collect()
    }
}

fn owned(ownership: Ownership) -> Result<(), Filtered> {
    match ownership {
        Ownership::Framework => Ok(()),
        Ownership::Kvcr => Err(Filtered::UnsupportedOwnership),
        Ownership::Unknown => Err(Filtered::UnknownOwnership),
    }
}

/// Whether a run contains its own parent or a block twice.
fn repeats(stored: &Stored) -> bool {
    if let [only] = stored.hashes[..] {
        return stored.parent == Some(only);
    }
    let mut seen: HashSet<EngineHash> = HashSet::with_capacity(stored.hashes.len() + 1);
    seen.extend(stored.parent);
    !stored.hashes.iter().all(|&hash| seen.insert(hash))
}

/// The salt in the first block's extra keys. Engines publish it bare and only at the first block of a prompt, after the
/// adapter's name; routers of the field mark theirs. Bare text may also be the multimodal id of an engine of the array
/// encoding, which is told by its form.
fn salt_in_keys(stored: &Stored) -> Option<&str> {
    let keys = stored.extra_keys.first()?;
    let texts = keys.iter().filter_map(|key| match key {
        ExtraKey::Text(text) => Some(text.as_str()),
        _ => None,
    });
    let texts: Vec<&str> = match &stored.lora {
        Some(lora) if matches!(keys.first(), Some(ExtraKey::Text(first)) if first == lora) => texts.skip(1).collect(),
        _ => texts.collect(),
    };
    let marked = texts.iter().find_map(|text| text.strip_prefix(SALT_MARK));
    let is_bare =
        |text: &&&str| media::marker(text).is_none() && (stored.keys_are_pairs || media::digest(text).is_none());
    match stored.parent {
        _ if marked.is_some() => marked,
        None => texts.iter().find(is_bare).copied(),
        Some(_) => None,
    }
}

/// Multimodal objects per block: named outright, or in the extra keys.
fn media_of(stored: &Stored) -> Vec<Vec<u64>> {
    if let Some(media) = &stored.media {
        return media.clone();
    }
    let of_key = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => media::marker(text),
        ExtraKey::Media(id) => media::marker(id).or_else(|| media::identifier_hash(id)),
        ExtraKey::Other => None,
    };
    let objects: Vec<Vec<u64>> =
        stored.extra_keys.iter().map(|keys| keys.iter().filter_map(of_key).collect()).collect();
    if objects.iter().all(Vec::is_empty) { Vec::new() } else { objects }
}

#[cfg(test)]
mod tests;
