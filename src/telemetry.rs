//! Logs: one subscriber, to standard error, so that standard output stays for what a command prints.

use std::any::Any;
use std::io::IsTerminal;

use tracing::error;
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

/// Logs panics by their place: what is said of them may quote a prompt, as of a text that is cut inside a character.
pub fn hide_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let place = panic
            .location()
            .map(ToString::to_string)
            .unwrap_or_default();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or_default();
        error!(place, thread, "panic: {}", said(panic.payload()));
    }));
}

/// What a panic says, where that was written by a programmer and not put together.
fn said(payload: &dyn Any) -> &'static str {
    payload
        .downcast_ref::<&'static str>()
        .copied()
        .unwrap_or("its words may be a client's and are not shown")
}

/// Starts logging; a process that has a subscriber already keeps it.
pub fn start(config: &LogConfig) -> LogFilter {
    let colours = std::io::stderr().is_terminal();
    let lines = tracing_subscriber::fmt()
        .with_env_filter(filter(config.level))
        .with_writer(std::io::stderr);
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

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn what_a_panic_says_is_shown_only_where_it_is_a_constant() {
        let constant = catch_unwind(|| panic!("a constant")).unwrap_err();
        assert_eq!(said(&*constant), "a constant");
        let text = String::from("a \u{e9}CANARY");
        let quoting = catch_unwind(|| text[..3].len()).unwrap_err();
        assert!(!said(&*quoting).contains("CANARY"));
    }
}
