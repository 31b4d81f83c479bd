//! The Envoy configurations that Istio, Envoy AI Gateway and Envoy Gateway generate, in a real Envoy with the real warmroute. Only addresses
//! and ports of the generated files are replaced.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "gateways/chats.rs"]
mod chats;
#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "gateways/generated.rs"]
mod generated;
#[path = "gateways/istio.rs"]
mod istio;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
