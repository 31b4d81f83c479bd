//! Configuration of an engine. It is a `clap` parser, so that the binary, the quickstart and the
//! benchmarks configure an engine with the same flags. Embedding programs call
//! `EngineConfig::parse_from`.

use anyhow::{Context as _, ensure};
use clap::{Args, Parser};

use super::cache::SpeculativeDecoding;
use super::disaggregation::DisaggregationArgs;
use super::faults::FaultConfig;
use super::publisher::{AttachMode, PublisherSockets};
use super::rank::TimingModel;
use super::scheduler::SchedulerLimits;
use super::tokens::TokenizerFiles;
use super::wire::EventEncoding;

/// An OpenAI-compatible engine without a model: real tokens, a real paged KV cache, real KV events, simulated time.
#[derive(Clone, Debug, Parser)]
pub struct EngineConfig {
    /// Identity, returned in `x-engine-id`.
    #[arg(long, default_value_t = 1)]
    pub(crate) id: u64,
    /// Served model name.
    #[arg(long, default_value = "sim")]
    pub(crate) model: String,
    /// LoRA adapter to serve, by name; may be repeated.
    #[arg(long = "lora")]
    pub(crate) loras: Vec<String>,
    #[command(flatten)]
    pub(crate) files: TokenizerFiles,
    #[command(flatten)]
    pub(crate) capacity: CapacityArgs,
    #[command(flatten)]
    pub(crate) events: EventArgs,
    #[command(flatten)]
    pub(crate) api: ApiArgs,
    #[command(flatten)]
    pub(crate) timing: TimingModel,
    #[command(flatten)]
    pub(crate) disaggregation: DisaggregationArgs,
    /// Faults from the start, as JSON. POST /sim/misbehave accepts the same and changes only the
    /// fields present: `crash` ("next_step", "next_request" or {"after_requests": n}), `hang`,
    /// `refuse` (a status), `empty_responses`, `refuse_metrics`, `slow_steps` (a factor), `slow_first_token_ms`,
    /// `hold_first_tokens`, `cut_stream_after_tokens`,
    /// `drop_events` ({"batches": n, "keep_for_replay": bool}). For requests that only prefill:
    /// `refuse_prefills` (a status), `slow_prefill_ms`, `hang_prefills`, `omit_transfer_params`,
    /// `fail_prefills_with_200`, `stop_prefills`.
    #[arg(long = "misbehave", value_name = "MISBEHAVE", value_parser = |text: &str| serde_json::from_str::<FaultConfig>(text), default_value = "{}")]
    pub(crate) faults: FaultConfig,
    /// Do not print the line with the listening addresses.
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// Ranks and their capacity.
#[derive(Clone, Debug, Args)]
pub(crate) struct CapacityArgs {
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    pub(crate) block_size: usize,
    /// Blocks per rank.
    #[arg(long, default_value_t = 8192)]
    pub(crate) num_blocks: usize,
    /// Maximum length of a prompt with its answer; the capacity of the cache by default.
    #[arg(long)]
    pub(crate) max_model_len: Option<usize>,
    /// Tokens per scheduler step.
    #[arg(long, default_value_t = 2048)]
    pub(crate) max_num_batched_tokens: usize,
    /// Maximum number of requests in a batch.
    #[arg(long, default_value_t = 256)]
    pub(crate) max_num_seqs: usize,
    /// Data-parallel ranks in this process.
    #[arg(long, default_value_t = 1)]
    pub(crate) dp_size: u32,
    /// Number of the first rank.
    #[arg(long, default_value_t = 0)]
    pub(crate) dp_start: u32,
}

/// APIs that the engine offers. By default all are enabled, as in a vLLM deployment with exact
/// routing.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ApiArgs {
    /// Require this token: under `/v1` as vLLM does, or everywhere except health and metrics as
    /// SGLang does.
    #[arg(long)]
    pub(crate) api_key: Option<String>,
    /// SGLang's admin key; if set, aborts require it.
    #[arg(long)]
    pub(crate) admin_api_key: Option<String>,
    /// Compute every prompt without reuse.
    #[arg(long)]
    pub(crate) no_prefix_caching: bool,
    /// Use the prefix cache as vLLM does with EAGLE or MTP speculative decoding.
    #[arg(long, value_enum, default_value = "none")]
    pub(crate) speculative_decoding: SpeculativeDecoding,
    /// Do not report cached prompt tokens in `usage`: vLLM without
    /// `--enable-prompt-tokens-details`.
    #[arg(long)]
    pub(crate) no_prompt_tokens_details: bool,
    /// Act as a front end whose workers are the ranks, like those of Dynamo: `x-worker-instance-id`
    /// selects one, and other requests are balanced. The id of a worker is `--id` plus its rank.
    #[arg(long)]
    pub(crate) front_end: bool,
    /// Reject render requests with 403: vLLM without `--enable-scale-out`.
    #[arg(long)]
    pub(crate) no_render: bool,
    /// Do not serve `/tokenize`.
    #[arg(long)]
    pub(crate) no_tokenize: bool,
    /// Do not serve `/kv_event_sources`, like older engines.
    #[arg(long)]
    pub(crate) no_kv_event_sources: bool,
}

