//! Prefill here, decode there, in the three ways engines have: vLLM's NIXL connector and TensorRT-LLM, where the decode
//! side fetches what the prefill side leaves behind, and SGLang, where both get the request and meet in a room. This module
//! reads what a request wants of that; `fetch` and `rooms` do it. Real engines do not look whether the blocks belong to the
//! prompt. These do, count, and tell it in the answer (`origin`), because that is what tests of a router want to know.

use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use clap::ValueEnum;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::leases::Lent;
use super::line;

/// How an engine hands prompts over; not at all by default.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct Handover {
    /// As vLLM with this connector: `kv_transfer_params`.
    #[arg(long, value_enum, conflicts_with_all = ["disaggregation_mode", "disaggregation"])]
    kv_connector: Option<Connector>,
    /// As one side of SGLang: `bootstrap_host`, `bootstrap_port`, `bootstrap_room`.
    #[arg(long, value_enum, conflicts_with = "disaggregation")]
    disaggregation_mode: Option<Side>,
    /// As TensorRT-LLM: `disaggregated_params`.
    #[arg(long, value_enum)]
    disaggregation: Option<Dialect>,
    /// How long a prefill's blocks wait for the decode side (vLLM's `kv_lease_duration`), in real time at any `--speed`.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "30s")]
    pub(crate) kv_lease: Duration,
    /// After how long a decode request fails whose blocks cannot be fetched.
    #[arg(long, value_parser = humantime::parse_duration, default_value = "5s")]
    pub(crate) kv_load_timeout: Duration,
    /// What becomes of a decode request whose blocks cannot be fetched, with vLLM's connector (its
    /// `kv_load_failure_policy`).
    #[arg(long, value_enum, default_value = "fail")]
    kv_load_failure_policy: OnLoss,
    /// Where decode engines are told to come for blocks; the host that HTTP is served on by default.
    #[arg(long)]
    pub(crate) kv_side_channel_host: Option<String>,
    /// Port for that of the first rank; rank r uses the port + r. 0 takes any.
    #[arg(long, default_value_t = 0)]
    pub(crate) kv_side_channel_port: u16,
    /// Where a prefill engine of SGLang's kind waits for decode engines; 0 takes any.
    #[arg(long, alias = "disaggregation-bootstrap-port", default_value_t = 8998)]
    pub(crate) bootstrap_port: u16,
    /// After how long a room fails in which nobody else turns up (`SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT`).
    #[arg(long, value_parser = humantime::parse_duration, default_value = "300s")]
    pub(crate) bootstrap_timeout: Duration,
    /// After how long a decode engine takes a prefill engine for dead that it cannot reach (SGLang asks 15 times, once a
    /// second).
    #[arg(long, value_parser = humantime::parse_duration, default_value = "15s")]
    pub(crate) bootstrap_patience: Duration,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Connector {
    Nixl,
}

/// See `--kv-load-failure-policy`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnLoss {
    /// It fails.
    Fail,
    /// The decode engine computes the prompt.
    Recompute,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Side {
    Prefill,
    Decode,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Dialect {
    Trtllm,
}

/// What an engine speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Protocol {
    Nixl,
    Trtllm,
    SglangPrefill,
    SglangDecode,
}

impl Protocol {
    /// Whether prompts are lent by name and fetched, by the same engine even.
    pub(crate) fn lends(self) -> bool {
        matches!(self, Self::Nixl | Self::Trtllm)
    }

    pub(crate) fn is_sglang(self) -> bool {
        !self.lends()
    }
}

impl Handover {
    pub(crate) fn protocol(&self) -> Option<Protocol> {
        let connector = self.kv_connector.map(|Connector::Nixl| Protocol::Nixl);
        let dialect = self.disaggregation.map(|Dialect::Trtllm| Protocol::Trtllm);
        let side = self.disaggregation_mode.map(|side| match side {
            Side::Prefill => Protocol::SglangPrefill,
            Side::Decode => Protocol::SglangDecode,
        });
        connector.or(dialect).or(side)
    }

    /// What becomes of a request whose blocks are lost. Only vLLM has a choice.
    pub(crate) fn on_loss(&self) -> OnLoss {
        if self.protocol() == Some(Protocol::Nixl) {
            self.kv_load_failure_policy
        } else {
            OnLoss::Fail
        }
    }
}

/// How often what happened, on the metrics page.
#[derive(Debug, Default)]
pub(crate) struct Counts {
    pub(crate) kv_transfers: AtomicU64,
    pub(crate) kv_mismatches: AtomicU64,
    pub(crate) kv_stale_reads: AtomicU64,
    pub(crate) rooms_met: AtomicU64,
    pub(crate) rooms_unmet: AtomicU64,
    pub(crate) rooms_mismatched: AtomicU64,
    pub(crate) aborted: AtomicU64,
    pub(crate) prefills: AtomicU64,
}

