//! Tests of the server without a gateway: its listeners, its configuration, its process, and its
//! peers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod api;
mod canary;
mod config;
mod engine_sessions;
mod exchanges;
mod explain;
mod fuzz;
mod lifecycle;
mod replicas;
mod shared_cache;
pub(crate) mod site;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod tokens_resume;
