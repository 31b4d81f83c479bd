//! Label sets of the metrics.

use prometheus_client::encoding::EncodeLabelSet;

use warmroute_core::worker::{ModelName, Worker, WorkerRank, WorkerRole};

use crate::label_text::LabelText;

/// Model, by the name under which the engines serve it.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelLabel {
    /// Model name; `unknown` if the request names no served model.
    pub model: LabelText,
}

impl From<&ModelName> for ModelLabel {
    fn from(model: &ModelName) -> Self {
        Self {
            model: model.as_str().into(),
        }
    }
}

/// Model, routing mode and role of the worker that decodes.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RequestLabels {
    /// Model name.
    pub model: LabelText,
    /// `exact`, `partial`, `approximate`, `load_only`, `passthrough`, `query` (the client requested
    /// only the routing decision) or `rejected`.
    pub mode: &'static str,
    /// `aggregated`, `decode`; `none` if no worker was chosen.
    pub role: &'static str,
}

/// Reason of an event, one of a fixed list.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ReasonLabel {
    /// The reason.
    pub reason: &'static str,
}

/// Outcome of an operation, one of a fixed list.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct OutcomeLabel {
    /// The outcome.
    pub outcome: &'static str,
}

/// Assignment of the phases of a request to workers.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PhasePlanLabel {
    /// `aggregated`, `remote_prefill`, or the reason for which the decode worker computes the
    /// prompt although prefill workers exist.
    pub plan: &'static str,
}

/// Queue class.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ClassLabel {
    /// Name of the class.
    pub class: LabelText,
}

/// Queue class and outcome of its requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ClassOutcomeLabels {
    /// Name of the class.
    pub class: LabelText,
    /// `admitted`, `request_limit`, `prompt_token_limit`, `cached_token_limit`, `timeout`,
    /// `cancelled`.
    pub outcome: &'static str,
}

/// Model and outcome of an operation.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelOutcomeLabels {
    /// Model name.
    pub model: LabelText,
    /// The outcome.
    pub outcome: &'static str,
}

impl ModelOutcomeLabels {
    /// Creates the labels of a model.
    pub fn new(model: &ModelName, outcome: &'static str) -> Self {
        Self {
            model: model.as_str().into(),
            outcome,
        }
    }
}

/// Model and kind of its tokens.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelTokensLabels {
    /// Model name.
    pub model: LabelText,
    /// The kind.
    pub kind: &'static str,
}

/// Model and cause of an event.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct CauseLabels {
    /// Model name.
    pub model: LabelText,
    /// The cause.
    pub cause: &'static str,
}

impl CauseLabels {
    /// Creates the labels of a model.
    pub fn new(model: &str, cause: &'static str) -> Self {
        Self {
            model: model.into(),
            cause,
        }
    }
}

/// Model and role of workers.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelRoleLabels {
    /// Model name.
    pub model: LabelText,
    /// `aggregated`, `prefill`, `decode`; `unknown` if the worker has left the fleet.
    pub role: &'static str,
}

impl ModelRoleLabels {
    /// Creates the labels of a model and the role of one of its workers.
    pub fn new(model: &ModelName, role: Option<WorkerRole>) -> Self {
        Self {
            model: model.as_str().into(),
            role: role_name(role),
        }
    }
}

/// Returns the label value of a role.
fn role_name(role: Option<WorkerRole>) -> &'static str {
    role.map_or("unknown", WorkerRole::as_str)
}

/// Stage of a routing decision.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct StageLabel {
    /// `parse`, `render`, `tokenize`, `hash`, `index`, `choose`, `total`.
    pub stage: &'static str,
}

/// Kind of a KV event and outcome of its application.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EventLabels {
    /// `stored`, `removed`, `cleared`, `ignored`.
    pub kind: &'static str,
    /// `ok`, another outcome of applying the event to the index (such as `duplicate_store`,
    /// `block_not_found` or `index_full`), or `filtered_` followed by the reason.
    pub outcome: &'static str,
}

/// Method and status of a call to the router API.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ApiCallLabels {
    /// Method of the gRPC service.
    pub method: &'static str,
    /// Name of the gRPC status code, `OK` for success.
    pub code: &'static str,
}

/// Worker rank.
#[derive(Clone, Copy, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankLabels {
    /// Worker id.
    pub worker_id: u64,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// `aggregated`, `prefill`, `decode`; `unknown` if the worker has left the fleet.
    pub role: &'static str,
}

impl RankLabels {
    /// Creates the labels of a worker rank with the role of its worker.
    pub fn new(rank: WorkerRank, role: Option<WorkerRole>) -> Self {
        Self {
            worker_id: rank.worker.0,
            dp_rank: rank.rank.0,
            role: role_name(role),
        }
    }
}

/// Worker rank and storage tier of its cache.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankTierLabels {
    /// Worker rank.
    #[prometheus(flatten)]
    pub rank: RankLabels,
    /// Storage tier.
    pub tier: &'static str,
}

/// Worker rank and freshness of its event source.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankFreshnessLabels {
    /// Worker rank.
    #[prometheus(flatten)]
    pub rank: RankLabels,
    /// `exact`, `incomplete`, `catching_up`, `stale`, `absent`.
    pub freshness: &'static str,
}

