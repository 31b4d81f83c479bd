//! Engines with blocks of other sizes against a model that knows tokens only.

use std::collections::{BTreeMap, HashSet};

use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;
use crate::block::BlockHashes;
use crate::index::{Overlaps, PrefixIndex, RankWriter};
use crate::kv_events::convert::{Converted, Normalizer};
use crate::kv_events::wire::{Event, ExtraKey, Medium, Origin, Stored, Tokens};
use crate::worker::Slot;

fn size(tokens: u32) -> BlockSize {
    BlockSize::new(tokens).unwrap()
}

#[test]
fn sizes_fit_where_one_divides_the_other() {
    let parts = |count| NonZeroU32::new(count).unwrap();
    let cases = [
        (16, 16, Some(Fit::Same)),
        (64, 16, Some(Fit::Split(parts(4)))),
        (1, 16, Some(Fit::Join(parts(16)))),
        (24, 16, None),
        (16, 24, None),
    ];
    for (engine, ours, fit) in cases {
        assert_eq!(Fit::of(size(engine), size(ours)), fit, "{engine} on {ours}");
    }
}

/// An engine, what it told, and what we made of it.
struct Bed {
    engine: usize,
    ours: usize,
    bigrams: bool,
    normalizer: Normalizer,
    index: std::sync::Arc<PrefixIndex>,
    writer: RankWriter,
    /// Copies of each of the engine's blocks by all tokens up to its end.
    held: BTreeMap<(Salted, Vec<u32>), Copies>,
    /// How often something was taken for gone.
    forgotten: usize,
}

const TIERS: [Tier; 2] = [Tier::Device, Tier::HostPinned];
type Salted = Option<&'static str>;
/// By tier, how many and whether they are doubted.
type Copies = [(u32, bool); 2];

fn name(salt: Salted, tokens: &[u32]) -> EngineHash {
    let mut bytes: Vec<u8> = tokens
        .iter()
        .flat_map(|token| token.to_le_bytes())
        .collect();
    bytes.extend(salt.unwrap_or_default().as_bytes());
    EngineHash(xxh3_64(&bytes))
}

impl Bed {
    fn new(engine: usize, ours: usize, bigrams: bool) -> Self {
        let index = PrefixIndex::new();
        let normalizer = Normalizer::new(size(ours as u32), MediaTokens::default());
        let writer = index.join(Slot(0));
        Self {
            engine,
            ours,
            bigrams,
            normalizer,
            index,
            writer,
            held: BTreeMap::new(),
            forgotten: 0,
        }
    }

    fn tell(&mut self, event: &Event) -> Option<Outcome> {
        match self.normalizer.convert(event) {
            Converted::Event(event) => Some(self.writer.apply(&event)),
            Converted::Regrouped(events, outcome) => {
                for event in events {
                    let told = self.writer.apply(&event);
                    assert!(
                        matches!(told, Outcome::Ok | Outcome::DuplicateStore),
                        "{told:?} of {event:?}"
                    );
                }
                Some(outcome)
            }
            Converted::Group(..) | Converted::Filtered(_) | Converted::Resized(_) => None,
        }
    }

    /// Stores what follows a prefix.
    fn store(
        &mut self,
        salt: Salted,
        before: &[u32],
        more: &[u32],
        tier: usize,
    ) -> Option<Outcome> {
        let all: Vec<u32> = before.iter().chain(more).copied().collect();
        let ends = (before.len() + self.engine..=all.len()).step_by(self.engine);
        // The token after the last one decides the last bigram.
        let ids = if self.bigrams {
            more.iter().copied().chain([next(&all)]).collect()
        } else {
            more.to_vec()
        };
        let stored = Stored {
            hashes: ends.clone().map(|end| name(salt, &all[..end])).collect(),
            parent: (!before.is_empty()).then(|| name(salt, before)),
            tokens: Tokens {
                ids,
                bigrams: self.bigrams,
            },
            block_size: self.engine as u32,
            extra_keys: match (salt, before) {
                (Some(salt), []) => vec![vec![ExtraKey::Text(salt.to_owned())]],
                _ => Vec::new(),
            },
            keys_are_pairs: true,
            origin: Origin {
                medium: Medium::Tier(TIERS[tier]),
                ..Origin::default()
            },
            ..Stored::default()
        };
        for end in ends {
            let (copies, doubted) =
                &mut self.held.entry((salt, all[..end].to_vec())).or_default()[tier];
            *copies = if std::mem::take(doubted) {
                1
            } else {
                *copies + 1
            };
        }
        self.tell(&Event::Stored(Box::new(stored)))
    }

