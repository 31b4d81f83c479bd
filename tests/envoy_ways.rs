//! Every Envoy configuration that we ship, as its users have it: a real Envoy, the real warmroute, and workers that say
//! which of them was asked. What a way of routing promises is asked of it here, and so is what it does when things fail.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "envoy_ways/bursts.rs"]
mod bursts;
#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
#[path = "envoy_ways/probe.rs"]
mod probe;
#[path = "envoy_ways/ways.rs"]
mod ways;
#[path = "envoy_ways/xds.rs"]
mod xds;
