//! Outcomes of requests, as far as they show the health of a worker rank.

use serde::Serialize;

/// Outcome of a request at one worker rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum WorkerOutcome {
    /// Content of the answer reached Envoy.
    Delivered,
    /// No connection, or one that was reset before the response.
    Unreachable,
    /// A status of 500 or more that does not report overload.
    ServerError,
    /// A 4xx status that does not report overload.
    Rejected,
    /// A 2xx status without the content that is due.
    Empty,
    /// A stream that reports its end and delivers no content. Its engine may have computed it: the
    /// first token can end the output.
    NoOutput,
    /// No response headers in the expected time.
    NoResponse,
    /// Response headers, but no content in the expected time.
    NoContent,
    /// The worker reported overload.
    Overloaded,
    /// The client disconnected after a longer wait than expected, before any content.
    Cancelled,
    /// The outcome says nothing about the worker.
    Inconclusive,
}

impl WorkerOutcome {
    /// Outcomes that count as failures, for metrics.
    pub const FAILURES: [WorkerOutcome; 9] = [
        WorkerOutcome::Unreachable,
        WorkerOutcome::ServerError,
        WorkerOutcome::Rejected,
        WorkerOutcome::Empty,
        WorkerOutcome::NoOutput,
        WorkerOutcome::NoResponse,
        WorkerOutcome::NoContent,
        WorkerOutcome::Overloaded,
        WorkerOutcome::Cancelled,
    ];

    /// Classifies a status that the worker sent. A 503 that Envoy generated for a failed connection
    /// is [`WorkerOutcome::Unreachable`] instead.
    pub fn from_status(status: u16) -> Self {
        match status {
            429 | 503 | 529 => WorkerOutcome::Overloaded,
            500.. => WorkerOutcome::ServerError,
            400..500 => WorkerOutcome::Rejected,
            200..300 => WorkerOutcome::Delivered,
            _ => WorkerOutcome::Inconclusive,
        }
    }

    /// Returns the name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkerOutcome::Delivered => "delivered",
            WorkerOutcome::Unreachable => "unreachable",
            WorkerOutcome::ServerError => "server_error",
            WorkerOutcome::Rejected => "rejected",
            WorkerOutcome::Empty => "empty",
            WorkerOutcome::NoOutput => "no_output",
            WorkerOutcome::NoResponse => "no_response",
            WorkerOutcome::NoContent => "no_content",
            WorkerOutcome::Overloaded => "overloaded",
            WorkerOutcome::Cancelled => "cancelled",
            WorkerOutcome::Inconclusive => "inconclusive",
        }
    }

    /// Returns whether the outcome is a failure that the worker may have caused.
    pub fn is_failure(self) -> bool {
        !matches!(self, WorkerOutcome::Delivered | WorkerOutcome::Inconclusive)
    }

    /// Returns whether the failure is an answer of the application, so the endpoint is reachable
    /// and the request itself may be the cause.
    pub(super) fn is_answer(self) -> bool {
        matches!(
            self,
            WorkerOutcome::ServerError
                | WorkerOutcome::Rejected
                | WorkerOutcome::Empty
                | WorkerOutcome::NoOutput
                | WorkerOutcome::Overloaded
        )
    }

    /// Returns the weight of the failure, in failures that certainly are the worker's. Clients cause
    /// most 4xx and cancellations, some prompts have no output, and overload passes.
    pub(super) fn weight(self) -> f64 {
        match self {
            WorkerOutcome::Delivered | WorkerOutcome::Inconclusive => 0.0,
            WorkerOutcome::Rejected
            | WorkerOutcome::NoOutput
            | WorkerOutcome::Overloaded
            | WorkerOutcome::Cancelled => 0.5,
            WorkerOutcome::Unreachable
            | WorkerOutcome::ServerError
            | WorkerOutcome::Empty
            | WorkerOutcome::NoResponse
            | WorkerOutcome::NoContent => 1.0,
        }
    }
}
