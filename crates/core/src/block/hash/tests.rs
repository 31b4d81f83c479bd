use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::*;
use crate::block::placeholders::resume_hashes;
use crate::block::{MediaTokens, ObjectHash};

/// Computes block hashes by their definition: the bytes of a window and of its objects under one
/// seed, then parent and block under the other.
fn hash_by_definition(
    content: &PromptContent<'_>,
    size: usize,
    (seed, step): (u64, u64),
) -> (Vec<u64>, Vec<u64>) {
    let width = size + usize::from(content.windows == BlockWindows::Eagle);
    let objects = objects_by_block(
        content.tokens.len(),
        BlockSize::new(size as u32).unwrap(),
        content.objects,
    );
    let local = |start: usize| {
        let mut bytes: Vec<u8> = content.tokens[start..start + width]
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect();
        let mut hashes: Vec<u64> = objects[start / size]
            .iter()
            .map(|entry| entry.object.0)
            .collect();
        hashes.sort_unstable();
        bytes.extend(hashes.iter().flat_map(|object| object.to_le_bytes()));
        xxh3_64_with_seed(&bytes, seed)
    };
    let starts = (0..content.tokens.len())
        .step_by(size)
        .filter(|start| start + width <= content.tokens.len());
    let locals: Vec<u64> = starts.map(local).collect();
    let mut sequences: Vec<u64> = Vec::new();
    for &local in &locals {
        let pair = |parent: &u64| [parent.to_le_bytes(), local.to_le_bytes()].concat();
        sequences.push(
            sequences
                .last()
                .map_or(local, |parent| xxh3_64_with_seed(&pair(parent), step)),
        );
    }
    (locals, sequences)
}

fn numbers(hashes: &BlockHashes) -> (Vec<u64>, Vec<u64>) {
    let sequences = hashes.sequences().iter().map(|hash| hash.0).collect();
    (
        hashes.locals().iter().map(|hash| hash.0).collect(),
        sequences,
    )
}

fn size() -> impl Strategy<Value = usize> {
    prop_oneof![Just(16), Just(32), Just(64), Just(128), 1..80usize]
}

fn tokens() -> impl Strategy<Value = Vec<u32>> {
    prop_oneof![vec(any::<u32>(), 0..700), vec(0..4_u32, 0..300)]
}

fn salt() -> impl Strategy<Value = CacheSalt> {
    let name = || prop_oneof![Just(None), "[a-c]{0,3}".prop_map(Some)];
    (name(), name()).prop_map(|(lora, cache)| CacheSalt { lora, cache })
}

proptest! {
    #![proptest_config(property_config(3_000))]

    #[test]
    fn block_hashes_match_definition(
        (tokens, size, salt) in (tokens(), size(), salt()),
        eagle in any::<bool>(),
        (seed, step) in any::<(u64, u64)>(),
        object in prop_oneof![Just(None), (any::<u64>(), 0..300usize, 0..40usize).prop_map(Some)],
        known in 0..40usize,
    ) {
        let windows = if eagle { BlockWindows::Eagle } else { BlockWindows::Plain };
        let objects: Vec<_> = object
            .map(|(hash, start, length)| PromptObject {
                object: ObjectHash(hash),
                ranges: std::iter::once(start..start + length).collect(),
            })
            .filter(|object| object.ranges[0].end <= tokens.len())
            .into_iter()
            .collect();
        let content = PromptContent { tokens: &tokens, salt: &salt, windows, objects: &objects };
        let block_size = BlockSize::new(size as u32).unwrap();
        let whole = BlockHashes::from_content(&content, block_size);
        prop_assert_eq!(numbers(&whole), hash_by_definition(&content, size, (salt.seed(), SEED)));

        // Secret seeds.
        let locals = content.seeded_local_hashes(block_size, seed);
        let sequences = chain_locals(&locals, step).iter().map(|hash| hash.0).collect();
        let found = (locals.iter().map(|hash| hash.0).collect(), sequences);
        prop_assert_eq!(found, hash_by_definition(&content, size, (seed, step)));

        // Known leading blocks.
        if objects.is_empty() {
            let pairs: Vec<_> = whole.locals().iter().copied().zip(whole.sequences().iter().copied()).collect();
            let known = &pairs[..known.min(pairs.len())];
            prop_assert_eq!(&resume_hashes(&content, block_size, MediaTokens::default(), known), &whole);
            prop_assert_eq!(seeded_local_hashes(&tokens, block_size, salt.seed(), windows, &[]), whole.locals());
        }
    }
}
