//! Plain-text form of an explanation. Each phase has one table of state and one of costs, with one
//! worker rank per row and the winner first. A large fleet makes the tables long, not wide.

use std::cmp::Ordering;
use std::fmt::Write as _;

use warmroute_core::load::LatencyEstimate;
use warmroute_core::policy::{CostTerm, PolicySettings, RoutingPolicy};
use warmroute_core::router::{
    ComputingRank, PhaseExplanation, RouteExplanation, WorkerExplanation,
};
use warmroute_core::worker::WorkerRole;

/// Separator between columns.
const COLUMN_GAP: &str = "  ";

/// Two-line headings of the state table.
const STATE_HEADINGS: [[&str; 2]; 13] = [
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

/// Two-line headings of the learned latency of a worker rank, relative to its model.
const FACTOR_HEADINGS: [[&str; 2]; 2] = [["factor:", "prefill"], ["", "decode"]];

/// Renders an explanation as text.
pub fn render(explanation: &RouteExplanation) -> String {
    let mut text = format_heading(explanation);
    for phase in &explanation.phases {
        let mut rows: Vec<&WorkerExplanation> = phase.workers.iter().collect();
        rows.sort_by(|a, b| compare_workers(phase, a, b));
        _ = writeln!(text, "\n{}", phase_title(phase));
        if let Some(latency) = &phase.latency {
            _ = writeln!(text, "{}", format_latency(latency, rows.len()));
        }
        write_table(
            &mut text,
            &STATE_HEADINGS,
            3,
            rows.iter().map(|worker| state_row(worker)).collect(),
        );
        text.push('\n');
        write_table(
            &mut text,
            &cost_headings(phase),
            1,
            rows.iter().map(|worker| cost_row(phase, worker)).collect(),
        );
    }
    _ = writeln!(text, "\n{}", explanation.summary);
    text
}

pub(super) fn format_heading(explanation: &RouteExplanation) -> String {
    let RouteExplanation {
        model,
        prompt_tokens,
        prompt_blocks,
        block_size,
        ..
    } = explanation;
    let model = model.as_ref().map_or("any model", |model| model.as_str());
    let requested = explanation
        .requested_model
        .as_ref()
        .map_or(String::new(), |requested| {
            format!(" (rewritten from {requested})")
        });
    let block_size_text = block_size.map_or(String::new(), |size| {
        format!(" of {} tokens", size.tokens())
    });
    let mode = explanation.mode.as_str();
    let reason = explanation
        .reason
        .map_or(String::new(), |reason| format!(" ({})", reason.as_str()));
    let cached = explanation
        .computed_by
        .map_or(String::new(), |computed_by| {
            format_prediction(explanation, computed_by)
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
        "route    {mode}{reason}{busy}{class}\nprompt   {model}{requested}, {prompt_tokens} \
        tokens, {prompt_blocks} complete blocks{block_size_text}\n\
         {cached}policy   {}\n",
        format_policy(&explanation.policy)
    )
}

/// Formats the predicted cached tokens with the worker rank that computes the prompt.
fn format_prediction(explanation: &RouteExplanation, computed_by: ComputingRank) -> String {
    let ComputingRank {
        rank,
        cached_tokens,
        ..
    } = computed_by;
    let mut workers = explanation.phases.iter().flat_map(|phase| &phase.workers);
    let role = workers
        .find(|worker| worker.rank == rank)
        .map_or(String::new(), |worker| format!(" ({})", worker.role));
    format!(
        "cached   {cached_tokens} tokens predicted on {rank}{role}, which computes the prompt\n"
    )
}

fn format_policy(settings: &PolicySettings) -> String {
    let weights = &settings.weights;
    let tiers = format!(
        "host {}, disk {}, shared {}; temperature {}",
        weights.host_cache_hit_weight,
        weights.disk_cache_hit_weight,
        weights.shared_cache_multiplier,
        weights.router_temperature,
    );
    let name = settings.routing.as_str();
    match settings.routing {
        RoutingPolicy::Seconds(seconds) => format!(
            "{name}: first token weight {}; {tiers}",
            seconds.first_token_weight
        ),
        RoutingPolicy::Sticky(sticky) => format!(
            "{name}: at most {} tokens more than the shortest queue",
            sticky.max_excess_tokens
        ),
        RoutingPolicy::Linear => format_linear(settings),
        _ => name.to_owned(),
    }
}

fn format_linear(settings: &PolicySettings) -> String {
    let weights = &settings.weights;
    format!(
        "linear: device {}, host {}, disk {}, shared {}, decay {}; prefill {}, request {}; \
        temperature {}",
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

pub(super) fn phase_title(phase: &PhaseExplanation) -> String {
    let name = match phase.role {
        WorkerRole::Aggregated => "prefill and decode",
        WorkerRole::Prefill => "prefill",
        WorkerRole::Decode => "decode",
    };
    let all = phase.workers.len();
    let candidates = phase
        .workers
        .iter()
        .filter(|worker| worker.excluded.is_none())
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
        (None, ..) => text.push_str("; no worker is chosen"),
    }
    if phase.winner.is_some() && !phase.used {
        text.push_str("; not used");
    }
    text
}

/// Formats the learned latency of a model, which `ranks` worker ranks serve.
fn format_latency(latency: &LatencyEstimate, ranks: usize) -> String {
    let coefficients = &latency.coefficients;
    let busy = 100.0 * latency.prefill_rate / ranks.max(1) as f64;
    format!(
        "learned: prefill {:.1} ms + {:.1} us per token + {:.2} ns per pair, decode step {:.2} ms \
        + {:.1} us per request + {:.1} ns per token, answers of {:.0} tokens; {:.1} requests/s, \
        prefill {busy:.0} % busy",
        coefficients.prefill_base * 1e3,
        coefficients.prefill_token * 1e6,
        coefficients.prefill_pair * 1e9,
        coefficients.decode_step * 1e3,
        coefficients.decode_request * 1e6,
        coefficients.decode_context_token * 1e9,
        latency.output_tokens,
        latency.request_rate,
    )
}

/// Orders the winner first, then the candidates by cost, then the excluded workers.
pub(super) fn compare_workers(
    phase: &PhaseExplanation,
    a: &WorkerExplanation,
    b: &WorkerExplanation,
) -> Ordering {
    let wins = |worker: &WorkerExplanation| Some(worker.rank) == phase.winner;
    let total = |worker: &WorkerExplanation| worker.cost.map_or(f64::INFINITY, |cost| cost.total);
    let excluded = |worker: &WorkerExplanation| worker.excluded.is_some();
    let by_group = (wins(b), excluded(a)).cmp(&(wins(a), excluded(b)));
    by_group
        .then(total(a).total_cmp(&total(b)))
        .then(a.rank.cmp(&b.rank))
}

fn state_row(worker: &WorkerExplanation) -> Vec<String> {
    let WorkerExplanation {
        rank,
        endpoint,
        role,
        overlap,
        load,
        ..
    } = worker;
    vec![
        rank.to_string(),
        endpoint.to_string(),
        role.to_string(),
        overlap.device.to_string(),
        overlap.host.to_string(),
        overlap.disk.to_string(),
        overlap.external.to_string(),
        worker.cached_tokens.to_string(),
        load.active_requests.to_string(),
        load.active_prefill_tokens.to_string(),
        worker.prefill_tokens.to_string(),
        load.active_blocks.to_string(),
        worker.decode_blocks.to_string(),
    ]
}

/// Returns the headings of the cost table, which depend on the policy.
fn cost_headings(phase: &PhaseExplanation) -> Vec<[&'static str; 2]> {
    let cost = phase.workers.iter().find_map(|worker| worker.cost.as_ref());
    let mut headings = vec![["", "worker"]];
    if let Some(cost) = cost {
        headings.extend(cost.terms.iter().map(term_heading));
    }
    if phase.latency.is_some() {
        headings.extend(FACTOR_HEADINGS);
    }
    headings.extend([["taint", "factor"], ["total", "cost"], ["", "verdict"]]);
    headings
}

fn term_heading(term: CostTerm) -> [&'static str; 2] {
    term.name
        .split_once('_')
        .map_or(["", term.name], |(first, second)| [first, second])
}

fn cost_row(phase: &PhaseExplanation, worker: &WorkerExplanation) -> Vec<String> {
    let columns = cost_headings(phase).len() - 2;
    let terms: Vec<String> = match &worker.cost {
        Some(cost) => {
            let terms = cost.terms.iter().map(|term| term.value);
            let timing = worker.timing.iter();
            let factors = timing.flat_map(|timing| [timing.prefill_factor, timing.decode_factor]);
            terms
                .chain(factors)
                .chain([cost.taint_factor, cost.total])
                .map(|term| format!("{term:.3}"))
                .collect()
        }
        None => vec!["-".to_owned(); columns],
    };
    [worker.rank.to_string()]
        .into_iter()
        .chain(terms)
        .chain([verdict(phase, worker)])
        .collect()
}

/// Returns the verdict of a worker in a phase.
pub(super) fn verdict(phase: &PhaseExplanation, worker: &WorkerExplanation) -> String {
    match (&worker.excluded, worker.cost) {
        (Some(reason), _) => format!("excluded: {reason}"),
        (None, _) if Some(worker.rank) == phase.winner => "winner".to_owned(),
        (None, _) if Some(worker.rank) == phase.runner_up => "runner-up".to_owned(),
        (None, Some(_)) => "candidate".to_owned(),
        (None, None) => "eligible".to_owned(),
    }
}

/// Writes a table with aligned columns. The first `text_columns` columns and the column `verdict`
/// are left-aligned, numbers are right-aligned.
fn write_table(
    text: &mut String,
    headings: &[[&str; 2]],
    text_columns: usize,
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
    let widths: Vec<usize> = (0..headings.len()).map(width).collect();
    for line in &lines {
        let is_text = |column: usize| column < text_columns || headings[column][1] == "verdict";
        let cells = line
            .iter()
            .zip(&widths)
            .enumerate()
            .map(|(column, (cell, width))| {
                if is_text(column) {
                    format!("{cell:<width$}")
                } else {
                    format!("{cell:>width$}")
                }
            });
        let row: Vec<String> = cells.collect();
        _ = writeln!(text, "{}", row.join(COLUMN_GAP).trim_end());
    }
}

#[cfg(test)]
mod tests;
