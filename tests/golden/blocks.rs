//! Hashes of blocks and of multimodal objects.

use serde::Deserialize;
use warmroute::block::hash::{Content, Windows, locals};
use warmroute::block::multimodal::{BlockObject, ObjectHash, PromptObject, objects_by_block};
use warmroute::block::salt::SEED;
use warmroute::block::{BlockHashes, LocalHash, Salt, SequenceHash};
use warmroute::worker::BlockSize;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use super::frame::{Report, run_cases};

#[derive(Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
enum Case {
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
        objects: Vec<Object>,
        blocks: Vec<Option<Vec<Object>>>,
    },
}

#[derive(Debug, Deserialize, PartialEq)]
#[serde(deny_unknown_fields)]
struct Object {
    mm_hash: u64,
    offsets: Vec<[usize; 2]>,
}

fn hex(text: &str) -> u64 {
    u64::from_str_radix(text.strip_prefix("0x").unwrap(), 16).unwrap()
}

fn hexes(texts: &[String]) -> Vec<u64> {
    texts.iter().map(|text| hex(text)).collect()
}

fn by_block(tokens: usize, block_size: BlockSize, objects: &[Object]) -> Vec<Vec<Object>> {
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
        block.into_iter().map(|entry| Object {
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

/// Objects that mark these blocks and no other; none if a block is marked twice by one object, which no request does.
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

/// The helper functions are called by what they are given.
fn name(case: &Case) -> String {
    match case {
        Case::BlockHash { description, .. } | Case::RequestMmToBlockMm { description, .. } => {
            description.clone()
        }
        Case::RawBytesHash {
            description, utf8, ..
        } => format!("{description}: {utf8:?}"),
        Case::ChainStep {
            parent_sequence_hash,
            block_hash,
            ..
        } => format!("{parent_sequence_hash} then {block_hash}"),
        Case::MmIdentifierHash { identifier, .. } => format!("object hash of {identifier:?}"),
        Case::MmPadValue { mm_hash, .. } => format!("pad token of {mm_hash}"),
    }
}

pub(crate) fn run(text: &str) -> Report {
    run_cases(text, &[], name, |case, _| check(case))
}

fn check(case: Case) {
    match case {
        Case::BlockHash {
            description,
            block_size: 0,
            local_hashes,
            ..
        } => {
            assert_eq!(
                (BlockSize::new(0), local_hashes.len()),
                (None, 0),
                "{description}"
            );
        }
        Case::BlockHash {
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
        } => {
            let salt = Salt {
                lora: lora_name,
                cache: cache_namespace,
            };
            let windows = if is_eagle == Some(true) {
                Windows::Eagle
            } else {
                Windows::Plain
            };
            let objects = block_mm_hashes.unwrap_or_default();
            let objects: Vec<_> = objects
                .iter()
                .map(|block| hexes(block.as_deref().unwrap_or(&[])))
                .collect();
            let block_size = BlockSize::new(block_size).unwrap();
            let locals = locals(&tokens, block_size, &salt, windows, &objects);
            let hashes = BlockHashes::chain(tokens.len(), block_size, locals);
            assert_eq!(salt.seed(), hex(&block_seed), "{description}");
            let ours: Vec<u64> = hashes.locals().iter().map(|hash| hash.0).collect();
            assert_eq!(ours, hexes(&local_hashes), "{description}");
            let ours: Vec<u64> = hashes.sequences().iter().map(|hash| hash.0).collect();
            assert_eq!(ours, hexes(&sequence_hashes), "{description}");
            if let Some(objects) = prompt_objects(&objects, block_size) {
                let content = Content {
                    tokens: &tokens,
                    salt: &salt,
                    windows,
                    objects: &objects,
                };
                assert_eq!(
                    BlockHashes::of_content(&content, block_size),
                    hashes,
                    "{description}"
                );
            }
        }
        Case::RawBytesHash { utf8, hash, .. } => {
            assert_eq!(
                xxh3_64_with_seed(utf8.as_bytes(), SEED),
                hex(&hash),
                "{utf8}"
            );
        }
        Case::ChainStep {
            parent_sequence_hash,
            block_hash,
            next_sequence_hash,
        } => {
            let next = SequenceHash(hex(&parent_sequence_hash)).then(LocalHash(hex(&block_hash)));
            assert_eq!(
                next,
                SequenceHash(hex(&next_sequence_hash)),
                "{parent_sequence_hash} {block_hash}"
            );
        }
        Case::MmIdentifierHash {
            identifier,
            mm_hash,
        } => {
            let expected = mm_hash.map(|hash| ObjectHash(hex(&hash)));
            assert_eq!(ObjectHash::of(&identifier), expected, "{identifier}");
        }
        Case::MmPadValue {
            mm_hash,
            pad_value_token,
        } => {
            assert_eq!(
                ObjectHash(hex(&mm_hash)).pad_token(),
                pad_value_token,
                "{mm_hash}"
            );
        }
        Case::RequestMmToBlockMm {
            description,
            block_size,
            total_tokens,
            objects,
            blocks,
        } => {
            let ours = by_block(total_tokens, BlockSize::new(block_size).unwrap(), &objects);
            let expected: Vec<Vec<Object>> =
                blocks.into_iter().map(Option::unwrap_or_default).collect();
            assert_eq!(ours, expected, "{description}");
        }
    }
}
