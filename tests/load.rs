//! The load program as its user meets it, with counts so small that it says nothing about speed: that all sides of every
//! sweep are driven alike, that what it writes is whole, and that nothing is left of it.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

#[expect(dead_code, reason = "it is here for its tests")]
#[path = "../examples/load/bodies.rs"]
mod bodies;
#[path = "../examples/support/mod.rs"]
mod support;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde_json::Value;

fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("load");
    // A whole `cargo test` builds it first; a run of this test alone does not.
    assert!(
        program.exists(),
        "{} is missing: cargo build --examples",
        program.display()
    );
    program
}

/// Processes that have the directory for temporary files in their environment.
fn processes(temporary: &str) -> usize {
    let mark = format!("TMPDIR={temporary}");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let environments =
        processes.filter_map(|process| fs::read(process.path().join("environ")).ok());
    environments
        .filter(|all| {
            all.split(|&byte| byte == 0)
                .any(|variable| variable == mark.as_bytes())
        })
        .count()
}

fn run(args: &[&str]) -> Vec<Value> {
    let temporary = tempfile::Builder::new()
        .prefix("load-test-")
        .tempdir()
        .unwrap();
    let json = temporary.path().join("load.json");
    let mut command = Command::new(program());
    command
        .args(args)
        .arg("--json")
        .arg(&json)
        .env("TMPDIR", temporary.path());
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(
        processes(temporary.path().to_str().unwrap()),
        0,
        "processes are left"
    );
    serde_json::from_slice(&fs::read(json).unwrap()).unwrap()
}

#[test]
fn every_sweep_drives_all_sides_alike_and_leaves_nothing() {
    let written = run(&[
        "--short",
        "--rounds",
        "1",
        "--seconds",
        "0.3",
        "--requests",
        "24",
    ]);
    let (points, rows): (Vec<&Value>, Vec<&Value>) =
        written.iter().partition(|entry| entry["sweep"].is_string());
    let sweeps: BTreeSet<_> = points
        .iter()
        .map(|point| point["sweep"].as_str().unwrap())
        .collect();
    assert_eq!(
        sweeps,
        BTreeSet::from(["body", "chunks", "prompt", "ranks", "streams"])
    );
    for sides in points.chunks(3) {
        let names: Vec<_> = sides
            .iter()
            .map(|side| side["side"].as_str().unwrap())
            .collect();
        assert_eq!(names, ["Envoy alone", "bare ext_proc", "warmroute"]);
        let numbers = |field: &str| {
            sides
                .iter()
                .map(|side| side[field].as_f64().unwrap())
                .collect::<Vec<_>>()
        };
        for field in [
            "requests",
            "per_second",
            "p50_ms",
            "cpu_envoy",
            "cpu_client",
            "cpu_engines",
        ] {
            assert!(
                numbers(field).iter().all(|number| *number > 0.0),
                "{field}: {sides:?}"
            );
        }
        for field in ["cpu_server", "rss_server_mib"] {
            assert!(
                numbers(field)[0] == 0.0 && numbers(field)[1] > 0.0 && numbers(field)[2] > 0.0,
                "{sides:?}"
            );
        }
        // In how many pieces Envoy reads an answer depends on the moment.
        let messages = numbers("messages");
        if sides[0]["at"]["chunks"].is_null() {
            assert_eq!(
                (messages[0], messages[1]),
                (0.0, messages[2]),
                "both servers hear the same: {sides:?}"
            );
        }
        assert!(messages[1] >= 4.0, "{sides:?}");
    }
    assert!(rows.len() >= 3, "{rows:?}");
    for row in rows {
        for field in ["measure", "unit", "peer", "ours", "ratio", "goal", "met"] {
            assert!(row.get(field).is_some(), "{field}: {row}");
        }
    }
}
