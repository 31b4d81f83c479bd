//! Telling Envoy who the workers are.

pub mod config;
