//! How images and other objects enter blocks: an object has a hash, made from the identifier the engine uses, and marks
//! every block that its placeholder tokens touch.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::worker::BlockSize;

/// First token id that stands for an object and not for text.
const PAD_BASE: u32 = 1_000_000;

/// Hash of a multimodal object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ObjectHash(pub u64);

impl ObjectHash {
    /// The hash that an identifier stands for. 64 hexadecimal digits are a digest already and are cut; the empty
    /// identifier stands for nothing.
    pub fn of(identifier: &str) -> Option<Self> {
        let digits =
            identifier.len() == 64 && identifier.bytes().all(|byte| byte.is_ascii_hexdigit());
        match identifier
            .get(..16)
            .filter(|_| digits)
            .map(|digits| u64::from_str_radix(digits, 16))
        {
            Some(Ok(hash)) => Some(Self(hash)),
            _ if identifier.is_empty() => None,
            _ => Some(Self(xxh3_64(identifier.as_bytes()))),
        }
    }

    /// The token that stands for the object where tokens are made to carry it.
    pub fn pad_token(self) -> u32 {
        PAD_BASE + (self.0 & ((1 << 30) - 1)) as u32
    }
}

/// An object of a request and the prompt tokens it stands at.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptObject {
    /// Which object.
    pub object: ObjectHash,
    /// Its placeholder tokens.
    pub ranges: Vec<Range<usize>>,
}

/// An object within one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockObject {
    /// Which object.
    pub object: ObjectHash,
    /// Its placeholder tokens, counted from the start of the block.
    pub offsets: Vec<Range<usize>>,
}

/// Cuts the objects of a prompt at block borders: per block, the partial tail included, the objects that touch it.
pub fn objects_by_block(
    tokens: usize,
    block_size: BlockSize,
    objects: &[PromptObject],
) -> Vec<Vec<BlockObject>> {
    let size = block_size.tokens();
    let mut blocks: Vec<Vec<BlockObject>> = vec![Vec::new(); tokens.div_ceil(size)];
    for PromptObject { object, ranges } in objects {
        for range in ranges {
            let touched = range.start / size..range.end.div_ceil(size).min(blocks.len());
            for (block, entry) in blocks
                .iter_mut()
                .enumerate()
                .take(touched.end)
                .skip(touched.start)
            {
                let start = block * size;
                let offsets = range.start.max(start) - start..range.end.min(start + size) - start;
                if offsets.is_empty() {
                    continue;
                }
                match entry.iter_mut().find(|known| known.object == *object) {
                    Some(known) => known.offsets.push(offsets),
                    None => entry.push(BlockObject {
                        object: *object,
                        offsets: vec![offsets],
                    }),
                }
            }
        }
    }
    blocks
}