    fn remove(&mut self, salt: Salted, block: &[u32], tier: usize) -> Option<Outcome> {
        let key = (salt, block.to_vec());
        let Some(tiers) = self.held.get_mut(&key) else {
            panic!("not held")
        };
        tiers[tier].0 -= 1;
        if tiers[tier].0 == 0 {
            tiers[tier].1 = false;
        }
        if tiers.iter().all(|(copies, _)| *copies == 0) {
            self.held.remove(&key);
        }
        let origin = Origin {
            medium: Medium::Tier(TIERS[tier]),
            ..Origin::default()
        };
        self.tell(&Event::Removed {
            hashes: vec![name(salt, block)],
            origin,
        })
    }

    fn clear(&mut self) {
        self.held.clear();
        self.tell(&Event::Cleared {
            ownership: Default::default(),
        });
    }

    fn doubt(&mut self) {
        for (copies, doubted) in self.held.values_mut().flatten() {
            *doubted = *copies > 0;
        }
        self.normalizer.doubt(self.writer.doubt());
    }

    /// What the index takes for gone is gone in the model, too.
    fn settle(&mut self) {
        let Some(forgotten) = self.writer.settle().forgotten else {
            return;
        };
        let names: HashSet<(EngineHash, Tier)> = forgotten.names.iter().copied().collect();
        for event in self.normalizer.forgotten(&forgotten) {
            self.writer.apply(&event);
        }
        let chains = self.normalizer.reblocker().chains.as_ref();
        for ((salt, block), tiers) in &mut self.held {
            let name = name(*salt, block);
            for ((copies, doubted), tier) in tiers.iter_mut().zip(TIERS) {
                let is_gone = match chains {
                    Some(chains) => !chains.holds(name, tier),
                    None => names.contains(&(name, tier)),
                };
                if is_gone {
                    (*copies, *doubted) = (0, false);
                }
            }
        }
        self.forgotten += 1;
        self.held
            .retain(|_, tiers| tiers.iter().any(|(copies, _)| *copies > 0));
    }

    /// Leading blocks of ours on the device, as the index has it.
    fn found(&self, salt: Salted, tokens: &[u32]) -> usize {
        let salt = Salt {
            lora: None,
            cache: salt.map(str::to_owned),
        };
        let windows = if self.bigrams {
            Windows::Eagle
        } else {
            Windows::Plain
        };
        let locals = locals(tokens, size(self.ours as u32), &salt, windows, &[]);
        let hashes = BlockHashes::chain(tokens.len(), size(self.ours as u32), locals);
        let mut overlaps = Overlaps::new();
        self.index.overlaps(&hashes, &mut overlaps);
        overlaps.get(Slot(0)).device as usize
    }

    /// The same as the model has it.
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
            // The beginning of an engine's block is held with the block, whatever its rest is.
            let whole = end.div_ceil(self.engine) * self.engine;
            // Of bigrams the last one needs the token behind it.
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
        // A window of bigrams ends with the token behind the block.
        let mut asked = tokens.to_vec();
        if self.bigrams {
            asked.push(next(tokens));
        }
        let (engine, ours, bigrams) = (self.engine, self.ours, self.bigrams);
        let case = format!("{tokens:?} of {salt:?}, {engine} on {ours}, bigrams {bigrams}");
        assert_eq!(
            self.found(salt, &asked),
            self.expected(salt, tokens),
            "{case}"
        );
    }
}

