//! Logging to standard error, so that standard output contains only the output of commands.

mod log_rate_filter;

use std::any::Any;
use std::borrow::Cow;
use std::convert::Infallible;
use std::io::{self, IsTerminal, Write};

use tracing::{error, warn};
use tracing_subscriber::filter::Directive;
use tracing_subscriber::layer::SubscriberExt as _;
use tracing_subscriber::reload::{self, Handle};
use tracing_subscriber::util::SubscriberInitExt as _;
use tracing_subscriber::{EnvFilter, Layer as _, Registry, fmt};

use self::log_rate_filter::LogRateFilter;
use crate::config::{LogConfig, LogFormat, LogLevel};

/// Changes the log filter at run time, and reports omitted lines.
pub struct LogControl {
    filter: Handle<EnvFilter, Registry>,
    rate_filter: LogRateFilter,
}

impl LogControl {
    /// Changes the log level, unless the environment sets the filter.
    pub fn set_level(&self, level: LogLevel) {
        // Fails only if the subscriber no longer exists, and then nothing is logged.
        _ = self.filter.reload(env_filter(level));
    }

    /// Logs how many lines are omitted, because too many were of one kind. Runs until dropped.
    pub async fn report_omitted_lines(&self) -> Infallible {
        self.rate_filter.report_omitted().await
    }
}

/// Installs a panic hook that logs the location of a panic. The message is logged only if it is a
/// constant, because it may quote a prompt, for example if a text was sliced inside a character.
pub fn install_panic_hook() {
    std::panic::set_hook(Box::new(|panic| {
        let location = panic
            .location()
            .map(ToString::to_string)
            .unwrap_or_default();
        let thread = std::thread::current();
        let thread = thread.name().unwrap_or_default();
        error!(
            location,
            thread,
            "panic: {}",
            panic_message(panic.payload())
        );
    }));
}

/// Returns the panic message if it is a constant.
fn panic_message(payload: &dyn Any) -> &'static str {
    payload
        .downcast_ref::<&'static str>()
        .copied()
        .unwrap_or("message omitted, because it may contain request data")
}

/// Logs the invalid directives of `RUST_LOG`, which are ignored.
pub fn log_invalid_directives() {
    let directives = env_directives();
    let (_, invalid) = log_filter(LogLevel::Info, directives.as_deref());
    for directive in invalid {
        warn!(
            directive,
            "invalid directive of RUST_LOG ignored; write a level, or a module with a level, for \
            example `info,warmroute_server=debug`"
        );
    }
}

/// Starts logging. An existing subscriber stays in place.
pub fn init(config: &LogConfig) -> LogControl {
    let (filter, handle) = reload::Layer::new(env_filter(config.level));
    let rate_filter = LogRateFilter::default();
    let lines = fmt::layer()
        .with_writer(|| EventWriter(io::stderr()))
        .with_ansi(io::stderr().is_terminal())
        // The library reports a failed write with `eprintln!`, which then panics, and the panic
        // hook logs. The process must outlive the reader of its log.
        .log_internal_errors(false);
    let lines = match config.format {
        LogFormat::Text => lines.boxed(),
        LogFormat::Json => lines.json().flatten_event(true).boxed(),
    };
    let subscriber = tracing_subscriber::registry().with(filter);
    let _started = subscriber
        .with(lines.with_filter(rate_filter.clone()))
        .try_init();
    LogControl {
        filter: handle,
        rate_filter,
    }
}

/// Writes each event as one line. Line breaks within an event are escaped: values from engines and
/// other peers must not look like further events. The JSON format contains none.
struct EventWriter<W>(W);

impl<W: Write> Write for EventWriter<W> {
    /// Writes one event. The library passes each event in one call.
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        self.0.write_all(&escape_line_breaks(event))?;
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// Escapes the line breaks of an event, except the one that ends it.
fn escape_line_breaks(event: &[u8]) -> Cow<'_, [u8]> {
    let line = event.strip_suffix(b"\n").unwrap_or(event);
    if !line.iter().any(|byte| matches!(byte, b'\n' | b'\r')) {
        return Cow::Borrowed(event);
    }
    let mut escaped = Vec::with_capacity(event.len() + 16);
    for byte in line {
        match byte {
            b'\n' => escaped.extend_from_slice(b"\\n"),
            b'\r' => escaped.extend_from_slice(b"\\r"),
            other => escaped.push(*other),
        }
    }
    escaped.extend_from_slice(&event[line.len()..]);
    Cow::Owned(escaped)
}

fn env_filter(level: LogLevel) -> EnvFilter {
    EnvFilter::new(log_filter(level, env_directives().as_deref()).0)
}

