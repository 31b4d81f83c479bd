//! The choice: which candidate is cheapest for a request. A pure function of the question, the candidates and the
//! weights; randomness is passed in. What the cost of one candidate is, is in `cost`; here is only what makes a choice out
//! of many costs: the smallest, with exact ties broken uniformly, or a sample when a temperature is set.

mod cost;
mod eligible;
mod overload;
mod overrides;
mod pins;
mod subset;
mod unheard;
mod weights;

use std::ops::Range;

use rand::{Rng, RngExt};

pub use cost::Cost;
use cost::Scale;
pub use eligible::{
    Constraints, Excluded, Ineligible, PlaceUnknown, Standing, eligible, preference, verdicts,
};
pub use overload::{Occupancy, Overload, Overloaded, Thresholds};
pub use overrides::Overrides;
pub use pins::{NamedWorkers, Pin};
pub use subset::Subset;
pub use unheard::Unheard;
pub use weights::Weights;

use crate::index::TierBlocks;
use crate::load::Load;
use crate::worker::{BlockSize, Role};

/// What is asked, the same for all candidates.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// Length of the prompt.
    pub prompt_tokens: u64,
    /// Tokens per block.
    pub block_size: BlockSize,
    /// Whether the prefill of this request is this choice's business; false when another worker does it.
    pub track_prefill: bool,
    /// The phases the chosen worker will do. Only [`Role::Decode`] with `track_prefill` off changes the cost: what is
    /// cached then offsets decode blocks.
    pub role: Role,
    /// Blocks of the prompt that the load tracker will count; the rest (the partial tail) is added to the forecast.
    pub tracked_blocks: u64,
    /// Ranges of blocks, sorted and disjoint, that a cache shared by all workers holds.
    pub shared: Vec<Range<u32>>,
}

impl Question {
    /// A question for workers that do prefill and decode, with no shared cache.
    pub fn new(prompt_tokens: u64, block_size: BlockSize) -> Self {
        let tracked_blocks = prompt_tokens / block_size.tokens() as u64;
        let role = Role::Aggregated;
        Self {
            prompt_tokens,
            block_size,
            track_prefill: true,
            role,
            tracked_blocks,
            shared: Vec::new(),
        }
    }

    /// Blocks of the shared cache that lie beyond what a device holds.
    pub fn shared_beyond(&self, device: u32) -> u64 {
        let beyond = |range: &Range<u32>| range.end.saturating_sub(range.start.max(device));
        self.shared
            .iter()
            .map(|range| u64::from(beyond(range)))
            .sum()
    }

    /// Blocks that the prompt takes, the partial tail included.
    pub fn required_blocks(&self) -> u64 {
        self.prompt_tokens.div_ceil(self.block_size.tokens() as u64)
    }

    /// Blocks that a candidate would hold for live requests, this one included.
    pub fn decode_blocks(&self, candidate: &Candidate) -> u64 {
        let tail = self.required_blocks().saturating_sub(self.tracked_blocks);
        candidate.load.active_blocks + candidate.additional_blocks + tail
    }
}

/// One worker rank that may be chosen; who it is says its place among the others.
#[derive(Clone, Debug, PartialEq)]
pub struct Candidate {
    /// What it has cached of the prompt.
    pub overlap: TierBlocks,
    /// What is left of the credit for it: 1 where its event source is exact.
    pub trust_credit: f64,
    /// What it is doing.
    pub load: Load,
    /// Prompt blocks it would have to add to its active ones.
    pub additional_blocks: u64,
    /// Sum of the weights of the preferred taints it carries.
    pub preference: f64,
}

/// The outcome, with what explains it.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Choice {
    /// Position of the chosen candidate in the slice.
    pub index: usize,
    /// Its cost, term by term.
    pub cost: Cost,
    /// How many candidates had exactly the chosen cost, itself included; 1 when a temperature is set.
    pub ties: usize,
    /// Prompt tokens the chosen candidate is expected not to compute.
    pub cached_tokens: u64,
    /// Prompt tokens the chosen candidate has cached, all tiers alike.
    pub raw_cached_tokens: u64,
    /// The most that any candidate has cached, all tiers alike.
    pub best_raw_cached_tokens: u64,
    /// Cached blocks, lower tiers by their weights.
    pub effective_overlap_blocks: f64,
    /// Blocks that the prompt takes, the partial tail included.
    pub required_blocks: u64,
    /// Blocks the chosen candidate will hold for live requests, this one included.
    pub potential_decode_blocks: u64,
}

