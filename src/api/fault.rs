//! What can go wrong in a call, and the one place that says which gRPC status it is.

use std::collections::HashMap;
use std::time::Duration;

use tonic::metadata::MetadataValue;
use tonic::{Code, Status};
use tonic_types::{ErrorDetails, StatusExt as _};

use crate::entrance::Refusal;
use crate::index::dump::VERSION;
use crate::load::ledger::Refused;
use crate::router::{Reason, RouteError};
use crate::schedule::Ineligible;
use crate::worker::WorkerRank;

/// Domain of the reasons in `google.rpc.ErrorInfo`.
const DOMAIN: &str = "warmroute";

/// When to come back where nothing better is known.
const SOON: Duration = Duration::from_secs(1);

/// Why a call failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Fault {
    /// What was asked makes no sense.
    #[error("{0}")]
    Argument(String),
    /// No such model.
    #[error("the model `{0}` is not configured")]
    UnknownModel(String),
    /// No such worker rank, or it has no event source.
    #[error("worker rank {0} is not known, or tells nothing of its cache")]
    NoEvents(WorkerRank),
    /// No such booking.
    #[error(
        "nothing is booked for attempt {number} at request `{request}`: it never was, has ended, was silent for too long, \
         or its worker has gone"
    )]
    NotBooked {
        /// The request.
        request: String,
        /// The attempt.
        number: u64,
    },
    /// The attempt is booked somewhere else.
    #[error("attempt {number} at request `{request}` is booked on worker rank {rank} already")]
    BookedElsewhere {
        /// The request.
        request: String,
        /// The attempt.
        number: u64,
        /// Where.
        rank: WorkerRank,
    },
    /// It cannot be booked.
    #[error(transparent)]
    Booking(#[from] Refused),
    /// There are as many already as there may be.
    #[error("there are {1} {0} already")]
    TooMany(&'static str, usize),
    /// Nobody listens to its events now, so what is known may be anything.
    #[error("the events of worker rank {0} do not come in")]
    Detached(WorkerRank),
    /// Dumps are written otherwise.
    #[error("dumps of version {0} are not written here, only those of version {VERSION}")]
    Format(u32),
    /// Nothing of use is known yet.
    #[error("this one is not ready itself")]
    NotReady,
    /// It was not let in.
    #[error(transparent)]
    Refusal(#[from] Refusal),
    /// The body is nothing that could be routed.
    #[error("the body cannot be routed: {}", .0.as_str())]
    Body(Reason),
}

impl From<RouteError> for Fault {
    fn from(error: RouteError) -> Self {
        Fault::Refusal(Refusal::Refused(error))
    }
}

impl Fault {
    /// A call that makes no sense.
    pub(super) fn argument(text: impl Into<String>) -> Self {
        Fault::Argument(text.into())
    }

    /// The status as metrics name it.
    pub(super) fn name(&self) -> &'static str {
        match self.code().0 {
            Code::InvalidArgument => "INVALID_ARGUMENT",
            Code::NotFound => "NOT_FOUND",
            Code::AlreadyExists => "ALREADY_EXISTS",
            Code::ResourceExhausted => "RESOURCE_EXHAUSTED",
            Code::FailedPrecondition => "FAILED_PRECONDITION",
            Code::Unavailable => "UNAVAILABLE",
            _ => "INTERNAL",
        }
    }

    /// The machine-readable reason why the queue refused a request.
    fn details(&self) -> Option<ErrorDetails> {
        let (reason, retry_after, facts) = match self {
            Fault::Refusal(Refusal::Overflow {
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
            Fault::Refusal(Refusal::Deadline {
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
            DOMAIN,
            HashMap::<String, String>::from_iter(facts),
        );
        details.set_retry_info(Some(*retry_after));
        Some(details)
    }

    /// The status, and after how long to come back.
    fn code(&self) -> (Code, Option<Duration>) {
        match self {
            Fault::Argument(_) | Fault::Body(_) => (Code::InvalidArgument, None),
            Fault::UnknownModel(_) | Fault::NoEvents(_) | Fault::NotBooked { .. } => {
                (Code::NotFound, None)
            }
            Fault::BookedElsewhere { .. } | Fault::Booking(Refused::Booked { .. }) => {
                (Code::AlreadyExists, None)
            }
            Fault::Booking(Refused::NotServing { .. }) => (Code::NotFound, None),
            Fault::Booking(Refused::Full { .. } | Refused::Blocks { .. }) => {
                (Code::ResourceExhausted, Some(SOON))
            }
            Fault::Detached(_) | Fault::Format(_) => (Code::FailedPrecondition, None),
            Fault::NotReady => (Code::Unavailable, Some(SOON)),
            Fault::TooMany(..) => (Code::ResourceExhausted, Some(SOON)),
            Fault::Refusal(
                Refusal::Overflow { retry_after, .. } | Refusal::Deadline { retry_after, .. },
            ) => (Code::ResourceExhausted, Some(*retry_after)),
            Fault::Refusal(Refusal::Failed) => (Code::Internal, None),
            Fault::Refusal(Refusal::Refused(error)) => code_of(*error),
        }
    }
}

fn code_of(error: RouteError) -> (Code, Option<Duration>) {
    match error {
        RouteError::NoFleet | RouteError::NoCandidate | RouteError::NoPrefill => {
            (Code::Unavailable, Some(SOON))
        }
        RouteError::Pin(Ineligible::PinUnknown(_) | Ineligible::PinRankUnknown { .. }) => {
            (Code::NotFound, None)
        }
        RouteError::Pin(_) => (Code::InvalidArgument, None),
        RouteError::Overloaded(_) => (Code::ResourceExhausted, Some(SOON)),
        RouteError::Unsatisfied => (Code::FailedPrecondition, None),
    }
}

impl From<Fault> for Status {
    fn from(fault: Fault) -> Self {
        let (code, retry) = fault.code();
        let mut status = match fault.details() {
            Some(details) => Status::with_error_details(code, fault.to_string(), details),
            None => Status::new(code, fault.to_string()),
        };
        if let Some(retry) = retry {
            // A fraction of a second is still a second.
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
    use crate::admission::LimitKind;
    use crate::worker::{DpRank, WorkerId};

    #[test]
    fn every_refusal_has_the_status_that_says_what_to_do() {
        let rank = WorkerRank {
            worker: WorkerId(7),
            rank: DpRank(0),
        };
        let retry_after = Duration::from_millis(1500);
        let full = Refusal::Deadline {
            class: "default".into(),
            waited: Duration::ZERO,
            retry_after,
        };
        let cases: [(Fault, Code, Option<&str>); 17] = [
            (Fault::Detached(rank), Code::FailedPrecondition, None),
            (Fault::Format(1), Code::FailedPrecondition, None),
            (Fault::NotReady, Code::Unavailable, Some("1")),
            (Fault::argument("x"), Code::InvalidArgument, None),
            (Fault::Body(Reason::Unreadable), Code::InvalidArgument, None),
            (Fault::UnknownModel("m".into()), Code::NotFound, None),
            (
                Refused::Booked { attempt: 1 }.into(),
                Code::AlreadyExists,
                None,
            ),
            (Refused::NotServing { rank }.into(), Code::NotFound, None),
            (
                Refused::Full { most: 1 }.into(),
                Code::ResourceExhausted,
                Some("1"),
            ),
            (
                Refused::Blocks { most: 1 }.into(),
                Code::ResourceExhausted,
                Some("1"),
            ),
            (
                Fault::TooMany("dumps", 4),
                Code::ResourceExhausted,
                Some("1"),
            ),
            (full.into(), Code::ResourceExhausted, Some("2")),
            (Refusal::Failed.into(), Code::Internal, None),
            (RouteError::NoFleet.into(), Code::Unavailable, Some("1")),
            (
                RouteError::Pin(Ineligible::PinUnknown(WorkerId(7))).into(),
                Code::NotFound,
                None,
            ),
            (
                RouteError::Pin(Ineligible::PinnedWorkerNotAllowed(WorkerId(7))).into(),
                Code::InvalidArgument,
                None,
            ),
            (
                RouteError::Unsatisfied.into(),
                Code::FailedPrecondition,
                None,
            ),
        ];
        for (fault, code, retry) in cases {
            let status = Status::from(fault.clone());
            let told = status
                .metadata()
                .get("retry-after")
                .map(|value| value.to_str().unwrap());
            assert_eq!((status.code(), told), (code, retry), "{fault}");
            assert_eq!(status.message(), fault.to_string());
        }
    }

    #[test]
    fn queue_refusals_carry_structured_details() {
        let retry_after = Duration::from_millis(1500);
        let class = || "default".into();
        let kind = LimitKind::PromptTokens;
        let full = Refusal::Overflow {
            class: class(),
            kind,
            current: 70,
            limit: 64,
            retry_after,
        };
        let late = Refusal::Deadline {
            class: class(),
            waited: Duration::from_millis(30),
            retry_after,
        };
        let kind = kind.to_string();
        let of_full = vec![
            ("class", "default"),
            ("current", "70"),
            ("kind", kind.as_str()),
            ("limit", "64"),
        ];
        let of_late = vec![("class", "default"), ("waited_ms", "30")];
        for (refusal, reason, expected) in [
            (full, "QUEUE_FULL", of_full),
            (late, "QUEUE_DEADLINE", of_late),
        ] {
            let details = Status::from(Fault::from(refusal)).get_error_details();
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
            Status::from(Fault::NotReady)
                .get_error_details()
                .error_info()
                .is_none()
        );
    }
}
