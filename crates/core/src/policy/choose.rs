//! Takes the minimum of the costs, with exact ties broken uniformly, or draws a sample if a
//! temperature is set.

use rand::{Rng, RngExt};

use super::candidate::{Candidate, PolicyInput};
use super::cost::{Cost, CostModel};
use super::weights::Weights;

/// Chosen candidate, with the figures that explain the choice.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Choice {
    /// Position of the chosen candidate in the slice.
    pub index: usize,
    /// Cost of the chosen candidate, term by term.
    pub cost: Cost,
    /// Number of candidates with exactly the chosen cost, including the chosen one; 1 if a
    /// temperature is set.
    pub ties: usize,
    /// Prompt tokens that the chosen candidate is expected not to compute, lower tiers weighted.
    pub cached_tokens: u64,
    /// Prompt tokens that the chosen candidate has cached, without tier weights.
    pub raw_cached_tokens: u64,
    /// Maximum of cached prompt tokens over all candidates, without tier weights.
    pub best_raw_cached_tokens: u64,
    /// Cached blocks, lower tiers weighted.
    pub effective_overlap_blocks: f64,
    /// Blocks of the prompt, including the partial last block.
    pub required_blocks: u64,
    /// Blocks that the chosen candidate will hold for running requests, including this one.
    pub potential_decode_blocks: u64,
}

/// Chooses a candidate. Returns `None` only if there are no candidates.
pub fn choose(
    input: &PolicyInput,
    candidates: &[Candidate],
    weights: &Weights,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let model = CostModel::new(input, candidates, weights);
    let SelectedCandidate {
        index,
        ties,
        most_cached,
    } = if weights.router_temperature > 0.0 {
        sample(candidates, &model, weights.router_temperature, rng)?
    } else {
        cheapest(candidates, &model, rng)?
    };
    let chosen = &candidates[index];
    let block_size = input.block_size.tokens() as u64;
    Some(Choice {
        index,
        cost: model.cost(chosen),
        ties,
        cached_tokens: model.cached_tokens(chosen),
        raw_cached_tokens: u64::from(chosen.overlap.total()) * block_size,
        best_raw_cached_tokens: u64::from(most_cached) * block_size,
        effective_overlap_blocks: model.effective_blocks(chosen),
        required_blocks: input.required_blocks(),
        potential_decode_blocks: input.decode_blocks(chosen),
    })
}

/// Returns the cost of each candidate, in order: the same numbers that [`choose`] compares.
pub fn costs(input: &PolicyInput, candidates: &[Candidate], weights: &Weights) -> Vec<Cost> {
    let model = CostModel::new(input, candidates, weights);
    candidates
        .iter()
        .map(|candidate| model.cost(candidate))
        .collect()
}

/// Position of the chosen candidate.
struct SelectedCandidate {
    index: usize,
    ties: usize,
    /// Maximum of cached blocks over all candidates.
    most_cached: u32,
}

/// Finds the minimum cost. Reservoir sampling gives each of several equal candidates the same
/// chance.
fn cheapest(
    candidates: &[Candidate],
    model: &CostModel<'_>,
    rng: &mut impl Rng,
) -> Option<SelectedCandidate> {
    let mut found: Option<(usize, usize)> = None;
    let mut min_total = f64::INFINITY;
    let mut most_cached = 0;
    for (index, candidate) in candidates.iter().enumerate() {
        let total = match model.plain_total(candidate) {
            Some(total) => total,
            None => {
                most_cached = most_cached.max(candidate.overlap.total());
                if model.exceeds(candidate, min_total) {
                    continue;
                }
                model.total(candidate)
            }
        };
        found = match found {
            Some((selected, ties)) if total == min_total => {
                let ties = ties + 1;
                let replaces = rng.random_range(0..ties) == 0;
                Some((if replaces { index } else { selected }, ties))
            }
            Some(_) if total > min_total => continue,
            _ => Some((index, 1)),
        };
        min_total = total;
    }
    found.map(|(index, ties)| SelectedCandidate {
        index,
        ties,
        most_cached,
    })
}

/// Draws a candidate with probability proportional to `exp(-(cost - min) / (range * temperature))`.
/// Dividing by the range makes the temperature independent of the scale of the costs.
fn sample(
    candidates: &[Candidate],
    model: &CostModel<'_>,
    temperature: f64,
    rng: &mut impl Rng,
) -> Option<SelectedCandidate> {
    let mut costs: Vec<f64> = candidates
        .iter()
        .map(|candidate| model.total(candidate))
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
    // The cheapest has likelihood 1 by definition; its exponent may be 0 / 0 at a tiny temperature.
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
    hit.or(candidates.len().checked_sub(1))
        .map(|index| SelectedCandidate {
            index,
            ties: 1,
            most_cached,
        })
}
