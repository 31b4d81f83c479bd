//! For callers who route themselves or only want to look: what every worker rank holds of a prompt and would be busy with,
//! and the booking of a request that somebody else has sent somewhere. By the same arithmetic as a decision of ours.

use super::pools::serving;
use super::predictions::BookedPredictions;
use super::prepared::Prepared;
use super::question::RouteRequest;
use super::{RouteError, Router};
use crate::block::tracking::unshared;
use crate::fleet::Member;
use crate::health::{Change, Outcome, Probe};
use crate::index::TierBlocks;
use crate::load::{Additional, Booking, Load, Sequences, Until};
use crate::schedule::{Candidate, Cost, Question, costs, preference};
use crate::worker::{Role, WorkerId, WorkerRank};

/// One worker rank and one prompt.
#[derive(Clone, Debug)]
pub struct Surveyed {
    /// Who.
    pub rank: WorkerRank,
    /// What it holds of the prompt.
    pub overlap: TierBlocks,
    /// Blocks of the shared cache beyond those on its device.
    pub shared_beyond_device: u64,
    /// What it holds in device terms.
    pub effective_blocks: f64,
    /// Prompt tokens it would not compute.
    pub cached_tokens: u64,
    /// What it is busy with.
    pub load: Load,
    /// Prefill tokens with this request.
    pub potential_prefill_tokens: u64,
    /// Blocks with this request.
    pub potential_decode_blocks: u64,
    /// What it would cost if all of these were candidates.
    pub cost: Cost,
}

/// How a request that somebody else routed counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Elsewhere {
    /// Whether another worker does the prefill.
    pub prefilled: bool,
    /// Prompt tokens that need not be computed, where the caller knows.
    pub cached_tokens: Option<u64>,
}

/// A request that somebody else routed, not booked yet.
#[derive(Debug)]
pub struct Foreign {
    /// What it will occupy.
    pub booking: Booking,
    prepared: Prepared,
    member: Member,
}

impl Router {
    /// What every worker rank that serves the model holds of a prompt and would be busy with; by worker and rank.
    pub fn survey(&self, request: RouteRequest) -> Result<Vec<Surveyed>, RouteError> {
        let mut prepared = self.prepare(request);
        let fleet = self.fleet_of(&mut prepared);
        let mut members = serving(&fleet, &prepared.request)?;
        members.sort_by_key(|member| member.rank);
        let (block_size, tracks) = (
            members[0].worker.block_size,
            prepared.settings.tracking.active_blocks,
        );
        let question = Question {
            track_prefill: prepared.track_prefill,
            tracked_blocks: if tracks { prepared.blocks.complete } else { 0 },
            shared: prepared.request.shared.ranges().to_vec(),
            ..Question::new(prepared.request.prompt.tokens(), block_size)
        };
        let candidates: Vec<_> = self.load.look(|view| {
            let additional = match tracks {
                true => prepared.blocks.additional(view, prepared.reuse),
                false => Additional::default(),
            };
            let candidate = |member: &&Member| {
                let (overlap, trust_credit) = prepared.overlap_and_credit(member);
                Candidate {
                    overlap,
                    trust_credit,
                    load: view.load(member.slot, member.rank).unwrap_or_default(),
                    additional_blocks: additional.of(member.slot),
                    preference: preference(&prepared.request.constraints, &member.worker),
                }
            };
            members.iter().map(candidate).collect()
        });
        let costs = costs(&question, &candidates, &prepared.weights);
        let surveyed = members.iter().zip(&candidates).zip(costs);
        Ok(surveyed
            .map(|((member, candidate), cost)| {
                surveyed_of(&prepared, &question, member, candidate, cost)
            })
            .collect())
    }

    /// What a request that somebody else sent to a worker rank will occupy there; `None` where that does not serve the
    /// model.
    pub fn foreign(
        &self,
        request: RouteRequest,
        on: WorkerRank,
        how: Elsewhere,
    ) -> Option<Foreign> {
        let mut prepared = self.prepare(request);
        let fleet = self.fleet_of(&mut prepared);
        let slot = fleet.slot(on)?;
        if prepared
            .request
            .model
            .as_ref()
            .is_some_and(|model| !fleet.serving(model).contains(&slot))
        {
            return None;
        }
        let member = fleet.member(slot)?.clone();
        let prefills_only = member.worker.role == Role::Prefill;
        let blocks = &prepared.blocks;
        let sequences = match (
            prefills_only || !prepared.settings.tracking.active_blocks,
            prepared.reuse,
        ) {
            (true, _) => Sequences::none(),
            (false, true) => blocks.sequences.clone(),
            (false, false) => unshared(blocks.complete as usize, &mut *self.random.lock()).into(),
        };
        let mut booking = Booking {
            slot: member.slot,
            rank: member.rank,
            sequences,
            prompt_tokens: prepared.request.prompt.tokens(),
            cached_tokens: how
                .cached_tokens
                .unwrap_or_else(|| prepared.cached_tokens(&member, false)),
            track_prefill: prepared.track_prefill && !how.prefilled,
            prefill_time: None,
            until: if prefills_only {
                Until::FirstToken
            } else {
                Until::End
            },
        };
        if prepared.settings.tracking.prefill_durations {
            self.durations.estimate_one(&member, &mut booking);
        }
        Some(Foreign {
            booking,
            prepared,
            member,
        })
    }

    /// Its prompt will be cached where it went, as far as that is predicted.
    pub fn expect_cached(&self, foreign: &Foreign) -> BookedPredictions {
        let blocks = foreign.prepared.request.prompt.blocks();
        let mut answering = self.expect(&foreign.member, blocks);
        answering
            .iter_mut()
            .for_each(|prediction| self.confirm(prediction, blocks));
        BookedPredictions {
            answering,
            prefilling: None,
        }
    }

    /// These workers answered a request with that status, as a caller says; says what that changed, for the log. Probes of
    /// others are given back.
    pub fn heard(
        &self,
        workers: &[WorkerId],
        mut probes: Vec<Probe>,
        status: u16,
    ) -> Vec<(WorkerId, Change)> {
        let (now, outcome) = (self.load.now(), Outcome::of_status(status));
        workers
            .iter()
            .filter_map(|worker| self.verdict(*worker, outcome, &mut probes, now))
            .collect()
    }
}

fn surveyed_of(
    prepared: &Prepared,
    question: &Question,
    member: &Member,
    candidate: &Candidate,
    cost: Cost,
) -> Surveyed {
    let Candidate { overlap, load, .. } = *candidate;
    let weights = &prepared.weights;
    let cached_tokens = prepared.cached_tokens(member, false);
    let added = if question.track_prefill {
        question.prompt_tokens.saturating_sub(cached_tokens)
    } else {
        0
    };
    Surveyed {
        rank: member.rank,
        overlap,
        shared_beyond_device: question.shared_beyond(overlap.device),
        effective_blocks: overlap
            .effective(weights.host_cache_hit_weight, weights.disk_cache_hit_weight),
        cached_tokens: prepared.cached_tokens(member, true),
        load,
        potential_prefill_tokens: load.active_prefill_tokens.saturating_add(added),
        potential_decode_blocks: load.active_blocks + candidate.additional_blocks,
        cost,
    }
}
