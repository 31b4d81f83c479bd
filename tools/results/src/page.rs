//! The page: the machine, the tables with remarks, and the plots with their slopes.

use std::fmt::Write;
use std::process::Command;

use super::plot::{GrowthCurve, number};
use super::{MeasuredRow, RowRemark, TableSource};

/// The text of the page.
pub(super) struct ResultsPage<'r> {
    text: String,
    remarks: &'r [RowRemark],
}

impl<'r> ResultsPage<'r> {
    pub(super) fn new(remarks: &'r [RowRemark]) -> Self {
        let text = format!(
            "# Results\n\nWritten by `cargo run --release -p warmroute-results` from the output of the benches; do not edit. {}\n\n\
             Both sides of a row were measured alternately in one run. Numbers are medians, times are CPU time of the thread \
             unless the row says otherwise, and less is better. Machines are noisy, so compare the ratios.\n",
            machine(),
        );
        Self { text, remarks }
    }

    pub(super) fn add_table(&mut self, source: &TableSource, rows: &[MeasuredRow]) {
        let TableSource {
            title,
            peer,
            command,
            ..
        } = source;
        let missed = rows.iter().filter(|row| !row.met).count();
        let verdict = if missed == 0 {
            String::new()
        } else {
            format!(" {missed} of {} above their goal.", rows.len())
        };
        self.add(&format!("\n## {title}\n\n`{command}`{verdict}\n\n"));
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
            "\n## Time of a decision against {}\n\n![]({file})\n\n",
            curve.name
        ));
        for series in &curve.series {
            self.add(&format!("* {}: {}\n", series.name, series.slope()));
        }
    }

    pub(super) fn finish(self) -> String {
        self.text
    }

    fn add(&mut self, text: &str) {
        self.text.push_str(text);
    }
}

/// Describes the machine, the compiler and the date.
fn machine() -> String {
    let mut text = String::new();
    let cpu = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = cpu
        .lines()
        .find_map(|line| line.strip_prefix("model name")?.split_once(": "));
    let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let memory = memory.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix(" kB")?
            .parse::<u64>()
            .ok()
    });
    let compiler = Command::new("rustc")
        .arg("--version")
        .output()
        .map(|output| output.stdout)
        .unwrap_or_default();
    let date = jiff::Zoned::now().date();
    let _infallible = write!(
        text,
        "Machine: {}, {cores} cores, {} GiB; {}; {date}.",
        model.map_or("unknown", |(_, name)| name),
        memory.unwrap_or_default() >> 20,
        String::from_utf8_lossy(&compiler).trim(),
    );
    text
}
