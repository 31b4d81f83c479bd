//! End-to-end tests of `warmroute doctor` with simulated engines and a real Envoy: healthy
//! deployments, and deployments with one fault each.

mod bed;
mod engines;
mod envoys;
mod gateways;
mod healthy;
mod ours;
mod stalled;
