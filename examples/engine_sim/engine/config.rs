//! What an engine is told at start. A `clap` parser, so that the binary, the quickstart and the benchmarks describe an
//! engine in the same words; embedders build one with `EngineConfig::parse_from`.

use anyhow::{Context as _, ensure};
use clap::{Args, Parser};

use super::faults::Faults;
use super::handover::Handover;
use super::publisher::{Attach, Sockets};
use super::rank::Pace;
use super::scheduler::Limits;
use super::tokens::Files;
use super::wire::Encoding;

/// An OpenAI-compatible engine without a model: real tokens, a real paged KV cache, real KV events, simulated time.
#[derive(Clone, Debug, Parser)]
pub(crate) struct EngineConfig {
    /// Identity, answered in `x-engine-id`.
    #[arg(long, default_value_t = 1)]
    pub(crate) id: u64,
    /// Served model name.
    #[arg(long, default_value = "sim")]
    pub(crate) model: String,
    /// LoRA adapter to serve too, by name; may be repeated.
    #[arg(long = "lora")]
    pub(crate) loras: Vec<String>,
    #[command(flatten)]
    pub(crate) files: Files,
    #[command(flatten)]
    pub(crate) capacity: Capacity,
    #[command(flatten)]
    pub(crate) events: Events,
    #[command(flatten)]
    pub(crate) surface: Surface,
    #[command(flatten)]
    pub(crate) pace: Pace,
    #[command(flatten)]
    pub(crate) handover: Handover,
    /// Misbehaviour from the start, as JSON; POST /sim/misbehave takes the same, and changes only the fields it gets:
    /// `crash` ("next_step", "next_request" or {"after_requests": n}), `hang`, `refuse` (a status), `slow_first_token_ms`,
    /// `hold_first_tokens`, `cut_stream_after_tokens`, `drop_events` ({"batches": n, "keep_for_replay": bool}); and for
    /// requests that only prefill, `refuse_prefills` (a status), `slow_prefill_ms`, `hang_prefills`,
    /// `omit_transfer_params`, `fail_prefills_with_200`, `stop_prefills`.
    #[arg(long, value_parser = |text: &str| serde_json::from_str::<Faults>(text), default_value = "{}")]
    pub(crate) misbehave: Faults,
    /// Do not print the line that says where the engine listens.
    #[arg(long)]
    pub(crate) quiet: bool,
}

/// Ranks and what each of them holds.
#[derive(Clone, Debug, Args)]
pub(crate) struct Capacity {
    /// Tokens per block.
    #[arg(long, default_value_t = 16)]
    pub(crate) block_size: usize,
    /// Blocks per rank.
    #[arg(long, default_value_t = 8192)]
    pub(crate) num_blocks: usize,
    /// Longest prompt with its answer; by default what the cache holds.
    #[arg(long)]
    pub(crate) max_model_len: Option<usize>,
    /// Tokens per scheduler step.
    #[arg(long, default_value_t = 2048)]
    pub(crate) max_num_batched_tokens: usize,
    /// Requests in a batch.
    #[arg(long, default_value_t = 256)]
    pub(crate) max_num_seqs: usize,
    /// Data-parallel ranks in this process.
    #[arg(long, default_value_t = 1)]
    pub(crate) dp_size: u32,
    /// Number of the first of them.
    #[arg(long, default_value_t = 0)]
    pub(crate) dp_start: u32,
}

