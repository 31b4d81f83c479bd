//! Entries of the queue.

use std::time::Instant;

use super::classes::ClassId;
use super::metadata::QueueMetadata;

/// Queued request.
#[derive(Clone, Debug)]
pub struct QueueEntry<T> {
    /// Properties of the request.
    pub metadata: QueueMetadata,
    /// Class that it waits in.
    pub class: ClassId,
    /// Arrival in the queue.
    pub arrived_at: Instant,
    /// The request itself.
    pub payload: T,
}
