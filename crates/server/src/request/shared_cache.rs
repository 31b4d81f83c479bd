//! Queries of the cache that all workers share. A late answer counts as no information.

use std::sync::Arc;
use std::time::Instant;

use tracing::debug;

use warmroute_core::router::{RouteRequest, SharedBlocks};
use warmroute_engines::shared_cache::SharedCacheClient;
use warmroute_metrics::{Metrics, ModelLabel, ReasonLabel};

/// The shared cache and its metrics.
pub struct SharedCacheLookup {
    /// The cache.
    pub cache: SharedCacheClient,
    /// The metrics.
    pub metrics: Arc<Metrics>,
}

impl SharedCacheLookup {
    /// Returns the cached blocks of the prompt. Block ranges of several prompts would be ambiguous,
    /// so they are not queried.
    pub(super) async fn query(&self, request: &RouteRequest) -> SharedBlocks {
        let (Some(model), [prompt]) = (&request.model, request.prompt.blocks()) else {
            return SharedBlocks::NotQueried;
        };
        if prompt.is_empty() {
            return SharedBlocks::NotQueried;
        }
        let started = Instant::now();
        let answer = self.cache.query(model.as_str(), prompt).await;
        self.metrics
            .index
            .shared_cache_lookup_duration_seconds
            .observe(started.elapsed().as_secs_f64());
        match answer {
            Ok(ranges) => {
                let cached_blocks: u64 = ranges
                    .iter()
                    .map(|range| u64::from(range.end - range.start))
                    .sum();
                let rate = cached_blocks as f64 / prompt.len() as f64;
                self.metrics
                    .index
                    .shared_cache_hit_ratio
                    .get_or_create(&ModelLabel::from(model))
                    .observe(rate);
                SharedBlocks::Held(ranges)
            }
            Err(error) => {
                debug!(%error, "shared cache lookup failed");
                self.metrics
                    .index
                    .shared_cache_lookup_errors
                    .get_or_create(&ReasonLabel {
                        reason: error.label(),
                    })
                    .inc();
                SharedBlocks::Failed(error.label())
            }
        }
    }
}
