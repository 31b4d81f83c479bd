//! Programs of others that tests run: where they are, and making them once where they are not.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, ensure};

/// The program `within` the folder `name` under `dir`, which `make` makes somewhere below the scratch folder it is given.
/// Concurrent callers, of other processes too, wait for the first.
pub(crate) fn once(
    dir: &Path,
    name: &str,
    within: &str,
    make: impl FnOnce(&Path) -> anyhow::Result<PathBuf>,
) -> anyhow::Result<PathBuf> {
    let folder = dir.join(name);
    let program = folder.join(within);
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
    let made = make(scratch.path())?;
    ensure!(
        is_executable(&made.join(within)),
        "what was installed for {name} has no executable {within}"
    );
    // What is there without the executable is the rest of a copy that somebody took apart.
    _ = fs::remove_dir_all(&folder);
    fs::rename(&made, &folder).with_context(|| format!("cannot install {}", folder.display()))?;
    Ok(program)
}

/// Cargo's target directory: of the running executable, because the directory may be chosen anew for each build.
pub(crate) fn target_dir() -> anyhow::Result<PathBuf> {
    let executable = std::env::current_exe()?;
    let folder = executable.parent().unwrap_or(Path::new("/"));
    let of_profile = match folder.file_name().and_then(OsStr::to_str) {
        Some("deps" | "examples") => folder.parent().and_then(Path::parent),
        _ => None,
    };
    // An executable that was moved elsewhere.
    let target = of_profile.map_or_else(
        || Path::new(env!("CARGO_MANIFEST_DIR")).join("target"),
        Path::to_owned,
    );
    fs::create_dir_all(&target)?;
    Ok(target)
}

/// A program on the path.
pub(crate) fn on_path(name: &str) -> Option<PathBuf> {
    let path = environment("PATH").unwrap_or_default();
    std::env::split_paths(&path)
        .map(|dir| dir.join(name))
        .find(|file| is_executable(file))
}

pub(crate) fn is_executable(file: &Path) -> bool {
    fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
}

#[expect(
    clippy::disallowed_methods,
    reason = "which programs to test with is a matter of the machine, not of the product"
)]
pub(crate) fn environment(name: &str) -> Option<OsString> {
    std::env::var_os(name).filter(|value| !value.is_empty())
}
