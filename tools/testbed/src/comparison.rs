//! Comparison of warmroute with a peer or a limit, and the resulting table. Machines are noisy and
//! slow down for minutes, so the rounds of both sides alternate and the medians are compared. Times
//! are those of the thread's CPU clock, which other processes do not affect, except where waiting
//! is measured.

use std::path::Path;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// The quantity of a comparison.
#[derive(Clone, Copy, Debug)]
pub struct ComparedMeasure<'a> {
    /// Name of the row.
    pub name: &'a str,
    /// Unit of both numbers.
    pub unit: &'a str,
    /// Maximum ratio that meets the goal.
    pub goal: Option<f64>,
}

impl<'a> ComparedMeasure<'a> {
    /// Returns a measure with a goal, or without one.
    pub const fn new(name: &'a str, unit: &'a str, goal: Option<f64>) -> Self {
        Self { name, unit, goal }
    }
}

/// Results of one measure.
#[derive(Clone, Debug, Serialize)]
pub struct ComparisonRow {
    /// Name of the measure.
    pub measure: String,
    /// Unit of both numbers.
    pub unit: String,
    /// Value of the other side: a peer, or a limit.
    pub peer: f64,
    /// Value of warmroute.
    pub ours: f64,
    /// Value of warmroute divided by the other one; less is better.
    pub ratio: f64,
    /// Maximum ratio that meets the goal.
    pub goal: Option<f64>,
    /// True if the goal is met, or if there is none.
    pub met: bool,
    /// Spread of each side: half of the rounds lie within this share of the median.
    #[serde(skip)]
    spread: [f64; 2],
}

/// All rows of a run, in measured order.
#[derive(Debug, Default)]
pub struct ComparisonTable {
    rows: Vec<ComparisonRow>,
}

impl ComparisonTable {
    /// Runs both sides `rounds` times in turns, after one warm-up round of each, and adds their
    /// medians. A round returns its measurement.
    pub fn compare(
        &mut self,
        measure: ComparedMeasure<'_>,
        rounds: usize,
        mut peer: impl FnMut() -> f64,
        mut ours: impl FnMut() -> f64,
    ) {
        peer();
        ours();
        let mut peer_rounds = Vec::new();
        let mut our_rounds = Vec::new();
        for _ in 0..rounds {
            peer_rounds.push(peer());
            our_rounds.push(ours());
        }
        self.add(measure, &peer_rounds, &our_rounds);
    }

    /// Adds rounds that the caller has measured.
    #[expect(
        clippy::print_stderr,
        reason = "a run takes minutes and prints its progress"
    )]
    pub fn add(&mut self, measure: ComparedMeasure<'_>, peer: &[f64], ours: &[f64]) {
        let spread = [spread(peer), spread(ours)];
        let peer = median(peer);
        let ours = median(ours);
        let ratio = ours / peer;
        let met = measure.goal.is_none_or(|goal| ratio <= goal);
        let row = ComparisonRow {
            measure: measure.name.into(),
            unit: measure.unit.into(),
            peer,
            ours,
            ratio,
            goal: measure.goal,
            met,
            spread,
        };
        eprintln!("{}", format_row(&row));
        self.rows.push(row);
    }

    /// Returns the rows.
    pub fn rows(&self) -> &[ComparisonRow] {
        &self.rows
    }

    /// Prints the table.
    #[expect(clippy::print_stdout, reason = "a bench prints its results")]
    pub fn print(&self, peer: &str) {
        println!(
            "{:<62} {:>10} {:>12} {:>12} {:>7} {:>7}  {:<9} spread",
            "measure", "unit", peer, "ours", "ratio", "goal", "",
        );
        self.rows
            .iter()
            .for_each(|row| println!("{}", format_row(row)));
    }

    /// Writes the rows as a JSON array.
    pub fn write_json(&self, path: &Path) -> std::io::Result<()> {
        write_json(&self.rows, path)
    }
}

/// Writes a value as JSON and creates the directories.
pub fn write_json(value: &impl Serialize, path: &Path) -> std::io::Result<()> {
    let text = serde_json::to_string_pretty(value).map_err(std::io::Error::other)?;
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    std::fs::write(path, text + "\n")
}

/// Returns the CPU time of this thread, in nanoseconds.
pub fn thread_cpu_nanos() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Returns the CPU time of this process, in nanoseconds.
pub fn process_cpu_nanos() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Returns the nanoseconds of this thread's CPU time that some work takes.
pub fn measure_cpu<T>(work: impl FnOnce() -> T) -> f64 {
    let start = thread_cpu_nanos();
    let result = work();
    let elapsed = thread_cpu_nanos() - start;
    drop(std::hint::black_box(result));
    elapsed
}

/// Returns the wall-clock nanoseconds that some work takes.
pub fn measure_wall<T>(work: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    let result = work();
    let elapsed = start.elapsed().as_nanos() as f64;
    drop(std::hint::black_box(result));
    elapsed
}

/// Returns the median.
pub fn median(numbers: &[f64]) -> f64 {
    quantile(numbers, 0.5)
}

/// Returns the quantile.
pub fn quantile(numbers: &[f64], share: f64) -> f64 {
    let mut sorted = numbers.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted
        .get(((sorted.len() as f64 - 1.0) * share).round() as usize)
        .copied()
        .unwrap_or(f64::NAN)
}

fn spread(numbers: &[f64]) -> f64 {
    let middle = median(numbers);
    let deviations: Vec<f64> = numbers
        .iter()
        .map(|number| (number - middle).abs())
        .collect();
    median(&deviations) / middle
}

fn format_row(row: &ComparisonRow) -> String {
    let goal = row
        .goal
        .map_or_else(String::new, |goal| format!("{goal:.3}"));
    let verdict = match (row.goal, row.met) {
        (None, _) => "",
        (Some(_), true) => "met",
        (Some(_), false) => "NOT MET",
    };
    format!(
        "{:<62} {:>10} {:>12} {:>12} {:>7.3} {:>7}  {:<9} {:.0} % / {:.0} %",
        row.measure,
        row.unit,
        format_number(row.peer),
        format_number(row.ours),
        row.ratio,
        goal,
        verdict,
        row.spread[0] * 100.0,
        row.spread[1] * 100.0,
    )
}

/// Formats a number with three significant digits.
fn format_number(value: f64) -> String {
    let digits = (2 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 6) as usize;
    format!("{value:.digits$}")
}
