//! From values of the library to messages.

use std::ops::Range;

use super::pb;
use crate::block::BlockHashes;
use crate::fleet::Fleet;
use crate::index::TierBlocks;
use crate::load::RankLoad;
use crate::router::{Destination, Mode, Route, SharedBlocks, Surveyed};
use crate::schedule::{Choice, Cost};
use crate::worker::{BlockSize, ModelName, Role, Worker, WorkerRank};

pub(super) fn rank(rank: WorkerRank) -> pb::WorkerRank {
    pb::WorkerRank {
        worker_id: rank.worker.0,
        dp_rank: rank.rank.0,
    }
}

/// The prompts of a request, with their tokens where these are told.
pub(super) fn prompts(prompts: &[BlockHashes], tokens: Vec<Vec<u32>>) -> Vec<pb::HashedPrompt> {
    let mut tokens = tokens.into_iter();
    let prompt = |hashes: &BlockHashes| pb::HashedPrompt {
        tokens: hashes.tokens() as u64,
        local_hashes: hashes.locals().iter().map(|hash| hash.0).collect(),
        sequence_hashes: hashes.sequences().iter().map(|hash| hash.0).collect(),
        token_ids: tokens.next().unwrap_or_default(),
    };
    prompts.iter().map(prompt).collect()
}

/// A route and what became of its booking.
pub(super) fn route(
    route: &Route,
    prompts: Vec<pb::HashedPrompt>,
    booked: pb::Booked,
) -> pb::RouteResponse {
    let place = |to, overlap, cached_tokens, choice| {
        placement(to, overlap, cached_tokens, choice, route.block_size)
    };
    pb::RouteResponse {
        decode: Some(place(
            route.to,
            route.overlap,
            route.predicted_cached_tokens,
            &route.choice,
        )),
        prefill: route.prefill().map(|prefill| {
            place(
                prefill.to,
                prefill.overlap,
                prefill.cached_tokens,
                &prefill.choice,
            )
        }),
        mode: match route.mode {
            Mode::Exact => pb::Mode::Exact,
            Mode::Partial => pb::Mode::Partial,
            Mode::Approximate => pb::Mode::Approximate,
            Mode::LoadOnly => pb::Mode::LoadOnly,
            Mode::Passthrough => pb::Mode::Unspecified,
        }
        .into(),
        reason: route
            .reason
            .map(|reason| reason.as_str().to_owned())
            .unwrap_or_default(),
        phases: route.phases.as_str().to_owned(),
        model: route.model.as_str().to_owned(),
        block_size: route.block_size.0.get(),
        prompt_tokens: route.prompt_tokens,
        predicted_cached_tokens: route.computed_by().cached_tokens,
        candidates: u32::try_from(route.candidates).unwrap_or(u32::MAX),
        prompts,
        booked: booked.into(),
    }
}

fn placement(
    to: Destination,
    overlap: TierBlocks,
    cached_tokens: u64,
    choice: &Choice,
    block_size: BlockSize,
) -> pb::Placement {
    let blocks = tiers(overlap);
    let size = block_size.tokens() as u64;
    let tokens = pb::Tiers {
        device: blocks.device * size,
        host: blocks.host * size,
        disk: blocks.disk * size,
        external: blocks.external * size,
    };
    pb::Placement {
        worker: Some(rank(to.rank)),
        endpoint: to.endpoint.to_string(),
        overlap_blocks: Some(blocks),
        overlap_tokens: Some(tokens),
        cached_tokens,
        cost: Some(cost(&choice.cost)),
        ties: u32::try_from(choice.ties).unwrap_or(u32::MAX),
        potential_decode_blocks: choice.potential_decode_blocks,
    }
}

fn tiers(blocks: TierBlocks) -> pb::Tiers {
    let TierBlocks {
        device,
        host,
        disk,
        external,
    } = blocks;
    pb::Tiers {
        device: device.into(),
        host: host.into(),
        disk: disk.into(),
        external: external.into(),
    }
}

