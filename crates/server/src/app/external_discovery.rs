//! Discovery clients outside this crate. Clients of Kubernetes and DNS need large libraries, which
//! a program that reads a workers file should not build. The caller of [`App::start`](super::App)
//! provides them.
//!
//! Decision 0048.

use std::convert::Infallible;
use std::sync::Arc;

use anyhow::bail;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use warmroute_core::worker::Worker;
use warmroute_metrics::Metrics;

use crate::fleet::discovery::WorkerModel;
use crate::fleet::discovery::dns::DnsConfig;
use crate::fleet::discovery::kubernetes::KubernetesConfig;
use crate::request::SharedClusterRules;

/// Configuration of a source that an [`ExternalDiscovery`] watches.
#[derive(Clone, Debug)]
pub enum ExternalSource {
    /// Pods of InferencePools or of label selectors.
    Kubernetes(KubernetesConfig),
    /// DNS names.
    Dns(Vec<DnsConfig>),
}

/// Source to watch, and the receivers of its changes.
pub struct ExternalWatch {
    /// The source.
    pub source: ExternalSource,
    /// Served models.
    pub models: Vec<WorkerModel>,
    /// Metrics of the process.
    pub metrics: Arc<Metrics>,
    /// Rules for requests, which objects of Kubernetes configure.
    pub cluster_rules: SharedClusterRules,
    /// Receives the complete list of workers after each change.
    pub on_workers: Box<dyn FnMut(Vec<Worker>) + Send>,
}

/// Discovery clients of the program.
pub trait ExternalDiscovery: Send + Sync {
    /// Watches the source until the future is dropped. Failures of the source are retried; an error
    /// ends the task, which is then restarted.
    fn watch(&self, watch: ExternalWatch) -> BoxFuture<'static, anyhow::Result<Infallible>>;
}

/// The clients of a program that has none: only a fixed list and a workers file can be used.
#[derive(Clone, Copy, Debug)]
pub struct NoExternalDiscovery;

impl ExternalDiscovery for NoExternalDiscovery {
    fn watch(&self, _: ExternalWatch) -> BoxFuture<'static, anyhow::Result<Infallible>> {
        async { bail!("this program has no clients for discovery by Kubernetes or DNS") }.boxed()
    }
}
