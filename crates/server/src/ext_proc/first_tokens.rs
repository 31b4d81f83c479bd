//! Reports of first tokens from one filter of an exchange to the other. The probe filter is the
//! first in Envoy's list. It receives the response body and ends its stream after the first piece,
//! so the cost does not depend on the length of the response. It identifies the exchange by a key
//! in the dynamic metadata, which the other filter sets and which clients cannot write.

use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use tokio::sync::Notify;

type FirstTokenListener = Box<dyn Fn(&str) + Send + Sync>;

/// The exchanges that wait for their first token.
#[derive(Default)]
pub(super) struct FirstTokenRegistry {
    waiting: DashMap<String, Arc<Notify>>,
    /// Listener for the keys that are not registered here, because they may belong to another
    /// replica.
    on_foreign: OnceLock<FirstTokenListener>,
}

/// One exchange that waits for its first token. Deregistered by drop.
pub(super) struct FirstTokenWaiter {
    key: String,
    notify: Arc<Notify>,
    registry: Arc<FirstTokenRegistry>,
}

impl FirstTokenRegistry {
    /// Registers an exchange under a unique key.
    pub(super) fn register(self: &Arc<Self>, key: String) -> FirstTokenWaiter {
        let observed = Arc::new(Notify::new());
        self.waiting.insert(key.clone(), observed.clone());
        FirstTokenWaiter {
            key,
            notify: observed,
            registry: self.clone(),
        }
    }

    /// Notifies the exchange with this key. Returns whether it was registered.
    pub(super) fn notify(&self, key: &str) -> bool {
        let waiter = self.waiting.remove(key);
        if let Some((_, notify)) = &waiter {
            // `notify_one` stores a permit, in case the exchange is not waiting yet.
            notify.notify_one();
        }
        waiter.is_some()
    }

    /// Notifies the exchange with this key after this process has observed the first token. An
    /// unknown key goes to the listener.
    pub(super) fn notify_observed(&self, key: &str) -> bool {
        let observed = self.notify(key);
        if let Some(listener) = self.on_foreign.get().filter(|_| !observed) {
            listener(key);
        }
        observed
    }

    pub(super) fn on_foreign(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        self.on_foreign.set(Box::new(listener)).ok();
    }
}

impl FirstTokenWaiter {
    /// Completes once, when the first token has been observed.
    pub(super) async fn notified(&self) {
        self.notify.notified().await;
    }
}

impl Drop for FirstTokenWaiter {
    fn drop(&mut self) {
        self.registry.waiting.remove(&self.key);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn early_first_token_is_kept_and_drop_deregisters() {
        let first_tokens = Arc::new(FirstTokenRegistry::default());
        let waiter = first_tokens.register("a".to_owned());
        assert!(!first_tokens.notify("b"));
        assert!(first_tokens.notify("a"));
        assert!(!first_tokens.notify("a"), "only once");
        waiter.notified().await;
        drop(first_tokens.register("c".to_owned()));
        assert!(!first_tokens.notify("c"));
        assert!(first_tokens.waiting.is_empty());
    }
}