/// Chooses. `None` only when there is no candidate.
pub fn choose(
    question: &Question,
    candidates: &[Candidate],
    weights: &Weights,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let scale = Scale::new(question, candidates, weights);
    let Found {
        index,
        ties,
        most_cached,
    } = if weights.router_temperature > 0.0 {
        sample(candidates, &scale, weights.router_temperature, rng)?
    } else {
        cheapest(candidates, &scale, rng)?
    };
    let chosen = &candidates[index];
    let block_size = question.block_size.tokens() as u64;
    let required_blocks = question.required_blocks();
    Some(Choice {
        index,
        cost: scale.cost(chosen),
        ties,
        cached_tokens: scale.cached_tokens(chosen),
        raw_cached_tokens: u64::from(chosen.overlap.total()) * block_size,
        best_raw_cached_tokens: u64::from(most_cached) * block_size,
        effective_overlap_blocks: scale.effective(chosen),
        required_blocks,
        potential_decode_blocks: question.decode_blocks(chosen),
    })
}

/// What each candidate would cost, in their order: the very numbers that [`choose`] compares.
pub fn costs(question: &Question, candidates: &[Candidate], weights: &Weights) -> Vec<Cost> {
    let scale = Scale::new(question, candidates, weights);
    candidates
        .iter()
        .map(|candidate| scale.cost(candidate))
        .collect()
}

/// Whom a choice found.
struct Found {
    index: usize,
    ties: usize,
    /// Blocks, the most that any candidate has.
    most_cached: u32,
}

/// The smallest cost and how many share it. Among equals each is kept with the same chance, without remembering them.
fn cheapest(candidates: &[Candidate], scale: &Scale<'_>, rng: &mut impl Rng) -> Option<Found> {
    let (mut found, mut least) = (None, f64::INFINITY);
    let mut most_cached = 0;
    for (index, candidate) in candidates.iter().enumerate() {
        let total = match scale.plain_total(candidate) {
            Some(total) => total,
            None => {
                most_cached = most_cached.max(candidate.overlap.total());
                if scale.is_dearer(candidate, least) {
                    continue;
                }
                scale.total(candidate)
            }
        };
        found = Some(match found {
            None => (index, 1),
            Some(_) if total < least => (index, 1),
            Some((kept, ties)) if total == least => {
                let ties = ties + 1;
                (
                    if rng.random_range(0..ties) == 0 {
                        index
                    } else {
                        kept
                    },
                    ties,
                )
            }
            Some(_) => continue,
        });
        least = total;
    }
    found.map(|(index, ties)| Found {
        index,
        ties,
        most_cached,
    })
}

/// Draws with probability proportional to `exp(-(cost - least) / (range * temperature))`. Dividing by the range makes the
/// temperature free of the scale of the costs.
fn sample(
    candidates: &[Candidate],
    scale: &Scale<'_>,
    temperature: f64,
    rng: &mut impl Rng,
) -> Option<Found> {
    let mut costs: Vec<f64> = candidates
        .iter()
        .map(|candidate| scale.total(candidate))
        .collect();
    let bounds = |costs: &[f64]| {
        costs
            .iter()
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &cost| {
                (low.min(cost), high.max(cost))
            })
    };
    let (mut low, mut high) = bounds(&costs);
    if !(high - low).is_finite() {
        let magnitude = low.abs().max(high.abs()).min(f64::MAX);
        costs
            .iter_mut()
            .for_each(|cost| *cost = cost.clamp(f64::MIN, f64::MAX) / magnitude);
        (low, high) = bounds(&costs);
    }
    let range = high - low;
    // The cheapest is certain by definition; its exponent may be 0 / 0 where the temperature is next to nothing.
    let likelihood = |cost: f64| {
        if cost > low {
            (-(cost - low) / (range * temperature)).exp()
        } else {
            1.0
        }
    };
    let sum: f64 = costs.iter().map(|&cost| likelihood(cost)).sum();
    let draw: f64 = rng.random();
    let mut cumulative = 0.0;
    let hit = costs.iter().position(|&cost| {
        cumulative += likelihood(cost) / sum;
        cumulative >= draw
    });
    let most_cached = candidates
        .iter()
        .map(|candidate| candidate.overlap.total())
        .max()?;
    hit.or(candidates.len().checked_sub(1)).map(|index| Found {
        index,
        ties: 1,
        most_cached,
    })
}

#[cfg(test)]
mod tests;
