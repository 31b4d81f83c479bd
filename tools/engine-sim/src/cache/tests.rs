//! Single cases, and random histories compared with a naive model.

use std::collections::HashSet;

use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;

const BLOCK: usize = 4;

fn plain(tokens: std::ops::Range<u32>) -> TokenSequence {
    TokenSequence::new(tokens.collect(), BlockKeys::default())
}

/// Runs a whole prompt through the cache and returns the hit tokens.
fn prefill(
    cache: &mut BlockCache,
    sequence: &mut TokenSequence,
) -> Result<usize, NoFreeBlockError> {
    let hit = cache.lookup(sequence);
    let cached = cache.hit_tokens(&hit);
    cache.admit(sequence, &hit, sequence.len() - cached)?;
    Ok(cached)
}

fn prefill_once(cache: &mut BlockCache, mut sequence: TokenSequence) -> usize {
    let cached = prefill(cache, &mut sequence).unwrap();
    cache.release(&mut sequence);
    cached
}

fn event_kinds(events: &[CacheEvent]) -> Vec<String> {
    let one = |event: &CacheEvent| match event {
        CacheEvent::Stored(stored) => format!("stored {}", stored.hashes.len()),
        CacheEvent::Removed(_) => "removed".into(),
        CacheEvent::Cleared => "cleared".into(),
    };
    events.iter().map(one).collect()
}

#[test]
fn hits_and_short_prompts_publish_nothing() {
    let mut cache = BlockCache::new(BLOCK, 32);
    prefill_once(&mut cache, plain(0..3));
    assert_eq!(cache.take_events(), []);
    prefill_once(&mut cache, plain(0..9));
    assert_eq!(event_kinds(&cache.take_events()), ["stored 2"]);
    prefill_once(&mut cache, plain(0..9));
    assert_eq!(cache.take_events(), []);
}

#[test]
fn recomputed_last_block_is_stored_and_removed_twice() {
    let mut cache = BlockCache::new(BLOCK, 8);
    for _ in 0..3 {
        prefill_once(&mut cache, plain(0..8));
    }
    let stored = cache.take_events();
    assert_eq!(event_kinds(&stored), ["stored 2", "stored 1", "stored 1"]);
    let CacheEvent::Stored(last) = &stored[2] else {
        panic!("{stored:?}")
    };
    assert_eq!(cache.content()[&last.hashes[0]], 3);
    assert_eq!(last.parent, stored_hashes(&stored[0]).first().copied());
    assert_eq!(last.tokens, [4, 5, 6, 7]);
    prefill_once(&mut cache, plain(100..132));
    let removed = cache
        .take_events()
        .iter()
        .filter(|event| **event == CacheEvent::Removed(last.hashes[0]))
        .count();
    assert_eq!(removed, 3);
}

fn stored_hashes(event: &CacheEvent) -> Vec<EngineHash> {
    match event {
        CacheEvent::Stored(stored) => stored.hashes.clone(),
        _ => Vec::new(),
    }
}

#[test]
fn eviction_starts_at_tail_of_oldest_prefix() {
    let mut cache = BlockCache::new(BLOCK, 6);
    prefill_once(&mut cache, plain(0..13));
    prefill_once(&mut cache, plain(100..108));
    let old = cache.take_events();
    prefill_once(&mut cache, plain(0..5));
    prefill_once(&mut cache, plain(200..208));
    let events = cache.take_events();
    // One of the two new blocks reuses the partial block of the repeated prompt. The other evicts
    // the old tail.
    assert_eq!(event_kinds(&events), ["removed", "stored 2"]);
    assert_eq!(events[0], CacheEvent::Removed(stored_hashes(&old[0])[2]));
    assert_eq!(
        prefill_once(&mut cache, plain(0..13)),
        8,
        "the prefix that was hit last is evicted last"
    );
}

#[test]
fn removals_precede_stores_of_same_admission() {
    let mut cache = BlockCache::new(BLOCK, 4);
    prefill_once(&mut cache, plain(0..16));
    cache.take_events();
    prefill_once(&mut cache, plain(100..116));
    assert_eq!(
        event_kinds(&cache.take_events()),
        ["removed", "removed", "removed", "removed", "stored 4"]
    );
}

