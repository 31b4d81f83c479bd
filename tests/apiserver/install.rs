//! Location of the programs: etcd, kube-apiserver, helm and kustomize. `ETCD_BIN`,
//! `KUBE_APISERVER_BIN`, `HELM_BIN` and `KUSTOMIZE_BIN` name them; a build with Go below Cargo's
//! target directory replaces missing ones.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use warmroute_testbed::programs::{environment, find_on_path, is_executable, target_dir};

const BUILD_SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/apiserver/build.sh");

/// Paths of the programs.
#[derive(Clone, Debug)]
pub(crate) struct SuitePrograms {
    pub(crate) etcd: PathBuf,
    pub(crate) api_server: PathBuf,
    pub(crate) helm: PathBuf,
    pub(crate) kustomize: PathBuf,
}

/// Reason why the suite cannot run.
#[derive(Debug, thiserror::Error)]
pub(crate) enum MissingProgramError {
    #[error("{variable} is {}, which is not an executable file", path.display())]
    NotExecutable {
        variable: &'static str,
        path: PathBuf,
    },
    #[error(
        "Go is not on the path, and ETCD_BIN, KUBE_APISERVER_BIN, HELM_BIN and KUSTOMIZE_BIN do \
        not name all programs"
    )]
    GoMissing,
    #[error("Go could not build the programs: {0}")]
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
pub(crate) fn locate() -> Result<SuitePrograms, MissingProgramError> {
    let try_mount = || crate::router::try_mount().map_err(MissingProgramError::MountRefused);
    // A build takes minutes, so mounting is checked first. If Go is missing, that is reported
    // instead.
    if find_on_path("go").is_some() {
        try_mount()?;
    }
    let [etcd, api_server] = locate_pair(
        "control-plane",
        [
            ("ETCD_BIN", "etcd"),
            ("KUBE_APISERVER_BIN", "kube-apiserver"),
        ],
    )?;
    let [helm, kustomize] = locate_pair(
        "deploy-tools",
        [("HELM_BIN", "helm"), ("KUSTOMIZE_BIN", "kustomize")],
    )?;
    try_mount()?;
    Ok(SuitePrograms {
        etcd,
        api_server,
        helm,
        kustomize,
    })
}

/// Returns two programs from their environment variables, or from a build of their group.
fn locate_pair(
    group: &str,
    programs: [(&'static str, &str); 2],
) -> Result<[PathBuf; 2], MissingProgramError> {
    let [first, second] = programs;
    if let (Some(first), Some(second)) = (named(first.0)?, named(second.0)?) {
        return Ok([first, second]);
    }
    let directory = build(group).map_err(|error| match find_on_path("go") {
        Some(_) => MissingProgramError::BuildFailed(error),
        None => MissingProgramError::GoMissing,
    })?;
    Ok([directory.join(first.1), directory.join(second.1)])
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
fn build(group: &str) -> Result<PathBuf, String> {
    let target = target_dir().map_err(|error| error.to_string())?;
    let mut command = Command::new("bash");
    // The script prints progress and errors to the terminal.
    command
        .arg(BUILD_SCRIPT)
        .arg(target)
        .arg(group)
        .stdin(Stdio::null())
        .stderr(Stdio::inherit());
    let output = command.output().map_err(|error| format!("bash: {error}"))?;
    if !output.status.success() {
        return Err(format!("{BUILD_SCRIPT} failed, see above"));
    }
    Ok(Path::new(String::from_utf8_lossy(&output.stdout).trim()).to_owned())
}
