//! Two sides measured in turns in one process, and the table that comes of it. Machines are noisy and slow down for
//! minutes, so a side is never measured before the other but between its rounds, and what is compared are medians. Times
//! are those of the thread's own CPU clock, which a neighbour cannot lengthen, except where waiting is what is measured.

use std::path::Path;
use std::time::Instant;

use rustix::time::{ClockId, clock_gettime};
use serde::Serialize;

/// One measure of both sides.
#[derive(Clone, Debug, Serialize)]
pub struct Row {
    /// What was measured.
    pub measure: String,
    /// Of both numbers.
    pub unit: String,
    /// The other side: a peer, or a limit.
    pub peer: f64,
    /// Our side.
    pub ours: f64,
    /// Ours to theirs; less is better.
    pub ratio: f64,
    /// The largest ratio that is good enough.
    pub goal: Option<f64>,
    /// Whether it is; without a goal always.
    pub met: bool,
    /// Half of the rounds of either side lie within this share of its median.
    #[serde(skip)]
    spread: [f64; 2],
}

/// All rows of a run, in the order they were measured.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Row>,
}

impl Table {
    /// Runs both sides `rounds` times in turns, after one round of each that does not count, and enters their medians. A
    /// round answers with its own measurement.
    pub fn duel(
        &mut self,
        (measure, unit, goal): (&str, &str, Option<f64>),
        rounds: usize,
        mut peer: impl FnMut() -> f64,
        mut ours: impl FnMut() -> f64,
    ) {
        peer();
        ours();
        let (mut theirs, mut mine) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            theirs.push(peer());
            mine.push(ours());
        }
        self.enter((measure, unit, goal), &theirs, &mine);
    }

    /// Enters rounds that were measured elsewhere.
    #[expect(
        clippy::print_stderr,
        reason = "a run takes minutes, and shows how far it is"
    )]
    pub fn enter(
        &mut self,
        (measure, unit, goal): (&str, &str, Option<f64>),
        peer: &[f64],
        ours: &[f64],
    ) {
        let spread = [spread(peer), spread(ours)];
        let (peer, ours) = (median(peer), median(ours));
        let ratio = ours / peer;
        let met = goal.is_none_or(|goal| ratio <= goal);
        let row = Row {
            measure: measure.into(),
            unit: unit.into(),
            peer,
            ours,
            ratio,
            goal,
            met,
            spread,
        };
        eprintln!("{}", line(&row));
        self.rows.push(row);
    }

    /// The rows.
    pub fn rows(&self) -> &[Row] {
        &self.rows
    }

    /// Prints the table.
    #[expect(clippy::print_stdout, reason = "what a bench is for")]
    pub fn print(&self, peer: &str) {
        println!(
            "{:<62} {:>10} {:>12} {:>12} {:>7} {:>7}  {:<9} spread",
            "measure", "unit", peer, "ours", "ratio", "goal", "",
        );
        self.rows.iter().for_each(|row| println!("{}", line(row)));
    }

    /// Writes the rows as a JSON array.
    pub fn write_json(&self, path: &Path) -> std::io::Result<()> {
        write_json(&self.rows, path)
    }
}

/// Writes something as JSON, in folders that are made for it.
pub fn write_json(what: &impl Serialize, path: &Path) -> std::io::Result<()> {
    let text = serde_json::to_string_pretty(what).map_err(std::io::Error::other)?;
    path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
    std::fs::write(path, text + "\n")
}

/// CPU time of this thread so far, in nanoseconds.
pub fn thread_cpu() -> f64 {
    let time = clock_gettime(ClockId::ThreadCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// CPU time of this process so far, in nanoseconds.
pub fn process_cpu() -> f64 {
    let time = clock_gettime(ClockId::ProcessCPUTime);
    time.tv_sec as f64 * 1e9 + time.tv_nsec as f64
}

/// Nanoseconds of this thread's CPU that something takes.
pub fn cpu<T>(work: impl FnOnce() -> T) -> f64 {
    let start = thread_cpu();
    let result = work();
    let took = thread_cpu() - start;
    drop(std::hint::black_box(result));
    took
}

/// Nanoseconds by the wall clock.
pub fn wall<T>(work: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    let result = work();
    let took = start.elapsed().as_nanos() as f64;
    drop(std::hint::black_box(result));
    took
}

/// The middle of some numbers.
pub fn median(numbers: &[f64]) -> f64 {
    quantile(numbers, 0.5)
}

/// The number below which this share of them lies.
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
    let away: Vec<f64> = numbers
        .iter()
        .map(|number| (number - middle).abs())
        .collect();
    median(&away) / middle
}

fn line(row: &Row) -> String {
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
        number(row.peer),
        number(row.ours),
        row.ratio,
        goal,
        verdict,
        row.spread[0] * 100.0,
        row.spread[1] * 100.0,
    )
}

/// Three digits that count.
fn number(value: f64) -> String {
    let digits = (2 - value.abs().max(1e-9).log10().floor() as i32).clamp(0, 6) as usize;
    format!("{value:.digits$}")
}
