//! Requests that contain tokens or hashes instead of a body.

use warmroute_core::router::{RoutePrompt, RouteRequest};

use super::models::{ResolvedModel, SaltedModel};
use super::preprocessor::RequestPreprocessor;

impl RequestPreprocessor {
    /// Resolves a model name. Without a name, returns the only configured model.
    pub fn resolve_model(&self, name: Option<&str>) -> Option<ResolvedModel> {
        self.parts.models.resolve(name)
    }

    /// Returns a request with these tokens, for a model and optionally an adapter.
    pub fn preprocess_tokens(
        &self,
        resolved: &ResolvedModel,
        tokens: Vec<u32>,
        cache_salt: Option<String>,
    ) -> RouteRequest {
        let model = SaltedModel::new(resolved.clone(), cache_salt);
        let prompts = [tokens];
        let hashes = vec![model.block_hashes(&prompts[0])];
        let tracked = self.tracked_blocks(&model, &prompts, &hashes);
        let mut request = RouteRequest::new(
            Some(resolved.model.name.clone()),
            RoutePrompt::Hashed(hashes),
        );
        request.tracked_blocks = tracked;
        request.constraints.adapter = resolved.adapter.clone();
        request
    }
}
