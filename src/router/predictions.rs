//! What routed prompts are taken to have left behind: in the caches of workers that say nothing, and, for a moment, in
//! those of workers whose events are still on their way.

use std::sync::Arc;

use crate::block::BlockHashes;
use crate::fleet::Member;
use crate::index::Overlaps;
use crate::predict::{Lease, Predictor, RankPrediction};

/// Both kinds of prediction, as far as they are wanted.
#[derive(Clone, Default)]
pub struct Predictions {
    /// For worker ranks without KV events.
    pub without_events: Option<Arc<Predictor>>,
    /// For the others, until the event comes.
    pub beside_events: Option<Arc<Predictor>>,
}

impl Predictions {
    /// Who predicts for a worker rank.
    pub fn of(&self, member: &Member) -> Option<&Arc<Predictor>> {
        match member.worker.event_source(member.rank.rank) {
            None => self.without_events.as_ref(),
            Some(_) => self.beside_events.as_ref(),
        }
    }

    /// Begins to predict for a worker rank.
    pub fn open(&self, member: &Member) {
        if let Some(predictor) = self.of(member) {
            predictor.open(member.slot, member.rank, member.worker.capacity.total_kv_blocks);
        }
    }

    /// Forgets a worker rank.
    pub fn close(&self, member: &Member) {
        if let Some(predictor) = self.of(member) {
            predictor.close(member.slot);
        }
    }

    /// Lets what is due expire.
    pub fn expire(&self) {
        self.all().for_each(|predictor| predictor.expire());
    }

    /// What is predicted, rank by rank.
    pub fn stats(&self) -> impl Iterator<Item = RankPrediction> {
        self.all().flat_map(|predictor| predictor.stats().ranks)
    }

    /// Raises what is known of a prompt to what is predicted.
    pub(super) fn raise(&self, hashes: &BlockHashes, table: &mut Overlaps, scratch: &mut Overlaps) {
        for predictor in self.all() {
            predictor.overlaps(hashes, scratch);
            table.raise(scratch);
        }
    }

    /// A prompt goes to this worker rank.
    pub(super) fn record(&self, member: &Member, hashes: &BlockHashes) -> Option<Lease> {
        Some(self.of(member)?.record(member.slot, member.rank, hashes))
    }

    pub(super) fn any(&self) -> bool {
        self.all().next().is_some()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Predictor>> {
        self.without_events.iter().chain(&self.beside_events)
    }
}
