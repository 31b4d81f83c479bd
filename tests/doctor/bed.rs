//! An engine of one's own choice, a configuration for it, and the command that looks at both.

use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde_json::{Value, json};

use crate::support::child::Child;
use crate::support::ports::{self, FreePort, Ready};
use crate::support::stack::{MODEL, model_file};

const START: Duration = Duration::from_secs(60);

/// How an engine is started.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    /// Further arguments.
    pub(crate) args: Vec<String>,
    /// Whether it publishes no events.
    pub(crate) silent: bool,
    /// Whether its publisher connects instead of binding.
    pub(crate) connects: bool,
}

impl Plan {
    pub(crate) fn with(args: &[&str]) -> Self {
        Self {
            args: args.iter().map(|arg| (*arg).to_owned()).collect(),
            ..Self::default()
        }
    }
}

/// One running engine, where it listens, and where its configuration lies.
pub(crate) struct Bed {
    _child: Child,
    pub(crate) dir: tempfile::TempDir,
    pub(crate) address: SocketAddr,
    pub(crate) events: u16,
    pub(crate) replay: u16,
}

/// The first of two ports that follow one another, for the sockets of two ranks.
fn pair() -> u16 {
    loop {
        let (first, second) = (FreePort::find().unwrap(), FreePort::find().unwrap());
        if first.number() + 1 == second.number() {
            return first.release();
        }
    }
}

impl Bed {
    pub(crate) async fn start(plan: Plan) -> Self {
        let tests = std::env::current_exe().unwrap();
        let binary = tests
            .parent()
            .unwrap()
            .with_file_name("examples")
            .join("engine_sim");
        assert!(
            binary.exists(),
            "{} is missing: cargo build --example engine_sim",
            binary.display()
        );
        let dir = tempfile::Builder::new()
            .prefix("doctor-")
            .tempdir()
            .unwrap();
        let (events, replay, http) = (pair(), pair(), FreePort::find().unwrap().release());
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
        if !plan.silent {
            command.args(["--events-endpoint", &format!("tcp://127.0.0.1:{events}")]);
            command.args(["--replay-endpoint", &format!("tcp://127.0.0.1:{replay}")]);
        }
        if plan.connects {
            command.args(["--events-attach", "connect"]);
        }
        command.args(&plan.args);
        let child = Child::spawn("engine", &command, dir.path()).unwrap();
        ports::wait_ready(
            Ready::Http(&format!("http://{address}/health")),
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

    /// The configuration that fits an engine as it is started here.
    pub(crate) fn config(&self) -> Value {
        json!({
            "listen": {"unix": self.dir.path().join("ext_proc.sock")},
            "models": [{
                "name": MODEL,
                "tokenizer": model_file("tokenizer.json.gz"),
                "tokenizer_config": model_file("tokenizer_config.json"),
            }],
            "workers": [{
                "id": 1,
                "endpoint": self.address.to_string(),
                "kv_events": {
                    "endpoint": format!("tcp://127.0.0.1:{}", self.events),
                    "replay": format!("tcp://127.0.0.1:{}", self.replay),
                },
            }],
        })
    }

    /// What the doctor says of a configuration.
    pub(crate) async fn examine(&self, config: &Value, more: &[&str]) -> Examined {
        let file = write(self.dir.path(), config);
        doctor(&file, more).await
    }
}

pub(crate) fn write(dir: &Path, config: &Value) -> PathBuf {
    let file = dir.join(format!("warmroute-{:x}.yaml", rand::random::<u64>()));
    std::fs::write(&file, config.to_string()).unwrap();
    file
}

/// Runs the command.
pub(crate) async fn doctor(file: &Path, more: &[&str]) -> Examined {
    let mut command = tokio::process::Command::new(env!("CARGO_BIN_EXE_warmroute"));
    command
        .args(["doctor", "--json", "--patience", "3s", "--config"])
        .arg(file)
        .args(more)
        .kill_on_drop(true);
    Examined::read(&command.output().await.unwrap())
}

/// What the command said.
#[derive(Debug)]
pub(crate) struct Examined {
    pub(crate) code: i32,
    pub(crate) findings: Vec<Value>,
}

impl Examined {
    pub(crate) fn read(output: &std::process::Output) -> Self {
        let (out, err) = (
            String::from_utf8_lossy(&output.stdout),
            String::from_utf8_lossy(&output.stderr),
        );
        let said: Value = serde_json::from_str(&out).unwrap_or_else(|_| panic!("{out}{err}"));
        let code = output.status.code().unwrap();
        assert_eq!(said["exit_code"], code, "{said}");
        Self {
            code,
            findings: said["findings"].as_array().unwrap().clone(),
        }
    }

    /// Level and check of everything that is wrong, in order.
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

    /// Mends, in order of the list.
    pub(crate) fn mends(&self) -> String {
        self.findings
            .iter()
            .filter_map(|one| one["mend"].as_str())
            .collect::<Vec<_>>()
            .join("\n")
    }

    /// Exactly these are wrong, with these words among the mends, and the exit code says so.
    pub(crate) fn assert(&self, name: &str, expected: &[(&str, &str)], words: &[&str]) {
        let mut expected = expected.to_vec();
        expected.sort_unstable();
        assert_eq!(self.wrong(), expected, "{name}: {:#?}", self.findings);
        let mends = self.mends();
        for word in words {
            assert!(mends.contains(word), "{name}: no {word:?} in {mends}");
        }
        let code = match expected.iter().map(|(level, _)| *level).min() {
            Some("error") => 2,
            Some(_) => 1,
            None => 0,
        };
        assert_eq!(self.code, code, "{name}");
    }
}
