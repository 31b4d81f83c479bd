//! Logs: one subscriber, to standard error, so that standard output stays for what a command prints.

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::reload::Handle;

use crate::cli;
use crate::config::{LogConfig, LogFormat, LogLevel};

/// How much is logged, to be changed while we run.
pub struct LogFilter(Box<dyn Fn(EnvFilter) + Send + Sync>);

impl LogFilter {
    fn of<S: 'static>(handle: Handle<EnvFilter, S>) -> Self {
        // Fails only where the subscriber is gone, and then nobody logs.
        Self(Box::new(move |filter| _ = handle.reload(filter)))
    }

    /// Logs this much from now on, unless the environment has said otherwise.
    pub fn set(&self, level: LogLevel) {
        (self.0)(filter(level));
    }
}

/// Starts logging; a process that has a subscriber already keeps it.
pub fn start(config: &LogConfig) -> LogFilter {
    let colours = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt().with_env_filter(filter(config.level)).with_writer(std::io::stderr);
    let lines = lines.with_ansi(colours);
    match config.format {
        LogFormat::Text => {
            let lines = lines.with_filter_reloading();
            let level = LogFilter::of(lines.reload_handle());
            let _started = lines.try_init();
            level
        }
        LogFormat::Json => {
            let lines = lines.json().with_filter_reloading();
            let level = LogFilter::of(lines.reload_handle());
            let _started = lines.try_init();
            level
        }
    }
}

fn filter(level: LogLevel) -> EnvFilter {
    EnvFilter::new(cli::log_filter(level))
}
