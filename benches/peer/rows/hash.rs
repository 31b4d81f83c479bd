//! Block hashing: local hashes and sequence hashes of a prompt.

use dynamo_kv_router::compute_block_hash_for_seq;
use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, compute_seq_hash_for_block};
use warmroute_core::block::{BlockHashes, CacheSalt};
use warmroute_core::worker::BlockSize;

use crate::PeerBench;
use crate::rows::StaticMeasure;
use warmroute_testbed::comparison::{ComparisonTable, measure_cpu};

const GOAL: Option<f64> = Some(0.65);

/// Block size, prompt length in tokens, and the row.
const ROWS: [(u32, u32, StaticMeasure); 7] = [
    (
        16,
        32_768,
        StaticMeasure::new(
            "local + sequence hashes, block size 16, 32k tokens",
            "ns/token",
            GOAL,
        ),
    ),
    (
        16,
        512,
        StaticMeasure::new(
            "local + sequence hashes, block size 16, 512 tokens",
            "ns/token",
            None,
        ),
    ),
    (
        16,
        4_096,
        StaticMeasure::new(
            "local + sequence hashes, block size 16, 4k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        16,
        131_072,
        StaticMeasure::new(
            "local + sequence hashes, block size 16, 128k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        32,
        32_768,
        StaticMeasure::new(
            "local + sequence hashes, block size 32, 32k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        64,
        32_768,
        StaticMeasure::new(
            "local + sequence hashes, block size 64, 32k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        128,
        32_768,
        StaticMeasure::new(
            "local + sequence hashes, block size 128, 32k tokens",
            "ns/token",
            None,
        ),
    ),
];

/// Tokens hashed in one round.
const ROUND: u32 = 1 << 23;

/// Measures the rows of this module.
pub fn run(bench: &PeerBench, table: &mut ComparisonTable) {
    for (size, tokens, row) in ROWS {
        if bench.args.wants(row.name) {
            measure_row(bench, table, row, size, tokens);
        }
    }
}

fn measure_row(
    bench: &PeerBench,
    table: &mut ComparisonTable,
    row: StaticMeasure,
    size: u32,
    count: u32,
) {
    let tokens: Vec<u32> = (0..count)
        .map(|at| at.wrapping_mul(2_654_435_761) % 150_000)
        .collect();
    let block_size = BlockSize::new(size).expect("not zero");
    let salt = CacheSalt::default();
    let theirs = || {
        let locals = compute_block_hash_for_seq(&tokens, size, BlockHashOptions::default());
        let sequences = compute_seq_hash_for_block(&locals);
        (locals, sequences)
    };
    let ours = || BlockHashes::from_tokens(std::hint::black_box(&tokens), block_size, &salt);
    let ((locals, sequences), mine) = (theirs(), ours());
    assert!(
        locals
            .iter()
            .map(|LocalBlockHash(hash)| *hash)
            .eq(mine.locals().iter().map(|hash| hash.0)),
        "locals"
    );
    assert!(
        sequences
            .iter()
            .copied()
            .eq(mine.sequences().iter().map(|hash| hash.0)),
        "sequences"
    );
    let times = ROUND / count;
    let per_token = f64::from(times * count);
    let theirs =
        || measure_cpu(|| (0..times).for_each(|_| _ = std::hint::black_box(theirs()))) / per_token;
    let ours =
        || measure_cpu(|| (0..times).for_each(|_| _ = std::hint::black_box(ours()))) / per_token;
    table.compare(row, bench.args.rounds() * 3, theirs, ours);
}
