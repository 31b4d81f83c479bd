//! Findings as text: the worst first, a row each, and under what is wrong the words that mend it.

use std::fmt::Write as _;

use super::finding::{Finding, Level};

/// Between two columns.
const GAP: &str = "  ";

/// The findings for people.
pub fn render(findings: &[Finding]) -> String {
    let mut rows: Vec<&Finding> = findings.iter().collect();
    // Of one level they stay as they were looked at.
    rows.sort_by_key(|finding| finding.level);
    let width = |column: fn(&Finding) -> &str| {
        rows.iter()
            .map(|row| column(row).chars().count())
            .max()
            .unwrap_or(0)
    };
    let (check, subject) = (width(|row| row.check), width(|row| &row.subject));
    let mut text = String::new();
    for row in rows {
        let Finding {
            level,
            check: name,
            subject: of,
            seen,
            mend,
        } = row;
        _ = writeln!(
            text,
            "{:<7}{GAP}{name:<check$}{GAP}{of:<subject$}{GAP}{seen}",
            level.as_str()
        );
        if let Some(mend) = mend {
            _ = writeln!(text, "{:<7}{GAP}mend: {mend}", "");
        }
    }
    _ = writeln!(text, "\n{}", sum(findings));
    text
}

/// How many of each level, in a sentence.
fn sum(findings: &[Finding]) -> String {
    let count = |level: Level| {
        findings
            .iter()
            .filter(|finding| finding.level == level)
            .count()
    };
    let several =
        |count: usize, name: &str| format!("{count} {name}{}", if count == 1 { "" } else { "s" });
    let counts = [
        (Level::Error, several(count(Level::Error), "error")),
        (Level::Warning, several(count(Level::Warning), "warning")),
        (Level::Note, several(count(Level::Note), "note")),
        (
            Level::Skipped,
            format!("{} not looked at", count(Level::Skipped)),
        ),
        (Level::Ok, format!("{} ok", count(Level::Ok))),
    ];
    let said = counts
        .into_iter()
        .filter(|(level, _)| count(*level) > 0)
        .map(|(_, text)| text);
    said.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cmd::doctor::finding::At;

    #[test]
    fn the_worst_stands_first_with_its_mend_beneath() {
        let findings = [
            At::new("engine.reachable", "worker 1").ok("127.0.0.1:8000 answers"),
            At::new("engine.model", "worker 12").warning("seen", "write this"),
            At::new("b", "worker 1").error("broken", "mend it"),
        ];
        assert_eq!(
            render(&findings),
            "error    b                 worker 1   broken\n         mend: mend it\n\
             warning  engine.model      worker 12  seen\n         mend: write this\n\
             ok       engine.reachable  worker 1   127.0.0.1:8000 answers\n\n1 error, 1 warning, 1 ok\n"
        );
    }
}
