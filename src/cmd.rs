//! The subcommands of the command line.

mod admin_client;
pub mod audit;
pub mod check;
pub mod cli;
pub mod config;
pub mod doctor;
pub mod explain;
mod help_files;
mod style;

use std::io::{self, Write};
use std::path::Path;
use std::process::ExitCode;
use std::sync::Arc;

use warmroute_runtime::causes::describe_failure;
use warmroute_server::config::Config;
use warmroute_server::serve::{self, EXIT_MISCONFIGURED, config_or_report, exit_code};

use crate::discovery::DiscoveryClients;
use cli::{Cli, CliCommand};

/// Runs the subcommand and returns the exit code of the process.
pub fn run(cli: Cli) -> ExitCode {
    // These streams remove colours if the output is not a terminal.
    let mut out = anstream::stdout();
    let mut err = anstream::stderr();
    let ended = match cli.command {
        CliCommand::Audit(args) => audit::run(&args, &mut out),
        CliCommand::Check(args) => check::run(&args, &mut out, &mut err),
        CliCommand::Completions(args) => help_files::write_completions(args.shell, &mut out),
        CliCommand::Config(command) => config::run(&command, &mut out, &mut err),
        CliCommand::Doctor(args) => doctor::run(&args, &mut out, &mut err),
        CliCommand::Explain(args) => explain::run(&args, &mut out, &mut err),
        CliCommand::Man(args) => help_files::write_manual(&args.directory),
        CliCommand::Serve(args) => {
            serve::run(&args, &crate::VERSION, Arc::new(DiscoveryClients), &mut err)
        }
    };
    ended.map_or_else(|error| report_failure(&error, &mut err), ExitCode::from)
}

/// Loads a configuration. If it is invalid, writes its errors to `err`, one per line, and returns
/// `None`; the command then ends with [`EXIT_MISCONFIGURED`].
pub fn load_config(path: &Path, err: &mut dyn Write) -> io::Result<Option<Config>> {
    config_or_report(Config::load(path), err)
}

/// Prints the error of a command and returns its exit code.
fn report_failure(error: &anyhow::Error, err: &mut impl Write) -> ExitCode {
    // A failed write to standard error cannot be reported.
    let _written = writeln!(err, "warmroute: {}", describe_failure(error));
    if error.is::<explain::ExplainSourceError>() {
        return ExitCode::from(EXIT_MISCONFIGURED);
    }
    ExitCode::from(exit_code(error))
}
