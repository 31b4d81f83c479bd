//! `prefill:` of a model: how a prefill by another worker is carried out.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::settings::{Period, Problem};

/// How prefills by other workers are carried out.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct PrefillConfig {
    /// By whom.
    pub by: By,
    /// `call`: what engines want to hear.
    pub protocol: Protocol,
    /// `call`: how long one prefill may take; `mirror`: how long the first token may take.
    pub deadline: Period,
    /// `call`: how many prefill workers are asked before the decode worker computes the prompt itself.
    pub tries: u32,
    /// `call`: prefills under way at once; further requests are computed by the decode worker.
    pub in_flight: u32,
    /// `mirror`: Envoy's cluster of prefill workers.
    pub cluster: String,
}

/// Who carries a prefill out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum By {
    /// Whoever reads our headers: the prefill worker is named, and nothing else.
    #[default]
    Header,
    /// Envoy: it sends the same request to both workers, and they meet (SGLang).
    Mirror,
    /// We: the prefill worker is asked first, and what it says goes to the decode worker (vLLM, TensorRT-LLM).
    Call,
}

/// In which words KV is handed from one engine to another.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Protocol {
    /// `kv_transfer_params`, as vLLM's connectors have it.
    #[default]
    Vllm,
    /// `disaggregated_params`, as TensorRT-LLM has it.
    Trtllm,
}

impl Default for PrefillConfig {
    fn default() -> Self {
        Self {
            by: By::Header,
            protocol: Protocol::Vllm,
            deadline: Period::seconds(20),
            tries: 2,
            in_flight: 4096,
            cluster: "prefill".to_owned(),
        }
    }
}

impl PrefillConfig {
    /// How long Envoy has to wait for a prefill that is called for, with every try.
    pub fn longest_call(&self) -> Duration {
        if self.by == By::Call {
            self.deadline.get().saturating_mul(self.tries)
        } else {
            Duration::ZERO
        }
    }

    /// Mistakes of meaning.
    pub fn problems(&self) -> Vec<Problem> {
        let default = Self::default();
        let mut problems = Vec::new();
        if self.deadline.get().is_zero() {
            problems.push(Problem::of(
                "deadline",
                "no prefill could be done within 0s; the default is 20s",
            ));
        }
        if self.tries == 0 {
            problems.push(Problem::of(
                "tries",
                "nobody would be asked; write at least 1, or `by: header`",
            ));
        }
        if self.in_flight == 0 {
            problems.push(Problem::of(
                "in_flight",
                "nobody could be asked; the default is 4096",
            ));
        }
        if self.cluster.trim().is_empty() {
            problems.push(Problem::of(
                "cluster",
                "the cluster has no name; write it as Envoy's configuration does",
            ));
        }
        let only = |by: By, key: &'static str, other: bool| {
            (self.by != by && other)
                .then(|| Problem::of(key, format!("is read with `by: {}` only", by.as_str())))
        };
        problems.extend(only(
            By::Call,
            "protocol",
            self.protocol != default.protocol,
        ));
        problems.extend(only(
            By::Call,
            "tries",
            self.tries != default.tries && self.tries != 0,
        ));
        problems.extend(only(
            By::Mirror,
            "cluster",
            self.cluster != default.cluster && !self.cluster.trim().is_empty(),
        ));
        problems
    }
}

impl By {
    /// As it stands in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            By::Header => "header",
            By::Mirror => "mirror",
            By::Call => "call",
        }
    }
}
