//! Traces in Mooncake's format: one request per line, with its arrival time and the ids of its
//! blocks of 512 tokens.

use anyhow::{Context, Result};
use serde::Deserialize;

use super::{BLOCK_TOKENS, ReplayWorkload, ReplayedRequest, TraceHalf};

/// Tokens per block of the trace.
const TRACE_BLOCK_TOKENS: usize = 512;
/// Blocks of the engines per block of the trace.
const BLOCKS_PER_ID: u32 = (TRACE_BLOCK_TOKENS / BLOCK_TOKENS) as u32;
/// Interval of the recorded timestamps, in milliseconds.
const TIMESTAMP_INTERVAL_MS: f64 = 3000.0;
/// Fractional part of the golden ratio. Its multiples are spread evenly over the unit interval.
const GOLDEN_RATIO_FRACTION: f64 = 0.618_033_988_75;
/// First token of partial last blocks, different for each request.
const FIRST_LAST_TOKEN: u32 = 0x4000_0000;

/// First token of burst prompts.
const FIRST_BURST_TOKEN: u32 = 0x6000_0000;
/// Distance between the first tokens of two bursts.
const BURST_TOKEN_STRIDE: u32 = 4096;
/// Time between two bursts, in milliseconds.
const BURST_INTERVAL_MS: f64 = 10_000.0;
/// Time within which all copies of a burst arrive, in milliseconds.
const BURST_SPREAD_MS: f64 = 50.0;
const BURST_INPUT_TOKENS: usize = 8000;
const BURST_OUTPUT_TOKENS: usize = 200;

#[derive(Clone, Debug, Deserialize)]
struct MooncakeLine {
    /// Milliseconds.
    timestamp: f64,
    input_length: usize,
    output_length: usize,
    hash_ids: Vec<u32>,
}

/// Trace with arrival times.
pub(crate) struct MooncakeTrace {
    lines: Vec<MooncakeLine>,
}

/// Selection and scale of the requests of a workload.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivalSelection {
    /// Part of the trace.
    pub(crate) half: TraceHalf,
    /// Divisor of the recorded times.
    pub(crate) speed: f64,
    /// Maximum length of prompt and answer. Longer requests are skipped.
    pub(crate) max_tokens: usize,
    /// Requests that arrive later are skipped, in milliseconds.
    pub(crate) end_ms: f64,
    /// Copies of each burst prompt; 0 adds no bursts.
    pub(crate) burst_copies: usize,
}

impl MooncakeTrace {
    pub(super) fn parse(lines: &[String]) -> Result<Self> {
        let lines: serde_json::Result<Vec<MooncakeLine>> = lines
            .iter()
            .map(|line| serde_json::from_str(line))
            .collect();
        let lines = lines.context("invalid line of a Mooncake trace")?;
        Ok(Self { lines })
    }

    /// Creates a workload.
    pub(crate) fn workload(&self, selection: &ArrivalSelection) -> ReplayWorkload {
        let middle = self.lines.len() / 2;
        let range = match selection.half {
            TraceHalf::First => 0..middle,
            TraceHalf::Second => middle..self.lines.len(),
            TraceHalf::All => 0..self.lines.len(),
        };
        let first = range.start;
        let lines = &self.lines[range];
        let start_ms = lines.first().map_or(0.0, |line| line.timestamp);
        let mut requests = Vec::new();
        for (number, line) in lines.iter().enumerate() {
            // Many requests share a timestamp, so they are spread over its interval.
            let offset = (number as f64 * GOLDEN_RATIO_FRACTION).fract();
            let time_ms = (line.timestamp - start_ms) / selection.speed
                + TIMESTAMP_INTERVAL_MS / selection.speed * offset;
            if time_ms > selection.end_ms {
                break;
            }
            let last_token = FIRST_LAST_TOKEN + (first + number) as u32;
            let request = line.to_request(time_ms, last_token);
            if request.input_tokens + request.output_tokens <= selection.max_tokens {
                requests.push(request);
            }
        }
        add_bursts(&mut requests, selection.burst_copies);
        requests.sort_by(|one, other| one.time_ms.total_cmp(&other.time_ms));
        ReplayWorkload::Arrivals(requests)
    }
}

impl MooncakeLine {
    fn to_request(&self, time_ms: f64, last_token: u32) -> ReplayedRequest {
        let expand = |&id: &u32| (0..BLOCKS_PER_ID).map(move |part| id * BLOCKS_PER_ID + part + 1);
        ReplayedRequest::new(
            time_ms,
            self.input_length.max(1),
            self.output_length.max(1),
            self.hash_ids.iter().flat_map(expand).collect(),
            last_token,
        )
    }
}

/// Adds bursts of equal prompts that are not in the trace.
fn add_bursts(requests: &mut Vec<ReplayedRequest>, copies: usize) {
    let latest_ms = requests.iter().map(|request| request.time_ms);
    let end_ms = latest_ms.fold(0.0, f64::max);
    let mut start_ms = BURST_INTERVAL_MS / 2.0;
    let mut first_token = FIRST_BURST_TOKEN;
    let blocks = BURST_INPUT_TOKENS.div_ceil(BLOCK_TOKENS) as u32;
    while copies > 0 && start_ms < end_ms {
        let tokens: Vec<u32> = (first_token..first_token + blocks).collect();
        for copy in 0..copies {
            requests.push(ReplayedRequest::new(
                start_ms + BURST_SPREAD_MS * copy as f64 / copies as f64,
                BURST_INPUT_TOKENS,
                BURST_OUTPUT_TOKENS,
                tokens.clone(),
                first_token + BURST_TOKEN_STRIDE - 1,
            ));
        }
        first_token += BURST_TOKEN_STRIDE;
        start_ms += BURST_INTERVAL_MS;
    }
}
