//! Progress of the checks, so that slow ones are reported while they run.

use std::collections::BTreeMap;
use std::io::Write;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;

/// Interval between reports.
const INTERVAL: Duration = Duration::from_secs(5);

/// The running checks by name, each with its current step.
#[derive(Clone, Debug, Default)]
pub(super) struct DoctorProgress {
    open: Arc<Mutex<BTreeMap<String, String>>>,
}

/// A running check, which ends on drop.
#[derive(Debug)]
pub(super) struct OpenPart {
    name: String,
    progress: DoctorProgress,
}

impl DoctorProgress {
    /// Starts a check.
    pub(super) fn open(&self, name: String, step: &str) -> OpenPart {
        let part = OpenPart {
            name,
            progress: self.clone(),
        };
        part.step(step);
        part
    }

    /// Runs `work`, and writes the running checks to `err` at intervals until it completes.
    pub(super) async fn report<T>(&self, work: impl Future<Output = T>, err: &mut impl Write) -> T {
        let mut work = pin!(work);
        loop {
            match tokio::time::timeout(INTERVAL, &mut work).await {
                Ok(done) => return done,
                Err(_) => _ = writeln!(err, "waiting for {}", self.format_open()),
            }
        }
    }

    fn format_open(&self) -> String {
        let open = self.open.lock();
        let parts = open.iter().map(|(name, step)| format!("{name} ({step})"));
        if open.is_empty() {
            "the configuration".to_owned()
        } else {
            parts.collect::<Vec<_>>().join(", ")
        }
    }
}

impl OpenPart {
    /// Sets the current step.
    pub(super) fn step(&self, step: impl Into<String>) {
        self.progress
            .open
            .lock()
            .insert(self.name.clone(), step.into());
    }

    /// Returns the current step.
    pub(super) fn current(&self) -> String {
        self.progress
            .open
            .lock()
            .get(&self.name)
            .cloned()
            .unwrap_or_default()
    }
}

impl Drop for OpenPart {
    fn drop(&mut self) {
        self.progress.open.lock().remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn open_parts_are_reported_at_intervals() {
        let progress = DoctorProgress::default();
        let work = async {
            let first = progress.open("worker 1".to_owned(), "/health");
            let second = progress.open("Envoy".to_owned(), "/config_dump");
            tokio::time::sleep(Duration::from_secs(7)).await;
            first.step("rank 0: canary");
            drop(second);
            tokio::time::sleep(Duration::from_secs(5)).await;
            7
        };
        let mut err = Vec::new();
        assert_eq!(progress.report(work, &mut err).await, 7);
        let expected = "waiting for Envoy (/config_dump), worker 1 (/health)\nwaiting for worker \
        1 (rank 0: canary)\n";
        assert_eq!(String::from_utf8(err).unwrap(), expected);
    }

    #[tokio::test(start_paused = true)]
    async fn quick_work_reports_nothing() {
        let mut err = Vec::new();
        DoctorProgress::default().report(async {}, &mut err).await;
        assert!(err.is_empty());
    }
}
