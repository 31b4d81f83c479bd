//! The load program with counts that are too small to measure speed. Each sweep must drive all
//! sides equally, write a complete report, and leave no process.

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;

use serde_json::Value;
use warmroute_testbed::programs::example_program;

use crate::support::model_file;

/// Counts the processes whose environment contains the directory for temporary files.
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
    let temporary = tempfile::tempdir().unwrap();
    let json = temporary.path().join("load.json");
    let mut command = Command::new(example_program("load").unwrap());
    command
        .args(args)
        .arg("--json")
        .arg(&json)
        .env("TMPDIR", temporary.path())
        .env("WARMROUTE_MODEL_DIR", model_file(""));
    let output = command.output().unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(
        processes(temporary.path().to_str().unwrap()),
        0,
        "processes are still running"
    );
    serde_json::from_slice(&fs::read(json).unwrap()).unwrap()
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn sweeps_drive_all_sides_equally_and_exit() {
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
        BTreeSet::from(["body", "chunks", "prompt", "ranks", "streams", "texts"])
    );
    for sides in points.chunks(3) {
        assert_sides_are_comparable(sides);
    }
    assert!(rows.len() >= 3, "{rows:?}");
    for row in rows {
        for field in ["measure", "unit", "peer", "ours", "ratio", "goal", "met"] {
            assert!(row.get(field).is_some(), "{field}: {row}");
        }
    }
}

/// Asserts that the figures of the three sides at one point of a sweep are comparable.
fn assert_sides_are_comparable(sides: &[&Value]) {
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
    // The number of chunks in which Envoy reads a response varies, and so does the number of pieces
    // of a body in full duplex.
    let messages = numbers("messages");
    let is_streamed = sides[0]["sweep"] == "texts";
    if sides[0]["at"]["chunks"].is_null() {
        // One more message per request exceeds this tolerance.
        let tolerance = if is_streamed { 0.5 } else { 0.0 };
        assert!(
            messages[0] == 0.0 && (messages[1] - messages[2]).abs() <= tolerance,
            "the servers receive different messages: {sides:?}"
        );
    }
    assert!(messages[1] >= 4.0, "{sides:?}");
}
