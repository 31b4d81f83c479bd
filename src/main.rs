//! The binary: everything it does is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    warmroute::cmd::main(warmroute::cli::Cli::of_process())
}
