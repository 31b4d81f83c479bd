//! Metrics of each subsystem, one struct per subsystem.

mod fleet;
mod requests;

pub use fleet::*;
pub use requests::*;
