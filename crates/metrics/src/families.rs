//! Metrics of each subsystem, one struct per subsystem.

mod api;
mod audit;
mod config;
mod endpoints;
mod ext_proc;
mod index;
mod kv_events;
mod latency;
mod listeners;
mod parity;
mod prefill;
mod process;
mod queue;
mod replicas;
mod requests;
mod sessions;
mod tokens;
mod workers;

pub use api::ApiMetrics;
pub use audit::AuditMetrics;
pub use config::ConfigMetrics;
pub use endpoints::EndpointMetrics;
pub use ext_proc::ExtProcMetrics;
pub use index::IndexMetrics;
pub use kv_events::KvEventMetrics;
pub use latency::LatencyMetrics;
pub use listeners::ListenerMetrics;
pub use parity::ParityMetrics;
pub use prefill::PrefillMetrics;
pub use process::ProcessMetrics;
pub use queue::QueueMetrics;
pub use replicas::ReplicaMetrics;
pub use requests::RequestMetrics;
pub use sessions::SessionMetrics;
pub use tokens::TokenMetrics;
pub use workers::WorkerMetrics;
