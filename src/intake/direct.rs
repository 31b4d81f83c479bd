//! Requests that come as tokens or hashes instead of a body: nothing is to be rendered, and the rest is the same.

use super::{Intake, Named};
use crate::block::Salt;
use crate::router::{Prompt, RouteRequest};

impl Intake {
    /// What a model's name stands for; without a name the model, where there is only one.
    pub fn named(&self, name: Option<&str>) -> Option<Named> {
        self.parts.models.find(name)
    }

    /// A request with these tokens, for a model and perhaps an adapter.
    pub fn take_tokens(
        &self,
        named: &Named,
        tokens: Vec<u32>,
        cache_salt: Option<String>,
    ) -> RouteRequest {
        let salt = Salt {
            lora: named.adapter.clone(),
            cache: cache_salt,
        };
        let prompts = [tokens];
        let hashes: Vec<_> = prompts
            .iter()
            .map(|tokens| named.hashes(tokens, &salt))
            .collect();
        let tracked = self.tracked(named, &prompts, &hashes, &salt);
        let mut request = RouteRequest::new(Some(named.model.name.clone()), Prompt::Hashed(hashes));
        request.tracked = tracked;
        request.constraints.adapter = named.adapter.clone();
        request
    }
}
