//! The shared pieces of tests that this suite uses.

#![allow(dead_code, reason = "other tests use more of it")]

#[path = "../../examples/support/child.rs"]
pub(crate) mod child;
#[path = "../../examples/support/installed.rs"]
pub(crate) mod installed;
#[path = "../../examples/support/ports.rs"]
pub(crate) mod ports;
