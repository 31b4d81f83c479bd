//! Writes benches/RESULTS.md and its plots from what the benches said:
//! `cargo run --release --example results -- [FOLDER WITH THEIR JSON]`, by default `target/results`.

mod page;
mod plot;

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use serde::Deserialize;
use serde::de::DeserializeOwned;

/// A measure of two sides.
#[derive(Debug, Deserialize)]
struct Row {
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
struct Point {
    curve: String,
    series: String,
    x: f64,
    y: f64,
}

/// What is said of a row beside its numbers.
#[derive(Debug, Deserialize)]
struct Remark {
    /// How its name begins.
    measure: String,
    text: String,
}

/// What one program measured, as it heads its table.
const TABLES: [(&str, &str, &str, &str); 4] = [
    (
        "peer.json",
        "The router core beside dynamo-kv-router 1.6.1",
        "peer",
        "cargo bench --manifest-path benches/peer/Cargo.toml -- --trace FILE.jsonl.gz --json \"$PWD/target/results/peer.json\"",
    ),
    (
        "limits.json",
        "Stages beside their limits",
        "limit",
        "cargo bench --bench limits -- --json target/results/limits.json",
    ),
    (
        "server.json",
        "The server beside a bare ext_proc, through Envoy",
        "bare",
        "cargo bench --bench server -- --json target/results/server.json",
    ),
    (
        "load.json",
        "Load through Envoy beside a bare ext_proc",
        "bare",
        "cargo run --release --example load -- --json target/results/load.json",
    ),
];

#[expect(clippy::print_stdout, reason = "a program that says what it wrote")]
fn main() -> anyhow::Result<()> {
    let folder = std::env::args_os()
        .nth(1)
        .map_or_else(|| PathBuf::from("target/results"), PathBuf::from);
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("benches");
    let remarks: Vec<Remark> = read(&benches.join("remarks.json"))?;
    let mut page = page::Page::new(&remarks);
    for (file, title, peer, command) in TABLES {
        // What else a program tells has no goal.
        let rows: Vec<serde_json::Value> = read(&folder.join(file))?;
        let rows: Vec<Row> = rows
            .into_iter()
            .filter_map(|row| serde_json::from_value(row).ok())
            .collect();
        page.table(title, peer, command, &rows);
    }
    let points: Vec<Point> = read(&folder.join("growth.json"))?;
    for curve in plot::curves(&points) {
        let name = format!("{}.svg", curve.name.replace(' ', "-"));
        std::fs::write(benches.join(&name), plot::draw(&curve)?)?;
        page.plot(&curve, &name);
    }
    let path = benches.join("RESULTS.md");
    std::fs::write(&path, page.finish())?;
    println!("{} is written", path.display());
    Ok(())
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text =
        std::fs::read(path).with_context(|| format!("{} is made by a bench", path.display()))?;
    serde_json::from_slice(&text)
        .with_context(|| format!("{} is not what a bench writes", path.display()))
}
