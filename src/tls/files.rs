//! Noticing that files changed. The folders are watched, which covers a rename into place, a write in place and
//! Kubernetes' swap of a symbolic link; a slow poll lies below that for file systems that notify nobody.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::timeout;

/// Notices in a row that are waited out before the files are read all the same.
const MOST_WAITS: u32 = 10;

/// How closely files are followed.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// They are read at least this often, should a notification be lost.
    pub poll: Duration,
    /// They must be quiet this long before they are read: certificate and key change one after the other.
    pub debounce: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            poll: Duration::from_secs(10),
            debounce: Duration::from_millis(250),
        }
    }
}

/// Waits until files may have changed.
pub(super) async fn change(heard: &Notify, pace: Pace) {
    if timeout(pace.poll, heard.notified()).await.is_err() {
        return;
    }
    for _ in 0..MOST_WAITS {
        if timeout(pace.debounce, heard.notified()).await.is_err() {
            return;
        }
    }
}

/// Tells `heard` of changes in the folders of the files, until it is dropped.
pub(super) fn listen(files: &[PathBuf], heard: Arc<Notify>) -> Option<RecommendedWatcher> {
    let folder = |file: &PathBuf| {
        let folder = file
            .parent()
            .filter(|folder| !folder.as_os_str().is_empty());
        folder.unwrap_or(Path::new(".")).to_owned()
    };
    let folders: BTreeSet<_> = files.iter().map(folder).collect();
    let on_event = move |event: notify::Result<Event>| {
        if event.as_ref().map_or(true, is_change) {
            heard.notify_one();
        }
    };
    let only_polled = |error: &notify::Error| tracing::warn!(%error, "cannot watch certificates; they are only polled");
    let mut watcher = notify::recommended_watcher(on_event)
        .inspect_err(only_polled)
        .ok()?;
    for folder in folders {
        if let Err(error) = watcher.watch(&folder, RecursiveMode::NonRecursive) {
            tracing::warn!(folder = %folder.display(), %error, "cannot watch the folder; its files are only polled");
        }
    }
    Some(watcher)
}

/// Our own reading opens files, which is an event too and must not lead to the next reading.
fn is_change(event: &Event) -> bool {
    match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        _ => true,
    }
}
