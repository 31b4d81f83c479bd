//! Golden cases, produced by running the router that defines the field's behaviour. Every case of every file is run. Where
//! we mean to differ, a table beside the format's check names the case, the place in it, what we answer there and why; all
//! else must be equal. A name in a table that no longer applies fails, and so do fields, kinds and files that nobody knows.
//!
//! `WARMROUTE_GOLDEN_DIR` names a folder whose JSON files are run instead of ours.

#![expect(clippy::unwrap_used, reason = "helpers of tests are tests")]

use std::fs;
use std::path::{Path, PathBuf};

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

/// What each file holds, by its name.
const FORMATS: [(&str, fn(&str) -> Report); 6] = [
    ("block_hashes.json", blocks::run),
    ("zmq_events.json", zmq::run),
    ("index_ops.json", index_ops::run),
    ("selection.json", selection::run),
    ("sequences.json", sequences::run),
    ("queue.json", queue::run),
];

fn json_files(folder: &Path) -> Vec<PathBuf> {
    let mut files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    files.sort();
    assert!(!files.is_empty(), "{} holds no golden files", folder.display());
    files
}

/// Runs one file; everything that is wrong with it.
fn run_file(path: &Path, ours: bool) -> Vec<String> {
    let name = path.file_name().unwrap().to_str().unwrap();
    let Some((_, run)) = FORMATS.iter().find(|(known, _)| *known == name) else {
        return vec![format!("{name}: nobody knows what is in a file of this name")];
    };
    let report = run(&fs::read_to_string(path).unwrap());
    println!("{name}: {} cases run, {} passed, {} deviating", report.run, report.passed, report.deviating());
    for deviation in &report.deviations {
        println!("  differs on purpose: {deviation}");
    }
    // A table names cases of our files; elsewhere they need not occur.
    let absent = report.absent.iter().filter(|_| ours);
    let absent = absent.map(|case| format!("no case is called {case:?}, but the table of deviations names it"));
    let wrong = report.failures.iter().cloned().chain(absent);
    wrong.map(|text| format!("{name}: {text}")).collect()
}

#[test]
#[expect(clippy::disallowed_methods, reason = "the folder to run is chosen from outside")]
fn every_case_gives_the_answer_of_the_field_or_is_named_with_a_reason() {
    let elsewhere = std::env::var_os("WARMROUTE_GOLDEN_DIR").map(PathBuf::from);
    let ours = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
    let files = json_files(elsewhere.as_deref().unwrap_or(&ours));
    if elsewhere.is_none() {
        for (name, _) in FORMATS {
            assert!(files.contains(&ours.join(name)), "{name} is missing");
        }
    }
    let wrong: Vec<_> = files.iter().flat_map(|path| run_file(path, elsewhere.is_none())).collect();
    assert!(wrong.is_empty(), "{} mistakes:\n{}", wrong.len(), wrong.join("\n"));
}
