//! Routing decisions without I/O.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod adapters;
pub mod block;
pub mod engine_settings;
pub mod envoy_names;
pub mod fleet;
pub mod freshness;
pub mod health;
pub mod index;
pub mod load;
pub mod parity;
pub mod policy;
pub mod predict;
pub mod queue;
pub mod router;
pub mod sessions;
pub mod wall_time;
pub mod worker;
