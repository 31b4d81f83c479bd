//! From an engine's words to the index's: which events count, in which tier, and under which local hashes. An engine
//! reports more than a router may use (sliding windows that keep half a prefix, storage that belongs to others), and it
//! names a salt only at the first block of a prompt, so one [`Normalizer`] per worker rank remembers what later events lean
//! on. It drops what it cannot place for certain: a missing block costs a little speed, an invented one a wrong choice.

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use parking_lot::Mutex;

use super::groups::Groups;
use super::media::{self, MediaTokens};
use super::reblock::{Fit, Reblocker, Regrouped, Run};
use super::wire::{Event, ExtraKey, Kind, Locality, Medium, Origin, Ownership, Stored};
use crate::block::{EngineHash, Salt};
use crate::index::{Forgotten, GroupNeed, KvEvent, Outcome, Salts, Taught};
use crate::tier::Tier;
use crate::worker::BlockSize;

/// Mark by which routers of the field hand a salt through an engine's extra keys.
const SALT_MARK: &str = "dynamo-cache-salt:";

/// What became of one engine event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Converted {
    /// It changes the index.
    Event(KvEvent),
    /// It changes the index in several steps, or not yet: the engine's blocks are smaller than ours.
    Regrouped(Vec<KvEvent>, Outcome),
    /// It concerns no prefix of its own, but tells what a cache group beside the main one holds.
    Group(Filtered, KvEvent),
    /// It does not concern the index.
    Filtered(Filtered),
    /// The engine's blocks have another size now: what was known before is gone, and this is what became of the event then.
    Resized(Box<Converted>),
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
    /// A second cache group that keeps whole prefixes: the first one names the blocks.
    FurtherMainGroup,
    /// A cache group beside the main one whose blocks are no multiple of the configured size.
    GroupBlockSize {
        /// Tokens per block in the event.
        engine: u32,
    },
    /// The salt would be inherited from a block that was stored under two.
    AmbiguousSalt,
    /// The engine cuts blocks of another size than configured, and neither divides the other.
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
            Filtered::FurtherMainGroup => "filtered_further_main_attention_group",
            Filtered::GroupBlockSize { .. } => "filtered_group_block_size_mismatch",
            Filtered::AmbiguousSalt => "filtered_ambiguous_cache_namespace",
            Filtered::BlockSize { .. } => "filtered_block_size_mismatch",
        }
    }
}

/// What an event's origin makes of it.
enum Admission {
    /// It names blocks of prefixes, in this tier.
    Main(Tier),
    /// It tells of a group beside the main one, on the device.
    Group(Filtered, u32),
}

/// Turns the events of one worker rank into index events.
#[derive(Debug)]
pub struct Normalizer {
    block_size: BlockSize,
    groups: Groups,
    /// Shared with who copies them, while no event is converted.
    salts: Arc<Mutex<Salts>>,
    reblocker: Reblocker,
}

impl Normalizer {
    /// A normalizer that has learned nothing yet.
    pub fn new(block_size: BlockSize, media: MediaTokens) -> Self {
        let reblocker = Reblocker::new(block_size, media);
        Self {
            block_size,
            groups: Groups::default(),
            salts: Arc::default(),
            reblocker,
        }
    }

    /// The same with a memory of salts that others see.
    #[must_use]
    pub(super) fn salted(self, salts: Arc<Mutex<Salts>>) -> Self {
        Self { salts, ..self }
    }

    /// One that goes on in the place of another, which has [`Normalizer::taught`] this.
    #[must_use]
    pub fn resumed(mut self, taught: &Taught) -> Self {
        self.groups = Groups::taught(taught);
        self.reblocker.resume(taught.sizes);
        self
    }

    /// What later events lean on beside the salts, if another one could go on with that. Parts of blocks are remembered here
    /// and nowhere else.
    pub fn taught(&self) -> Option<Taught> {
        let mut taught = Taught {
            sizes: self.reblocker.sizes()?,
            ..Taught::default()
        };
        self.groups.teach(&mut taught);
        Some(taught)
    }

    /// Forgets everything learned: the engine is a new one.
    pub fn reset(&mut self) {
        self.groups = Groups::default();
        self.emptied();
    }

    /// Forgets the blocks: none is held any more.
    pub fn emptied(&mut self) {
        self.salts.lock().clear();
        self.reblocker.clear();
    }

    /// Events were lost for good, so often by now.
    pub fn doubt(&mut self, gaps: u32) {
        self.salts.lock().doubt(gaps);
        self.reblocker.doubt(gaps);
    }

    /// The index has taken these for gone; what else it is to be told of them.
    pub fn forgotten(&mut self, forgotten: &Forgotten) -> Vec<KvEvent> {
        self.salts.lock().forget(&forgotten.names);
        let (parts, events) = self.reblocker.forgotten(forgotten);
        self.salts.lock().forget(&parts);
        events
    }

