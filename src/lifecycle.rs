//! Starting, supervising and draining.

pub mod config;
