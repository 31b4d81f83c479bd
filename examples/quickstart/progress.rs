//! Progress of the runs on standard error: a line for each step, and a progress bar for requests. If
//! standard error is not a terminal, lines replace the bar.

use std::io::{self, IsTerminal as _, Write as _};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressStyle};

/// Time between two lines that replace the progress bar.
const INTERVAL: Duration = Duration::from_secs(5);

/// Progress messages with the time since the start.
pub(crate) struct ProgressDisplay {
    started: Instant,
    is_terminal: bool,
}

impl ProgressDisplay {
    pub(crate) fn new() -> Self {
        Self {
            started: Instant::now(),
            is_terminal: io::stderr().is_terminal(),
        }
    }

    /// Prints a text without the time. Write errors are ignored, as for all progress messages.
    pub(crate) fn print(&self, text: &str) {
        _ = writeln!(io::stderr().lock(), "{text}");
    }

    /// Prints a line about the current step.
    pub(crate) fn print_step(&self, text: &str) {
        self.print(&step_line(self.started, text));
    }

    /// Returns a counter for the requests of a run.
    pub(crate) fn count_requests(&self, name: &str, total: usize) -> RequestCounter {
        let template = "       {msg}  {wide_bar}  {pos}/{len} requests";
        let style = ProgressStyle::with_template(template);
        let bar = style.ok().filter(|_| self.is_terminal).map(|style| {
            ProgressBar::new(total as u64)
                .with_message(name.to_owned())
                .with_style(style)
        });
        RequestCounter {
            name: name.to_owned(),
            total,
            started: self.started,
            first_request: Instant::now(),
            done: AtomicUsize::new(0),
            printed_intervals: AtomicUsize::new(0),
            bar,
        }
    }
}

/// Counter of the finished requests of a run.
pub(crate) struct RequestCounter {
    name: String,
    total: usize,
    started: Instant,
    first_request: Instant,
    done: AtomicUsize,
    /// Number of intervals since the first request at the last line.
    printed_intervals: AtomicUsize,
    bar: Option<ProgressBar>,
}

impl RequestCounter {
    /// Counts a request, and updates the bar or prints a line in each interval.
    pub(crate) fn add(&self) {
        let done = self.done.fetch_add(1, Ordering::Relaxed) + 1;
        if let Some(bar) = &self.bar {
            bar.inc(1);
            return;
        }
        let intervals = (self.first_request.elapsed().as_secs() / INTERVAL.as_secs()) as usize;
        if self
            .printed_intervals
            .fetch_max(intervals, Ordering::Relaxed)
            < intervals
        {
            self.print(done);
        }
    }

    /// Removes the bar and prints the number of requests.
    pub(crate) fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.print(self.done.load(Ordering::Relaxed));
    }

    fn print(&self, done: usize) {
        let text = format!("{}: {done}/{} requests", self.name, self.total);
        _ = writeln!(io::stderr().lock(), "{}", step_line(self.started, &text));
    }
}

fn step_line(started: Instant, text: &str) -> String {
    format!("{:>4} s  {text}", started.elapsed().as_secs())
}
