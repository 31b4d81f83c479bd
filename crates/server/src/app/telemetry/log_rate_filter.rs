//! Limit of the log lines of one kind. A change of the whole fleet, such as the start with hundreds
//! of unreachable engines, would otherwise write a line for each worker.

use std::collections::HashMap;
use std::convert::Infallible;
use std::fmt::Debug;
use std::hash::Hash;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tracing::callsite::Identifier;
use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber, warn};
use tracing_subscriber::layer::{Context, Filter};

/// Maximum number of lines of one kind in a window.
const MAX_LINES: u32 = 20;
/// Length of a window. It starts with the first line of a kind.
const WINDOW: Duration = Duration::from_secs(10);
/// Interval between checks for omitted lines.
const REPORT_INTERVAL: Duration = Duration::from_secs(1);

/// Log filter that admits a limited number of lines from each place in the code. Levels below
/// `info` are not limited.
#[derive(Clone, Default)]
pub(super) struct LogRateFilter(Arc<Mutex<LineWindows<Identifier>>>);

impl LogRateFilter {
    /// Logs the number of omitted lines of each window that ended.
    pub(super) async fn report_omitted(&self) -> Infallible {
        loop {
            tokio::time::sleep(REPORT_INTERVAL).await;
            let ended = self.0.lock().take_ended(Instant::now());
            for omitted in ended {
                warn!(
                    lines = omitted.lines,
                    seconds = WINDOW.as_secs(),
                    of = omitted.message,
                    "similar log lines omitted"
                );
            }
        }
    }
}

impl<S: Subscriber> Filter<S> for LogRateFilter {
    fn enabled(&self, _metadata: &Metadata<'_>, _context: &Context<'_, S>) -> bool {
        true
    }

    fn event_enabled(&self, event: &Event<'_>, _context: &Context<'_, S>) -> bool {
        if *event.metadata().level() > Level::INFO {
            return true;
        }
        let kind = event.metadata().callsite();
        self.0
            .lock()
            .admit(kind, Instant::now(), || event_message(event))
    }
}

/// Returns the text of an event without its fields.
fn event_message(event: &Event<'_>) -> String {
    struct MessageVisitor(String);
    impl Visit for MessageVisitor {
        fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
            if field.name() == "message" {
                self.0 = format!("{value:?}");
            }
        }
    }
    let mut visitor = MessageVisitor(String::new());
    event.record(&mut visitor);
    visitor.0
}

/// Number of omitted lines of one kind.
#[derive(Debug, PartialEq, Eq)]
struct OmittedLines {
    lines: u64,
    message: String,
}

/// Current window of one kind of line.
struct LineWindow {
    started: Instant,
    admitted: u32,
    omitted: OmittedLines,
}

/// Current window of each kind of line. Pure: the clock is an argument.
struct LineWindows<K>(HashMap<K, LineWindow>);

impl<K> Default for LineWindows<K> {
    fn default() -> Self {
        Self(HashMap::new())
    }
}

impl<K: Eq + Hash> LineWindows<K> {
    /// Returns true if a line may be written. Otherwise counts it as omitted.
    fn admit(&mut self, kind: K, now: Instant, message: impl FnOnce() -> String) -> bool {
        let window = self.0.entry(kind).or_insert_with(|| LineWindow {
            started: now,
            admitted: 0,
            omitted: OmittedLines {
                lines: 0,
                message: message(),
            },
        });
        // The window of omitted lines ends with their report.
        if window.omitted.lines == 0 && now.saturating_duration_since(window.started) >= WINDOW {
            window.started = now;
            window.admitted = 0;
        }
        if window.admitted < MAX_LINES {
            window.admitted += 1;
            return true;
        }
        window.omitted.lines += 1;
        false
    }

    /// Removes the windows that ended. Returns those with omitted lines.
    fn take_ended(&mut self, now: Instant) -> Vec<OmittedLines> {
        let ended = self
            .0
            .extract_if(|_, window| now.saturating_duration_since(window.started) >= WINDOW);
        ended
            .map(|(_, window)| window.omitted)
            .filter(|omitted| omitted.lines > 0)
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn excess_lines_of_a_kind_are_counted() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut windows = LineWindows::default();
        let mut written = |kind: &'static str, seconds, lines: u32| {
            (0..lines)
                .filter(|_| windows.admit(kind, at(seconds), || format!("{kind} failed")))
                .count()
        };
        assert_eq!(written("source", 0, 500), 20);
        assert_eq!(written("worker", 5, 20), 20);
        assert_eq!(written("source", 9, 1), 0);
        assert_eq!(windows.take_ended(at(9)), []);
        let omitted = OmittedLines {
            lines: 481,
            message: "source failed".to_owned(),
        };
        assert_eq!(windows.take_ended(at(10)), [omitted]);
        assert!(windows.admit("source", at(10), String::new));
        assert_eq!(windows.take_ended(at(60)), []);
        assert!(windows.0.is_empty());
    }

    #[test]
    fn only_lines_from_info_upwards_are_limited() {
        use tracing::{debug, info};
        use tracing_subscriber::layer::SubscriberExt as _;
        use tracing_subscriber::{Layer as _, fmt, registry};

        let file = tempfile::NamedTempFile::new().unwrap();
        let log = file.reopen().unwrap();
        let lines = fmt::layer().with_writer(move || log.try_clone().unwrap());
        let limit = LogRateFilter::default();
        let subscriber = registry().with(lines.with_filter(limit.clone()));
        tracing::subscriber::with_default(subscriber, || {
            for worker in 0..100 {
                info!(worker, "worker lost");
                debug!(worker, "request routed");
            }
        });
        let log = std::fs::read_to_string(file.path()).unwrap();
        let count = |text| log.lines().filter(|line| line.contains(text)).count();
        assert_eq!((count("worker lost"), count("request routed")), (20, 100));
        let omitted = OmittedLines {
            lines: 80,
            message: "worker lost".to_owned(),
        };
        let ended = limit.0.lock().take_ended(Instant::now() + WINDOW);
        assert_eq!(ended, [omitted]);
    }
}
