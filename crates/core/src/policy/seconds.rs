//! Policy `seconds`: the time that a choice costs all requests, in seconds. The terms are the time
//! to the first token and the decode time of this request, the delay of the requests that run on
//! the rank, the delay of those that will arrive before its prefill backlog is done, and the prefill
//! that later requests repeat because their blocks were evicted. Quantities are counted or learned.
//! The only setting of its own weighs the time to the first token against other time.

use serde::{Deserialize, Serialize};

use super::candidate::{Candidate, PolicyInput};
use super::cost::{CostModel, CostTerms, PolicyTerms};
use super::weights::Weights;
use crate::load::{DecodeBatch, LatencyCoefficients, PrefillWork};
use crate::worker::WorkerRole;

/// Maximum share of the fleet's time that prefill is assumed to take. The delay of later requests
/// would be infinite at 1.
const MAX_PREFILL_UTILIZATION: f64 = 0.9;

/// Share of a prefill by which running requests are delayed. The learned time of a prefill includes
/// the decode steps that the engine runs between its chunks, in which they advance. Measured with
/// the judge: 0.7 costs 1 % of TPOT, and 1 costs 0.4 points of goodput on conversations.
const DELAY_SHARE: f64 = 0.9;

/// Ratio of the request rate of a rank with a prefill backlog to the mean rate of all ranks. It is
/// below 1 because most requests are routed to ranks with a shorter backlog. Measured with the
/// judge: 1 costs 0.8 points of goodput on conversations.
const BACKLOG_ARRIVAL_SHARE: f64 = 0.25;

/// Weight of the share of used blocks in `evicting_share`. It decides between ranks whose costs
/// differ by less than about 2 %, which is less than the error of the learned times.
const USED_BLOCK_WEIGHT: f64 = 0.1;

/// Settings of the policy.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SecondsSettings {
    /// Weight of a second before the first token, relative to any other second. With 1, the mean
    /// end-to-end latency alone counts. With the default, the judge measures no mean time that
    /// exceeds the one of the best other policy by more than about 3 %.
    pub first_token_weight: f64,
}

impl Default for SecondsSettings {
    fn default() -> Self {
        Self {
            first_token_weight: 30.0,
        }
    }
}

impl SecondsSettings {
    /// Checks the range. Returns the name of the invalid setting and the problem.
    pub fn validate(&self) -> Result<(), (&'static str, String)> {
        let value = self.first_token_weight;
        if (0.1..=100.0).contains(&value) {
            return Ok(());
        }
        Err((
            "first_token_weight",
            format!("is {value}, but must be from 0.1 to 100"),
        ))
    }
}

/// Phases that the chosen rank runs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum PricedPhase {
    Both,
    Prefill,
    Decode,
}

const TERMS: PolicyTerms = PolicyTerms {
    policy: "seconds",
    terms: &[
        // Prompt tokens that are not computed again.
        "cached_tokens",
        // Prefill that is booked on the rank and not done, without fixed parts, plus the overdue
        // time of its oldest request, in seconds.
        "queue",
        // Wait for KV blocks that running requests hold, in seconds.
        "kv_wait",
        // Prefill of this request, in seconds.
        "prefill",
        // KV transfer from the prefill worker, in seconds.
        "transfer",
        // Time to the first token, in seconds, times its weight.
        "first_token",
        // Decode time of this request, in seconds.
        "decode",
        // Delay of the requests that run on the rank, in seconds.
        "running_delay",
        // Delay of the first tokens of the requests that arrive before the prefill backlog is done, in
        // seconds, times the weight of the first token.
        "arrival_delay",
        // Expected delay caused by later requests that compute evicted blocks again, in seconds,
        // times the weight of the first token plus 1. These requests may run on any rank, so no prefill
        // factor applies.
        "eviction",
    ],
    summands: 5,
};

/// Cost function of the policy `seconds`.
pub(super) struct SecondsModel<'a> {
    input: &'a PolicyInput,
    weights: &'a Weights,
    latency: LatencyCoefficients,
    phase: PricedPhase,
    first_token_weight: f64,
    block_size: f64,
    prompt_tokens: f64,
    /// Engines always compute the last token.
    max_cached_tokens: f64,
    output_tokens: f64,
    /// Cost per second of prefill and per second of backlog: requests per second that arrive at a rank
    /// with the prefill factor 1 during its backlog, times the weight of their first tokens, divided by
    /// 1 minus the mean prefill utilization of the ranks.
    arrival_weight: f64,
    /// Expected cost per second of prefill whose blocks evict others.
    eviction_weight: f64,
}

