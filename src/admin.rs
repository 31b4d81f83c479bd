//! Admin HTTP.

pub mod config;
