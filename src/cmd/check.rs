//! `warmroute check`: whether `serve` would start with this configuration, and the values it resolves to.

use std::io::Write;

use super::{MISCONFIGURED, usable, write_mistakes};
use crate::app;
use crate::cli::CheckArgs;
use crate::config::Config;

/// Prints the resolved configuration, with warnings on standard error; or each mistake. The value is the exit code.
pub fn run(args: &CheckArgs, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    let flags = args.serve.flags();
    let path = args.serve.config.as_deref();
    let read = path.map_or_else(
        || Config::of_flags(&flags),
        |path| Config::load_with(path, &flags),
    );
    let Some(config) = usable(read, err)? else {
        return Ok(MISCONFIGURED);
    };
    let mut warnings = config.advice(&app::listed(&config)?);
    if !args.fast {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()?;
        let report = runtime.block_on(app::try_load(&config));
        if !report.problems.is_empty() {
            match path {
                Some(path) => write_mistakes(Config::locate(path, report.problems), err)?,
                None => report
                    .problems
                    .iter()
                    .try_for_each(|problem| writeln!(err, "{}", problem.text))?,
            }
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
