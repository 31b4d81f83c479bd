//! Immediate responses: rejections as OpenAI errors, and the reply to a request that only queries
//! the routing decision. Only this module maps errors to HTTP. For an error without a mapping,
//! Envoy chooses the worker.

use std::time::Duration;

use serde_json::json;
use warmroute_core::router::{Reason, Route, RouteError};
use warmroute_tokens::openai;

use super::config::FailureMode;
use super::headers;
use super::pipeline::ExchangePolicy;
use super::reply::ImmediateReply;
use crate::dispatch::DispatchError;
use crate::prefill::UncheckedBodyError;

/// `retry-after` for errors without a better estimate.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Returns the response to a request whose mirrored prefill timed out.
pub(super) fn prefill_timeout() -> ImmediateReply {
    let message = "the prefill of this request timed out";
    let error = json!({"error": {"message": message, "type": "service_unavailable_error", "param": null, "code": "prefill_failed"}});
    ImmediateReply::new(504, &error, "warmroute_prefill_failed")
}

/// Reason to reject a request, or to leave it to Envoy.
#[derive(Debug)]
pub enum RequestRejection<'a> {
    /// Error of the router, the queue or the session, and the failure mode.
    Routing(&'a DispatchError, FailureMode),
    /// The model is unknown, in strict mode.
    UnknownModel(&'a str),
    /// The body is unreadable, in strict mode; with the parse error, if known.
    Unreadable(Option<&'a str>),
    /// The body exceeds the limit, in strict mode.
    TooLarge,
    /// The body could not be checked for KV transfer fields.
    Unchecked(UncheckedBodyError),
}

/// A rejection as HTTP status, OpenAI error code, and llm-d reason.
struct ErrorReply {
    status: u16,
    code: &'static str,
    retry_after: Option<Duration>,
    dropped_reason: Option<&'static str>,
}

impl ErrorReply {
    fn new(status: u16, code: &'static str) -> Self {
        Self {
            status,
            code,
            retry_after: None,
            dropped_reason: None,
        }
    }

    fn with_retry(mut self, retry_after: Duration, dropped_reason: &'static str) -> Self {
        self.retry_after = Some(retry_after);
        self.dropped_reason = Some(dropped_reason);
        self
    }
}

impl RequestRejection<'_> {
    /// Returns the reason for the metrics.
    pub fn reason(&self) -> Reason {
        match self {
            RequestRejection::Routing(DispatchError::Refused(error), _) => error.reason(),
            RequestRejection::Routing(DispatchError::Overflow { .. }, _) => Reason::QueueFull,
            RequestRejection::Routing(DispatchError::DeadlineExceeded { .. }, _) => {
                Reason::QueueTimeout
            }
            RequestRejection::Routing(DispatchError::Panicked, _) => Reason::RouterError,
            RequestRejection::UnknownModel(_) => Reason::UnknownModel,
            RequestRejection::Unreadable(_) => Reason::Unparseable,
            RequestRejection::TooLarge
            | RequestRejection::Unchecked(UncheckedBodyError::TooLarge) => Reason::BodyTooLarge,
            RequestRejection::Unchecked(UncheckedBodyError::Unreadable) => Reason::Unparseable,
            RequestRejection::Unchecked(UncheckedBodyError::OverBudget) => Reason::BodyNotSent,
        }
    }

    /// Returns the response to the client; `None` if Envoy may choose the worker.
    pub fn immediate_reply(
        &self,
        request_id: &str,
        policy: &ExchangePolicy,
    ) -> Option<ImmediateReply> {
        if self.fails_open(policy) {
            return None;
        }
        let reply = self.error_reply();
        let kind = match reply.status {
            400 | 413 => "invalid_request_error",
            404 => "not_found_error",
            429 => "rate_limit_error",
            _ => "service_unavailable_error",
        };
        let message = self.message();
        let error = json!({ "error": { "message": message, "type": kind, "param": null, "code": reply.code } });
        let mut headers = Vec::new();
        // The header has whole seconds, so fractions are rounded up.
        let seconds = |wait: Duration| wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        headers.extend(
            reply
                .retry_after
                .map(|wait| ("retry-after", seconds(wait).to_string())),
        );
        if !request_id.is_empty() {
            headers.push((headers::REQUEST_ID, request_id.to_owned()));
        }
        if policy.response_headers.mode {
            headers.push((headers::MODE, "rejected".to_owned()));
        }
        if let Some(dropped_reason) = reply
            .dropped_reason
            .filter(|_| policy.dropped_reason_header)
        {
            headers.push((headers::DROPPED_REASON, dropped_reason.to_owned()));
        }
        Some(ImmediateReply {
            headers,
            ..ImmediateReply::new(reply.status, &error, "warmroute_refused")
        })
    }

    /// Returns whether Envoy may choose the worker.
    fn fails_open(&self, policy: &ExchangePolicy) -> bool {
        let RequestRejection::Routing(error, FailureMode::FailOpen) = self else {
            return false;
        };
        match error {
            DispatchError::Refused(RouteError::NoFleet | RouteError::NoCandidate)
            | DispatchError::Panicked => true,
            DispatchError::Refused(RouteError::NoPrefill) => policy.fails_open_without_prefill,
            _ => false,
        }
    }

    fn error_reply(&self) -> ErrorReply {
        const SATURATED: &str = "rejected-saturated";
        let unavailable = |code| {
            ErrorReply::new(503, code).with_retry(DEFAULT_RETRY_AFTER, "rejected-no-endpoints")
        };
        let error = match self {
            RequestRejection::Routing(error, _) => error,
            RequestRejection::UnknownModel(_) => return ErrorReply::new(404, "model_not_found"),
            RequestRejection::TooLarge
            | RequestRejection::Unchecked(UncheckedBodyError::TooLarge) => {
                return ErrorReply::new(413, "body_too_large");
            }
            RequestRejection::Unreadable(_)
            | RequestRejection::Unchecked(UncheckedBodyError::Unreadable) => {
                return ErrorReply::new(400, "invalid_body");
            }
            RequestRejection::Unchecked(UncheckedBodyError::OverBudget) => {
                return ErrorReply::new(503, "body_buffer_full")
                    .with_retry(DEFAULT_RETRY_AFTER, SATURATED);
            }
        };
        match error {
            DispatchError::Refused(RouteError::NoFleet | RouteError::NoCandidate) => {
                unavailable("no_worker")
            }
            DispatchError::Panicked => unavailable("router_error"),
            DispatchError::Refused(RouteError::Pin(_)) => ErrorReply::new(400, "invalid_worker"),
            DispatchError::Refused(RouteError::Overloaded(_)) => {
                ErrorReply::new(429, "overloaded").with_retry(DEFAULT_RETRY_AFTER, SATURATED)
            }
            DispatchError::Refused(RouteError::Unsatisfied) => unavailable("no_eligible_worker"),
            DispatchError::Refused(RouteError::NoPrefill) => unavailable("no_prefill_worker"),
            DispatchError::Overflow { retry_after, .. } => {
                ErrorReply::new(429, "queue_full").with_retry(*retry_after, SATURATED)
            }
            DispatchError::DeadlineExceeded { retry_after, .. } => {
                ErrorReply::new(429, "queue_timeout")
                    .with_retry(*retry_after, "rejected-ttl-expired")
            }
        }
    }

    fn message(&self) -> String {
        match self {
            RequestRejection::Routing(error, _) => error.to_string(),
            RequestRejection::UnknownModel("") => {
                "the request names no model, and several are served".to_owned()
            }
            RequestRejection::UnknownModel(name) => {
                let shown: String = name.chars().take(openai::MAX_MODEL_NAME_BYTES).collect();
                format!("the model `{shown}` does not exist")
            }
            RequestRejection::Unreadable(Some(error)) => (*error).to_owned(),
            RequestRejection::Unreadable(None) => "the request body is unreadable".to_owned(),
            RequestRejection::TooLarge => "the request body is larger than the limit".to_owned(),
            RequestRejection::Unchecked(error) => error.to_string(),
        }
    }
}

/// Returns the reply to a request that only queries the routing decision.
pub(super) fn query_reply(route: &Route, tokens: &[Vec<u32>]) -> ImmediateReply {
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
    ImmediateReply::new(200, &answer, "warmroute_choice")
}

#[cfg(test)]
mod tests {
    use super::*;
    use warmroute_core::policy::EligibilityError;
    use warmroute_core::worker::WorkerId;

    fn header<'a>(answer: &'a ImmediateReply, name: &str) -> Option<&'a str> {
        answer
            .headers
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.as_str())
    }

    /// Asserts the parts that all rejections share.
    fn assert_is_api_error(answer: &ImmediateReply, error: &DispatchError) {
        let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
        assert_eq!(body["error"]["message"], error.to_string());
        assert!(body["error"]["type"].is_string());
        assert_eq!(header(answer, headers::REQUEST_ID), Some("r-1"));
        assert_eq!(header(answer, headers::MODE), Some("rejected"));
        assert_eq!(
            header(answer, headers::DROPPED_REASON).is_some(),
            header(answer, "retry-after").is_some(),
            "{error}"
        );
    }

    #[test]
    fn rejections_are_openai_errors_unless_failing_open() {
        let overflow = DispatchError::Overflow {
            class: "default".into(),
            kind: crate::dispatch::queue::QueueLimitKind::Requests,
            current: 2,
            limit: 2,
            retry_after: Duration::from_millis(1500),
        };
        let refused = DispatchError::Refused;
        let pin = RouteError::Pin(EligibilityError::PinUnknown(WorkerId(7)));
        let overloaded = RouteError::Overloaded(EligibilityError::AllEligibleWorkersOverloaded);
        let unavailable = |code| (503, Some("1"), code);
        let cases = [
            (refused(RouteError::NoFleet), None, unavailable("no_worker")),
            (
                refused(RouteError::NoCandidate),
                None,
                unavailable("no_worker"),
            ),
            (DispatchError::Panicked, None, unavailable("router_error")),
            (refused(pin), Some(400), (400, None, "invalid_worker")),
            (
                refused(overloaded),
                Some(429),
                (429, Some("1"), "overloaded"),
            ),
            (
                refused(RouteError::Unsatisfied),
                Some(503),
                unavailable("no_eligible_worker"),
            ),
            (
                refused(RouteError::NoPrefill),
                Some(503),
                unavailable("no_prefill_worker"),
            ),
            (overflow, Some(429), (429, Some("2"), "queue_full")),
        ];
        let policy = ExchangePolicy {
            dropped_reason_header: true,
            ..ExchangePolicy::default()
        };
        for (error, fail_open, fail_closed) in cases {
            let answer =
                |mode| RequestRejection::Routing(&error, mode).immediate_reply("r-1", &policy);
            assert_eq!(
                answer(FailureMode::FailOpen).map(|answer| answer.status),
                fail_open,
                "{error}"
            );
            let answer = answer(FailureMode::FailClosed).unwrap();
            let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            let retry = header(&answer, "retry-after");
            let code = body["error"]["code"].as_str().unwrap();
            assert_eq!((answer.status, retry, code), fail_closed, "{error}");
            assert_is_api_error(&answer, &error);
        }
    }

    #[test]
    fn front_ends_serve_requests_without_prefill_worker() {
        let policy = ExchangePolicy {
            fails_open_without_prefill: true,
            ..ExchangePolicy::default()
        };
        let is_rejected = |error| {
            let error = DispatchError::Refused(error);
            let rejection = RequestRejection::Routing(&error, FailureMode::FailOpen);
            rejection.immediate_reply("r-1", &policy).is_some()
        };
        assert!(!is_rejected(RouteError::NoPrefill));
        assert!(is_rejected(RouteError::Unsatisfied));
    }

    #[test]
    fn strict_rejections_have_own_status_and_code() {
        let cases = [
            (
                RequestRejection::UnknownModel("m"),
                404,
                "model_not_found",
                "`m`",
            ),
            (
                RequestRejection::UnknownModel(""),
                404,
                "model_not_found",
                "no model",
            ),
            (
                RequestRejection::Unreadable(Some("line 3")),
                400,
                "invalid_body",
                "line 3",
            ),
            (
                RequestRejection::Unreadable(None),
                400,
                "invalid_body",
                "unreadable",
            ),
            (RequestRejection::TooLarge, 413, "body_too_large", "larger"),
        ];
        for (rejection, status, code, text) in cases {
            let answer = rejection
                .immediate_reply("", &ExchangePolicy::default())
                .unwrap();
            let body: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
            assert_eq!(
                (answer.status, body["error"]["code"].as_str()),
                (status, Some(code))
            );
            assert!(
                body["error"]["message"].as_str().unwrap().contains(text),
                "{body}"
            );
            assert_eq!(answer.headers, [(headers::MODE, "rejected".to_owned())]);
        }
    }
}
