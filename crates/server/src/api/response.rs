//! Conversions from library types to proto messages.

use std::ops::Range;

use warmroute_core::block::{BlockHashes, EngineHash, StorageTier};
use warmroute_core::fleet::Fleet;
use warmroute_core::index::{GroupNeed, KvEvent, StoredBlock, TierBlocks};
use warmroute_core::load::RankLoad;
use warmroute_core::policy::{Choice, Cost, CostTerm};
use warmroute_core::router::{Mode, RankEndpoint, Route, SharedBlocks, WorkerEstimate};
use warmroute_core::worker::{BlockSize, ModelName, Worker, WorkerRank, WorkerRole};

use crate::proto::router as pb;
use crate::proto::router::event::Change;

pub(super) fn rank_to_proto(rank: WorkerRank) -> pb::WorkerRank {
    pb::WorkerRank {
        worker_id: rank.worker.0,
        dp_rank: rank.rank.0,
    }
}

/// Converts the prompts of a request, with token ids if `tokens` has any.
pub(super) fn prompts_to_proto(
    prompts: &[BlockHashes],
    tokens: Vec<Vec<u32>>,
) -> Vec<pb::HashedPrompt> {
    let mut tokens = tokens.into_iter();
    let prompt = |hashes: &BlockHashes| pb::HashedPrompt {
        tokens: hashes.tokens() as u64,
        local_hashes: hashes.locals().iter().map(|hash| hash.0).collect(),
        sequence_hashes: hashes.sequences().iter().map(|hash| hash.0).collect(),
        token_ids: tokens.next().unwrap_or_default(),
    };
    prompts.iter().map(prompt).collect()
}

