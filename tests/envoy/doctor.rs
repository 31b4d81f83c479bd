//! Tests of `warmroute doctor`: a healthy deployment with a real Envoy, simulated engines with one
//! fault each, and recorded Envoy configurations with one fault each.

mod bed;
mod engines;
mod envoys;
mod healthy;
mod ours;
