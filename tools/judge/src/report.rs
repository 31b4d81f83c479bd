//! Rows of results, and their Markdown tables.

use std::fmt::Write;

use serde::Serialize;

use crate::metrics::RunMetrics;
use crate::worker_faults::FaultMetrics;

/// Result of one policy in one case with one seed.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(crate) struct ResultRow {
    /// Name of the case.
    pub(crate) case: String,
    /// Name of the policy.
    pub(crate) policy: String,
    /// Seed of the simulation.
    pub(crate) seed: u64,
    /// Metrics of the simulation.
    #[serde(flatten)]
    pub(crate) metrics: RunMetrics,
}

/// Column of the tables.
struct MetricColumn {
    heading: &'static str,
    /// Factor from the unit of the metric to the unit of the heading.
    scale: f64,
    decimals: usize,
    value: fn(&RunMetrics) -> f64,
    summary: ColumnSummary,
}

/// Presentation of a column in the summary.
#[derive(Clone, Copy, PartialEq, Eq)]
enum ColumnSummary {
    /// Ratio of two policies; lower is better.
    Ratio,
    /// Difference of two policies; higher is better.
    Difference,
    /// The summary does not contain the column.
    Omitted,
}

const COLUMNS: [MetricColumn; 13] = [
    column("TTFT, s", 1.0, 3, |run| run.ttft_mean, ColumnSummary::Ratio),
    column(
        "TTFT p50",
        1.0,
        3,
        |run| run.ttft_p50,
        ColumnSummary::Omitted,
    ),
    column(
        "TTFT p95",
        1.0,
        2,
        |run| run.ttft_p95,
        ColumnSummary::Omitted,
    ),
    column("TTFT p99", 1.0, 2, |run| run.ttft_p99, ColumnSummary::Ratio),
    column(
        "TPOT p50, ms",
        1e3,
        1,
        |run| run.tpot_p50,
        ColumnSummary::Ratio,
    ),
    column(
        "TPOT p99",
        1e3,
        1,
        |run| run.tpot_p99,
        ColumnSummary::Omitted,
    ),
    column("E2E, s", 1.0, 2, |run| run.e2e_mean, ColumnSummary::Ratio),
    column("E2E p99", 1.0, 1, |run| run.e2e_p99, ColumnSummary::Ratio),
    column(
        "goodput, %",
        100.0,
        1,
        |run| run.goodput,
        ColumnSummary::Difference,
    ),
    column(
        "scaled, %",
        100.0,
        1,
        |run| run.goodput_scaled,
        ColumnSummary::Omitted,
    ),
    column(
        "hit rate, %",
        100.0,
        1,
        |run| run.hit_rate,
        ColumnSummary::Omitted,
    ),
    column(
        "observed / predicted TTFT",
        1.0,
        2,
        |run| run.prediction_ratio,
        ColumnSummary::Omitted,
    ),
    column(
        "decision, µs",
        1e-3,
        1,
        |run| run.decide_ns,
        ColumnSummary::Omitted,
    ),
];

/// Columns of the cases with a fault.
const FAULT_COLUMNS: [MetricColumn; 5] = [
    fault_column("failed, %", 100.0, |run| {
        of_fault(run, |fault| fault.failed_share)
    }),
    fault_column("share in 5 s, %", 100.0, |run| {
        of_fault(run, |fault| fault.early_share)
    }),
    fault_column("share after 15 s, %", 100.0, |run| {
        of_fault(run, |fault| fault.late_share)
    }),
    fault_column("healthy ejections", 1.0, |run| {
        of_fault(run, |fault| fault.healthy_ejections as f64)
    }),
    fault_column("recovery, s", 1.0, |run| {
        of_fault(run, |fault| fault.recovery_s)
    }),
];

fn of_fault(run: &RunMetrics, value: impl Fn(&FaultMetrics) -> f64) -> f64 {
    run.fault.as_ref().map_or(f64::NAN, value)
}

const fn fault_column(
    heading: &'static str,
    scale: f64,
    value: fn(&RunMetrics) -> f64,
) -> MetricColumn {
    column(heading, scale, 1, value, ColumnSummary::Omitted)
}

