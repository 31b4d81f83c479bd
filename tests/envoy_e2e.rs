//! The main path as its users have it: a real Envoy with the shipped configuration, the real warmroute, and simulated
//! engines that tokenise, cache and publish for real. Every test starts a deployment of its own on free ports.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "envoy_e2e/admin.rs"]
mod admin;
#[path = "envoy_e2e/bodies.rs"]
mod bodies;
#[path = "envoy_e2e/deployment.rs"]
mod deployment;
#[path = "envoy_e2e/echo.rs"]
mod echo;
#[path = "envoy_e2e/engines.rs"]
mod engines;
#[path = "envoy_e2e/fleet.rs"]
mod fleet;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
#[path = "envoy_e2e/routing.rs"]
mod routing;
#[path = "envoy_e2e/strict.rs"]
mod strict;
#[path = "envoy_e2e/unroutable.rs"]
mod unroutable;
