//! Learned latency of the engines: the time of a prefill and of a decode step, the length of
//! answers, and the rate of requests. One model of the fleet has four coefficients in seconds, and
//! each worker rank has two factors that say how much slower than the fleet it is. A separate fit
//! per rank would be noise, and the policy would choose the rank with the luckiest error.

mod fit;
mod model;
mod registry;
mod speed;
mod traffic;

pub use model::{LatencyCoefficients, LatencyEstimate};
pub(crate) use model::{ModelLatency, PrefillObservation, PrefillWork, StepObservation};
pub(crate) use registry::{LatencyRegistry, ModelId};
pub use speed::RankSpeed;
pub(crate) use speed::SpeedFactors;

#[cfg(test)]
mod tests;
