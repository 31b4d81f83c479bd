//! Fingerprint of the block hashing settings. Two processes compute the same hashes only if their
//! fingerprints are equal: both hash the same known prompt. A different seed, block size, windowing
//! or placeholder changes the fingerprint.

use xxhash_rust::xxh3::xxh3_64;

use super::{BlockHashes, BlockWindows, CacheSalt, MediaTokens, PromptContent};
use crate::worker::BlockSize;

/// Returns the fingerprint: a digest of the hashes of a known prompt.
pub fn hash_fingerprint(block_size: BlockSize, windows: BlockWindows, media: MediaTokens) -> u64 {
    // Two blocks, so that chaining and windowing have an effect.
    let tokens: Vec<u32> = (1..=2 * block_size.0.get().min(1 << 16) + 1).collect();
    let salt = CacheSalt {
        lora: Some("adapter".to_owned()),
        cache: Some("tenant".to_owned()),
    };
    let content = PromptContent {
        windows,
        ..PromptContent::text(&tokens, &salt)
    };
    let hashes = BlockHashes::from_content(&content, block_size);
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
    fn fingerprint_changes_with_every_setting() {
        let size = |tokens| BlockSize::new(tokens).unwrap();
        let media = |image, video| MediaTokens { image, video };
        let all = [
            hash_fingerprint(size(16), BlockWindows::Plain, media(None, None)),
            hash_fingerprint(size(32), BlockWindows::Plain, media(None, None)),
            hash_fingerprint(size(16), BlockWindows::Eagle, media(None, None)),
            hash_fingerprint(size(16), BlockWindows::Plain, media(Some(0), None)),
            hash_fingerprint(size(16), BlockWindows::Plain, media(None, Some(0))),
            hash_fingerprint(size(u32::MAX), BlockWindows::Plain, media(None, None)),
        ];
        for (at, one) in all.iter().enumerate() {
            assert!(
                all[..at].iter().all(|other| other != one),
                "{at} of {all:?}"
            );
        }
        // Constant, because processes of different versions compare it.
        assert_eq!(all[0], 0x220e_e53c_96eb_bde4);
    }
}
