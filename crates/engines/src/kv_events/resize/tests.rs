//! Compares engines whose block size differs from the index with a model that knows only tokens.

use std::collections::{BTreeMap, HashSet};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::kv_events::convert::{ConvertedEvent, EventNormalizer};
use crate::kv_events::media;
use crate::kv_events::wire::{
    EngineEvent, EventOrigin, EventTokens, ExtraKey, StorageMedium, StoredEvent,
};
use warmroute_core::block::hash::BlockWindows;
use warmroute_core::block::{BlockHashes, CacheSalt};
use warmroute_core::index::{Overlaps, PrefixIndex, RankWriter};
use warmroute_core::worker::RankSlot;

fn size(tokens: u32) -> BlockSize {
    BlockSize::new(tokens).unwrap()
}

#[test]
fn sizes_match_if_one_divides_the_other() {
    let parts = |count| NonZeroU32::new(count).unwrap();
    let cases = [
        (16, 16, Some(SizeRatio::Same)),
        (64, 16, Some(SizeRatio::Split(parts(4)))),
        (1, 16, Some(SizeRatio::Join(parts(16)))),
        (24, 16, None),
        (16, 24, None),
    ];
    for (engine, ours, fit) in cases {
        assert_eq!(
            SizeRatio::between(size(engine), size(ours)),
            fit,
            "{engine} on {ours}"
        );
    }
}

/// An engine, its events, and the resulting index.
struct Harness {
    engine: usize,
    ours: usize,
    bigrams: bool,
    normalizer: EventNormalizer,
    index: std::sync::Arc<PrefixIndex>,
    writer: RankWriter,
    /// Copies of each engine block, by all tokens up to its end.
    held: BTreeMap<(Salted, Vec<u32>), Copies>,
    /// Number of reconciliations that evicted blocks.
    evicted: usize,
}

const TIERS: [StorageTier; 2] = [StorageTier::Device, StorageTier::HostPinned];
type Salted = Option<&'static str>;
/// Number of copies by tier, and whether they are stale.
type Copies = [(u32, bool); 2];

fn name(salt: Salted, tokens: &[u32]) -> EngineHash {
    let mut bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    bytes.extend(salt.unwrap_or_default().as_bytes());
    EngineHash(xxh3_64(&bytes))
}

impl Harness {
    fn new(engine: usize, ours: usize, bigrams: bool) -> Self {
        let index = PrefixIndex::new();
        let normalizer = EventNormalizer::new(size(ours as u32), MediaTokens::default());
        let writer = index.create_writer(RankSlot(0));
        Self {
            engine,
            ours,
            bigrams,
            normalizer,
            index,
            writer,
            held: BTreeMap::new(),
            evicted: 0,
        }
    }

    fn apply(&mut self, event: &EngineEvent) -> Option<ApplyOutcome> {
        match self.normalizer.convert(event) {
            ConvertedEvent::Event(event) => Some(self.writer.apply(&event)),
            ConvertedEvent::IndexEvents(events, outcome) => {
                for event in events {
                    let result = self.writer.apply(&event);
                    assert!(
                        matches!(result, ApplyOutcome::Ok | ApplyOutcome::DuplicateStore),
                        "{result:?} of {event:?}"
                    );
                }
                Some(outcome)
            }
            ConvertedEvent::GroupEvent(..)
            | ConvertedEvent::Filtered(_)
            | ConvertedEvent::BlockSizeChanged(_) => None,
        }
    }

    /// Stores the continuation of a prefix.
    fn store(
        &mut self,
        salt: Salted,
        before: &[u32],
        more: &[u32],
        tier: usize,
    ) -> Option<ApplyOutcome> {
        let all: Vec<u32> = before.iter().chain(more).copied().collect();
        let ends = (before.len() + self.engine..=all.len()).step_by(self.engine);
        // The token after the last one determines the last bigram.
        let ids = if self.bigrams {
            more.iter().copied().chain([next(&all)]).collect()
        } else {
            more.to_vec()
        };
        let stored = StoredEvent {
            hashes: ends.clone().map(|end| name(salt, &all[..end])).collect(),
            parent: (!before.is_empty()).then(|| name(salt, before)),
            tokens: EventTokens {
                ids,
                bigrams: self.bigrams,
            },
            block_size: self.engine as u32,
            extra_keys: match (salt, before) {
                (Some(salt), []) => vec![vec![ExtraKey::Text(salt.to_owned())]],
                _ => Vec::new(),
            },
            keys_are_pairs: true,
            origin: EventOrigin {
                medium: StorageMedium::Tier(TIERS[tier]),
                ..EventOrigin::default()
            },
            ..StoredEvent::default()
        };
        for end in ends {
            let (copies, is_stale) =
                &mut self.held.entry((salt, all[..end].to_vec())).or_default()[tier];
            *copies = if std::mem::take(is_stale) {
                1
            } else {
                *copies + 1
            };
        }
        self.apply(&EngineEvent::Stored(Box::new(stored)))
    }

