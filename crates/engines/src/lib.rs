//! The interfaces of LLM engines: KV events over ZeroMQ, HTTP calls and metrics, sessions that the
//! engine retains, and the cache that workers share.

#![forbid(unsafe_code)]
#![cfg_attr(test, allow(clippy::unwrap_used))]

pub mod engine_client;
pub mod engine_sessions;
pub mod kv_events;
pub mod shared_cache;
