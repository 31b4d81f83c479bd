//! Converts engine events to index events. It decides which events count, in which tier, and with
//! which local hashes. An engine reports more than a router can use, such as sliding windows that
//! hold half a prefix, and storage of other workers. It names a salt only at the first block of a
//! prompt, so one [`EventNormalizer`] per worker rank stores the context of later events. Ambiguous
//! events are dropped: a missing block costs a little latency, but a block that does not exist
//! leads to a wrong choice.

mod filter_reason;

use std::collections::HashSet;
use std::num::NonZeroU32;
use std::sync::Arc;

use parking_lot::Mutex;

pub use filter_reason::FilterReason;

use super::groups::CacheGroups;
use super::media::{self, MediaTokens};
use super::resize::{BlockResizer, ResizedEvents, SizeRatio, StoredRun};
use super::wire::{
    AttentionKind, BlockOwnership, EngineEvent, EventAdapter, EventOrigin, ExtraKey, SkippedEvent,
    StorageLocality, StorageMedium, StoredEvent,
};
use warmroute_core::block::{BlockWindows, CacheSalt, EngineHash, StorageTier};
use warmroute_core::index::{
    ApplyOutcome, GroupNeed, KvEvent, PurgedBlocks, ReaderState, SaltTable,
};
use warmroute_core::worker::BlockSize;

/// Prefix of a salt that other routers pass through the extra keys of an engine.
const SALT_PREFIX: &str = "dynamo-cache-salt:";

/// Result of converting one engine event.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConvertedEvent {
    /// One index event.
    Event(KvEvent),
    /// Any number of index events, because the engine's blocks are smaller than the index's.
    IndexEvents(Vec<KvEvent>, ApplyOutcome),
    /// An event of a cache group other than the main one.
    GroupEvent(FilterReason, KvEvent),
    /// No index event.
    Filtered(FilterReason),
    /// The engine's block size changed. The rank has to be cleared before the inner result is
    /// applied.
    BlockSizeChanged(Box<ConvertedEvent>),
}

/// Scope of an event, derived from its origin.
enum EventScope {
    /// Blocks of prefixes in this tier.
    Main(StorageTier),
    /// Blocks of another group than the main one, on the device.
    Group(FilterReason, u32),
}

/// Converts the events of one worker rank to index events.
#[derive(Debug)]
pub struct EventNormalizer {
    block_size: BlockSize,
    groups: CacheGroups,
    /// Shared with readers that copy it while no event is being converted.
    salts: Arc<Mutex<SaltTable>>,
    resizer: BlockResizer,
    /// Windows of the last store on the device.
    windows: Option<BlockWindows>,
}

impl EventNormalizer {
    /// Creates a normalizer without any state.
    pub fn new(block_size: BlockSize, media: MediaTokens) -> Self {
        let resizer = BlockResizer::new(block_size, media);
        Self {
            block_size,
            groups: CacheGroups::default(),
            salts: Arc::default(),
            resizer,
            windows: None,
        }
    }

    /// Shares the salts with other readers.
    #[must_use]
    pub(super) fn with_salts(self, salts: Arc<Mutex<SaltTable>>) -> Self {
        Self { salts, ..self }
    }

    /// Resumes from the [`EventNormalizer::reader_state`] of another reader.
    #[must_use]
    pub(super) fn resume_from(mut self, state: &ReaderState) -> Self {
        self.groups = CacheGroups::import(state);
        self.resizer.resume(state.block_sizes);
        self.windows = state.windows;
        self
    }

    /// Returns the state that later events depend on, except the salts. Returns `None` if it
    /// contains partial blocks, which cannot be exported.
    pub fn reader_state(&self) -> Option<ReaderState> {
        let mut state = ReaderState {
            block_sizes: self.resizer.tier_sizes()?,
            windows: self.windows,
            ..ReaderState::default()
        };
        self.groups.export(&mut state);
        Some(state)
    }

    /// Clears the whole state after a restart of the engine.
    pub fn reset(&mut self) {
        self.groups = CacheGroups::default();
        self.clear_blocks();
    }

    /// Clears the blocks: the cache is empty.
    pub(super) fn clear_blocks(&mut self) {
        self.salts.lock().clear();
        self.resizer.clear();
    }

    /// Records that events were permanently lost. `gaps` is the number of losses so far.
    pub fn record_loss(&mut self, gaps: u32) {
        self.salts.lock().record_gap(gaps);
        self.resizer.record_loss(gaps);
    }