    fn remove(&mut self, salt: Salted, block: &[u32], tier: usize) -> Option<ApplyOutcome> {
        let key = (salt, block.to_vec());
        let Some(tiers) = self.held.get_mut(&key) else {
            panic!("the block is not held")
        };
        tiers[tier].0 -= 1;
        if tiers[tier].0 == 0 {
            tiers[tier].1 = false;
        }
        if tiers.iter().all(|(copies, _)| *copies == 0) {
            self.held.remove(&key);
        }
        let origin = EventOrigin {
            medium: StorageMedium::Tier(TIERS[tier]),
            ..EventOrigin::default()
        };
        self.apply(&EngineEvent::Removed {
            hashes: vec![name(salt, block)],
            origin,
        })
    }

    fn clear(&mut self) {
        self.held.clear();
        self.apply(&EngineEvent::Cleared {
            ownership: Default::default(),
        });
    }

    fn mark_stale(&mut self) {
        for (copies, is_stale) in self.held.values_mut().flatten() {
            *is_stale = *copies > 0;
        }
        self.normalizer.record_loss(self.writer.record_gap());
    }

    /// Removes blocks from the model that the index presumes gone.
    fn reconcile(&mut self) {
        let Some(evicted) = self.writer.reconcile().purged else {
            return;
        };
        let names: HashSet<(EngineHash, StorageTier)> = evicted.blocks.iter().copied().collect();
        for event in self.normalizer.discard_blocks(&evicted) {
            self.writer.apply(&event);
        }
        let partial_blocks = self.normalizer.resizer().partial_blocks.as_ref();
        for ((salt, block), tiers) in &mut self.held {
            let name = name(*salt, block);
            for ((copies, is_stale), tier) in tiers.iter_mut().zip(TIERS) {
                let is_gone = match partial_blocks {
                    Some(partial_blocks) => !partial_blocks.holds(name, tier),
                    None => names.contains(&(name, tier)),
                };
                if is_gone {
                    (*copies, *is_stale) = (0, false);
                }
            }
        }
        self.evicted += 1;
        self.held
            .retain(|_, tiers| tiers.iter().any(|(copies, _)| *copies > 0));
    }

    /// Returns the number of leading index blocks on the device, according to the index.
    fn found(&self, salt: Salted, tokens: &[u32]) -> usize {
        let salt = CacheSalt {
            lora: None,
            cache: salt.map(str::to_owned),
        };
        let windows = if self.bigrams {
            BlockWindows::Eagle
        } else {
            BlockWindows::Plain
        };
        let locals = local_hashes(tokens, size(self.ours as u32), &salt, windows, &[]);
        let hashes = BlockHashes::from_locals(tokens.len(), size(self.ours as u32), locals);
        let mut overlaps = Overlaps::new();
        self.index.query_overlaps(&hashes, &mut overlaps);
        overlaps.get(RankSlot(0)).device as usize
    }

    /// Returns the number of leading index blocks on the device, according to the model.
    fn expected(&self, salt: Salted, tokens: &[u32]) -> usize {
        let is_held = |block: &[u32]| {
            self.held
                .get(&(salt, block.to_vec()))
                .is_some_and(|tiers| tiers[0].0 > 0)
        };
        let has = |end: usize| {
            if self.engine <= self.ours {
                let mut ends = (end - self.ours + self.engine..=end).step_by(self.engine);
                return ends.all(|end| is_held(&tokens[..end]));
            }
            // If the engine block is held, its beginning is held too, whatever follows.
            let whole = end.div_ceil(self.engine) * self.engine;
            // The last bigram needs the token after it.
            let end = if self.bigrams {
                whole.min(end + 1)
            } else {
                end
            };
            self.held.iter().any(|((of, block), tiers)| {
                *of == salt
                    && block.len() == whole
                    && block.starts_with(&tokens[..end])
                    && tiers[0].0 > 0
            })
        };
        (1..=tokens.len() / self.ours)
            .take_while(|block| has(block * self.ours))
            .count()
    }

    fn check(&self, salt: Salted, tokens: &[u32]) {
        // A window of bigrams ends with the token after the block.
        let mut query = tokens.to_vec();
        if self.bigrams {
            query.push(next(tokens));
        }
        let engine = self.engine;
        let ours = self.ours;
        let bigrams = self.bigrams;
        let case = format!("{tokens:?} of {salt:?}, {engine} on {ours}, bigrams {bigrams}");
        assert_eq!(
            self.found(salt, &query),
            self.expected(salt, tokens),
            "{case}"
        );
    }
}

/// Returns the token that follows these. It is constant, so that a block determines its last
/// bigram.
fn next(_: &[u32]) -> u32 {
    0
}

