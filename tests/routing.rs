//! Routing in full through a real Envoy with the shipped configuration: prefill and decode pools, the queue, sessions,
//! workers that fail, trusted clients, and a storm of requests after which nothing is left over. Every test starts a
//! deployment of its own on free ports.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[path = "../examples/support/mod.rs"]
mod support;

#[path = "routing/audit.rs"]
mod audit;
#[path = "routing/bed.rs"]
mod bed;
#[path = "routing/call.rs"]
mod call;
#[path = "routing/departed.rs"]
mod departed;
#[path = "routing/encrypted.rs"]
mod encrypted;
#[path = "routing/eviction.rs"]
mod eviction;
#[path = "routing/forged.rs"]
mod forged;
#[path = "routing/handovers.rs"]
mod handovers;
#[path = "routing/health.rs"]
mod health;
#[path = "routing/mirror.rs"]
mod mirror;
#[path = "envoy_e2e/openmetrics.rs"]
mod openmetrics;
#[path = "routing/parity.rs"]
mod parity;
#[path = "routing/phases.rs"]
mod phases;
#[path = "tls/pki.rs"]
mod pki;
#[path = "routing/prefill_report.rs"]
mod prefill_report;
#[path = "routing/queue.rs"]
mod queue;
#[path = "routing/sessions.rs"]
mod sessions;
#[path = "routing/sources.rs"]
mod sources;
#[path = "routing/storm.rs"]
mod storm;
#[path = "routing/tokenizer.rs"]
mod tokenizer;
#[path = "routing/told.rs"]
mod told;
#[path = "routing/trust.rs"]
mod trust;
#[path = "routing/wire.rs"]
mod wire;