/// KV event sockets; rank r uses port + r of each.
#[derive(Clone, Debug, Args)]
pub(crate) struct EventArgs {
    /// Endpoint at which events are published, e.g. `tcp://127.0.0.1:5557`; port 0 selects a free
    /// port. No events without it.
    #[arg(long)]
    pub(crate) events_endpoint: Option<String>,
    /// Bind the endpoint, or connect to a subscriber that binds it.
    #[arg(long, value_enum, default_value = "bind")]
    pub(crate) events_attach: AttachMode,
    /// Endpoint from which missed batches are requested. No replay without it.
    #[arg(long)]
    pub(crate) replay_endpoint: Option<String>,
    /// Batches retained for replay.
    #[arg(long, default_value_t = 10_000)]
    pub(crate) buffer_steps: usize,
    /// First frame of every message.
    #[arg(long, default_value = "")]
    pub(crate) topic: String,
    /// Wire format of the events.
    #[arg(long, value_enum, default_value = "map")]
    pub(crate) event_encoding: EventEncoding,
}

impl CapacityArgs {
    pub(crate) fn limits(&self) -> SchedulerLimits {
        SchedulerLimits {
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_num_seqs: self.max_num_seqs,
        }
    }

    /// Returns the maximum accepted length. It never exceeds the cache, because a longer request
    /// could not finish even if it ran alone.
    pub(crate) fn max_length(&self) -> usize {
        let cache_tokens = self.block_size * self.num_blocks;
        self.max_model_len
            .map_or(cache_tokens, |configured| configured.min(cache_tokens))
    }
}

impl EventArgs {
    pub(crate) fn sockets(&self, rank: u32) -> anyhow::Result<PublisherSockets> {
        let offset = |endpoint: &String| endpoint_of_rank(endpoint, rank);
        Ok(PublisherSockets {
            topic: self.topic.clone(),
            events: self
                .events_endpoint
                .as_ref()
                .map(offset)
                .transpose()?
                .map(|at| (at, self.events_attach)),
            replay: self.replay_endpoint.as_ref().map(offset).transpose()?,
            buffered_batches: self.buffer_steps,
        })
    }
}

impl EngineConfig {
    pub(crate) fn check(&self) -> anyhow::Result<()> {
        let CapacityArgs {
            block_size,
            num_blocks,
            max_num_batched_tokens,
            max_num_seqs,
            dp_size,
            ..
        } = self.capacity;
        let positive = [
            block_size,
            num_blocks,
            max_num_batched_tokens,
            max_num_seqs,
            dp_size as usize,
        ];
        ensure!(
            !positive.contains(&0),
            "sizes and limits must be at least 1"
        );
        ensure!(self.timing.speed > 0.0, "--speed must be above 0");
        ensure!(
            !self.disaggregation.kv_lease.is_zero(),
            "--kv-lease must be above 0"
        );
        ensure!(
            self.events.buffer_steps > 0,
            "--buffer-steps must be at least 1"
        );
        Ok(())
    }
}

/// Returns the endpoint of a rank. TCP ports count up, and other transports get a suffix. With port
/// 0 or a single rank, the endpoint is unchanged.
fn endpoint_of_rank(endpoint: &str, rank: u32) -> anyhow::Result<String> {
    let endpoint = endpoint.replace("//*", "//0.0.0.0");
    let Some(host_port) = endpoint.strip_prefix("tcp://") else {
        return Ok(if rank == 0 {
            endpoint
        } else {
            format!("{endpoint}_dp{rank}")
        });
    };
    let (host, port) = host_port
        .rsplit_once(':')
        .with_context(|| format!("{endpoint} has no port"))?;
    let port: u16 = port
        .parse()
        .with_context(|| format!("{endpoint} has no valid port"))?;
    let offset = if port == 0 { 0 } else { u16::try_from(rank)? };
    let port = port
        .checked_add(offset)
        .with_context(|| format!("{endpoint} has no port for rank {rank}"))?;
    Ok(format!("tcp://{host}:{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoint_port_is_offset_by_rank() {
        for (endpoint, rank, expected) in [
            ("tcp://127.0.0.1:5557", 0, "tcp://127.0.0.1:5557"),
            ("tcp://127.0.0.1:5557", 3, "tcp://127.0.0.1:5560"),
            ("tcp://*:5557", 1, "tcp://0.0.0.0:5558"),
            ("tcp://[::1]:5557", 1, "tcp://[::1]:5558"),
            ("tcp://127.0.0.1:0", 2, "tcp://127.0.0.1:0"),
            ("ipc:///tmp/events", 1, "ipc:///tmp/events_dp1"),
        ] {
            assert_eq!(
                endpoint_of_rank(endpoint, rank).unwrap(),
                expected,
                "{endpoint} of rank {rank}"
            );
        }
        for (endpoint, rank) in [
            ("tcp://127.0.0.1", 0),
            ("tcp://127.0.0.1:x", 0),
            ("tcp://127.0.0.1:65535", 1),
        ] {
            assert!(
                endpoint_of_rank(endpoint, rank).is_err(),
                "{endpoint} of rank {rank}"
            );
        }
    }

    #[test]
    fn max_length_never_exceeds_cache() {
        let parse = |more: &[&str]| {
            EngineConfig::parse_from(
                ["engine", "--tokenizer", "t", "--num-blocks", "10"]
                    .iter()
                    .chain(more),
            )
        };
        assert_eq!(parse(&[]).capacity.max_length(), 160);
        assert_eq!(
            parse(&["--max-model-len", "100"]).capacity.max_length(),
            100
        );
        assert_eq!(
            parse(&["--max-model-len", "1000"]).capacity.max_length(),
            160
        );
        assert!(parse(&["--block-size", "0"]).check().is_err());
        assert!(parse(&["--misbehave", r#"{"hang": true}"#]).faults.hang);
    }
}
