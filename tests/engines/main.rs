//! Tests of KV events and of the engine simulator.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod captures;
mod disaggregation;
mod engine;
mod kv_events;
mod simulator;
