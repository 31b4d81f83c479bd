//! Queries of the shared cache and of a remote index, concurrently. Each has its own deadline. A
//! missing answer counts as no information.

use std::time::{Duration, Instant};

use warmroute_core::router::{RemoteOverlaps, RoutePrompt, RouteRequest, SharedBlocks};

use super::preprocessor::RequestPreprocessor;
use crate::cluster::remote_index::{OverlapQuery, RemoteIndexClient};

impl RequestPreprocessor {
    /// Returns whether the workers share a cache.
    pub fn has_shared_cache(&self) -> bool {
        self.parts.shared_cache.is_some()
    }

    /// Adds the answers of the remote index, and of the shared cache if `shared`, to a request.
    /// Returns the duration of the index query.
    pub async fn query_caches(
        &self,
        request: &mut RouteRequest,
        shared: bool,
    ) -> Option<(&'static str, Duration)> {
        let shared = self.parts.shared_cache.as_ref().filter(|_| shared);
        let blocks = async {
            match shared {
                // Boxed, because the future is large and few deployments have a shared cache.
                Some(shared) => Box::pin(shared.query(request)).await,
                None => SharedBlocks::NotQueried,
            }
        };
        let remote = async {
            let started = Instant::now();
            let answer = self
                .query_index(self.parts.index_client.as_deref()?, request)
                .await;
            Some((answer, started.elapsed()))
        };
        let (blocks, remote) = tokio::join!(blocks, remote);
        request.shared = blocks;
        let (answer, elapsed) = remote?;
        request.remote_overlaps = answer;
        Some(("remote_index", elapsed))
    }

    async fn query_index(
        &self,
        client: &RemoteIndexClient,
        request: &RouteRequest,
    ) -> RemoteOverlaps {
        // Without a complete block there is nothing to query, and the request is routed load-only.
        if matches!(&request.prompt, RoutePrompt::Truncated { known, .. } if known.is_empty()) {
            return RemoteOverlaps::NotQueried;
        }
        let model = request.model.as_ref();
        let Some(resolved) = self.resolve_model(model.map(|model| model.as_str())) else {
            return RemoteOverlaps::NotQueried;
        };
        let hashing = resolved.hash_fingerprint();
        client
            .query(OverlapQuery {
                model,
                hashing,
                prompts: request.prompt.blocks(),
            })
            .await
    }
}
