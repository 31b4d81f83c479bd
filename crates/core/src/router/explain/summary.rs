//! Explanation in one sentence: the chosen ranks, the margin, the cached blocks, and the reason for
//! a lower routing mode.

use super::explanation::{PhaseExplanation, WorkerExplanation};
use crate::freshness::IndexFreshness;
use crate::policy::LocalPrefillReason;
use crate::router::reason::Reason;
use crate::router::route::{Mode, PhaseAssignment, Route, RouteError};
use crate::worker::WorkerRole;

/// Explains a route.
pub(super) fn routed(
    route: &Route,
    phases: &[PhaseExplanation],
    temperature: f64,
    busy: bool,
) -> String {
    let used = phases.iter().filter(|phase| phase.used);
    let mut clauses: Vec<String> = used
        .map(|phase| winner_clause(phase, temperature))
        .collect();
    match route.reason {
        Some(reason) if route.mode == Mode::LoadOnly => {
            clauses.push(format!(
                "caches were not compared, because {}",
                reason_clause(reason)
            ));
        }
        Some(reason) => {
            clauses.extend(held_clause(route, phases));
            clauses.push(format!(
                "only the start of the prompt was compared, because {}",
                reason_clause(reason)
            ));
        }
        None => clauses.extend(held_clause(route, phases)),
    }
    if let PhaseAssignment::Local(reason) = &route.phases {
        clauses.push(local_clause(*reason).to_owned());
    } else if matches!(route.phases, PhaseAssignment::Aggregated) && phases.len() > 1 {
        clauses.push("no prefill worker can be chosen, so it computes the whole prompt".into());
    }
    if busy {
        clauses.push("but it is queued first, because all candidates are busy".into());
    }
    let text = clauses.join("; ") + ".";
    text.replacen("worker rank", "Worker rank", 1)
}

/// Returns the reason why the answering worker computes the prompt although prefill workers exist.
fn local_clause(reason: LocalPrefillReason) -> &'static str {
    match reason {
        LocalPrefillReason::ShortPrompt => {
            "little is left to compute, so it computes the prompt itself"
        }
        LocalPrefillReason::PrefillBusy => {
            "the prefill workers are busy, so it computes the whole prompt"
        }
        LocalPrefillReason::LowerCost => {
            "a local prefill costs less time than a remote one, so it computes the whole prompt"
        }
        LocalPrefillReason::TopologyMismatch => {
            "no decode worker is in reach of the chosen prefill worker, so it computes the whole \
            prompt"
        }
        LocalPrefillReason::NotSplittable => {
            "the request cannot be split into prefill and decode, so it computes the whole prompt"
        }
        LocalPrefillReason::PrefillFailed => {
            "the prefill workers failed, so it computes the whole prompt"
        }
        LocalPrefillReason::PrefillRefused => {
            "a prefill worker rejected the request, so the decode worker answers it"
        }
        LocalPrefillReason::PrefillConcurrencyLimit => {
            "the limit on concurrent prefills is reached, so it computes the whole prompt"
        }
        LocalPrefillReason::NoHandoff => {
            "the prefill worker transferred no KV blocks, so it computes the whole prompt"
        }
    }
}

/// Explains a missing route.
pub(super) fn unrouted(error: RouteError, pool: Option<&str>) -> String {
    let consequence = match error {
        RouteError::NoFleet | RouteError::NoCandidate => "Envoy's own load balancer would choose",
        _ => "the request would be rejected",
    };
    let in_pool = pool
        .map(|pool| format!(" (the request is for the pool `{pool}`)"))
        .unwrap_or_default();
    format!("No worker is chosen, because {error}{in_pool}; {consequence}.")
}

fn winner_clause(phase: &PhaseExplanation, temperature: f64) -> String {
    let Some((winner, cost)) = winner(phase).and_then(|worker| Some((worker, worker.cost?.total)))
    else {
        return "no worker is chosen".to_owned();
    };
    let task = match phase.role {
        WorkerRole::Prefill => "computes the prefill",
        WorkerRole::Decode => "decodes",
        WorkerRole::Aggregated => "serves the request",
    };
    let subject = format!("worker rank {} {task}", winner.rank);
    match (phase.runner_up, phase.margin) {
        (Some(second), Some(margin)) if temperature > 0.0 => {
            let (by, than) = if margin < 0.0 {
                (-margin, "more")
            } else {
                (margin, "less")
            };
            format!(
                "{subject}, sampled at temperature {temperature}: it costs {cost:.3}, {by:.3} \
                {than} than {second}"
            )
        }
        (Some(_), Some(_)) if phase.ties > 1 => {
            format!(
                "{subject}, chosen at random among {} candidates that all cost {cost:.3}",
                phase.ties
            )
        }
        (Some(second), Some(margin)) => {
            format!("{subject}, because it costs {cost:.3}, {margin:.3} less than {second}")
        }
        _ => format!("{subject}, because it is the only candidate (cost {cost:.3})"),
    }
}

