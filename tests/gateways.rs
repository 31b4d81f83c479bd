//! The Envoy configurations that Istio, Envoy AI Gateway and Envoy Gateway generate, in a real Envoy with the real warmroute. Only addresses
//! and ports of the generated files are replaced; `rendered.rs` adds what the shipped manifests set beyond them.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "gateways/bed.rs"]
mod bed;
#[path = "envoy_ways/bursts.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod bursts;
#[path = "gateways/chats.rs"]
mod chats;
#[path = "envoy_e2e/deployment.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod deployment;
#[path = "gateways/generated.rs"]
mod generated;
#[path = "gateways/istio.rs"]
mod istio;
#[path = "gateways/limits.rs"]
mod limits;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
#[path = "gateways/outages.rs"]
mod outages;
#[path = "gateways/pools.rs"]
mod pools;
#[path = "gateways/rendered.rs"]
mod rendered;
#[path = "manifests/set.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod set;
