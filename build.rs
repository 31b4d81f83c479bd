//! Passes commit and target of the build to the program. Sets the cfg `long_tests` if
//! `WARMROUTE_LONG_TESTS` is 1. Without it, libtest reports the long tests as ignored.

#![expect(
    clippy::disallowed_methods,
    reason = "the environment selects the long form of tests and names the commit"
)]

use std::process::Command;

fn main() {
    println!("cargo::rustc-check-cfg=cfg(long_tests)");
    println!("cargo::rerun-if-changed=build.rs");
    println!("cargo::rerun-if-env-changed=WARMROUTE_LONG_TESTS");
    if std::env::var_os("WARMROUTE_LONG_TESTS").is_some_and(|value| value == "1") {
        println!("cargo::rustc-cfg=long_tests");
    }
    println!("cargo::rerun-if-env-changed=WARMROUTE_COMMIT");
    // A missing file would run this program in every build.
    if std::path::Path::new(".git/logs/HEAD").exists() {
        println!("cargo::rerun-if-changed=.git/logs/HEAD");
    }
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

/// Returns abbreviated hash and date of the checked-out commit. Returns `None` if the source is not
/// a git checkout.
fn read_commit() -> Option<String> {
    let output = Command::new("git")
        .args(["log", "-1", "--format=%h, %cs"])
        .output()
        .ok()?;
    let text = String::from_utf8(output.stdout).ok()?;
    let is_commit = output.status.success() && !text.trim().is_empty();
    is_commit.then(|| text.trim().to_owned())
}