/// Prefill of a request on a rank with the factor 1.
struct PrefillPrice {
    cached_tokens: f64,
    /// Time of the prefill, without the wait in the queue.
    seconds: f64,
    /// Time for which the prefill occupies the engine.
    compute_seconds: f64,
}

impl<'a> SecondsModel<'a> {
    pub(super) fn new(
        input: &'a PolicyInput,
        candidates: usize,
        settings: SecondsSettings,
        weights: &'a Weights,
    ) -> Self {
        let estimate = &input.estimate;
        let phase = match input.role {
            WorkerRole::Prefill => PricedPhase::Prefill,
            WorkerRole::Decode if !input.track_prefill => PricedPhase::Decode,
            _ => PricedPhase::Both,
        };
        let prefill_ranks = input.prefill_ranks.unwrap_or(candidates).max(1) as f64;
        // Prefills may run on other ranks, but every request decodes on one of the candidates, where
        // it waits for a prefill that is running.
        let arrival_ranks = match phase {
            PricedPhase::Prefill => prefill_ranks,
            PricedPhase::Both | PricedPhase::Decode => candidates.max(1) as f64,
        };
        let utilization = (estimate.prefill_rate / prefill_ranks).min(MAX_PREFILL_UTILIZATION);
        let prompt_tokens = input.prompt_tokens as f64;
        let backlog_arrivals = BACKLOG_ARRIVAL_SHARE * estimate.request_rate / arrival_ranks;
        Self {
            input,
            weights,
            latency: estimate.coefficients,
            phase,
            first_token_weight: settings.first_token_weight,
            block_size: input.block_size.tokens() as f64,
            prompt_tokens,
            max_cached_tokens: (prompt_tokens - 1.0).max(0.0),
            output_tokens: input.output_tokens.max(1.0),
            arrival_weight: settings.first_token_weight * backlog_arrivals / (1.0 - utilization),
            // A recomputed prefill delays the first token of its request, and is assumed to delay one
            // running request.
            eviction_weight: input.recomputed_share * (settings.first_token_weight + 1.0),
        }
    }

    /// Returns the prefill of this request. Tokens that only a slower tier holds are loaded instead
    /// of computed, which saves the share of the tier's weight and all attention.
    #[inline(always)]
    fn prefill(&self, candidate: &Candidate) -> PrefillPrice {
        if !self.input.track_prefill {
            return PrefillPrice {
                cached_tokens: self.prompt_tokens,
                seconds: 0.0,
                compute_seconds: 0.0,
            };
        }
        let device = candidate.device_blocks() * self.block_size;
        let mut cached_tokens = device;
        let mut loaded_tokens = 0.0;
        if candidate.has_lower_tiers() || !self.input.shared.is_empty() {
            let lower = self.lower_tiers(candidate);
            cached_tokens += lower.tokens;
            loaded_tokens = lower.cost_tokens;
        }
        let cached_tokens = cached_tokens.min(self.max_cached_tokens);
        let work = PrefillWork::new(self.prompt_tokens, cached_tokens);
        let loading = self.latency.prefill_token * loaded_tokens;
        PrefillPrice {
            cached_tokens,
            seconds: self.latency.prefill_seconds(work) + loading,
            compute_seconds: self.latency.compute_seconds(work) + loading,
        }
    }

    /// Returns the time until running requests have released the blocks that the prompt and half of
    /// the answer need. Answers are assumed to have exponentially distributed durations, so a running
    /// request takes the mean duration on average, however long it has run already.
    #[inline(always)]
    fn kv_wait(&self, candidate: &Candidate, answer_seconds: f64) -> f64 {
        let active = candidate.load.active_blocks as f64;
        let Some(total) = candidate.total_blocks.filter(|_| active > 0.0) else {
            return 0.0;
        };
        let answer = 0.5 * self.output_tokens / self.block_size;
        let needed = active + candidate.additional_blocks as f64 + answer;
        let missing = needed - total as f64;
        if missing <= 0.0 {
            return 0.0;
        }
        let requests = candidate.load.active_requests.max(1) as f64;
        let ending = (missing * requests / active).min(requests).ceil();
        // Approximates `1 / n + 1 / (n - 1) + ..`, the mean times between the ends of `n` requests.
        let answers = ((requests + 0.5) / (requests - ending + 0.5)).ln();
        answer_seconds * answers
    }

