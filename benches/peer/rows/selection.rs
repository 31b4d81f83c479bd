//! The choice of a worker alone, with every cost term in use.

use std::collections::{HashMap, HashSet};

use dynamo_kv_router::protocols::{
    SharedCacheHits, WorkerConfigLike, WorkerId as PeerId, WorkerWithDpRank,
};
use dynamo_kv_router::scheduling::{OverlapSignals, ScheduleMode};
use dynamo_kv_router::{
    DefaultWorkerSelector, KvRouterConfig, SchedulingRequest, WorkerLoadProjection,
    WorkerSelectionInput, WorkerSelector,
};
use rand::SeedableRng;
use rand::rngs::SmallRng;
use warmroute_core::index::TierBlocks;
use warmroute_core::load::{ActiveLoad, RankTiming};
use warmroute_core::policy::{Candidate, PolicyInput, PolicySettings, Weights, choose};

use crate::PeerBench;
use crate::rows::StaticMeasure;
use crate::trace::{BLOCK, mix};
use warmroute_testbed::comparison::{ComparisonTable, measure_cpu};

const GOAL: Option<f64> = Some(0.3);

const ROWS: [(u32, StaticMeasure); 4] = [
    (
        8,
        StaticMeasure::new("choose alone, 8 ranks, all cost terms live", "µs", GOAL),
    ),
    (
        64,
        StaticMeasure::new("choose alone, 64 ranks, all cost terms live", "µs", GOAL),
    ),
    (
        512,
        StaticMeasure::new("choose alone, 512 ranks, all cost terms live", "µs", GOAL),
    ),
    (
        2_048,
        StaticMeasure::new("choose alone, 2,048 ranks, all cost terms live", "µs", GOAL),
    ),
];

const PROMPT: u64 = 2_048;

/// Measures the rows of this module.
pub fn run(bench: &PeerBench, table: &mut ComparisonTable) {
    for (ranks, row) in ROWS {
        if bench.args.wants(row.name) {
            measure_row(bench, table, row, ranks);
        }
    }
}

/// Inputs of one rank. No two ranks have the same cost.
struct RankInputs {
    overlap: TierBlocks,
    load: ActiveLoad,
    additional: u64,
}

fn rank_inputs(rank: u32) -> RankInputs {
    let draw = mix(u64::from(rank));
    let device = (draw % 96) as u32;
    let overlap = TierBlocks {
        device,
        host: (draw >> 8) as u32 % 16,
        disk: (draw >> 16) as u32 % 16,
        external: 0,
    };
    let load = ActiveLoad {
        active_blocks: (draw >> 24) % 4_096,
        active_prefill_tokens: (draw >> 40) % 32_768,
        active_requests: (draw >> 56) % 64,
    };
    RankInputs {
        overlap,
        load,
        additional: (128 - u64::from(device)).min(draw >> 32 & 127),
    }
}

#[expect(
    clippy::single_range_in_vec_init,
    reason = "one range, not its numbers"
)]
fn shared() -> Vec<std::ops::Range<u32>> {
    vec![16..112]
}

fn weights() -> Weights {
    Weights {
        overlap_score_credit_decay: 0.5,
        decode_active_request_weight: 0.5,
        shared_cache_multiplier: 0.5,
        ..Weights::default()
    }
}

fn measure_row(bench: &PeerBench, table: &mut ComparisonTable, row: StaticMeasure, ranks: u32) {
    let weights = weights();
    let policy = PolicySettings::linear(weights);
    let question = PolicyInput {
        shared: shared(),
        ..PolicyInput::new(PROMPT, BLOCK)
    };
    let inputs: Vec<_> = (0..ranks).map(rank_inputs).collect();
    let mut candidates = Vec::with_capacity(inputs.len());
    let mut random = SmallRng::seed_from_u64(7);
    // The peer looks up the inputs of each worker inside the measurement, so the conversion of the
    // inputs is measured here, too.
    let mut ours = || {
        candidates.clear();
        candidates.extend(std::hint::black_box(&inputs).iter().map(candidate));
        choose(
            std::hint::black_box(&question),
            &candidates,
            &policy,
            &mut random,
        )
    };

    let workers: HashMap<PeerId, SelectorConfig> = (0..u64::from(ranks))
        .map(|id| (id, SelectorConfig::default()))
        .collect();
    let request = request(ranks, &weights);
    let selector = DefaultWorkerSelector::new(Some(config(&weights)), "prefill");
    let theirs = || {
        let workers = std::hint::black_box(&workers);
        let request = std::hint::black_box(&request);
        selector.select_worker(WorkerSelectionInput::configured(
            workers,
            request,
            request.eligibility(),
            16,
        ))
    };

    let chosen = ours().expect("a worker is chosen");
    let selected = theirs().expect("a worker is selected");
    assert_eq!(chosen.ties, 1, "no two ranks have the same cost");
    assert_eq!(
        chosen.index as u64, selected.worker.worker_id,
        "{}: worker",
        row.name
    );
    assert_eq!(
        chosen.effective_overlap_blocks, selected.effective_overlap_blocks,
        "{}: overlap",
        row.name
    );
    assert_eq!(
        Some(chosen.best_raw_cached_tokens as usize),
        selected.max_raw_cached_tokens,
        "{}: best cached tokens",
        row.name
    );
    assert_eq!(
        chosen.cached_tokens as usize, selected.cached_tokens,
        "{}: tokens",
        row.name
    );

    let times = 200_000 / ranks;
    let per_choice = f64::from(times) * 1e3;
    let theirs =
        || measure_cpu(|| (0..times).for_each(|_| _ = std::hint::black_box(theirs()))) / per_choice;
    let ours =
        || measure_cpu(|| (0..times).for_each(|_| _ = std::hint::black_box(ours()))) / per_choice;
    table.compare(row, bench.args.rounds() * 3, theirs, ours);
}

