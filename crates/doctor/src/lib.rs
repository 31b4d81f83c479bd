//! Checks of `warmroute doctor` on engines, Envoy and Kubernetes: pure functions from observed
//! facts and expected settings to findings. The caller collects the facts.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod engine;
pub mod envoy;
pub mod finding;
pub mod kubernetes;
pub mod table;
