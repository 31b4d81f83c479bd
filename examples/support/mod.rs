//! The pieces around a real Envoy that the tests and the quickstart share: Envoy itself, child processes that never
//! outlive their parent, and ports. A folder with a `mod.rs` and no `main.rs`, so that Cargo does not take it for an
//! example; tests include it by path.

#![allow(dead_code, reason = "each test and example uses its own part of it")]

pub(crate) mod child;
pub(crate) mod debian;
pub(crate) mod envoy;
pub(crate) mod installed;
pub(crate) mod ports;
pub(crate) mod pypi;
pub(crate) mod replay;
pub(crate) mod signals;
pub(crate) mod stack;
pub(crate) mod workload;