#[test]
fn chunks_and_generated_blocks_carry_their_parent() {
    let mut cache = BlockCache::new(BLOCK, 32);
    let mut sequence = plain(0..10);
    let hit = cache.lookup(&mut sequence);
    cache.admit(&mut sequence, &hit, 6).unwrap();
    cache.grow(&mut sequence, 4).unwrap();
    for token in [50, 51, 52] {
        sequence.push(token);
        cache.grow(&mut sequence, 1).unwrap();
    }
    let events = cache.take_events();
    assert_eq!(event_kinds(&events), ["stored 1", "stored 1", "stored 1"]);
    let CacheEvent::Stored(decoded) = &events[2] else {
        panic!("{events:?}")
    };
    assert_eq!(decoded.tokens, [8, 9, 50, 51]);
    assert_eq!(decoded.parent, stored_hashes(&events[1]).first().copied());
    assert_eq!(sequence.computed(), 13);
}

#[test]
fn identical_prompts_in_one_step_share_blocks() {
    let mut cache = BlockCache::new(BLOCK, 32);
    let mut first = plain(0..10);
    let mut second = plain(0..10);
    assert_eq!(prefill(&mut cache, &mut first), Ok(0));
    assert_eq!(prefill(&mut cache, &mut second), Ok(8));
    assert_eq!(cache.used_blocks(), 4);
    cache.release(&mut first);
    assert_eq!(cache.used_blocks(), 3);
}

#[test]
fn salt_and_adapter_separate_equal_tokens() {
    let salted = |salt: &str| {
        TokenSequence::new(
            (0..12).collect(),
            BlockKeys {
                salt: Some(Arc::from(salt)),
                ..BlockKeys::default()
            },
        )
    };
    let lora = Some(LoraAdapter {
        id: 1,
        name: Arc::from("lora-x"),
    });
    let adapted = BlockKeys {
        lora,
        salt: Some(Arc::from("tenant")),
        session: Some(Arc::from("s")),
    };
    let mut cache = BlockCache::new(BLOCK, 32);
    assert_eq!(prefill_once(&mut cache, plain(0..12)), 0);
    assert_eq!(prefill_once(&mut cache, salted("a")), 0);
    assert_eq!(prefill_once(&mut cache, salted("b")), 0);
    assert_eq!(prefill_once(&mut cache, salted("a")), 8);
    assert_eq!(
        prefill_once(
            &mut cache,
            TokenSequence::new((0..12).collect(), adapted.clone())
        ),
        0
    );
    let events = cache.take_events();
    let Some(CacheEvent::Stored(stored)) = events.last() else {
        panic!("{events:?}")
    };
    let lora_only = Some(vec![Arc::from("lora-x")]);
    assert_eq!(
        stored.extra_keys,
        [
            Some(vec![Arc::from("lora-x"), Arc::from("tenant")]),
            lora_only.clone(),
            lora_only
        ]
    );
    assert_eq!(stored.lora, adapted.lora);
    assert_eq!(stored.session.as_deref(), Some("s"));
}

#[test]
fn full_cache_rejects_without_allocating() {
    let mut cache = BlockCache::new(BLOCK, 4);
    let mut first = plain(0..12);
    let mut second = plain(0..17);
    assert_eq!(prefill(&mut cache, &mut first), Ok(0));
    let before = cache.content();
    assert_eq!(prefill(&mut cache, &mut second), Err(NoFreeBlockError));
    assert_eq!((cache.used_blocks(), cache.content()), (3, before));
    // The hit consists of the same free blocks that the request needs to fill.
    cache.release(&mut first);
    assert_eq!(
        prefill(&mut cache, &mut plain(0..21)),
        Err(NoFreeBlockError)
    );
    assert_eq!(prefill(&mut cache, &mut plain(0..16)), Ok(12));
}

#[test]
fn reset_clears_idle_cache_and_fails_when_busy() {
    let mut cache = BlockCache::new(BLOCK, 8);
    let mut sequence = plain(0..9);
    prefill(&mut cache, &mut sequence).unwrap();
    assert!(!cache.reset());
    cache.release(&mut sequence);
    cache.take_events();
    assert!(cache.reset());
    assert_eq!(cache.take_events(), [CacheEvent::Cleared]);
    assert_eq!(prefill_once(&mut cache, plain(0..9)), 0);
}

#[derive(Clone, Debug)]
enum CacheAction {
    /// Starts a prompt from a small set of prefixes, with a limit of prefilled tokens per step.
    Start {
        trunk: u32,
        fork: usize,
        len: usize,
        chunk: usize,
    },
    Decode {
        which: usize,
        token: u32,
    },
    Finish {
        which: usize,
    },
    Reset,
}

