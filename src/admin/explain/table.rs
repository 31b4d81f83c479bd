//! An explanation as text: per phase one table of what the worker ranks hold and do, and one of what they cost, each with
//! a rank per row and the winner first, so that a wide fleet is a long table and not a wide one.

use std::cmp::Ordering;
use std::fmt::Write as _;

use crate::router::{ComputedBy, Explanation, Judged, PhaseExplained};
use crate::schedule::Weights;
use crate::worker::Role;

/// Between two columns.
const GAP: &str = "  ";

/// Headings of the first table, in two lines.
const STATE: [[&str; 2]; 13] = [
    ["", "worker"],
    ["", "endpoint"],
    ["", "role"],
    ["blocks:", "device"],
    ["", "host"],
    ["", "disk"],
    ["", "external"],
    ["cached", "tokens"],
    ["live", "requests"],
    ["prefill tokens:", "active"],
    ["", "with this"],
    ["decode blocks:", "active"],
    ["", "with this"],
];

/// Headings of the second table.
const COSTS: [[&str; 2]; 14] = [
    ["", "worker"],
    ["prefill", "blocks"],
    ["credit:", "device"],
    ["", "host"],
    ["", "disk"],
    ["", "shared"],
    ["", "decay"],
    ["", "trust"],
    ["cost:", "prefill"],
    ["", "decode"],
    ["", "requests"],
    ["taint", "factor"],
    ["total", "cost"],
    ["", "verdict"],
];

/// The explanation for people.
pub fn render(explanation: &Explanation) -> String {
    let mut text = heading(explanation);
    for phase in &explanation.phases {
        let mut rows: Vec<&Judged> = phase.judged.iter().collect();
        rows.sort_by(|a, b| order(phase, a, b));
        _ = writeln!(text, "\n{}", title(phase));
        table(
            &mut text,
            &STATE,
            3,
            rows.iter().map(|judged| state(judged)).collect(),
        );
        text.push('\n');
        table(
            &mut text,
            &COSTS,
            1,
            rows.iter().map(|judged| costs(phase, judged)).collect(),
        );
    }
    _ = writeln!(text, "\n{}", explanation.sentence);
    text
}

fn heading(explanation: &Explanation) -> String {
    let Explanation {
        model,
        prompt_tokens,
        prompt_blocks,
        block_size,
        ..
    } = explanation;
    let model = model.as_ref().map_or("any model", |model| model.as_str());
    let asked = explanation
        .requested_model
        .as_ref()
        .map_or(String::new(), |asked| format!(" (rewritten from {asked})"));
    let of = block_size.map_or(String::new(), |size| {
        format!(" of {} tokens", size.tokens())
    });
    let mode = explanation.mode.as_str();
    let reason = explanation
        .reason
        .map_or(String::new(), |reason| format!(" ({})", reason.as_str()));
    let cached = explanation
        .computed_by
        .map_or(String::new(), |computed_by| {
            prediction(explanation, computed_by)
        });
    let busy = if explanation.busy {
        ", after waiting"
    } else {
        ""
    };
    let class = explanation
        .class
        .as_ref()
        .map_or(String::new(), |class| format!(", class {class}"));
    format!(
        "route    {mode}{reason}{busy}{class}\nprompt   {model}{asked}, {prompt_tokens} tokens, {prompt_blocks} complete blocks{of}\n\
         {cached}weights  {}\n",
        weights(&explanation.weights)
    )
}

/// The predicted cached tokens, with the worker rank that they describe.
fn prediction(explanation: &Explanation, computed_by: ComputedBy) -> String {
    let ComputedBy {
        rank,
        cached_tokens,
        ..
    } = computed_by;
    let mut judged = explanation.phases.iter().flat_map(|phase| &phase.judged);
    let role = judged
        .find(|judged| judged.rank == rank)
        .map_or(String::new(), |judged| format!(" ({})", judged.role));
    format!(
        "cached   {cached_tokens} tokens predicted on {rank}{role}, which computes the prompt\n"
    )
}

fn weights(weights: &Weights) -> String {
    format!(
        "device {}, host {}, disk {}, shared {}, decay {}; prefill {}, request {}; temperature {}",
        weights.overlap_score_credit,
        weights.host_cache_hit_weight,
        weights.disk_cache_hit_weight,
        weights.shared_cache_multiplier,
        weights.overlap_score_credit_decay,
        weights.prefill_load_scale,
        weights.decode_active_request_weight,
        weights.router_temperature,
    )
}

