//! The commands.

pub mod audit;
pub mod check;
pub mod doctor;
pub mod explain;
mod pages;
pub mod serve;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use crate::cli::{Cli, Command};
use crate::config::Config;
use crate::prompt::LoadError;
use crate::settings::ConfigError;

/// Exit code of a configuration that cannot work.
pub const MISCONFIGURED: u8 = 2;

/// Carries out the command line; the exit code of the process.
pub fn main(cli: Cli) -> ExitCode {
    let mut err = io::stderr();
    let ended = match cli.command {
        Command::Audit(args) => audit::run(&args, &mut io::stdout()),
        Command::Check(args) => check::run(&args, &mut io::stdout(), &mut err),
        Command::Doctor(args) => doctor::run(&args, &mut io::stdout(), &mut err),
        Command::Explain(args) => explain::run(&args, &mut io::stdout(), &mut err),
        Command::Serve(args) => serve::run(&args, &mut err),
    };
    ended.map_or_else(|error| failed(&error, &mut err), ExitCode::from)
}

/// Loads a configuration for a command; the mistakes go to `err`, one per line, and the command ends with
/// [`MISCONFIGURED`].
pub fn load(path: &Path, err: &mut impl Write) -> io::Result<Option<Config>> {
    usable(Config::load(path), err)
}

/// The same of one that was read.
fn usable(
    read: Result<Config, Vec<ConfigError>>,
    err: &mut impl Write,
) -> io::Result<Option<Config>> {
    match read {
        Ok(config) => Ok(Some(config)),
        Err(mistakes) => write_mistakes(mistakes, err).map(|()| None),
    }
}

/// Writes one line per mistake.
fn write_mistakes(mistakes: Vec<ConfigError>, err: &mut impl Write) -> io::Result<()> {
    mistakes
        .into_iter()
        .try_for_each(|mistake| writeln!(err, "{mistake}"))
}

/// Prints why a command failed; its exit code.
fn failed(error: &anyhow::Error, err: &mut impl Write) -> ExitCode {
    // Nothing can be done when even standard error is gone.
    let _written = writeln!(err, "warmroute: {error:#}");
    ExitCode::from(exit_code(error))
}

/// The exit code of a failure: misconfiguration where a file that the configuration names cannot be used, else 1.
fn exit_code(error: &anyhow::Error) -> u8 {
    let misconfigured = error.downcast_ref::<LoadError>().is_some();
    if misconfigured { MISCONFIGURED } else { 1 }
}
