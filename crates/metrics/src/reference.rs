//! The page docs/metrics.md, generated from the definitions of the metrics.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::path::Path;

use crate::SUBSYSTEMS;
use crate::process_collector::{CPU, GAUGES};

/// Definition of a metric.
pub(crate) struct MetricRow {
    pub(crate) name: &'static str,
    /// Type of the field, as written in the source.
    pub(crate) type_text: &'static str,
    pub(crate) help: &'static str,
}

/// Metrics of one subsystem.
pub(crate) struct SubsystemRows {
    pub(crate) summary: &'static str,
    pub(crate) rows: &'static [MetricRow],
}

const HEAD: &str = "# Metrics reference

`listeners.admin.address` serves the metrics at `/metrics`, as Prometheus text, or as OpenMetrics if the client
prefers it. All names begin with `warmroute_`, except those of the operating system. This page is generated from the
definitions in `crates/metrics`.
";

/// Returns the fields of each label set, from the source of the label sets.
fn label_sets() -> BTreeMap<String, Vec<String>> {
    let mut sets: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut current: Option<String> = None;
    for line in include_str!("labels.rs").lines() {
        if let Some(rest) = line.strip_prefix("pub struct ") {
            let name = rest.trim_end_matches([' ', '{', ';']).to_owned();
            sets.insert(name.clone(), Vec::new());
            current = Some(name);
        } else if line == "}" {
            current = None;
        } else if let (Some(name), Some(field)) = (&current, line.strip_prefix("    pub "))
            && let Some((field, type_name)) = field.split_once(": ")
        {
            // A label set in a label set is flattened.
            let inner = sets.get(type_name.trim_end_matches(',')).cloned();
            let labels = inner.unwrap_or_else(|| vec![field.to_owned()]);
            sets.entry(name.clone()).or_default().extend(labels);
        }
    }
    sets
}

/// Returns kind and labels of a metric type.
fn describe_type(type_text: &str, sets: &BTreeMap<String, Vec<String>>) -> (&'static str, String) {
    let kind = if type_text.contains("Counter") {
        "counter"
    } else if type_text.contains("Histogram") {
        "histogram"
    } else {
        "gauge"
    };
    let set = type_text
        .split_once('<')
        .map(|(_, parameters)| parameters.split([',', '>', '<']).next().unwrap_or_default())
        .unwrap_or_default()
        .trim();
    let labels = sets.get(set).map(|fields| {
        let fields: Vec<String> = fields.iter().map(|field| format!("`{field}`")).collect();
        fields.join(", ")
    });
    (kind, labels.unwrap_or_default())
}

fn render() -> String {
    let sets = label_sets();
    let mut text = HEAD.to_owned();
    for subsystem in SUBSYSTEMS {
        let summary = subsystem.summary.trim().trim_end_matches('.');
        let title = summary.strip_prefix("Metrics of ").unwrap_or(summary);
        let title = title.strip_prefix("the ").unwrap_or(title);
        let mut letters = title.chars();
        let first = letters.next().map(|letter| letter.to_ascii_uppercase());
        let title: String = first.into_iter().chain(letters).collect();
        _ = writeln!(text, "\n## {title}\n");
        text.push_str("| metric | type | labels | meaning |\n|---|---|---|---|\n");
        for row in subsystem.rows {
            let (kind, labels) = describe_type(row.type_text, &sets);
            let suffix = if kind == "counter" { "_total" } else { "" };
            let help = row.help.trim().replace('|', "\\|");
            _ = writeln!(
                text,
                "| `warmroute_{}{suffix}` | {kind} | {labels} | {help} |",
                row.name
            );
        }
    }
    text.push_str(&render_process_metrics());
    text
}

/// Returns the section of the metrics that the operating system provides.
fn render_process_metrics() -> String {
    let mut text =
        "\n## Operating system\n\nOn Linux, the page has these metrics, named as in the Prometheus client libraries:\n\n\
        | metric | type | meaning |\n|---|---|---|\n"
            .to_owned();
    let (name, help) = CPU;
    _ = writeln!(text, "| `process_{name}_total` | counter | {help} |");
    for (name, help) in GAUGES {
        _ = writeln!(text, "| `process_{name}` | gauge | {help} |");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[expect(
        clippy::disallowed_methods,
        reason = "the environment enables rewriting of the page"
    )]
    fn metrics_page_is_up_to_date() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/metrics.md");
        let text = render();
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &text).unwrap();
        }
        let found = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            found == text,
            "docs/metrics.md is out of date; UPDATE_GOLDEN=1 cargo test -p warmroute-metrics rewrites it"
        );
    }

    #[test]
    fn label_sets_are_found() {
        let sets = label_sets();
        assert_eq!(sets["RequestLabels"], ["model", "mode", "role"]);
        assert!(sets.len() > 10, "{sets:?}");
    }
}
