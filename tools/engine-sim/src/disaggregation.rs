//! Disaggregated prefill in the protocols of three engines. With vLLM's NIXL connector and with
//! TensorRT-LLM, the decode engine fetches the blocks that the prefill engine has leased to it.
//! With SGLang, both engines receive the request and pair up in a bootstrap room. This module reads
//! the request fields; `fetch` and `bootstrap` do the transfer. Real engines do not check whether
//! the blocks belong to the prompt. The simulator checks this, counts the results, and reports them
//! in the response (`kv_origin`), because router tests need them.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::json_connection;
use super::leases::LeasedBlocks;

/// Protocol for disaggregated prefill; disabled by default.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DisaggregationArgs {
    /// vLLM with this connector: `kv_transfer_params`.
    #[arg(long, value_enum, conflicts_with_all = ["disaggregation_mode", "disaggregation"])]
    kv_connector: Option<KvConnector>,
    /// One side of SGLang: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`.
    #[arg(long, value_enum, conflicts_with = "disaggregation")]
    disaggregation_mode: Option<DisaggregationMode>,
    /// TensorRT-LLM: `disaggregated_params`.
    #[arg(long, value_enum)]
    disaggregation: Option<DisaggregationBackend>,
    /// Time for which a prefill's blocks wait for the decode side (vLLM's `kv_lease_duration`), in
    /// real time at any `--speed`.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "30s")]
    pub(crate) kv_lease: Duration,
    /// Time after which a decode request fails if its blocks cannot be fetched.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "5s")]
    pub(crate) kv_load_timeout: Duration,
    /// Handling of a decode request whose blocks cannot be fetched, with vLLM's connector (its
    /// `kv_load_failure_policy`).
    #[arg(long, value_enum, default_value = "fail")]
    kv_load_failure_policy: KvLoadFailurePolicy,
    /// Host at which decode engines fetch blocks; the HTTP host by default.
    #[arg(long)]
    pub(crate) kv_side_channel_host: Option<String>,
    /// Port for the first rank; rank r uses the port + r. 0 selects a free port.
    #[arg(long, default_value_t = 0)]
    pub(crate) kv_side_channel_port: u16,
    /// Port at which an SGLang prefill engine waits for decode engines; 0 selects a free port.
    #[arg(long, alias = "disaggregation-bootstrap-port", default_value_t = 8998)]
    pub(crate) bootstrap_port: u16,
    /// Time after which a bootstrap room fails if the peer does not join
    /// (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`).
    #[arg(long, value_parser = humantime::parse_duration, default_value = "300s")]
    pub(crate) bootstrap_timeout: Duration,
    /// Time after which a decode engine treats an unreachable prefill engine as failed (SGLang
    /// tries 15 times, once a second).
    #[arg(long, value_parser = humantime::parse_duration, default_value = "15s")]
    pub(crate) bootstrap_connect_timeout: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum KvConnector {
    Nixl,
}

/// See `--kv-load-failure-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum KvLoadFailurePolicy {
    /// The request fails.
    Fail,
    /// The decode engine computes the prompt.
    Recompute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DisaggregationMode {
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DisaggregationBackend {
    Trtllm,
}

/// Protocol of an engine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum TransferProtocol {
    Nixl,
    Trtllm,
    SglangPrefill,
    SglangDecode,
}

impl TransferProtocol {
    /// Returns true if decode engines fetch leased blocks. The same engine may then prefill and
    /// decode.
    pub(crate) fn uses_leases(self) -> bool {
        matches!(self, Self::Nixl | Self::Trtllm)
    }

    pub(crate) fn is_sglang(self) -> bool {
        !self.uses_leases()
    }
}

impl DisaggregationArgs {
    pub(crate) fn protocol(&self) -> Option<TransferProtocol> {
        let connector = self
            .kv_connector
            .map(|KvConnector::Nixl| TransferProtocol::Nixl);
        let dialect = self
            .disaggregation
            .map(|DisaggregationBackend::Trtllm| TransferProtocol::Trtllm);
        let side = self.disaggregation_mode.map(|side| match side {
            DisaggregationMode::Prefill => TransferProtocol::SglangPrefill,
            DisaggregationMode::Decode => TransferProtocol::SglangDecode,
        });
        connector.or(dialect).or(side)
    }