fn cache_action() -> impl Strategy<Value = CacheAction> {
    prop_oneof![
        4 => (0..3u32, 0..12usize, 1..40usize, 1..12usize)
            .prop_map(|(trunk, fork, len, chunk)| CacheAction::Start { trunk, fork, len, chunk }),
        6 => (any::<usize>(), 0..3u32).prop_map(|(which, token)| CacheAction::Decode { which, token }),
        3 => any::<usize>().prop_map(|which| CacheAction::Finish { which }),
        1 => Just(CacheAction::Reset),
    ]
}

/// Applies events to a model of the cache content, as an index does.
fn replay(model: &mut BTreeMap<EngineHash, usize>, events: &[CacheEvent]) {
    for event in events {
        match event {
            CacheEvent::Stored(stored) => {
                assert_eq!(stored.tokens.len(), stored.hashes.len() * BLOCK);
                assert!(
                    stored
                        .parent
                        .is_none_or(|parent| model.contains_key(&parent)),
                    "a parent is stored first"
                );
                stored
                    .hashes
                    .iter()
                    .for_each(|&hash| *model.entry(hash).or_default() += 1);
            }
            CacheEvent::Removed(hash) => {
                let copies = model.get_mut(hash).expect("a removed block was stored");
                *copies -= 1;
                if *copies == 0 {
                    model.remove(hash);
                }
            }
            CacheEvent::Cleared => model.clear(),
        }
    }
}

fn check(cache: &BlockCache, running: &[TokenSequence], model: &BTreeMap<EngineHash, usize>) {
    let mut refs = vec![0; cache.num_blocks()];
    running
        .iter()
        .flat_map(|sequence| &sequence.blocks)
        .for_each(|&id| refs[id] += 1);
    let free: HashSet<BlockId> = cache.free.values().copied().collect();
    for (id, block) in cache.blocks.iter().enumerate() {
        assert_eq!(block.refs, refs[id], "references of block {id}");
        assert_eq!(
            free.contains(&id),
            block.refs == 0,
            "block {id} is either free or held"
        );
        let listed = cache
            .cached
            .iter()
            .filter(|(_, copies)| copies.contains(&id))
            .map(|(&hash, _)| hash);
        assert_eq!(
            listed.collect::<Vec<_>>(),
            block.hash.into_iter().collect::<Vec<_>>(),
            "name of block {id}"
        );
    }
    for sequence in running {
        assert_eq!(sequence.blocks.len(), sequence.computed.div_ceil(BLOCK));
        for position in 0..sequence.computed / BLOCK {
            assert_eq!(
                cache.blocks[sequence.blocks[position]].hash,
                Some(sequence.hashes[position])
            );
        }
    }
    assert_eq!(&cache.content(), model);
}

/// Returns whether each of these blocks has the needed content.
fn can_serve(cache: &BlockCache, numbers: &[usize], needed: &[BlockContent]) -> Vec<bool> {
    let found = cache.read(numbers);
    found
        .iter()
        .zip(needed)
        .map(|(found, needed)| found.as_ref().unwrap().can_serve(needed))
        .collect()
}

#[test]
fn block_content_stays_until_overwritten() {
    let mut cache = BlockCache::new(BLOCK, 4);
    let keys = |salt: &str| BlockKeys {
        salt: Some(Arc::from(salt)),
        ..BlockKeys::default()
    };
    let tokens = |range: std::ops::Range<u32>| range.collect::<Vec<_>>();
    let mut leased = TokenSequence::new(tokens(0..10), keys("a"));
    prefill(&mut cache, &mut leased).unwrap();
    let numbers = leased.block_numbers();
    let needed = BlockContent::of_prompt(&tokens(0..10), &keys("a"), BLOCK);
    assert_eq!(can_serve(&cache, &numbers, &needed), [true; 3]);
    let shorter = BlockContent::of_prompt(&tokens(0..9), &keys("a"), BLOCK);
    assert_eq!(
        can_serve(&cache, &numbers, &shorter),
        [true; 3],
        "additional tokens are accepted"
    );
    for (other, salt) in [
        (tokens(0..11), "a"),
        (tokens(0..10), "b"),
        (tokens(1..11), "a"),
    ] {
        let other = BlockContent::of_prompt(&other, &keys(salt), BLOCK);
        assert!(
            can_serve(&cache, &numbers, &other).contains(&false),
            "{other:?}"
        );
    }
    // The same tokens after a different prefix are different content.
    let after = [tokens(4..8), tokens(4..10)].concat();
    assert_eq!(
        can_serve(
            &cache,
            &numbers[1..],
            &BlockContent::of_prompt(&after, &keys("a"), BLOCK)[1..]
        ),
        [false; 2]
    );
    cache.release(&mut leased);
    assert_eq!(
        can_serve(&cache, &numbers, &needed),
        [true; 3],
        "a free block keeps its content"
    );
    let mut other = plain(100..116);
    prefill(&mut cache, &mut other).unwrap();
    assert_eq!(can_serve(&cache, &numbers, &needed), [false; 3]);
    assert_eq!(
        cache.read(&[0, 5]),
        [None, None],
        "no block has these numbers"
    );
    assert_eq!(
        cache.read(&[other.block_numbers()[3]])[0]
            .as_ref()
            .unwrap()
            .tokens(),
        tokens(112..116)
    );
}

