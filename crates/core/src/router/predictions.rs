//! Predicted caches of routed prompts: for workers without KV events, and for a short time also for
//! workers whose events have not arrived yet. With a remote index, both predictors cover every
//! worker. Whether a worker publishes events is known only from the reply of the index server.
//! Without a reply, no worker is assumed to publish events.

use std::sync::Arc;

use super::remote::OverlapSource;
use super::worker_feedback::RouterListener;
use crate::block::{BlockHashes, LocalHash};
use crate::fleet::{Fleet, FleetMember};
use crate::index::Overlaps;
use crate::predict::{EffectivePolicy, InFlightPrompt, PredictionLease, Predictor, RankPrediction};
use crate::worker::{BlockSize, WorkerRank};

/// Minimum difference between predicted and reported cached tokens that corrects a prediction.
/// Smaller ones can come from larger engine blocks or a recomputed last block.
const MIN_MISSING_TOKENS: u64 = 512;

/// Configured predictors.
#[derive(Clone, Default)]
pub struct PredictorSet {
    /// For ranks without KV events.
    pub without_events: Option<Arc<Predictor>>,
    /// For ranks with KV events, until the event arrives.
    pub beside_events: Option<Arc<Predictor>>,
    /// Whether both predictors cover every rank.
    pub covers_all_ranks: bool,
}

impl PredictorSet {
    /// Returns the predictors that cover a rank.
    fn predictors_of(&self, member: &FleetMember) -> impl Iterator<Item = &Arc<Predictor>> {
        let has_events = member.worker.event_source(member.rank.rank).is_some();
        let without_events = self
            .without_events
            .iter()
            .filter(move |_| !has_events || self.covers_all_ranks);
        without_events.chain(
            self.beside_events
                .iter()
                .filter(move |_| has_events || self.covers_all_ranks),
        )
    }

    /// Returns whether any predictor covers a rank.
    pub(super) fn covers(&self, member: &FleetMember) -> bool {
        self.predictors_of(member).next().is_some()
    }

    /// Opens the slot of a rank.
    pub fn open_rank(&self, member: &FleetMember) {
        self.predictors_of(member)
            .for_each(|predictor| open(predictor, member));
    }

    /// Applies a changed capacity. The predicted blocks of the rank are discarded, unless they
    /// expire by time alone.
    pub fn resize_rank(&self, member: &FleetMember) {
        let is_time_based = |prediction: &RankPrediction| {
            prediction.rank == member.rank
                && matches!(
                    prediction.policy,
                    EffectivePolicy::Ttl {
                        fallback: false,
                        ..
                    }
                )
        };
        self.predictors_of(member)
            .filter(|predictor| !predictor.stats().iter().any(is_time_based))
            .for_each(|predictor| open(predictor, member));
    }

    /// Closes the slot of a rank.
    pub fn close_rank(&self, member: &FleetMember) {
        self.predictors_of(member)
            .for_each(|predictor| predictor.close(member.slot));
    }

    /// Removes expired predictions.
    pub fn expire(&self) {
        self.all().for_each(|predictor| predictor.expire());
    }

    /// Returns the predictions, rank by rank.
    pub fn stats(&self) -> impl Iterator<Item = RankPrediction> {
        self.all().flat_map(|predictor| predictor.stats())
    }

    /// Raises the overlaps of a prompt to the predicted ones. `buffer` is scratch space.
    pub(super) fn raise_overlaps(
        &self,
        hashes: &BlockHashes,
        table: &mut Overlaps,
        buffer: &mut Overlaps,
        source: OverlapSource<'_>,
    ) {
        if let Some(predictor) = &self.without_events {
            predictor.raise(hashes, table, buffer, |slot| {
                source.counts_without_events(slot)
            });
        }
        if let Some(predictor) = &self.beside_events {
            predictor.raise(hashes, table, buffer, |slot| {
                source.counts_beside_events(slot)
            });
        }
    }

    /// Records prompts that another replica has routed. The end of their requests is not known
    /// here, so their blocks may be evicted before unused ones, but not before older ones.
    pub fn record_remote_route(&self, fleet: &Fleet, routed: RoutedPrompts) {
        let member = fleet.slot(routed.rank).and_then(|slot| fleet.member(slot));
        let Some(member) = member.filter(|member| member.worker.block_size == routed.block_size)
        else {
            return;
        };
        let hashes = |locals: Vec<LocalHash>| {
            let tokens = locals.len().saturating_mul(routed.block_size.tokens());
            BlockHashes::from_locals(tokens, routed.block_size, locals)
        };
        let prompts: Vec<BlockHashes> = routed.prompts.into_iter().map(hashes).collect();
        for predictor in self.predictors_of(member) {
            for hashes in &prompts {
                drop(predictor.record(member.slot, member.rank, hashes));
            }
        }
    }

