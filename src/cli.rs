//! The command line, and the only place that reads the environment.

use std::path::PathBuf;

use clap::{Args, Parser, Subcommand};

use crate::config::LogLevel;

/// Routes every LLM request to the worker whose KV cache is already warm for it.
#[derive(Debug, Parser)]
#[command(version)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Checks a configuration: prints it with every default filled in, or each mistake with its line
    Check(ConfigArgs),
    /// Serves until SIGTERM or SIGINT
    Serve(ConfigArgs),
}

/// Which configuration.
#[derive(Debug, Args)]
pub struct ConfigArgs {
    /// The configuration file
    #[arg(long, short, value_name = "FILE")]
    pub config: PathBuf,
}

/// The filter of the log: `RUST_LOG` where it is set, else the level of the configuration.
pub fn log_filter(level: LogLevel) -> String {
    #[expect(clippy::disallowed_methods, reason = "this module is the one that reads the environment")]
    let asked = std::env::var("RUST_LOG");
    asked.ok().filter(|filter| !filter.is_empty()).unwrap_or_else(|| level.as_str().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }

    #[test]
    fn a_command_needs_a_configuration() {
        assert!(Cli::try_parse_from(["warmroute", "check"]).is_err());
        assert!(Cli::try_parse_from(["warmroute"]).is_err());
        let cli = Cli::try_parse_from(["warmroute", "check", "--config", "w.yaml"]).unwrap();
        let Command::Check(args) = cli.command else { panic!("another command") };
        assert_eq!(args.config, PathBuf::from("w.yaml"));
    }
}