/// Converts a route and the outcome of its booking.
pub(super) fn route_to_proto(
    route: &Route,
    prompts: Vec<pb::HashedPrompt>,
    booked: pb::BookingOutcome,
) -> pb::RouteResponse {
    let to_placement = |to, overlap, cached_tokens, choice| {
        placement_to_proto(to, overlap, cached_tokens, choice, route.block_size)
    };
    pb::RouteResponse {
        decode: Some(to_placement(
            route.to,
            route.overlap,
            route.predicted_cached_tokens,
            &route.choice,
        )),
        prefill: route.prefill().map(|prefill| {
            to_placement(
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

fn placement_to_proto(
    to: RankEndpoint,
    overlap: TierBlocks,
    cached_tokens: u64,
    choice: &Choice,
    block_size: BlockSize,
) -> pb::Placement {
    let blocks = tiers_to_proto(overlap);
    let size = block_size.tokens() as u64;
    let tokens = pb::Tiers {
        device: blocks.device * size,
        host: blocks.host * size,
        disk: blocks.disk * size,
        external: blocks.external * size,
    };
    pb::Placement {
        worker: Some(rank_to_proto(to.rank)),
        endpoint: to.endpoint.to_string(),
        overlap_blocks: Some(blocks),
        overlap_tokens: Some(tokens),
        cached_tokens,
        cost: Some(cost_to_proto(&choice.cost)),
        ties: u32::try_from(choice.ties).unwrap_or(u32::MAX),
        potential_decode_blocks: choice.potential_decode_blocks,
    }
}

fn tiers_to_proto(blocks: TierBlocks) -> pb::Tiers {
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

fn cost_to_proto(cost: &Cost) -> pb::Cost {
    let linear = |name| linear_term(cost, name).unwrap_or_default();
    let term = |term: CostTerm| pb::CostTerm {
        name: term.name.to_owned(),
        value: term.value,
    };
    pb::Cost {
        prefill_blocks: linear("prefill_blocks"),
        credit_decay: linear("credit_decay"),
        device_credit: linear("device_credit"),
        host_credit: linear("host_credit"),
        disk_credit: linear("disk_credit"),
        shared_credit: linear("shared_credit"),
        prefill_cost: linear("prefill"),
        decode_cost: linear("decode"),
        request_cost: linear("requests"),
        taint_factor: cost.taint_factor,
        total: cost.total,
        policy: cost.terms.policy().to_owned(),
        terms: cost.terms.summands().map(term).collect(),
    }
}

/// Returns a term of the policy `linear`, if it computed the cost.
fn linear_term(cost: &Cost, name: &str) -> Option<f64> {
    cost.terms
        .get(name)
        .filter(|_| cost.terms.policy() == "linear")
}

pub(super) fn overlap_score_to_proto(estimate: &WorkerEstimate) -> pb::OverlapScore {
    let credits = [
        "device_credit",
        "host_credit",
        "disk_credit",
        "shared_credit",
    ];
    let credit: Option<f64> = credits
        .into_iter()
        .map(|name| linear_term(&estimate.cost, name))
        .sum();
    pb::OverlapScore {
        worker: Some(rank_to_proto(estimate.rank)),
        blocks: Some(tiers_to_proto(estimate.overlap)),
        shared_blocks_beyond_device: estimate.shared_beyond_device,
        effective_blocks: estimate.effective_blocks,
        credit_blocks: credit.unwrap_or(estimate.effective_blocks),
        cached_tokens: estimate.cached_tokens,
    }
}

/// Converts the query result of the shared cache.
pub(super) fn shared_cache_to_proto(blocks: &SharedBlocks, enabled: bool) -> pb::SharedCacheHits {
    let range = |range: &Range<u32>| pb::BlockRange {
        start: range.start,
        end: range.end,
    };
    let error = match blocks {
        SharedBlocks::Failed(reason) => *reason,
        SharedBlocks::Held(_) | SharedBlocks::NotQueried => "",
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

pub(super) fn potential_load_to_proto(estimate: &WorkerEstimate) -> pb::PotentialLoad {
    pb::PotentialLoad {
        worker: Some(rank_to_proto(estimate.rank)),
        active_prefill_tokens: estimate.load.active_prefill_tokens,
        active_decode_blocks: estimate.load.active_blocks,
        active_requests: estimate.load.active_requests,
        potential_prefill_tokens: estimate.potential_prefill_tokens,
        potential_decode_blocks: estimate.potential_decode_blocks,
    }
}

/// Converts the current load, without a request.
pub(super) fn load_to_proto(load: &RankLoad) -> pb::PotentialLoad {
    pb::PotentialLoad {
        worker: Some(rank_to_proto(load.rank)),
        active_prefill_tokens: load.active_prefill_tokens,
        active_decode_blocks: load.active_blocks,
        active_requests: load.active_requests,
        potential_prefill_tokens: load.active_prefill_tokens,
        potential_decode_blocks: load.active_blocks,
    }
}

/// Converts the workers of one model, or of all models.
pub(super) fn fleet_to_proto(fleet: &Fleet, model: Option<&ModelName>) -> pb::WatchFleetResponse {
    let workers = fleet
        .workers()
        .filter(|worker| model.is_none_or(|model| worker.model == *model));
    pb::WatchFleetResponse {
        generation: fleet.generation(),
        workers: workers.map(|worker| worker_to_proto(worker)).collect(),
    }
}

fn worker_to_proto(worker: &Worker) -> pb::Worker {
    let role = match worker.role {
        WorkerRole::Aggregated => pb::Role::Aggregated,
        WorkerRole::Prefill => pb::Role::Prefill,
        WorkerRole::Decode => pb::Role::Decode,
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

impl From<KvEvent> for pb::Event {
    fn from(event: KvEvent) -> Self {
        let change = match event {
            KvEvent::Stored {
                parent,
                blocks,
                tier,
            } => Change::Stored(pb::Stored {
                parent: parent.map(|parent| parent.0),
                blocks: blocks.iter().map(stored_block_to_proto).collect(),
                tier: tier_to_proto(tier).into(),
            }),
            KvEvent::Removed { blocks, tier } => Change::Removed(pb::Removed {
                blocks: hashes_to_proto(&blocks),
                tier: tier_to_proto(tier).into(),
            }),
            KvEvent::GroupStored {
                group,
                need,
                blocks,
            } => {
                let need = match need {
                    GroupNeed::Trailing { blocks, stride } => Some(pb::GroupNeed {
                        blocks,
                        stride: stride.get(),
                    }),
                    GroupNeed::Unknown => None,
                };
                Change::GroupStored(pb::GroupStored {
                    group,
                    need,
                    blocks: hashes_to_proto(&blocks),
                })
            }
            KvEvent::GroupRemoved { group, blocks } => Change::GroupRemoved(pb::GroupRemoved {
                group,
                blocks: hashes_to_proto(&blocks),
            }),
            KvEvent::Cleared => Change::Cleared(pb::Cleared {}),
        };
        Self {
            change: Some(change),
        }
    }
}

fn stored_block_to_proto(block: &StoredBlock) -> pb::StoredBlock {
    pb::StoredBlock {
        engine_hash: block.engine.0,
        local_hash: block.local.0,
    }
}

fn hashes_to_proto(blocks: &[EngineHash]) -> Vec<u64> {
    blocks.iter().map(|block| block.0).collect()
}

fn tier_to_proto(tier: StorageTier) -> pb::Tier {
    match tier {
        StorageTier::Device => pb::Tier::Device,
        StorageTier::HostPinned => pb::Tier::Host,
        StorageTier::Disk => pb::Tier::Disk,
        StorageTier::External => pb::Tier::External,
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZeroU32;

    use warmroute_core::block::LocalHash;

    use super::*;

    #[test]
    fn events_are_converted_to_messages() {
        let block = EngineHash(2);
        let stored = KvEvent::Stored {
            parent: Some(EngineHash(u64::MAX)),
            blocks: vec![StoredBlock {
                engine: block,
                local: LocalHash(3),
            }],
            tier: StorageTier::HostPinned,
        };
        let group_stored = |need| KvEvent::GroupStored {
            group: 1,
            need,
            blocks: vec![block],
        };
        let trailing = GroupNeed::Trailing {
            blocks: 4,
            stride: NonZeroU32::MIN,
        };
        let group_message = |need| {
            Change::GroupStored(pb::GroupStored {
                group: 1,
                need,
                blocks: vec![2],
            })
        };
        let removed = KvEvent::GroupRemoved {
            group: 1,
            blocks: vec![block],
        };
        let cases = [
            (
                stored,
                Change::Stored(pb::Stored {
                    parent: Some(u64::MAX),
                    blocks: vec![pb::StoredBlock {
                        engine_hash: 2,
                        local_hash: 3,
                    }],
                    tier: pb::Tier::Host.into(),
                }),
            ),
            (
                group_stored(trailing),
                group_message(Some(pb::GroupNeed {
                    blocks: 4,
                    stride: 1,
                })),
            ),
            (group_stored(GroupNeed::Unknown), group_message(None)),
            (
                removed,
                Change::GroupRemoved(pb::GroupRemoved {
                    group: 1,
                    blocks: vec![2],
                }),
            ),
        ];
        for (event, change) in cases {
            assert_eq!(pb::Event::from(event).change, Some(change));
        }
    }

    #[test]
    fn removals_are_converted_to_messages() {
        let cleared = pb::Event::from(KvEvent::Cleared).change;
        assert_eq!(cleared, Some(Change::Cleared(pb::Cleared {})));
        let block = EngineHash(2);
        for (tier, message) in [
            (StorageTier::Device, pb::Tier::Device),
            (StorageTier::Disk, pb::Tier::Disk),
            (StorageTier::External, pb::Tier::External),
        ] {
            let removed = KvEvent::Removed {
                blocks: vec![block],
                tier,
            };
            let change = Change::Removed(pb::Removed {
                blocks: vec![2],
                tier: message.into(),
            });
            assert_eq!(pb::Event::from(removed).change, Some(change));
        }
    }
}
