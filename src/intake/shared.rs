//! Asking the cache that all workers share, where there is one. What it does not answer in time is no information.

use std::sync::Arc;
use std::time::Instant;

use tracing::debug;

use crate::metrics::{Metrics, ModelLabel, ReasonLabel};
use crate::router::{RouteRequest, SharedBlocks};
use crate::shared_cache::{SharedCache, SharedQuery};

/// The cache, and where its failures are counted.
pub struct Shared {
    /// The cache.
    pub cache: Arc<dyn SharedCache>,
    /// Where failures are counted.
    pub metrics: Arc<Metrics>,
}

impl Shared {
    /// What the cache holds of the prompt. Ranges of blocks of several prompts would mean nothing.
    pub(super) async fn look_up(&self, request: &RouteRequest) -> SharedBlocks {
        let (Some(model), [prompt]) = (&request.model, request.prompt.blocks()) else {
            return SharedBlocks::NotAsked;
        };
        if prompt.is_empty() {
            return SharedBlocks::NotAsked;
        }
        let began = Instant::now();
        let answer = self
            .cache
            .hits(SharedQuery {
                model: model.as_str(),
                prompt,
            })
            .await;
        self.metrics
            .shared_cache_seconds
            .observe(began.elapsed().as_secs_f64());
        match answer {
            Ok(ranges) => {
                let held: u64 = ranges
                    .iter()
                    .map(|range| u64::from(range.end - range.start))
                    .sum();
                let rate = held as f64 / prompt.len() as f64;
                self.metrics
                    .shared_cache_hit_rate
                    .get_or_create(&ModelLabel::from(model))
                    .observe(rate);
                SharedBlocks::Held(ranges)
            }
            Err(error) => {
                debug!(%error, "shared cache lookup failed");
                self.metrics
                    .shared_cache_errors
                    .get_or_create(&ReasonLabel {
                        reason: error.label(),
                    })
                    .inc();
                SharedBlocks::Failed(error.label())
            }
        }
    }
}
