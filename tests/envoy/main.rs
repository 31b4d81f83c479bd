//! Tests with a real Envoy: deployments of simulated engines with the real warmroute, and the
//! programs that start them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod config;
mod doctor;
mod e2e;
mod faults;
mod gateways;
mod load;
mod modes;
mod quickstart;
mod remote_index;
mod routing;
mod shipped;
#[path = "../support/mod.rs"]
mod support;
mod warm_start;