#[test]
fn growing_block_holds_computed_tokens() {
    let mut cache = BlockCache::new(BLOCK, 4);
    let mut sequence = plain(0..3);
    prefill(&mut cache, &mut sequence).unwrap();
    for token in 3..6 {
        sequence.push(token);
        cache.grow(&mut sequence, 1).unwrap();
    }
    let found = cache.read(&sequence.block_numbers());
    let held: Vec<_> = found
        .iter()
        .map(|block| block.as_ref().unwrap().tokens().to_vec())
        .collect();
    assert_eq!(held, [vec![0, 1, 2, 3], vec![4, 5]]);
}

/// Returns the number of tokens of `tokens` that are cached according to a list of whole prefixes.
fn naive_hit(prefixes: &HashSet<Vec<u32>>, tokens: &[u32]) -> usize {
    let max_blocks = (tokens.len() - 1) / BLOCK;
    (1..=max_blocks)
        .take_while(|blocks| prefixes.contains(&tokens[..blocks * BLOCK]))
        .count()
        * BLOCK
}

/// Records the prefix of each cached hash, derived from the sequences that ran.
fn record_prefixes(names: &mut HashMap<EngineHash, Vec<u32>>, sequence: &TokenSequence) {
    for (position, &hash) in sequence.hashes.iter().enumerate() {
        let prefix = sequence.tokens[..(position + 1) * BLOCK].to_vec();
        assert_eq!(
            names.entry(hash).or_insert_with(|| prefix.clone()),
            &prefix,
            "a hash identifies one prefix"
        );
    }
}

proptest! {
    #![proptest_config(property_config(300))]
    #[test]
    fn random_histories_keep_cache_consistent(
        actions in prop::collection::vec(cache_action(), 1..60), num_blocks in 1usize..24
    ) {
        let mut cache = BlockCache::new(BLOCK, num_blocks);
        let mut running = Vec::<TokenSequence>::new();
        let mut model = BTreeMap::new();
        let mut names = HashMap::<_, Vec<u32>>::new();
        for action in actions {
            match action {
                CacheAction::Start { trunk, fork, len, chunk } => {
                    let tokens: Vec<u32> = (0..len).map(|at| if at < fork { trunk } else { 10 + trunk }).collect();
                    let held: HashSet<_> = cache.content().keys().map(|hash| names[hash].clone()).collect();
                    let mut sequence = TokenSequence::new(tokens, BlockKeys::default());
                    let hit = cache.lookup(&mut sequence);
                    let cached = cache.hit_tokens(&hit);
                    prop_assert_eq!(cached, naive_hit(&held, &sequence.tokens));
                    let mut fits = cache.admit(&mut sequence, &hit, chunk.min(len - cached)).is_ok();
                    while fits && sequence.computed < len {
                        let tokens = chunk.min(len - sequence.computed);
                        fits = cache.grow(&mut sequence, tokens).is_ok();
                    }
                    record_prefixes(&mut names, &sequence);
                    if fits { running.push(sequence) } else { cache.release(&mut sequence) }
                }
                CacheAction::Decode { which, token } if !running.is_empty() => {
                    let at = which % running.len();
                    running[at].push(token);
                    if cache.grow(&mut running[at], 1).is_err() {
                        cache.release(&mut running.remove(at));
                    } else {
                        record_prefixes(&mut names, &running[at]);
                    }
                }
                CacheAction::Finish { which } if !running.is_empty() => {
                    let at = which % running.len();
                    cache.release(&mut running.remove(at));
                }
                CacheAction::Reset => prop_assert_eq!(cache.reset(), running.is_empty()),
                CacheAction::Decode { .. } | CacheAction::Finish { .. } => {}
            }
            let events = cache.take_events();
            replay(&mut model, &events);
            check(&cache, &running, &model);
        }
    }
}