/// The token that always follows these, so that bigrams at the end of a block are determined by the block.
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

fn play(seed: u64, engine: usize, ours: usize, bigrams: bool) -> usize {
    let mut rng = SmallRng::seed_from_u64(seed);
    let mut bed = Bed::new(engine, ours, bigrams);
    let mut asked: Vec<(Salted, Vec<u32>)> = Vec::new();
    for _ in 0..150 {
        let known: Vec<(Salted, Vec<u32>)> = bed.held.keys().cloned().collect();
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
                bed.store(salt, &before, &more, tier);
                asked.push((salt, before.into_iter().chain(more).collect()));
            }
            55..96 => {
                let Some((salt, block)) = pick(&mut rng) else {
                    continue;
                };
                let held = bed.held[&(salt, block.clone())];
                let tier = usize::from(held[0].0 == 0);
                bed.remove(salt, &block, tier);
            }
            96..98 => bed.doubt(),
            98 => bed.clear(),
            _ => bed.settle(),
        }
        for _ in 0..4 {
            if let Some((salt, tokens)) = asked.get(rng.random_range(0..asked.len().max(1))) {
                bed.check(*salt, tokens);
            }
        }
    }
    asked
        .iter()
        .for_each(|(salt, tokens)| bed.check(*salt, tokens));
    // Whatever was held leaves with its last copy.
    while let Some(((salt, block), tiers)) = bed
        .held
        .iter()
        .next_back()
        .map(|(key, tiers)| (key.clone(), *tiers))
    {
        bed.remove(salt, &block, usize::from(tiers[0].0 == 0));
    }
    assert_eq!(bed.index.stats().total.copies, 0, "{:?}", bed.index.stats());
    bed.forgotten
}

#[test]
fn what_the_index_finds_is_what_a_model_of_tokens_finds() {
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
            let forgotten: usize = (0..25).map(|seed| play(seed, engine, ours, bigrams)).sum();
            assert!(forgotten > 0, "{engine} on {ours}");
        }
    }
}

#[test]
fn parts_wait_for_one_another_and_leave_together() {
    let mut bed = Bed::new(2, 6, false);
    let tokens: Vec<u32> = (1..=12).collect();
    bed.store(None, &[], &tokens[..2], 0);
    bed.store(None, &tokens[..2], &tokens[2..4], 0);
    assert_eq!(bed.found(None, &tokens), 0, "two of three parts");
    bed.store(None, &tokens[..4], &tokens[4..12], 0);
    assert_eq!(bed.found(None, &tokens), 2);
    bed.remove(None, &tokens[..4], 0);
    assert_eq!(
        bed.found(None, &tokens),
        0,
        "any part that leaves takes the block along"
    );
    bed.store(None, &tokens[..2], &tokens[2..4], 0);
    assert_eq!(
        bed.found(None, &tokens),
        2,
        "and what followed is there again"
    );
}

#[test]
fn a_parent_that_was_never_heard_of_gives_no_place() {
    let mut bed = Bed::new(2, 4, false);
    assert_eq!(
        bed.store(None, &[1, 2], &[3, 4], 0),
        Some(Outcome::ParentNotFound)
    );
    assert_eq!(bed.found(None, &[1, 2, 3, 4]), 0);
    let mut bed = Bed::new(4, 2, false);
    assert_eq!(
        bed.store(None, &[1, 2, 3, 4], &[5, 6, 7, 8], 0),
        Some(Outcome::ParentNotFound)
    );
}

#[test]
fn nothing_is_kept_of_parts_that_are_gone() {
    let mut bed = Bed::new(1, 4, false);
    let tokens: Vec<u32> = (0..40).collect();
    bed.store(None, &[], &tokens, 0);
    for end in (1..=40).rev() {
        bed.remove(None, &tokens[..end], 0);
    }
    let mut chains = Chains::new(size(1), size(4), 0);
    assert_eq!(
        chains.remove(&[EngineHash(1)], Tier::Device).outcome,
        Outcome::BlockNotFound
    );
    assert_eq!(chains.len(), 0);
    assert_eq!(bed.index.stats().distinct_blocks, 0);
}

