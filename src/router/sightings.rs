//! Comparing what was foretold of a request's blocks with what its engine tells of them. Only where the engine's events
//! are followed and caught up, and only for a few requests at a time. Blocks that are missing prove something only where
//! all that the engine holds was told; blocks that are there prove that it makes our tokens wherever what was told is true.

use std::collections::BTreeSet;
use std::sync::Arc;

use super::answer::Phases;
use super::placing::Booked;
use super::prepared::Prepared;
use super::{Prompt, RouteRequest, Router};
use crate::index::Overlaps;
use crate::parity::{Change, Evidence, Foretold, Parity, Sighting, Told};
use crate::trust::Trust;
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
            (Foretold::Prompt, Prompt::Hashed(prompts)) => prompts.first().filter(|_| prompts.len() == 1)?,
            _ => return None,
        };
        let rank = booked.route.to.rank;
        // Who only decodes has its blocks from elsewhere, and not all engines tell of those.
        if hashes.is_empty() || matches!(booked.route.phases, Phases::Remote(_)) || self.told(rank).is_none() {
            return None;
        }
        let standing = self.parity.of(&booked.route.model)?;
        let stores = self.index.stores(self.fleet.load().slot(rank)?)?;
        standing.sighting(rank, hashes.clone(), stores)
    }

    /// How much of what a worker rank holds was told. Of blocks that it held before anybody listened it says nothing, and
    /// where those are hit no block of theirs is missing for another reason.
    fn told(&self, rank: WorkerRank) -> Option<Told> {
        match self.trust(rank).trust {
            Trust::Exact => Some(Told::All),
            Trust::Incomplete => Some(Told::Some),
            Trust::CatchingUp | Trust::Stale | Trust::Absent => None,
        }
    }

    /// Looks for the blocks of an answered request; `None` where nothing can be said.
    pub fn look_for(&self, sighting: Sighting, scratch: &mut Overlaps) -> Option<(Evidence, Change)> {
        let rank = sighting.rank();
        let told = self.told(rank)?;
        let slot = self.fleet.load().slot(rank)?;
        let stores = self.index.stores(slot)?;
        let hashes = sighting.hashes();
        // An engine with larger blocks than ours tells of whole ones of its own only.
        let engine =
            self.trust(rank).engine_block_size.map_or(1, |engine| engine.tokens() / hashes.block_size().tokens());
        let of = hashes.len() / engine.max(1) * engine.max(1);
        let held = self.index.leading(hashes, slot, scratch);
        sighting.found((held, of), stores, told)
    }
}
