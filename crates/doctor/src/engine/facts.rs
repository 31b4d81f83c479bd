//! Facts about one worker: the engine's status pages, its response to a canary, and the messages on
//! its event sockets.

use std::collections::HashSet;
use std::time::{Duration, SystemTime};

use warmroute_core::parity::CanaryVerdict;
use warmroute_core::worker::{BlockSize, DpRank, EventSource, ModelName, SocketAttach, Worker};
use warmroute_engines::engine_client::{EngineError, EngineModel, MetricsPage, RankEventSource};
use warmroute_engines::kv_events::event_probe::ProbedBatch;

/// Response of an engine, or the error of the request.
pub type EngineReply<T> = Result<T, EngineError>;

/// Part of the configuration that describes a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkerOrigin {
    /// An entry for this worker alone.
    #[default]
    Listed,
    /// The `worker` section of a pool, for all of its pods.
    Pod {
        /// Namespace and name, with the port if the pod has several workers.
        pod: String,
        /// Pool name.
        pool: String,
    },
}

/// Facts about one worker.
#[derive(Clone, Debug)]
pub struct WorkerFacts {
    /// Part of the configuration that describes the worker.
    pub origin: WorkerOrigin,
    /// Configured worker, with missing settings filled in from the engine.
    pub worker: Worker,
    /// Cache settings in the configuration.
    pub configured: ConfiguredCache,
    /// Whether the event sources were reported by the engine and not configured.
    pub has_discovered_sources: bool,
    /// Configured adapter names of the model.
    pub adapters: Vec<ModelName>,
    /// Whether the lists of models of the engines are read.
    pub has_discovery: bool,
    /// Model name in the cache keys of images. `None` without image support, or if engines report
    /// the name.
    pub image_model: Option<String>,
    /// Whether a setting needs the number of KV blocks.
    pub needs_capacity: bool,
    /// Response of the health check.
    pub health: EngineReply<()>,
    /// Time of the engine's `date` header, with the local time.
    pub clock: Option<(SystemTime, SystemTime)>,
    /// Served models.
    pub models: EngineReply<Vec<EngineModel>>,
    /// Metrics page.
    pub metrics: EngineReply<MetricsPage>,
    /// KV event publishers of the ranks.
    pub publishers: EngineReply<Vec<RankEventSource>>,
    /// Comparison of the engine's tokens with those of warmroute.
    pub parity: CanaryVerdict,
    /// Whether the tokens of some worker of the model agree with those of warmroute.
    pub has_agreeing_worker: bool,
    /// Result of a connection to the bootstrap address; `None` if the worker needs none.
    pub bootstrap: Option<BootstrapReachability>,
    /// Response to a canary with KV handoff; `None` if none was sent.
    pub kv_handoff: Option<EngineReply<serde_json::Value>>,
    /// Whether a worker on another machine may fetch KV blocks from this one.
    pub has_remote_decoders: bool,
    /// Facts per rank.
    pub ranks: Vec<RankFacts>,
    /// The step that was running at the deadline; `None` if all steps were complete.
    pub overdue_step: Option<OverdueStep>,
}

/// Records for every worker whether the tokens of some worker of its model agree.
pub fn record_agreeing_workers(all: &mut [WorkerFacts]) {
    let agreeing: HashSet<ModelName> = all
        .iter()
        .filter(|facts| matches!(facts.parity, CanaryVerdict::Agrees { .. }))
        .map(|facts| facts.worker.model.clone())
        .collect();
    for facts in all {
        facts.has_agreeing_worker = agreeing.contains(&facts.worker.model);
    }
}

/// Step that was running when the checks of a worker timed out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverdueStep {
    /// Name of the step.
    pub name: String,
    /// Deadline for all checks of the worker.
    pub deadline: Duration,
}

/// Cache settings of a worker in the configuration; `None` if not set.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConfiguredCache {
    /// Tokens per block of its model.
    pub block_size: Option<BlockSize>,
    /// KV blocks of one rank.
    pub total_kv_blocks: Option<u64>,
}

