//! Compares warmroute with limits in the same run. A limit is a library with the same function, a
//! lower bound given by the bytes to touch, or a fixed goal. There is one module per topic.
//!
//! * `cargo bench --bench limits -- [--json FILE] [--only PART_OF_A_NAME] [--rounds N]`
//! * `cargo bench --bench limits -- --growth FILE`

#[path = "support/bed.rs"]
mod bed;
#[path = "support/chats.rs"]
mod chats;
#[path = "limits/decision.rs"]
mod decision;
#[path = "limits/growth.rs"]
mod growth;
#[path = "limits/template.rs"]
mod template;
#[path = "limits/texts.rs"]
mod texts;
#[path = "limits/tokens.rs"]
mod tokens;

use std::path::PathBuf;

use clap::Parser;
use warmroute_testbed::comparison::{ComparedMeasure, ComparisonTable};

/// The allocator of the warmroute binary. A warm decision allocates some hundred kilobytes for a
/// short time. Other allocators request this memory from the system each time.
#[global_allocator]
static ALLOCATOR: tikv_jemallocator::Jemalloc = tikv_jemallocator::Jemalloc;

#[derive(Parser)]
struct LimitArgs {
    /// Write the rows to this file as JSON.
    #[arg(long)]
    json: Option<PathBuf>,
    /// Run only measures with this in their name.
    #[arg(long, default_value = "")]
    only: String,
    /// Measure the growth of the decision time instead, and write the points as JSON.
    #[arg(long)]
    growth: Option<PathBuf>,
    /// Rounds of each side.
    #[arg(long, default_value_t = 11)]
    rounds: usize,
    /// Passed by `cargo bench`.
    #[arg(long, hide = true)]
    bench: bool,
}

/// The selected measures and their results.
struct LimitRun {
    only: String,
    rounds: usize,
    table: ComparisonTable,
}

impl LimitRun {
    /// Returns true if a measure is selected. It is checked before the setup of the measure.
    fn wants(&self, measure: &str) -> bool {
        measure.contains(&self.only)
    }

    /// Measures both sides in turns.
    fn compare(
        &mut self,
        measure: ComparedMeasure<'_>,
        peer: impl FnMut() -> f64,
        ours: impl FnMut() -> f64,
    ) {
        if self.wants(measure.name) {
            self.table.compare(measure, self.rounds, peer, ours);
        }
    }

    /// Adds rounds that were measured together.
    fn add(&mut self, measure: ComparedMeasure<'_>, peer: &[f64], ours: &[f64]) {
        if self.wants(measure.name) {
            self.table.add(measure, peer, ours);
        }
    }
}

fn main() -> anyhow::Result<()> {
    let LimitArgs {
        json,
        only,
        growth,
        rounds,
        bench: _,
    } = LimitArgs::parse();
    if let Some(path) = growth {
        return growth::measure(rounds.max(1), &path);
    }
    let mut run = LimitRun {
        only,
        rounds: rounds.max(1),
        table: ComparisonTable::default(),
    };
    tokens::measure(&mut run);
    template::measure(&mut run);
    decision::measure(&mut run);
    texts::measure(&mut run);
    run.table.print("limit");
    if let Some(path) = json {
        run.table.write_json(&path)?;
    }
    Ok(())
}
