//! Tests of `warmroute doctor`: a healthy deployment with a real Envoy, and simulated engines with
//! one fault each.

mod bed;
mod engines;
mod healthy;
mod ours;
