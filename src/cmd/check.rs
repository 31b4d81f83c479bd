//! `warmroute check`: is this configuration right, and what does it come to?

use std::io::Write;
use std::path::Path;

use super::{MISCONFIGURED, load};
use crate::app;

/// Prints the resolved configuration, and beside it what is hardly meant; or each mistake. The value is the exit code.
pub fn run(path: &Path, out: &mut impl Write, err: &mut impl Write) -> anyhow::Result<u8> {
    match load(path, err)? {
        Some(config) => {
            out.write_all(config.to_yaml()?.as_bytes())?;
            for advice in config.advice(&app::listed(&config)?) {
                writeln!(err, "warning: {advice}")?;
            }
            Ok(0)
        }
        None => Ok(MISCONFIGURED),
    }
}