    /// Tokens per block of the engine on the device, once it has told.
    pub fn engine_block_size(&self) -> Option<BlockSize> {
        self.reblocker.engine()
    }

    #[cfg(test)]
    pub(super) fn reblocker(&self) -> &Reblocker {
        &self.reblocker
    }

    /// Converts one event. Order matters: later events lean on what earlier ones taught.
    pub fn convert(&mut self, event: &Event) -> Converted {
        self.admit(event).unwrap_or_else(Converted::Filtered)
    }

    fn admit(&mut self, event: &Event) -> Result<Converted, Filtered> {
        match event {
            Event::Ignored => Err(Filtered::Ignored),
            Event::Cleared { ownership } => {
                owned(*ownership)?;
                self.emptied();
                Ok(Converted::Event(KvEvent::Cleared))
            }
            Event::Removed { hashes, origin } => match self.admission(origin)? {
                Admission::Main(tier) => {
                    self.salts.lock().removed(hashes, tier);
                    Ok(regrouped(self.reblocker.removed(hashes, tier)))
                }
                Admission::Group(reason, group) => Ok(Converted::Group(
                    reason,
                    KvEvent::GroupRemoved {
                        group,
                        blocks: hashes.clone(),
                    },
                )),
            },
            Event::Stored(stored) => {
                self.teach(stored)?;
                match self.admission(&stored.origin)? {
                    Admission::Main(tier) => self.stored(stored, tier),
                    Admission::Group(reason, group) => {
                        Ok(self.stored_in_group(stored, reason, group))
                    }
                }
            }
        }
    }

    /// A store on the device or the host that names both group and kind explains the group for good.
    fn teach(&mut self, stored: &Stored) -> Result<(), Filtered> {
        let tier = local(&stored.origin)?;
        if let (Some(kind), Some(group)) = (stored.origin.kind, stored.origin.group)
            && !is_below_host(tier)
        {
            self.groups.learn(group, kind, stored.origin.window);
        }
        Ok(())
    }

    fn admission(&self, origin: &Origin) -> Result<Admission, Filtered> {
        let tier = local(origin)?;
        if is_below_host(tier) {
            // Storage below the host keeps whole prefixes whatever group they came from.
            return Ok(Admission::Main(tier));
        }
        let reason = match (origin.kind, origin.group) {
            (Some(Kind::Main), Some(group)) if self.groups.is_further(group) => {
                Filtered::FurtherMainGroup
            }
            (Some(Kind::Main), _) | (None, None) => return Ok(Admission::Main(tier)),
            (Some(Kind::Partial(_)), _) => Filtered::NonMainKind,
            (Some(Kind::Unknown), _) => Filtered::UnknownKind,
            (None, Some(group)) => match self.groups.kind(group) {
                Some(Kind::Main) if self.groups.is_further(group) => Filtered::FurtherMainGroup,
                Some(Kind::Main) => return Ok(Admission::Main(tier)),
                Some(_) => Filtered::NonMainGroup,
                None if group == 0 => return Ok(Admission::Main(tier)),
                None => Filtered::UnlearnedGroup,
            },
        };
        match origin.group.filter(|_| tier == Tier::Device) {
            Some(group) => Ok(Admission::Group(reason, group)),
            None => Err(reason),
        }
    }

    fn stored_in_group(&self, stored: &Stored, reason: Filtered, group: u32) -> Converted {
        let (size, engine) = (self.block_size.tokens() as u32, stored.block_size);
        let stride = NonZeroU32::new(engine / size).filter(|stride| stride.get() * size == engine);
        let (reason, need) = match stride {
            Some(stride) => (reason, self.groups.need(group, engine, stride)),
            None => (Filtered::GroupBlockSize { engine }, GroupNeed::Unknown),
        };
        Converted::Group(
            reason,
            KvEvent::GroupStored {
                group,
                need,
                blocks: stored.hashes.clone(),
            },
        )
    }

