//! Whether two processes would call the same prompt by the same hashes: both hash one that everybody knows. Whoever makes
//! something else of it has another seed, other blocks, other windows or other placeholders, and its hashes say nothing.

use xxhash_rust::xxh3::xxh3_64;

use super::{BlockHashes, Content, MediaTokens, Salt, Windows};
use crate::worker::BlockSize;

/// What this way of hashing makes of the known prompt.
pub fn agreement(block_size: BlockSize, windows: Windows, media: MediaTokens) -> u64 {
    // Two blocks, of which the second shows how they are chained and cut.
    let tokens: Vec<u32> = (1..=2 * block_size.0.get().min(1 << 16) + 1).collect();
    let salt = Salt {
        lora: Some("adapter".to_owned()),
        cache: Some("tenant".to_owned()),
    };
    let content = Content {
        windows,
        ..Content::plain(&tokens, &salt)
    };
    let hashes = BlockHashes::of_content(&content, block_size);
    let numbers = hashes
        .sequences()
        .iter()
        .map(|hash| hash.0)
        .chain([block_size.0.get().into()]);
    let placeholders = [media.image, media.video]
        .into_iter()
        .map(|token| token.map_or(0, |token| u64::from(token) + 1));
    let bytes: Vec<u8> = numbers
        .chain(placeholders)
        .flat_map(u64::to_le_bytes)
        .collect();
    xxh3_64(&bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whatever_changes_hashes_changes_it() {
        let size = |tokens| BlockSize::new(tokens).unwrap();
        let media = |image, video| MediaTokens { image, video };
        let all = [
            agreement(size(16), Windows::Plain, media(None, None)),
            agreement(size(32), Windows::Plain, media(None, None)),
            agreement(size(16), Windows::Eagle, media(None, None)),
            agreement(size(16), Windows::Plain, media(Some(0), None)),
            agreement(size(16), Windows::Plain, media(None, Some(0))),
            agreement(size(u32::MAX), Windows::Plain, media(None, None)),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(
                all[..at].iter().all(|other| other != one),
                "{at} of {all:?}"
            );
        }
        // Fixed, because processes of different versions compare it.
        assert_eq!(all[0], 0x220e_e53c_96eb_bde4);
    }
}