/// What the engine offers beside answers. All of it by default, as an operator who wants exact routing starts vLLM.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct Surface {
    /// Answer only to who brings this token: as vLLM under `/v1`, as SGLang everywhere but for health and metrics.
    #[arg(long)]
    pub(crate) api_key: Option<String>,
    /// SGLang's other one, which aborts need if there is one.
    #[arg(long)]
    pub(crate) admin_api_key: Option<String>,
    /// Compute every prompt anew.
    #[arg(long)]
    pub(crate) no_prefix_caching: bool,
    /// Do not say in `usage` how much of a prompt was cached: vLLM without `--enable-prompt-tokens-details`.
    #[arg(long)]
    pub(crate) no_prompt_tokens_details: bool,
    /// Refuse to render, with 403: vLLM without `--enable-scale-out`.
    #[arg(long)]
    pub(crate) no_render: bool,
    /// Have no `/tokenize`.
    #[arg(long)]
    pub(crate) no_tokenize: bool,
    /// Have no `/kv_event_sources`, as older engines.
    #[arg(long)]
    pub(crate) no_kv_event_sources: bool,
}

/// KV event sockets; rank r uses port + r of each.
#[derive(Clone, Debug, Args)]
pub(crate) struct Events {
    /// Where events are published, e.g. `tcp://127.0.0.1:5557`; port 0 takes any. None without it.
    #[arg(long)]
    pub(crate) events_endpoint: Option<String>,
    /// Whether to listen there or to connect to a subscriber that does.
    #[arg(long, value_enum, default_value = "bind")]
    pub(crate) events_attach: Attach,
    /// Where missed batches are asked for. None without it.
    #[arg(long)]
    pub(crate) replay_endpoint: Option<String>,
    /// Batches kept for replay.
    #[arg(long, default_value_t = 10_000)]
    pub(crate) buffer_steps: usize,
    /// First frame of every message.
    #[arg(long, default_value = "")]
    pub(crate) topic: String,
    /// Shape of the events.
    #[arg(long, value_enum, default_value = "map")]
    pub(crate) event_encoding: Encoding,
}

impl Capacity {
    pub(crate) fn limits(&self) -> Limits {
        Limits {
            max_num_batched_tokens: self.max_num_batched_tokens,
            max_num_seqs: self.max_num_seqs,
        }
    }

    /// Never more than the cache holds: a longer request could not finish even alone.
    pub(crate) fn longest(&self) -> usize {
        let room = self.block_size * self.num_blocks;
        self.max_model_len.map_or(room, |longest| longest.min(room))
    }
}

impl Events {
    pub(crate) fn sockets(&self, rank: u32) -> anyhow::Result<Sockets> {
        let offset = |endpoint: &String| endpoint_of_rank(endpoint, rank);
        Ok(Sockets {
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
        let Capacity {
            block_size,
            num_blocks,
            max_num_batched_tokens,
            max_num_seqs,
            dp_size,
            ..
        } = self.capacity;
        let least = [
            block_size,
            num_blocks,
            max_num_batched_tokens,
            max_num_seqs,
            dp_size as usize,
        ];
        ensure!(!least.contains(&0), "sizes and limits must be at least 1");
        ensure!(self.pace.speed > 0.0, "--speed must be above 0");
        ensure!(
            !self.handover.kv_lease.is_zero(),
            "--kv-lease must be above 0"
        );
        ensure!(
            self.events.buffer_steps > 0,
            "--buffer-steps must be at least 1"
        );
        Ok(())
    }
}

/// The endpoint of a rank: TCP ports count up, other transports get a suffix; port 0 and one rank stay as they are.
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
    fn ranks_count_ports_up() {
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
    fn the_longest_request_fits_the_cache() {
        let parse = |more: &[&str]| {
            EngineConfig::parse_from(
                ["engine", "--tokenizer", "t", "--num-blocks", "10"]
                    .iter()
                    .chain(more),
            )
        };
        assert_eq!(parse(&[]).capacity.longest(), 160);
        assert_eq!(parse(&["--max-model-len", "100"]).capacity.longest(), 100);
        assert_eq!(parse(&["--max-model-len", "1000"]).capacity.longest(), 160);
        assert!(parse(&["--block-size", "0"]).check().is_err());
        assert!(parse(&["--misbehave", r#"{"hang": true}"#]).misbehave.hang);
    }
}
