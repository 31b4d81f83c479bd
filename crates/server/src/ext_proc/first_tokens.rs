//! Reports about the content of responses from one filter of an exchange to the other. The probe
//! filter is the first in Envoy's list. It receives the response body and ends its stream after the
//! first content, so the cost does not depend on the length of the response. It identifies the
//! exchange by a key in the dynamic metadata, which the other filter sets and which clients cannot
//! write.

use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use tokio::sync::oneshot;

use super::response_content::ContentReport;

type FirstTokenListener = Box<dyn Fn(&str) + Send + Sync>;

/// The exchanges that wait for their first token.
#[derive(Default)]
pub(super) struct FirstTokenRegistry {
    waiting: DashMap<String, oneshot::Sender<ContentReport>>,
    /// Listener for the keys that are not registered here, because they may belong to another
    /// replica.
    on_foreign: OnceLock<FirstTokenListener>,
}

/// One exchange that waits for its first token. Deregistered by drop.
pub(super) struct FirstTokenWaiter {
    key: String,
    report_rx: oneshot::Receiver<ContentReport>,
    registry: Arc<FirstTokenRegistry>,
}

impl FirstTokenRegistry {
    /// Registers an exchange under a unique key.
    pub(super) fn register(self: &Arc<Self>, key: String) -> FirstTokenWaiter {
        let (report_tx, report_rx) = oneshot::channel();
        self.waiting.insert(key.clone(), report_tx);
        FirstTokenWaiter {
            key,
            report_rx,
            registry: self.clone(),
        }
    }

    /// Notifies the exchange with this key. Returns whether it was registered.
    pub(super) fn notify(&self, key: &str, report: ContentReport) -> bool {
        self.waiting
            .remove(key)
            .is_some_and(|(_, report_tx)| report_tx.send(report).is_ok())
    }

    /// Notifies the exchange with this key after this process has observed its response. The first
    /// token of an unknown key goes to the listener.
    pub(super) fn notify_observed(&self, key: &str, report: ContentReport) -> bool {
        let is_known = self.notify(key, report);
        let is_foreign = !is_known && report == ContentReport::Content;
        if let Some(listener) = self.on_foreign.get().filter(|_| is_foreign) {
            listener(key);
        }
        is_known
    }

    pub(super) fn on_foreign(&self, listener: impl Fn(&str) + Send + Sync + 'static) {
        self.on_foreign.set(Box::new(listener)).ok();
    }
}

impl FirstTokenWaiter {
    /// Completes once, with the first report. Not called again afterwards.
    pub(super) async fn reported(&mut self) -> ContentReport {
        match (&mut self.report_rx).await {
            Ok(report) => report,
            // The registry is gone.
            Err(_) => std::future::pending().await,
        }
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
        let mut waiter = first_tokens.register("a".to_owned());
        let content = ContentReport::Content;
        assert!(!first_tokens.notify("b", content));
        assert!(first_tokens.notify("a", content));
        assert!(
            !first_tokens.notify("a", ContentReport::Stopped),
            "only once"
        );
        assert_eq!(waiter.reported().await, content);
        drop(first_tokens.register("c".to_owned()));
        assert!(!first_tokens.notify("c", content));
        assert!(first_tokens.waiting.is_empty());
    }
}
