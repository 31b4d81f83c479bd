//! Compares the predicted blocks of a few real requests with the blocks that their engines store. The prompt is watched from
//! the choice on, so blocks that are evicted before the check are seen as well: cache turnover is no evidence of other
//! tokens. A missing block proves something only where the events report everything that the engine holds; a stored block
//! proves that the engine computes the same tokens, even if other events were lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::answer::{Phases, Route};
use super::placing::Booked;
use super::prepared::Prepared;
use super::question::{Decoders, Step};
use super::{Prompt, RouteRequest, Router};
use crate::parity::{
    Change, Evidence, Foretold, Parity, PromptCheck, Sighting, Told, WatchedPrompt,
};
use crate::trust::{Because, Trust};
use crate::worker::{WorkerId, WorkerRank};

impl Router {
    /// What is known of the models' tokens.
    pub fn parity(&self) -> &Arc<Parity> {
        &self.parity
    }

    /// The workers that make other tokens of a request than it was hashed by.
    pub(super) fn differing(&self, request: &RouteRequest) -> Arc<BTreeSet<WorkerId>> {
        match request.foretold.is_ours() {
            true => self.parity.differing(request.model.as_ref()),
            false => Arc::default(),
        }
    }

    /// A place to look after a request that was just booked, where there is something to be learnt.
    pub(super) fn sighting(&self, booked: &Booked, prepared: &Prepared) -> Option<Sighting> {
        let request = &prepared.request;
        let hashes = match (&request.foretold, &request.prompt) {
            (Foretold::Shadow(hashes), _) => &**hashes,
            (Foretold::Prompt, Prompt::Hashed(prompts)) => {
                prompts.first().filter(|_| prompts.len() == 1)?
            }
            _ => return None,
        };
        if hashes.is_empty() || !proves_computation(request, &booked.route) {
            return None;
        }
        let rank = booked.route.computed_by().rank;
        let told = self.told(rank)?;
        let slot = self.fleet.load().slot(rank)?;
        let standing = self.parity.of(&booked.route.model)?;
        standing.sighting(rank, || {
            let since = self.index.moment(slot)?;
            let watch = self.index.watch(hashes, slot)?;
            let prompt = WatchedPrompt {
                watch,
                blocks: hashes.len(),
                block_size: hashes.block_size(),
                since,
            };
            // An earlier life of the engine may have stored the blocks, which proves nothing of this one.
            let is_news =
                told == Told::All || prompt.watch.most_held() < self.expected_blocks(&prompt, rank);
            is_news.then_some(prompt)
        })
    }

    /// How much of what a worker rank holds was told. Of blocks that it held before anybody listened it says nothing, and
    /// where those are hit no block of theirs is missing for another reason.
    fn told(&self, rank: WorkerRank) -> Option<Told> {
        let standing = self.trust(rank);
        match standing.trust {
            Trust::Exact => Some(Told::All),
            Trust::Incomplete => Some(Told::Some),
            // Also where it began anew, and its numbers had overtaken the old ones before they were heard.
            Trust::Stale if standing.because == Some(Because::LostBatches) => Some(Told::Some),
            Trust::CatchingUp | Trust::Stale | Trust::Absent => None,
        }
    }

    /// Blocks of a prompt that its worker rank has to store. An engine with larger blocks stores only whole blocks of its own
    /// size.
    fn expected_blocks(&self, prompt: &WatchedPrompt, rank: WorkerRank) -> usize {
        let engine = self.trust(rank).engine_block_size;
        let count = engine
            .map_or(1, |engine| engine.tokens() / prompt.block_size.tokens())
            .max(1);
        prompt.blocks / count * count
    }

    /// Checks whether the blocks of an answered request were stored; `None` if the check proves nothing.
    pub fn look_for(&self, sighting: Sighting) -> Option<(Evidence, Change)> {
        let rank = sighting.rank();
        let told = self.told(rank)?;
        let slot = self.fleet.load().slot(rank)?;
        let prompt = sighting.prompt();
        if !prompt.watch.is_current(&self.index, slot) {
            return None;
        }
        let held = prompt.watch.most_held();
        let expected = self.expected_blocks(prompt, rank);
        let check = PromptCheck {
            held,
            expected,
            now: self.index.moment(slot)?,
            told,
        };
        sighting.found(check)
    }
}

/// Whether a successful answer proves that the worker rank of [`Route::computed_by`] computed the prompt.
fn proves_computation(request: &RouteRequest, route: &Route) -> bool {
    match (&route.phases, &request.step) {
        (Phases::Aggregated | Phases::Kept(_), _) => true,
        // The decode worker fetches the blocks, and not every engine publishes events for those.
        (Phases::Remote(_), Step::Decode(_)) => false,
        // The prefill worker sent this response.
        (Phases::Remote(_), Step::PrefillFirst { .. }) => true,
        // A sidecar may have let the decode worker compute the prompt, if its role allows that.
        (Phases::Remote(_), _) => request.decoders == Decoders::OnlyDecode,
    }
}