fn candidate(rank_inputs: &RankInputs) -> Candidate {
    let RankInputs {
        overlap,
        load,
        additional,
    } = *rank_inputs;
    Candidate {
        overlap,
        freshness_credit: 1.0,
        running_blocks: 0,
        load,
        free_blocks: 0,
        eviction_value: 1.0,
        total_blocks: None,
        timing: RankTiming::default(),
        additional_blocks: additional,
        taint_preference: 0.0,
    }
}

fn config(weights: &Weights) -> KvRouterConfig {
    KvRouterConfig {
        overlap_score_credit: weights.overlap_score_credit,
        overlap_score_credit_decay: weights.overlap_score_credit_decay,
        prefill_load_scale: weights.prefill_load_scale,
        decode_active_request_weight: weights.decode_active_request_weight,
        host_cache_hit_weight: weights.host_cache_hit_weight,
        disk_cache_hit_weight: weights.disk_cache_hit_weight,
        shared_cache_multiplier: Some(weights.shared_cache_multiplier),
        router_temperature: 0.0,
        ..KvRouterConfig::default()
    }
}

fn request(ranks: u32, weights: &Weights) -> SchedulingRequest {
    let mut overlap = OverlapSignals::default();
    let mut worker_loads = rustc_hash::FxHashMap::default();
    for rank in 0..ranks {
        let worker = WorkerWithDpRank::new(u64::from(rank), 0);
        let RankInputs {
            overlap: tiers,
            load,
            additional,
        } = rank_inputs(rank);
        let effective =
            tiers.weighted_total(weights.host_cache_hit_weight, weights.disk_cache_hit_weight);
        overlap
            .tier_overlap_blocks
            .device
            .insert(worker, tiers.device as usize);
        overlap
            .tier_overlap_blocks
            .host_pinned
            .insert(worker, tiers.host as usize);
        overlap
            .tier_overlap_blocks
            .disk
            .insert(worker, tiers.disk as usize);
        overlap.effective_overlap_blocks.insert(worker, effective);
        overlap
            .effective_cached_tokens
            .insert(worker, (effective * 16.0).round() as usize);
        let projection = WorkerLoadProjection {
            active_prefill_tokens: load.active_prefill_tokens as usize,
            active_decode_blocks: load.active_blocks as usize,
            active_requests: load.active_requests as usize,
            additional_active_blocks: additional as usize,
        };
        worker_loads.insert(worker, projection);
    }
    SchedulingRequest {
        mode: ScheduleMode::Tracked {
            request_id: "bench".into(),
        },
        token_seq: None,
        isl_tokens: PROMPT as usize,
        lora_name: None,
        expected_output_tokens: Some(256),
        affinity_target: None,
        pinned_worker: None,
        allowed_worker_ids: None,
        routing_constraints: Default::default(),
        router_config_override: None,
        track_prefill_tokens: true,
        priority_jump: 0.0,
        strict_priority: 0,
        policy_class: None,
        session_context: None,
        overlap,
        kv_transfer_candidates: None,
        retain_kv_transfer_chain: false,
        shared_cache_hits: Some(SharedCacheHits::from_ranges(shared())),
        worker_loads,
        resp_tx: None,
    }
}

#[derive(Default)]
struct SelectorConfig {
    taints: HashSet<String>,
}

impl WorkerConfigLike for SelectorConfig {
    fn data_parallel_start_rank(&self) -> u32 {
        0
    }

    fn data_parallel_size(&self) -> u32 {
        1
    }

    fn max_num_batched_tokens(&self) -> Option<u64> {
        None
    }

    fn total_kv_blocks(&self) -> Option<u64> {
        Some(131_072)
    }

    fn taints(&self) -> &HashSet<String> {
        &self.taints
    }
}
