//! The binary: everything it does is in the library.

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    warmroute::cmd::main(warmroute::cli::Cli::parse())
}