    fn stored(&mut self, stored: &Stored, tier: Tier) -> Result<Converted, Filtered> {
        if matches!(stored.origin.kind, Some(Kind::Partial(_))) && !pairs_up(stored) {
            // Only the engine knows which of the tokens its blocks hold.
            return Err(Filtered::NonMainKind);
        }
        let (salt, is_known) = self.salt(stored)?;
        if repeats(stored) {
            // A run that meets itself has no place in a prefix tree.
            return Ok(Converted::Event(KvEvent::Removed {
                blocks: Vec::new(),
                tier,
            }));
        }
        let engine = BlockSize::new(stored.block_size);
        let fit = engine.and_then(|engine| self.reblocker.fit(engine, tier));
        if fit.is_none() && tier == Tier::Device && self.is_resized(stored) {
            self.emptied();
            let anew = self
                .stored(stored, tier)
                .unwrap_or_else(Converted::Filtered);
            return Ok(Converted::Resized(Box::new(anew)));
        }
        let fit = fit.ok_or(Filtered::BlockSize {
            engine: stored.block_size,
        })?;
        if is_known {
            self.salts
                .lock()
                .stored(&stored.hashes, tier, salt.cache.as_deref());
        }
        let run = Run {
            parent: stored.parent,
            names: &stored.hashes,
            tokens: &stored.tokens.ids,
            bigrams: stored.tokens.bigrams,
            salt: &salt,
            objects: media_of(stored),
            tier,
        };
        Ok(match fit {
            Fit::Same => Converted::Event(self.reblocker.split(run, NonZeroU32::MIN)),
            Fit::Split(parts) => Converted::Event(self.reblocker.split(run, parts)),
            Fit::Join(_) => regrouped(self.reblocker.join(run)),
        })
    }

    /// Whether the engine's blocks have another size now. One cache has blocks of one size, so it is another one then.
    fn is_resized(&self, stored: &Stored) -> bool {
        let size = stored.block_size as usize;
        let known = self.reblocker.engine().map(BlockSize::tokens);
        size > 0 && stored.tokens.ids.len() >= size && known.is_some_and(|known| known != size)
    }

    /// The salt of a store: named outright, or in the first block's extra keys, or the parent's; and whether that is known.
    /// Of what follows an unknown parent it is not, and to enter it would make it ambiguous when it is told again.
    fn salt(&self, stored: &Stored) -> Result<(Salt, bool), Filtered> {
        let lora = stored.lora.clone().filter(|name| !name.is_empty());
        let named = stored
            .cache_salt
            .as_deref()
            .or_else(|| salt_in_keys(stored));
        let salts = self.salts.lock();
        let (cache, is_known) = match (named, stored.parent) {
            (Some(""), _) | (None, None) => (None, true),
            (Some(salt), _) => (Some(salt), true),
            (None, Some(parent)) => {
                let of_parent = salts.of(parent).map_err(|_| Filtered::AmbiguousSalt)?;
                let own = || stored.hashes.first().and_then(|first| salts.own(*first));
                if salts.knows(parent) {
                    (of_parent, true)
                } else {
                    (own(), own().is_some())
                }
            }
        };
        Ok((
            Salt {
                lora,
                cache: cache.map(str::to_owned),
            },
            is_known,
        ))
    }
}

fn regrouped(
    Regrouped {
        mut events,
        outcome,
    }: Regrouped,
) -> Converted {
    match events.pop() {
        Some(only) if events.is_empty() && outcome == Outcome::Ok => Converted::Event(only),
        last => Converted::Regrouped(events.into_iter().chain(last).collect(), outcome),
    }
}

fn owned(ownership: Ownership) -> Result<(), Filtered> {
    match ownership {
        Ownership::Framework => Ok(()),
        Ownership::Kvcr => Err(Filtered::UnsupportedOwnership),
        Ownership::Unknown => Err(Filtered::UnknownOwnership),
    }
}

/// The tier of an event that tells of the worker's own storage.
fn local(origin: &Origin) -> Result<Tier, Filtered> {
    owned(origin.ownership)?;
    if origin.locality == Locality::Elsewhere {
        return Err(Filtered::NonLocalLocality);
    }
    match origin.medium {
        Medium::Tier(tier) => Ok(tier),
        Medium::Unknown => Err(Filtered::UnknownMedium),
    }
}

fn is_below_host(tier: Tier) -> bool {
    matches!(tier, Tier::Disk | Tier::External)
}

/// Whether the blocks of a store are those that its tokens fill.
fn pairs_up(stored: &Stored) -> bool {
    let tokens = stored
        .tokens
        .ids
        .len()
        .saturating_sub(usize::from(stored.tokens.bigrams));
    tokens < (stored.hashes.len() + 1) * stored.block_size as usize
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
        Some(lora) if matches!(keys.first(), Some(ExtraKey::Text(first)) if first == lora) => {
            texts.skip(1).collect()
        }
        _ => texts.collect(),
    };
    let marked = texts.iter().find_map(|text| text.strip_prefix(SALT_MARK));
    let is_bare = |text: &&&str| {
        media::marker(text).is_none() && (stored.keys_are_pairs || media::digest(text).is_none())
    };
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
    let objects: Vec<Vec<u64>> = stored
        .extra_keys
        .iter()
        .map(|keys| keys.iter().filter_map(of_key).collect())
        .collect();
    if objects.iter().all(Vec::is_empty) {
        Vec::new()
    } else {
        objects
    }
}

#[cfg(test)]
mod tests;
