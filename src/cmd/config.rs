//! `warmroute config`: a first configuration.

mod init;

use std::io::Write;

use crate::cmd::cli::ConfigCommand;

/// Runs the subcommand and returns the exit code.
pub fn run(
    command: &ConfigCommand,
    out: &mut impl Write,
    err: &mut impl Write,
) -> anyhow::Result<u8> {
    match command {
        ConfigCommand::Init(args) => init::run(args, out, err),
    }
}
