//! Plain-text form of findings: one row each, the most severe first. The fix of a problem is
//! printed below it.

use std::fmt::Write as _;

use super::finding::{Finding, FindingLevel};

/// Separator between columns.
const COLUMN_GAP: &str = "  ";

/// Renders the findings as text.
pub fn render(findings: &[Finding]) -> String {
    let mut rows: Vec<&Finding> = findings.iter().collect();
    // Stable sort: findings of one level keep their order.
    rows.sort_by_key(|finding| finding.level);
    let width = |column: fn(&Finding) -> &str| {
        rows.iter()
            .map(|row| column(row).chars().count())
            .max()
            .unwrap_or(0)
    };
    let check = width(|row| row.check);
    let subject = width(|row| &row.subject);
    let mut text = String::new();
    for row in rows {
        let Finding {
            level,
            check: name,
            subject: of,
            message,
            fix,
        } = row;
        _ = writeln!(
            text,
            "{:<7}{COLUMN_GAP}{name:<check$}{COLUMN_GAP}{of:<subject$}{COLUMN_GAP}{message}",
            level.as_str()
        );
        if let Some(fix) = fix {
            _ = writeln!(text, "{:<7}{COLUMN_GAP}fix: {fix}", "");
        }
    }
    _ = writeln!(text, "\n{}", summary_line(findings));
    text
}

/// Returns a line with the number of findings per level.
fn summary_line(findings: &[Finding]) -> String {
    let count = |level: FindingLevel| {
        findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    };
    let several =
        |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
    let counts = [
        (
            FindingLevel::Error,
            several(count(FindingLevel::Error), "error"),
        ),
        (
            FindingLevel::Warning,
            several(count(FindingLevel::Warning), "warning"),
        ),
        (
            FindingLevel::Note,
            several(count(FindingLevel::Note), "note"),
        ),
        (
            FindingLevel::Skipped,
            format!("{} skipped", count(FindingLevel::Skipped)),
        ),
        (FindingLevel::Ok, format!("{} ok", count(FindingLevel::Ok))),
    ];
    let parts = counts
        .into_iter()
        .filter(|(level, _)| count(*level) > 0)
        .map(|(_, text)| text);
    parts.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::FindingBuilder;

    #[test]
    fn findings_are_sorted_by_severity_with_fixes() {
        let findings = [
            FindingBuilder::new("engine.reachable", "worker 1").ok("127.0.0.1:8000 answers"),
            FindingBuilder::new("engine.model", "worker 12").warning("seen", "write this"),
            FindingBuilder::new("b", "worker 1").error("broken", "write that"),
        ];
        assert_eq!(
            render(&findings),
            "error    b                 worker 1   broken\n         fix: write that\n\
             warning  engine.model      worker 12  seen\n         fix: write this\n\
             ok       engine.reachable  worker 1   127.0.0.1:8000 answers\n\n1 error, 1 warning, 1 ok\n"
        );
    }
}
