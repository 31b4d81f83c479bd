//! Where the two filters of one exchange find each other. The first filter in Envoy's list sees the answer's body and ends
//! its stream after the first piece of it, so that seeing the first token costs the same however long the answer is; it
//! knows the exchange by a name that the other filter put into dynamic metadata, where no client can write.

use std::sync::{Arc, OnceLock};

use dashmap::DashMap;
use tokio::sync::Notify;

type Hear = Box<dyn Fn(&str) + Send + Sync>;

/// The exchanges that wait for their first token.
#[derive(Default)]
pub(super) struct FirstTokens {
    waiting: DashMap<String, Arc<Notify>>,
    /// Told of those that nobody here waits for: another replica may.
    elsewhere: OnceLock<Hear>,
}

/// One exchange that waits for its first token; forgotten by drop.
pub(super) struct Awaited {
    name: String,
    seen: Arc<Notify>,
    among: Arc<FirstTokens>,
}

impl FirstTokens {
    /// Waits under a name that nobody else has.
    pub(super) fn expect(self: &Arc<Self>, name: String) -> Awaited {
        let seen = Arc::new(Notify::new());
        self.waiting.insert(name.clone(), seen.clone());
        Awaited {
            name,
            seen,
            among: self.clone(),
        }
    }

    /// The first token of the exchange of this name was seen; says whether anybody had waited for it.
    pub(super) fn seen(&self, name: &str) -> bool {
        let waiting = self.waiting.remove(name);
        if let Some((_, notify)) = &waiting {
            // Kept for whoever asks only later.
            notify.notify_one();
        }
        waiting.is_some()
    }

    /// The same, seen by us. If nobody here has waited for it, whoever wants to know of that is told.
    pub(super) fn seen_here(&self, name: &str) -> bool {
        let seen = self.seen(name);
        if let Some(hear) = self.elsewhere.get().filter(|_| !seen) {
            hear(name);
        }
        seen
    }

    pub(super) fn on_foreign(&self, hear: impl Fn(&str) + Send + Sync + 'static) {
        self.elsewhere.set(Box::new(hear)).ok();
    }
}

impl Awaited {
    /// Completes when the first token was seen; once.
    pub(super) async fn seen(&self) {
        self.seen.notified().await;
    }
}

impl Drop for Awaited {
    fn drop(&mut self) {
        self.among.waiting.remove(&self.name);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn what_was_seen_early_is_not_lost_and_nobody_is_remembered() {
        let first_tokens = Arc::new(FirstTokens::default());
        let awaited = first_tokens.expect("a".to_owned());
        assert!(!first_tokens.seen("b"));
        assert!(first_tokens.seen("a"));
        assert!(!first_tokens.seen("a"), "only once");
        awaited.seen().await;
        drop(first_tokens.expect("c".to_owned()));
        assert!(!first_tokens.seen("c"));
        assert!(first_tokens.waiting.is_empty());
    }
}