pub(crate) fn count(counter: &AtomicU64) {
    counter.fetch_add(1, Ordering::Relaxed);
}

/// Where one rank lends blocks.
#[derive(Clone, Debug)]
pub(crate) struct Door {
    /// Another one after every start.
    pub(crate) engine: String,
    pub(crate) host: String,
    pub(crate) port: u16,
}

/// Where the blocks of a prompt are.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Source {
    pub(crate) engine: String,
    pub(crate) host: String,
    pub(crate) port: u16,
    /// What the lender calls them, or with TensorRT-LLM the number that both sides call them.
    #[serde(skip)]
    pub(crate) request: String,
    /// Their numbers, where the decode side goes by them. Otherwise the lender has to know them.
    #[serde(skip)]
    pub(crate) blocks: Option<Vec<usize>>,
    /// The token that the prefill side generated, where it is told.
    #[serde(skip)]
    pub(crate) first: Option<u32>,
    /// What the prefill side had cached. vLLM reports this as its own.
    #[serde(skip)]
    pub(crate) cached: Option<usize>,
}

/// What a request wants.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Hand {
    /// Everything here.
    Whole,
    /// The prompt only, for another engine that comes for the blocks; by this number if one is given.
    Lend(Option<u64>),
    /// To go on with blocks from there.
    Fetch(Source),
    /// The prompt only, for who comes into the room; one per prompt.
    Host(Vec<u64>),
    /// To go on with what is computed in a room of that address; one per prompt.
    Visit(String, Vec<u64>),
}

impl Hand {
    pub(crate) fn is_prefill(&self) -> bool {
        matches!(self, Self::Lend(_) | Self::Host(_))
    }

    /// What the engine that computed the prompt had cached of it. vLLM reports that instead of its own.
    pub(crate) fn cached_elsewhere(&self) -> Option<usize> {
        if let Self::Fetch(source) = self {
            source.cached
        } else {
            None
        }
    }

    /// How much is generated of `wanted` tokens. Only vLLM leaves it to the request that a prefill is one.
    pub(crate) fn answer_len(&self, protocol: Option<Protocol>, wanted: usize) -> usize {
        if self.is_prefill() && protocol != Some(Protocol::Nixl) {
            1
        } else {
            wanted
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

/// The fields of a body that are about this.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(crate) struct Wishes {
    kv_transfer_params: Option<Transfer>,
    disaggregated_params: Option<Disaggregated>,
    bootstrap_host: Option<OneOrMany<String>>,
    bootstrap_port: Option<OneOrMany<Option<u16>>>,
    bootstrap_room: Option<OneOrMany<u64>>,
    rid: Option<OneOrMany<String>>,
    prompt: Value,
    routed_dp_rank: Option<u32>,
    data_parallel_rank: Option<u32>,
}

/// vLLM's parameters, as far as an engine reads them.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Transfer {
    do_remote_decode: Option<bool>,
    do_remote_prefill: Option<bool>,
    remote_engine_id: Option<String>,
    remote_request_id: Option<String>,
    remote_host: Option<String>,
    remote_port: Option<u16>,
    remote_block_ids: Option<Vec<Vec<usize>>>,
    remote_prefill_cached_tokens: Option<usize>,
}

/// TensorRT-LLM's.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
struct Disaggregated {
    request_type: String,
    first_gen_tokens: Option<Vec<u32>>,
    ctx_request_id: Option<u64>,
    encoded_opaque_state: Option<String>,
    disagg_request_id: Option<u64>,
    schedule_style: Option<Value>,
}

impl Wishes {
    pub(crate) fn read(body: &[u8]) -> Result<Self, String> {
        serde_json::from_slice(body).map_err(|error| error.to_string())
    }

    /// The rank named in the body.
    pub(crate) fn rank(&self) -> Option<u32> {
        self.routed_dp_rank.or(self.data_parallel_rank)
    }

