//! Load through a real Envoy. The same requests run without an external processor, with one that
//! answers at once, and with warmroute, in turns, to engines that answer at once. The report has
//! warmroute's cost in time, throughput, CPU and memory, and its growth with ranks, prompt length and
//! streams.
//!
//! `cargo run --release --example load` runs the sweeps. All other programs run as separate
//! processes: the running program starts itself again with another first argument.

#![cfg_attr(test, allow(clippy::unwrap_used))]

mod bare_server;
mod bodies;
mod client;
pub mod goals;
pub mod helper_programs;
mod instant_engines;
pub mod measure;
mod process_usage;
pub mod report;
pub mod setups;
pub mod sweeps;
