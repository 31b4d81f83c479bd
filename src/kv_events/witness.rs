//! What a source goes through, where others can see it: the state itself, shared with the router, and a sign whenever it
//! stands otherwise.

use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::trust::{Source, Standing};

/// The shared state of one event source.
#[derive(Clone, Debug)]
pub struct Witness {
    source: Arc<Mutex<Source>>,
    changed: Arc<Notify>,
    knocked: Arc<Notify>,
}

impl Default for Witness {
    fn default() -> Self {
        let source = Arc::new(Mutex::new(Source::new(unix_now())));
        Self {
            source,
            changed: Arc::default(),
            knocked: Arc::default(),
        }
    }
}

impl Witness {
    /// The state, for those who look and who tell of answers.
    pub fn source(&self) -> &Arc<Mutex<Source>> {
        &self.source
    }

    /// How it stands.
    pub fn standing(&self) -> Standing {
        self.source.lock().standing()
    }

    /// It begins anew.
    pub fn reset(&self) {
        *self.source.lock() = Source::new(unix_now());
        self.changed.notify_one();
    }

    /// Something happened.
    pub fn note(&self, how: impl FnOnce(&mut Source)) {
        let changed = self.source.lock().change(unix_now(), how);
        if changed {
            self.changed.notify_one();
        }
    }

    /// Ends when it stands otherwise than at the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whoever listens had better attach anew.
    pub fn knock(&self) {
        self.knocked.notify_one();
    }

    pub(super) async fn knocked(&self) {
        self.knocked.notified().await;
    }
}

/// Seconds of unix time; 0 before it began.
pub(super) fn unix_now() -> f64 {
    SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .map_or(0.0, |since| since.as_secs_f64())
}
