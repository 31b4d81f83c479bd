//! Admission queue. A request for which every worker is busy waits here instead of inside an
//! engine, where its order could not be changed any more. The pure [`FairQueue`] defines the order;
//! this module adds a lock, a clock and the waiting tasks.
//!
//! There is no dedicated dispatcher task. [`AdmissionQueue::wake`] notifies the background task and
//! one waiting request; the one that runs first places the requests that can be placed. A single
//! slow task therefore cannot stall the queue. `wake` itself only counts and notifies, because it
//! is called from drops, under the locks of callers, and from `place`.

mod admission_queue;
pub mod config;
mod enter;

pub use admission_queue::{AdmissionQueue, PlaceResult, PrefillBacklog};
pub use enter::{EnterOutcome, QueueWait};

pub use warmroute_core::queue::{
    AdmissionError, BusyThreshold, ClassCounters, ClassId, ClassStatus, FairQueue, PlaceOutcome,
    Placer, QueueClass, QueueClasses, QueueDepth, QueueEntry, QueueLane, QueueLimitKind,
    QueueLimits, QueueMetadata, QueueOverflow, QueuePolicy, QueueTicket,
};

#[cfg(test)]
mod tests;
