//! Envoy configurations that Istio, Envoy AI Gateway and Envoy Gateway generated, in a real Envoy
//! with the real warmroute. The tests replace only addresses and ports. `rendered.rs` adds fields
//! that the shipped manifests set and the generated files lack.

mod bed;
mod chats;
mod generated;
mod istio;
mod limits;
mod outages;
mod pools;
mod rendered;
