//! Starts Envoy, engines and servers for tests, benches and examples: a real Envoy, child processes
//! that end with their parent, free ports, chat workloads, and comparisons of two sides.
//!
//! [`deployment::LocalDeployment`] runs simulated engines, warmroute and Envoy on the loopback
//! interface. [`replay`] sends a [`workload`] through it.

#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod child_process;
pub mod comparison;
pub mod debian;
pub mod deployment;
pub mod envoy;
pub mod machine;
mod merge;
pub mod policy_comparison;
pub mod ports;
pub mod programs;
pub mod pypi;
pub mod replay;
pub mod signals;
pub mod workload;

use std::path::Path;

pub use merge::merge_config;

/// Returns the root directory of the repository.
pub fn repository() -> &'static Path {
    let package = Path::new(env!("CARGO_MANIFEST_DIR"));
    package.ancestors().nth(2).unwrap_or(package)
}
