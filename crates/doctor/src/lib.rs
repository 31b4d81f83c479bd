//! Checks of `warmroute doctor`: pure functions from observed facts and expected settings to
//! findings. The caller collects the facts.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod engine;
pub mod envoy;
pub mod finding;
pub mod host;
pub mod kubernetes;
pub mod process;
pub mod table;
