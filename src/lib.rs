//! warmroute routes every LLM request to the worker whose KV cache is already warm for it.
//!
//! This crate is the command line, and the discovery of workers by Kubernetes and DNS. The server is
//! the crate `warmroute-server`, and the decisions are `warmroute-core`. `ARCHITECTURE.md` describes
//! the crates.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod cmd;
pub mod discovery;
pub mod dns;
pub mod kubernetes;

use warmroute_server::version::BuildVersion;

/// Version of this program, with the commit of the build if it is known.
pub const VERSION: BuildVersion = BuildVersion {
    number: env!("CARGO_PKG_VERSION"),
    commit: env!("WARMROUTE_COMMIT"),
    target: env!("WARMROUTE_TARGET"),
    text: env!("WARMROUTE_VERSION_TEXT"),
};
