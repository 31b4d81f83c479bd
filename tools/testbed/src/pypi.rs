//! Packages from PyPI, installed below Cargo's target directory. This needs no root rights and does
//! not change the machine.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::{Command, Output};

use crate::child_process::last_lines;

/// Reason why packages could not be installed.
#[derive(Debug, thiserror::Error)]
pub enum PypiError {
    /// The machine has no Python.
    #[error("there is no python3")]
    PythonMissing,
    /// The machine has no pip.
    #[error("python3 has no pip")]
    PipMissing,
    /// pip failed with these last lines.
    #[error("pip failed; its last lines:\n{0}")]
    Failed(String),
}

/// Packages to install, without their dependencies.
#[derive(Clone, Copy, Debug)]
pub enum PypiPackages<'a> {
    /// One package, such as `name==1.0`.
    Package(&'a str),
    /// The packages of a requirements file with hashes.
    Hashed(&'a Path),
}

/// Installs packages into a directory with pip. If the system's Python has no pip, or is externally
/// managed, a virtual environment is used.
pub fn install(packages: PypiPackages<'_>, scratch: &Path, into: &Path) -> Result<(), PypiError> {
    let refused = match pip(OsStr::new("python3"), packages, into)? {
        PipResult::Installed => return Ok(()),
        PipResult::Failed(error) => return Err(PypiError::Failed(error)),
        PipResult::Refused(error) => PypiError::Failed(error),
        PipResult::Missing => PypiError::PipMissing,
    };
    let venv = scratch.join("venv");
    let created = run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    if !created.status.success() {
        return Err(refused);
    }
    match pip(venv.join("bin/python3").as_os_str(), packages, into)? {
        PipResult::Installed => Ok(()),
        PipResult::Failed(error) | PipResult::Refused(error) => Err(PypiError::Failed(error)),
        PipResult::Missing => Err(PypiError::PipMissing),
    }
}

/// Result of one run of pip.
enum PipResult {
    Installed,
    Missing,
    Refused(String),
    Failed(String),
}

fn pip(python: &OsStr, packages: PypiPackages<'_>, into: &Path) -> Result<PipResult, PypiError> {
    let mut command = Command::new(python);
    command.args([
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--no-input",
        "--quiet",
    ]);
    command
        .args([
            "--no-deps",
            "--no-compile",
            "--only-binary",
            ":all:",
            "--target",
        ])
        .arg(into);
    match packages {
        PypiPackages::Package(package) => command.arg(package),
        PypiPackages::Hashed(file) => command
            .args(["--require-hashes", "--requirement"])
            .arg(file),
    };
    // Overrides user settings that pip rejects together with --target.
    command.envs([("PIP_USER", "0"), ("PIP_REQUIRE_VIRTUALENV", "0")]);
    let output = run(&mut command)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    Ok(if output.status.success() {
        PipResult::Installed
    } else if errors.contains("No module named pip") {
        PipResult::Missing
    } else if errors.contains("externally-managed-environment") {
        PipResult::Refused(last_lines(&errors))
    } else {
        PipResult::Failed(last_lines(&errors))
    })
}

fn run(command: &mut Command) -> Result<Output, PypiError> {
    command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => PypiError::PythonMissing,
        _ => PypiError::Failed(format!("cannot run python3: {error}")),
    })
}
