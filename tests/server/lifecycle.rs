//! Startup, reload and shutdown of a real process: gRPC health, signals, and configuration changes.

mod drain;
mod flags;
mod prefills;
mod reload;
mod start;
