//! Asking the cache that all workers share, where there is one. What it does not answer in time is no information.

use std::ops::Range;
use std::sync::Arc;

use tracing::debug;

use crate::metrics::{Metrics, ReasonLabel};
use crate::router::RouteRequest;
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
    pub(super) async fn look_up(&self, request: &RouteRequest) -> Vec<Range<u32>> {
        let (Some(model), [prompt]) = (&request.model, request.prompt.blocks()) else { return Vec::new() };
        match self.cache.hits(SharedQuery { model: model.as_str(), prompt }).await {
            Ok(ranges) => ranges,
            Err(error) => {
                debug!(%error, "the shared cache does not answer");
                self.metrics.shared_cache_errors.get_or_create(&ReasonLabel { reason: error.label() }).inc();
                Vec::new()
            }
        }
    }
}
