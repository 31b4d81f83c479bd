//! Following a file while we run. Changes are heard of by watching its folder, which covers a rename into place, a write
//! in place and Kubernetes' swap of a symbolic link; a slow poll lies below that for file systems that notify nobody.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use notify::event::{AccessKind, AccessMode};
use notify::{Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher};
use tokio::sync::Notify;
use tokio::time::timeout;

/// Notices in a row that are waited out before the file is read all the same.
const MOST_WAITS: u32 = 10;

/// One file under watch, from its making on: what changes after that is never missed.
pub struct FileWatch {
    heard: Arc<Notify>,
    /// None where the system cannot watch; the polls are left.
    _watcher: Option<RecommendedWatcher>,
}

impl FileWatch {
    /// Watches the file's folder.
    pub fn new(path: &Path) -> Self {
        let heard = Arc::new(Notify::new());
        Self {
            _watcher: listen(path, heard.clone()),
            heard,
        }
    }

    /// Waits until the file may have changed: something was heard of it and then nothing more for `debounce`, or `poll` is
    /// over.
    pub async fn changed(&self, poll: Duration, debounce: Duration) {
        if timeout(poll, self.heard.notified()).await.is_err() {
            return;
        }
        for _ in 0..MOST_WAITS {
            if timeout(debounce, self.heard.notified()).await.is_err() {
                return;
            }
        }
    }
}

fn listen(path: &Path, heard: Arc<Notify>) -> Option<RecommendedWatcher> {
    let folder = folder_of(path);
    let on_event = move |event: notify::Result<Event>| {
        if event.as_ref().map_or(true, is_change) {
            heard.notify_one();
        }
    };
    let started = notify::recommended_watcher(on_event).and_then(|mut watcher| {
        watcher.watch(&folder, RecursiveMode::NonRecursive)?;
        Ok(watcher)
    });
    started
        .inspect_err(|error| {
            tracing::warn!(file = %path.display(), %error, "cannot watch the folder of this file; it is only polled");
        })
        .ok()
}

fn folder_of(path: &Path) -> PathBuf {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    folder.unwrap_or(Path::new(".")).to_owned()
}

/// Our own reading opens the file, which is an event too and must not lead to the next reading.
fn is_change(event: &Event) -> bool {
    match event.kind {
        EventKind::Access(kind) => kind == AccessKind::Close(AccessMode::Write),
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reading_is_no_change_but_writing_is() {
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
