//! Interfaces to LLM engines: KV events over ZeroMQ, HTTP calls and metrics, engine sessions, and
//! the cache that all workers share.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod engine_client;
pub mod engine_sessions;
pub mod kv_events;
pub mod shared_cache;