const fn column(
    heading: &'static str,
    scale: f64,
    decimals: usize,
    value: fn(&RunMetrics) -> f64,
    summary: ColumnSummary,
) -> MetricColumn {
    MetricColumn {
        heading,
        scale,
        decimals,
        value,
        summary,
    }
}

impl MetricColumn {
    /// Returns the mean of a policy in a case over the seeds; `None` without results.
    fn mean(&self, rows: &[ResultRow], case: &str, policy: &str) -> Option<f64> {
        let matching = |row: &&ResultRow| row.case == case && row.policy == policy;
        let values = rows.iter().filter(matching);
        let values: Vec<f64> = values.map(|row| (self.value)(&row.metrics)).collect();
        (!values.is_empty()).then(|| self.scale * values.iter().sum::<f64>() / values.len() as f64)
    }
}

/// Returns the table of one case, with one row per policy.
pub(crate) fn case_table(rows: &[ResultRow], case: &str) -> String {
    let mut of_case = rows.iter().filter(|row| row.case == case);
    let has_fault = of_case.any(|row| row.metrics.fault.is_some());
    let fault_columns = FAULT_COLUMNS.iter().filter(|_| has_fault);
    let columns: Vec<_> = COLUMNS.iter().chain(fault_columns).collect();
    let headings = columns.iter().map(|column| column.heading);
    let mut table = format!("\n### {case}\n");
    write_heading(&mut table, "policy", headings);
    for policy in distinct(rows, |row| &row.policy) {
        let cells = columns.iter().map(|column| {
            let mean = column.mean(rows, case, policy);
            mean.map_or_else(|| "-".into(), |mean| format!("{mean:.*}", column.decimals))
        });
        write_row(&mut table, policy, cells);
    }
    table
}

/// Returns a table that compares one policy with each other one over all cases. Empty if there is
/// no result of the policy.
pub(crate) fn summary_table(rows: &[ResultRow], subject: &str) -> String {
    let policies = distinct(rows, |row| &row.policy);
    if !policies.contains(&subject) {
        return String::new();
    }
    let columns = COLUMNS
        .iter()
        .filter(|column| column.summary != ColumnSummary::Omitted);
    let columns: Vec<&MetricColumn> = columns.collect();
    let mut table = format!(
        "\n### {subject} compared with other policies\n\
         Times: geometric mean over the cases of the ratio `{subject}` / other. Goodput: mean \
         difference in points. The worst case is in parentheses.\n\n"
    );
    let headings = columns.iter().map(|column| column.heading);
    write_heading(&mut table, "other policy", headings);
    for other in policies.into_iter().filter(|policy| *policy != subject) {
        let cells = columns
            .iter()
            .map(|column| CaseComparisons::new(rows, column, subject, other).cell(column.summary));
        write_row(&mut table, other, cells);
    }
    table
}

/// Comparison of two policies by one metric, per case.
struct CaseComparisons<'a>(Vec<CaseComparison<'a>>);

struct CaseComparison<'a> {
    case: &'a str,
    subject: f64,
    other: f64,
}

impl<'a> CaseComparisons<'a> {
    fn new(rows: &'a [ResultRow], column: &MetricColumn, subject: &str, other: &str) -> Self {
        let cases = distinct(rows, |row| &row.case).into_iter();
        let comparisons = cases.filter_map(|case| {
            Some(CaseComparison {
                case,
                subject: column.mean(rows, case, subject)?,
                other: column.mean(rows, case, other)?,
            })
        });
        Self(comparisons.collect())
    }

    fn cell(&self, summary: ColumnSummary) -> String {
        match summary {
            ColumnSummary::Ratio => {
                let ratio = |one: &CaseComparison<'_>| one.subject / one.other;
                let logarithms = self.0.iter().map(|one| ratio(one).ln());
                let mean = (logarithms.sum::<f64>() / self.0.len() as f64).exp();
                let worst = self.0.iter().max_by(|a, b| ratio(a).total_cmp(&ratio(b)));
                let worst = worst.map(|one| format!(" ({:.2} {})", ratio(one), one.case));
                format!("{mean:.3}{}", worst.unwrap_or_default())
            }
            ColumnSummary::Difference => {
                let difference = |one: &CaseComparison<'_>| one.subject - one.other;
                let mean = self.0.iter().map(difference).sum::<f64>() / self.0.len() as f64;
                let worst = self
                    .0
                    .iter()
                    .min_by(|a, b| difference(a).total_cmp(&difference(b)));
                let worst = worst.map(|one| format!(" ({:+.1} {})", difference(one), one.case));
                format!("{mean:+.1}{}", worst.unwrap_or_default())
            }
            ColumnSummary::Omitted => String::new(),
        }
    }
}

