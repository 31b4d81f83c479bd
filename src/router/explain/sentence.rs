//! The explanation in one sentence: who, by how much, what it holds, and what kept the request from a better route.

use super::{Judged, PhaseExplained};
use crate::disagg::Bypass;
use crate::router::answer::{Mode, Phases, Route, RouteError};
use crate::router::reason::Reason;
use crate::trust::Trust;
use crate::worker::Role;

/// Why the request goes where it goes.
pub(super) fn routed(
    route: &Route,
    phases: &[PhaseExplained],
    temperature: f64,
    busy: bool,
) -> String {
    let taken = phases.iter().filter(|phase| phase.taken);
    let mut clauses: Vec<String> = taken.map(|phase| chosen(phase, temperature)).collect();
    match route.reason {
        Some(reason) if route.mode == Mode::LoadOnly => {
            clauses.push(format!(
                "caches were not compared, because {}",
                because(reason)
            ));
        }
        Some(reason) => {
            clauses.extend(held(route, phases));
            clauses.push(format!(
                "only the beginning of the prompt was compared, because {}",
                because(reason)
            ));
        }
        None => clauses.extend(held(route, phases)),
    }
    match &route.phases {
        Phases::Kept(Bypass::LittleToCompute) => {
            clauses.push("so little is left to compute that it does it itself".into())
        }
        Phases::Kept(Bypass::PrefillBusy) => {
            clauses.push("the prefill workers are busy, so it computes all itself".into())
        }
        Phases::Kept(Bypass::OutOfReach) => {
            clauses.push(
                "the chosen prefill worker could hand over to nobody, so it computes all itself"
                    .into(),
            );
        }
        Phases::Kept(Bypass::NotHandedOver) => {
            clauses
                .push("what it asks for cannot be handed from one worker to another, so it computes all itself".into());
        }
        Phases::Kept(Bypass::PrefillFailed) => {
            clauses.push(
                "the prefill workers that were asked did not do it, so it computes all itself"
                    .into(),
            );
        }
        Phases::Kept(Bypass::PrefillRefused) => {
            clauses.push(
                "a prefill worker found the request wrong, so it hears it from the decode worker"
                    .into(),
            );
        }
        Phases::Kept(Bypass::PrefillsFull) => {
            clauses.push(
                "as many prefills are under way as are allowed, so it computes all itself".into(),
            );
        }
        Phases::Kept(Bypass::NothingHandedOver) => {
            clauses
                .push("the prefill worker handed nothing over, so it computes all itself".into());
        }
        Phases::Aggregated if phases.len() > 1 => {
            clauses.push("no prefill worker can be chosen, so it computes all itself".into());
        }
        Phases::Aggregated | Phases::Remote(_) => {}
    }
    if busy {
        clauses.push("but first it waits, because everybody it could go to is busy".into());
    }
    let text = clauses.join("; ") + ".";
    text.replacen("worker rank", "Worker rank", 1)
}

/// Why it goes nowhere.
pub(super) fn unrouted(error: RouteError, pool: Option<&str>) -> String {
    let then = match error {
        RouteError::NoFleet | RouteError::NoCandidate => "Envoy's own load balancer would choose",
        _ => "the request would be refused",
    };
    let of_pool = pool
        .map(|pool| format!(" (it is for the pool `{pool}`)"))
        .unwrap_or_default();
    format!("Nobody is chosen, because {error}{of_pool}; {then}.")
}

fn chosen(phase: &PhaseExplained, temperature: f64) -> String {
    let Some((winner, cost)) = winner(phase).and_then(|judged| Some((judged, judged.cost?.total)))
    else {
        return "nobody is chosen".to_owned();
    };
    let does = match phase.role {
        Role::Prefill => "does the prefill",
        Role::Decode => "decodes",
        Role::Aggregated => "serves the request",
    };
    let who = format!("worker rank {} {does}", winner.rank);
    match (phase.runner_up, phase.margin) {
        (Some(second), Some(margin)) if temperature > 0.0 => {
            let (by, than) = if margin < 0.0 {
                (-margin, "more")
            } else {
                (margin, "less")
            };
            format!(
                "{who}, drawn at temperature {temperature}: it costs {cost:.3}, {by:.3} {than} than {second}"
            )
        }
        (Some(_), Some(_)) if phase.ties > 1 => {
            format!(
                "{who}, drawn among {} candidates that all cost {cost:.3}",
                phase.ties
            )
        }
        (Some(second), Some(margin)) => {
            format!("{who}, because it costs {cost:.3}, {margin:.3} less than {second}")
        }
        _ => format!("{who}, because it is the only candidate (cost {cost:.3})"),
    }
}

