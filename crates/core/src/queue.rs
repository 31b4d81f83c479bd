//! Queue of requests for which every worker is busy: its order, its classes and the interface to
//! the router. The server adds the clock and the waiting tasks.

mod classes;
mod deficit_round_robin;
mod fair_queue;
mod lanes;
mod metadata;
mod order;
mod placer;

pub use classes::{
    BusyThreshold, ClassDefinition, ClassId, FamilyBucket, QueueClass, QueueClasses,
    QueueLimitKind, QueueLimits,
};
pub use fair_queue::{FairQueue, QueueOverflow, QueueTicket};
pub use lanes::QueueDepth;
pub use metadata::{QueueEntry, QueueLane, QueueMetadata};
pub use order::QueuePolicy;
pub use placer::{AdmissionError, ClassCounters, ClassStatus, PlaceOutcome, Placer};
