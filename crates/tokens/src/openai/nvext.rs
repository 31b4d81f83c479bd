//! `nvext`: the routing extension of a request body, as defined by Dynamo.
//!
//! Hints are read only if the operator trusts clients. The content of the prompt is read from every
//! client if the front ends read it as well. Parsing is lenient: unknown keys and invalid
//! values are ignored, because the engine may support them.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use serde_json::value::RawValue;

use warmroute_core::worker::WorkerId;

/// The routing part of `nvext`.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct NvExt {
    /// Annotations. An annotation that begins with `query_instance_id:` requests only the routing
    /// decision.
    pub annotations: Vec<String>,
    /// Worker for every phase.
    pub backend_instance_id: Option<WorkerId>,
    /// Worker for the prefill phase.
    pub prefill_worker_id: Option<WorkerId>,
    /// Worker for the decode phase.
    pub decode_worker_id: Option<WorkerId>,
    /// Data-parallel rank of the decode or aggregated worker.
    pub dp_rank: Option<u32>,
    /// Data-parallel rank of the prefill worker.
    pub prefill_dp_rank: Option<u32>,
    /// Cache salt that separates equal prompts of different tenants. It overrides the top-level
    /// salt.
    pub cache_salt: Option<String>,
    /// Token ids of the complete prompt.
    pub token_data: Option<Vec<u32>>,
    /// Scheduling hints of an agent.
    pub agent_hints: AgentHints,
    /// Constraints on eligible workers.
    pub routing_constraints: RoutingConstraints,
    /// Weights for this request, in the routing policy's format.
    pub router_config_override: Option<Value>,
    /// Session of the request and its lifecycle.
    pub session_control: Option<SessionControl>,
    /// Workers that may be chosen. `None` allows all.
    pub allowed_worker_ids: Option<Vec<u64>>,
}

/// Session of a request.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct SessionControl {
    /// Session id.
    pub session_id: Option<String>,
    /// Lifecycle action, if any.
    pub action: Option<SessionAction>,
    /// Idle time in seconds after which the engine may close the session.
    pub timeout: Option<f64>,
}

/// Lifecycle action of a session.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SessionAction {
    /// Opens the session.
    Open,
    /// Closes the session after this request.
    Close,
}

/// Maximum idle timeout in seconds: one year.
const MAX_IDLE_SECONDS: f64 = 31_536_000.0;

impl SessionControl {
    /// Returns the idle time after which the engine may close the session.
    pub fn idle_timeout(&self) -> Option<Duration> {
        let seconds = self
            .timeout
            .filter(|seconds| (1.0..=MAX_IDLE_SECONDS).contains(seconds))?;
        Some(Duration::from_secs_f64(seconds))
    }
}

/// Scheduling hints of an agent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct AgentHints {
    /// Seconds by which the request's arrival is moved forward in the queue.
    pub priority: Option<f64>,
    /// Older name of `priority`.
    pub latency_sensitivity: Option<f64>,
    /// Strict priority: higher values are scheduled before all lower ones.
    pub strict_priority: Option<u32>,
    /// Expected output sequence length in tokens.
    pub osl: Option<u64>,
}

/// Constraints on eligible workers.
#[derive(Clone, Debug, Default, PartialEq, Deserialize)]
#[serde(default)]
pub struct RoutingConstraints {
    /// Taints that a worker must have to be eligible.
    pub required_taints: Vec<String>,
    /// Taints that lower the cost of a worker, with their weights. A negative weight raises it.
    pub preferred_taints: BTreeMap<String, f64>,
}

/// Prefix of the annotation that requests only the routing decision.
const QUERY_ANNOTATION_PREFIX: &str = "query_instance_id:";

impl NvExt {
    /// Parses the extension field by field, so that an invalid value affects only its own field.
    pub fn parse(raw: &str) -> Self {
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

    /// Returns the fields that change the prompt or its blocks, without the hints.
    #[must_use]
    pub fn into_content(self) -> Self {
        Self {
            cache_salt: self.cache_salt,
            token_data: self.token_data,
            ..Self::default()
        }
    }

    /// Returns true if the client requests only the routing decision.
    pub fn is_query(&self) -> bool {
        self.annotations
            .iter()
            .any(|annotation| annotation.starts_with(QUERY_ANNOTATION_PREFIX))
    }
}

impl AgentHints {
    /// Returns the seconds by which the request's arrival is moved forward in the queue.
    pub fn priority_jump(&self) -> Option<f64> {
        self.priority.or(self.latency_sensitivity)
    }
}

fn set<'de, T: Deserialize<'de>>(field: &mut T, text: &'de str) {
    if let Ok(value) = serde_json::from_str(text) {
        *field = value;
    }
}
