//! Telling Envoy who the workers are: by a file that its cluster reads, so that no xDS server is needed for one machine, or
//! as its xDS server, which any number of Envoys on other machines listen to. Both tell the same of each worker.

mod assignments;
pub mod config;
pub mod eds_file;
mod envoys;
mod hosts;
mod service;
mod subscription;
mod variant;

pub use envoys::{Envoys, Listener};
pub use service::Discovery;
