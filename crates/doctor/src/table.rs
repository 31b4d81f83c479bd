//! Terminal form of findings: one section per subject area, with problems first. Equal results of
//! several subjects share one line. The fix of a problem is printed below it, with a link.

use std::collections::HashMap;
use std::fmt::Write as _;

use anstyle::{AnsiColor, Style};
use warmroute_settings::format_count;

use super::finding::{Finding, FindingLevel};

/// Sections by the first part of a check's name, in printed order, with their headings.
const SECTIONS: [(&str, &str); 8] = [
    ("config", "configuration"),
    ("host", "this machine"),
    ("warmroute", "warmroute"),
    ("kubernetes", "Kubernetes"),
    ("engine", "engines"),
    ("events", "KV events"),
    ("canary", "canary requests"),
    ("envoy", "Envoy"),
];
/// Page with one entry per check.
const TROUBLESHOOTING: &str = "docs/troubleshooting.md";
/// Width of the column with the level.
const LEVEL_WIDTH: usize = 8;

/// Renders the findings as text with ANSI colours. Equal results share one line unless `verbose`.
pub fn render(findings: &[Finding], verbose: bool) -> String {
    let mut text = String::new();
    for (prefix, heading) in SECTIONS {
        let section: Vec<&Finding> = findings
            .iter()
            .filter(|finding| section_of(finding) == prefix)
            .collect();
        if !section.is_empty() {
            let bold = Style::new().bold();
            _ = writeln!(text, "{bold}{heading}{bold:#}");
            write_section(&mut text, &section, verbose);
            text.push('\n');
        }
    }
    _ = writeln!(text, "{}", summary_line(findings));
    text
}

fn section_of(finding: &Finding) -> &str {
    finding.check.split('.').next().unwrap_or_default()
}

fn write_section(text: &mut String, section: &[&Finding], verbose: bool) {
    let mut lines = fold_findings(section, verbose);
    // Stable sort: findings of one level keep their order.
    lines.sort_by_key(|line| line.level);
    let checks = lines.iter().map(|line| line.check.len());
    let check_width = checks.max().unwrap_or(0);
    for line in lines {
        let color = level_style(line.level);
        let level = line.level.as_str();
        _ = writeln!(
            text,
            "  {color}{level:<LEVEL_WIDTH$}{color:#} {:<check_width$}  {}",
            line.check, line.message
        );
        if let Some(fix) = line.fix {
            let indent = LEVEL_WIDTH + 3;
            _ = writeln!(text, "{:indent$}fix: {fix}", "");
            _ = writeln!(
                text,
                "{:indent$}see {TROUBLESHOOTING}#{}",
                "",
                anchor(line.check)
            );
        }
    }
}

/// Returns the anchor of a check in the documentation.
fn anchor(check: &str) -> String {
    check.replace('.', "")
}

fn level_style(level: FindingLevel) -> Style {
    match level {
        FindingLevel::Error => AnsiColor::Red.on_default().bold(),
        FindingLevel::Warning => AnsiColor::Yellow.on_default().bold(),
        FindingLevel::Note => AnsiColor::Cyan.on_default(),
        FindingLevel::Skipped => Style::new().dimmed(),
        FindingLevel::Ok => AnsiColor::Green.on_default(),
    }
}

/// One printed result.
struct ResultLine<'a> {
    level: FindingLevel,
    check: &'static str,
    message: String,
    fix: Option<&'a str>,
}

/// Returns the lines of a section in the order of the findings.
fn fold_findings<'a>(section: &[&'a Finding], verbose: bool) -> Vec<ResultLine<'a>> {
    group_equal(section, verbose)
        .into_iter()
        .map(|group| {
            let first = group[0];
            let message = if group.len() == 1 {
                format!("{}: {}", first.subject, first.message)
            } else {
                folded_message(&group, section)
            };
            ResultLine {
                level: first.level,
                check: first.check,
                message,
                fix: first.fix.as_deref(),
            }
        })
        .collect()
}

