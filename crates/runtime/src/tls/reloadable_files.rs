//! Registry of the certificates, keys and tokens that are read from files. They are read again
//! after a file notification, by a slow poll, and on demand.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::lifecycle::file_watcher::{FileWatchTiming, FileWatcher};

/// State that is read from files.
pub trait FileBacked: Send + Sync {
    /// Returns the paths of the files.
    fn files(&self) -> Vec<PathBuf>;

    /// Reads the files. If they cannot be used, the current state stays in use.
    fn reload(&self);
}

/// Registry of file-backed state. Clones share one registry.
#[derive(Clone, Default)]
pub struct ReloadableFiles {
    all: Arc<Mutex<Vec<Arc<dyn FileBacked>>>>,
}

impl ReloadableFiles {
    /// Adds an entry. A running [`follow`](Self::follow) call does not watch its files.
    pub fn add(&self, entry: Arc<dyn FileBacked>) {
        self.all.lock().push(entry);
    }

    /// Reads all files now. The call blocks until they are read.
    pub fn reload(&self) {
        // The files are read without the lock, so that a slow file system does not block `add`.
        let all = self.all.lock().clone();
        for entry in all {
            entry.reload();
        }
    }

    /// Reads all files whenever they may have changed.
    pub async fn follow(&self, timing: FileWatchTiming) -> Infallible {
        let files: Vec<_> = self
            .all
            .lock()
            .iter()
            .flat_map(|entry| entry.files())
            .collect();
        if files.is_empty() {
            std::future::pending::<()>().await;
        }
        // Watching starts before the first read, so that no change is missed.
        let watcher = FileWatcher::new(&files);
        loop {
            let registry = self.clone();
            // After a panic, the next change triggers another attempt.
            let _read = tokio::task::spawn_blocking(move || registry.reload()).await;
            watcher.changed(timing).await;
        }
    }
}