fn cost(cost: &Cost) -> pb::Cost {
    pb::Cost {
        prefill_blocks: cost.prefill_blocks,
        credit_decay: cost.credit_decay,
        device_credit: cost.device_credit,
        host_credit: cost.host_credit,
        disk_credit: cost.disk_credit,
        shared_credit: cost.shared_credit,
        prefill_cost: cost.prefill_cost,
        decode_cost: cost.decode_cost,
        request_cost: cost.request_cost,
        taint_factor: cost.taint_factor,
        total: cost.total,
    }
}

pub(super) fn overlap_score(surveyed: &Surveyed) -> pb::OverlapScore {
    let cost = &surveyed.cost;
    pb::OverlapScore {
        worker: Some(rank(surveyed.rank)),
        blocks: Some(tiers(surveyed.overlap)),
        shared_blocks_beyond_device: surveyed.shared_beyond_device,
        effective_blocks: surveyed.effective_blocks,
        credit_blocks: cost.device_credit
            + cost.host_credit
            + cost.disk_credit
            + cost.shared_credit,
        cached_tokens: surveyed.cached_tokens,
    }
}

/// The blocks of a prompt in the shared cache.
pub(super) fn shared_cache(blocks: &SharedBlocks, enabled: bool) -> pb::SharedCacheHits {
    let range = |range: &Range<u32>| pb::BlockRange {
        start: range.start,
        end: range.end,
    };
    let error = match blocks {
        SharedBlocks::Failed(reason) => *reason,
        SharedBlocks::Held(_) | SharedBlocks::NotAsked => "",
    };
    pb::SharedCacheHits {
        enabled,
        total_hit_blocks: blocks
            .ranges()
            .iter()
            .map(|range| u64::from(range.end - range.start))
            .sum(),
        ranges: blocks.ranges().iter().map(range).collect(),
        error: error.to_owned(),
    }
}

pub(super) fn potential_load(surveyed: &Surveyed) -> pb::PotentialLoad {
    pb::PotentialLoad {
        worker: Some(rank(surveyed.rank)),
        active_prefill_tokens: surveyed.load.active_prefill_tokens,
        active_decode_blocks: surveyed.load.active_blocks,
        active_requests: surveyed.load.active_requests,
        potential_prefill_tokens: surveyed.potential_prefill_tokens,
        potential_decode_blocks: surveyed.potential_decode_blocks,
    }
}

/// The load as it is, without a request.
pub(super) fn load(load: &RankLoad) -> pb::PotentialLoad {
    pb::PotentialLoad {
        worker: Some(rank(load.rank)),
        active_prefill_tokens: load.active_prefill_tokens,
        active_decode_blocks: load.active_blocks,
        active_requests: load.active_requests,
        potential_prefill_tokens: load.active_prefill_tokens,
        potential_decode_blocks: load.active_blocks,
    }
}

/// The workers that serve a model, or all of them.
pub(super) fn fleet(fleet: &Fleet, model: Option<&ModelName>) -> pb::WatchFleetResponse {
    let wanted = fleet
        .workers()
        .filter(|worker| model.is_none_or(|model| worker.model == *model));
    pb::WatchFleetResponse {
        generation: fleet.generation(),
        workers: wanted.map(|found| worker(found)).collect(),
    }
}

fn worker(worker: &Worker) -> pb::Worker {
    let role = match worker.role {
        Role::Aggregated => pb::Role::Aggregated,
        Role::Prefill => pb::Role::Prefill,
        Role::Decode => pb::Role::Decode,
    };
    pb::Worker {
        id: worker.id.0,
        endpoint: worker.endpoint.to_string(),
        model: worker.model.as_str().to_owned(),
        role: role.into(),
        block_size: worker.block_size.0.get(),
        first_dp_rank: worker.ranks.start,
        dp_ranks: worker.ranks.size.get(),
        taints: worker.taints.iter().cloned().collect(),
        adapters: worker.adapters.iter().cloned().collect(),
        topology: worker.topology.clone().into_iter().collect(),
        max_num_batched_tokens: worker.capacity.max_num_batched_tokens,
        total_kv_blocks: worker.capacity.total_kv_blocks,
    }
}