    /// Returns the weighted mean of two shares: new blocks of the prompt that evict others, times the
    /// value of those, and used blocks of the rank. The second lets free blocks decide between almost
    /// equal costs.
    #[inline(always)]
    fn evicting_share(&self, candidate: &Candidate) -> f64 {
        let Some(total) = candidate.total_blocks else {
            return 1.0;
        };
        let free = candidate.free_blocks as f64;
        let new = self.prompt_tokens / self.block_size - candidate.device_blocks();
        let evicting = if new > free {
            candidate.eviction_value * (1.0 - free / new)
        } else {
            0.0
        };
        let used = 1.0 - free / (total as f64).max(1.0);
        (1.0 - USED_BLOCK_WEIGHT) * evicting + USED_BLOCK_WEIGHT * used
    }

    /// Returns the seconds of the KV transfer. Blocks that the rank has cached are not transferred.
    #[inline(always)]
    fn transfer_seconds(&self, candidate: &Candidate) -> f64 {
        let cached = candidate.device_blocks() * self.block_size;
        self.input.estimate.transfer_token * (self.prompt_tokens - cached).max(0.0)
    }

    #[cold]
    fn lower_tiers(&self, candidate: &Candidate) -> LowerTiers {
        let overlap = candidate.expected_overlap();
        let freshness = candidate.freshness_credit;
        let host = f64::from(overlap.host) * freshness;
        let disk = (f64::from(overlap.disk) + f64::from(overlap.external)) * freshness;
        let shared = self.input.shared_beyond(overlap.total()) as f64;
        let weights = self.weights;
        let cost_blocks = host * (1.0 - weights.host_cache_hit_weight)
            + disk * (1.0 - weights.disk_cache_hit_weight)
            + shared * (1.0 - weights.shared_cache_multiplier);
        LowerTiers {
            tokens: (host + disk + shared) * self.block_size,
            cost_tokens: cost_blocks * self.block_size,
        }
    }
}

/// Tokens that only slower tiers hold.
struct LowerTiers {
    tokens: f64,
    /// Prefill tokens that cost as much as loading them.
    cost_tokens: f64,
}

impl CostModel for SecondsModel<'_> {
    #[inline(always)]
    fn terms(&self, _index: usize, candidate: &Candidate) -> CostTerms {
        let timing = &candidate.timing;
        let latency = &self.latency;
        let requests = candidate.load.active_requests as f64;
        let PrefillPrice {
            cached_tokens,
            seconds,
            compute_seconds,
        } = self.prefill(candidate);
        let prefill = timing.prefill_factor * seconds;
        let compute = timing.prefill_factor * compute_seconds;
        let own = DecodeBatch {
            requests: 1.0,
            context_tokens: self.prompt_tokens,
        };
        let joined = DecodeBatch {
            requests: requests + 1.0,
            context_tokens: timing.context_tokens + self.prompt_tokens,
        };
        let steps = self.output_tokens * timing.decode_factor;
        // On average, a running request decodes during half of this answer. Each of these steps is
        // longer by the times of this request and of the tokens in its context.
        let decode_delay = 0.5 * steps * (latency.step_seconds(own) - latency.decode_step);
        let decode = match self.phase {
            PricedPhase::Prefill => 0.0,
            PricedPhase::Both | PricedPhase::Decode => steps * latency.step_seconds(joined),
        };
        let [mut queue, mut kv_wait, mut transfer] = [0.0; 3];
        let [mut first_token, mut arrival_delay, mut eviction] = [0.0; 3];
        // A prefill worker holds blocks only until the KV transfer ends, so `queue` already includes
        // the wait for blocks.
        if self.phase != PricedPhase::Prefill {
            kv_wait = self.kv_wait(candidate, decode);
        }
        if self.phase != PricedPhase::Decode {
            queue = latency.queue_seconds(timing);
            first_token = self.first_token_weight * (queue + kv_wait + prefill);
            // The delay of each later request is proportional to the prefill factor, and the request
            // rate of the rank is assumed to be inversely proportional to it. The two cancel, so only
            // the backlog has the factor. Requests that arrive during this prefill wait for half of it
            // on average.
            let delay_rate = compute_seconds * self.arrival_weight;
            arrival_delay = delay_rate * (queue + 0.5 * compute);
            eviction = self.eviction_weight * self.evicting_share(candidate) * compute_seconds;
        }
        let running_delay = match self.phase {
            PricedPhase::Both => requests * (DELAY_SHARE * compute + decode_delay),
            PricedPhase::Prefill => f64::from(timing.prefills) * compute,
            PricedPhase::Decode => {
                transfer = self.transfer_seconds(candidate);
                first_token = self.first_token_weight * (transfer + kv_wait);
                requests * decode_delay
            }
        };
        CostTerms::new(
            &TERMS,
            [
                cached_tokens,
                queue,
                kv_wait,
                prefill,
                transfer,
                first_token,
                decode,
                running_delay,
                arrival_delay,
                eviction,
            ],
        )
    }
}
