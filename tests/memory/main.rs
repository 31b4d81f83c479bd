//! Memory at the limits that `docs/memory.md` documents. Each test drives one structure to its
//! limit, measures the growth of the resident memory, and compares it with the documented bound.
//! Each row of the table is measured in its own process, so that rows do not affect each other.
//!
//! `WARMROUTE_LONG_TESTS=1 cargo test --test memory -- --nocapture` prints the table.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "the tests print a table")]
#![expect(
    clippy::disallowed_methods,
    reason = "the environment names the row of a process"
)]

use std::process::Command;
use std::sync::Arc;
use std::time::Instant;
use std::{env, fs};

use warmroute_core::fleet::FleetMember;
use warmroute_core::load::LoadTracker;
use warmroute_core::worker::{
    BlockSize, DpRank, RankSlot, Worker, WorkerEndpoint, WorkerId, WorkerRank,
};

mod events;
mod index;
mod messages;
mod processes;
mod replicas;
#[path = "../support/mod.rs"]
mod support;
mod tables;

/// Allocator of the server.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Environment variable with the name of the row to measure in this process.
const ROW: &str = "WARMROUTE_MEMORY_ROW";

const MIB: u64 = 1 << 20;

const RANK: WorkerRank = WorkerRank {
    worker: WorkerId(1),
    rank: DpRank(0),
};

/// Maximum ratio of a documented bound to the measured memory. A larger ratio means that the
/// structure did not reach its limit.
const SLACK: u64 = 3;

/// Memory that a row needs apart from its entries: code pages used for the first time, and the
/// first extents of the allocator.
const BASE: u64 = 8 * MIB;

/// Returns a tracker of one rank, in the first slot.
fn load_tracker() -> Arc<LoadTracker> {
    let endpoint = WorkerEndpoint(([10, 0, 0, 1], 8000).into());
    let block_size = BlockSize::new(16).unwrap();
    let load = LoadTracker::new(Instant::now);
    load.join(&FleetMember {
        slot: RankSlot(0),
        rank: RANK,
        worker: Worker::new(RANK.worker, endpoint, "m".into(), block_size).into(),
    });
    load
}

/// Documented memory of a structure at its limit.
#[derive(Clone, Copy)]
pub(crate) struct MemoryBound {
    /// Number of entries at the limit.
    pub(crate) entries: u64,
    /// Documented bytes per entry.
    pub(crate) bytes: u64,
}

/// Resident memory of a process.
pub(crate) struct MemoryMeter {
    process: String,
    before: u64,
}

impl MemoryMeter {
    /// Starts measuring a process.
    pub(crate) fn start(process: &str) -> Self {
        // Resets the peak memory counter.
        fs::write(format!("/proc/{process}/clear_refs"), "5").unwrap();
        Self {
            process: process.to_owned(),
            before: resident(process, "VmRSS:"),
        }
    }

    /// Returns the growth of the resident memory since the start.
    pub(crate) fn growth(&self) -> u64 {
        resident(&self.process, "VmRSS:").saturating_sub(self.before)
    }

    /// Returns the largest growth since the start.
    fn peak(&self) -> u64 {
        resident(&self.process, "VmHWM:").saturating_sub(self.before)
    }

    /// Prints the row. Asserts that the growth, including temporary allocations, is within the
    /// bound.
    pub(crate) fn compare(&self, row: &str, bound: MemoryBound) {
        let [growth, peak, limit] = [self.growth(), self.peak(), bound.entries * bound.bytes];
        println!(
            "| {row} | {} x {} B = {} MiB | {} MiB | {} MiB | {:.1} B | {:.1} B |",
            bound.entries,
            bound.bytes,
            limit / MIB,
            growth / MIB,
            peak / MIB,
            growth as f64 / bound.entries as f64,
            peak as f64 / bound.entries as f64,
        );
        assert!(
            peak <= limit + BASE,
            "{row}: the memory grew by {peak} bytes, above {limit} documented and {BASE} of base"
        );
        assert!(
            peak * SLACK >= limit,
            "{row}: the memory grew by only {peak} bytes, {limit} are documented"
        );
    }
}

fn resident(process: &str, line: &str) -> u64 {
    let status = fs::read_to_string(format!("/proc/{process}/status")).unwrap();
    let kib = status
        .lines()
        .find_map(|found| found.strip_prefix(line)?.trim().strip_suffix(" kB"))
        .unwrap();
    kib.trim().parse::<u64>().unwrap() * 1024
}

/// Measures a row in a separate process. `fill` drives the structure to its limit, and returns the
/// number of entries and the structure.
pub(crate) fn measure<T>(row: &str, bytes: u64, fill: impl FnOnce() -> (u64, T)) {
    measure_after(row, bytes, || (), |()| fill());
}

/// Like [`measure`], with a preparation that is not measured.
pub(crate) fn measure_after<P, T>(
    row: &str,
    bytes: u64,
    prepare: impl FnOnce() -> P,
    fill: impl FnOnce(P) -> (u64, T),
) {
    if env::var(ROW).is_ok_and(|wanted| wanted == row) {
        let prepared = prepare();
        let meter = MemoryMeter::start("self");
        let (entries, filled) = fill(prepared);
        meter.compare(row, MemoryBound { entries, bytes });
        drop(filled);
        return;
    }
    let started = Instant::now();
    let mut command = Command::new(env::current_exe().unwrap());
    let output = command
        .args([row, "--exact", "--nocapture"])
        .env(ROW, row)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    let measured = text.lines().find(|line| line.starts_with("| "));
    assert!(
        output.status.success() && measured.is_some(),
        "{row}:\n{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    println!(
        "{} {:.1} s",
        measured.unwrap_or_default(),
        started.elapsed().as_secs_f64()
    );
}

/// Spreads a number over all bits.
pub(crate) fn mix(number: u64) -> u64 {
    let mixed = (number ^ (number >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
