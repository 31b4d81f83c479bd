//! Routing through a real Envoy with the shipped configuration: prefill and decode pools, the
//! queue, failing workers and trusted clients. Each test starts its own deployment on free ports.

mod adapters;
mod audit;
pub(crate) mod bed;
mod call;
pub(crate) mod contents;
mod encrypted;
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
mod sources;
mod speculative_decoding;
mod stored_responses;
mod trust;
