//! XXH3-64 under a fixed seed, for many inputs of block length.
//!
//! The seed only changes the secret that inputs are mixed with, so the seeded secret is computed
//! once. Inputs whose length is known at compile time need no branches. Sequence hashing is
//! latency-bound: each step depends on the previous one, so the independent local hashes overlap
//! with it for free.
//!
//! Every function here equals `xxh3_64_with_seed`, which property tests verify.

use xxhash_rust::xxh3::{xxh3_64_with_secret, xxh3_64_with_seed};

/// Secret of the algorithm, in words of eight bytes.
const SECRET: [u64; 24] = [
    0xbe4b_a423_396c_feb8,
    0x1cad_21f7_2c81_017c,
    0xdb97_9083_e96d_d4de,
    0x1f67_b3b7_a4a4_4072,
    0x78e5_c0cc_4ee6_79cb,
    0x2172_ffcc_7dd0_5a82,
    0x8e24_43f7_7446_08b8,
    0x4c26_3a81_e690_35e0,
    0xcb00_c391_bb52_283c,
    0xa32e_531b_8b65_d088,
    0x4ef9_0da2_9748_6471,
    0xd8ac_dea9_46ef_1938,
    0x3f34_9ce3_3f76_faa8,
    0x1d4f_0bc7_c7bb_dcf9,
    0x3159_b4cd_4be0_518a,
    0x6473_78d9_c97e_9fc8,
    0xc3eb_d334_83ac_c5ea,
    0xeb63_13fa_ffa0_81c5,
    0x49da_f0b7_51dd_0d17,
    0x9e68_d429_2655_16d3,
    0xfca1_477d_58be_162b,
    0xce31_d07a_d1b8_f88f,
    0x2804_1695_8f3a_cb45,
    0x7e40_4bbb_cafb_d7af,
];

const PRIME: u64 = 0x9e37_79b1_85eb_ca87;
const AVALANCHE: u64 = 0x1656_6791_9e37_79f9;

/// Maximum length of a short input. Longer inputs use another part of the algorithm, which needs
/// the secret as bytes.
const MAX_SHORT_INPUT: usize = 240;

/// Hasher with one seed.
#[derive(Clone, Debug)]
pub(super) struct SeededXxh3 {
    seed: u64,
    /// Secret with the seed added to every even word and subtracted from every odd one.
    secret: [u64; 24],
}

impl SeededXxh3 {
    pub(super) const fn new(seed: u64) -> Self {
        let mut secret = SECRET;
        let mut at = 0;
        while at < secret.len() {
            secret[at] = secret[at].wrapping_add(seed);
            secret[at + 1] = secret[at + 1].wrapping_sub(seed);
            at += 2;
        }
        Self { seed, secret }
    }

    /// Hashes 16 tokens.
    #[inline]
    pub(super) fn hash_16(&self, tokens: &[u32; 16]) -> u64 {
        let sum = (PRIME.wrapping_mul(64))
            .wrapping_add(self.mix(tokens, 4, 4))
            .wrapping_add(self.mix(tokens, 8, 6))
            .wrapping_add(self.mix(tokens, 0, 0))
            .wrapping_add(self.mix(tokens, 12, 2));
        avalanche(sum)
    }

    /// Hashes 32 tokens.
    #[inline]
    pub(super) fn hash_32(&self, tokens: &[u32; 32]) -> u64 {
        let start = PRIME.wrapping_mul(128);
        let part = |at: usize| {
            self.mix(tokens, at * 4, 4 * at)
                .wrapping_add(self.mix(tokens, 28 - at * 4, 4 * at + 2))
        };
        avalanche((0..4).fold(start, |sum, at| sum.wrapping_add(part(at))))
    }

    /// Mixes four tokens from `at` with two words of the secret.
    #[inline]
    fn mix(&self, tokens: &[u32], at: usize, word: usize) -> u64 {
        let low = u64::from(tokens[at]) | u64::from(tokens[at + 1]) << 32;
        let high = u64::from(tokens[at + 2]) | u64::from(tokens[at + 3]) << 32;
        fold(low ^ self.secret[word], high ^ self.secret[word + 1])
    }

