//! Block hashing: what a prompt's blocks are called, alone and with all before them.

use dynamo_kv_router::compute_block_hash_for_seq;
use dynamo_kv_router::protocols::{BlockHashOptions, LocalBlockHash, compute_seq_hash_for_block};
use warmroute::block::{BlockHashes, Salt};
use warmroute::worker::BlockSize;

use crate::Bench;
use crate::duel::{Table, cpu};
use crate::rows::Goal;

const GOAL: Option<f64> = Some(0.65);

/// Block size, tokens, and the row.
const ROWS: [(u32, u32, Goal); 7] = [
    (
        16,
        32_768,
        (
            "local + sequence hashes, block size 16, 32k tokens",
            "ns/token",
            GOAL,
        ),
    ),
    (
        16,
        512,
        (
            "local + sequence hashes, block size 16, 512 tokens",
            "ns/token",
            None,
        ),
    ),
    (
        16,
        4_096,
        (
            "local + sequence hashes, block size 16, 4k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        16,
        131_072,
        (
            "local + sequence hashes, block size 16, 128k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        32,
        32_768,
        (
            "local + sequence hashes, block size 32, 32k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        64,
        32_768,
        (
            "local + sequence hashes, block size 64, 32k tokens",
            "ns/token",
            None,
        ),
    ),
    (
        128,
        32_768,
        (
            "local + sequence hashes, block size 128, 32k tokens",
            "ns/token",
            None,
        ),
    ),
];

/// Tokens hashed in one round.
const ROUND: u32 = 1 << 23;

/// The rows of this file.
pub fn run(bench: &Bench, table: &mut Table) {
    for (size, tokens, row) in ROWS {
        if bench.args.wants(row.0) {
            duel(bench, table, row, size, tokens);
        }
    }
}

fn duel(bench: &Bench, table: &mut Table, row: Goal, size: u32, count: u32) {
    let tokens: Vec<u32> = (0..count)
        .map(|at| at.wrapping_mul(2_654_435_761) % 150_000)
        .collect();
    let block_size = BlockSize::new(size).expect("not zero");
    let salt = Salt::default();
    let theirs = || {
        let locals = compute_block_hash_for_seq(&tokens, size, BlockHashOptions::default());
        let sequences = compute_seq_hash_for_block(&locals);
        (locals, sequences)
    };
    let ours = || BlockHashes::of(std::hint::black_box(&tokens), block_size, &salt);
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
    let theirs = || cpu(|| (0..times).for_each(|_| _ = std::hint::black_box(theirs()))) / per_token;
    let ours = || cpu(|| (0..times).for_each(|_| _ = std::hint::black_box(ours()))) / per_token;
    table.duel(row, bench.args.rounds() * 3, theirs, ours);
}
