//! The Envoy side.

pub mod config;
