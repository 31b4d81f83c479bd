//! State of an event source, shared with the router, with a notification for each status change.

use std::sync::Arc;
use std::time::SystemTime;

use parking_lot::Mutex;
use tokio::sync::Notify;

use warmroute_core::freshness::{EventSourceState, SourceStatus};

/// The shared state of one event source.
#[derive(Clone, Debug)]
pub struct SourceMonitor {
    source: Arc<Mutex<EventSourceState>>,
    changed: Arc<Notify>,
    reconnect: Arc<Notify>,
}

impl Default for SourceMonitor {
    fn default() -> Self {
        let source = Arc::new(Mutex::new(EventSourceState::new(SystemTime::now().into())));
        Self {
            source,
            changed: Arc::default(),
            reconnect: Arc::default(),
        }
    }
}

impl SourceMonitor {
    /// Returns the state itself, for readers and for recording request outcomes.
    pub fn source(&self) -> &Arc<Mutex<EventSourceState>> {
        &self.source
    }

    /// Returns the current status.
    pub fn status(&self) -> SourceStatus {
        self.source.lock().status()
    }

    /// Resets the state, as for a new source, except the counters.
    pub fn reset(&self) {
        self.source.lock().reset(SystemTime::now().into());
        self.changed.notify_one();
    }

    /// Updates the state and notifies the listener if the status changed.
    pub fn update(&self, change: impl FnOnce(&mut EventSourceState)) {
        let changed = self.source.lock().update(SystemTime::now().into(), change);
        if changed {
            self.changed.notify_one();
        }
    }

    /// Waits for a status change since the last call.
    pub async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Requests that the subscriber reconnects.
    pub fn request_reconnect(&self) {
        self.reconnect.notify_one();
    }

    pub(super) async fn reconnect_requested(&self) {
        self.reconnect.notified().await;
    }
}