/// Groups equal results in the order of their first finding. If `verbose`, each finding is a group.
fn group_equal<'a>(section: &[&'a Finding], verbose: bool) -> Vec<Vec<&'a Finding>> {
    let mut groups: Vec<Vec<&Finding>> = Vec::new();
    let mut positions = HashMap::new();
    for finding in section {
        // Problems with one cause have one message. Passed checks differ in their values.
        let message = match finding.level {
            FindingLevel::Ok => "",
            _ => finding.message.as_str(),
        };
        let next = groups.len();
        let position = *positions
            .entry((finding.level, finding.check, message, &finding.fix))
            .or_insert(next);
        match groups.get_mut(position).filter(|_| !verbose) {
            Some(group) => group.push(finding),
            None => groups.push(vec![finding]),
        }
    }
    groups
}

/// Returns the message for several equal results: their number among all results of the check, and
/// their message if they have the same one.
fn folded_message(equal: &[&Finding], section: &[&Finding]) -> String {
    let first = equal[0];
    let all = section
        .iter()
        .filter(|other| other.check == first.check)
        .count();
    let count = if equal.len() == all {
        format!("all {all}")
    } else {
        format!("{} of {all}", equal.len())
    };
    let has_one_message = equal.iter().all(|finding| finding.message == first.message);
    if has_one_message {
        format!("{count} ({}, ..): {}", first.subject, first.message)
    } else {
        format!("{count} ({}, ..)", first.subject)
    }
}

/// Returns a line with the number of findings per level.
fn summary_line(findings: &[Finding]) -> String {
    use FindingLevel::{Error, Note, Ok, Skipped, Warning};
    let parts = [Error, Warning, Note, Skipped, Ok].map(|level| {
        let count = findings
            .iter()
            .filter(|finding| finding.level == level)
            .count();
        let text = match level {
            Skipped | Ok => format!("{count} {}", level.as_str()),
            Error | Warning | Note => format_count(count, level.as_str()),
        };
        (count > 0).then_some(text)
    });
    let parts: Vec<String> = parts.into_iter().flatten().collect();
    parts.join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::finding::{CheckVerdict, error, ok, warning};

    /// Renders without colours.
    fn plain(findings: &[Finding], verbose: bool) -> String {
        anstream::adapter::strip_str(&render(findings, verbose)).to_string()
    }

    #[test]
    fn problems_come_first_in_their_section() {
        let findings = [
            ok("it is installed").about("envoy.filter", "Envoy"),
            ok("127.0.0.1:8000 answers").about("engine.reachable", "worker 1"),
            warning("seen", "write this").about("engine.model", "worker 12"),
            error("broken", "write that").about("config.read", "w.yaml"),
        ];
        let expected = "\
configuration
  error    config.read  w.yaml: broken
           fix: write that
           see docs/troubleshooting.md#configread

engines
  warning  engine.model      worker 12: seen
           fix: write this
           see docs/troubleshooting.md#enginemodel
  ok       engine.reachable  worker 1: 127.0.0.1:8000 answers

Envoy
  ok       envoy.filter  Envoy: it is installed

1 error, 1 warning, 2 ok
";
        assert_eq!(plain(&findings, false), expected);
    }

    #[test]
    fn equal_results_share_a_line() {
        let of = |worker: &str, verdict: CheckVerdict| verdict.about("engine.model", worker);
        let findings = [
            of("worker 1", ok("serves m")),
            of("worker 2", error("refused", "start it")),
            of("worker 3", ok("serves m")),
            of("worker 4", error("refused", "start it")),
            of("worker 5", error("refused", "start another")),
            ok("1 ms").about("engine.clock", "worker 1"),
            ok("2 ms").about("engine.clock", "worker 3"),
        ];
        let expected = "\
engines
  error    engine.model  2 of 5 (worker 2, ..): refused
           fix: start it
           see docs/troubleshooting.md#enginemodel
  error    engine.model  worker 5: refused
           fix: start another
           see docs/troubleshooting.md#enginemodel
  ok       engine.model  2 of 5 (worker 1, ..): serves m
  ok       engine.clock  all 2 (worker 1, ..)

3 errors, 4 ok
";
        assert_eq!(plain(&findings, false), expected);
        let verbose = plain(&findings, true);
        assert_eq!(verbose.matches("fix: start it").count(), 2, "{verbose}");
        assert!(verbose.contains("worker 3: 2 ms"), "{verbose}");
    }

    #[test]
    fn every_section_has_a_heading() {
        let findings = [ok("fine").about("envoy.filter", "Envoy")];
        assert_eq!(
            plain(&findings, false),
            "Envoy\n  ok       envoy.filter  Envoy: fine\n\n1 ok\n"
        );
    }
}
