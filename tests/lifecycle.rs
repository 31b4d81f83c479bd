//! Starting, reloading and stopping, with the real program as a process of its own: what gRPC health says and when, what a
//! signal does to those who are served, and what a changed configuration changes.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "lifecycle/drain.rs"]
mod drain;
#[path = "lifecycle/flags.rs"]
mod flags;
#[path = "lifecycle/prefills.rs"]
mod prefills;
#[path = "lifecycle/process.rs"]
mod process;
#[path = "lifecycle/reload.rs"]
mod reload;
#[path = "lifecycle/start.rs"]
mod start;
#[path = "../examples/support/mod.rs"]
mod support;