    /// The names by which the request can be aborted. As in SGLang the prompts of a list have names of their own, made
    /// from the one given.
    pub(crate) fn names(&self) -> Vec<String> {
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

    /// What is wanted of an engine that speaks `protocol`, for so many choices of so many prompts.
    pub(crate) fn hand(
        &self,
        protocol: Protocol,
        (prompts, choices): (usize, usize),
    ) -> Result<Hand, String> {
        match protocol {
            Protocol::Nixl => self
                .kv_transfer_params
                .as_ref()
                .map_or(Ok(Hand::Whole), Transfer::hand),
            Protocol::Trtllm => self
                .disaggregated_params
                .as_ref()
                .map_or(Ok(Hand::Whole), Disaggregated::hand),
            // There several answers to a prompt, and a run before them for their common prefix, all get its room.
            Protocol::SglangPrefill | Protocol::SglangDecode if choices > 1 => Err(format!(
                "n = {choices}: so many pairs would meet in one room"
            )),
            Protocol::SglangPrefill => Ok(Hand::Host(self.rooms(prompts)?)),
            Protocol::SglangDecode => {
                let rooms = self.rooms(prompts)?;
                let host = self.bootstrap_host.as_ref().and_then(OneOrMany::first);
                let host = host.ok_or("a disaggregated request needs bootstrap_host")?;
                let port = self
                    .bootstrap_port
                    .as_ref()
                    .and_then(OneOrMany::first)
                    .copied()
                    .flatten();
                Ok(Hand::Visit(
                    line::address(host, port.unwrap_or(8998)),
                    rooms,
                ))
            }
        }
    }

    /// One room per prompt: a list has them, a single number counts up.
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

    /// What TensorRT-LLM answers for a prompt it lends.
    pub(crate) fn disaggregated(
        &self,
        door: &Door,
        lent: &Lent,
        (rank, first): (u32, Option<u32>),
    ) -> Value {
        let asked = self.disaggregated_params.clone().unwrap_or_default();
        let state = serde_json::to_vec(&door.source(lent)).unwrap_or_default();
        json!({
            "request_type": "context_only",
            "first_gen_tokens": first.map(|token| [token]),
            "first_gen_log_probs": null,
            "first_gen_logits": null,
            "ctx_request_id": lent.name.parse::<u64>().ok(),
            "encoded_opaque_state": BASE64_STANDARD.encode(state),
            "draft_tokens": null,
            "disagg_request_id": asked.disagg_request_id,
            "ctx_dp_rank": rank,
            "ctx_info_endpoint": format!("tcp://{}", line::address(&door.host, door.port)),
            "schedule_style": asked.schedule_style,
            "ctx_usage": null,
        })
    }
}

impl Transfer {
    fn hand(&self) -> Result<Hand, String> {
        if self.do_remote_decode == Some(true) {
            return Ok(Hand::Lend(None));
        }
        if self.do_remote_prefill != Some(true) {
            return Ok(Hand::Whole);
        }
        let source = || {
            Some(Source {
                engine: self.remote_engine_id.clone()?,
                host: self.remote_host.clone()?,
                port: self.remote_port?,
                request: self.remote_request_id.clone()?,
                blocks: Some(self.remote_block_ids.clone()?.concat()),
                first: None,
                cached: self.remote_prefill_cached_tokens,
            })
        };
        source()
            .map(Hand::Fetch)
            .ok_or_else(|| "kv_transfer_params: do_remote_prefill without all of remote_*".into())
    }
}

impl Disaggregated {
    fn hand(&self) -> Result<Hand, String> {
        match self.request_type.as_str() {
            "context_and_generation" => Ok(Hand::Whole),
            "context_only" => Ok(Hand::Lend(self.disagg_request_id)),
            "generation_only" => {
                let number = self.disagg_request_id.or(self.ctx_request_id);
                let number =
                    number.ok_or("generation_only without ctx_request_id or disagg_request_id")?;
                let state = self
                    .encoded_opaque_state
                    .as_deref()
                    .ok_or("generation_only without encoded_opaque_state")?;
                let state = BASE64_STANDARD
                    .decode(state)
                    .map_err(|error| error.to_string())?;
                let source: Source =
                    serde_json::from_slice(&state).map_err(|error| error.to_string())?;
                let first = self
                    .first_gen_tokens
                    .as_ref()
                    .and_then(|tokens| tokens.first())
                    .copied();
                Ok(Hand::Fetch(Source {
                    request: number.to_string(),
                    first,
                    ..source
                }))
            }
            other => Err(format!("unknown request_type {other:?}")),
        }
    }
}

impl Door {
    fn source(&self, lent: &Lent) -> Source {
        Source {
            engine: self.engine.clone(),
            host: self.host.clone(),
            port: self.port,
            request: lent.name.to_string(),
            blocks: None,
            first: None,
            cached: None,
        }
    }

    /// What vLLM answers for a prompt it lends.
    pub(crate) fn transfer_params(&self, lent: &Lent, cached: usize) -> Value {
        json!({
            "do_remote_prefill": true,
            "do_remote_decode": false,
            "remote_block_ids": [lent.blocks],
            "remote_engine_id": self.engine,
            "remote_request_id": *lent.name,
            "remote_host": self.host,
            "remote_port": self.port,
            "tp_size": 1,
            "dcp_size": 1,
            "pp_size": 1,
            "remote_num_tokens": lent.tokens,
            "remote_blocks_expiry_time": null,
            "transfer_mode": "pull",
            "remote_prefill_cached_tokens": cached,
        })
    }
}

#[cfg(test)]
#[path = "handover/tests.rs"]
mod tests;
