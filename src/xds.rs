//! Telling Envoy who the workers are: a file that its cluster reads, so that no xDS server is needed for one machine.

pub mod config;
pub mod eds_file;
