//! The commands.

pub mod check;

use std::io::{self, Write};
use std::path::Path;

use crate::config::Config;

/// Exit code of a configuration that cannot work.
pub const MISCONFIGURED: u8 = 2;

/// Loads a configuration for a command; the mistakes go to `err`, one per line, and the command ends with
/// [`MISCONFIGURED`].
pub fn load(path: &Path, err: &mut impl Write) -> io::Result<Option<Config>> {
    match Config::load(path) {
        Ok(config) => Ok(Some(config)),
        Err(mistakes) => {
            for mistake in mistakes {
                writeln!(err, "{mistake}")?;
            }
            Ok(None)
        }
    }
}
