//! Errors of the gRPC service and their mapping to gRPC statuses.

use std::collections::HashMap;
use std::time::Duration;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};
use warmroute_core::index::dump::VERSION;
use warmroute_core::load::ledger::LedgerError;
use warmroute_core::policy::EligibilityError;
use warmroute_core::router::{Reason, RouteError};
use warmroute_core::worker::WorkerRank;

use crate::dispatch::DispatchError;

/// Domain of the reasons in `google.rpc.ErrorInfo`.
const ERROR_DOMAIN: &str = "warmroute";

/// Default retry delay.
const DEFAULT_RETRY_AFTER: Duration = Duration::from_secs(1);

/// Error of a call.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ApiError {
    /// Malformed call.
    #[error("{0}")]
    InvalidArgument(String),
    /// Unknown model.
    #[error("the model `{0}` is not configured")]
    UnknownModel(String),
    /// Unknown worker rank, or a rank without an event source.
    #[error("worker rank {0} is not known, or has no KV event source")]
    NoEventSource(WorkerRank),
    /// Unknown booking.
    #[error(
        "no booking of attempt {number} of request `{request}`: it was never made, has ended or \
        expired, or its worker was removed"
    )]
    NotBooked {
        /// Request id.
        request: String,
        /// Attempt number.
        number: u64,
    },
    /// The attempt is booked on another worker rank.
    #[error("attempt {number} of request `{request}` is already booked on worker rank {rank}")]
    RankMismatch {
        /// Request id.
        request: String,
        /// Attempt number.
        number: u64,
        /// Worker rank of the booking.
        rank: WorkerRank,
    },
    /// Rejected by the ledger.
    #[error(transparent)]
    Booking(#[from] LedgerError),
    /// Too many concurrent streams of this kind.
    #[error("limit of {1} concurrent {0} reached")]
    TooManyStreams(&'static str, usize),
    /// The event source is disconnected, so the index may be stale.
    #[error("the KV event source of worker rank {0} is disconnected")]
    SourceDetached(WorkerRank),
    /// Unsupported dump format.
    #[error("dump format {0} is not supported, only {VERSION}")]
    UnsupportedFormat(u32),
    /// This process is not ready.
    #[error("this process is not ready")]
    NotReady,
    /// Rejected by admission.
    #[error(transparent)]
    Admission(#[from] DispatchError),
    /// A body that cannot be routed.
    #[error("the body cannot be routed: {}", .0.as_str())]
    InvalidBody(Reason),
}

impl From<RouteError> for ApiError {
    fn from(error: RouteError) -> Self {
        ApiError::Admission(DispatchError::Refused(error))
    }
}

impl ApiError {
    /// Creates an error for a malformed call.
    pub(super) fn invalid_argument(text: impl Into<String>) -> Self {
        ApiError::InvalidArgument(text.into())
    }

    /// Returns the name of the status code for metrics.
    pub(super) fn code_name(&self) -> &'static str {
        match self.status_code().0 {
            Code::InvalidArgument => "INVALID_ARGUMENT",
            Code::NotFound => "NOT_FOUND",
            Code::AlreadyExists => "ALREADY_EXISTS",
            Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Code::FailedPrecondition => "FAILED_PRECONDITION",
            Code::Unavailable => "UNAVAILABLE",
            _ => "INTERNAL",
        }
    }

    /// Returns structured details if the queue rejected the request.
    fn details(&self) -> Option<ErrorDetails> {
        let (reason, retry_after, facts) = match self {
            ApiError::Admission(DispatchError::Overflow {
                class,
                kind,
                current,
                limit,
                retry_after,
            }) => {
                let facts = [
                    ("class", class.to_string()),
                    ("kind", kind.to_string()),
                    ("current", current.to_string()),
                    ("limit", limit.to_string()),
                ];
                ("QUEUE_FULL", retry_after, Vec::from(facts))
            }
            ApiError::Admission(DispatchError::DeadlineExceeded {
                class,
                waited,
                retry_after,
            }) => {
                let facts = [
                    ("class", class.to_string()),
                    ("waited_ms", waited.as_millis().to_string()),
                ];
                ("QUEUE_DEADLINE", retry_after, Vec::from(facts))
            }
            _ => return None,
        };
        let facts = facts
            .into_iter()
            .map(|(name, value)| (name.to_owned(), value));
        let mut details = ErrorDetails::with_error_info(
            reason,
            ERROR_DOMAIN,
            HashMap::<String, String>::from_iter(facts),
        );
        details.set_retry_info(Some(*retry_after));
        Some(details)
    }

    /// Returns the status code and the retry delay.
    fn status_code(&self) -> (Code, Option<Duration>) {
        match self {
            ApiError::InvalidArgument(_) | ApiError::InvalidBody(_) => {
                (Code::InvalidArgument, None)
            }
            ApiError::UnknownModel(_) | ApiError::NoEventSource(_) | ApiError::NotBooked { .. } => {
                (Code::NotFound, None)
            }
            ApiError::RankMismatch { .. }
            | ApiError::Booking(LedgerError::AlreadyBooked { .. }) => (Code::AlreadyExists, None),
            ApiError::Booking(LedgerError::NotServing { .. }) => (Code::NotFound, None),
            ApiError::Booking(LedgerError::Full { .. } | LedgerError::TooManyBlocks { .. }) => {
                (Code::ResourceExhausted, Some(DEFAULT_RETRY_AFTER))
            }
            ApiError::SourceDetached(_) | ApiError::UnsupportedFormat(_) => {
                (Code::FailedPrecondition, None)
            }
            ApiError::NotReady => (Code::Unavailable, Some(DEFAULT_RETRY_AFTER)),
            ApiError::TooManyStreams(..) => (Code::ResourceExhausted, Some(DEFAULT_RETRY_AFTER)),
            ApiError::Admission(
                DispatchError::Overflow { retry_after, .. }
                | DispatchError::DeadlineExceeded { retry_after, .. },
            ) => (Code::ResourceExhausted, Some(*retry_after)),
            ApiError::Admission(DispatchError::Panicked) => (Code::Internal, None),
            ApiError::Admission(DispatchError::Refused(error)) => route_error_code(*error),
        }
    }
}

fn route_error_code(error: RouteError) -> (Code, Option<Duration>) {
    match error {
        RouteError::NoFleet | RouteError::NoCandidate | RouteError::NoPrefill => {
            (Code::Unavailable, Some(DEFAULT_RETRY_AFTER))
        }
        RouteError::Pin(
            EligibilityError::PinUnknown(_) | EligibilityError::PinRankUnknown { .. },
        ) => (Code::NotFound, None),
        RouteError::Pin(_) => (Code::InvalidArgument, None),
        RouteError::Overloaded(_) => (Code::ResourceExhausted, Some(DEFAULT_RETRY_AFTER)),
        RouteError::Unsatisfied => (Code::FailedPrecondition, None),
    }
}

impl From<ApiError> for Status {
    fn from(error: ApiError) -> Self {
        let (code, retry) = error.status_code();
        let mut status = match error.details() {
            Some(details) => Status::with_error_details(code, error.to_string(), details),
            None => Status::new(code, error.to_string()),
        };
        if let Some(retry) = retry {
            // Rounded up to whole seconds.
            let seconds = retry.as_secs() + u64::from(retry.subsec_nanos() > 0);
            status
                .metadata_mut()
                .insert("retry-after", MetadataValue::from(seconds));
        }
        status
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dispatch::queue::QueueLimitKind;
    use warmroute_core::worker::WorkerId;

    #[test]
    fn errors_map_to_statuses_and_retry_delays() {
        let rank = WorkerRank::new(7, 0);
        let retry_after = Duration::from_millis(1500);
        let full = DispatchError::DeadlineExceeded {
            class: "default".into(),
            waited: Duration::ZERO,
            retry_after,
        };
        let precondition = Code::FailedPrecondition;
        let exhausted = Code::ResourceExhausted;
        let pin = |error| ApiError::from(RouteError::Pin(error));
        let unknown_pin = EligibilityError::PinUnknown(WorkerId(7));
        let excluded_pin = EligibilityError::PinnedWorkerNotAllowed(WorkerId(7));
        let unparseable = ApiError::InvalidBody(Reason::Unparseable);
        let booked = LedgerError::AlreadyBooked { attempt: 1 };
        let not_serving = LedgerError::NotServing { rank };
        let too_many_blocks = LedgerError::TooManyBlocks { limit: 1 };
        let too_many_streams = ApiError::TooManyStreams("dumps", 4);
        let cases: [(ApiError, Code, Option<&str>); 17] = [
            (ApiError::SourceDetached(rank), precondition, None),
            (ApiError::UnsupportedFormat(1), precondition, None),
            (ApiError::NotReady, Code::Unavailable, Some("1")),
            (ApiError::invalid_argument("x"), Code::InvalidArgument, None),
            (unparseable, Code::InvalidArgument, None),
            (ApiError::UnknownModel("m".into()), Code::NotFound, None),
            (booked.into(), Code::AlreadyExists, None),
            (not_serving.into(), Code::NotFound, None),
            (LedgerError::Full { limit: 1 }.into(), exhausted, Some("1")),
            (too_many_blocks.into(), exhausted, Some("1")),
            (too_many_streams, exhausted, Some("1")),
            (full.into(), exhausted, Some("2")),
            (DispatchError::Panicked.into(), Code::Internal, None),
            (RouteError::NoFleet.into(), Code::Unavailable, Some("1")),
            (pin(unknown_pin), Code::NotFound, None),
            (pin(excluded_pin), Code::InvalidArgument, None),
            (RouteError::Unsatisfied.into(), precondition, None),
        ];
        for (error, code, retry) in cases {
            let status = Status::from(error.clone());
            let retry_header = status
                .metadata()
                .get("retry-after")
                .map(|value| value.to_str().unwrap());
            assert_eq!((status.code(), retry_header), (code, retry), "{error}");
            assert_eq!(status.message(), error.to_string());
        }
    }

    #[test]
    fn queue_rejections_have_structured_details() {
        let retry_after = Duration::from_millis(1500);
        let class = || "default".into();
        let kind = QueueLimitKind::PromptTokens;
        let full = DispatchError::Overflow {
            class: class(),
            kind,
            current: 70,
            limit: 64,
            retry_after,
        };
        let late = DispatchError::DeadlineExceeded {
            class: class(),
            waited: Duration::from_millis(30),
            retry_after,
        };
        let kind = kind.to_string();
        let full_facts = vec![
            ("class", "default"),
            ("current", "70"),
            ("kind", kind.as_str()),
            ("limit", "64"),
        ];
        let late_facts = vec![("class", "default"), ("waited_ms", "30")];
        for (error, reason, expected) in [
            (full, "QUEUE_FULL", full_facts),
            (late, "QUEUE_DEADLINE", late_facts),
        ] {
            let details = Status::from(ApiError::from(error)).get_error_details();
            let info = details.error_info().unwrap();
            let mut facts: Vec<_> = info
                .metadata
                .iter()
                .map(|(key, value)| (&**key, &**value))
                .collect();
            facts.sort_unstable();
            assert_eq!(
                (&*info.reason, &*info.domain, facts),
                (reason, "warmroute", expected)
            );
            assert_eq!(details.retry_info().unwrap().retry_delay, Some(retry_after));
        }
        assert!(
            Status::from(ApiError::NotReady)
                .get_error_details()
                .error_info()
                .is_none()
        );
    }
}
