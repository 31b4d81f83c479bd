//! Learned latency of the engines: the time of a prefill and of a decode step, the length of
//! answers, and the rate of requests. Each served model has one latency model with four
//! coefficients. Each worker rank has two factors relative to it, one for prefill and one for
//! decode. Separate fits per rank would be too noisy: the policy would prefer the rank with the
//! most favourable error.

mod calibration;
mod change;
mod fit;
mod model;
mod registry;
mod slowdown;
mod snapshot;
mod totals;
mod traffic;

pub use calibration::{CalibrationReport, ModelCalibration, RankCalibration};
pub use model::{LatencyCoefficients, LatencyEstimate};
pub(crate) use model::{
    ModelLatency, PrefillObservation, PrefillWork, StepObservation, TransferObservation,
};
pub(crate) use registry::{LatencyRegistry, ModelId};
pub use slowdown::RankSlowdown;
pub(crate) use slowdown::SlowdownFactors;
pub use snapshot::LatencySnapshot;
pub use totals::{FirstTokenObservation, PredictionTotals};

#[cfg(test)]
mod tests;
