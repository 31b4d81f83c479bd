//! What was found out about one worker: what its engine says of itself, what it made of a canary, and what was heard of
//! that on its event sockets.

use std::time::{Duration, SystemTime};

use crate::block::Windows;
use crate::engine_client::{EngineError, EngineModel, EventsOfRank, MetricsPage};
use crate::kv_events::listen::Heard;
use crate::parity::Verdict;
use crate::worker::{Attach, BlockSize, DpRank, EventSource, ModelName, Worker};

/// A question to an engine, answered or not.
pub type Told<T> = Result<T, EngineError>;

/// The place where the configuration describes a worker.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum WorkerOrigin {
    /// An entry of its own.
    #[default]
    Listed,
    /// The `worker` section of a pool, for all of its pods.
    Pod {
        /// Namespace and name, and the port where the pod has several workers.
        pod: String,
        /// The pool.
        pool: String,
    },
}

/// One worker, looked at.
#[derive(Clone, Debug)]
pub struct WorkerFacts {
    /// Where the configuration describes it.
    pub origin: WorkerOrigin,
    /// As it is configured, and what it says of itself where nothing is.
    pub worker: Worker,
    /// The settings of its cache that the configuration gives.
    pub configured: ConfiguredCache,
    /// Whether its event sources are those that it told of.
    pub sources_learned: bool,
    /// How its blocks are cut out of prompts.
    pub windows: Windows,
    /// Further names under which requests for adapters come.
    pub adapters: Vec<ModelName>,
    /// What our names for images begin with, where we know images at all and did not take it from the engine.
    pub images_of: Option<String>,
    /// Whether a setting asks how many KV blocks it has.
    pub blocks_wanted: bool,
    /// Whether it says that it is well.
    pub health: Told<()>,
    /// The time it says it is, with ours.
    pub date: Option<(SystemTime, SystemTime)>,
    /// What it serves.
    pub models: Told<Vec<EngineModel>>,
    /// Its measures.
    pub metrics: Told<MetricsPage>,
    /// Where its ranks publish.
    pub publishers: Told<Vec<EventsOfRank>>,
    /// Its tokens against ours.
    pub tokens: Verdict,
    /// Whether somebody is there where decode workers are to meet it; none: nobody is to.
    pub met: Option<Met>,
    /// What it says of a canary whose KV it is to keep for another worker; none: it was not asked.
    pub handed_over: Option<Told<serde_json::Value>>,
    /// Whether somebody on another machine is to take over from it.
    pub fetched_from_afar: bool,
    /// Rank by rank.
    pub ranks: Vec<RankFacts>,
    /// The step that was not complete at the deadline of the worker; none: all of them were.
    pub overdue: Option<OverdueStep>,
}

/// The step at which the examination of a worker was ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OverdueStep {
    /// Its name.
    pub name: String,
    /// The deadline of the whole worker.
    pub deadline: Duration,
}

/// The settings of a worker's cache as the configuration gives them; `None` where it leaves them out.
#[derive(Clone, Copy, Debug, Default)]
pub struct ConfiguredCache {
    /// Tokens per block of its model.
    pub block_size: Option<BlockSize>,
    /// KV blocks of one rank.
    pub total_kv_blocks: Option<u64>,
}

/// What was found where a worker is to be met.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Met {
    /// Somebody listens.
    Somebody,
    /// Nobody does.
    Nobody,
    /// It could not be found out from here.
    Unknown(String),
}

/// One data-parallel rank.
#[derive(Clone, Debug)]
pub struct RankFacts {
    /// Which.
    pub rank: DpRank,
    /// Where its events should come from.
    pub source: Option<EventSource>,
    /// What became of listening there.
    pub attached: Option<Attached>,
    /// Everything heard.
    pub heard: Vec<Heard>,
    /// The canary that was sent to it; none: none was.
    pub canary: Option<Told<Canary>>,
    /// Whether the replay endpoint answered, and with how many batches.
    pub replay: Option<Option<usize>>,
    /// How long was listened.
    pub patience: Duration,
}

/// What became of attaching to an event source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Attached {
    /// As configured.
    As(Attach),
    /// It could not be connected to.
    Refused(String),
    /// It could not be bound.
    Taken(String),
    /// It could not be bound, because the engine did: it could be connected to.
    Connectable(String),
    /// It was bound, and nobody came.
    Nobody,
    /// It was bound, nobody came, and the engine could be connected to at this endpoint.
    Elsewhere(String),
}

/// A canary and its answers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Canary {
    /// Its tokens as we, or else the engine, have them.
    pub tokens: Option<Vec<u32>>,
    /// What the engine counted.
    pub prompt_tokens: Option<usize>,
    /// How many of them it reused, asked a second time; none where it does not say.
    pub cached: Option<usize>,
}

impl WorkerFacts {
    /// The worker in a word.
    pub fn subject(&self) -> String {
        match &self.origin {
            WorkerOrigin::Listed => format!("worker {}", self.worker.id),
            WorkerOrigin::Pod { pod, .. } => format!("pod {pod}"),
        }
    }

    /// One of its ranks in a word.
    pub fn rank_subject(&self, rank: DpRank) -> String {
        match (&self.origin, self.worker.ranks.size.get()) {
            (_, 1) => self.subject(),
            (WorkerOrigin::Listed, _) => format!("worker {}/{rank}", self.worker.id),
            (WorkerOrigin::Pod { pod, .. }, _) => format!("pod {pod} rank {rank}"),
        }
    }

    /// The part of the configuration that a fix changes.
    pub fn section(&self) -> String {
        match &self.origin {
            WorkerOrigin::Listed => format!("worker {}", self.worker.id),
            WorkerOrigin::Pod { pod, pool } => {
                format!("`worker` of the pool {pool} (it describes pod {pod})")
            }
        }
    }

    /// A key of `kv_events` with the value that leads to an endpoint: pods have only ports.
    pub fn events_setting(&self, key: &str, endpoint: &str) -> String {
        let port = endpoint.rsplit(':').next().unwrap_or("5557");
        match (&self.origin, key) {
            (WorkerOrigin::Listed, _) => format!("{key}: \"{endpoint}\""),
            (WorkerOrigin::Pod { .. }, "endpoint") => format!("port: {port}"),
            (WorkerOrigin::Pod { .. }, _) => format!("{key}_port: {port}"),
        }
    }
}

/// Why a question was not answered, in words.
pub fn why(error: &EngineError) -> String {
    match error {
        EngineError::Status {
            status,
            message: Some(message),
        } => format!("status {status}: {message}"),
        other => other.to_string(),
    }
}
