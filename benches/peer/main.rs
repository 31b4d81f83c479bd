//! Compares warmroute with dynamo-kv-router, the router of NVIDIA Dynamo. Both sides do the same
//! work in one process, alternately, and must return equal results.

mod args;
mod memory;
mod rows;
mod sides;
mod trace;
mod workload;

use args::PeerArgs;
use clap::Parser;
use trace::TraceRequest;
use warmroute_testbed::comparison::ComparisonTable;

#[global_allocator]
static ALLOCATOR: memory::CountingAllocator = memory::CountingAllocator;

/// Arguments and requests of all rows.
pub struct PeerBench {
    args: PeerArgs,
    requests: Vec<TraceRequest>,
}

fn main() -> anyhow::Result<()> {
    let args = PeerArgs::parse();
    let mut requests = match &args.trace {
        Some(path) => trace::read(path)?,
        None => trace::synthetic(),
    };
    if args.quick {
        requests.truncate(requests.len() / 8);
    }
    let blocks: usize = requests.iter().map(|request| request.prompt.len()).sum();
    eprintln!(
        "{} requests, {} blocks each on average",
        requests.len(),
        blocks / requests.len().max(1)
    );
    let bench = PeerBench { args, requests };
    let mut table = ComparisonTable::default();
    rows::hash::run(&bench, &mut table);
    rows::index::run(&bench, &mut table);
    rows::crowd::run(&bench, &mut table);
    rows::approximate::run(&bench, &mut table);
    rows::selection::run(&bench, &mut table);
    rows::booking::run(&bench, &mut table);
    table.print("peer");
    let goals = table.rows().iter().filter(|row| row.goal.is_some());
    println!(
        "{} of {} goals met",
        goals.clone().filter(|row| row.met).count(),
        goals.count()
    );
    if let Some(path) = &bench.args.json {
        table.write_json(path)?;
    }
    Ok(())
}