    /// Records prompts that are sent to a rank, if its cache is predicted.
    pub(super) fn predict(
        &self,
        member: &FleetMember,
        prompts: &[BlockHashes],
    ) -> Option<Box<PromptPrediction>> {
        let of_prompts = |predictor: &Arc<Predictor>| {
            let send = |hashes| predictor.record_in_flight(member.slot, member.rank, hashes);
            prompts.iter().map(send).collect::<Vec<_>>()
        };
        let in_flight = self.predictors_of(member).flat_map(of_prompts).collect();
        self.covers(member).then(|| {
            Box::new(PromptPrediction {
                member: member.clone(),
                phase: PredictionPhase::InFlight(in_flight),
            })
        })
    }

    pub(super) fn has_predictors(&self) -> bool {
        self.all().next().is_some()
    }

    fn all(&self) -> impl Iterator<Item = &Arc<Predictor>> {
        self.without_events.iter().chain(&self.beside_events)
    }
}

fn open(predictor: &Predictor, member: &FleetMember) {
    let blocks = member.worker.capacity.total_kv_blocks;
    predictor.open(member.slot, member.rank, blocks);
}

/// Predicted cache of one request's prompts on one rank.
#[derive(Debug)]
pub struct PromptPrediction {
    member: FleetMember,
    phase: PredictionPhase,
}

#[derive(Debug)]
enum PredictionPhase {
    /// The prompts in their order, predictor by predictor. The response has not started, so the
    /// engine may still reject the request.
    InFlight(Vec<InFlightPrompt>),
    /// The engine has accepted the request. The first lease also covers the output.
    Confirmed(Vec<PredictionLease>),
}

impl PromptPrediction {
    /// Records that the engine accepted the request: its prompts count as cached there, and the
    /// listener is notified.
    pub(super) fn confirm(&mut self, prompts: &[BlockHashes], listener: &dyn RouterListener) {
        let PredictionPhase::InFlight(in_flight) = &mut self.phase else {
            return;
        };
        let in_flight = std::mem::take(in_flight);
        let leases = in_flight
            .into_iter()
            .zip(prompts.iter().cycle())
            .map(|(prompt, hashes)| prompt.confirm(hashes));
        self.phase = PredictionPhase::Confirmed(leases.collect());
        if prompts.iter().any(|hashes| !hashes.is_empty()) {
            listener.on_routed(&self.member, prompts);
        }
    }

    /// Records further output blocks.
    pub(super) fn add_output_blocks(&mut self, blocks: u64) {
        if let PredictionPhase::Confirmed(leases) = &mut self.phase
            && let Some(lease) = leases.first_mut()
        {
            lease.grow(blocks);
        }
    }

    /// Corrects the predicted cache by the number of cached tokens that the engine had. For several
    /// prompts, engines report only their sum.
    pub(super) fn correct_cached_tokens(&mut self, cached: u64) {
        if let PredictionPhase::Confirmed(leases) = &mut self.phase
            && let [lease] = leases.as_mut_slice()
        {
            let block = self.member.worker.block_size.tokens() as u64;
            let min_missing = (MIN_MISSING_TOKENS / block).max(2);
            lease.correct_cached_blocks((cached / block) as usize, min_missing as usize);
        }
    }

    /// Removes the blocks that were recorded for this request alone. Returns the number of output
    /// blocks.
    pub(super) fn revoke(self, prompts: &[BlockHashes]) -> u64 {
        match self.phase {
            PredictionPhase::InFlight(_) => 0,
            PredictionPhase::Confirmed(leases) => leases
                .into_iter()
                .zip(prompts.iter().cycle())
                .map(|(lease, hashes)| lease.revoke(hashes))
                .sum(),
        }
    }
}

/// Predicted cache of one request's prompts, on each rank that computes them.
#[derive(Debug, Default)]
pub struct RequestPredictions {
    /// On the rank that answers.
    pub(super) answering: Option<Box<PromptPrediction>>,
    /// On a remote prefill rank.
    pub(super) prefilling: Option<Box<PromptPrediction>>,
}

impl RequestPredictions {
    /// Corrects the predicted cache of the rank that computed the prompt. `cached` is the number of
    /// tokens that it had cached.
    pub(super) fn correct_cached_tokens(&mut self, cached: u64) {
        if self.prefilling.is_none()
            && let Some(prediction) = &mut self.answering
        {
            prediction.correct_cached_tokens(cached);
        }
    }

    /// Records one more output block on the rank that generates it.
    pub fn add_output_block(&mut self) {
        if let Some(prediction) = &mut self.answering {
            prediction.add_output_blocks(1);
        }
    }
}

/// Prompts that were sent to a rank whose cache is predicted, for the predictors of other replicas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoutedPrompts {
    /// Worker rank.
    pub rank: WorkerRank,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Complete blocks of each prompt.
    pub prompts: Vec<Vec<LocalHash>>,
}

impl RoutedPrompts {
    /// Creates the record of prompts sent to a member.
    pub fn new(member: &FleetMember, prompts: &[BlockHashes]) -> Self {
        let prompts = prompts
            .iter()
            .map(|hashes| hashes.locals().to_vec())
            .collect();
        Self {
            rank: member.rank,
            block_size: member.worker.block_size,
            prompts,
        }
    }
}