/// Returns the distinct names in the rows, in order of their first occurrence.
fn distinct(rows: &[ResultRow], name: impl Fn(&ResultRow) -> &String) -> Vec<&str> {
    let mut names: Vec<&str> = Vec::new();
    for row in rows {
        let name = name(row).as_str();
        if !names.contains(&name) {
            names.push(name);
        }
    }
    names
}

fn write_heading(table: &mut String, first: &str, headings: impl Iterator<Item = &'static str>) {
    let headings: Vec<&str> = headings.collect();
    write_row(table, first, headings.iter());
    table.push_str("|---|");
    headings.iter().for_each(|_| table.push_str("--:|"));
    table.push('\n');
}

fn write_row(table: &mut String, first: &str, cells: impl Iterator<Item = impl std::fmt::Display>) {
    // Writing to a string cannot fail.
    _ = write!(table, "| {first} |");
    for cell in cells {
        _ = write!(table, " {cell} |");
    }
    table.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(case: &str, policy: &str, seed: u64, e2e_mean: f64, goodput: f64) -> ResultRow {
        ResultRow {
            case: case.into(),
            policy: policy.into(),
            seed,
            metrics: RunMetrics {
                ttft_mean: 1.0,
                ttft_p50: 1.0,
                ttft_p95: 1.0,
                ttft_p99: 1.0,
                tpot_p50: 0.02,
                tpot_p99: 0.02,
                e2e_mean,
                e2e_p99: 1.0,
                goodput,
                goodput_scaled: goodput,
                hit_rate: 0.5,
                prediction_ratio: 1.0,
                requests: 10,
                unfinished: 0,
                decide_ns: 5_000.0,
                fault: None,
            },
        }
    }

    #[test]
    fn case_table_contains_means_over_seeds() {
        let rows = [
            row("a", "linear", 1, 10.0, 0.5),
            row("a", "linear", 2, 12.0, 0.7),
            row("b", "linear", 1, 50.0, 0.1),
        ];
        let table = case_table(&rows, "a");
        let line = table.lines().last().unwrap();
        assert_eq!(
            line,
            "| linear | 1.000 | 1.000 | 1.00 | 1.00 | 20.0 | 20.0 | 11.00 | 1.0 | 60.0 | 60.0 | 50.0 | 1.00 | 5.0 |"
        );
    }

    #[test]
    fn case_table_contains_columns_of_fault() {
        let mut faulty = row("a", "linear", 1, 10.0, 0.5);
        faulty.metrics.fault = Some(FaultMetrics {
            failed_share: 0.01,
            early_share: 0.1,
            late_share: 0.005,
            healthy_ejections: 2,
            recovery_s: f64::INFINITY,
        });
        let table = case_table(&[faulty], "a");
        let line = table.lines().last().unwrap();
        assert!(line.ends_with("| 1.0 | 10.0 | 0.5 | 2.0 | inf |"), "{line}");
    }

    #[test]
    fn summary_contains_ratio_and_worst_case() {
        let rows = [
            row("a", "linear", 1, 10.0, 0.5),
            row("a", "seconds", 1, 5.0, 0.9),
            row("b", "linear", 1, 10.0, 0.5),
            row("b", "seconds", 1, 20.0, 0.3),
        ];
        let table = summary_table(&rows, "seconds");
        let line = table.lines().last().unwrap();
        assert!(line.contains("| 1.000 (2.00 b) |"), "{line}");
        assert!(line.contains("| +10.0 (-20.0 b) |"), "{line}");
        assert_eq!(summary_table(&rows, "sticky"), "");
    }
}