    /// Discards blocks that the index presumes gone. Returns further events for the index.
    pub(super) fn discard_blocks(&mut self, evicted: &PurgedBlocks) -> Vec<KvEvent> {
        self.salts.lock().remove_all(&evicted.blocks);
        let (parts, events) = self.resizer.discard_blocks(evicted);
        self.salts.lock().remove_all(&parts);
        events
    }

    /// Returns the engine's tokens per block on the device, if known.
    pub fn engine_block_size(&self) -> Option<BlockSize> {
        self.resizer.device_block_size()
    }

    /// Returns the tokens that the hash of each block covers in the events, if known.
    pub(super) fn windows(&self) -> Option<BlockWindows> {
        self.windows
    }

    #[cfg(test)]
    pub(super) fn resizer(&self) -> &BlockResizer {
        &self.resizer
    }

    /// Converts one event. The order matters, because later events depend on earlier ones.
    pub fn convert(&mut self, event: &EngineEvent) -> ConvertedEvent {
        self.convert_event(event)
            .unwrap_or_else(ConvertedEvent::Filtered)
    }

    fn convert_event(&mut self, event: &EngineEvent) -> Result<ConvertedEvent, FilterReason> {
        match event {
            EngineEvent::Ignored => Err(FilterReason::Ignored),
            EngineEvent::Skipped(skipped) => Err(match skipped {
                SkippedEvent::UnknownType(_) => FilterReason::UnknownEvent,
                SkippedEvent::Store(_) => FilterReason::UnreadableStore,
                SkippedEvent::Removal(_) => FilterReason::UnreadableRemoval,
            }),
            EngineEvent::Cleared { ownership } => {
                check_ownership(*ownership)?;
                self.clear_blocks();
                Ok(ConvertedEvent::Event(KvEvent::Cleared))
            }
            EngineEvent::Removed { hashes, origin } => match self.scope_of(origin)? {
                EventScope::Main(tier) => {
                    self.salts.lock().record_removed(hashes, tier);
                    Ok(into_converted(self.resizer.remove(hashes, tier)))
                }
                EventScope::Group(reason, group) => Ok(ConvertedEvent::GroupEvent(
                    reason,
                    KvEvent::GroupRemoved {
                        group,
                        blocks: hashes.clone(),
                    },
                )),
            },
            EngineEvent::Stored(stored) => {
                self.record_group(stored)?;
                if stored.adapter == EventAdapter::Unnamed {
                    return Err(FilterReason::UnnamedAdapter);
                }
                match self.scope_of(&stored.origin)? {
                    EventScope::Main(tier) => self.convert_store(stored, tier),
                    EventScope::Group(reason, group) => {
                        Ok(self.convert_group_store(stored, reason, group))
                    }
                }
            }
        }
    }

    /// Records the kind of a group. Only stores on the device or the host that have both a group
    /// and a kind define it.
    fn record_group(&mut self, stored: &StoredEvent) -> Result<(), FilterReason> {
        let tier = local_tier(&stored.origin)?;
        if let (Some(kind), Some(group)) = (stored.origin.kind, stored.origin.group)
            && !is_below_host(tier)
        {
            self.groups.record(group, kind, stored.origin.window);
        }
        Ok(())
    }

    fn scope_of(&self, origin: &EventOrigin) -> Result<EventScope, FilterReason> {
        let tier = local_tier(origin)?;
        if is_below_host(tier) {
            // Storage below the host holds whole prefixes of any group.
            return Ok(EventScope::Main(tier));
        }
        let reason = match (origin.kind, origin.group) {
            (Some(AttentionKind::Main), Some(group)) if self.groups.is_secondary(group) => {
                FilterReason::SecondaryMainGroup
            }
            (Some(AttentionKind::Main), _) | (None, None) => return Ok(EventScope::Main(tier)),
            (Some(AttentionKind::Partial(_)), _) => FilterReason::NonMainKind,
            (Some(AttentionKind::Unknown), _) => FilterReason::UnknownKind,
            (None, Some(group)) => match self.groups.kind(group) {
                Some(AttentionKind::Main) if self.groups.is_secondary(group) => {
                    FilterReason::SecondaryMainGroup
                }
                Some(AttentionKind::Main) => return Ok(EventScope::Main(tier)),
                Some(_) => FilterReason::NonMainGroup,
                None if group == 0 => return Ok(EventScope::Main(tier)),
                None => FilterReason::UnknownGroup,
            },
        };
        match origin.group.filter(|_| tier == StorageTier::Device) {
            Some(group) => Ok(EventScope::Group(reason, group)),
            None => Err(reason),
        }
    }

