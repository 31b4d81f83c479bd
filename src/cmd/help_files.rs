//! `warmroute completions` and `warmroute man`: files that are generated from the command line.

use std::io::Write;
use std::path::Path;

use anyhow::Context as _;
use clap_complete::Shell;

use super::cli::command_with_environment;

const NAME: &str = "warmroute";

/// Writes the completion script of a shell. Returns the exit code.
pub(super) fn write_completions(shell: Shell, out: &mut impl Write) -> anyhow::Result<u8> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut command_with_environment(), NAME, &mut script);
    out.write_all(&script)?;
    Ok(0)
}

/// Writes one manual page per subcommand. Returns the exit code.
pub(super) fn write_manual(directory: &Path) -> anyhow::Result<u8> {
    std::fs::create_dir_all(directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    clap_mangen::generate_to(command_with_environment(), directory)
        .with_context(|| format!("cannot write to {}", directory.display()))?;
    Ok(0)
}