/// Worker rank and phase of its requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankPhaseLabels {
    /// Worker rank.
    #[prometheus(flatten)]
    pub rank: RankLabels,
    /// `prefill`, `decode`.
    pub phase: &'static str,
}

/// Worker rank and kind of its failed requests.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct RankFailureLabels {
    /// Worker rank.
    #[prometheus(flatten)]
    pub rank: RankLabels,
    /// `unreachable`, `server_error`, `rejected`, `empty`, `no_output`, `no_response`,
    /// `no_content`, `overloaded`, `cancelled`.
    pub kind: &'static str,
}

/// Model, class and source of responses.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ResponseLabels {
    /// Model name; `unknown` if the request was not routed.
    pub model: LabelText,
    /// `2xx`, `4xx` and so on; `other` for a status out of range.
    pub code_class: &'static str,
    /// `engine`, `envoy`, `warmroute`.
    pub source: &'static str,
}

/// Model and coefficient of its latency model.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ModelCoefficientLabels {
    /// Model name.
    pub model: LabelText,
    /// `prefill_base`, `prefill_token`, `prefill_pair`, `decode_step`, `decode_request`,
    /// `decode_context_token`, `transfer_token`.
    pub coefficient: &'static str,
}

/// Setting, by its key in the configuration file.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SettingLabel {
    /// The key.
    pub setting: &'static str,
}

/// Request to an engine about a session, and its outcome.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct EngineSessionLabels {
    /// `open`, `close`.
    pub call: &'static str,
    /// `ok`, `busy`, `unreachable`, `timeout`, `not_offered`, `status`, `overflow`.
    pub outcome: &'static str,
}

/// Version of the program.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct BuildLabels {
    /// Version of the package.
    pub version: LabelText,
    /// Abbreviated commit hash; empty if it is unknown.
    pub commit: LabelText,
}

/// Properties of a worker. The labels `worker` and `address` are not named `pod` and `endpoint`,
/// because these are labels that the Prometheus Operator adds for the scraped process.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct WorkerLabels {
    /// Worker id.
    pub worker_id: u64,
    /// Pod with its namespace; the address if the worker has no name.
    pub worker: LabelText,
    /// Address that Envoy sends requests to.
    pub address: LabelText,
    /// `aggregated`, `prefill`, `decode`.
    pub role: &'static str,
    /// Model name.
    pub model: LabelText,
}

impl From<&Worker> for WorkerLabels {
    fn from(worker: &Worker) -> Self {
        Self {
            worker_id: worker.id.0,
            worker: worker.display_name().into(),
            address: worker.endpoint.to_string().into(),
            role: worker.role.as_str(),
            model: worker.model.as_str().into(),
        }
    }
}

/// Pool of workers that the process serves.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct PoolLabels {
    /// Name of the pool.
    pub name: LabelText,
    /// Namespace of the pool.
    pub namespace: LabelText,
}

/// Listener of warmroute.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerLabel {
    /// `ext_proc`, `ext_proc_unix`, `api`, `admin`, `health`, `xds`.
    pub listener: &'static str,
}

/// Listener and outcome of one of its operations.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerOutcomeLabels {
    /// `ext_proc`, `ext_proc_unix`, `api`, `admin`, `health`, `xds`.
    pub listener: &'static str,
    /// The outcome.
    pub outcome: &'static str,
}

/// Listener and reason of one of its events.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct ListenerReasonLabels {
    /// `ext_proc`, `ext_proc_unix`, `health`, `api`, `admin`, `xds`.
    pub listener: &'static str,
    /// The reason.
    pub reason: &'static str,
}

/// HTTP/2 error that a listener sent.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct Http2ErrorLabels {
    /// `ext_proc`, `ext_proc_unix`, `health`, `api`, `xds`.
    pub listener: &'static str,
    /// `stream` (RST_STREAM) or `connection` (GOAWAY).
    pub scope: &'static str,
    /// Name of the error code in RFC 9113, in lower case.
    pub reason: &'static str,
}

/// Background task.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct TaskLabels {
    /// Kind of the task.
    pub task: &'static str,
    /// Id of the worker that the task belongs to; empty for a task of the process.
    pub worker_id: Option<u64>,
    /// Data-parallel rank that the task belongs to; empty for a task of the process.
    pub dp_rank: Option<u32>,
}

impl From<&'static str> for TaskLabels {
    /// Creates the labels of a task of the process.
    fn from(task: &'static str) -> Self {
        Self {
            task,
            worker_id: None,
            dp_rank: None,
        }
    }
}

impl TaskLabels {
    /// Creates the labels of a task of one worker rank.
    pub fn of_rank(task: &'static str, rank: WorkerRank) -> Self {
        Self {
            task,
            worker_id: Some(rank.worker.0),
            dp_rank: Some(rank.rank.0),
        }
    }
}

/// Discovery source.
#[derive(Clone, Debug, Hash, PartialEq, Eq, EncodeLabelSet)]
pub struct SourceLabel {
    /// Kind and name of the source.
    pub source: LabelText,
}
