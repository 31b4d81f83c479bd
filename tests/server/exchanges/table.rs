//! Coverage of the rows: every row has a test or a reason for its absence, and every named test
//! exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::exchanges::script::{ExchangeScript, directory};

/// Name of the table file next to the transcripts.
pub(crate) const FILE: &str = "rows.json";

/// Number of rows in each section, so that a lost row is noticed.
const SECTIONS: [(&str, usize); 9] = [
    ("6.1", 15),
    ("6.2", 7),
    ("6.3", 11),
    ("6.4", 7),
    ("6.5", 28),
    ("6.6", 23),
    ("E2.1", 9),
    ("E2.2", 7),
    ("E2.3", 16),
];

/// One row of the table.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct TableRow {
    /// Names of transcripts, and of Rust tests as `file.rs::name`.
    test: Option<CoveringTests>,
    /// Remark, or the reason why there is no test.
    #[serde(default)]
    note: String,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum CoveringTests {
    One(String),
    Several(Vec<String>),
}

impl TableRow {
    fn tests(&self) -> Vec<&str> {
        match &self.test {
            None => Vec::new(),
            Some(CoveringTests::One(test)) => vec![test],
            Some(CoveringTests::Several(tests)) => tests.iter().map(String::as_str).collect(),
        }
    }
}

fn rows() -> BTreeMap<String, TableRow> {
    serde_json::from_slice(&fs::read(directory().join(FILE)).unwrap())
        .unwrap_or_else(|error| panic!("{FILE}: {error}"))
}

/// Returns the errors of one row.
fn row_errors(row: &str, found: &TableRow) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    if found.test.is_none() && found.note.is_empty() {
        wrong.push(format!("{row}: neither a test nor a reason"));
    }
    for test in found.tests() {
        let exists = match test.split_once("::") {
            None => directory().join(test).is_file(),
            Some((file, name)) => fs::read_to_string(root.join(file)).is_ok_and(|source| {
                source.contains(&format!("fn {name}(")) || source.contains(&format!("fn {name}<"))
            }),
        };
        if !exists {
            wrong.push(format!("{row}: the test {test} does not exist"));
        }
    }
    wrong
}

#[test]
fn rows_and_transcripts_match() {
    let rows = rows();
    let mut wrong: Vec<_> = rows
        .iter()
        .flat_map(|(row, found)| row_errors(row, found))
        .collect();
    for (section, expected) in SECTIONS {
        let count = rows
            .keys()
            .filter(|row| row.split(' ').next() == Some(section))
            .count();
        if count != expected {
            wrong.push(format!(
                "section {section} has {count} rows, not {expected}"
            ));
        }
    }
    let named: BTreeSet<_> = rows.values().flat_map(TableRow::tests).collect();
    for (name, script) in ExchangeScript::all() {
        if !named.contains(name.as_str()) {
            wrong.push(format!("no row names {name}"));
        }
        match rows.get(&script.row) {
            Some(row) if row.tests().contains(&name.as_str()) => {}
            Some(_) => wrong.push(format!("{name}: the row {:?} does not name it", script.row)),
            None => wrong.push(format!("{name}: there is no row {:?}", script.row)),
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn unknown_test_in_row_is_reported() {
    let row = |text: &str| serde_json::from_str::<TableRow>(text).unwrap();
    let good =
        row(r#"{"test": "tests/server/exchanges/table.rs::unknown_test_in_row_is_reported"}"#);
    assert_eq!(row_errors("row", &good), [""; 0]);
    assert_eq!(
        row_errors("row", &row(r#"{"test": null, "note": "because"}"#)),
        [""; 0]
    );
    for bad in [
        r#"{"test": null}"#,
        r#"{"test": "none.json"}"#,
        r#"{"test": ["tests/server/exchanges/table.rs::unknown"]}"#,
    ] {
        assert_eq!(row_errors("row", &row(bad)).len(), 1, "{bad}");
    }
    let gone: PathBuf = directory().join("none.json");
    assert!(!gone.exists());
}
