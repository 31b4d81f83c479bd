//! The `prefill:` section of a model: execution of remote prefills.

use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use warmroute_settings::{DurationSetting, Problem};

/// Execution of remote prefills.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct PrefillConfig {
    /// Mode.
    pub mode: PrefillMode,
    /// `call`: protocol of the KV transfer.
    pub protocol: KvTransferProtocol,
    /// `call`: timeout of one prefill; `mirror`: timeout of the first token.
    pub timeout: DurationSetting,
    /// `call`: number of prefill workers to try before the decode worker computes the prompt
    /// itself.
    pub max_attempts: u32,
    /// `call`: maximum number of concurrent prefills. Further requests are computed by the decode
    /// worker.
    pub max_concurrency: u32,
    /// `mirror`: Envoy's cluster of prefill workers.
    pub cluster: String,
}

/// Mode of remote prefills.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum PrefillMode {
    /// A sidecar or a front end reads the headers and runs the prefill.
    #[default]
    Header,
    /// Envoy mirrors the request to both workers, which connect to each other (SGLang).
    Mirror,
    /// warmroute calls the prefill worker first and hands its KV transfer parameters to the decode
    /// worker (vLLM, TensorRT-LLM).
    Call,
}

/// Protocol of the KV transfer between engines.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum KvTransferProtocol {
    /// `kv_transfer_params` of vLLM's connectors.
    #[default]
    Vllm,
    /// `disaggregated_params` of TensorRT-LLM.
    Trtllm,
}

impl Default for PrefillConfig {
    fn default() -> Self {
        Self {
            mode: PrefillMode::Header,
            protocol: KvTransferProtocol::Vllm,
            timeout: DurationSetting::seconds(20),
            max_attempts: 2,
            max_concurrency: 4096,
            cluster: "prefill".to_owned(),
        }
    }
}

impl PrefillConfig {
    /// Returns the maximum duration of a called prefill, with all attempts.
    pub fn max_call_time(&self) -> Duration {
        if self.mode == PrefillMode::Call {
            self.timeout.get().saturating_mul(self.max_attempts)
        } else {
            Duration::ZERO
        }
    }

    /// Returns the semantic errors of the configuration.
    pub fn problems(&self) -> Vec<Problem> {
        let default = Self::default();
        let mut problems = Vec::new();
        if self.timeout.get().is_zero() {
            problems.push(Problem::of(
                "timeout",
                "no prefill could be done within 0s; the default is 20s",
            ));
        }
        if self.max_attempts == 0 {
            problems.push(Problem::of(
                "max_attempts",
                "no prefill worker would be called; set at least 1, or `mode: header`",
            ));
        }
        if self.max_concurrency == 0 {
            problems.push(Problem::of(
                "max_concurrency",
                "no prefill could run; the default is 4096",
            ));
        }
        if self.cluster.trim().is_empty() {
            problems.push(Problem::of(
                "cluster",
                "the name of the cluster is empty; set it as in Envoy's configuration",
            ));
        }
        let only = |by: PrefillMode, key: &'static str, other: bool| {
            (self.mode != by && other)
                .then(|| Problem::of(key, format!("is used with `mode: {}` only", by.as_str())))
        };
        problems.extend(only(
            PrefillMode::Call,
            "protocol",
            self.protocol != default.protocol,
        ));
        problems.extend(only(
            PrefillMode::Call,
            "max_attempts",
            self.max_attempts != default.max_attempts && self.max_attempts != 0,
        ));
        problems.extend(only(
            PrefillMode::Mirror,
            "cluster",
            self.cluster != default.cluster && !self.cluster.trim().is_empty(),
        ));
        problems
    }
}

impl PrefillMode {
    /// Returns the value in the configuration.
    pub fn as_str(self) -> &'static str {
        match self {
            PrefillMode::Header => "header",
            PrefillMode::Mirror => "mirror",
            PrefillMode::Call => "call",
        }
    }
}
