//! The warmroute server.
//!
//! Envoy opens one gRPC stream per HTTP exchange. The pure state machine [`ext_proc`]`::Exchange` turns
//! its messages into replies and effects. The central effect is *route*:
//! [`Router`](warmroute_core::router::Router) computes it from the
//! [`Fleet`](warmroute_core::fleet::Fleet), the [`PrefixIndex`](warmroute_core::index::PrefixIndex) and
//! the load by the pure function [`choose`](warmroute_core::policy::choose). All other components
//! update this state. See `ARCHITECTURE.md` for the layers.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

// Layer 1: modules without dependencies on other modules.
pub mod dispatch;
pub mod proto;
pub mod tracking_hash;
pub mod version;

// Layer 2: shared state.
pub mod cluster;

// Layer 3: requests.
pub mod request;

// Layer 4: remote prefill.
pub mod prefill;

// Layer 5: adapters.
pub mod admin;
pub mod api;
pub mod ext_proc;
pub mod fleet;
pub mod self_test;

// Layer 6: process.
pub mod app;
pub mod config;
pub mod serve;

/// Root of the repository, for files that tests read.
#[cfg(test)]
const REPOSITORY: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