fn title(phase: &PhaseExplained) -> String {
    let name = match phase.role {
        Role::Aggregated => "prefill and decode",
        Role::Prefill => "prefill",
        Role::Decode => "decode",
    };
    let all = phase.judged.len();
    let candidates = phase
        .judged
        .iter()
        .filter(|judged| judged.excluded.is_none())
        .count();
    let mut text = format!("{name}: {candidates} of {all} worker ranks are candidates");
    match (phase.winner, phase.runner_up, phase.margin) {
        (Some(winner), Some(second), Some(margin)) => {
            _ = write!(
                text,
                "; winner {winner}, runner-up {second}, margin {margin:.3}"
            );
        }
        (Some(winner), ..) => _ = write!(text, "; winner {winner}"),
        (None, ..) => text.push_str("; nobody is chosen"),
    }
    if phase.winner.is_some() && !phase.taken {
        text.push_str("; not taken");
    }
    text
}

/// The winner, then the others by their cost, then those without one.
fn order(phase: &PhaseExplained, a: &Judged, b: &Judged) -> Ordering {
    let wins = |judged: &Judged| Some(judged.rank) == phase.winner;
    let total = |judged: &Judged| judged.cost.map_or(f64::INFINITY, |cost| cost.total);
    let excluded = |judged: &Judged| judged.excluded.is_some();
    let by_group = (wins(b), excluded(a)).cmp(&(wins(a), excluded(b)));
    by_group
        .then(total(a).total_cmp(&total(b)))
        .then(a.rank.cmp(&b.rank))
}

fn state(judged: &Judged) -> Vec<String> {
    let Judged {
        rank,
        endpoint,
        role,
        overlap,
        load,
        ..
    } = judged;
    vec![
        rank.to_string(),
        endpoint.to_string(),
        role.to_string(),
        overlap.device.to_string(),
        overlap.host.to_string(),
        overlap.disk.to_string(),
        overlap.external.to_string(),
        judged.cached_tokens.to_string(),
        load.active_requests.to_string(),
        load.active_prefill_tokens.to_string(),
        judged.prefill_tokens.to_string(),
        load.active_blocks.to_string(),
        judged.decode_blocks.to_string(),
    ]
}

fn costs(phase: &PhaseExplained, judged: &Judged) -> Vec<String> {
    let terms = judged.cost.map(|cost| {
        [
            cost.prefill_blocks,
            cost.device_credit,
            cost.host_credit,
            cost.disk_credit,
            cost.shared_credit,
            cost.credit_decay,
            cost.trust_credit,
            cost.prefill_cost,
            cost.decode_cost,
            cost.request_cost,
            cost.taint_factor,
            cost.total,
        ]
        .map(|term| format!("{term:.3}"))
    });
    let terms = terms.unwrap_or_else(|| std::array::from_fn(|_| "-".to_owned()));
    let verdict = match (&judged.excluded, judged.cost) {
        (Some(why), _) => format!("excluded: {why}"),
        (None, _) if Some(judged.rank) == phase.winner => "winner".to_owned(),
        (None, _) if Some(judged.rank) == phase.runner_up => "runner-up".to_owned(),
        (None, Some(_)) => "candidate".to_owned(),
        (None, None) => "eligible".to_owned(),
    };
    [judged.rank.to_string()]
        .into_iter()
        .chain(terms)
        .chain([verdict])
        .collect()
}

/// Writes columns as wide as they have to be; the first `left` and a last one of words begin at their left edge, numbers
/// end at their right one.
fn table<const N: usize>(
    text: &mut String,
    headings: &[[&str; 2]; N],
    left: usize,
    rows: Vec<Vec<String>>,
) {
    let heading = |line: usize| {
        headings
            .iter()
            .map(|heading| heading[line].to_owned())
            .collect::<Vec<_>>()
    };
    let lines: Vec<Vec<String>> = [heading(0), heading(1)].into_iter().chain(rows).collect();
    let width = |column: usize| {
        lines
            .iter()
            .map(|line| line[column].chars().count())
            .max()
            .unwrap_or(0)
    };
    let widths: Vec<usize> = (0..N).map(width).collect();
    for line in &lines {
        let words = |column: usize| column < left || headings[column][1] == "verdict";
        let cells =
            line.iter()
                .zip(&widths)
                .enumerate()
                .map(|(column, (cell, width))| match words(column) {
                    true => format!("{cell:<width$}"),
                    false => format!("{cell:>width$}"),
                });
        let row: Vec<String> = cells.collect();
        _ = writeln!(text, "{}", row.join(GAP).trim_end());
    }
}

#[cfg(test)]
mod tests;
