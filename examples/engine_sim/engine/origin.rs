//! Where the keys and values behind an answer came from. Real engines do not know, and so cannot tell; these put it into
//! every answer, so that a test can judge each one by itself and needs no counter
//! of a process that may have been killed meanwhile.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// The response header that tells it, where it is known when the headers leave.
pub(crate) const HEADER: &str = "x-engine-kv";

/// The field of documents and of the chunks of a stream that tells it, of engines that hand prompts over.
pub(crate) const FIELD: &str = "engine_kv";

/// From good to bad.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Origin {
    /// This engine.
    Computed,
    /// Another engine that kept them for this.
    Fetched,
    /// Another engine that kept them no longer; they were still there, by luck.
    Stale,
    /// Another prompt's.
    Mismatch,
}

const ALL: [(Origin, &str); 4] = [
    (Origin::Computed, "computed"),
    (Origin::Fetched, "fetched"),
    (Origin::Stale, "stale"),
    (Origin::Mismatch, "mismatch"),
];

/// The worst there is in any choice of an answer so far.
#[derive(Clone, Debug, Default)]
pub(crate) struct Worst(Arc<AtomicU8>);

impl Worst {
    pub(crate) fn note(&self, origin: Origin) {
        self.0.fetch_max(origin as u8, Ordering::Relaxed);
    }

    pub(crate) fn word(&self) -> &'static str {
        let now = self.0.load(Ordering::Relaxed);
        ALL.iter()
            .find(|(origin, _)| *origin as u8 == now)
            .map_or("computed", |(_, word)| word)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_worst_of_all_choices_is_told() {
        let worst = Worst::default();
        let mut told = vec![worst.word()];
        for origin in [
            Origin::Fetched,
            Origin::Computed,
            Origin::Stale,
            Origin::Mismatch,
            Origin::Fetched,
        ] {
            worst.note(origin);
            told.push(worst.word());
        }
        assert_eq!(
            told,
            [
                "computed", "fetched", "fetched", "stale", "mismatch", "mismatch"
            ]
        );
    }
}
