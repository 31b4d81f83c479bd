//! Location of etcd and kube-apiserver: `ETCD_BIN` and `KUBE_APISERVER_BIN`, or a build with Go
//! below Cargo's target directory.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use warmroute_testbed::programs::{environment, find_on_path, is_executable, target_dir};

const BUILD_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver/build.sh");

/// Paths of the two programs.
#[derive(Clone, Debug)]
pub(crate) struct ControlPlanePrograms {
    pub(crate) etcd: PathBuf,
    pub(crate) api_server: PathBuf,
}

/// Reason why the suite cannot run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingProgramError {
    #[error("{variable} is {}, which is not an executable file", path.display())]
    NotExecutable {
        variable: &'static str,
        path: PathBuf,
    },
    #[error("Go is not on the path, and ETCD_BIN and KUBE_APISERVER_BIN do not name the programs")]
    GoMissing,
    #[error("Go could not build etcd and kube-apiserver: {0}")]
    BuildFailed(String),
    #[error("unshare cannot mount a service account here (it needs root, or user namespaces): {0}")]
    MountRefused(String),
}

impl MissingProgramError {
    /// Returns true if the suite must fail instead of reporting `NOT RUN`.
    pub(crate) fn is_failure(&self) -> bool {
        match self {
            Self::NotExecutable { .. } => true,
            Self::GoMissing => false,
            Self::BuildFailed(_) | Self::MountRefused(_) => environment("CI").is_some(),
        }
    }
}

/// Finds the programs, or builds them.
pub(crate) fn locate() -> Result<ControlPlanePrograms, MissingProgramError> {
    let try_mount = || crate::router::try_mount().map_err(MissingProgramError::MountRefused);
    if let (Some(etcd), Some(api_server)) = (named("ETCD_BIN")?, named("KUBE_APISERVER_BIN")?) {
        try_mount()?;
        return Ok(ControlPlanePrograms { etcd, api_server });
    }
    // A build takes minutes, so mounting is checked first. If Go is missing, that is reported
    // instead.
    if find_on_path("go").is_some() {
        try_mount()?;
    }
    let directory = build().map_err(|error| match find_on_path("go") {
        Some(_) => MissingProgramError::BuildFailed(error),
        None => MissingProgramError::GoMissing,
    })?;
    try_mount()?;
    Ok(ControlPlanePrograms {
        etcd: directory.join("etcd"),
        api_server: directory.join("kube-apiserver"),
    })
}

fn named(variable: &'static str) -> Result<Option<PathBuf>, MissingProgramError> {
    match environment(variable).map(PathBuf::from) {
        Some(path) if !is_executable(&path) => {
            Err(MissingProgramError::NotExecutable { variable, path })
        }
        path => Ok(path),
    }
}

/// Runs the build script. It builds nothing if the programs exist, and waits if another process is
/// building them.
fn build() -> Result<PathBuf, String> {
    let target = target_dir().map_err(|error| error.to_string())?;
    let mut command = Command::new("bash");
    // The script prints progress and errors to the terminal.
    command
        .arg(BUILD_SCRIPT)
        .arg(target)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.output().map_err(|error| format!("bash: {error}"))?;
    if !output.status.success() {
        return Err(format!("{BUILD_SCRIPT} failed, see above"));
    }
    Ok(Path::new(String::from_utf8_lossy(&output.stdout).trim()).to_owned())
}
