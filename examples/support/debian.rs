//! Programs that Debian has packages of, unpacked and not installed: no root rights, and nothing of the machine changes.

use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context as _, ensure};

use super::child::last_lines;
use super::installed::{environment, is_executable, on_path, once, target_dir};

/// A program and where it is had from.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Debian {
    /// What it is called on the path.
    pub(crate) name: &'static str,
    /// The variable that names another.
    pub(crate) variable: &'static str,
    /// Where it lies in its package.
    pub(crate) within: &'static str,
    /// The package, and those of libraries that a plain machine lacks.
    pub(crate) packages: &'static [&'static str],
}

/// A server of names.
pub(crate) const DNSMASQ: Debian = Debian {
    name: "dnsmasq",
    variable: "DNSMASQ_BIN",
    within: "usr/sbin/dnsmasq",
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

/// A client of Kubernetes.
pub(crate) const KUBECTL: Debian = Debian {
    name: "kubectl",
    variable: "KUBECTL_BIN",
    within: "usr/bin/kubectl",
    packages: &["kubernetes-client"],
};

/// A server of messages.
pub(crate) const NATS: Debian = Debian {
    name: "nats-server",
    variable: "NATS_SERVER_BIN",
    within: "usr/sbin/nats-server",
    packages: &["nats-server"],
};

impl Debian {
    /// A command that runs it: what the variable names, else what is on the path, else a copy under Cargo's target
    /// directory, which is unpacked there the first time. Blocks for as long as that takes.
    pub(crate) fn command(&self) -> anyhow::Result<Command> {
        if let Some(named) = environment(self.variable).map(PathBuf::from) {
            ensure!(
                is_executable(&named),
                "{} is {}, which is no program",
                self.variable,
                named.display()
            );
            return Ok(Command::new(named));
        }
        if let Some(found) = on_path(self.name) {
            return Ok(Command::new(found));
        }
        let program = once(
            &target_dir()?,
            &format!("debian-{}", self.name),
            self.within,
            |scratch| self.unpack(scratch),
        )?;
        let root = program
            .ancestors()
            .nth(Path::new(self.within).components().count())
            .unwrap_or(Path::new("/"));
        let mut command = Command::new(&program);
        command.env("LD_LIBRARY_PATH", libraries(root));
        Ok(command)
    }

    fn unpack(&self, scratch: &Path) -> anyhow::Result<PathBuf> {
        let root = scratch.join("root");
        let missing = format!(
            "no {} found, and it could not be had from Debian (set {} to use another)",
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

/// Where Debian's libraries lie below a root; one folder for each kind of machine.
fn libraries(root: &Path) -> OsString {
    let folders = ["usr/lib", "lib"].map(|folder| root.join(folder));
    let of_machine = folders
        .iter()
        .filter_map(|folder| std::fs::read_dir(folder).ok())
        .flatten()
        .flatten();
    let all: Vec<PathBuf> = of_machine
        .map(|entry| entry.path())
        .chain(folders.iter().cloned())
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
