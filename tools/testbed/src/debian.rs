//! Programs of Debian packages, unpacked but not installed. This needs no root rights and does not
//! change the machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use crate::child_process::last_lines;
use crate::programs::{environment, find_on_path, install_once, is_executable, target_dir};

/// A program and its packages.
#[derive(Debug, Clone, Copy)]
pub struct DebianProgram {
    /// Name on the path.
    pub name: &'static str,
    /// Environment variable that overrides the program.
    pub variable: &'static str,
    /// Path of the program in its package.
    pub path_in_package: &'static str,
    /// The package, and the packages of libraries that a minimal machine lacks.
    pub packages: &'static [&'static str],
}

/// A DNS server.
pub const DNSMASQ: DebianProgram = DebianProgram {
    name: "dnsmasq",
    variable: "DNSMASQ_BIN",
    path_in_package: "usr/sbin/dnsmasq",
    packages: &[
        "dnsmasq-base",
        "libdbus-1-3",
        "libidn2-0",
        "libjansson4",
        "libmnl0",
        "libnetfilter-conntrack3",
        "libnfnetlink0",
        "libnftables1",
        "libnftnl11",
        "libxtables12",
    ],
};

/// A message broker.
pub const NATS: DebianProgram = DebianProgram {
    name: "nats-server",
    variable: "NATS_SERVER_BIN",
    path_in_package: "usr/sbin/nats-server",
    packages: &["nats-server"],
};

impl DebianProgram {
    /// Returns a command for the program. It is the one named by the variable, or the one on the
    /// path, or a copy under Cargo's target directory. The copy is unpacked on first use, which
    /// blocks the caller.
    pub fn command(&self) -> anyhow::Result<Command> {
        if let Some(named) = environment(self.variable).map(PathBuf::from) {
            ensure!(
                is_executable(&named),
                "{} is {}, which is not an executable file",
                self.variable,
                named.display()
            );
            return Ok(Command::new(named));
        }
        if let Some(found) = find_on_path(self.name) {
            return Ok(Command::new(found));
        }
        let program = install_once(
            &target_dir()?,
            &format!("debian-{}", self.name),
            self.path_in_package,
            |scratch| self.unpack(scratch),
        )?;
        let root = program
            .ancestors()
            .nth(Path::new(self.path_in_package).components().count())
            .unwrap_or(Path::new("/"));
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", library_path(root));
        Ok(command)
    }

    fn unpack(&self, scratch: &Path) -> anyhow::Result<PathBuf> {
        let root = scratch.join("root");
        let missing = format!(
            "no {} found, and it could not be installed from Debian (set {} to use another)",
            self.name, self.variable
        );
        run(Command::new("apt-get")
            .arg("download")
            .args(self.packages)
            .current_dir(scratch))
        .context(missing.clone())?;
        for entry in std::fs::read_dir(scratch)? {
            let file = entry?.path();
            if file.extension().is_some_and(|extension| extension == "deb") {
                run(Command::new("dpkg-deb").arg("-x").arg(&file).arg(&root))
                    .context(missing.clone())?;
            }
        }
        Ok(root)
    }
}

/// Returns the search path of the libraries below a root. Debian has one directory per
/// architecture.
fn library_path(root: &Path) -> OsString {
    let directories = ["usr/lib", "lib"].map(|directory| root.join(directory));
    let architectures = directories
        .iter()
        .filter_map(|directory| std::fs::read_dir(directory).ok())
        .flatten()
        .flatten();
    let all: Vec<PathBuf> = architectures
        .map(|entry| entry.path())
        .chain(directories.iter().cloned())
        .collect();
    std::env::join_paths(all).unwrap_or_default()
}

fn run(command: &mut Command) -> anyhow::Result<()> {
    let output = command
        .output()
        .with_context(|| format!("cannot run {}", command.get_program().display()))?;
    let errors = last_lines(&String::from_utf8_lossy(&output.stderr));
    ensure!(
        output.status.success(),
        "{} failed:\n{errors}",
        command.get_program().display()
    );
    Ok(())
}
