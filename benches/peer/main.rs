//! Warmroute beside the crate that the field goes by: both do the same work in one process, in turns, and must give the
//! same answers.

mod args;
#[path = "../support/duel.rs"]
mod duel;
mod memory;
mod rows;
mod sides;
mod trace;
mod workload;

use args::Args;
use clap::Parser;
use trace::Request;

#[global_allocator]
static ALLOCATOR: memory::Counted = memory::Counted;

/// What all rows need.
pub struct Bench {
    args: Args,
    requests: Vec<Request>,
}

fn main() -> anyhow::Result<()> {
    let args = Args::parse();
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
    let bench = Bench { args, requests };
    let mut table = duel::Table::default();
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
