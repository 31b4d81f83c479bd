//! Registry of the certificates, keys and tokens that are read from files. They are read again on a
//! file notification, by a slow poll, and on demand.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;

use crate::lifecycle::file_watcher::{FileWatchTiming, FileWatcher};

/// State that is read from files.
pub trait FileBacked: Send + Sync {
    /// Returns the paths.
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
    /// Adds an entry. A [`follow`](Self::follow) call that is already running does not watch it.
    pub fn add(&self, secret: Arc<dyn FileBacked>) {
        self.all.lock().push(secret);
    }

    /// Reads all files now. The files are small, but the call blocks.
    pub fn reload(&self) {
        // Read without the lock, so that a slow file system does not block `add`.
        let all = self.all.lock().clone();
        for secret in all {
            secret.reload();
        }
    }

    /// Reads all files whenever they may have changed.
    pub async fn follow(&self, timing: FileWatchTiming) -> Infallible {
        let files: Vec<_> = self
            .all
            .lock()
            .iter()
            .flat_map(|secret| secret.files())
            .collect();
        if files.is_empty() {
            std::future::pending::<()>().await;
        }
        // Watching starts before the first read, so that no change is missed.
        let watcher = FileWatcher::new(&files);
        loop {
            let secrets = self.clone();
            // After a panic, the next change triggers another attempt.
            let _read = tokio::task::spawn_blocking(move || secrets.reload()).await;
            watcher.changed(timing).await;
        }
    }
}
