//! Tests of `warmroute doctor`: a healthy deployment with a real Envoy, and simulated engines with
//! one fault each.

pub(crate) mod bed;
mod engines;
mod healthy;
mod ours;
