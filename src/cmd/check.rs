//! `warmroute check`: validates a configuration and prints its resolved values.

use std::io::Write;

use warmroute_server::app;
use warmroute_server::config::Config;
use warmroute_server::serve::{EXIT_MISCONFIGURED, config_or_report, write_errors};

use crate::cmd::cli::CheckArgs;

/// Prints the resolved configuration and warnings, or all errors. Returns the exit code.
pub fn run(args: &CheckArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let flags = args.serve.flags();
    let path = args.serve.config.as_deref();
    let read = path.map_or_else(
        || Config::of_flags(&flags),
        |path| Config::load_with(path, &flags),
    );
    let Some(config) = config_or_report(read, err)? else {
        return Ok(EXIT_MISCONFIGURED);
    };
    let mut warnings = config.advice(&app::listed_workers(&config)?);
    if !args.fast {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let report = runtime.block_on(app::try_load(&config));
        if !report.problems.is_empty() {
            match path {
                Some(path) => write_errors(Config::locate(path, report.problems), err)?,
                None => report
                    .problems
                    .iter()
                    .try_for_each(|problem| writeln!(err, "{}", problem.text))?,
            }
            return Ok(EXIT_MISCONFIGURED);
        }
        warnings.extend(report.warnings);
    }
    out.write_all(config.to_yaml()?.as_bytes())?;
    for warning in warnings {
        writeln!(err, "warning: {warning}")?;
    }
    Ok(0)
}
