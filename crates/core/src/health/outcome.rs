//! Outcomes of requests, as far as they show the health of a worker rank.

use std::collections::BTreeMap;
use std::fmt;

use serde::Serialize;
use strum::{IntoStaticStr, VariantArray};

/// Outcome of a request at one worker rank.
#[derive(
    Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, IntoStaticStr, VariantArray,
)]
#[serde(rename_all = "snake_case")]
#[strum(serialize_all = "snake_case")]
pub enum RequestOutcome {
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

impl RequestOutcome {
    /// Classifies a status that the worker sent. A 503 that Envoy generated for a failed connection
    /// is [`RequestOutcome::Unreachable`] instead.
    pub fn from_status(status: u16) -> Self {
        match status {
            429 | 503 | 529 => RequestOutcome::Overloaded,
            500.. => RequestOutcome::ServerError,
            400..500 => RequestOutcome::Rejected,
            200..300 => RequestOutcome::Delivered,
            _ => RequestOutcome::Inconclusive,
        }
    }

    /// Returns the name in metrics and logs.
    pub fn as_str(self) -> &'static str {
        self.into()
    }

    /// Returns whether the outcome is a failure that the worker may have caused.
    pub fn is_failure(self) -> bool {
        !matches!(
            self,
            RequestOutcome::Delivered | RequestOutcome::Inconclusive
        )
    }

    /// Returns whether the failure is an answer of the application, so the endpoint is reachable
    /// and the request itself may be the cause.
    pub(super) fn is_application_failure(self) -> bool {
        matches!(
            self,
            RequestOutcome::ServerError
                | RequestOutcome::Rejected
                | RequestOutcome::Empty
                | RequestOutcome::NoOutput
                | RequestOutcome::Overloaded
        )
    }

    /// Returns the weight of the failure, in failures that certainly are the worker's. Clients cause
    /// most 4xx and cancellations, some prompts have no output, and overload passes.
    pub(super) fn weight(self) -> f64 {
        match self {
            RequestOutcome::Delivered | RequestOutcome::Inconclusive => 0.0,
            RequestOutcome::Rejected
            | RequestOutcome::NoOutput
            | RequestOutcome::Overloaded
            | RequestOutcome::Cancelled => 0.5,
            RequestOutcome::Unreachable
            | RequestOutcome::ServerError
            | RequestOutcome::Empty
            | RequestOutcome::NoResponse
            | RequestOutcome::NoContent => 1.0,
        }
    }
}

/// Number of failures by kind.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
#[serde(transparent)]
pub struct FailureCounts(BTreeMap<RequestOutcome, u32>);

impl FailureCounts {
    /// Counts a failure.
    pub(super) fn add(&mut self, outcome: RequestOutcome) {
        *self.0.entry(outcome).or_default() += 1;
    }

    /// Returns the most frequent failure.
    pub fn most_frequent(&self) -> Option<RequestOutcome> {
        let by_count = |(_, count): &(&RequestOutcome, &u32)| **count;
        Some(*self.0.iter().max_by_key(by_count)?.0)
    }

    pub(super) fn weight(&self) -> f64 {
        let kinds = self.0.iter();
        kinds
            .map(|(kind, count)| kind.weight() * f64::from(*count))
            .sum()
    }
}

#[cfg(test)]
impl From<[(RequestOutcome, u32); 1]> for FailureCounts {
    fn from(counts: [(RequestOutcome, u32); 1]) -> Self {
        Self(counts.into())
    }
}

impl fmt::Display for FailureCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, (kind, count)) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { " " };
            write!(f, "{separator}{}={count}", kind.as_str())?;
        }
        Ok(())
    }
}
