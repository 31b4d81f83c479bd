//! `warmroute check`: whether `serve` would start with this configuration, and the values it resolves to.

use std::io::Write;

use super::{MISCONFIGURED, load, write_mistakes};
use crate::app;
use crate::cli::CheckArgs;
use crate::config::Config;

/// Prints the resolved configuration, with warnings on standard error; or each mistake. The value is the exit code.
pub fn run(args: &CheckArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let Some(config) = load(&args.config, err)? else { return Ok(MISCONFIGURED) };
    let mut warnings = config.advice(&app::listed(&config)?);
    if !args.fast {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let report = runtime.block_on(app::try_load(&config));
        if !report.problems.is_empty() {
            write_mistakes(Config::locate(&args.config, report.problems), err)?;
            return Ok(MISCONFIGURED);
        }
        warnings.extend(report.warnings);
    }
    out.write_all(config.to_yaml()?.as_bytes())?;
    for warning in warnings {
        writeln!(err, "warning: {warning}")?;
    }
    Ok(0)
}
