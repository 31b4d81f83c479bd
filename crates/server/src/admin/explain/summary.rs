//! Short text form of an explanation: the best workers of each phase and the reason of the choice,
//! in at most [`MAX_WIDTH`] columns.

use std::fmt::Write as _;

use warmroute_core::router::{PhaseExplanation, RouteExplanation, WorkerExplanation};

use super::table;

/// Maximum width of a line, unless a single word is longer.
const MAX_WIDTH: usize = 100;
/// Maximum number of printed workers of a phase.
const MAX_WORKERS: usize = 5;
/// Indentation of the workers.
const INDENT: &str = "  ";
/// Headings of the worker table, in their second line.
const HEADINGS: [[&str; 2]; 7] = [
    ["", "worker"],
    ["", "endpoint"],
    ["", "cached"],
    ["", "requests"],
    ["", "prefill"],
    ["", "cost"],
    ["", ""],
];

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
    let mut workers = table::sorted_workers(phase);
    let left_out = workers.len().saturating_sub(MAX_WORKERS);
    workers.truncate(MAX_WORKERS);
    let rows = workers.into_iter().map(|worker| worker_row(phase, worker));
    let mut lines = String::new();
    table::write_table(&mut lines, &HEADINGS, 2, rows.collect());
    for line in lines.trim_start().lines() {
        let line = shorten(line, MAX_WIDTH - INDENT.len());
        _ = writeln!(text, "{INDENT}{line}");
    }
    if left_out > 0 {
        _ = writeln!(text, "  and {left_out} more; --table prints all of them");
    }
}

/// Returns the columns of one worker rank: among them the prefill tokens with this request, the
/// total cost and the verdict.
fn worker_row(phase: &PhaseExplanation, worker: &WorkerExplanation) -> Vec<String> {
    let cost = worker.cost.as_ref();
    vec![
        worker.rank.to_string(),
        worker.endpoint.to_string(),
        worker.cached_tokens.to_string(),
        worker.load.active_requests.to_string(),
        worker.prefill_tokens.to_string(),
        cost.map_or("-".to_owned(), |cost| format!("{:.3}", cost.total)),
        table::verdict(phase, worker),
    ]
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
