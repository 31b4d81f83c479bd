//! Golden cases, produced by running the router that defines the field's behaviour. Every case is run; what is not run or
//! differs on purpose is named in a table beside its test, with the reason, and a name in a table that no longer applies
//! fails. Unknown fields and kinds fail as well.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::collections::BTreeSet;

use serde::de::DeserializeOwned;

#[path = "golden/blocks.rs"]
mod blocks;
#[path = "golden/index_ops.rs"]
mod index_ops;
#[path = "golden/queue.rs"]
mod queue;
#[path = "golden/selection.rs"]
mod selection;
#[path = "golden/sequences.rs"]
mod sequences;

#[derive(serde::Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    case_count: usize,
    cases: Vec<serde_json::Value>,
    #[serde(rename = "notes")]
    _notes: serde_json::Value,
    #[serde(rename = "source")]
    _source: String,
}

/// The cases of a file.
fn cases<T: DeserializeOwned>(text: &str) -> Vec<T> {
    let file: File = serde_json::from_str(text).unwrap();
    assert_eq!(file.cases.len(), file.case_count);
    file.cases
        .into_iter()
        .map(|case| {
            let shown = case.to_string();
            serde_json::from_value(case).unwrap_or_else(|problem| panic!("{problem} in {shown}"))
        })
        .collect()
}

/// The reason why a case is not run as it stands, if it is in the table.
fn excused(table: &[(&'static str, &'static str)], case: &str) -> Option<&'static str> {
    table.iter().find(|(name, _)| *name == case).map(|(_, reason)| *reason)
}

/// Fails if a table names a case that does not exist.
fn check_table<'a>(table: &[(&'static str, &'static str)], names: impl IntoIterator<Item = &'a str>) {
    let names: BTreeSet<&str> = names.into_iter().collect();
    for (name, _) in table {
        assert!(names.contains(name), "no case is called {name:?}");
    }
}
