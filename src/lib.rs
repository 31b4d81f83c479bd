//! warmroute routes every LLM request to the worker whose KV cache is already warm for it.
//!
//! The crate is a library with one binary on top. Envoy opens one gRPC stream per HTTP exchange; the pure state machine
//! [`ext_proc`]`::Exchange` turns its messages into replies and one effect that matters, *route*; [`router`] answers it
//! from three pieces of state, the [`fleet`], the prefix [`index`] and the [`load`], by the pure function
//! [`schedule`]`::choose`. Everything else feeds those three pieces of state. See `ARCHITECTURE.md` for the layers.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

// Layer 1: vocabulary.
pub mod block;
pub mod tier;
pub mod trust;
pub mod worker;

// Layer 2: core. No I/O, no tokio; clock and randomness are passed in.
pub mod disagg;
pub mod fleet;
pub mod health;
pub mod index;
pub mod learned;
pub mod load;
pub mod parity;
pub mod predict;
pub mod prefill;
pub mod schedule;
pub mod sessions;

// Layer 3: application.
pub mod admission;
pub mod audit;
pub mod entrance;
pub mod remote_index;
pub mod replica;
pub mod router;

// Layer 4: adapters.
pub mod admin;
pub mod api;
pub mod discovery;
pub mod engine_client;
pub mod engine_sessions;
pub mod ext_proc;
pub mod intake;
pub mod kv_events;
pub mod openai;
pub mod prompt;
pub mod self_test;
pub mod shared_cache;
pub mod xds;

// Side: usable from layers 3 to 5.
pub mod lifecycle;
pub mod metrics;
pub mod settings;
pub mod tls;

// Layer 5: process.
pub mod app;
pub mod cli;
pub mod cmd;
pub mod config;
pub mod takeover;
pub mod telemetry;