    fn convert_group_store(
        &self,
        stored: &StoredEvent,
        reason: FilterReason,
        group: u32,
    ) -> ConvertedEvent {
        let size = self.block_size.tokens() as u32;
        let engine = stored.block_size;
        let stride = NonZeroU32::new(engine / size).filter(|stride| stride.get() * size == engine);
        let (reason, need) = match stride {
            Some(stride) => (reason, self.groups.reuse_need(group, engine, stride)),
            None => (FilterReason::GroupBlockSize { engine }, GroupNeed::Unknown),
        };
        ConvertedEvent::GroupEvent(
            reason,
            KvEvent::GroupStored {
                group,
                need,
                blocks: stored.hashes.clone(),
            },
        )
    }

    fn convert_store(
        &mut self,
        stored: &StoredEvent,
        tier: StorageTier,
    ) -> Result<ConvertedEvent, FilterReason> {
        if matches!(stored.origin.kind, Some(AttentionKind::Partial(_)))
            && !tokens_match_blocks(stored)
        {
            // Only the engine knows which of the tokens are in its blocks.
            return Err(FilterReason::NonMainKind);
        }
        let (salt, is_known) = self.resolve_salt(stored)?;
        if has_repeated_block(stored) {
            // A run with a repeated block cannot be part of a prefix tree.
            return Ok(ConvertedEvent::Event(KvEvent::Removed {
                blocks: Vec::new(),
                tier,
            }));
        }
        let engine = BlockSize::new(stored.block_size);
        let fit = engine.and_then(|engine| self.resizer.size_ratio(engine, tier));
        if fit.is_none() && tier == StorageTier::Device && self.has_new_block_size(stored) {
            self.clear_blocks();
            let inner = self
                .convert_store(stored, tier)
                .unwrap_or_else(ConvertedEvent::Filtered);
            return Ok(ConvertedEvent::BlockSizeChanged(Box::new(inner)));
        }
        let fit = fit.ok_or(FilterReason::BlockSize {
            engine: stored.block_size,
        })?;
        if is_known {
            self.salts
                .lock()
                .record_stored(&stored.hashes, tier, salt.cache.as_deref());
        }
        let run = StoredRun {
            parent: stored.parent,
            hashes: &stored.hashes,
            tokens: &stored.tokens.ids,
            bigrams: stored.tokens.bigrams,
            salt: &salt,
            objects: multimodal_objects(stored),
            tier,
        };
        if tier == StorageTier::Device && !run.tokens.is_empty() {
            self.windows = Some(run.windows());
        }
        Ok(match fit {
            SizeRatio::Same => ConvertedEvent::Event(self.resizer.split(run, NonZeroU32::MIN)),
            SizeRatio::Split(parts) => ConvertedEvent::Event(self.resizer.split(run, parts)),
            SizeRatio::Join(_) => into_converted(self.resizer.join(run)),
        })
    }

    /// Returns true if the engine's block size changed. A cache has one block size, so the engine
    /// must have a new cache.
    fn has_new_block_size(&self, stored: &StoredEvent) -> bool {
        let size = stored.block_size as usize;
        let known = self.resizer.device_block_size().map(BlockSize::tokens);
        size > 0 && stored.tokens.ids.len() >= size && known.is_some_and(|known| known != size)
    }

    /// Returns the salt of a store and whether it is known. A salt is named explicitly, found in
    /// the first block's extra keys, or inherited from the parent. Below an unknown parent the salt
    /// is unknown. Recording it would make it ambiguous when the parent is stored later.
    fn resolve_salt(&self, stored: &StoredEvent) -> Result<(CacheSalt, bool), FilterReason> {
        let lora = stored.adapter.name().map(str::to_owned);
        let named = stored
            .cache_salt
            .as_deref()
            .or_else(|| salt_in_keys(stored));
        let salts = self.salts.lock();
        let (cache, is_known) = match (named, stored.parent) {
            (Some(""), _) | (None, None) => (None, true),
            (Some(salt), _) => (Some(salt), true),
            (None, Some(parent)) => {
                let of_parent = salts
                    .inherited_salt(parent)
                    .map_err(|_| FilterReason::AmbiguousSalt)?;
                let own = || {
                    stored
                        .hashes
                        .first()
                        .and_then(|first| salts.own_salt(*first))
                };
                if salts.contains(parent) {
                    (of_parent, true)
                } else {
                    (own(), own().is_some())
                }
            }
        };
        Ok((
            CacheSalt {
                lora,
                cache: cache.map(str::to_owned),
            },
            is_known,
        ))
    }
}

