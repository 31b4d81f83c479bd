//! Multimodal objects in blocks. An object is hashed by the identifier that the engine uses. It
//! affects every block that contains one of its placeholder tokens.

use std::ops::Range;

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::xxh3_64;

use crate::worker::BlockSize;

/// First token id that represents an object.
const PAD_BASE: u32 = 1_000_000;

/// Hash of a multimodal object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ObjectHash(pub u64);

impl ObjectHash {
    /// Hashes an identifier. 64 hexadecimal digits are a digest already, and its first 64 bits are
    /// used. An empty identifier has no hash.
    pub fn from_identifier(identifier: &str) -> Option<Self> {
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

    /// Returns the pad token that represents the object, for engines that substitute placeholders.
    pub fn pad_token(self) -> u32 {
        PAD_BASE + (self.0 & ((1 << 30) - 1)) as u32
    }
}

/// Object of a request and the positions of its placeholder tokens.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PromptObject {
    /// Hash of the object.
    pub object: ObjectHash,
    /// Positions of its placeholder tokens.
    pub ranges: Vec<Range<usize>>,
}

/// Part of an object in one block.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlockObject {
    /// Hash of the object.
    pub object: ObjectHash,
    /// Positions of its placeholder tokens, relative to the start of the block.
    pub offsets: Vec<Range<usize>>,
}

/// Splits objects at block boundaries. Returns the objects that overlap each block, including the
/// incomplete last one.
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
