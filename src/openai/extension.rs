//! `nvext`: what a request body may say to routers beside what it says to the engine. It is read only where the operator
//! trusts clients, and then leniently: a key we do not know is somebody else's, and a value we cannot read is as if it
//! were not there, because the engine behind us may well understand it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use crate::worker::WorkerId;

/// The routing part of `nvext`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct Extension {
    /// Free words; one that begins with [`QUERY`] asks for the choice only.
    pub annotations: Vec<String>,
    /// Worker for every phase.
    pub backend_instance_id: Option<WorkerId>,
    /// Worker for the prefill.
    pub prefill_worker_id: Option<WorkerId>,
    /// Worker for the decode.
    pub decode_worker_id: Option<WorkerId>,
    /// Rank of the decode or aggregated worker.
    pub dp_rank: Option<u32>,
    /// Rank of the prefill worker.
    pub prefill_dp_rank: Option<u32>,
    /// Separates equal prompts of different tenants; beats the salt beside `nvext`.
    pub cache_salt: Option<String>,
    /// The prompt's tokens, finished.
    pub token_data: Option<Vec<u32>>,
    /// What an agent knows of its request.
    pub agent_hints: AgentHints,
    /// Which workers will do.
    pub routing_constraints: RoutingConstraints,
    /// Weights for this request alone, as the choice defines them.
    pub router_config_override: Option<Value>,
    /// The request's session, and whether it begins or ends.
    pub session_control: Option<SessionControl>,
    /// Workers that may be chosen; none: all.
    pub allowed_worker_ids: Option<Vec<u64>>,
}

/// The request's session.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct SessionControl {
    /// Its id.
    pub session_id: Option<String>,
    /// Whether it begins or ends.
    pub action: Option<SessionAction>,
    /// Seconds without a request after which the engine may close it.
    pub timeout: Option<f64>,
}

/// What happens to the session with this request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionAction {
    /// Opens the session.
    Open,
    /// Closes the session after this request.
    Close,
}

/// Longest idle time of a session: a year.
const LONGEST_IDLE: f64 = 31_536_000.0;

impl SessionControl {
    /// The time without a request after which the engine may close the session.
    pub fn idle(&self) -> Option<Duration> {
        let seconds = self
            .timeout
            .filter(|seconds| (1.0..=LONGEST_IDLE).contains(seconds))?;
        Some(Duration::from_secs_f64(seconds))
    }
}

/// What an agent knows of its request.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct AgentHints {
    /// Seconds the request is treated as having come earlier.
    pub priority: Option<f64>,
    /// The older name of `priority`.
    pub latency_sensitivity: Option<f64>,
    /// Before every request of a lower one.
    pub strict_priority: Option<u32>,
    /// Expected output tokens.
    pub osl: Option<u64>,
}

/// Which workers will do.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RoutingConstraints {
    /// Taints a worker must carry, all of them.
    pub required_taints: Vec<String>,
    /// Taints that make a worker cheaper, or dearer where the weight is negative.
    pub preferred_taints: BTreeMap<String, f64>,
}

/// Beginning of the annotation that asks for the choice instead of an answer.
pub const QUERY: &str = "query_instance_id:";

impl Extension {
    /// Reads the routing part field by field, so that one bad value does not hide the others.
    pub fn read(raw: &str) -> Self {
        let Ok(fields) = serde_json::from_str::<BTreeMap<String, &RawValue>>(raw) else {
            return Self::default();
        };
        let mut extension = Self::default();
        for (key, value) in fields {
            let text = value.get();
            match key.as_str() {
                "annotations" => set(&mut extension.annotations, text),
                "backend_instance_id" => set(&mut extension.backend_instance_id, text),
                "prefill_worker_id" => set(&mut extension.prefill_worker_id, text),
                "decode_worker_id" => set(&mut extension.decode_worker_id, text),
                "dp_rank" => set(&mut extension.dp_rank, text),
                "prefill_dp_rank" => set(&mut extension.prefill_dp_rank, text),
                "cache_salt" => set(&mut extension.cache_salt, text),
                "token_data" => set(&mut extension.token_data, text),
                "agent_hints" => set(&mut extension.agent_hints, text),
                "routing_constraints" => set(&mut extension.routing_constraints, text),
                "router_config_override" => set(&mut extension.router_config_override, text),
                "session_control" => set(&mut extension.session_control, text),
                "allowed_worker_ids" => set(&mut extension.allowed_worker_ids, text),
                _ => {}
            }
        }
        extension
    }

    /// Whether the choice is asked for and not an answer.
    pub fn is_query(&self) -> bool {
        self.annotations
            .iter()
            .any(|annotation| annotation.starts_with(QUERY))
    }
}

impl AgentHints {
    /// Seconds the request is treated as having come earlier.
    pub fn priority_jump(&self) -> Option<f64> {
        self.priority.or(self.latency_sensitivity)
    }
}

fn set<'de, T: Deserialize<'de>>(field: &mut T, text: &'de str) {
    if let Ok(value) = serde_json::from_str(text) {
        *field = value;
    }
}
