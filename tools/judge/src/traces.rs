//! Recorded traces. A trace contains lengths and block ids instead of text. Its format is detected
//! from the content.

pub(crate) mod coding_agent;
pub(crate) mod mooncake;

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde_json::Value;
use warmroute_traces::read_lines;

use coding_agent::CodingAgentTrace;
use mooncake::MooncakeTrace;

/// Tokens per KV block of the engines and the router.
pub(crate) use warmroute_traces::BLOCK_TOKENS;

/// Part of a trace that is replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum TraceHalf {
    /// First half of the requests, or the sessions whose name has an even hash.
    First,
    /// Second half of the requests, or the sessions whose name has an odd hash.
    Second,
    /// The whole trace.
    All,
}

/// Request to replay. Each block of its prompt repeats one token, so blocks are equal if their
/// tokens are.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct ReplayedRequest {
    /// Arrival time, or the think time before the next request of a session, in milliseconds.
    pub(crate) time_ms: f64,
    /// Length of the prompt.
    pub(crate) input_tokens: usize,
    /// Length of the answer.
    pub(crate) output_tokens: usize,
    /// Token of each block, including the partial last one.
    block_tokens: Vec<u32>,
}

impl ReplayedRequest {
    /// Creates a request. `last_token` fills the partial last block and the blocks without an entry
    /// in `block_tokens`.
    fn new(
        time_ms: f64,
        input_tokens: usize,
        output_tokens: usize,
        mut block_tokens: Vec<u32>,
        last_token: u32,
    ) -> Self {
        block_tokens.truncate(input_tokens / BLOCK_TOKENS);
        block_tokens.resize(input_tokens.div_ceil(BLOCK_TOKENS), last_token);
        Self {
            time_ms,
            input_tokens,
            output_tokens,
            block_tokens,
        }
    }

    /// Returns the tokens of the prompt.
    pub(crate) fn tokens(&self) -> Vec<u32> {
        (0..self.input_tokens)
            .map(|position| self.block_tokens[position / BLOCK_TOKENS])
            .collect()
    }
}

/// Requests that a simulation replays.
#[derive(Debug)]
pub(crate) enum ReplayWorkload {
    /// Independent requests, sorted by arrival time.
    Arrivals(Vec<ReplayedRequest>),
    /// Sessions. The next request of a session arrives one think time after the previous answer.
    Sessions {
        /// Requests of each session.
        sessions: Vec<Vec<ReplayedRequest>>,
        /// Number of sessions that are active at any time.
        concurrency: usize,
    },
}

/// Trace in one of the known formats.
pub(crate) enum RecordedTrace {
    /// Requests with arrival times.
    Mooncake(MooncakeTrace),
    /// Sessions of coding agents.
    CodingAgent(CodingAgentTrace),
}

impl RecordedTrace {
    /// Reads a trace, which may be compressed with gzip.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        Self::parse(&read_lines(path)?).with_context(|| path.display().to_string())
    }

    fn parse(lines: &[String]) -> Result<Self> {
        let first: Value = serde_json::from_str(lines.first().context("the file is empty")?)?;
        if first.get("hash_ids").is_some() {
            Ok(Self::Mooncake(MooncakeTrace::parse(lines)?))
        } else if first.get("session").is_some() {
            Ok(Self::CodingAgent(CodingAgentTrace::parse(lines)?))
        } else {
            bail!("unknown trace format: the first line has neither `hash_ids` nor `session`")
        }
    }
}

#[cfg(test)]
mod tests;