fn image(
    names: &[u64],
    tokens: &[u32],
    objects: &[&[&str]],
    parent: Option<u64>,
    engine: u32,
) -> Event {
    let keys = |names: &&[&str]| {
        names
            .iter()
            .map(|name| ExtraKey::Media((*name).to_owned()))
            .collect()
    };
    Event::Stored(Box::new(Stored {
        hashes: names.iter().copied().map(EngineHash).collect(),
        parent: parent.map(EngineHash),
        tokens: Tokens {
            ids: tokens.to_vec(),
            bigrams: false,
        },
        block_size: engine,
        extra_keys: objects.iter().map(keys).collect(),
        keys_are_pairs: true,
        ..Stored::default()
    }))
}

#[test]
fn images_are_where_their_placeholders_are() {
    let media = MediaTokens {
        image: Some(9),
        video: None,
    };
    let cat = media::identifier_hash("cat").unwrap();
    let pad = crate::block::multimodal::ObjectHash(cat).pad_token();
    let padded = [1, 2, pad, pad, pad, pad, 7, 8];
    let expected = locals(&padded, size(4), &Salt::default(), Windows::Plain, &[]);
    // One block of the engine is two of ours, and one of ours two of the engine's.
    let larger = image(&[5], &[1, 2, 9, 9, 9, 9, 7, 8], &[&["cat"]], None, 8);
    let smaller = image(
        &[5, 6, 7, 8],
        &[1, 2, 9, 9, 9, 9, 7, 8],
        &[&[], &["cat"], &["cat"], &[]],
        None,
        2,
    );
    for event in [larger, smaller] {
        let mut normalizer = Normalizer::new(size(4), media);
        let events = match normalizer.convert(&event) {
            Converted::Event(event) => vec![event],
            Converted::Regrouped(events, _) => events,
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
    // Without placeholders nobody knows in which half an image is.
    let mut normalizer = Normalizer::new(size(4), MediaTokens::default());
    let blind = image(&[4, 5, 6], &[1; 24], &[&[], &["cat"], &[]], None, 8);
    let Converted::Event(KvEvent::Stored { blocks, .. }) = normalizer.convert(&blind) else {
        panic!()
    };
    assert_eq!(blocks.len(), 2, "what is before it keeps its place");
    // Smaller blocks name it in each part; ours has it once.
    let mut normalizer = Normalizer::new(size(4), MediaTokens::default());
    let event = image(&[5, 6], &[3, 4, 5, 6], &[&["cat"], &["cat"]], None, 2);
    let Converted::Event(KvEvent::Stored { blocks, .. }) = normalizer.convert(&event) else {
        panic!()
    };
    let native = locals(
        &[3, 4, 5, 6],
        size(4),
        &Salt::default(),
        Windows::Plain,
        &[vec![cat]],
    );
    assert_eq!(blocks[0].local, native[0]);
}

#[test]
fn a_tier_keeps_its_size_until_it_is_empty() {
    let mut reblocker = Reblocker::new(size(16), MediaTokens::default());
    assert_eq!(reblocker.fit(size(24), Tier::Device), None);
    assert_eq!(reblocker.engine(), None);
    assert!(reblocker.fit(size(32), Tier::Device).is_some());
    assert_eq!(reblocker.fit(size(16), Tier::Device), None);
    assert!(reblocker.fit(size(16), Tier::Disk).is_some());
    assert!(reblocker.fit(size(8), Tier::HostPinned).is_some());
    assert_eq!(
        reblocker.fit(size(4), Tier::External),
        None,
        "the chains are of one size"
    );
    reblocker.clear();
    assert!(reblocker.fit(size(16), Tier::Device).is_some());
}
