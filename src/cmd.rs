//! The subcommands of the command line.

mod admin_client;
pub mod audit;
pub mod check;
pub mod cli;
pub mod doctor;
pub mod explain;
pub mod serve;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;

use warmroute_settings::ConfigError;
use warmroute_tokens::prompt::LoadError;

use crate::config::Config;
use cli::{Cli, Command};

/// Exit code for an invalid configuration.
pub const EXIT_MISCONFIGURED: u8 = 2;

/// Runs the subcommand and returns the exit code of the process.
pub fn run(cli: Cli) -> ExitCode {
    let mut err = io::stderr();
    let ended = match cli.command {
        Command::Audit(args) => audit::run(&args, &mut io::stdout()),
        Command::Check(args) => check::run(&args, &mut io::stdout(), &mut err),
        Command::Doctor(args) => doctor::run(&args, &mut io::stdout(), &mut err),
        Command::Explain(args) => explain::run(&args, &mut io::stdout(), &mut err),
        Command::Serve(args) => serve::run(&args, &mut err),
    };
    ended.map_or_else(|error| report_failure(&error, &mut err), ExitCode::from)
}

/// Loads a configuration. If it is invalid, writes its errors to `err`, one per line, and returns
/// `None`; the command then ends with [`EXIT_MISCONFIGURED`].
pub fn load_config(path: &Path, err: &mut impl Write) -> io::Result<Option<Config>> {
    config_or_report(Config::load(path), err)
}

/// Returns the configuration, or writes its errors.
fn config_or_report(
    read: Result<Config, Vec<ConfigError>>,
    err: &mut impl Write,
) -> io::Result<Option<Config>> {
    match read {
        Ok(config) => Ok(Some(config)),
        Err(errors) => write_errors(errors, err).map(|()| None),
    }
}

/// Writes one line per error.
fn write_errors(errors: Vec<ConfigError>, err: &mut impl Write) -> io::Result<()> {
    errors
        .into_iter()
        .try_for_each(|error| writeln!(err, "{error}"))
}

/// Prints the error of a command and returns its exit code.
fn report_failure(error: &anyhow::Error, err: &mut impl Write) -> ExitCode {
    // A failed write to standard error cannot be reported.
    let _written = writeln!(err, "warmroute: {error:#}");
    ExitCode::from(exit_code(error))
}

/// Returns the exit code of an error: [`EXIT_MISCONFIGURED`] if a configured file cannot be used,
/// else 1.
fn exit_code(error: &anyhow::Error) -> u8 {
    let misconfigured = error.downcast_ref::<LoadError>().is_some();
    if misconfigured { EXIT_MISCONFIGURED } else { 1 }
}
