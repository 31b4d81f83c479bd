//! Logs: one subscriber, to standard error, so that standard output stays for what a command prints.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;

use crate::cli;
use crate::config::{LogConfig, LogFormat};

/// Starts logging; a process that has a subscriber already keeps it.
pub fn start(config: &LogConfig) {
    let filter = EnvFilter::new(cli::log_filter(config.level));
    let colours = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(colours);
    let _started = match config.format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
}
