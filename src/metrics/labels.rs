//! What measures are told apart by.

use prometheus_client::encoding::EncodeLabelSet;

use crate::tier::Tier;
use crate::worker::{ModelName, Role, WorkerRank};

/// One label: the model as the engines serve it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelLabel {
    /// Model name; `unknown` where no served model was named.
    pub model: String,
}

impl From<&ModelName> for ModelLabel {
    fn from(model: &ModelName) -> Self {
        Self {
            model: model.as_str().to_owned(),
        }
    }
}

/// Model and step of the degradation ladder.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// Model name.
    pub model: String,
    /// `exact`, `partial`, `approximate`, `load_only` or `passthrough`; `query` where only a choice was asked for, `rejected` by us.
    pub mode: &'static str,
    /// `aggregated`, `decode`; `none` where no worker was chosen.
    pub role: &'static str,
}

/// One label that names a case out of a fixed list.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabel {
    /// Why.
    pub reason: &'static str,
}

/// One label that names how something ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// How it ended.
    pub outcome: &'static str,
}

/// Which workers do which phase of a request.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PhasesLabel {
    /// `aggregated`, `remote_prefill`, or why there was no remote prefill although prefill workers were there.
    pub phases: &'static str,
}

/// Class of requests that wait.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ClassLabel {
    /// Its name.
    pub class: String,
}

/// Class of requests that wait, and what became of some of them.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ClassOutcomeLabels {
    /// Its name.
    pub class: String,
    /// `waited`, `over_requests`, `over_prompt_tokens`, `over_cached_tokens`, `expired`, `left`.
    pub outcome: &'static str,
}

/// Model, and what became of some of its answers.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelOutcomeLabels {
    /// Model name.
    pub model: String,
    /// What became of them.
    pub outcome: &'static str,
}

impl ModelOutcomeLabels {
    /// The labels of a model.
    pub fn new(model: &ModelName, outcome: &'static str) -> Self {
        Self {
            model: model.as_str().to_owned(),
            outcome,
        }
    }
}

/// Model, and which of its tokens.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelTokensLabels {
    /// Model name.
    pub model: String,
    /// Which tokens.
    pub kind: &'static str,
}

/// Model, and why.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CauseLabels {
    /// Model name.
    pub model: String,
    /// Why.
    pub cause: &'static str,
}

impl CauseLabels {
    /// The labels of a model.
    pub fn new(model: &str, cause: &'static str) -> Self {
        Self {
            model: model.to_owned(),
            cause,
        }
    }
}

/// Model and role of workers.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelRoleLabels {
    /// Model name.
    pub model: String,
    /// `aggregated`, `prefill`, `decode`; `unknown` where the worker has left the fleet.
    pub role: &'static str,
}

impl ModelRoleLabels {
    /// The labels of a model and the role of one of its workers.
    pub fn new(model: &ModelName, role: Option<Role>) -> Self {
        Self {
            model: model.as_str().to_owned(),
            role: role_name(role),
        }
    }
}

/// The name of a role as a label.
fn role_name(role: Option<Role>) -> &'static str {
    role.map_or("unknown", Role::as_str)
}

/// Stage of a decision.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct StageLabel {
    /// `parse`, `render`, `tokenize`, `hash`, `index`, `choose`, `total`.
    pub stage: &'static str,
}

/// Kind of KV event and what became of it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EventLabels {
    /// `stored`, `removed`, `cleared`, `ignored`.
    pub kind: &'static str,
    /// `ok`, `parent_block_not_found`, `block_not_found`, `duplicate_store`, or `filtered_` and the reason.
    pub outcome: &'static str,
}

/// A call to the service and what became of it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CallLabels {
    /// Its name in the protocol.
    pub call: &'static str,
    /// `OK`, or the gRPC status.
    pub code: &'static str,
}

/// A worker rank.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankLabels {
    /// Instance id.
    pub worker_id: u64,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// `aggregated`, `prefill`, `decode`; `unknown` where the worker has left the fleet.
    pub role: &'static str,
}

impl RankLabels {
    /// The labels of a worker rank with the role of its worker.
    pub fn new(rank: WorkerRank, role: Option<Role>) -> Self {
        Self {
            worker_id: rank.worker.0,
            dp_rank: rank.rank.0,
            role: role_name(role),
        }
    }
}

/// A worker rank and a tier of its cache.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankTierLabels {
    /// Instance id.
    pub worker_id: u64,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// `aggregated`, `prefill`, `decode`; `unknown` where the worker has left the fleet.
    pub role: &'static str,
    /// Storage tier.
    pub tier: &'static str,
}

impl RankTierLabels {
    /// The labels of one tier of a worker rank.
    pub fn new(rank: &RankLabels, tier: Tier) -> Self {
        Self {
            worker_id: rank.worker_id,
            dp_rank: rank.dp_rank,
            role: rank.role,
            tier: tier.as_str(),
        }
    }
}

/// A worker rank and how far its event source can be believed.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankTrustLabels {
    /// Instance id.
    pub worker_id: u64,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// `aggregated`, `prefill`, `decode`; `unknown` where the worker has left the fleet.
    pub role: &'static str,
    /// `exact`, `incomplete`, `catching_up`, `stale`, `absent`.
    pub trust: &'static str,
}

impl RankTrustLabels {
    /// The labels of one state of a worker rank's source.
    pub fn new(rank: &RankLabels, trust: &'static str) -> Self {
        Self {
            worker_id: rank.worker_id,
            dp_rank: rank.dp_rank,
            role: rank.role,
            trust,
        }
    }
}

/// One label: a setting by its name in the configuration.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SettingLabel {
    /// Its name.
    pub setting: &'static str,
}

/// A call to an engine about one of its sessions.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EngineSessionLabels {
    /// `open`, `close`.
    pub call: &'static str,
    /// `ok`, `timeout`, `unreachable`, `connection`, `status`, `overflow`.
    pub outcome: &'static str,
}

/// Which pool of workers this is.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PoolLabels {
    /// Its name.
    pub name: String,
    /// The namespace it is in.
    pub namespace: String,
}

/// One of our listeners.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerLabel {
    /// `ext_proc`, `ext_proc_unix`, `api`, `admin`, `health`, `xds`.
    pub listener: &'static str,
}

/// One of our listeners, and how something there ended.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerOutcomeLabels {
    /// `ext_proc`, `api`, `admin`, `xds`.
    pub listener: &'static str,
    /// How it ended.
    pub outcome: &'static str,
}

/// A listener of warmroute, and the reason of an event there.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerReasonLabels {
    /// `ext_proc`, `ext_proc_unix`, `health`, `api`, `admin`, `xds`.
    pub listener: &'static str,
    /// The reason.
    pub reason: &'static str,
}

/// An HTTP/2 error that a listener of warmroute sent.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Http2ErrorLabels {
    /// `ext_proc`, `ext_proc_unix`, `health`, `api`, `xds`.
    pub listener: &'static str,
    /// `stream` (RST_STREAM) or `connection` (GOAWAY).
    pub scope: &'static str,
    /// The name of the error code in RFC 9113, in small letters.
    pub reason: &'static str,
}

/// A background task.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TaskLabel {
    /// Its name.
    pub task: String,
}

/// A source of workers.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SourceLabel {
    /// Its kind and name.
    pub source: String,
}
