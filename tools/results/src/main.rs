//! Writes benches/RESULTS.md and its plots from the output of the benches, or draws the chart of the
//! quickstart.

mod axis;
mod bar_chart;
mod page;
mod plot;
mod theme;

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context as _;
use clap::Parser;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use warmroute_testbed::machine::MachineDescription;
use warmroute_testbed::policy_comparison::PolicyComparison;

/// Writes benches/RESULTS.md and its plots from the output of the benches.
#[derive(Debug, Parser)]
struct ResultsArgs {
    /// Directory of the JSON files that the benches wrote
    #[arg(default_value = "target/results")]
    directory: PathBuf,
    /// Instead, draw the output of the quickstart (`--json FILE`) as SVG
    #[arg(long, num_args = 2, value_names = ["JSON", "SVG"])]
    quickstart: Option<Vec<PathBuf>>,
}

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
    /// Description of the baseline.
    baseline: &'static str,
    command: &'static str,
}

const TABLES: [TableSource; 4] = [
    TableSource {
        file: "peer.json",
        title: "Router core compared with dynamo-kv-router 1.6.1",
        peer: "peer",
        baseline: "The baseline is the router core of Dynamo, with the same prompts, events and requests.",
        command: "cargo bench --manifest-path benches/peer/Cargo.toml -- --trace FILE.jsonl.gz --json \"$PWD/target/results/peer.json\"",
    },
    TableSource {
        file: "limits.json",
        title: "Stages compared with their limits",
        peer: "limit",
        baseline: "The baseline is a library with the same function, a lower bound, or the fixed time in the name of the row (`beside`).",
        command: "cargo bench --bench limits -- --json target/results/limits.json",
    },
    TableSource {
        file: "server.json",
        title: "Server compared with a minimal ext_proc server, through Envoy",
        peer: "bare",
        baseline: "The baseline answers at once and does not read the body, so ratios above 1 are expected: warmroute also parses, tokenizes and decides.",
        command: "cargo bench --bench server -- --json target/results/server.json",
    },
    TableSource {
        file: "load.json",
        title: "Load through Envoy compared with a minimal ext_proc server",
        peer: "bare",
        baseline: "The baseline is the same minimal server. Both servers share the machine with Envoy, the client and the engines.",
        command: "cargo run --release --example load -- --json target/results/load.json",
    },
];

#[expect(
    clippy::print_stdout,
    reason = "the program prints the path of its output"
)]
fn main() -> anyhow::Result<()> {
    let args = ResultsArgs::parse();
    let written = match args.quickstart.as_deref() {
        Some([json, svg]) => {
            let comparison: PolicyComparison = read(json)?;
            std::fs::write(svg, bar_chart::draw(&comparison)?)
                .with_context(|| format!("cannot write {}", svg.display()))?;
            svg.clone()
        }
        _ => write_page(&args.directory)?,
    };
    println!("wrote {}", written.display());
    Ok(())
}

/// Writes the results page and its plots. Returns the path of the page.
fn write_page(directory: &Path) -> anyhow::Result<PathBuf> {
    let benches = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches");
    let remarks: Vec<RowRemark> = read(&benches.join("remarks.json"))?;
    let growth = directory.join("growth.json");
    let points: Vec<CurvePoint> = read(&growth)?;
    let machine = MachineDescription::read();
    let date = measured_date(&growth)?;
    let mut page = page::ResultsPage::new(&machine, &date, &remarks);
    for table in TABLES {
        // A program may also write other figures, which are not rows of the table.
        let rows: Vec<serde_json::Value> = read(&directory.join(table.file))?;
        let rows: Vec<MeasuredRow> = rows
            .into_iter()
            .filter_map(|row| serde_json::from_value(row).ok())
            .collect();
        page.add_table(&table, &rows);
    }
    for curve in plot::curves(&points) {
        let name = format!("{}.svg", curve.name.replace(' ', "-"));
        let measurement = format!("{machine}, {date}");
        std::fs::write(benches.join(&name), plot::draw(&curve, &measurement)?)?;
        page.add_plot(&curve, &name);
    }
    let path = benches.join("RESULTS.md");
    std::fs::write(&path, page.finish())?;
    Ok(path)
}

/// Returns the date on which a bench wrote its output.
fn measured_date(file: &Path) -> anyhow::Result<String> {
    let modified: SystemTime = std::fs::metadata(file)?.modified()?;
    let time = jiff::Timestamp::try_from(modified)?;
    let date = time.to_zoned(jiff::tz::TimeZone::system()).date();
    Ok(date.to_string())
}

fn read<T: DeserializeOwned>(path: &Path) -> anyhow::Result<T> {
    let text = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    serde_json::from_slice(&text).with_context(|| {
        format!(
            "{} is not the output of a bench or of the quickstart",
            path.display()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
    }

    /// The picture in README.md is drawn from the committed results.
    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "the environment enables rewriting of the picture"
    )]
    fn quickstart_picture_matches_committed_results() {
        let picture = root().join("docs/quickstart.svg");
        let comparison = read(&root().join("docs/quickstart.json")).unwrap();
        let drawn = bar_chart::draw(&comparison).unwrap();
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&picture, &drawn).unwrap();
        }
        assert!(
            std::fs::read_to_string(&picture).unwrap_or_default() == drawn,
            "docs/quickstart.svg is out of date; UPDATE_GOLDEN=1 cargo test -p warmroute-results rewrites it"
        );
    }

    /// README.md and the documentation state the figures of the committed results.
    #[test]
    fn documentation_states_committed_quickstart_results() {
        let comparison: PolicyComparison = read(&root().join("docs/quickstart.json")).unwrap();
        let runs = [
            &comparison.round_robin.clients,
            &comparison.linear.clients,
            &comparison.default_run.clients,
        ];
        let hit_rates = runs.map(|run| format!("{:.1} %", run.hit_rate * 100.0));
        let medians = runs.map(|run| format!("{:.0} ms", run.ttft_ms.p50));
        let last_percentiles = runs.map(|run| format!("{:.0} ms", run.ttft_ms.p99));
        for page in ["README.md", "docs/getting-started.md"] {
            let text = std::fs::read_to_string(root().join(page)).unwrap();
            let lines: Vec<String> = text
                .lines()
                .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
                .collect();
            for (name, cells) in [
                ("prefix hit rate", &hit_rates),
                ("p50", &medians),
                ("p99", &last_percentiles),
            ] {
                let row = format!("{name} {}", cells.join(" "));
                assert!(
                    lines.iter().any(|line| line.ends_with(&row)),
                    "{page} has no row {row:?}"
                );
            }
        }
    }
}
