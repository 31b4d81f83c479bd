//! Kubernetes discovery against a real etcd and kube-apiserver on the loopback interface, with TLS
//! and RBAC. kustomize and helm render the shipped manifests, and the API server accepts them.
//! warmroute runs as in a pod, with a mounted service account that has the Role of
//! `deploy/base/rbac.yaml`.
//!
//! `WARMROUTE_LONG_TESTS=1 cargo test --test apiserver -- [FILTER]` runs the cases whose names
//! contain the filter and prints a table with one row per case. If the programs are missing and Go
//! is not installed, the last line is `NOT RUN: reason`.

#![expect(clippy::print_stdout, reason = "the suite prints a table")]

mod admin_client;
mod arguments;
mod cases;
mod control_plane;
#[path = "../support/ext_proc.rs"]
mod ext_proc;
mod install;
#[path = "../support/manifest_set.rs"]
#[expect(
    clippy::unwrap_used,
    dead_code,
    reason = "other tests use more of it, and a broken manifest fails the test"
)]
mod manifest_set;
mod namespace;
mod objects;
#[path = "../support/pki.rs"]
#[expect(
    clippy::unwrap_used,
    dead_code,
    reason = "other tests use more of it, and a certificate can always be made"
)]
mod pki;
mod proxy;
mod router;
mod runner;
mod traffic;

use std::process::ExitCode;

use clap::Parser as _;
use warmroute_testbed::programs::environment;

use arguments::SuiteArguments;

fn main() -> ExitCode {
    let arguments = SuiteArguments::parse();
    let cases: Vec<_> = cases::all()
        .into_iter()
        .filter(|case| arguments.selects(case.name))
        .collect();
    if arguments.list {
        for case in &cases {
            println!("{}: test", case.name);
        }
        return ExitCode::SUCCESS;
    }
    if cases.is_empty() {
        println!("no case is selected");
        return ExitCode::SUCCESS;
    }
    if let Some(reason) = reason_to_ignore() {
        let ignored = cases.len();
        println!("test result: ok. 0 passed; 0 failed; {ignored} ignored, {reason}");
        return ExitCode::SUCCESS;
    }
    match install::locate() {
        Ok(programs) => runner::run(cases, programs),
        Err(missing) => {
            println!("NOT RUN: {missing}");
            if missing.is_failure() {
                ExitCode::FAILURE
            } else {
                ExitCode::SUCCESS
            }
        }
    }
}

fn reason_to_ignore() -> Option<&'static str> {
    if !cfg!(long_tests) {
        Some("long: set WARMROUTE_LONG_TESTS=1")
    } else if environment("WARMROUTE_APISERVER_TESTS").is_some_and(|value| value == "0") {
        Some("unchanged: set WARMROUTE_APISERVER_TESTS=1")
    } else {
        None
    }
}
