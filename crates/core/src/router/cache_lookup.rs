//! Lookup of cached prefixes: in the local index or in the reply of a remote one, raised to the
//! predictions.

use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::context::{OverlapBufferPool, RoutingContext};
use super::event_sources::{EventSources, FreshnessTable};
use super::predictions::PredictorSet;
use super::remote::{OverlapSource, RemoteOverlaps, RemoteRank, RemoteRanks};
use crate::block::BlockHashes;
use crate::fleet::{Fleet, FleetMember};
use crate::index::{DeviceBlockCounts, HybridSlots, Overlaps, PrefixIndex};
use crate::load::ActiveLoad;
use crate::predict::{EvictionAge, PredictedUsage, Predictor};

/// Everything that is known about the caches of the workers.
pub(super) struct CacheLookup {
    pub(super) index: Arc<PrefixIndex>,
    pub(super) predictors: PredictorSet,
    /// Whether a remote server holds the index.
    pub(super) has_remote_index: bool,
    pub(super) sources: EventSources,
    pub(super) buffers: OverlapBufferPool,
    /// Status of the event sources, as published to clients of this index.
    rank_status_cache: RankStatusCache,
}

/// Cached blocks of each rank: reported, or predicted for ranks without events.
pub(super) struct CachedBlockCounts<'a> {
    reported: DeviceBlockCounts,
    predicted: Option<(&'a Predictor, EvictionAge)>,
}

/// KV blocks of a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankBlocks {
    /// All blocks. `None` if their number is unknown.
    pub(super) total: Option<u64>,
    /// Blocks that new ones use before the engine evicts others: neither cached nor needed by
    /// outstanding prefills. 0 if the total is unknown.
    ///
    /// An engine that has evicted blocks has no free blocks. It reuses blocks in the order of their
    /// last use. A block without cached content, such as the incomplete last block of a prompt, is in
    /// that order too. If such blocks counted as free, the rank that was used last would be preferred.
    pub(super) free: u64,
    /// Value of the blocks that are evicted next, relative to those of other ranks.
    pub(super) eviction_value: f64,
}

impl RankBlocks {
    const UNKNOWN: Self = Self {
        total: None,
        free: 0,
        eviction_value: 1.0,
    };
}

impl CachedBlockCounts<'_> {
    /// Returns the blocks of a rank, or that they are unknown if the policy does not need them.
    #[inline]
    pub(super) fn of_rank(
        &self,
        member: &FleetMember,
        load: ActiveLoad,
        is_needed: bool,
    ) -> RankBlocks {
        let total = member.worker.capacity.total_kv_blocks.filter(|_| is_needed);
        let Some(blocks) = total else {
            return RankBlocks::UNKNOWN;
        };
        let slot = member.slot;
        let predicted = match self.predicted {
            Some((predictor, age)) => predictor.usage(slot, age),
            None => PredictedUsage::NONE,
        };
        let reported = self.reported.get(slot);
        let used = if reported.has_evicted {
            blocks
        } else {
            reported.blocks.max(predicted.used_blocks)
        };
        let block = member.worker.block_size.tokens() as u64;
        RankBlocks {
            total,
            free: blocks.saturating_sub(used + load.active_prefill_tokens / block),
            eviction_value: predicted.eviction_value,
        }
    }
}

/// Published status of all ranks, reused until something changes.
#[derive(Debug, Default)]
struct RankStatusCache(ArcSwapOption<CachedRankStatus>);

#[derive(Debug)]
struct CachedRankStatus {
    generation: u64,
    freshness: Arc<FreshnessTable>,
    grouped: HybridSlots,
    ranks: Arc<RemoteRanks>,
}

impl CacheLookup {
    pub(super) fn new(index: Arc<PrefixIndex>) -> Self {
        Self {
            index,
            predictors: PredictorSet::default(),
            has_remote_index: false,
            sources: EventSources::default(),
            buffers: OverlapBufferPool::default(),
            rank_status_cache: RankStatusCache::default(),
        }
    }

