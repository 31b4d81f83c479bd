//! Everything of this process that is read from files of certificates, keys and tokens, and read again when they change:
//! by notification, by a slow poll below that, and on demand.

use std::convert::Infallible;
use std::path::PathBuf;
use std::sync::Arc;

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::files::{self, Pace};

/// Something read from files.
pub trait Secret: Send + Sync {
    /// Which files.
    fn files(&self) -> Vec<PathBuf>;

    /// Reads them; what cannot be used leaves what is in use as it is.
    fn reload(&self);
}

/// All of them; clones are the same.
#[derive(Clone, Default)]
pub struct Secrets {
    all: Arc<Mutex<Vec<Arc<dyn Secret>>>>,
}

impl Secrets {
    /// Adds one; it is followed by a [`follow`](Self::follow) that begins later.
    pub fn add(&self, secret: Arc<dyn Secret>) {
        self.all.lock().push(secret);
    }

    /// Reads all of them now. The files are small, but it blocks.
    pub fn reload(&self) {
        // Not under the lock: a slow file system must not hold up whoever adds one.
        let all = self.all.lock().clone();
        for secret in all {
            secret.reload();
        }
    }

    /// Reads all of them whenever their files may have changed, for ever.
    pub async fn follow(&self, pace: Pace) -> Infallible {
        let files: Vec<_> = self
            .all
            .lock()
            .iter()
            .flat_map(|secret| secret.files())
            .collect();
        if files.is_empty() {
            std::future::pending::<()>().await;
        }
        let heard = Arc::new(Notify::new());
        // Listening starts before the first reading, so that no change falls between the two.
        let _watcher = files::listen(&files, heard.clone());
        loop {
            let secrets = self.clone();
            // A panic is of no one file; the next change is another try.
            let _read = tokio::task::spawn_blocking(move || secrets.reload()).await;
            files::change(&heard, pace).await;
        }
    }
}
