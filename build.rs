//! Passes commit and target of the build to the program. Sets the cfg `long_tests` if
//! `WARMROUTE_LONG_TESTS` is 1. Without it, libtest reports the long tests as ignored.

#![expect(
    clippy::disallowed_methods,
    reason = "the environment selects the long form of tests and names the commit"
)]

use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(long_tests)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=WARMROUTE_LONG_TESTS");
    if std::env::var_os("WARMROUTE_LONG_TESTS").is_some_and(|value| value == "1") {
        println!("cargo::rustc-cfg=long_tests");
    }
    println!("cargo::rerun-if-env-changed=WARMROUTE_COMMIT");
    let commit = std::env::var("WARMROUTE_COMMIT")
        .ok()
        .or_else(read_commit)
        .unwrap_or_default();
    let number = env!("CARGO_PKG_VERSION");
    let text = if commit.is_empty() {
        number.to_owned()
    } else {
        format!("{number} ({commit})")
    };
    println!("cargo::rustc-env=WARMROUTE_COMMIT={commit}");
    let target = std::env::var("TARGET").unwrap_or_default();
    println!("cargo::rustc-env=WARMROUTE_TARGET={target}");
    println!("cargo::rustc-env=WARMROUTE_VERSION_TEXT={text}");
}

/// Returns abbreviated hash and date of the checked-out commit, and reruns this program after the
/// next checkout. Returns `None` if the package is not the root of a git checkout: a parent
/// directory may be a checkout of another project.
fn read_commit() -> Option<String> {
    let root = PathBuf::from(git(&["rev-parse", "--show-toplevel"])?);
    let package = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR")?);
    if root.canonicalize().ok()? != package.canonicalize().ok()? {
        return None;
    }
    let branch = git(&["symbolic-ref", "--quiet", "HEAD"]);
    for name in ["HEAD", "logs/HEAD"].into_iter().chain(branch.as_deref()) {
        let file = git(&["rev-parse", "--git-path", name])?;
        // A missing file would run this program in every build.
        if Path::new(&file).exists() {
            println!("cargo::rerun-if-changed={file}");
        }
    }
    git(&["log", "-1", "--no-show-signature", "--format=%h, %cs"])
}

/// Returns the output of a git command, or `None` if it fails or prints nothing.
fn git(arguments: &[&str]) -> Option<String> {
    let output = Command::new("git").args(arguments).output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