    /// Returns the cached blocks of each rank.
    pub(super) fn cached_block_counts(&self) -> CachedBlockCounts<'_> {
        let predictor = self.predictors.without_events.as_deref();
        CachedBlockCounts {
            reported: self.index.device_block_counts(),
            predicted: predictor.map(|it| (it, it.eviction_age())),
        }
    }

    /// Returns the status of all event sources; the same value as long as nothing changes.
    pub(super) fn rank_statuses(&self, fleet: &Fleet) -> Arc<RemoteRanks> {
        let freshness = self.sources.table();
        let grouped = self.index.hybrid_slots();
        let generation = fleet.generation();
        let is_current = |cached: &Arc<CachedRankStatus>| {
            cached.generation == generation
                && Arc::ptr_eq(&cached.freshness, &freshness)
                && cached.grouped.is_same(&grouped)
        };
        let cache = &self.rank_status_cache.0;
        if let Some(cached) = cache.load_full().filter(is_current) {
            return cached.ranks.clone();
        }
        let row = |(rank, status)| RemoteRank {
            rank,
            status,
            has_cache_groups: fleet.slot(rank).is_some_and(|slot| grouped.contains(slot)),
        };
        let ranks = Arc::new(RemoteRanks::new(freshness.iter().map(row).collect()));
        cache.store(Some(Arc::new(CachedRankStatus {
            generation,
            freshness,
            grouped,
            ranks: ranks.clone(),
        })));
        ranks
    }

    /// Returns the cached or predicted overlaps of one prompt. `index` is the position of the
    /// prompt in the request and in a remote reply.
    pub(super) fn find_overlaps(
        &self,
        index: usize,
        hashes: &BlockHashes,
        remote: &RemoteOverlaps,
        fleet: &Fleet,
    ) -> Overlaps {
        let mut table = self.buffers.acquire();
        let source = match remote {
            RemoteOverlaps::Received(answer) => {
                let found = answer.prompts.get(index).map_or(&[][..], Vec::as_slice);
                table.replace_with(
                    found
                        .iter()
                        .filter_map(|(rank, blocks)| Some((fleet.slot(*rank)?, *blocks))),
                );
                OverlapSource::RemoteIndex(&answer.ranks, fleet)
            }
            RemoteOverlaps::NotQueried if !self.has_remote_index => {
                self.index.query_overlaps(hashes, &mut table);
                OverlapSource::LocalIndex
            }
            RemoteOverlaps::NotQueried | RemoteOverlaps::Unavailable(_) => {
                table.replace_with([]);
                OverlapSource::Unavailable
            }
        };
        if self.predictors.has_predictors() {
            let mut buffer = self.buffers.acquire();
            self.predictors
                .raise_overlaps(hashes, &mut table, &mut buffer, source);
            self.buffers.release([buffer]);
        }
        table
    }

    /// Returns the statuses of the event sources, as the holder of the index sees them.
    pub(super) fn freshness_table(&self, remote: &RemoteOverlaps) -> Arc<FreshnessTable> {
        match remote {
            RemoteOverlaps::Received(answer) => answer.ranks.statuses.clone(),
            RemoteOverlaps::Unavailable(ranks) => ranks.block_sizes.clone(),
            RemoteOverlaps::NotQueried if self.has_remote_index => Arc::default(),
            RemoteOverlaps::NotQueried => self.sources.table(),
        }
    }

    /// Returns whether the cache of the chosen rank is only predicted.
    pub(super) fn is_predicted(&self, context: &RoutingContext, chosen: &FleetMember) -> bool {
        let has_no_events = match &context.request.remote_overlaps {
            RemoteOverlaps::Received(answer) => !answer.ranks.publishes_events(chosen.rank),
            remote => {
                self.is_index_unavailable(remote)
                    || chosen.worker.event_source(chosen.rank.rank).is_none()
            }
        };
        has_no_events && self.predictors.without_events.is_some()
    }

    /// Returns whether neither a local nor a remote index is available.
    pub(super) fn is_index_unavailable(&self, remote: &RemoteOverlaps) -> bool {
        match remote {
            RemoteOverlaps::NotQueried => self.has_remote_index,
            RemoteOverlaps::Received(_) => false,
            RemoteOverlaps::Unavailable(_) => true,
        }
    }
}
