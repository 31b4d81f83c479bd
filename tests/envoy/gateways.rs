//! The Envoy configurations that Istio, Envoy AI Gateway and Envoy Gateway generate, in a real
//! Envoy with the real warmroute. Only addresses and ports of the generated files are replaced;
//! `rendered.rs` adds the fields that the shipped manifests set beyond them.

mod bed;
mod chats;
mod generated;
mod istio;
mod limits;
mod outages;
mod pools;
mod rendered;
