//! Remote index for very large fleets, in which not every replica can receive the events of
//! thousands of engines. A few replicas maintain the index and serve it (`index.serve`). The others
//! query it (`index.remote`). The protocol is defined in `proto/warmroute/index/v1/index.proto`.
//! A query takes at most the configured timeout. Without a response, a request is routed by
//! predictions.

mod client;
pub mod config;
mod server_connection;
mod server_pool;
mod service;
mod wire;

pub use client::{OverlapQuery, RemoteIndexClient};
pub use service::{IndexService, IndexServiceParts, IndexedModel, ModelLookup};

#[cfg(test)]
mod tests;