    /// Returns the handling of a failed KV load. It is configurable only for vLLM.
    pub(crate) fn load_failure_policy(&self) -> KvLoadFailurePolicy {
        if self.protocol() == Some(TransferProtocol::Nixl) {
            self.kv_load_failure_policy
        } else {
            KvLoadFailurePolicy::Fail
        }
    }
}

/// Counters of transfer events for the metrics page.
#[derive(Debug, Default)]
pub(crate) struct TransferCounters {
    pub(crate) kv_transfers: AtomicU64,
    pub(crate) kv_mismatches: AtomicU64,
    pub(crate) kv_stale_reads: AtomicU64,
    pub(crate) rooms_met: AtomicU64,
    pub(crate) rooms_unmet: AtomicU64,
    pub(crate) rooms_mismatched: AtomicU64,
    pub(crate) aborted: AtomicU64,
    pub(crate) prefills: AtomicU64,
}

pub(crate) fn increment(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Address from which decode engines fetch the leased blocks of one rank.
#[derive(Clone, Debug)]
pub(crate) struct SideChannelAddress {
    /// Engine id, which is new after every start.
    pub(crate) engine: String,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Location of a prompt's blocks.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct KvSource {
    pub(crate) engine: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// Id of the lease. With TensorRT-LLM, the id that both engines use for the request.
    #[serde(skip)]
    pub(crate) request: String,
    /// Block numbers, if the decode engine reads by number. Otherwise the prefill engine resolves
    /// the lease.
    #[serde(skip)]
    pub(crate) blocks: Option<Vec<usize>>,
    /// The token that the prefill engine generated, if the protocol transfers it.
    #[serde(skip)]
    pub(crate) first: Option<u32>,
    /// Prompt tokens cached on the prefill engine. vLLM reports them as its own.
    #[serde(skip)]
    pub(crate) cached_tokens: Option<usize>,
}

/// Phases of a request that this engine computes.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum RequestPhase {
    /// Both phases.
    Local,
    /// Prefill only. Another engine fetches the blocks, by this request id if there is one.
    RemoteDecode(Option<u64>),
    /// Decode only, with blocks from this source.
    RemotePrefill(KvSource),
    /// Prefill only, for the decode engine in the room; one room per prompt.
    BootstrapPrefill(Vec<u64>),
    /// Decode only, with blocks from a room at that address; one room per prompt.
    BootstrapDecode(String, Vec<u64>),
}

impl RequestPhase {
    pub(crate) fn is_prefill(&self) -> bool {
        matches!(self, Self::RemoteDecode(_) | Self::BootstrapPrefill(_))
    }

    /// Returns the prompt tokens cached on the prefill engine. vLLM reports them in place of its
    /// own number.
    pub(crate) fn remote_cached_tokens(&self) -> Option<usize> {
        if let Self::RemotePrefill(source) = self {
            source.cached_tokens
        } else {
            None
        }
    }

    /// Returns the number of tokens to generate. A prefill generates one token, except with vLLM,
    /// where the request sets the limit.
    pub(crate) fn answer_len(
        &self,
        protocol: Option<TransferProtocol>,
        max_tokens: usize,
    ) -> usize {
        if self.is_prefill() && protocol != Some(TransferProtocol::Nixl) {
            1
        } else {
            max_tokens
        }
    }
}

#[derive(Clone, Debug, Deserialize)]
#[serde(untagged)]
enum OneOrMany<T> {
    One(T),
    Many(Vec<T>),
}

impl<T: Clone> OneOrMany<T> {
    fn first(&self) -> Option<&T> {
        match self {
            Self::One(one) => Some(one),
            Self::Many(many) => many.first(),
        }
    }
}

