//! The page: the machine, the tables with remarks, and the plots with their slopes.

use std::process::Command;

use warmroute_testbed::machine::MachineDescription;

use super::plot::{GrowthCurve, number};
use super::{MeasuredRow, RowRemark, TableSource};

/// The text of the page.
pub(super) struct ResultsPage<'r> {
    head: String,
    /// One item for each table.
    summary: String,
    text: String,
    remarks: &'r [RowRemark],
}

/// Description of the columns.
const COLUMNS: &str = "\
Each row compares warmroute (`ours`) with a baseline, measured alternately in the same run. `ratio` is `ours` divided by the
baseline: below 1, warmroute needs less time or memory. `goal` is the highest ratio that the project accepts; it is below 1
where warmroute should be faster. A row that is **above** its goal misses it, even if warmroute is faster than the baseline.
Rows without a goal are for information.
";

impl<'r> ResultsPage<'r> {
    pub(super) fn new(machine: &MachineDescription, date: &str, remarks: &'r [RowRemark]) -> Self {
        let head = format!(
            "# Results\n\nWritten by `cargo run --release -p warmroute-results` from the output of the benches; do not edit. \
             Machine: {machine}; {}; {date}.\n\n## Summary\n{COLUMNS}\n",
            compiler(),
        );
        Self {
            head,
            summary: String::new(),
            text: "\nNumbers are medians, times are CPU time of the thread unless the row says otherwise, and less is better. \
                   Machines are noisy, so compare the ratios.\n"
                .into(),
            remarks,
        }
    }

    pub(super) fn add_table(&mut self, source: &TableSource, rows: &[MeasuredRow]) {
        let TableSource {
            title,
            peer,
            command,
            ..
        } = source;
        self.summary.push_str(&summarize(source, rows));
        self.add(&format!("\n## {title}\n\n`{command}`\n\n"));
        self.add(&format!(
            "| measure | unit | {peer} | ours | ratio | goal | |\n|---|---|--:|--:|--:|--:|---|\n"
        ));
        for MeasuredRow {
            measure,
            unit,
            peer,
            ours,
            ratio,
            goal,
            met,
        } in rows
        {
            let goal = goal.map_or_else(String::new, |goal| {
                let rounded = (goal * 100.0).round() / 100.0;
                format!("{rounded}")
            });
            let verdict = if *met { "" } else { "**above**" };
            let peer = number(*peer);
            let ours = number(*ours);
            let ratio = number(*ratio);
            self.add(&format!(
                "| {measure} | {unit} | {peer} | {ours} | {ratio} | {goal} | {verdict} |\n"
            ));
        }
        let remarks = self.remarks.iter().filter(|remark| {
            rows.iter()
                .any(|row| row.measure.starts_with(&remark.measure))
        });
        let remarks: Vec<String> = remarks
            .map(|RowRemark { measure, text }| {
                let measure = measure.trim_end_matches([',', ' ']);
                format!("* **{measure}**: {text}\n")
            })
            .collect();
        if !remarks.is_empty() {
            self.add(&format!("\n{}", remarks.concat()));
        }
    }

    pub(super) fn add_plot(&mut self, curve: &GrowthCurve<'_>, file: &str) {
        self.add(&format!(
            "\n## Time of a decision against {0}\n\n![CPU time of a routing decision against {0}]({file})\n\n",
            curve.name
        ));
        for series in &curve.series {
            self.add(&format!("* {}: {}\n", series.name, series.slope()));
        }
    }

    pub(super) fn finish(self) -> String {
        self.head + &self.summary + &self.text
    }

    fn add(&mut self, text: &str) {
        self.text.push_str(text);
    }
}

/// Summarizes a table: rows on either side of 1, and rows above their goal.
fn summarize(source: &TableSource, rows: &[MeasuredRow]) -> String {
    let TableSource {
        title, baseline, ..
    } = source;
    let higher: Vec<&str> = rows
        .iter()
        .filter(|row| row.ratio > 1.0)
        .map(|row| row.measure.as_str())
        .collect();
    let names = match higher.len() {
        1..=3 => format!(" ({})", higher.join("; ")),
        _ => String::new(),
    };
    let goals = rows.iter().filter(|row| row.goal.is_some()).count();
    let missed = rows.iter().filter(|row| !row.met).count();
    format!(
        "* **{title}**: the ratio is at most 1 in {} of {} rows, and above 1 in {}{names}. {baseline} \
         {missed} of the {goals} rows with a goal are above it.\n",
        rows.len() - higher.len(),
        rows.len(),
        higher.len(),
    )
}

/// Returns the version of the compiler.
fn compiler() -> String {
    let output = Command::new("rustc").arg("--version").output();
    let version = output.map(|output| output.stdout).unwrap_or_default();
    String::from_utf8_lossy(&version).trim().to_owned()
}
