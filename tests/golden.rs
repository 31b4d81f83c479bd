//! Golden cases, produced by running the router that defines the field's behaviour. Every case of every file is run. Where
//! we mean to differ, a table beside the format's check names the case, the place in it, what we answer there and why; all
//! else must be equal. A name in a table that no longer applies fails, and so do fields, kinds and files that nobody knows.
//!
//! `WARMROUTE_GOLDEN_DIR` names a folder whose JSON files are run instead of ours.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

#[path = "golden/blocks.rs"]
mod blocks;
#[path = "golden/frame.rs"]
mod frame;
#[path = "golden/index_ops.rs"]
mod index_ops;
#[path = "golden/queue.rs"]
mod queue;
#[path = "golden/selection.rs"]
mod selection;
#[path = "golden/sequences.rs"]
mod sequences;
#[path = "golden/zmq.rs"]
mod zmq;

use frame::Report;

/// The name of a file, and how what it holds is run.
type Format = (&'static str, fn(&str) -> Report);

const FORMATS: [Format; 6] = [
    ("block_hashes.json", blocks::run),
    ("zmq_events.json", zmq::run),
    ("index_ops.json", index_ops::run),
    ("selection.json", selection::run),
    ("sequences.json", sequences::run),
    ("queue.json", queue::run),
];

fn json_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .collect();
    files.retain(|path| {
        path.extension()
            .is_some_and(|extension| extension == "json")
    });
    files.sort();
    assert!(
        !files.is_empty(),
        "{} holds no golden files",
        folder.display()
    );
    files
}

/// Runs one file; `told` hears what was run. Everything that is wrong with it.
fn run_file(path: &Path, ours: bool, told: impl Fn(String)) -> Vec<String> {
    let name = path.file_name().unwrap().to_str().unwrap();
    let Some((_, run)) = FORMATS.iter().find(|(known, _)| *known == name) else {
        return vec![format!(
            "{name}: nobody knows what is in a file of this name"
        )];
    };
    let report = run(&fs::read_to_string(path).unwrap());
    told(format!(
        "{name}: {} cases run, {} passed, {} deviating",
        report.run,
        report.passed,
        report.deviating()
    ));
    for deviation in &report.deviations {
        told(format!("  differs on purpose: {deviation}"));
    }
    // A table names cases of our files; elsewhere they need not occur.
    let absent = report.absent.iter().filter(|_| ours);
    let absent = absent
        .map(|case| format!("no case is called {case:?}, but the table of deviations names it"));
    let wrong = report.failures.iter().cloned().chain(absent);
    wrong.map(|text| format!("{name}: {text}")).collect()
}

#[test]
#[expect(
    clippy::disallowed_methods,
    reason = "the folder to run is chosen from outside"
)]
fn every_case_gives_the_answer_of_the_field_or_is_named_with_a_reason() {
    let elsewhere = std::env::var_os("WARMROUTE_GOLDEN_DIR").map(PathBuf::from);
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let files = json_files(elsewhere.as_deref().unwrap_or(&ours));
    if elsewhere.is_none() {
        for (name, _) in FORMATS {
            assert!(files.contains(&ours.join(name)), "{name} is missing");
        }
    }
    let told = |line: String| println!("{line}");
    let wrong: Vec<_> = files
        .iter()
        .flat_map(|path| run_file(path, elsewhere.is_none(), told))
        .collect();
    assert!(
        wrong.is_empty(),
        "{} mistakes:\n{}",
        wrong.len(),
        wrong.join("\n")
    );
}

/// What is in the files and not compared, with the reason. All else is, down to the last field.
const NOT_COMPARED: [(&str, &str); 10] = [
    ("message", "prose"),
    ("note", "prose"),
    ("decode_error", "prose"),
    (
        "production_default_policy",
        "another policy of the original; we follow the one that honours overrides",
    ),
    (
        "production_default_policy_with_conditional_disagg",
        "the same",
    ),
    (
        "overlap_concurrent_index",
        "another index of the original; where the two differ it is the wrong one",
    ),
    ("session_id", "events keep no session"),
    ("frequencies", "always empty in the original"),
    (
        "device_last_matched_block_hash",
        "we walk all tiers in one trie, so no query starts at a block's name",
    ),
    ("next_last_hash", "the same"),
];

/// Every way to put one field more into a value.
fn with_one_more_field(value: &Value) -> Vec<Value> {
    let mut grown = Vec::new();
    match value {
        Value::Object(fields) => {
            let mut more = fields.clone();
            more.insert("surplus".to_owned(), Value::from(1));
            grown.push(Value::Object(more));
            for (key, inner) in fields
                .iter()
                .filter(|(key, _)| !NOT_COMPARED.iter().any(|(known, _)| known == key))
            {
                grown.extend(with_one_more_field(inner).into_iter().map(|inner| {
                    let mut fields = fields.clone();
                    fields.insert(key.clone(), inner);
                    Value::Object(fields)
                }));
            }
        }
        Value::Array(items) => {
            for (at, inner) in items.iter().enumerate() {
                grown.extend(with_one_more_field(inner).into_iter().map(|inner| {
                    let mut items = items.clone();
                    items[at] = inner;
                    Value::Array(items)
                }));
            }
        }
        _ => {}
    }
    grown
}

#[test]
fn a_field_that_nobody_knows_fails_wherever_it_stands() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let (mut tried, mut silent) = (0, Vec::new());
    for (name, run) in FORMATS {
        let mut file: Value =
            serde_json::from_slice(&fs::read(folder.join(name)).unwrap()).unwrap();
        let cases = std::mem::take(file["cases"].as_array_mut().unwrap());
        file["case_count"] = 1.into();
        for case in cases {
            for grown in with_one_more_field(&case) {
                file["cases"] = Value::Array(vec![grown]);
                tried += 1;
                if run(&file.to_string()).failures.is_empty() {
                    silent.push(format!("{name}: {}", file["cases"]));
                }
            }
        }
    }
    assert!(tried > 2000, "only {tried} places");
    assert!(
        silent.is_empty(),
        "{} fields are not looked at:\n{}",
        silent.len(),
        silent.join("\n")
    );
}

#[test]
fn a_changed_answer_and_a_file_of_another_name_fail() {
    let text =
        fs::read_to_string(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/queue.json"))
            .unwrap();
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str, text: &str| {
        fs::write(folder.path().join(name), text).unwrap();
        run_file(&folder.path().join(name), false, drop)
    };
    assert_eq!(file("queue.json", &text), [""; 0]);
    let changed = file(
        "queue.json",
        &text.replacen(r#""left_pending":0"#, r#""left_pending":1"#, 1),
    );
    assert_eq!(changed.len(), 1, "{changed:?}");
    let cut = file("queue.json", &text[..text.len() / 2]);
    assert!(cut[0].contains("cannot be read"), "{cut:?}");
    assert_eq!(
        file("other.json", &text),
        ["other.json: nobody knows what is in a file of this name"]
    );
}
