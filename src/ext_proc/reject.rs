//! The answers we give ourselves: why a request is refused, as an OpenAI error, and the choice where only that was asked
//! for. One place maps errors to HTTP. What is not in it is no error for the client: then Envoy chooses.

use std::time::Duration;

use serde_json::json;

use super::config::FailureMode;
use super::headers;
use super::mutation::Immediate;
use super::pipeline::Policy;
use crate::entrance::Refusal;
use crate::openai;
use crate::router::{Reason, Route, RouteError};

/// When to come back where nothing better is known.
const SOON: Duration = Duration::from_secs(1);

/// Two workers were to meet over a request and did not in time.
pub fn never_met() -> Immediate {
    let message = "the prefill of this request did not come in time";
    let error = json!({"error": {"message": message, "type": "service_unavailable_error", "param": null, "code": "prefill_failed"}});
    let body = error.to_string().into_bytes();
    Immediate {
        status: 504,
        headers: Vec::new(),
        body,
        details: "warmroute_prefill_failed",
    }
}

/// Why a client gets no worker's answer, or would not.
#[derive(Debug)]
pub enum Refused<'a> {
    /// The router, the queue or the session said no; beside it what then happens.
    Routing(&'a Refusal, FailureMode),
    /// Nobody serves this model, and the operator is strict about that.
    UnknownModel(&'a str),
    /// The body cannot be read, and the operator is strict about that; what is wrong with it, where that is known.
    Unreadable(Option<&'a str>),
    /// The body is above the limit, and the operator is strict about that.
    TooLarge,
    /// The body may say whose KV is to be taken, and could not be checked.
    Unchecked(Unchecked),
}

/// Why a body could not be checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unchecked {
    /// It is no JSON object in UTF-8, or an absurd one.
    Unreadable,
    /// Not all of it was shown.
    TooLarge,
    /// There was no room to keep it.
    NoRoom,
}

/// One refusal in the words of HTTP, of OpenAI and of llm-d.
struct Words {
    status: u16,
    code: &'static str,
    retry: Option<Duration>,
    dropped: Option<&'static str>,
}

impl Words {
    fn new(status: u16, code: &'static str) -> Self {
        Self {
            status,
            code,
            retry: None,
            dropped: None,
        }
    }

    fn later(mut self, retry: Duration, dropped: &'static str) -> Self {
        (self.retry, self.dropped) = (Some(retry), Some(dropped));
        self
    }
}

impl Refused<'_> {
    /// Why, for the metrics.
    pub fn reason(&self) -> Reason {
        match self {
            Refused::Routing(Refusal::Refused(error), _) => error.reason(),
            Refused::Routing(Refusal::Overflow { .. }, _) => Reason::QueueFull,
            Refused::Routing(Refusal::Deadline { .. }, _) => Reason::QueueDeadline,
            Refused::Routing(Refusal::Failed, _) => Reason::RouterFailed,
            Refused::UnknownModel(_) => Reason::UnknownModel,
            Refused::Unreadable(_) => Reason::Unreadable,
            Refused::TooLarge | Refused::Unchecked(Unchecked::TooLarge) => Reason::BodyTooLarge,
            Refused::Unchecked(Unchecked::Unreadable) => Reason::Unreadable,
            Refused::Unchecked(Unchecked::NoRoom) => Reason::BodyNotShown,
        }
    }

    /// What the client gets in place of a worker's answer; `None` where Envoy may choose.
    pub fn immediate(&self, request_id: &str, policy: &Policy) -> Option<Immediate> {
        let words = self.words()?;
        let kind = match words.status {
            400 | 413 => "invalid_request_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            _ => "service_unavailable_error",
        };
        let message = self.message();
        let error = json!({ "error": { "message": message, "type": kind, "param": null, "code": words.code } });
        let mut headers = Vec::new();
        // A fraction of a second is still a second in this header.
        let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        headers.extend(
            words
                .retry
                .map(|wait| ("retry-after", seconds(wait).to_string())),
        );
        if !request_id.is_empty() {
            headers.push((headers::REQUEST_ID, request_id.to_owned()));
        }
        if policy.says_mode {
            headers.push((headers::MODE, "rejected".to_owned()));
        }
        if let Some(dropped) = words.dropped.filter(|_| policy.says_why_dropped) {
            headers.push((headers::DROPPED, dropped.to_owned()));
        }
        let body = error.to_string().into_bytes();
        Some(Immediate {
            status: words.status,
            headers,
            body,
            details: "warmroute_refused",
        })
    }

    fn words(&self) -> Option<Words> {
        const NO_ENDPOINTS: &str = "rejected-no-endpoints";
        const SATURATED: &str = "rejected-saturated";
        let refusal = match self {
            Refused::Routing(refusal, failure) => match (refusal, failure) {
                (
                    Refusal::Refused(RouteError::NoFleet | RouteError::NoCandidate)
                    | Refusal::Failed,
                    mode,
                ) if *mode == FailureMode::FailOpen => {
                    return None;
                }
                (refusal, _) => refusal,
            },
            Refused::UnknownModel(_) => return Some(Words::new(404, "model_not_found")),
            Refused::Unreadable(_) => return Some(Words::new(400, "invalid_body")),
            Refused::TooLarge | Refused::Unchecked(Unchecked::TooLarge) => {
                return Some(Words::new(413, "body_too_large"));
            }
            Refused::Unchecked(Unchecked::Unreadable) => {
                return Some(Words::new(400, "invalid_body"));
            }
            Refused::Unchecked(Unchecked::NoRoom) => {
                return Some(Words::new(503, "no_room").later(SOON, SATURATED));
            }
        };
        Some(match refusal {
            Refusal::Refused(RouteError::NoFleet | RouteError::NoCandidate) => {
                Words::new(503, "no_worker").later(SOON, NO_ENDPOINTS)
            }
            Refusal::Failed => Words::new(503, "router_failed").later(SOON, NO_ENDPOINTS),
            Refusal::Refused(RouteError::Pin(_)) => Words::new(400, "invalid_worker"),
            Refusal::Refused(RouteError::Overloaded(_)) => {
                Words::new(429, "overloaded").later(SOON, SATURATED)
            }
            Refusal::Refused(RouteError::Unsatisfied) => {
                Words::new(503, "no_eligible_worker").later(SOON, NO_ENDPOINTS)
            }
            Refusal::Refused(RouteError::NoPrefill) => {
                Words::new(503, "no_prefill_worker").later(SOON, NO_ENDPOINTS)
            }
            Refusal::Overflow { retry_after, .. } => {
                Words::new(429, "queue_full").later(*retry_after, SATURATED)
            }
            Refusal::Deadline { retry_after, .. } => {
                Words::new(429, "queue_timeout").later(*retry_after, "rejected-ttl-expired")
            }
        })
    }

    fn message(&self) -> String {
        match self {
            Refused::Routing(refusal, _) => refusal.to_string(),
            Refused::UnknownModel("") => "the request names no model, and several are served".to_owned(),
            Refused::UnknownModel(name) => {
                let shown: String = name.chars().take(openai::LONGEST_MODEL).collect();
                format!("the model `{shown}` does not exist")
            }
            Refused::Unreadable(Some(what)) => (*what).to_owned(),
            Refused::Unreadable(None) => "the request body is not understood".to_owned(),
            Refused::TooLarge => "the request body is larger than the limit".to_owned(),
            Refused::Unchecked(Unchecked::Unreadable) => {
                "the request body is no JSON object in UTF-8, or has a field many times".to_owned()
            }
            Refused::Unchecked(Unchecked::TooLarge) => {
                "not all of the request body could be read: it is larger than the limit, or came too slowly".to_owned()
            }
            Refused::Unchecked(Unchecked::NoRoom) => "too many request bodies are held at once".to_owned(),
        }
    }
}

