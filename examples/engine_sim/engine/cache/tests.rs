//! The cache against what was captured from vLLM, and against a naive model over random histories.

use std::collections::HashSet;

use proptest::prelude::*;

use super::*;

const BLOCK: usize = 4;

fn plain(tokens: std::ops::Range<u32>) -> Sequence {
    Sequence::new(tokens.collect(), Keys::default())
}

/// Runs a whole prompt through the cache; returns what it hit.
fn prefill(cache: &mut Cache, sequence: &mut Sequence) -> Result<usize, NoRoom> {
    let hit = cache.lookup(sequence);
    let cached = cache.hit_tokens(&hit);
    cache.admit(sequence, &hit, sequence.len() - cached)?;
    Ok(cached)
}

fn once(cache: &mut Cache, mut sequence: Sequence) -> usize {
    let cached = prefill(cache, &mut sequence).unwrap();
    cache.release(&mut sequence);
    cached
}

fn shape(events: &[CacheEvent]) -> Vec<String> {
    let one = |event: &CacheEvent| match event {
        CacheEvent::Stored(stored) => format!("stored {}", stored.hashes.len()),
        CacheEvent::Removed(_) => "removed".into(),
        CacheEvent::Cleared => "cleared".into(),
    };
    events.iter().map(one).collect()
}

#[test]
fn a_repeat_hits_all_full_blocks_but_never_the_last_token() {
    for (prompt, hit) in [(3, 0), (4, 0), (5, 4), (8, 4), (9, 8), (16, 12), (17, 16)] {
        let mut cache = Cache::new(BLOCK, 32);
        assert_eq!(once(&mut cache, plain(0..prompt)), 0);
        assert_eq!(
            once(&mut cache, plain(0..prompt)),
            hit,
            "prompt of {prompt}"
        );
    }
}

#[test]
fn a_shared_prefix_is_hit_up_to_the_first_difference() {
    let mut cache = Cache::new(BLOCK, 32);
    once(&mut cache, plain(0..20));
    let forked = (0..10).chain(100..110).collect();
    assert_eq!(once(&mut cache, Sequence::new(forked, Keys::default())), 8);
}

#[test]
fn hits_and_prompts_below_one_block_publish_nothing() {
    let mut cache = Cache::new(BLOCK, 32);
    once(&mut cache, plain(0..3));
    assert_eq!(cache.take_events(), []);
    once(&mut cache, plain(0..9));
    assert_eq!(shape(&cache.take_events()), ["stored 2"]);
    once(&mut cache, plain(0..9));
    assert_eq!(cache.take_events(), []);
}