/// Request fields for disaggregated prefill.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct DisaggregationFields {
    kv_transfer_params: Option<NixlTransferParams>,
    disaggregated_params: Option<DisaggregatedParams>,
    bootstrap_host: Option<OneOrMany<String>>,
    bootstrap_port: Option<OneOrMany<Option<u16>>>,
    bootstrap_room: Option<OneOrMany<u64>>,
    rid: Option<OneOrMany<String>>,
    prompt: Value,
    routed_dp_rank: Option<u32>,
    data_parallel_rank: Option<u32>,
}

/// vLLM's parameters that an engine reads.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct NixlTransferParams {
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    remote_engine_id: Option<String>,
    remote_request_id: Option<String>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
    remote_block_ids: Option<Vec<Vec<usize>>>,
    remote_prefill_cached_tokens: Option<usize>,
}

/// TensorRT-LLM's parameters.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct DisaggregatedParams {
    request_type: String,
    first_gen_tokens: Option<Vec<u32>>,
    ctx_request_id: Option<u64>,
    encoded_opaque_state: Option<String>,
    disagg_request_id: Option<u64>,
    schedule_style: Option<Value>,
}

impl DisaggregationFields {
    pub(crate) fn read(body: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(body).map_err(|error| error.to_string())
    }

    /// Returns the rank selected by the body.
    pub(crate) fn rank(&self) -> Option<u32> {
        self.routed_dp_rank.or(self.data_parallel_rank)
    }

    /// Returns the ids by which the request can be aborted. As in SGLang, the prompts of a list
    /// have ids derived from the given one.
    pub(crate) fn abort_ids(&self) -> Vec<String> {
        let prompts = self
            .prompt
            .as_array()
            .filter(|prompts| prompts.first().is_some_and(|first| !first.is_number()));
        match (&self.rid, prompts) {
            (None, _) => Vec::new(),
            (Some(OneOrMany::One(name)), None) => vec![name.clone()],
            (Some(OneOrMany::One(name)), Some(prompts)) => (0..prompts.len())
                .map(|at| format!("{name}_{at}"))
                .collect(),
            (Some(OneOrMany::Many(names)), _) => names.clone(),
        }
    }

    /// Returns the phases that an engine with `protocol` computes.
    pub(crate) fn phase(
        &self,
        protocol: TransferProtocol,
        prompts: usize,
        choices: usize,
    ) -> Result<RequestPhase, String> {
        match protocol {
            TransferProtocol::Nixl => self
                .kv_transfer_params
                .as_ref()
                .map_or(Ok(RequestPhase::Local), NixlTransferParams::phase),
            TransferProtocol::Trtllm => self
                .disaggregated_params
                .as_ref()
                .map_or(Ok(RequestPhase::Local), DisaggregatedParams::phase),
            // All choices of a prompt would need its single room.
            TransferProtocol::SglangPrefill | TransferProtocol::SglangDecode if choices > 1 => Err(
                format!("n = {choices} is not supported: each prompt has one bootstrap room"),
            ),
            TransferProtocol::SglangPrefill => {
                Ok(RequestPhase::BootstrapPrefill(self.rooms(prompts)?))
            }
            TransferProtocol::SglangDecode => {
                let rooms = self.rooms(prompts)?;
                let host = self.bootstrap_host.as_ref().and_then(OneOrMany::first);
                let host = host.ok_or("a disaggregated request needs bootstrap_host")?;
                let port = self
                    .bootstrap_port
                    .as_ref()
                    .and_then(OneOrMany::first)
                    .copied()
                    .flatten();
                Ok(RequestPhase::BootstrapDecode(
                    json_connection::host_port(host, port.unwrap_or(8998)),
                    rooms,
                ))
            }
        }
    }

    /// Returns one room per prompt. A single room number is incremented for every further prompt.
    fn rooms(&self, prompts: usize) -> Result<Vec<u64>, String> {
        match &self.bootstrap_room {
            None => Err(
                "Invalid request: Disaggregated request received without bootstrap room id.".into(),
            ),
            Some(OneOrMany::One(first)) => Ok((0..prompts as u64).map(|at| first + at).collect()),
            Some(OneOrMany::Many(rooms)) if rooms.len() == prompts => Ok(rooms.clone()),
            Some(OneOrMany::Many(rooms)) => Err(format!(
                "{} bootstrap rooms for {prompts} prompts",
                rooms.len()
            )),
        }
    }

