//! Progress of the runs on standard error.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// Progress messages on standard error; disabled if the output is machine-readable.
pub(crate) struct ProgressDisplay {
    bar: ProgressBar,
}

impl ProgressDisplay {
    pub(crate) fn new(quiet: bool) -> Self {
        let bar = if quiet {
            ProgressBar::hidden()
        } else {
            ProgressBar::new_spinner()
        };
        bar.enable_steady_tick(Duration::from_millis(100));
        Self { bar }
    }

    pub(crate) fn set_message(&self, message: &'static str) {
        self.bar.set_message(message);
    }

    pub(crate) fn request_bar(&self, name: &'static str, requests: usize) -> ProgressBar {
        if self.bar.is_hidden() {
            return ProgressBar::hidden();
        }
        self.bar.set_message("");
        let style = ProgressStyle::with_template("{msg:<12} {wide_bar} {pos}/{len} requests").ok();
        let bar = ProgressBar::new(requests as u64).with_message(name);
        if let Some(style) = style {
            bar.with_style(style)
        } else {
            bar
        }
    }
}
