//! Memory at the bounds of docs/memory.md. Each test drives one structure to its limit, measures the growth of the resident memory, and
//! compares it with the documented bound. To print the table: `cargo test --test memory -- --nocapture`. A row is measured in a
//! process of its own, so that rows do not disturb each other.
//! `WARMROUTE_LONG_TESTS=1` measures at the default settings instead of an eighth of them.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
#![expect(clippy::print_stdout, reason = "the tests print a table")]
#![expect(
    clippy::disallowed_methods,
    reason = "the environment names the row of a process"
)]

use std::process::Command;
use std::time::Instant;
use std::{env, fs};

#[path = "memory/events.rs"]
mod events;
#[path = "memory/index.rs"]
mod index;
#[path = "memory/messages.rs"]
mod messages;
#[allow(dead_code, reason = "the lifecycle tests use the rest")]
#[path = "lifecycle/process.rs"]
mod process;
#[path = "memory/replicas.rs"]
mod replicas;
#[path = "../examples/support/mod.rs"]
mod support;
#[path = "memory/tables.rs"]
mod tables;

/// The allocator of the program.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

/// Environment variable with the name of the row that this process measures.
const ROW: &str = "WARMROUTE_MEMORY_ROW";

const MIB: u64 = 1 << 20;

/// A documented bound may exceed the measured memory by this factor at most. A larger distance means that the bound was not reached.
const SLACK: u64 = 3;

/// Memory that a row takes besides its entries: code pages that are used for the first time, and first extents of the allocator.
const BASE: u64 = 8 * MIB;

/// The documented memory of a structure at its limit.
#[derive(Clone, Copy)]
pub(crate) struct MemoryBound {
    /// Entries at the limit.
    pub(crate) entries: u64,
    /// Documented bytes of an entry.
    pub(crate) bytes: u64,
}

/// Resident memory of a process.
pub(crate) struct MemoryMeter {
    process: String,
    before: u64,
}

impl MemoryMeter {
    /// Begins to measure.
    pub(crate) fn start(process: &str) -> Self {
        // The kernel resets the peak.
        fs::write(format!("/proc/{process}/clear_refs"), "5").unwrap();
        Self {
            process: process.to_owned(),
            before: resident(process, "VmRSS:"),
        }
    }

    /// Growth of the resident memory since the start.
    pub(crate) fn growth(&self) -> u64 {
        resident(&self.process, "VmRSS:").saturating_sub(self.before)
    }

    /// The largest growth since the start.
    fn peak(&self) -> u64 {
        resident(&self.process, "VmHWM:").saturating_sub(self.before)
    }

    /// Prints the row and compares the growth, with everything that was allocated on the way, with the bound.
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
            "{row}: the memory grew by {peak} bytes only, {limit} are documented"
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

/// Measures a row in a process of its own. `fill` drives the structure to its limit and returns the structure.
pub(crate) fn measure<T>(row: &str, bytes: u64, fill: impl FnOnce() -> (u64, T)) {
    measure_after(row, bytes, || (), |()| fill());
}

/// The same with a preparation that is not measured.
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

/// A limit that is a setting: its default in long tests, else an eighth of it.
pub(crate) fn setting(default: u64) -> u64 {
    if env::var("WARMROUTE_LONG_TESTS").is_ok_and(|value| value == "1") {
        return default;
    }
    println!(
        "WARMROUTE_LONG_TESTS is not 1: measured at an eighth of the default setting {default}"
    );
    default / 8
}

/// Spreads numbers over all bits.
pub(crate) fn mix(number: u64) -> u64 {
    let mixed = (number ^ (number >> 31)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed ^ (mixed >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}