/// The answer to a request that asks for the choice only.
pub fn choice(route: &Route, tokens: &[Vec<u32>]) -> Immediate {
    let mut worker_id =
        json!({ "decode_worker_id": route.to.rank.worker.0, "decode_dp_rank": route.to.rank.rank });
    if let Some(prefill) = route.prefill() {
        worker_id["prefill_worker_id"] = json!(prefill.to.rank.worker.0);
        worker_id["prefill_dp_rank"] = json!(prefill.to.rank.rank);
    }
    let computed_by = route.computed_by();
    let answer = json!({
        "object": "query_instance_id",
        "nvext": { "worker_id": worker_id, "token_ids": tokens.first() },
        "endpoint": route.to.endpoint,
        "mode": route.mode,
        "prompt_tokens": route.prompt_tokens,
        "overlap_blocks": computed_by.overlap,
        "predicted_cached_tokens": computed_by.cached_tokens,
    });
    let body = answer.to_string().into_bytes();
    Immediate {
        status: 200,
        headers: Vec::new(),
        body,
        details: "warmroute_choice",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::schedule::Ineligible;
    use crate::worker::WorkerId;

    fn header<'a>(answer: &'a Immediate, name: &str) -> Option<&'a str> {
        answer
            .headers
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.as_str())
    }

    #[test]
    fn refusals_are_openai_errors_and_what_envoy_can_route_is_none() {
        let overflow = Refusal::Overflow {
            class: "default".into(),
            kind: crate::admission::LimitKind::Requests,
            current: 2,
            limit: 2,
            retry_after: Duration::from_millis(1500),
        };
        let refused = Refusal::Refused;
        let cases = [
            (
                refused(RouteError::NoFleet),
                None,
                (503, Some("1"), "no_worker"),
            ),
            (
                refused(RouteError::NoCandidate),
                None,
                (503, Some("1"), "no_worker"),
            ),
            (Refusal::Failed, None, (503, Some("1"), "router_failed")),
            (
                refused(RouteError::Pin(Ineligible::PinUnknown(WorkerId(7)))),
                Some(400),
                (400, None, "invalid_worker"),
            ),
            (
                refused(RouteError::Overloaded(
                    Ineligible::AllEligibleWorkersOverloaded,
                )),
                Some(429),
                (429, Some("1"), "overloaded"),
            ),
            (
                refused(RouteError::Unsatisfied),
                Some(503),
                (503, Some("1"), "no_eligible_worker"),
            ),
            (
                refused(RouteError::NoPrefill),
                Some(503),
                (503, Some("1"), "no_prefill_worker"),
            ),
            (overflow, Some(429), (429, Some("2"), "queue_full")),
        ];
        let policy = Policy {
            says_mode: true,
            says_why_dropped: true,
            ..Policy::default()
        };
        for (refusal, open, closed) in cases {
            let answer = |mode| Refused::Routing(&refusal, mode).immediate("r-1", &policy);
            assert_eq!(
                answer(FailureMode::FailOpen).map(|answer| answer.status),
                open,
                "{refusal}"
            );
            let answer = answer(FailureMode::FailClosed).unwrap();
            let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            let retry = header(&answer, "retry-after");
            let code = body["error"]["code"].as_str().unwrap();
            assert_eq!((answer.status, retry, code), closed, "{refusal}");
            assert_eq!(body["error"]["message"], refusal.to_string());
            assert!(body["error"]["type"].is_string());
            assert_eq!(header(&answer, headers::REQUEST_ID), Some("r-1"));
            assert_eq!(header(&answer, headers::MODE), Some("rejected"));
            assert_eq!(
                header(&answer, headers::DROPPED).is_some(),
                retry.is_some(),
                "{refusal}"
            );
        }
    }

    #[test]
    fn what_the_operator_is_strict_about_has_its_own_status_and_code() {
        let cases = [
            (Refused::UnknownModel("m"), 404, "model_not_found", "`m`"),
            (
                Refused::UnknownModel(""),
                404,
                "model_not_found",
                "no model",
            ),
            (
                Refused::Unreadable(Some("line 3")),
                400,
                "invalid_body",
                "line 3",
            ),
            (
                Refused::Unreadable(None),
                400,
                "invalid_body",
                "not understood",
            ),
            (Refused::TooLarge, 413, "body_too_large", "larger"),
        ];
        for (refused, status, code, word) in cases {
            let answer = refused.immediate("", &Policy::default()).unwrap();
            let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(
                (answer.status, body["error"]["code"].as_str()),
                (status, Some(code))
            );
            assert!(
                body["error"]["message"].as_str().unwrap().contains(word),
                "{body}"
            );
            assert!(answer.headers.is_empty(), "{:?}", answer.headers);
        }
    }
}
