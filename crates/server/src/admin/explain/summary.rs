//! Short text form of an explanation: the best workers of each phase and the reason of the choice,
//! in at most [`MAX_WIDTH`] columns.

use std::fmt::Write as _;

use warmroute_core::router::{PhaseExplanation, RouteExplanation, WorkerExplanation};

use super::table;

/// Maximum width of a line, unless a single word is longer.
const MAX_WIDTH: usize = 100;
/// Maximum number of printed workers of a phase.
const MAX_WORKERS: usize = 5;
/// Separator between columns.
const COLUMN_GAP: &str = "  ";
/// Headings of the numeric columns.
const NUMBER_HEADINGS: [&str; 4] = ["cached", "requests", "prefill", "cost"];

/// Renders an explanation as short text.
pub fn render(explanation: &RouteExplanation) -> String {
    let mut text = String::new();
    for line in table::format_heading(explanation).lines() {
        wrap(&mut text, line);
    }
    for phase in &explanation.phases {
        text.push('\n');
        wrap(&mut text, &table::phase_title(phase));
        write_workers(&mut text, phase);
    }
    text.push('\n');
    wrap(&mut text, &explanation.summary);
    text
}

/// Writes the best workers, one per line.
fn write_workers(text: &mut String, phase: &PhaseExplanation) {
    let mut workers: Vec<&WorkerExplanation> = phase.workers.iter().collect();
    workers.sort_by(|a, b| table::compare_workers(phase, a, b));
    let left_out = workers.len().saturating_sub(MAX_WORKERS);
    workers.truncate(MAX_WORKERS);
    let rows: Vec<WorkerRow> = workers
        .iter()
        .map(|worker| WorkerRow::new(phase, worker))
        .collect();
    let width = |column: fn(&WorkerRow) -> &str, heading: &str| {
        let lengths = rows.iter().map(|row| column(row).chars().count());
        lengths.max().unwrap_or(0).max(heading.len())
    };
    let rank_width = width(|row| &row.rank, "worker");
    let endpoint_width = width(|row| &row.endpoint, "endpoint");
    let number_widths: Vec<usize> = (0..NUMBER_HEADINGS.len())
        .map(|column| {
            let lengths = rows.iter().map(|row| row.numbers[column].len());
            lengths
                .max()
                .unwrap_or(0)
                .max(NUMBER_HEADINGS[column].len())
        })
        .collect();
    let mut write_row = |rank: &str, endpoint: &str, numbers: &[String], verdict: &str| {
        let mut line = format!("  {rank:<rank_width$}{COLUMN_GAP}{endpoint:<endpoint_width$}");
        for (number, width) in numbers.iter().zip(&number_widths) {
            _ = write!(line, "{COLUMN_GAP}{number:>width$}");
        }
        let space = MAX_WIDTH.saturating_sub(line.chars().count() + COLUMN_GAP.len());
        let verdict = shorten(verdict, space);
        _ = writeln!(
            text,
            "{}",
            format!("{line}{COLUMN_GAP}{verdict}").trim_end()
        );
    };
    write_row(
        "worker",
        "endpoint",
        &NUMBER_HEADINGS.map(str::to_owned),
        "",
    );
    for row in &rows {
        write_row(&row.rank, &row.endpoint, &row.numbers, &row.verdict);
    }
    if left_out > 0 {
        _ = writeln!(text, "  and {left_out} more; --table prints all of them");
    }
}

/// Columns of one worker rank: cached tokens, active requests, prefill tokens with this request,
/// total cost, verdict.
struct WorkerRow {
    rank: String,
    endpoint: String,
    numbers: [String; NUMBER_HEADINGS.len()],
    verdict: String,
}

impl WorkerRow {
    fn new(phase: &PhaseExplanation, worker: &WorkerExplanation) -> Self {
        let cost = worker
            .cost
            .as_ref()
            .map_or_else(|| "-".to_owned(), |cost| format!("{:.3}", cost.total));
        Self {
            rank: worker.rank.to_string(),
            endpoint: worker.endpoint.to_string(),
            numbers: [
                worker.cached_tokens.to_string(),
                worker.load.active_requests.to_string(),
                worker.prefill_tokens.to_string(),
                cost,
            ],
            verdict: table::verdict(phase, worker),
        }
    }
}

/// Cuts a text to a number of characters.
fn shorten(text: &str, length: usize) -> String {
    if text.chars().count() <= length {
        return text.to_owned();
    }
    let head: String = text.chars().take(length.saturating_sub(2)).collect();
    head + ".."
}

/// Appends a line, wrapped at spaces.
fn wrap(text: &mut String, line: &str) {
    let mut length = 0;
    for word in line.split(' ') {
        let word_length = word.chars().count();
        if length > 0 && length + 1 + word_length > MAX_WIDTH {
            text.push_str("\n  ");
            length = 2;
        } else if length > 0 || text.ends_with(' ') {
            text.push(' ');
            length += 1;
        }
        text.push_str(word);
        length += word_length;
    }
    text.push('\n');
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_wrapped_at_spaces() {
        let mut text = String::new();
        wrap(&mut text, &format!("route    exact {}", "word ".repeat(40)));
        let lines: Vec<_> = text.lines().collect();
        assert!(
            lines.len() > 1 && lines[0].starts_with("route    exact word"),
            "{text}"
        );
        assert!(lines.iter().all(|line| line.len() <= MAX_WIDTH), "{text}");
        assert_eq!(text.matches("word").count(), 40);
    }

    #[test]
    fn long_verdicts_are_cut() {
        assert_eq!(shorten("excluded: busy", 20), "excluded: busy");
        assert_eq!(shorten("excluded: busy", 10), "excluded..");
    }
}