/// Result of a connection to a bootstrap address.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BootstrapReachability {
    /// The connection was accepted.
    Listening,
    /// The connection was refused.
    Refused,
    /// The address is unreachable from here.
    Unknown(String),
}

/// Facts about one data-parallel rank.
#[derive(Clone, Debug)]
pub struct RankFacts {
    /// Rank number.
    pub rank: DpRank,
    /// Configured event source.
    pub source: Option<EventSource>,
    /// Outcome of attaching to the event source.
    pub attachment: Option<AttachOutcome>,
    /// Received messages.
    pub messages: Vec<ProbedBatch>,
    /// Response to the canary; `None` if none was sent.
    pub canary: Option<EngineReply<CanaryReply>>,
    /// Number of batches from the replay endpoint: the outer `None` if it was not queried, the
    /// inner one if it did not respond.
    pub replay: Option<Option<usize>>,
    /// Time spent listening.
    pub listen_timeout: Duration,
}

/// Outcome of attaching to an event source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum AttachOutcome {
    /// Attached as configured.
    Attached(SocketAttach),
    /// The connection was refused.
    ConnectRefused(String),
    /// The bind failed.
    BindRefused(String),
    /// The bind failed, and this endpoint accepts connections, so the engine probably binds it.
    EngineMayBind(String),
    /// The bind succeeded, but no engine connected.
    NoPeer,
    /// The bind succeeded, but no engine connected, and the engine accepts connections at this
    /// endpoint.
    EngineBinds(String),
}

/// Responses to a canary.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CanaryReply {
    /// Token ids from warmroute, or else from the engine.
    pub tokens: Option<Vec<u32>>,
    /// Prompt tokens that the engine counted.
    pub prompt_tokens: Option<usize>,
    /// Cached tokens of the second request; `None` if the engine does not report them.
    pub cached: Option<usize>,
}

impl WorkerFacts {
    /// Returns the short name of the worker.
    pub(crate) fn title(&self) -> String {
        match &self.origin {
            WorkerOrigin::Listed => format!("worker {}", self.worker.id),
            WorkerOrigin::Pod { pod, .. } => format!("pod {pod}"),
        }
    }

    /// Returns whether a pool describes the worker.
    pub(crate) fn is_pod(&self) -> bool {
        matches!(self.origin, WorkerOrigin::Pod { .. })
    }

    /// Returns the short name of one of its ranks.
    pub(crate) fn rank_title(&self, rank: DpRank) -> String {
        match (&self.origin, self.worker.ranks.size.get()) {
            (_, 1) => self.title(),
            (WorkerOrigin::Listed, _) => format!("worker {}/{rank}", self.worker.id),
            (WorkerOrigin::Pod { pod, .. }, _) => format!("pod {pod} rank {rank}"),
        }
    }

    /// Returns the name of the configuration section that a fix changes.
    pub(crate) fn config_section(&self) -> String {
        match &self.origin {
            WorkerOrigin::Listed => format!("worker {}", self.worker.id),
            WorkerOrigin::Pod { pod, pool } => {
                format!("`worker` of the pool {pool} (it describes pod {pod})")
            }
        }
    }

    /// Returns the `kv_events` setting for an endpoint. Pods are configured with ports only.
    pub(crate) fn kv_events_setting(&self, key: &str, endpoint: &str) -> String {
        let port = endpoint.rsplit(':').next().unwrap_or("5557");
        match (&self.origin, key) {
            (WorkerOrigin::Listed, _) => format!("{key}: \"{endpoint}\""),
            (WorkerOrigin::Pod { .. }, "endpoint") => format!("port: {port}"),
            (WorkerOrigin::Pod { .. }, _) => format!("replay_port: {port}"),
        }
    }
}

/// Describes the error of a request.
pub(super) fn describe_error(error: &EngineError) -> String {
    match error {
        EngineError::Status {
            status,
            message: Some(message),
        } => format!("status {status}: {message}"),
        other => other.to_string(),
    }
}