    /// Returns TensorRT-LLM's response fields for a leased prompt.
    pub(crate) fn response_params(
        &self,
        side_channel: &SideChannelAddress,
        leased: &LeasedBlocks,
        rank: u32,
        first_token: Option<u32>,
    ) -> Value {
        let request_params = self.disaggregated_params.clone().unwrap_or_default();
        let state = serde_json::to_vec(&side_channel.source(leased)).unwrap_or_default();
        json!({
            "request_type": "context_only",
            "first_gen_tokens": first_token.map(|token| [token]),
            "first_gen_log_probs": null,
            "first_gen_logits": null,
            "ctx_request_id": leased.name.parse::<u64>().ok(),
            "encoded_opaque_state": BASE64_STANDARD.encode(state),
            "draft_tokens": null,
            "disagg_request_id": request_params.disagg_request_id,
            "ctx_dp_rank": rank,
            "ctx_info_endpoint": format!("tcp://{}", json_connection::host_port(&side_channel.host, side_channel.port)),
            "schedule_style": request_params.schedule_style,
            "ctx_usage": null,
        })
    }
}

impl NixlTransferParams {
    fn phase(&self) -> Result<RequestPhase, String> {
        if self.do_remote_decode == Some(true) {
            return Ok(RequestPhase::RemoteDecode(None));
        }
        if self.do_remote_prefill != Some(true) {
            return Ok(RequestPhase::Local);
        }
        let source = || {
            Some(KvSource {
                engine: self.remote_engine_id.clone()?,
                host: self.remote_host.clone()?,
                port: self.remote_port?,
                request: self.remote_request_id.clone()?,
                blocks: Some(self.remote_block_ids.clone()?.concat()),
                first: None,
                cached_tokens: self.remote_prefill_cached_tokens,
            })
        };
        source()
            .map(RequestPhase::RemotePrefill)
            .ok_or_else(|| "kv_transfer_params: do_remote_prefill without all of remote_*".into())
    }
}

impl DisaggregatedParams {
    fn phase(&self) -> Result<RequestPhase, String> {
        match self.request_type.as_str() {
            "context_and_generation" => Ok(RequestPhase::Local),
            "context_only" => Ok(RequestPhase::RemoteDecode(self.disagg_request_id)),
            "generation_only" => {
                let request_id = self
                    .disagg_request_id
                    .or(self.ctx_request_id)
                    .ok_or("generation_only without ctx_request_id or disagg_request_id")?;
                let state = self
                    .encoded_opaque_state
                    .as_deref()
                    .ok_or("generation_only without encoded_opaque_state")?;
                let state = BASE64_STANDARD
                    .decode(state)
                    .map_err(|error| error.to_string())?;
                let source: KvSource =
                    serde_json::from_slice(&state).map_err(|error| error.to_string())?;
                let first = self
                    .first_gen_tokens
                    .as_ref()
                    .and_then(|tokens| tokens.first())
                    .copied();
                Ok(RequestPhase::RemotePrefill(KvSource {
                    request: request_id.to_string(),
                    first,
                    ..source
                }))
            }
            other => Err(format!("unknown request_type {other:?}")),
        }
    }
}

impl SideChannelAddress {
    fn source(&self, leased: &LeasedBlocks) -> KvSource {
        KvSource {
            engine: self.engine.clone(),
            host: self.host.clone(),
            port: self.port,
            request: leased.name.to_string(),
            blocks: None,
            first: None,
            cached_tokens: None,
        }
    }

    /// Returns vLLM's response fields for a leased prompt.
    pub(crate) fn transfer_params(&self, leased: &LeasedBlocks, cached: usize) -> Value {
        json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [leased.blocks],
            "remote_engine_id": self.engine,
            "remote_request_id": *leased.name,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": leased.tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        })
    }
}

#[cfg(test)]
mod tests;