fn into_converted(
    ResizedEvents {
        mut events,
        outcome,
    }: ResizedEvents,
) -> ConvertedEvent {
    match events.pop() {
        Some(only) if events.is_empty() && outcome == ApplyOutcome::Ok => {
            ConvertedEvent::Event(only)
        }
        last => ConvertedEvent::IndexEvents(events.into_iter().chain(last).collect(), outcome),
    }
}

fn check_ownership(ownership: BlockOwnership) -> Result<(), FilterReason> {
    match ownership {
        BlockOwnership::Framework => Ok(()),
        BlockOwnership::Kvcr => Err(FilterReason::UnsupportedOwnership),
        BlockOwnership::Unknown => Err(FilterReason::UnknownOwnership),
    }
}

/// Returns the tier of an event about the worker's own storage.
fn local_tier(origin: &EventOrigin) -> Result<StorageTier, FilterReason> {
    check_ownership(origin.ownership)?;
    if origin.locality == StorageLocality::Remote {
        return Err(FilterReason::NonLocalLocality);
    }
    match origin.medium {
        StorageMedium::Tier(tier) => Ok(tier),
        StorageMedium::Unknown => Err(FilterReason::UnknownMedium),
    }
}

fn is_below_host(tier: StorageTier) -> bool {
    matches!(tier, StorageTier::Disk | StorageTier::External)
}

/// Returns true if the tokens of a store fill no more blocks than it has.
fn tokens_match_blocks(stored: &StoredEvent) -> bool {
    let tokens = stored
        .tokens
        .ids
        .len()
        .saturating_sub(usize::from(stored.tokens.bigrams));
    tokens < (stored.hashes.len() + 1) * stored.block_size as usize
}

/// Returns true if a run contains its own parent, or a block twice.
fn has_repeated_block(stored: &StoredEvent) -> bool {
    if let [only] = stored.hashes[..] {
        return stored.parent == Some(only);
    }
    let mut seen: HashSet<EngineHash> = HashSet::with_capacity(stored.hashes.len() + 1);
    seen.extend(stored.parent);
    !stored.hashes.iter().all(|&hash| seen.insert(hash))
}

/// Returns the salt in the first block's extra keys. Engines publish it without a prefix, only at
/// the first block of a prompt, after the adapter's name. Other routers add a prefix. In the array
/// encoding, plain text may also be a multimodal id, which is recognized by its form.
fn salt_in_keys(stored: &StoredEvent) -> Option<&str> {
    let keys = stored.extra_keys.first()?;
    let texts = keys.iter().filter_map(|key| match key {
        ExtraKey::Text(text) => Some(text.as_str()),
        _ => None,
    });
    let texts: Vec<&str> = match stored.adapter.name() {
        Some(lora) if matches!(keys.first(), Some(ExtraKey::Text(first)) if first == lora) => {
            texts.skip(1).collect()
        }
        _ => texts.collect(),
    };
    let marked = texts.iter().find_map(|text| text.strip_prefix(SALT_PREFIX));
    let is_bare = |text: &&&str| {
        media::parse_marker(text).is_none()
            && (stored.keys_are_pairs || media::parse_digest(text).is_none())
    };
    match stored.parent {
        _ if marked.is_some() => marked,
        None => texts.iter().find(is_bare).copied(),
        Some(_) => None,
    }
}

/// Returns the multimodal objects of each block, named explicitly or in the extra keys.
fn multimodal_objects(stored: &StoredEvent) -> Vec<Vec<u64>> {
    if let Some(media) = &stored.media {
        return media.clone();
    }
    let of_key = |key: &ExtraKey| match key {
        ExtraKey::Text(text) => media::parse_marker(text),
        ExtraKey::Media(id) => media::parse_marker(id).or_else(|| media::identifier_hash(id)),
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
