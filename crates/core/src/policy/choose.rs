//! Takes the minimum of the costs, with exact ties broken uniformly, or draws a sample if a
//! temperature is set.

use rand::{Rng, RngExt};

use super::candidate::{Candidate, PolicyInput};
use super::cost::{Cost, CostModel, CostModelVisitor, cost, total};
use super::linear::{effective_blocks, round_to_u64};
use super::seconds::{SecondsModel, SecondsSettings};
use super::settings::{PolicySettings, RoutingPolicy};

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
    settings: &PolicySettings,
    rng: &mut impl Rng,
) -> Option<Choice> {
    let visitor = ChoiceVisitor {
        candidates,
        temperature: settings.weights.router_temperature,
        rng,
    };
    let (selected, cost) = settings.visit_cost_model(input, candidates, visitor)?;
    let SelectedCandidate {
        index,
        ties,
        most_cached,
    } = selected;
    let chosen = &candidates[index];
    let block_size = input.block_size.tokens() as u64;
    let effective_blocks = effective_blocks(&settings.weights, chosen);
    Some(Choice {
        index,
        cost,
        ties,
        cached_tokens: round_to_u64(effective_blocks * block_size as f64),
        raw_cached_tokens: u64::from(chosen.overlap.total()) * block_size,
        best_raw_cached_tokens: u64::from(most_cached) * block_size,
        effective_overlap_blocks: effective_blocks,
        required_blocks: input.required_blocks(),
        potential_decode_blocks: input.decode_blocks(chosen),
    })
}

/// Returns the cost of each candidate, in order: the same numbers that [`choose`] compares.
pub fn costs(
    input: &PolicyInput,
    candidates: &[Candidate],
    settings: &PolicySettings,
) -> Vec<Cost> {
    settings.visit_cost_model(input, candidates, CostVisitor { candidates })
}

/// Returns the cost in seconds of the candidate at a position, by the policy `seconds` with the
/// settings of the request, or with its default settings if another policy routes the request. NaN
/// counts as infinity.
pub fn seconds_cost(
    input: &PolicyInput,
    candidates: &[Candidate],
    settings: &PolicySettings,
    index: usize,
) -> f64 {
    let seconds = match settings.routing {
        RoutingPolicy::Seconds(seconds) => seconds,
        _ => SecondsSettings::default(),
    };
    let model = SecondsModel::new(input, candidates.len(), seconds, &settings.weights);
    total(&model, index, &candidates[index])
}

/// Returns a candidate with the minimum cost, or `None` if there are no candidates.
pub(super) fn cheapest_index(
    input: &PolicyInput,
    candidates: &[Candidate],
    settings: &PolicySettings,
    rng: &mut impl Rng,
) -> Option<usize> {
    let visitor = ChoiceVisitor {
        candidates,
        temperature: 0.0,
        rng,
    };
    let (selected, _) = settings.visit_cost_model(input, candidates, visitor)?;
    Some(selected.index)
}

struct CostVisitor<'a> {
    candidates: &'a [Candidate],
}

impl CostModelVisitor for CostVisitor<'_> {
    type Output = Vec<Cost>;

    fn visit(self, model: &impl CostModel) -> Vec<Cost> {
        let candidates = self.candidates.iter().enumerate();
        candidates
            .map(|(index, candidate)| cost(model, index, candidate))
            .collect()
    }
}

struct ChoiceVisitor<'a, R> {
    candidates: &'a [Candidate],
    temperature: f64,
    rng: &'a mut R,
}

impl<R: Rng> CostModelVisitor for ChoiceVisitor<'_, R> {
    type Output = Option<(SelectedCandidate, Cost)>;

    fn visit(self, model: &impl CostModel) -> Self::Output {
        let candidates = self.candidates;
        let selected = if self.temperature > 0.0 {
            sample(candidates, model, self.temperature, self.rng)?
        } else {
            cheapest(candidates, model, self.rng)?
        };
        let cost = cost(model, selected.index, &candidates[selected.index]);
        Some((selected, cost))
    }
}

/// Result of a selection, without the cost.
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
    model: &impl CostModel,
    rng: &mut impl Rng,
) -> Option<SelectedCandidate> {
    let mut found: Option<(usize, usize)> = None;
    let mut min_total = f64::INFINITY;
    let mut most_cached = 0;
    for (index, candidate) in candidates.iter().enumerate() {
        most_cached = most_cached.max(candidate.overlap.total());
        let is_exceeded =
            candidate.taint_preference == 0.0 && model.lower_bound(candidate) > min_total;
        if is_exceeded {
            continue;
        }
        let total = total(model, index, candidate);
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
    model: &impl CostModel,
    temperature: f64,
    rng: &mut impl Rng,
) -> Option<SelectedCandidate> {
    let mut costs: Vec<f64> = candidates
        .iter()
        .enumerate()
        .map(|(index, candidate)| total(model, index, candidate))
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
