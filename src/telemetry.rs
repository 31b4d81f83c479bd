//! Logs: one subscriber, to standard error, so that standard output stays for what a command prints.

use tracing_subscriber::EnvFilter;

use crate::cli;
use crate::config::{LogConfig, LogFormat};

/// Starts logging; a process that has a subscriber already keeps it.
pub fn start(config: &LogConfig) {
    let filter = EnvFilter::new(cli::log_filter(config.level));
    let lines = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    let _started = match config.format {
        LogFormat::Text => lines.try_init(),
        LogFormat::Json => lines.json().try_init(),
    };
}