fn random_tokens(rng: &mut SmallRng, count: usize, bigrams: bool, engine: usize) -> Vec<u32> {
    let token = |at: usize, rng: &mut SmallRng| {
        if bigrams && at.is_multiple_of(engine) {
            0
        } else {
            rng.random_range(0..2)
        }
    };
    (0..count).map(|at| token(at, rng)).collect()
}

fn run_random_history(seed: u64, engine: usize, ours: usize, bigrams: bool) -> usize {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut harness = Harness::new(engine, ours, bigrams);
    let mut queries: Vec<(Salted, Vec<u32>)> = Vec::new();
    for _ in 0..150 {
        let known: Vec<(Salted, Vec<u32>)> = harness.held.keys().cloned().collect();
        let pick = |rng: &mut SmallRng| known.get(rng.random_range(0..known.len().max(1))).cloned();
        match rng.random_range(0..100) {
            0..55 => {
                let start = if rng.random_bool(0.7) {
                    pick(&mut rng)
                } else {
                    None
                };
                let salt = if rng.random_bool(0.2) {
                    Some("tenant")
                } else {
                    None
                };
                let (salt, before) = start.unwrap_or((salt, Vec::new()));
                let count = rng.random_range(1..6) * engine;
                let more = random_tokens(&mut rng, count, bigrams, engine);
                let tier = usize::from(rng.random_bool(0.15));
                harness.store(salt, &before, &more, tier);
                queries.push((salt, before.into_iter().chain(more).collect()));
            }
            55..96 => {
                let Some((salt, block)) = pick(&mut rng) else {
                    continue;
                };
                let held = harness.held[&(salt, block.clone())];
                let tier = usize::from(held[0].0 == 0);
                harness.remove(salt, &block, tier);
            }
            96..98 => harness.mark_stale(),
            98 => harness.clear(),
            _ => harness.reconcile(),
        }
        for _ in 0..4 {
            if let Some((salt, tokens)) = queries.get(rng.random_range(0..queries.len().max(1))) {
                harness.check(*salt, tokens);
            }
        }
    }
    queries
        .iter()
        .for_each(|(salt, tokens)| harness.check(*salt, tokens));
    // Removing the last copy of each block empties the index.
    while let Some(((salt, block), tiers)) = harness
        .held
        .iter()
        .next_back()
        .map(|(key, tiers)| (key.clone(), *tiers))
    {
        harness.remove(salt, &block, usize::from(tiers[0].0 == 0));
    }
    let stats = harness.index.stats();
    assert_eq!(stats.total.copies, 0, "{stats:?}");
    harness.evicted
}

#[test]
fn index_agrees_with_token_model_after_resizing() {
    for (engine, ours) in [
        (4, 4),
        (4, 2),
        (6, 2),
        (8, 2),
        (2, 4),
        (1, 4),
        (2, 6),
        (1, 3),
    ] {
        for bigrams in [false, true] {
            let evicted: usize = (0..25)
                .map(|seed| run_random_history(seed, engine, ours, bigrams))
                .sum();
            assert!(evicted > 0, "{engine} on {ours}");
        }
    }
}

#[test]
fn block_is_held_only_with_all_parts() {
    let mut harness = Harness::new(2, 6, false);
    let tokens: Vec<u32> = (1..=12).collect();
    harness.store(None, &[], &tokens[..2], 0);
    harness.store(None, &tokens[..2], &tokens[2..4], 0);
    assert_eq!(harness.found(None, &tokens), 0, "two of three parts");
    harness.store(None, &tokens[..4], &tokens[4..12], 0);
    assert_eq!(harness.found(None, &tokens), 2);
    harness.remove(None, &tokens[..4], 0);
    assert_eq!(
        harness.found(None, &tokens),
        0,
        "removing any part removes the block"
    );
    harness.store(None, &tokens[..2], &tokens[2..4], 0);
    assert_eq!(
        harness.found(None, &tokens),
        2,
        "the block and its successor are found again"
    );
}

#[test]
fn unknown_parent_is_rejected() {
    let mut harness = Harness::new(2, 4, false);
    assert_eq!(
        harness.store(None, &[1, 2], &[3, 4], 0),
        Some(ApplyOutcome::ParentNotFound)
    );
    assert_eq!(harness.found(None, &[1, 2, 3, 4]), 0);
    let mut harness = Harness::new(4, 2, false);
    assert_eq!(
        harness.store(None, &[1, 2, 3, 4], &[5, 6, 7, 8], 0),
        Some(ApplyOutcome::ParentNotFound)
    );
}

