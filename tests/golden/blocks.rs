//! Hashes of blocks and of multimodal objects.

use serde::Deserialize;
use warmroute_core::block::hash::{self, BlockWindows, PromptContent};
use warmroute_core::block::multimodal::{BlockObject, ObjectHash, PromptObject, objects_by_block};
use warmroute_core::block::salt::SEED;
use warmroute_core::block::{BlockHashes, CacheSalt, LocalHash, SequenceHash};
use warmroute_core::worker::BlockSize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::frame::{CheckReport, run_cases};

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum BlockCase {
    BlockHash {
        description: String,
        tokens: Vec<u32>,
        block_size: u32,
        lora_name: Option<String>,
        cache_namespace: Option<String>,
        block_mm_hashes: Option<Vec<Option<Vec<String>>>>,
        is_eagle: Option<bool>,
        block_seed: String,
        local_hashes: Vec<String>,
        sequence_hashes: Vec<String>,
    },
    RawBytesHash {
        description: String,
        utf8: String,
        hash: String,
    },
    ChainStep {
        parent_sequence_hash: String,
        block_hash: String,
        next_sequence_hash: String,
    },
    MmIdentifierHash {
        identifier: String,
        mm_hash: Option<String>,
    },
    MmPadValue {
        mm_hash: String,
        pad_value_token: u32,
    },
    RequestMmToBlockMm {
        description: String,
        block_size: u32,
        total_tokens: usize,
        objects: Vec<MediaObject>,
        blocks: Vec<Option<Vec<MediaObject>>>,
    },
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct MediaObject {
    mm_hash: u64,
    offsets: Vec<[usize; 2]>,
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap()
}

fn hexes(texts: &[String]) -> Vec<u64> {
    texts.iter().map(|text| hex(text)).collect()
}

fn by_block(
    tokens: usize,
    block_size: BlockSize,
    objects: &[MediaObject],
) -> Vec<Vec<MediaObject>> {
    let prompt = objects.iter().map(|object| PromptObject {
        object: ObjectHash(object.mm_hash),
        ranges: object
            .offsets
            .iter()
            .map(|[start, end]| *start..*end)
            .collect(),
    });
    let cut = objects_by_block(tokens, block_size, &prompt.collect::<Vec<_>>());
    let shown = |block: Vec<BlockObject>| {
        block.into_iter().map(|entry| MediaObject {
            mm_hash: entry.object.0,
            offsets: entry
                .offsets
                .into_iter()
                .map(|range| [range.start, range.end])
                .collect(),
        })
    };
    cut.into_iter()
        .map(|block| shown(block).collect())
        .collect()
}

/// Returns objects in exactly these blocks. Returns `None` if one object is in a block twice, which
/// no request produces.
fn prompt_objects(by_block: &[Vec<u64>], block_size: BlockSize) -> Option<Vec<PromptObject>> {
    let mut objects: Vec<PromptObject> = Vec::new();
    for (block, hashes) in by_block.iter().enumerate() {
        let place = block * block_size.tokens()..(block + 1) * block_size.tokens();
        for (at, &hash) in hashes.iter().enumerate() {
            if hashes[..at].contains(&hash) {
                return None;
            }
            match objects.iter_mut().find(|object| object.object.0 == hash) {
                Some(object) => object.ranges.push(place.clone()),
                None => objects.push(PromptObject {
                    object: ObjectHash(hash),
                    ranges: vec![place.clone()],
                }),
            }
        }
    }
    Some(objects)
}

/// Returns the name of a case, which may consist of the arguments of its function.
fn name(case: &BlockCase) -> String {
    match case {
        BlockCase::BlockHash { description, .. }
        | BlockCase::RequestMmToBlockMm { description, .. } => description.clone(),
        BlockCase::RawBytesHash {
            description, utf8, ..
        } => format!("{description}: {utf8:?}"),
        BlockCase::ChainStep {
            parent_sequence_hash,
            block_hash,
            ..
        } => format!("{parent_sequence_hash} then {block_hash}"),
        BlockCase::MmIdentifierHash { identifier, .. } => format!("object hash of {identifier:?}"),
        BlockCase::MmPadValue { mm_hash, .. } => format!("pad token of {mm_hash}"),
    }
}

pub(crate) fn run(text: &str) -> CheckReport {
    run_cases(text, &[], name, |case, _| check(case))
}

fn check(case: BlockCase) {
    match case {
        BlockCase::BlockHash {
            description,
            block_size: 0,
            local_hashes,
            ..
        } => {
            assert_eq!(BlockSize::new(0), None, "{description}");
            assert!(local_hashes.is_empty(), "{description}");
        }
        BlockCase::BlockHash { .. } => check_block_hashes(case),
        BlockCase::RawBytesHash { utf8, hash, .. } => {
            let found = xxh3_64_with_seed(utf8.as_bytes(), SEED);
            assert_eq!(found, hex(&hash), "{utf8}");
        }
        BlockCase::ChainStep {
            parent_sequence_hash,
            block_hash,
            next_sequence_hash,
        } => {
            let next = SequenceHash(hex(&parent_sequence_hash)).child(LocalHash(hex(&block_hash)));
            let expected = SequenceHash(hex(&next_sequence_hash));
            assert_eq!(next, expected, "{parent_sequence_hash} {block_hash}");
        }
        BlockCase::MmIdentifierHash {
            identifier,
            mm_hash,
        } => {
            let expected = mm_hash.map(|hash| ObjectHash(hex(&hash)));
            let found = ObjectHash::from_identifier(&identifier);
            assert_eq!(found, expected, "{identifier}");
        }
        BlockCase::MmPadValue {
            mm_hash,
            pad_value_token,
        } => {
            let found = ObjectHash(hex(&mm_hash)).pad_token();
            assert_eq!(found, pad_value_token, "{mm_hash}");
        }
        BlockCase::RequestMmToBlockMm {
            description,
            block_size,
            total_tokens,
            objects,
            blocks,
        } => {
            let ours = by_block(total_tokens, BlockSize::new(block_size).unwrap(), &objects);
            let expected: Vec<Vec<MediaObject>> =
                blocks.into_iter().map(Option::unwrap_or_default).collect();
            assert_eq!(ours, expected, "{description}");
        }
    }
}

fn check_block_hashes(case: BlockCase) {
    let BlockCase::BlockHash {
        description,
        tokens,
        block_size,
        lora_name,
        cache_namespace,
        block_mm_hashes,
        is_eagle,
        block_seed,
        local_hashes,
        sequence_hashes,
    } = case
    else {
        panic!("no block hashes");
    };
    let salt = CacheSalt {
        lora: lora_name,
        cache: cache_namespace,
    };
    let windows = if is_eagle == Some(true) {
        BlockWindows::Eagle
    } else {
        BlockWindows::Plain
    };
    let objects = block_mm_hashes.unwrap_or_default();
    let objects: Vec<_> = objects
        .iter()
        .map(|block| hexes(block.as_deref().unwrap_or(&[])))
        .collect();
    let block_size = BlockSize::new(block_size).unwrap();
    let locals = hash::local_hashes(&tokens, block_size, &salt, windows, &objects);
    let hashes = BlockHashes::from_locals(tokens.len(), block_size, locals);
    assert_eq!(salt.seed(), hex(&block_seed), "{description}");
    let ours: Vec<u64> = hashes.locals().iter().map(|hash| hash.0).collect();
    assert_eq!(ours, hexes(&local_hashes), "{description}");
    let ours: Vec<u64> = hashes.sequences().iter().map(|hash| hash.0).collect();
    assert_eq!(ours, hexes(&sequence_hashes), "{description}");
    if let Some(objects) = prompt_objects(&objects, block_size) {
        let content = PromptContent {
            tokens: &tokens,
            salt: &salt,
            windows,
            objects: &objects,
        };
        assert_eq!(
            BlockHashes::from_content(&content, block_size),
            hashes,
            "{description}"
        );
    }
}
