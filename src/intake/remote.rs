//! Asking those who know what is cached where: the cache that all workers share, and whoever keeps the index, both at once.
//! Each has its deadline, and what is not answered by then is no information.

use std::time::{Duration, Instant};

use super::{Intake, Model};
use crate::block::agreement::agreement;
use crate::remote_index::{Asker, Question};
use crate::router::{Prompt, Remote, RouteRequest, SharedBlocks};

impl Model {
    /// What its way of hashing makes of the prompt that everybody knows.
    pub fn agreement(&self) -> u64 {
        agreement(self.block_size, self.windows, self.media)
    }
}

impl Intake {
    /// Whether there is a cache that all workers share.
    pub fn has_shared_cache(&self) -> bool {
        self.parts.shared.is_some()
    }

    /// Adds what others say of a request's prompts, and says how long the index took; `shared` where the cache that all
    /// workers share is to be asked as well.
    pub async fn ask_others(
        &self,
        request: &mut RouteRequest,
        shared: bool,
    ) -> Option<(&'static str, Duration)> {
        let shared = self.parts.shared.as_ref().filter(|_| shared);
        let blocks = async {
            match shared {
                // Its future is large, and few deployments have a shared cache.
                Some(shared) => Box::pin(shared.look_up(request)).await,
                None => SharedBlocks::NotAsked,
            }
        };
        let remote = async {
            let began = Instant::now();
            let answer = self.ask_index(self.parts.remote.as_deref()?, request).await;
            Some((answer, began.elapsed()))
        };
        let (blocks, remote) = tokio::join!(blocks, remote);
        request.shared = blocks;
        let (answer, took) = remote?;
        request.remote = answer;
        Some(("remote_index", took))
    }

    async fn ask_index(&self, asker: &Asker, request: &RouteRequest) -> Remote {
        // Of a prompt of which hardly anything was shown nothing can be said; it goes by load.
        if matches!(&request.prompt, Prompt::Beginning { known, .. } if known.is_empty()) {
            return Remote::NotAsked;
        }
        let model = request.model.as_ref();
        let Some(named) = self.named(model.map(|model| model.as_str())) else {
            return Remote::NotAsked;
        };
        let hashing = named.model.agreement();
        asker
            .ask(Question {
                model,
                hashing,
                prompts: request.prompt.blocks(),
            })
            .await
    }
}
