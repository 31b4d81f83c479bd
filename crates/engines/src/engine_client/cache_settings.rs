//! Cache settings of an engine from its metrics page.

use std::num::NonZeroU32;

use warmroute_core::engine_settings::EngineSettings;
use warmroute_core::worker::{BlockSize, RankRange};

use super::CacheConfig;

/// Returns the settings that the caches of an engine report: block size, capacity and ranks.
pub fn cache_settings(caches: &[CacheConfig]) -> EngineSettings {
    let mut sizes = caches.iter().map(|cache| cache.block_size);
    let size = sizes
        .next()
        .flatten()
        .filter(|first| sizes.all(|size| size == Some(*first)));
    EngineSettings {
        block_size: size.and_then(BlockSize::new),
        total_kv_blocks: blocks_per_rank(caches),
        ranks: ranks(caches.iter().filter_map(CacheConfig::rank), caches.len()),
        ..EngineSettings::default()
    }
}

/// Returns the smallest number of KV blocks of a rank. If several ranks share a metrics page, each
/// line of vLLM has the sum of their blocks, but the tokens of its own rank.
fn blocks_per_rank(caches: &[CacheConfig]) -> Option<u64> {
    let count = caches.len() as u64;
    let is_sum = count > 1
        && caches
            .windows(2)
            .all(|pair| pair[0].num_gpu_blocks == pair[1].num_gpu_blocks);
    let of_rank = |cache: &CacheConfig| match cache.size_tokens.zip(cache.block_size) {
        Some((tokens, size)) if is_sum => Some(tokens / u64::from(size)),
        _ if is_sum => cache.num_gpu_blocks.map(|sum| sum / count),
        _ => cache.num_gpu_blocks,
    };
    caches
        .iter()
        .filter_map(of_rank)
        .filter(|blocks| *blocks > 0)
        .min()
}

/// Returns the ranks if they are consecutive.
fn ranks(reported: impl Iterator<Item = u32>, count: usize) -> Option<RankRange> {
    let mut all: Vec<u32> = reported.collect();
    all.sort_unstable();
    all.dedup();
    let start = *all.first()?;
    let is_whole = count <= RankRange::MAX_SIZE as usize
        && all.len() == count
        && all.iter().zip(start..).all(|(rank, at)| *rank == at);
    let size = NonZeroU32::new(u32::try_from(all.len()).ok()?)?;
    is_whole.then_some(RankRange { start, size })
}
