//! Load of each worker rank: the blocks that running requests hold and the prefill that is still
//! outstanding. A [`Reservation`] holds the load of one request and releases it when dropped, so no
//! code path can leak it. Cost and booking are computed under one lock, so two concurrent requests
//! cannot both choose the same idle worker.

mod booking;
mod engine_load;
mod events;
mod latency;
mod learning;
pub mod ledger;
mod prefill_queue;
mod prompt_tree;
mod reservation;
mod rows;
mod sequences;
mod table;
mod timing;
mod tracker;
mod view;
mod weight;

pub use booking::{ActiveLoad, BookingEnd, LoadBooking, RankLoad};
pub use engine_load::{
    EngineLoadReport, EngineLoadSample, EngineLoadTable, EngineLoadView, RankEngineLoad,
};
pub use events::{BookingId, LoadListener, ReservationEvent, ReservationState};
pub use latency::{
    CalibrationReport, FirstTokenObservation, LatencyCoefficients, LatencyEstimate,
    LatencySnapshot, ModelCalibration, PredictionTotals, RankCalibration, RankSlowdown, RankSpeed,
    SlowPhase, SlowRank, SpeedChange, SpeedTransition,
};
pub(crate) use latency::{DecodeBatch, PrefillWork};
pub use learning::{CachedTokenSource, CompleteOutput};
pub use reservation::Reservation;
pub use sequences::PromptSequences;
pub use timing::RankTiming;
pub use tracker::LoadTracker;
pub use view::{AdditionalBlocks, LoadView};

#[cfg(test)]
mod tests;