#[test]
fn the_recomputed_last_block_of_an_aligned_prompt_is_stored_again_and_removed_as_often() {
    let mut cache = Cache::new(BLOCK, 8);
    for _ in 0..3 {
        once(&mut cache, plain(0..8));
    }
    let stored = cache.take_events();
    assert_eq!(shape(&stored), ["stored 2", "stored 1", "stored 1"]);
    let CacheEvent::Stored(last) = &stored[2] else {
        panic!("{stored:?}")
    };
    assert_eq!(cache.content()[&last.hashes[0]], 3);
    assert_eq!(last.parent, stored_hashes(&stored[0]).first().copied());
    assert_eq!(last.tokens, [4, 5, 6, 7]);
    once(&mut cache, plain(100..132));
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
fn eviction_takes_the_least_recently_used_prefix_from_its_tail() {
    let mut cache = Cache::new(BLOCK, 6);
    once(&mut cache, plain(0..13));
    once(&mut cache, plain(100..108));
    let old = cache.take_events();
    once(&mut cache, plain(0..5));
    once(&mut cache, plain(200..208));
    let events = cache.take_events();
    // One of the two came from the block that the repeat left unfilled, the other from the old tail.
    assert_eq!(shape(&events), ["removed", "stored 2"]);
    assert_eq!(events[0], CacheEvent::Removed(stored_hashes(&old[0])[2]));
    assert_eq!(
        once(&mut cache, plain(0..13)),
        8,
        "what was hit last stays longest"
    );
}

#[test]
fn removals_precede_the_stores_of_the_same_admission() {
    let mut cache = Cache::new(BLOCK, 4);
    once(&mut cache, plain(0..16));
    cache.take_events();
    once(&mut cache, plain(100..116));
    assert_eq!(
        shape(&cache.take_events()),
        ["removed", "removed", "removed", "removed", "stored 4"]
    );
}

#[test]
fn chunks_and_generated_tokens_store_their_blocks_with_their_parent() {
    let mut cache = Cache::new(BLOCK, 32);
    let mut sequence = plain(0..10);
    let hit = cache.lookup(&mut sequence);
    cache.admit(&mut sequence, &hit, 6).unwrap();
    cache.grow(&mut sequence, 4).unwrap();
    for token in [50, 51, 52] {
        sequence.push(token);
        cache.grow(&mut sequence, 1).unwrap();
    }
    let events = cache.take_events();
    assert_eq!(shape(&events), ["stored 1", "stored 1", "stored 1"]);
    let CacheEvent::Stored(decoded) = &events[2] else {
        panic!("{events:?}")
    };
    assert_eq!(decoded.tokens, [8, 9, 50, 51]);
    assert_eq!(decoded.parent, stored_hashes(&events[1]).first().copied());
    assert_eq!(sequence.computed(), 13);
}

#[test]
fn twins_in_the_same_step_share_the_blocks_of_the_first() {
    let mut cache = Cache::new(BLOCK, 32);
    let (mut first, mut second) = (plain(0..10), plain(0..10));
    assert_eq!(prefill(&mut cache, &mut first), Ok(0));
    assert_eq!(prefill(&mut cache, &mut second), Ok(8));
    assert_eq!(cache.used_blocks(), 4);
    cache.release(&mut first);
    assert_eq!(cache.used_blocks(), 3);
}

#[test]
fn salt_and_adapter_separate_equal_tokens_and_show_in_the_extra_keys() {
    let salted = |salt: &str| {
        Sequence::new(
            (0..12).collect(),
            Keys {
                salt: Some(Arc::from(salt)),
                ..Keys::default()
            },
        )
    };
    let lora = Some(Lora {
        id: 1,
        name: Arc::from("lora-x"),
    });
    let adapted = Keys {
        lora,
        salt: Some(Arc::from("tenant")),
        session: Some(Arc::from("s")),
    };
    let mut cache = Cache::new(BLOCK, 32);
    assert_eq!(once(&mut cache, plain(0..12)), 0);
    assert_eq!(once(&mut cache, salted("a")), 0);
    assert_eq!(once(&mut cache, salted("b")), 0);
    assert_eq!(once(&mut cache, salted("a")), 8);
    assert_eq!(
        once(
            &mut cache,
            Sequence::new((0..12).collect(), adapted.clone())
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
fn a_full_cache_refuses_without_taking_anything() {
    let mut cache = Cache::new(BLOCK, 4);
    let (mut first, mut second) = (plain(0..12), plain(0..17));
    assert_eq!(prefill(&mut cache, &mut first), Ok(0));
    let before = cache.content();
    assert_eq!(prefill(&mut cache, &mut second), Err(NoRoom));
    assert_eq!((cache.used_blocks(), cache.content()), (3, before));
    // Its hit would come out of the very free blocks it wants to fill.
    cache.release(&mut first);
    assert_eq!(prefill(&mut cache, &mut plain(0..21)), Err(NoRoom));
    assert_eq!(prefill(&mut cache, &mut plain(0..16)), Ok(12));
}

#[test]
fn a_reset_clears_an_idle_cache_and_is_refused_by_a_busy_one() {
    let mut cache = Cache::new(BLOCK, 8);
    let mut sequence = plain(0..9);
    prefill(&mut cache, &mut sequence).unwrap();
    assert!(!cache.reset());
    cache.release(&mut sequence);
    cache.take_events();
    assert!(cache.reset());
    assert_eq!(cache.take_events(), [CacheEvent::Cleared]);
    assert_eq!(once(&mut cache, plain(0..9)), 0);
}

#[derive(Clone, Debug)]
enum Act {
    /// Start a prompt out of a small alphabet of prefixes, prefilling at most so many tokens at once.
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

fn act() -> impl Strategy<Value = Act> {
    prop_oneof![
        4 => (0..3u32, 0..12usize, 1..40usize, 1..12usize)
            .prop_map(|(trunk, fork, len, chunk)| Act::Start { trunk, fork, len, chunk }),
        6 => (any::<usize>(), 0..3u32).prop_map(|(which, token)| Act::Decode { which, token }),
        3 => any::<usize>().prop_map(|which| Act::Finish { which }),
        1 => Just(Act::Reset),
    ]
}

/// What an index fed only by the events believes the cache holds.
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
                let copies = model
                    .get_mut(hash)
                    .expect("only what was stored is removed");
                *copies -= 1;
                if *copies == 0 {
                    model.remove(hash);
                }
            }
            CacheEvent::Cleared => model.clear(),
        }
    }
}

fn check(cache: &Cache, running: &[Sequence], model: &BTreeMap<EngineHash, usize>) {
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

/// Blocks of `tokens` that are in the cache according to a list of whole prefixes.
#[test]
fn what_was_written_stays_until_somebody_elses_is_written_there() {
    let mut cache = Cache::new(BLOCK, 4);
    let keys = |salt: &str| Keys {
        salt: Some(Arc::from(salt)),
        ..Keys::default()
    };
    let tokens = |range: std::ops::Range<u32>| range.collect::<Vec<_>>();
    let serves = |cache: &Cache, numbers: &[usize], needed: &[Written]| -> Vec<bool> {
        let found = cache.read(numbers);
        found
            .iter()
            .zip(needed)
            .map(|(found, needed)| found.as_ref().unwrap().serves(needed))
            .collect()
    };
    let mut lent = Sequence::new(tokens(0..10), keys("a"));
    prefill(&mut cache, &mut lent).unwrap();
    let numbers = lent.block_numbers();
    let needed = Written::of_prompt(&tokens(0..10), &keys("a"), BLOCK);
    assert_eq!(serves(&cache, &numbers, &needed), [true; 3]);
    let shorter = Written::of_prompt(&tokens(0..9), &keys("a"), BLOCK);
    assert_eq!(
        serves(&cache, &numbers, &shorter),
        [true; 3],
        "more than is needed does no harm"
    );
    for (other, salt) in [
        (tokens(0..11), "a"),
        (tokens(0..10), "b"),
        (tokens(1..11), "a"),
    ] {
        let other = Written::of_prompt(&other, &keys(salt), BLOCK);
        assert!(
            serves(&cache, &numbers, &other).contains(&false),
            "{other:?}"
        );
    }
    // The same tokens after others are something else.
    let after = [tokens(4..8), tokens(4..10)].concat();
    assert_eq!(
        serves(
            &cache,
            &numbers[1..],
            &Written::of_prompt(&after, &keys("a"), BLOCK)[1..]
        ),
        [false; 2]
    );
    cache.release(&mut lent);
    assert_eq!(
        serves(&cache, &numbers, &needed),
        [true; 3],
        "free, and still there"
    );
    let mut other = plain(100..116);
    prefill(&mut cache, &mut other).unwrap();
    assert_eq!(serves(&cache, &numbers, &needed), [false; 3]);
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
fn a_growing_block_holds_what_was_computed_so_far() {
    let mut cache = Cache::new(BLOCK, 4);
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

fn naive_hit(prefixes: &HashSet<Vec<u32>>, tokens: &[u32]) -> usize {
    let most = (tokens.len() - 1) / BLOCK;
    (1..=most)
        .take_while(|blocks| prefixes.contains(&tokens[..blocks * BLOCK]))
        .count()
        * BLOCK
}

/// The prefixes behind the cached hashes, learnt from nothing but the sequences that ran.
fn note_prefixes(names: &mut HashMap<EngineHash, Vec<u32>>, sequence: &Sequence) {
    for (position, &hash) in sequence.hashes.iter().enumerate() {
        let prefix = sequence.tokens[..(position + 1) * BLOCK].to_vec();
        assert_eq!(
            names.entry(hash).or_insert_with(|| prefix.clone()),
            &prefix,
            "one hash, one prefix"
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]
    #[test]
    fn every_history_keeps_blocks_counts_events_and_hits_consistent(
        acts in prop::collection::vec(act(), 1..60), num_blocks in 1usize..24
    ) {
        let mut cache = Cache::new(BLOCK, num_blocks);
        let (mut running, mut model, mut names) = (Vec::<Sequence>::new(), BTreeMap::new(), HashMap::<_, Vec<u32>>::new());
        for act in acts {
            match act {
                Act::Start { trunk, fork, len, chunk } => {
                    let tokens: Vec<u32> = (0..len).map(|at| if at < fork { trunk } else { 10 + trunk }).collect();
                    let held: HashSet<_> = cache.content().keys().map(|hash| names[hash].clone()).collect();
                    let mut sequence = Sequence::new(tokens, Keys::default());
                    let hit = cache.lookup(&mut sequence);
                    let cached = cache.hit_tokens(&hit);
                    prop_assert_eq!(cached, naive_hit(&held, &sequence.tokens));
                    let mut alive = cache.admit(&mut sequence, &hit, chunk.min(len - cached)).is_ok();
                    while alive && sequence.computed < len {
                        let tokens = chunk.min(len - sequence.computed);
                        alive = cache.grow(&mut sequence, tokens).is_ok();
                    }
                    note_prefixes(&mut names, &sequence);
                    if alive { running.push(sequence) } else { cache.release(&mut sequence) }
                }
                Act::Decode { which, token } if !running.is_empty() => {
                    let at = which % running.len();
                    running[at].push(token);
                    if cache.grow(&mut running[at], 1).is_err() {
                        cache.release(&mut running.remove(at));
                    } else {
                        note_prefixes(&mut names, &running[at]);
                    }
                }
                Act::Finish { which } if !running.is_empty() => {
                    let at = which % running.len();
                    cache.release(&mut running.remove(at));
                }
                Act::Reset => prop_assert_eq!(cache.reset(), running.is_empty()),
                Act::Decode { .. } | Act::Finish { .. } => {}
            }
            let events = cache.take_events();
            replay(&mut model, &events);
            check(&cache, &running, &model);
        }
    }
}
