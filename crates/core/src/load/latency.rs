//! Learned latency of the engines: the time of a prefill and of a decode step, the length of
//! answers, and the rate of requests. Each served model has one latency model with three
//! coefficients for a prefill and three for a decode step. Each worker rank has two factors relative
//! to it, one for prefill and one for decode. Separate fits per rank would be too noisy: the policy
//! would prefer the rank with the most favourable error.

mod calibration;
mod change;
mod coefficients;
mod fit;
mod limits;
mod model;
mod recent;
mod recovery;
mod registry;
mod slow_rank;
mod slowdown;
mod snapshot;
mod totals;
mod traffic;
mod transfer;

pub use calibration::{CalibrationReport, ModelCalibration, RankCalibration};
pub use coefficients::LatencyCoefficients;
pub(crate) use coefficients::{DecodeBatch, PrefillWork};
pub use model::LatencyEstimate;
pub(crate) use model::{ModelLatency, PrefillObservation, StepObservation, TransferObservation};
pub(crate) use registry::{LatencyRegistry, ModelId};
pub use slow_rank::{RankSpeed, SlowPhase, SlowRank, SpeedChange, SpeedTransition};
pub use slowdown::RankSlowdown;
pub(crate) use slowdown::SlowdownFactors;
pub use snapshot::LatencySnapshot;
pub use totals::{FirstTokenObservation, PredictionTotals};

#[cfg(test)]
mod tests;
