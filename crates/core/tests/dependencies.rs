//! Checks that the crate needs neither a runtime nor a C compiler on this platform. Cargo has not
//! downloaded the dependencies of other platforms.

use std::process::Command;

/// Crates that bring a runtime, a server or a compiler of another language.
const FORBIDDEN: &[&str] = &["tokio", "tonic", "tracing-subscriber", "cc", "cmake"];

/// Returns whether a crate is forbidden. By convention, a crate `*-sys` links a foreign library.
/// Crates that only declare functions of the operating system, such as `libc` and `windows-link`,
/// have other names.
fn is_forbidden(name: &str) -> bool {
    FORBIDDEN.contains(&name) || name.ends_with("-sys")
}

#[test]
fn dependencies_are_pure() {
    let output = Command::new(env!("CARGO"))
        .args(["tree", "--offline", "-e", "normal,build"])
        .args([
            "-p",
            "warmroute-core",
            "--prefix",
            "none",
            "--format",
            "{p}",
        ])
        .current_dir(env!("CARGO_MANIFEST_DIR"))
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let tree = String::from_utf8(output.stdout).unwrap();
    let names: Vec<&str> = tree
        .lines()
        .filter_map(|line| line.split(' ').next())
        .collect();
    assert!(names.contains(&"parking_lot"), "{tree}");
    let forbidden: Vec<_> = names.iter().filter(|name| is_forbidden(name)).collect();
    assert!(forbidden.is_empty(), "forbidden: {forbidden:?}");
}
