//! Writes benches/RESULTS.md and its plots from the output of the benches: `cargo run --release -p
//! warmroute-results -- [DIRECTORY WITH THEIR JSON]`. The default directory is `target/results`.

mod page;
mod plot;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A measurement of two sides.
#[derive(Debug, Deserialize)]
struct MeasuredRow {
    measure: String,
    unit: String,
    peer: f64,
    ours: f64,
    ratio: f64,
    goal: Option<f64>,
    met: bool,
}

/// A point of a curve.
#[derive(Debug, Deserialize)]
struct CurvePoint {
    curve: String,
    series: String,
    x: f64,
    y: f64,
}

/// A remark on a row.
#[derive(Debug, Deserialize)]
struct RowRemark {
    /// Prefix of the row's name.
    measure: String,
    text: String,
}

/// A table of the results page: the output of one program.
struct TableSource {
    file: &'static str,
    title: &'static str,
    /// Heading of the column next to warmroute's.
    peer: &'static str,
    command: &'static str,
}

const TABLES: [TableSource; 4] = [
    TableSource {
        file: "peer.json",
        title: "Router core compared with dynamo-kv-router 1.6.1",
        peer: "peer",
        command: "cargo bench --manifest-path benches/peer/Cargo.toml -- --trace FILE.jsonl.gz --json \"$PWD/target/results/peer.json\"",
    },
    TableSource {
        file: "limits.json",
        title: "Stages compared with their limits",
        peer: "limit",
        command: "cargo bench --bench limits -- --json target/results/limits.json",
    },
    TableSource {
        file: "server.json",
        title: "Server compared with a minimal ext_proc server, through Envoy",
        peer: "bare",
        command: "cargo bench --bench server -- --json target/results/server.json",
    },
    TableSource {
        file: "load.json",
        title: "Load through Envoy compared with a minimal ext_proc server",
        peer: "bare",
        command: "cargo run --release --example load -- --json target/results/load.json",
    },
];

#[expect(
    clippy::print_stdout,
    reason = "the program prints the path of its output"
)]
fn main() -> anyhow::Result<()> {
    let directory = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from("target/results"), PathBuf::from);
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let remarks: Vec<RowRemark> = read(&benches.join("remarks.json"))?;
    let mut page = page::ResultsPage::new(&remarks);
    for table in TABLES {
        // A program may also write other figures, which are not rows of the table.
        let rows: Vec<serde_json::Value> = read(&directory.join(table.file))?;
        let rows: Vec<MeasuredRow> = rows
            .into_iter()
            .filter_map(|row| serde_json::from_value(row).ok())
            .collect();
        page.add_table(&table, &rows);
    }
    let points: Vec<CurvePoint> = read(&directory.join("growth.json"))?;
    for curve in plot::curves(&points) {
        let name = format!("{}.svg", curve.name.replace(' ', "-"));
        std::fs::write(benches.join(&name), plot::draw(&curve)?)?;
        page.add_plot(&curve, &name);
    }
    let path = benches.join("RESULTS.md");
    std::fs::write(&path, page.finish())?;
    println!("wrote {}", path.display());
    Ok(())
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read(path)
        .with_context(|| format!("cannot read {}, which a bench writes", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is not the output of a bench", path.display()))
}
