//! Routing through a real Envoy with the shipped configuration: prefill and decode pools, the
//! queue, sessions, failing workers, trusted clients, and a load test that checks for leaks. Each
//! test starts its own deployment on free ports.

mod adapters;
mod audit;
pub(crate) mod bed;
mod call;
mod contents;
mod departed;
mod encrypted;
mod engine_load;
mod eviction;
mod first_token;
mod forged;
mod front_end;
mod handovers;
mod health;
mod injected_faults;
mod mirror;
mod parity;
mod phases;
mod prefill_report;
mod queue;
mod sessions;
mod sources;
mod speculative_decoding;
mod stored_responses;
mod storm;
mod tokenizer;
mod trust;
mod wire;
