//! Comparing what was foretold of a request's blocks with what its engine tells of them. Only where the engine's events
//! are followed and caught up, and only for a few requests at a time. Blocks that are missing prove something only where
//! all that the engine holds was told; blocks that it tells of since prove that it makes our tokens, though others were lost.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::answer::Phases;
use super::placing::Booked;
use super::prepared::Prepared;
use super::{Prompt, RouteRequest, Router};
use crate::block::BlockHashes;
use crate::parity::{Change, Evidence, Foretold, Parity, Sighting, Told};
use crate::trust::{Because, Trust};
use crate::worker::{Slot, WorkerId, WorkerRank};

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
            (Foretold::Prompt, Prompt::Hashed(prompts)) => prompts.first().filter(|_| prompts.len() == 1)?,
            _ => return None,
        };
        let rank = booked.route.to.rank;
        // Who only decodes has its blocks from elsewhere, and not all engines tell of those.
        if hashes.is_empty() || matches!(booked.route.phases, Phases::Remote(_)) {
            return None;
        }
        let (told, slot) = (self.told(rank)?, self.fleet.load().slot(rank)?);
        let standing = self.parity.of(&booked.route.model)?;
        let stores = self.index.stores(slot)?;
        // What an earlier life of the engine may have told proves nothing of this one.
        let (held, of) = if told == Told::Some { self.appeared(hashes, rank, slot) } else { (0, 1) };
        if held >= of {
            return None;
        }
        standing.sighting(rank, hashes.clone(), stores)
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

    /// How many leading blocks of a request its worker rank told of, and of how many.
    fn appeared(&self, hashes: &BlockHashes, rank: WorkerRank, slot: Slot) -> (usize, usize) {
        // An engine with larger blocks than ours tells of whole ones of its own only.
        let engine =
            self.trust(rank).engine_block_size.map_or(1, |engine| engine.tokens() / hashes.block_size().tokens());
        let mut scratch = self.scratch.take();
        let held = self.index.leading(hashes, slot, &mut scratch);
        self.scratch.give([scratch]);
        (held, hashes.len() / engine.max(1) * engine.max(1))
    }

    /// Looks for the blocks of an answered request; `None` where nothing can be said.
    pub fn look_for(&self, sighting: Sighting) -> Option<(Evidence, Change)> {
        let rank = sighting.rank();
        let told = self.told(rank)?;
        let slot = self.fleet.load().slot(rank)?;
        let stores = self.index.stores(slot)?;
        let found = self.appeared(sighting.hashes(), rank, slot);
        sighting.found(found, stores, told)
    }
}
