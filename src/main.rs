//! The binary: everything it does is in the library.

use std::process::ExitCode;

use clap::Parser;
use warmroute::cli::{Cli, Command};
use warmroute::cmd;

fn main() -> anyhow::Result<ExitCode> {
    let (mut out, mut err) = (std::io::stdout().lock(), std::io::stderr().lock());
    match Cli::parse().command {
        Command::Check(args) => Ok(cmd::check::run(&args.config, &mut out, &mut err)?.into()),
    }
}
