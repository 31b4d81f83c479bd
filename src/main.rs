//! The binary: everything it does is in the library.

use std::process::ExitCode;

use clap::Parser;
use warmroute::cli::{Cli, Command};
use warmroute::cmd;

fn main() -> ExitCode {
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr());
    let ended = match Cli::parse().command {
        Command::Check(args) => cmd::check::run(&args.config, &mut out, &mut err).map_err(Into::into),
        Command::Serve(args) => cmd::serve::run(&args.config, &mut err),
    };
    ended.map_or_else(|error| cmd::failed(&error, &mut err), ExitCode::from)
}
