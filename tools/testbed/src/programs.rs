//! Programs that tests start. Examples are found; third-party programs are installed once.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// Returns the program at `path` in the directory `name` under `dir`. If it is missing, `install`
/// creates the directory below a scratch directory. Concurrent callers, including those in other
/// processes, wait for the first one.
pub fn install_once(
    dir: &Path,
    name: &str,
    path: &str,
    install: impl FnOnce(&Path) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<PathBuf> {
    let directory = dir.join(name);
    let program = directory.join(path);
    if is_executable(&program) {
        return Ok(program);
    }
    let lock = File::create(dir.join(format!("{name}.lock")))
        .with_context(|| format!("cannot install {name}"))?;
    lock.lock()?;
    if is_executable(&program) {
        return Ok(program);
    }
    let scratch = tempfile::Builder::new()
        .prefix(&format!(".{name}-"))
        .tempdir_in(dir)?;
    let installed = install(scratch.path())?;
    ensure!(
        is_executable(&installed.join(path)),
        "the installation of {name} has no executable {path}"
    );
    // A directory without the executable is an incomplete copy.
    _ = fs::remove_dir_all(&directory);
    fs::rename(&installed, &directory)
        .with_context(|| format!("cannot install {}", directory.display()))?;
    Ok(program)
}

/// Returns Cargo's target directory. It is derived from the running executable, because each build
/// may use another one.
pub fn target_dir() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let directory = executable.parent().unwrap_or(Path::new("/"));
    let profile_parent = match directory.file_name().and_then(OsStr::to_str) {
        Some("deps" | "examples") => directory.parent().and_then(Path::parent),
        _ => None,
    };
    // In any other directory, the executable was moved out of the target directory.
    let target = profile_parent.map_or_else(|| crate::repository().join("target"), Path::to_owned);
    fs::create_dir_all(&target)?;
    Ok(target)
}

/// Returns the executable of an example. `cargo test` builds the examples; `cargo test --test NAME`
/// does not.
pub fn example_program(name: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe()?;
    let profile = own.parent().and_then(Path::parent);
    let program = profile
        .context("the running executable has no directory")?
        .join("examples")
        .join(name);
    ensure!(
        program.exists(),
        "{} is missing: cargo build --example {name}",
        program.display()
    );
    Ok(program)
}

/// Finds a program on the path.
pub fn find_on_path(name: &str) -> Option<PathBuf> {
    let path = environment("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| is_executable(file))
}

/// Returns true for a file that the user may execute.
pub fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

/// Returns the value of an environment variable, unless it is empty.
#[expect(
    clippy::disallowed_methods,
    reason = "environment variables of the machine select the programs of tests"
)]
pub fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
