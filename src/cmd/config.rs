//! `warmroute config`: a first configuration, and the schemas of the settings files.

mod init;

use std::io::Write;

use warmroute_server::config::{config_schema, workers_schema};

use crate::cmd::cli::ConfigCommand;

/// Runs the subcommand and returns the exit code.
pub fn run(
    command: &ConfigCommand,
    out: &mut impl Write,
    err: &mut impl Write,
) -> anyhow::Result<u8> {
    match command {
        ConfigCommand::Init(args) => init::run(args, out, err),
        ConfigCommand::Schema(args) => {
            let schema = if args.workers {
                workers_schema()
            } else {
                config_schema()
            };
            out.write_all(schema.as_bytes())?;
            Ok(0)
        }
    }
}
