//! Measures load through a real Envoy. The same requests run in turns without an external
//! processor, with one that answers at once, and with warmroute. The engines answer at once. The
//! report shows warmroute's cost in time, throughput, CPU and memory, and how it grows with ranks,
//! prompt length and streams.
//!
//! `cargo run --release --example load` runs the sweeps. All other programs run as separate
//! processes: the running program starts itself again with another first argument.
//!
//! `cargo run --release --example policy_replay` compares routing policies: [`policy_replay`] sends
//! the same sessions to simulated engines with each policy.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bare_server;
mod bodies;
pub mod case;
mod client;
pub mod goals;
pub mod helper_programs;
mod idle;
mod instant_engines;
pub mod measure;
pub mod policy_replay;
mod process_usage;
pub mod report;
pub mod repository_texts;
pub mod setups;
pub mod sweeps;
