//! What routed prompts are taken to have left behind: in the caches of workers that say nothing, and, for a moment, in
//! those of workers whose events are still on their way. Where the index is kept elsewhere both are kept for everybody: who
//! says nothing is known only with its answer, and without one nobody does.

use std::sync::Arc;

use super::Router;
use super::remote::Known;
use crate::block::{BlockHashes, LocalHash};
use crate::fleet::Member;
use crate::index::Overlaps;
use crate::predict::{EffectivePolicy, Lease, Predictor, RankPrediction};
use crate::worker::{BlockSize, WorkerRank};

/// Both kinds of prediction, as far as they are wanted.
#[derive(Clone, Default)]
pub struct Predictions {
    /// For worker ranks without KV events.
    pub without_events: Option<Arc<Predictor>>,
    /// For the others, until the event comes.
    pub beside_events: Option<Arc<Predictor>>,
    /// Whether both are kept for every worker rank.
    pub everywhere: bool,
}

impl Predictions {
    /// Who predicts for a worker rank.
    fn of(&self, member: &Member) -> impl Iterator<Item = &Arc<Predictor>> {
        let is_silent = member.worker.event_source(member.rank.rank).is_none();
        let silent = self.without_events.iter().filter(move |_| is_silent || self.everywhere);
        silent.chain(self.beside_events.iter().filter(move |_| !is_silent || self.everywhere))
    }

    /// Whether anybody predicts for a worker rank.
    pub(super) fn any_of(&self, member: &Member) -> bool {
        self.of(member).next().is_some()
    }

    /// Begins to predict for a worker rank.
    pub fn open(&self, member: &Member) {
        for predictor in self.of(member) {
            predictor.open(member.slot, member.rank, member.worker.capacity.total_kv_blocks);
        }
    }

    /// A worker rank holds more or less than it did: what is believed to be left there begins anew, unless that leaves by
    /// time alone.
    pub fn refit(&self, member: &Member) {
        let by_time = |found: &RankPrediction| {
            found.rank == member.rank && matches!(found.policy, EffectivePolicy::Ttl { fallback: false, .. })
        };
        for predictor in self.of(member).filter(|predictor| !predictor.stats().ranks.iter().any(by_time)) {
            predictor.open(member.slot, member.rank, member.worker.capacity.total_kv_blocks);
        }
    }

    /// Forgets a worker rank.
    pub fn close(&self, member: &Member) {
        self.of(member).for_each(|predictor| predictor.close(member.slot));
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
    pub(super) fn raise(
        &self,
        hashes: &BlockHashes,
        (table, scratch): (&mut Overlaps, &mut Overlaps),
        known: Known<'_>,
    ) {
        if let Some(predictor) = &self.without_events {
            predictor.overlaps(hashes, scratch);
            table.raise_where(scratch, |slot| known.is_silent(slot));
        }
        if let Some(predictor) = &self.beside_events {
            predictor.overlaps(hashes, scratch);
            table.raise_where(scratch, |slot| known.is_telling(slot));
        }
    }

    /// Prompts go to this worker rank. Predictor by predictor, and of each in the order of the prompts; the first lease is
    /// the one that grows with the answer.
    pub(super) fn record(&self, member: &Member, prompts: &[BlockHashes]) -> Vec<Lease> {
        let of_prompts = |predictor: &Arc<Predictor>| {
            let record = |hashes| predictor.record(member.slot, member.rank, hashes);
            prompts.iter().map(record).collect::<Vec<_>>()
        };
        self.of(member).flat_map(of_prompts).collect()
    }

    pub(super) fn any(&self) -> bool {
        self.all().next().is_some()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Predictor>> {
        self.without_events.iter().chain(&self.beside_events)
    }
}

/// Prompts that go to a worker rank of which something is predicted, for other routers that are to predict the same.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Routed {
    /// Where they go.
    pub rank: WorkerRank,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// The complete blocks of each.
    pub prompts: Vec<Vec<LocalHash>>,
}

pub(super) type HearRouted = Box<dyn Fn(&Member, &[BlockHashes]) + Send + Sync>;

impl Routed {
    /// These prompts go there.
    pub fn of(member: &Member, prompts: &[BlockHashes]) -> Self {
        let prompts = prompts.iter().map(|hashes| hashes.locals().to_vec()).collect();
        Self { rank: member.rank, block_size: member.worker.block_size, prompts }
    }
}

impl Router {
    /// From now on `hear` is told of what is predicted, as it happens; it must be quick. Who called first is the one who
    /// hears.
    pub fn on_routed(&self, hear: impl Fn(&Member, &[BlockHashes]) + Send + Sync + 'static) {
        self.hear_routed.set(Box::new(hear)).ok();
    }

    /// Prompts go to this worker rank, so they will be cached there, as far as that is predicted.
    pub(super) fn expect(&self, member: &Member, prompts: &[BlockHashes]) -> Vec<Lease> {
        let leases = self.predictions.record(member, prompts);
        let is_predicted = || !leases.is_empty() && prompts.iter().any(|hashes| !hashes.is_empty());
        if let Some(hear) = self.hear_routed.get().filter(|_| is_predicted()) {
            hear(member, prompts);
        }
        leases
    }

    /// Another router has routed prompts. What their requests hold is not known here: their blocks may leave before others
    /// that nobody uses any more, though not before older ones.
    pub fn routed_elsewhere(&self, routed: Routed) {
        let fleet = self.fleet();
        let member = fleet.slot(routed.rank).and_then(|slot| fleet.member(slot));
        let Some(member) = member.filter(|member| member.worker.block_size == routed.block_size) else { return };
        let hashes = |locals: Vec<LocalHash>| {
            let tokens = locals.len().saturating_mul(routed.block_size.tokens());
            BlockHashes::chain(tokens, routed.block_size, locals)
        };
        let prompts: Vec<BlockHashes> = routed.prompts.into_iter().map(hashes).collect();
        drop(self.predictions.record(member, &prompts));
    }
}
