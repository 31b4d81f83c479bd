//! Replayed requests, from a trace or synthetic. One block of a trace is 512 tokens of unknown
//! content. It becomes 32 blocks of 16 tokens, with hashes derived from its number, so that equal
//! numbers are equal content.

use std::fs::File;
use std::io::{BufRead, BufReader, Read};
use std::num::NonZeroU32;
use std::path::Path;

use anyhow::Context;
use flate2::read::GzDecoder;
use serde::Deserialize;
use warmroute_core::block::{BlockHashes, LocalHash};
use warmroute_core::worker::BlockSize;

/// Tokens per block.
pub const BLOCK: BlockSize = BlockSize(NonZeroU32::new(16).expect("16 is not zero"));

/// Blocks of 16 tokens in one block of the trace.
const PER_ID: usize = 32;

/// One request.
pub struct TraceRequest {
    /// Arrival time in milliseconds from the start.
    pub at: u64,
    /// Complete blocks of the prompt.
    pub prompt: BlockHashes,
    /// Tokens of the answer.
    pub output: u64,
}

#[derive(Deserialize)]
struct TraceLine {
    timestamp: u64,
    input_length: usize,
    output_length: u64,
    hash_ids: Vec<u64>,
}

/// Reads a trace.
pub fn read(path: &Path) -> anyhow::Result<Vec<TraceRequest>> {
    let file = File::open(path).with_context(|| format!("cannot open {}", path.display()))?;
    let gzipped = path.extension().is_some_and(|extension| extension == "gz");
    let reader: Box<dyn Read> = if gzipped {
        Box::new(GzDecoder::new(file))
    } else {
        Box::new(file)
    };
    let lines = BufReader::new(reader).lines();
    lines
        .map(|line| {
            Ok(request(
                &serde_json::from_str(&line?).context("not a line of a trace")?,
            ))
        })
        .collect()
}

/// Generates synthetic conversations. Some share a system prompt, and every turn repeats the
/// previous ones.
pub fn synthetic() -> Vec<TraceRequest> {
    let mut requests = Vec::new();
    for chat in 0..600_u64 {
        let turns = 1 + mix(chat) % 12;
        let mut ids: Vec<u64> = (0..4).map(|at| (mix(chat) % 8) * 4 + at).collect();
        for turn in 0..turns {
            let draw = mix(chat << 8 | turn);
            ids.extend((0..1 + draw % 8).map(|at| 1_000 + chat * 1_000 + turn * 20 + at));
            requests.push(request(&TraceLine {
                timestamp: chat * 150 + turn * (20_000 + draw % 20_000),
                input_length: ids.len() * 512 - (draw % 512) as usize,
                output_length: 50 + draw % 700,
                hash_ids: ids.clone(),
            }));
        }
    }
    requests.sort_by_key(|request| request.at);
    requests
}

fn request(line: &TraceLine) -> TraceRequest {
    let blocks = (line.input_length / BLOCK.tokens()).min(line.hash_ids.len() * PER_ID);
    let expanded = line
        .hash_ids
        .iter()
        .flat_map(|id| (0..PER_ID as u64).map(move |part| id * PER_ID as u64 + part));
    let locals = expanded
        .take(blocks)
        .map(|number| LocalHash(mix(number)))
        .collect();
    TraceRequest {
        at: line.timestamp,
        prompt: hashes(locals),
        output: line.output_length,
    }
}

/// Returns the hashes of a prompt with these local hashes.
pub fn hashes(locals: Vec<LocalHash>) -> BlockHashes {
    let size: BlockSize = BLOCK;
    BlockHashes::from_locals(locals.len() * size.tokens() + 1, size, locals)
}

/// Mixes a number by a bijection (SplitMix64).
pub fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9e37_79b9_7f4a_7c15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}