/// Describes the cached blocks of the computing rank, and a candidate that holds more but costs
/// more.
fn held_clause(route: &Route, phases: &[PhaseExplanation]) -> Option<String> {
    // The first used phase computes the prompt, so its cache counts.
    let phase = phases.iter().find(|phase| phase.used)?;
    let winner = winner(phase)?;
    let blocks = route.prompt_blocks;
    let held = winner.overlap.total();
    let is_stale = held > 0
        && matches!(
            winner.source.freshness,
            IndexFreshness::Stale | IndexFreshness::CatchingUp
        );
    let stale_note = winner
        .source
        .reason
        .filter(|_| is_stale)
        .map(|reason| format!(", which may be out of date ({})", reason.as_str()))
        .unwrap_or_default();
    let text = format!("it holds {held} of {blocks} blocks{stale_note}");
    let candidates = phase.workers.iter().filter(|worker| worker.cost.is_some());
    let warmest = candidates
        .max_by_key(|worker| worker.overlap.total())
        .filter(|worker| worker.overlap.total() > held);
    let comparison = warmest.and_then(|warmest| {
        let difference = warmest.cost?.total - winner.cost?.total;
        Some(format!(
            "{text}, while {} holds {} and costs {difference:.3} more",
            warmest.rank,
            warmest.overlap.total()
        ))
    });
    Some(comparison.unwrap_or(text))
}

fn winner(phase: &PhaseExplanation) -> Option<&WorkerExplanation> {
    phase
        .workers
        .iter()
        .find(|worker| Some(worker.rank) == phase.winner)
}

fn reason_clause(reason: Reason) -> &'static str {
    match reason {
        Reason::NoBody => "the request has no body",
        Reason::NotInference => "the path belongs to no known API, or nothing is computed for it",
        Reason::BodyNotSent => "Envoy does not send the body",
        Reason::BodyStreamed => "Envoy sends the body only after it has routed",
        Reason::BodyTruncated => "only the start of the body was received",
        Reason::BodyTooLarge => "the body is larger than the limit",
        Reason::Unparseable => "the body is not a valid request of this API",
        Reason::UnknownModel => "the request names a model that is not configured",
        Reason::NoTokenizer => "the model has no tokenizer",
        Reason::NoChatTemplate => "the model has no chat template",
        Reason::EncodeFailed => "the tokenizer or the chat template rejects the prompt",
        Reason::RemoteTokenizerFailed => {
            "the engine did not return its tokens, and there are no others"
        }
        Reason::Multimodal => "the prompt contains images, audio or video",
        Reason::PromptTooLong => "the prompt is longer than the model accepts",
        Reason::TooManyPrompts => "the request has more prompts than the limit",
        Reason::UnknownPrompt => "only the engine knows how the prompt is rendered",
        Reason::EngineSideState => "the prompt continues state that only an engine holds",
        Reason::TokenizerBusy => "too many bodies wait for the tokenizer",
        Reason::DecisionTimeout => "the tokenizer took longer than its deadline",
        Reason::IndexCold => "no event source of any candidate has caught up",
        Reason::IndexUnreachable => "no index server replied",
        Reason::BlockSizeMismatch => {
            "the block sizes of the engines are not compatible with the configured one"
        }
        Reason::NoWorkers
        | Reason::NoCandidate
        | Reason::ConstraintsUnsatisfied
        | Reason::NoPrefill => "there is no candidate",
        Reason::InvalidPin => "the request is pinned to a worker that cannot serve it",
        Reason::Overloaded => "all eligible workers are overloaded",
        Reason::ParityMismatch => "the engines compute other tokens than warmroute",
        Reason::QueueFull | Reason::QueueTimeout => "the request is queued",
        Reason::RouterError => "of an internal error of the router",
    }
}
