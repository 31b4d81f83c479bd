//! Which test holds which row: every row has one, or says why not, and whatever is named exists.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::script::{Script, folder};

/// Beside the transcripts.
pub(crate) const FILE: &str = "rows.json";

/// How many rows each section has; a row that is lost is noticed.
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

/// One row.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Row {
    /// Transcripts, and Rust tests as `file.rs::name`.
    test: Option<Tests>,
    /// What else there is to say; why there is no test.
    #[serde(default)]
    note: String,
}

#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum Tests {
    One(String),
    Several(Vec<String>),
}

impl Row {
    fn tests(&self) -> Vec<&str> {
        match &self.test {
            None => Vec::new(),
            Some(Tests::One(test)) => vec![test],
            Some(Tests::Several(tests)) => tests.iter().map(String::as_str).collect(),
        }
    }
}

fn rows() -> BTreeMap<String, Row> {
    serde_json::from_slice(&fs::read(folder().join(FILE)).unwrap())
        .unwrap_or_else(|error| panic!("{FILE}: {error}"))
}

/// What a row of the table lacks.
fn wrong_with(row: &str, found: &Row) -> Vec<String> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let mut wrong = Vec::new();
    if found.test.is_none() && found.note.is_empty() {
        wrong.push(format!("{row}: neither a test nor a reason"));
    }
    for test in found.tests() {
        let exists = match test.split_once("::") {
            None => folder().join(test).is_file(),
            Some((file, name)) => fs::read_to_string(root.join(file)).is_ok_and(|source| {
                source.contains(&format!("fn {name}(")) || source.contains(&format!("fn {name}<"))
            }),
        };
        if !exists {
            wrong.push(format!("{row}: there is no test {test}"));
        }
    }
    wrong
}

#[test]
fn every_row_has_a_test_or_a_reason_and_every_transcript_a_row() {
    let rows = rows();
    let mut wrong: Vec<_> = rows
        .iter()
        .flat_map(|(row, found)| wrong_with(row, found))
        .collect();
    for (section, expected) in SECTIONS {
        let count = rows
            .keys()
            .filter(|row| row.split(' ').next() == Some(section))
            .count();
        if count != expected {
            wrong.push(format!(
                "section {section} has {expected} rows, and the table {count}"
            ));
        }
    }
    let named: BTreeSet<_> = rows.values().flat_map(Row::tests).collect();
    for (name, script) in Script::all() {
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
fn a_row_that_names_what_is_not_there_is_noticed() {
    let row = |text: &str| serde_json::from_str::<Row>(text).unwrap();
    let good = row(
        r#"{"test": "tests/exchanges/table.rs::a_row_that_names_what_is_not_there_is_noticed"}"#,
    );
    assert_eq!(wrong_with("row", &good), [""; 0]);
    assert_eq!(
        wrong_with("row", &row(r#"{"test": null, "note": "because"}"#)),
        [""; 0]
    );
    for bad in [
        r#"{"test": null}"#,
        r#"{"test": "none.json"}"#,
        r#"{"test": ["tests/exchanges/table.rs::nobody"]}"#,
    ] {
        assert_eq!(wrong_with("row", &row(bad)).len(), 1, "{bad}");
    }
    let gone: PathBuf = folder().join("none.json");
    assert!(!gone.exists());
}
