//! `warmroute doctor` as operators use it: against a deployment that is well, and against deployments in each of which one
//! thing is wrong. Engines are simulated ones, Envoy is a real one.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "doctor/bed.rs"]
mod bed;
#[path = "doctor/engines.rs"]
mod engines;
#[path = "doctor/envoys.rs"]
mod envoys;
#[path = "doctor/gateways.rs"]
mod gateways;
#[path = "doctor/healthy.rs"]
mod healthy;
#[path = "doctor/ours.rs"]
mod ours;
#[path = "doctor/stalled.rs"]
mod stalled;