/// Returns the value of `RUST_LOG`.
fn env_directives() -> Option<String> {
    #[expect(
        clippy::disallowed_methods,
        reason = "the standard variable for log filters overrides the configuration"
    )]
    let directives = std::env::var_os("RUST_LOG");
    directives.map(|text| text.to_string_lossy().into_owned())
}

/// Returns the log filter, and the directives of `RUST_LOG` that are not valid. The filter contains
/// the valid ones, or the configured level if there are none.
fn log_filter(level: LogLevel, from_env: Option<&str>) -> (String, Vec<&str>) {
    let (valid, invalid): (Vec<&str>, Vec<&str>) = from_env
        .unwrap_or_default()
        .split(',')
        .filter(|directive| !directive.trim().is_empty())
        .partition(|directive| directive.parse::<Directive>().is_ok());
    // These libraries would repeat messages of warmroute. The listeners log rejected TLS server
    // names with a rate limit. Discovery logs each failure of the API server once, and the replica
    // synchronization logs each loss of the NATS server once.
    let default_filter = || {
        // Libraries log every HTTP/2 frame at level debug. The prefix matches all crates of the
        // workspace.
        let levels = match level {
            LogLevel::Debug | LogLevel::Trace => format!("info,warmroute={}", level.as_str()),
            LogLevel::Error | LogLevel::Warn | LogLevel::Info => level.as_str().to_owned(),
        };
        format!("{levels},rustls::msgs=error,kube_client=off,async_nats=off")
    };
    let filter = if valid.is_empty() {
        default_filter()
    } else {
        valid.join(",")
    };
    // At level trace, notify logs each file event. If the log file is in a watched directory, each
    // log line causes another event. A later directive for `notify` overrides this one. Any level
    // but `off` would also raise a filter such as `error`.
    (format!("notify=off,{filter}"), invalid)
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn log_filter_omits_invalid_directives() {
        let default_filter = "notify=off,warn,rustls::msgs=error,kube_client=off,async_nats=off";
        let cases: [(Option<&str>, &str, &[&str]); 5] = [
            (None, default_filter, &[]),
            (Some(""), default_filter, &[]),
            (
                Some("info,warmroute_server=debug"),
                "notify=off,info,warmroute_server=debug",
                &[],
            ),
            (
                Some("debug,foo=bar=baz"),
                "notify=off,debug",
                &["foo=bar=baz"],
            ),
            (Some("a=b"), default_filter, &["a=b"]),
        ];
        for (from_env, filter, invalid) in cases {
            assert_eq!(
                log_filter(LogLevel::Warn, from_env),
                (filter.to_owned(), invalid.to_vec()),
                "{from_env:?}"
            );
        }
    }

    #[test]
    fn debug_level_applies_to_warmroute_only() {
        let levels = |level, from_env| {
            let subscriber = tracing_subscriber::fmt()
                .with_env_filter(EnvFilter::new(log_filter(level, from_env).0))
                .finish();
            tracing::subscriber::with_default(subscriber, || {
                use tracing::{Level, enabled};
                [
                    enabled!(target: "warmroute_server::dispatch", Level::DEBUG),
                    enabled!(target: "warmroute::cmd", Level::DEBUG),
                    enabled!(target: "h2::codec::framed_read", Level::DEBUG),
                    enabled!(target: "hyper_util::client", Level::INFO),
                ]
            })
        };
        assert_eq!(levels(LogLevel::Debug, None), [true, true, false, true]);
        assert_eq!(levels(LogLevel::Trace, None), [true, true, false, true]);
        assert_eq!(levels(LogLevel::Info, None), [false, false, false, true]);
        let h2 = Some("warn,h2=debug");
        assert_eq!(levels(LogLevel::Debug, h2), [false, false, true, false]);
    }

    #[test]
    fn values_cannot_add_log_lines() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let log = file.reopen().unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_writer(move || EventWriter(log.try_clone().unwrap()))
            .with_ansi(false)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            warn!(error = %"refused\r\n2026-01-01 ERROR forged", "engine failed");
            warn!("next");
        });
        let log = std::fs::read_to_string(file.path()).unwrap();
        let lines: Vec<&str> = log.lines().collect();
        assert_eq!(lines.len(), 2, "{log}");
        assert!(
            lines[0].ends_with(r"error=refused\r\n2026-01-01 ERROR forged"),
            "{log}"
        );
        assert!(lines[1].ends_with("next"), "{log}");
    }

    #[test]
    fn only_constant_panic_messages_are_logged() {
        let constant = catch_unwind(|| panic!("a constant")).unwrap_err();
        assert_eq!(panic_message(&*constant), "a constant");
        let text = String::from("a \u{e9}CANARY");
        let quoting = catch_unwind(|| text[..3].len()).unwrap_err();
        assert!(!panic_message(&*quoting).contains("CANARY"));
    }
}
