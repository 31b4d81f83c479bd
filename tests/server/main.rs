//! Tests of the server without a gateway: its listeners, its configuration, its process, and its
//! peers.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod api;
mod canary;
mod config;
mod engine_sessions;
mod exchanges;
mod explain;
mod fuzz;
mod lifecycle;
mod replicas;
mod shared_cache;
#[path = "../support/mod.rs"]
mod support;
mod tls;
mod tokens_resume;

use std::sync::Arc;

use warmroute_server::app::{App, NoExternalDiscovery, ProcessOrigin};
use warmroute_server::config::Config;

/// Starts the server in this process, without discovery by DNS or Kubernetes.
async fn start_app(config: Config) -> App {
    let discovery = Arc::new(NoExternalDiscovery);
    let start = App::start(config, discovery, ProcessOrigin::default());
    Box::pin(start).await.unwrap()
}