    /// Prepares a hasher of bytes.
    pub(super) fn byte_hasher(&self) -> ByteHasher {
        let mut secret = [0; 192];
        let words = secret.as_chunks_mut::<8>().0;
        words
            .iter_mut()
            .zip(self.secret)
            .for_each(|(bytes, word)| *bytes = word.to_le_bytes());
        ByteHasher {
            seed: self.seed,
            secret,
        }
    }
}

/// Hasher of bytes with one seed.
pub(super) struct ByteHasher {
    seed: u64,
    secret: [u8; 192],
}

impl ByteHasher {
    pub(super) fn hash(&self, bytes: &[u8]) -> u64 {
        if bytes.len() > MAX_SHORT_INPUT {
            xxh3_64_with_secret(bytes, &self.secret)
        } else {
            xxh3_64_with_seed(bytes, self.seed)
        }
    }
}

/// Hasher of two words with one seed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PairHasher {
    low: u64,
    high: u64,
}

impl PairHasher {
    pub(super) const fn new(seed: u64) -> Self {
        let low = SECRET[3] ^ SECRET[4];
        let high = SECRET[5] ^ SECRET[6];
        Self {
            low: low.wrapping_add(seed),
            high: high.wrapping_sub(seed),
        }
    }

    #[inline]
    pub(super) fn hash(self, low: u64, high: u64) -> u64 {
        let low = low ^ self.low;
        let high = high ^ self.high;
        let length = 16_u64;
        avalanche(
            length
                .wrapping_add(high)
                .wrapping_add(low.swap_bytes())
                .wrapping_add(fold(low, high)),
        )
    }
}

#[inline]
fn fold(one: u64, other: u64) -> u64 {
    let product = u128::from(one) * u128::from(other);
    product as u64 ^ (product >> 64) as u64
}

#[inline]
fn avalanche(sum: u64) -> u64 {
    let mixed = (sum ^ (sum >> 37)).wrapping_mul(AVALANCHE);
    mixed ^ (mixed >> 32)
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;
    use warmroute_property_tests::property_config;

    use super::*;

    fn bytes(tokens: &[u32]) -> Vec<u8> {
        tokens
            .iter()
            .flat_map(|token| token.to_le_bytes())
            .collect()
    }

    proptest! {
        #![proptest_config(property_config(20_000))]

        #[test]
        fn sixteen_tokens_hash_like_bytes(tokens: [u32; 16], seed: u64) {
            prop_assert_eq!(SeededXxh3::new(seed).hash_16(&tokens), xxh3_64_with_seed(&bytes(&tokens), seed));
        }

        #[test]
        fn thirty_two_tokens_hash_like_bytes(tokens: [u32; 32], seed: u64) {
            prop_assert_eq!(SeededXxh3::new(seed).hash_32(&tokens), xxh3_64_with_seed(&bytes(&tokens), seed));
        }

        #[test]
        fn pair_hashes_like_bytes(low: u64, high: u64, seed: u64) {
            let bytes: Vec<u8> = [low, high].into_iter().flat_map(u64::to_le_bytes).collect();
            prop_assert_eq!(PairHasher::new(seed).hash(low, high), xxh3_64_with_seed(&bytes, seed));
        }

        #[test]
        fn bytes_hash_like_reference(bytes in vec(any::<u8>(), 0..2_000), seed: u64) {
            prop_assert_eq!(SeededXxh3::new(seed).byte_hasher().hash(&bytes), xxh3_64_with_seed(&bytes, seed));
        }
    }

    #[test]
    fn edge_case_words_and_seeds_hash_like_bytes() {
        for seed in [0, 1, 1337, u64::MAX] {
            for word in [0, 1, u32::MAX] {
                let sixteen = [word; 16];
                let more = [word; 32];
                assert_eq!(
                    SeededXxh3::new(seed).hash_16(&sixteen),
                    xxh3_64_with_seed(&bytes(&sixteen), seed)
                );
                assert_eq!(
                    SeededXxh3::new(seed).hash_32(&more),
                    xxh3_64_with_seed(&bytes(&more), seed)
                );
                let long = vec![word as u8; 241];
                assert_eq!(
                    SeededXxh3::new(seed).byte_hasher().hash(&long),
                    xxh3_64_with_seed(&long, seed)
                );
            }
        }
    }
}
