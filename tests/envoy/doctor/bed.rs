//! Test bed with a simulated engine, a matching configuration, and the doctor command.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};
use warmroute_testbed::child_process::ChildProcess;
use warmroute_testbed::deployment::MODEL;
use warmroute_testbed::ports::{self, FreePort, ReadyCheck};
use warmroute_testbed::programs::example_program;

use crate::support::model_file;

const START: Duration = Duration::from_secs(60);

/// Options of the simulated engine.
#[derive(Clone, Debug, Default)]
pub(crate) struct EnginePlan {
    /// Additional arguments.
    pub(crate) args: Vec<String>,
    /// The engine publishes no events.
    pub(crate) without_events: bool,
    /// The event publisher connects instead of binding.
    pub(crate) connects: bool,
}

impl EnginePlan {
    pub(crate) fn with(args: &[&str]) -> Self {
        Self {
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            ..Self::default()
        }
    }

    /// Returns options for an engine without events.
    pub(crate) fn without_events() -> Self {
        Self {
            without_events: true,
            ..Self::default()
        }
    }

    /// Returns options for an engine whose publisher connects.
    pub(crate) fn connecting() -> Self {
        Self {
            connects: true,
            ..Self::default()
        }
    }
}

/// A running engine with its addresses and the directory of its configuration.
pub(crate) struct DoctorBed {
    _child: ChildProcess,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) address: SocketAddr,
    pub(crate) events: u16,
    pub(crate) replay: u16,
}

/// Returns the first of two consecutive free ports, one for each rank.
fn pair() -> u16 {
    loop {
        let first = FreePort::find().unwrap();
        let second = FreePort::find().unwrap();
        if first.number() + 1 == second.number() {
            return first.release();
        }
    }
}

impl DoctorBed {
    pub(crate) async fn start(plan: EnginePlan) -> Self {
        let binary = example_program("engine_sim").unwrap();
        let dir = tempfile::tempdir().unwrap();
        let events = pair();
        let replay = pair();
        let http = FreePort::find().unwrap().release();
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, http));
        let mut command = Command::new(binary);
        command.args([
            "--listen",
            &address.to_string(),
            "--model",
            MODEL,
            "--speed",
            "50",
        ]);
        command
            .arg("--tokenizer")
            .arg(model_file("tokenizer.json.gz"));
        command
            .arg("--tokenizer-config")
            .arg(model_file("tokenizer_config.json"));
        if !plan.without_events {
            command.args(["--events-endpoint", &format!("tcp://127.0.0.1:{events}")]);
            command.args(["--replay-endpoint", &format!("tcp://127.0.0.1:{replay}")]);
        }
        if plan.connects {
            command.args(["--events-attach", "connect"]);
        }
        command.args(&plan.args);
        let child = ChildProcess::spawn("engine", &command, dir.path()).unwrap();
        ports::wait_ready(
            ReadyCheck::Http(&format!("http://{address}/health")),
            START,
            &child,
        )
        .await
        .unwrap();
        Self {
            _child: child,
            dir,
            address,
            events,
            replay,
        }
    }

    /// Returns the configuration that matches the engine.
    pub(crate) fn config(&self) -> Value {
        json!({
            "listeners": {"ext_proc": {"unix_socket": self.dir.path().join("ext_proc.sock")}},
            "models": [
                {
                    "name": MODEL,
                    "tokenizer": model_file("tokenizer.json.gz"),
                    "tokenizer_config": model_file("tokenizer_config.json"),
                },
            ],
            "workers": {
                "list": [
                    {
                        "id": 1,
                        "endpoint": self.address.to_string(),
                        "kv_events": {
                            "endpoint": format!("tcp://127.0.0.1:{}", self.events),
                            "replay_endpoint": format!("tcp://127.0.0.1:{}", self.replay),
                        },
                    },
                ],
            },
        })
    }

    /// Runs the doctor on a configuration.
    pub(crate) async fn examine(&self, config: &Value, extra_args: &[&str]) -> DoctorOutput {
        let file = write(self.dir.path(), config);
        doctor(&file, extra_args).await
    }
}

pub(crate) fn write(dir: &Path, config: &Value) -> PathBuf {
    let file = dir.join(format!("warmroute-{:x}.yaml", rand::random::<u64>()));
    std::fs::write(&file, config.to_string()).unwrap();
    file
}

/// Runs the doctor on a configuration file.
pub(crate) async fn doctor(file: &Path, extra_args: &[&str]) -> DoctorOutput {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command
        .args(["doctor", "--json", "--timeout", "3s", "--config"])
        .arg(file)
        .args(extra_args)
        .kill_on_drop(true);
    DoctorOutput::read(&command.output().await.unwrap())
}

/// Output of the doctor.
#[derive(Debug)]
pub(crate) struct DoctorOutput {
    pub(crate) code: i32,
    pub(crate) findings: Vec<Value>,
}

impl DoctorOutput {
    pub(crate) fn read(output: &std::process::Output) -> Self {
        let out = String::from_utf8_lossy(&output.stdout);
        let err = String::from_utf8_lossy(&output.stderr);
        let report: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
        let code = output.status.code().unwrap();
        assert_eq!(report["exit_code"], code, "{report}");
        Self {
            code,
            findings: report["findings"].as_array().unwrap().clone(),
        }
    }

    /// Returns level and check of all errors and warnings, sorted.
    pub(crate) fn wrong(&self) -> Vec<(&str, &str)> {
        let all = self.findings.iter().map(|one| {
            (
                one["level"].as_str().unwrap(),
                one["check"].as_str().unwrap(),
            )
        });
        let mut wrong: Vec<_> = all
            .filter(|(level, _)| matches!(*level, "error" | "warning"))
            .collect();
        wrong.sort_unstable();
        wrong
    }

    /// Returns the text of all fixes.
    pub(crate) fn fixes(&self) -> String {
        self.findings
            .iter()
            .filter_map(|one| one["fix"].as_str())
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Asserts the errors and warnings, parts of their fixes, and the exit code.
    pub(crate) fn assert(&self, name: &str, expected: &[(&str, &str)], words: &[&str]) {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        assert_eq!(self.wrong(), expected, "{name}: {:#?}", self.findings);
        let fixes = self.fixes();
        for word in words {
            assert!(fixes.contains(word), "{name}: no {word:?} in {fixes}");
        }
        let code = match expected.iter().map(|(level, _)| *level).min() {
            Some("error") => 2,
            Some(_) => 1,
            None => 0,
        };
        assert_eq!(self.code, code, "{name}");
    }
}
