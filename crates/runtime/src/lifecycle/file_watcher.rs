//! File change notification.
//!
//! The watcher follows the parent directories of the files. This covers a rename into place, a
//! write in place, and the symbolic link swap of Kubernetes. A slow poll covers file systems
//! without notifications.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::{sleep, timeout};

use super::directory;

/// Maximum number of debounce periods before the files are read even if notifications continue.
const MAX_DEBOUNCE_ROUNDS: u32 = 10;

/// Poll and debounce intervals.
#[derive(Clone, Copy, Debug)]
pub struct FileWatchTiming {
    /// Maximum time between reads, in case a notification is lost.
    pub poll: Duration,
    /// Time without notifications before a read, because several files may change one after the
    /// other.
    pub debounce: Duration,
}

/// Timing of the watch of settings files.
pub const SETTINGS_WATCH: FileWatchTiming = FileWatchTiming {
    poll: Duration::from_secs(5),
    debounce: Duration::from_millis(100),
};

/// Watcher of files. Changes after its creation are not missed.
pub struct FileWatcher {
    notify: Arc<Notify>,
    /// `None` if the operating system cannot watch files; then only polling remains.
    _watcher: Option<RecommendedWatcher>,
}

impl FileWatcher {
    /// Watches the directories of the files.
    pub fn new(files: &[PathBuf]) -> Self {
        let change = Arc::new(Notify::new());
        Self {
            _watcher: watch_directories(files, change.clone()),
            notify: change,
        }
    }

    /// Waits until the files may have changed. It returns when a debounce period without
    /// notifications follows a notification, or when the poll interval ends.
    pub async fn changed(&self, timing: FileWatchTiming) {
        if timeout(timing.poll, self.notify.notified()).await.is_err() {
            return;
        }
        for _ in 0..MAX_DEBOUNCE_ROUNDS {
            // Notifications do not end a period, so a flood of them does not cause a flood of reads.
            sleep(timing.debounce).await;
            if self.notify.notified().now_or_never().is_none() {
                return;
            }
        }
    }
}

fn watch_directories(files: &[PathBuf], change: Arc<Notify>) -> Option<RecommendedWatcher> {
    let on_event = move |event: notify::Result<Event>| {
        if event.as_ref().map_or(true, is_change) {
            change.notify_one();
        }
    };
    let mut watcher = notify::recommended_watcher(on_event)
        .inspect_err(|error| {
            tracing::warn!(%error, "file watcher unavailable; files are only polled");
        })
        .ok()?;
    let directories: BTreeSet<&Path> = files.iter().map(|file| directory::of(file)).collect();
    for directory in directories {
        if let Err(error) = watcher.watch(directory, RecursiveMode::NonRecursive) {
            tracing::warn!(directory = %directory.display(), %error, "directory cannot be watched; its files are only polled");
        }
    }
    Some(watcher)
}

/// Returns true unless the event is a read, because the reload itself opens the files.
fn is_change(event: &Event) -> bool {
    match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn flood_of_notifications_is_debounced() {
        let watcher = FileWatcher {
            notify: Arc::default(),
            _watcher: None,
        };
        let timing = FileWatchTiming {
            poll: Duration::from_secs(5),
            debounce: Duration::from_millis(100),
        };
        let notify = watcher.notify.clone();
        let flood = tokio::spawn(async move {
            loop {
                notify.notify_one();
                sleep(Duration::from_millis(1)).await;
            }
        });
        let started = tokio::time::Instant::now();
        watcher.changed(timing).await;
        flood.abort();
        assert!(started.elapsed() >= timing.debounce * MAX_DEBOUNCE_ROUNDS);
        _ = flood.await;
        watcher.changed(timing).await;
        let quiet = tokio::time::Instant::now();
        watcher.notify.notify_one();
        watcher.changed(timing).await;
        assert!(quiet.elapsed() < 2 * timing.debounce);
    }

    #[test]
    fn only_writes_count_as_changes() {
        let event = |kind| Event::new(kind);
        assert!(!is_change(&event(EventKind::Access(AccessKind::Open(
            AccessMode::Any
        )))));
        assert!(!is_change(&event(EventKind::Access(AccessKind::Close(
            AccessMode::Read
        )))));
        assert!(is_change(&event(EventKind::Access(AccessKind::Close(
            AccessMode::Write
        )))));
        assert!(is_change(&event(EventKind::Create(
            notify::event::CreateKind::File
        ))));
    }
}
