//! What we do beside a limit of it, both in the same run: a library that does the same, a bound by the bytes that have to be
//! touched, or a number that was set as a goal. One module per topic.
//!
//! `cargo bench --bench limits -- [--json FILE] [--only PART_OF_A_NAME] [--rounds N]`
//! `cargo bench --bench limits -- --growth FILE`

#[path = "support/bed.rs"]
mod bed;
#[path = "support/chats.rs"]
mod chats;
#[path = "limits/decision.rs"]
mod decision;
#[expect(
    dead_code,
    unreachable_pub,
    reason = "shared by all benches, none of which needs all of it"
)]
#[path = "support/duel.rs"]
mod duel;
#[path = "limits/growth.rs"]
mod growth;
#[path = "limits/template.rs"]
mod template;
#[path = "limits/tokens.rs"]
mod tokens;

use std::path::PathBuf;

use clap::Parser;
use duel::Table;

/// As the binary has it: a warm decision takes memory of some hundred kilobytes for a moment, and other allocators get it from
/// the system each time.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[derive(Parser)]
struct Options {
    /// Writes the rows there as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Only measures with this in their name.
    #[arg(long, default_value = "")]
    only: String,
    /// Measures how the time of a decision grows instead, and writes the points there as JSON.
    #[arg(long)]
    growth: Option<PathBuf>,
    /// How often each side is measured.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// What cargo says to every bench.
    #[arg(long, hide = true)]
    bench: bool,
}

/// What is measured in this run, and what came of it.
struct Run {
    only: String,
    rounds: usize,
    table: Table,
}

impl Run {
    /// Whether a measure is wanted, before anything is set up for it.
    fn wants(&self, measure: &str) -> bool {
        measure.contains(&self.only)
    }

    /// Measures both sides in turns.
    fn duel(
        &mut self,
        row: (&str, &str, Option<f64>),
        peer: impl FnMut() -> f64,
        ours: impl FnMut() -> f64,
    ) {
        if self.wants(row.0) {
            self.table.duel(row, self.rounds, peer, ours);
        }
    }

    /// Enters rounds that were measured together.
    fn enter(&mut self, row: (&str, &str, Option<f64>), peer: &[f64], ours: &[f64]) {
        if self.wants(row.0) {
            self.table.enter(row, peer, ours);
        }
    }
}

fn main() -> anyhow::Result<()> {
    let Options {
        json,
        only,
        growth,
        rounds,
        bench: _,
    } = Options::parse();
    if let Some(path) = growth {
        return growth::measure(rounds.max(1), &path);
    }
    let mut run = Run {
        only,
        rounds: rounds.max(1),
        table: Table::default(),
    };
    tokens::measure(&mut run);
    template::measure(&mut run);
    decision::measure(&mut run);
    run.table.print("limit");
    if let Some(path) = json {
        run.table.write_json(&path)?;
    }
    Ok(())
}
