//! The answers we give ourselves: why a request is refused, as an OpenAI error, and the choice where only that was asked
//! for. One place maps errors to HTTP. What is not in it is no error for the client: then Envoy chooses.

use std::time::Duration;

use serde_json::json;

use super::mutation::Immediate;
use crate::entrance::Refusal;
use crate::router::{Reason, Route, RouteError};

/// When to come back where nothing better is known.
const SOON: Duration = Duration::from_secs(1);

/// Why a request got no worker.
pub fn reason(refusal: &Refusal) -> Reason {
    match refusal {
        Refusal::Refused(error) => error.reason(),
        Refusal::Overflow { .. } => Reason::QueueFull,
        Refusal::Deadline { .. } => Reason::QueueDeadline,
        Refusal::Failed => Reason::RouterFailed,
    }
}

/// What the client gets in place of a worker's answer; `None` where Envoy may choose.
pub fn immediate(refusal: &Refusal) -> Option<Immediate> {
    let (status, code, retry) = match refusal {
        Refusal::Refused(RouteError::NoFleet | RouteError::NoCandidate) | Refusal::Failed => return None,
        Refusal::Refused(RouteError::Pin(_)) => (400, "invalid_worker", None),
        Refusal::Refused(RouteError::Overloaded(_)) => (429, "overloaded", Some(SOON)),
        Refusal::Refused(RouteError::Unsatisfied) => (503, "no_eligible_worker", Some(SOON)),
        Refusal::Refused(RouteError::NoPrefill) => (503, "no_prefill_worker", Some(SOON)),
        Refusal::Overflow { retry_after, .. } => (429, "queue_full", Some(*retry_after)),
        Refusal::Deadline { retry_after, .. } => (429, "queue_timeout", Some(*retry_after)),
    };
    let kind = match status {
        400 => "invalid_request_error",
        429 => "rate_limit_error",
        _ => "service_unavailable_error",
    };
    let error = json!({ "error": { "message": refusal.to_string(), "type": kind, "param": null, "code": code } });
    // A fraction of a second is still a second in this header.
    let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
    Some(Immediate {
        status,
        retry_after: retry.map(seconds),
        body: error.to_string().into_bytes(),
        details: "warmroute_refused",
    })
}

/// The answer to a request that asks for the choice only.
pub fn choice(route: &Route, tokens: &[Vec<u32>]) -> Immediate {
    let mut worker_id = json!({ "decode_worker_id": route.to.rank.worker, "decode_dp_rank": route.to.rank.rank });
    if let Some(prefill) = route.prefill() {
        worker_id["prefill_worker_id"] = json!(prefill.to.rank.worker);
        worker_id["prefill_dp_rank"] = json!(prefill.to.rank.rank);
    }
    let answer = json!({
        "object": "query_instance_id",
        "nvext": { "worker_id": worker_id, "token_ids": tokens.first() },
        "endpoint": route.to.endpoint,
        "mode": route.mode,
        "prompt_tokens": route.prompt_tokens,
        "overlap_blocks": route.overlap,
        "predicted_cached_tokens": route.predicted_cached_tokens,
    });
    let body = answer.to_string().into_bytes();
    Immediate { status: 200, retry_after: None, body, details: "warmroute_choice" }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Ineligible;
    use crate::worker::WorkerId;

    #[test]
    fn refusals_are_openai_errors_and_what_envoy_can_route_is_none() {
        let overflow = Refusal::Overflow {
            class: "default".into(),
            kind: crate::admission::LimitKind::Requests,
            current: 2,
            limit: 2,
            retry_after: Duration::from_millis(1500),
        };
        let cases = [
            (Refusal::Refused(RouteError::NoFleet), None),
            (Refusal::Refused(RouteError::NoCandidate), None),
            (Refusal::Failed, None),
            (Refusal::Refused(RouteError::Pin(Ineligible::PinUnknown(WorkerId(7)))), Some((400, None))),
            (Refusal::Refused(RouteError::Overloaded(Ineligible::AllEligibleWorkersOverloaded)), Some((429, Some(1)))),
            (Refusal::Refused(RouteError::Unsatisfied), Some((503, Some(1)))),
            (Refusal::Refused(RouteError::NoPrefill), Some((503, Some(1)))),
            (overflow, Some((429, Some(2)))),
        ];
        for (refusal, expected) in cases {
            let answer = immediate(&refusal);
            assert_eq!(answer.as_ref().map(|answer| (answer.status, answer.retry_after)), expected, "{refusal}");
            let Some(answer) = answer else { continue };
            let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(body["error"]["message"], refusal.to_string());
            assert!(body["error"]["type"].is_string() && body["error"]["code"].is_string());
        }
    }
}
