//! The received part of a request body.

use bytes::Bytes;

/// The received part of a request body.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RequestBody {
    /// The request has no body.
    Absent,
    /// The request may have a body, which was not needed or not received.
    NotReceived,
    /// The whole body.
    Whole(Bytes),
    /// The request may have a body, which is received only after the route was chosen.
    Streamed,
    /// The beginning of the body.
    Truncated {
        /// The bytes received.
        received: Bytes,
        /// The length that the client announced.
        length: Option<u64>,
    },
    /// The beginning of a body that exceeds the limit.
    TooLarge {
        /// The bytes received.
        received: Bytes,
        /// A lower bound of the body's length.
        bytes: u64,
    },
    /// A body that did not fit into the budget.
    OverBudget {
        /// The length of the body in bytes.
        bytes: usize,
        /// The model of the body, if a quick search found it.
        model: Option<String>,
    },
}
