//! Eligible candidates and the choice among them, compared with the reference selector.

use std::collections::BTreeSet;

use rand::SeedableRng;
use rand::rngs::StdRng;
use serde::Deserialize;
use serde_json::Value;
use warmroute_core::fleet::{Fleet, FleetMember};
use warmroute_core::index::TierBlocks;
use warmroute_core::load::{ActiveLoad, RankTiming};
use warmroute_core::policy::{
    Candidate, Constraints, EligibilityError, PolicyInput, PolicySettings, RouterOverrides,
    Weights, WorkerAvailability, WorkerPin, choose, costs, eligible_members, taint_preference,
};
use warmroute_core::worker::{
    BlockSize, DpRank, RankRange, Worker, WorkerEndpoint, WorkerId, WorkerRole,
};

use super::frame::{CheckReport, run_cases};

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectionCase {
    description: String,
    worker_type: String,
    workers: Vec<WorkerCase>,
    config: SelectionConfig,
    request_override: Option<RouterOverrides>,
    isl_tokens: u64,
    block_size: u32,
    track_prefill_tokens: bool,
    tracked_request_blocks: Option<u64>,
    shared_cache_hit_ranges: Option<Vec<[u32; 2]>>,
    preferred_taints: Vec<(String, f64)>,
    required_taints: Vec<String>,
    allowed_worker_ids: Option<Vec<u64>>,
    overloaded_worker_ids: Option<Vec<u64>>,
    pinned_worker: Option<(u64, u32)>,
    computed: ComputedCosts,
    result: SelectionOutcome,
    /// Result of the reference's other policy. This router follows the reference selector.
    #[serde(rename = "production_default_policy")]
    _production: Value,
    #[serde(rename = "production_default_policy_with_conditional_disagg")]
    _production_with_disagg: Value,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct WorkerCase {
    worker_id: u64,
    dp_start: u32,
    dp_size: u32,
    taints: BTreeSet<String>,
    loads: Vec<RankLoad>,
    overlap: RankOverlap,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RankLoad {
    dp_rank: u32,
    active_decode_blocks: u64,
    active_prefill_tokens: u64,
    active_requests: u64,
    additional_active_blocks: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RankOverlap {
    device: Vec<(u32, u32)>,
    host_pinned_extension: Vec<(u32, u32)>,
    disk_extension: Vec<(u32, u32)>,
    external_extension: Vec<(u32, u32)>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectionConfig {
    overlap_score_credit: f64,
    overlap_score_credit_decay: f64,
    prefill_load_scale: f64,
    decode_active_request_weight: f64,
    host_cache_hit_weight: f64,
    disk_cache_hit_weight: f64,
    shared_cache_multiplier: Option<f64>,
    shared_cache_type: String,
    router_temperature: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ComputedCosts {
    base_logit_3dp: Option<Vec<RankLogit>>,
    effective_overlap: Option<Vec<EffectiveOverlap>>,
    final_cost_full_precision: Option<Vec<FullCost>>,
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(deny_unknown_fields)]
struct EffectiveOverlap {
    worker_id: u64,
    dp_rank: u32,
    effective_blocks: f64,
    cached_tokens: u64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RankLogit {
    worker_id: u64,
    dp_rank: u32,
    logit: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FullCost {
    worker_id: u64,
    dp_rank: u32,
    cost: f64,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectionOutcome {
    chosen_workers: Option<Vec<SelectionRank>>,
    required_blocks: Option<u64>,
    max_raw_cached_tokens: Option<u64>,
    tie: Option<bool>,
    selected: Option<SelectedRank>,
    error: Option<String>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectionRank {
    worker_id: u64,
    dp_rank: u32,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SelectedRank {
    cached_tokens: u64,
    effective_overlap_blocks: f64,
    potential_decode_blocks: u64,
    selected_raw_cached_tokens: u64,
}

impl WorkerCase {
    fn overlap_of(&self, dp_rank: u32) -> TierBlocks {
        let of = |pairs: &[(u32, u32)]| {
            pairs
                .iter()
                .find(|(rank, _)| *rank == dp_rank)
                .map_or(0, |pair| pair.1)
        };
        TierBlocks {
            device: of(&self.overlap.device),
            host: of(&self.overlap.host_pinned_extension),
            disk: of(&self.overlap.disk_extension),
            external: of(&self.overlap.external_extension),
        }
    }
}

impl SelectionCase {
    fn policy(&self) -> PolicySettings {
        let config = &self.config;
        let shared = match config.shared_cache_type.as_str() {
            "none" => 0.0,
            "hicache" => 0.5,
            other => panic!("shared cache {other}"),
        };
        let configured = Weights {
            overlap_score_credit: config.overlap_score_credit,
            overlap_score_credit_decay: config.overlap_score_credit_decay,
            prefill_load_scale: config.prefill_load_scale,
            decode_active_request_weight: config.decode_active_request_weight,
            host_cache_hit_weight: config.host_cache_hit_weight,
            disk_cache_hit_weight: config.disk_cache_hit_weight,
            shared_cache_multiplier: config.shared_cache_multiplier.unwrap_or(shared),
            router_temperature: config.router_temperature,
        };
        let overrides = self.request_override.unwrap_or_default();
        assert_eq!(
            (configured.validate(), overrides.validate()),
            (Ok(()), Ok(())),
            "{}",
            self.description
        );
        overrides.apply(&PolicySettings::linear(configured))
    }

    fn role(&self) -> WorkerRole {
        match self.worker_type.as_str() {
            "aggregated" => WorkerRole::Aggregated,
            "prefill" => WorkerRole::Prefill,
            "decode" => WorkerRole::Decode,
            other => panic!("worker type {other}"),
        }
    }

    fn question(&self) -> PolicyInput {
        let shared = self
            .shared_cache_hit_ranges
            .iter()
            .flatten()
            .map(|[start, end]| *start..*end)
            .collect();
        PolicyInput {
            track_prefill: self.track_prefill_tokens,
            role: self.role(),
            tracked_blocks: self.tracked_request_blocks.unwrap_or(0),
            shared,
            ..PolicyInput::new(self.isl_tokens, BlockSize::new(self.block_size).unwrap())
        }
    }

    fn fleet(&self) -> Fleet {
        let worker = |(nth, case): (usize, &WorkerCase)| Worker {
            role: self.role(),
            ranks: RankRange {
                start: case.dp_start,
                size: case.dp_size.try_into().unwrap(),
            },
            taints: case.taints.clone(),
            ..Worker::new(
                WorkerId(case.worker_id),
                WorkerEndpoint(([127, 0, 0, 1], 8000 + nth as u16).into()),
                "m".into(),
                BlockSize::new(self.block_size).unwrap(),
            )
        };
        Fleet::empty()
            .reconcile(self.workers.iter().enumerate().map(worker).collect())
            .fleet
    }

    fn constraints(&self) -> Constraints {
        let pin = |(worker, rank)| WorkerPin {
            worker: WorkerId(worker),
            rank: Some(DpRank(rank)),
        };
        Constraints {
            role: self.role(),
            pin: self.pinned_worker.map(pin),
            allowed: self
                .allowed_worker_ids
                .as_ref()
                .map(|ids| ids.iter().copied().map(WorkerId).collect()),
            required_taints: self.required_taints.iter().cloned().collect(),
            preferred_taints: self.preferred_taints.iter().cloned().collect(),
            ..Constraints::default()
        }
    }

    fn eligible<'f>(&self, fleet: &'f Fleet) -> Result<Vec<&'f FleetMember>, EligibilityError> {
        let overloaded = |id| {
            self.overloaded_worker_ids
                .iter()
                .flatten()
                .any(|overloaded| WorkerId(*overloaded) == id)
        };
        let members: Vec<_> = fleet.members().collect();
        eligible_members(&members, &self.constraints(), |member| {
            if overloaded(member.rank.worker) {
                WorkerAvailability::Overloaded
            } else {
                WorkerAvailability::Ready
            }
        })
    }

    fn candidates(&self, members: &[&FleetMember]) -> Vec<Candidate> {
        members
            .iter()
            .map(|member| self.candidate(member))
            .collect()
    }

    fn candidate(&self, member: &FleetMember) -> Candidate {
        let case = self
            .workers
            .iter()
            .find(|case| WorkerId(case.worker_id) == member.rank.worker)
            .unwrap();
        let DpRank(dp_rank) = member.rank.rank;
        let load = case.loads.iter().find(|load| load.dp_rank == dp_rank);
        Candidate {
            freshness_credit: 1.0,
            overlap: case.overlap_of(dp_rank),
            running_blocks: 0,
            timing: RankTiming::default(),
            free_blocks: 0,
            eviction_value: 1.0,
            total_blocks: None,
            load: load.map_or(ActiveLoad::default(), |load| ActiveLoad {
                active_blocks: load.active_decode_blocks,
                active_prefill_tokens: load.active_prefill_tokens,
                active_requests: load.active_requests,
            }),
            additional_blocks: load.map_or(0, |load| load.additional_active_blocks),
            taint_preference: taint_preference(&self.constraints(), &member.worker),
        }
    }
}

/// Returns the reference's reason why no worker is eligible. This router's reasons for unknown pins
/// are more specific.
fn reference_reason(why: EligibilityError) -> String {
    match why {
        EligibilityError::PinnedWorkerOverloaded(worker) => {
            format!("pinned worker {worker} is overloaded")
        }
        EligibilityError::AllEligibleWorkersOverloaded => {
            "all eligible workers are overloaded".to_owned()
        }
        EligibilityError::PinnedWorkerNotAllowed(worker) => {
            format!("pinned worker {worker} is not allowed")
        }
        EligibilityError::NoEndpoints
        | EligibilityError::PinUnknown(_)
        | EligibilityError::PinRankUnknown { .. }
        | EligibilityError::PinRankMissing { .. } => {
            "no endpoints available to route work".to_owned()
        }
    }
}

fn check_costs(case: &SelectionCase, members: &[&FleetMember]) {
    let mut rng = StdRng::seed_from_u64(1);
    for expected in case.computed.final_cost_full_precision.iter().flatten() {
        let name = (WorkerId(expected.worker_id), DpRank(expected.dp_rank));
        let alone = members
            .iter()
            .find(|one| (one.rank.worker, one.rank.rank) == name)
            .unwrap();
        let choice = choose(
            &case.question(),
            &[case.candidate(alone)],
            &case.policy(),
            &mut rng,
        )
        .unwrap();
        let near =
            (choice.cost.total - expected.cost).abs() <= 1e-12 * expected.cost.abs().max(1.0);
        assert!(
            near,
            "{}: {} against {}",
            case.description, choice.cost.total, expected.cost
        );
    }
}

/// Compares the effective overlaps. Empty ranks equal absent ones.
fn check_overlaps(case: &SelectionCase) {
    let Some(expected) = &case.computed.effective_overlap else {
        return;
    };
    let is_nonzero = |overlap: &&EffectiveOverlap| overlap.effective_blocks > 0.0;
    let weights = case.policy().weights;
    let mut ours = Vec::new();
    for worker in &case.workers {
        let tiers = &worker.overlap;
        let known = [
            &tiers.device,
            &tiers.host_pinned_extension,
            &tiers.disk_extension,
            &tiers.external_extension,
        ];
        let ranks: BTreeSet<u32> = known.into_iter().flatten().map(|(rank, _)| *rank).collect();
        for dp_rank in ranks {
            let overlap = worker.overlap_of(dp_rank);
            let effective_blocks = overlap
                .weighted_total(weights.host_cache_hit_weight, weights.disk_cache_hit_weight);
            let cached_tokens = (effective_blocks * f64::from(case.block_size)).round() as u64;
            ours.push(EffectiveOverlap {
                worker_id: worker.worker_id,
                dp_rank,
                effective_blocks,
                cached_tokens,
            });
        }
    }
    let ours = ours.iter().filter(is_nonzero);
    let expected = expected.iter().filter(is_nonzero);
    assert!(
        ours.clone().eq(expected.clone()),
        "{ours:?} against {expected:?}"
    );
}

/// Compares the cost of every candidate among all candidates, without taints.
fn check_logits(case: &SelectionCase, members: &[&FleetMember]) {
    let costs = costs(&case.question(), &case.candidates(members), &case.policy());
    let named = |logit: &&RankLogit, one: &FleetMember| {
        (logit.worker_id, logit.dp_rank) == (one.rank.worker.0, one.rank.rank.0)
    };
    let logits = case.computed.base_logit_3dp.as_deref().unwrap_or_default();
    assert_eq!(logits.len(), members.len());
    for (member, cost) in members.iter().zip(costs) {
        let logit = logits.iter().find(|logit| named(logit, member)).unwrap();
        let ours: f64 = cost.terms.summands().map(|term| term.value).sum();
        assert!(
            (ours - logit.logit).abs() <= 0.000_501,
            "{ours} against {}",
            logit.logit
        );
    }
}

fn check_choice(case: &SelectionCase, members: &[&FleetMember]) {
    let name = &case.description;
    let question = case.question();
    let policy = case.policy();
    let candidates = case.candidates(members);
    let mut rng = StdRng::seed_from_u64(2);
    let mut seen = BTreeSet::new();
    for _ in 0..300 {
        let choice = choose(&question, &candidates, &policy, &mut rng).unwrap();
        let rank = members[choice.index].rank;
        seen.insert((rank.worker.0, rank.rank.0));
        if policy.weights.router_temperature == 0.0 {
            assert_eq!(Some(choice.ties > 1), case.result.tie, "{name}");
        }
        assert_eq!(
            Some(choice.required_blocks),
            case.result.required_blocks,
            "{name}"
        );
        assert_eq!(
            Some(choice.best_raw_cached_tokens),
            case.result.max_raw_cached_tokens,
            "{name}"
        );
        if let Some(selected) = &case.result.selected {
            assert_eq!(choice.cached_tokens, selected.cached_tokens, "{name}");
            assert_eq!(
                choice.raw_cached_tokens, selected.selected_raw_cached_tokens,
                "{name}"
            );
            assert_eq!(
                choice.effective_overlap_blocks, selected.effective_overlap_blocks,
                "{name}"
            );
            assert_eq!(
                choice.potential_decode_blocks, selected.potential_decode_blocks,
                "{name}"
            );
        }
    }
    let chosen = case.result.chosen_workers.iter().flatten();
    let chosen: BTreeSet<_> = chosen.map(|rank| (rank.worker_id, rank.dp_rank)).collect();
    assert_eq!(seen, chosen, "{name}");
}

pub(crate) fn run(text: &str) -> CheckReport {
    run_cases(
        text,
        &[],
        |case: &SelectionCase| case.description.clone(),
        |case, _| check(&case),
    )
}

fn check(case: &SelectionCase) {
    let fleet = case.fleet();
    check_overlaps(case);
    check_costs(case, &fleet.members().collect::<Vec<_>>());
    match case.eligible(&fleet) {
        Ok(members) => {
            assert_eq!(case.result.error, None);
            check_logits(case, &members);
            check_choice(case, &members);
        }
        Err(why) => {
            assert_eq!(
                Some(reference_reason(why).as_str()),
                case.result.error.as_deref()
            );
            assert!(case.result.chosen_workers.is_none());
        }
    }
}