/// What the chosen one holds, and who holds more and is dearer all the same.
fn held(route: &Route, phases: &[PhaseExplained]) -> Option<String> {
    // Where another computes the prompt, it is that one's cache that counts.
    let phase = phases.iter().find(|phase| phase.taken)?;
    let (winner, blocks) = (winner(phase)?, route.prompt_blocks);
    let own = winner.overlap.total();
    let is_doubted = own > 0 && matches!(winner.source.trust, Trust::Stale | Trust::CatchingUp);
    let doubt = winner.source.because.filter(|_| is_doubted);
    let doubt = doubt
        .map(|because| format!(", which may be out of date ({})", because.as_str()))
        .unwrap_or_default();
    let text = format!("it holds {own} of {blocks} blocks{doubt}");
    let others = phase.judged.iter().filter(|judged| judged.cost.is_some());
    let most = others
        .max_by_key(|judged| judged.overlap.total())
        .filter(|judged| judged.overlap.total() > own);
    let more = most.and_then(|most| {
        let dearer = most.cost?.total - winner.cost?.total;
        Some(format!(
            "{text}, while {} holds {} and costs {dearer:.3} more",
            most.rank,
            most.overlap.total()
        ))
    });
    Some(more.unwrap_or(text))
}

fn winner(phase: &PhaseExplained) -> Option<&Judged> {
    phase
        .judged
        .iter()
        .find(|judged| Some(judged.rank) == phase.winner)
}

fn because(reason: Reason) -> &'static str {
    match reason {
        Reason::NoBody => "the request has no body",
        Reason::NotInference => "the path is of no known API, or nothing is to be computed",
        Reason::BodyNotShown => "Envoy does not show the body",
        Reason::BodyStreamed => "Envoy shows the body only after it has routed",
        Reason::BodyCut => "only the beginning of the body was shown",
        Reason::BodyTooLarge => "the body is larger than the limit",
        Reason::Unreadable => "the body cannot be read as a request of this API",
        Reason::UnknownModel => "the request names a model that is not configured",
        Reason::NoTokenizer => "the model has no tokenizer",
        Reason::NoChatTemplate => "the model has no chat template",
        Reason::EncodeFailed => "the tokenizer or the chat template refuses the prompt",
        Reason::EngineTokensFailed => "the engine did not say its tokens, and there are no others",
        Reason::Multimodal => "the prompt holds images, audio or video",
        Reason::PromptTooLong => "the prompt is longer than the model takes",
        Reason::TooManyPrompts => "the request has more prompts than are looked at",
        Reason::UnknownPrompt => "only the engine knows how it puts the prompt together",
        Reason::EngineState => "the prompt goes on from something that only an engine remembers",
        Reason::TokenizerBusy => "too many prompts wait for the tokenizer",
        Reason::Deadline => "the tokenizer took longer than its deadline",
        Reason::IndexCold => "no event source of any candidate has caught up",
        Reason::IndexAway => "no server of the index answered",
        Reason::BlockSizeMismatch => {
            "the blocks of the engines cannot be brought to the configured size"
        }
        Reason::NoFleet | Reason::NoCandidate | Reason::Unsatisfied | Reason::NoPrefill => {
            "there is no candidate"
        }
        Reason::BadPin => "the request is pinned to a worker that will not do",
        Reason::Overloaded => "all eligible workers are overloaded",
        Reason::ParityMismatch => "the engines make other tokens of prompts than we do",
        Reason::QueueFull | Reason::QueueDeadline => "the request waits",
        Reason::RouterFailed => "the router made a mistake",
    }
}