#[test]
fn removed_parts_leave_no_memory() {
    let mut harness = Harness::new(1, 4, false);
    let tokens: Vec<u32> = (0..40).collect();
    harness.store(None, &[], &tokens, 0);
    for end in (1..=40).rev() {
        harness.remove(None, &tokens[..end], 0);
    }
    let mut partial_blocks = PartialBlocks::new(size(1), size(4), 0);
    assert_eq!(
        partial_blocks
            .remove(&[EngineHash(1)], StorageTier::Device)
            .outcome,
        ApplyOutcome::BlockNotFound
    );
    assert_eq!(partial_blocks.len(), 0);
    assert_eq!(harness.index.stats().distinct_blocks, 0);
}

fn image(
    names: &[u64],
    tokens: &[u32],
    objects: &[&[&str]],
    parent: Option<u64>,
    engine: u32,
) -> EngineEvent {
    let keys = |names: &&[&str]| {
        names
            .iter()
            .map(|name| ExtraKey::Media((*name).to_owned()))
            .collect()
    };
    EngineEvent::Stored(Box::new(StoredEvent {
        hashes: names.iter().copied().map(EngineHash).collect(),
        parent: parent.map(EngineHash),
        tokens: EventTokens {
            ids: tokens.to_vec(),
            bigrams: false,
        },
        block_size: engine,
        extra_keys: objects.iter().map(keys).collect(),
        keys_are_pairs: true,
        ..StoredEvent::default()
    }))
}

#[test]
fn images_are_assigned_by_their_placeholders() {
    let media = MediaTokens {
        image: Some(9),
        video: None,
    };
    let cat = media::identifier_hash("cat").unwrap();
    let pad = warmroute_core::block::multimodal::ObjectHash(cat).pad_token();
    let padded = [1, 2, pad, pad, pad, pad, 7, 8];
    let expected = local_hashes(
        &padded,
        size(4),
        &CacheSalt::default(),
        BlockWindows::Plain,
        &[],
    );
    // One engine block is two index blocks, or one index block is two engine blocks.
    let larger = image(&[5], &[1, 2, 9, 9, 9, 9, 7, 8], &[&["cat"]], None, 8);
    let smaller = image(
        &[5, 6, 7, 8],
        &[1, 2, 9, 9, 9, 9, 7, 8],
        &[&[], &["cat"], &["cat"], &[]],
        None,
        2,
    );
    for event in [larger, smaller] {
        let mut normalizer = EventNormalizer::new(size(4), media);
        let events = match normalizer.convert(&event) {
            ConvertedEvent::Event(event) => vec![event],
            ConvertedEvent::IndexEvents(events, _) => events,
            other => panic!("{other:?}"),
        };
        let [KvEvent::Stored { blocks, .. }] = &events[..] else {
            panic!("{events:?}")
        };
        assert_eq!(
            blocks.iter().map(|block| block.local).collect::<Vec<_>>(),
            expected
        );
    }
    // Without placeholders, the half of the block that contains the image is unknown.
    let mut normalizer = EventNormalizer::new(size(4), MediaTokens::default());
    let without_placeholders = image(&[4, 5, 6], &[1; 24], &[&[], &["cat"], &[]], None, 8);
    let ConvertedEvent::Event(KvEvent::Stored { blocks, .. }) =
        normalizer.convert(&without_placeholders)
    else {
        panic!()
    };
    assert_eq!(blocks.len(), 2, "the blocks before the image are known");
    // Smaller blocks name the object in each part, but the index block has it only once.
    let mut normalizer = EventNormalizer::new(size(4), MediaTokens::default());
    let event = image(&[5, 6], &[3, 4, 5, 6], &[&["cat"], &["cat"]], None, 2);
    let ConvertedEvent::Event(KvEvent::Stored { blocks, .. }) = normalizer.convert(&event) else {
        panic!()
    };
    let native = local_hashes(
        &[3, 4, 5, 6],
        size(4),
        &CacheSalt::default(),
        BlockWindows::Plain,
        &[vec![cat]],
    );
    assert_eq!(blocks[0].local, native[0]);
}

#[test]
fn tier_block_size_is_fixed_until_cleared() {
    let mut resizer = BlockResizer::new(size(16), MediaTokens::default());
    assert_eq!(resizer.size_ratio(size(24), StorageTier::Device), None);
    assert_eq!(resizer.device_block_size(), None);
    assert!(resizer.size_ratio(size(32), StorageTier::Device).is_some());
    assert_eq!(resizer.size_ratio(size(16), StorageTier::Device), None);
    assert!(resizer.size_ratio(size(16), StorageTier::Disk).is_some());
    assert!(
        resizer
            .size_ratio(size(8), StorageTier::HostPinned)
            .is_some()
    );
    assert_eq!(
        resizer.size_ratio(size(4), StorageTier::External),
        None,
        "all partial blocks have one size"
    );
    resizer.clear();
    assert!(resizer.size_ratio(size(16), StorageTier::Device).is_some());
}
