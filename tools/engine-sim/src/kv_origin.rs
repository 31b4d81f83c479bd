//! Origin of the keys and values that a response was generated from. Real engines do not track it.
//! The simulator adds it to every response, so that a test can check each response alone. A counter
//! would be lost when the process is killed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};

/// Response header with the origin, if it is known when the headers are sent.
pub(crate) const KV_ORIGIN_HEADER: &str = "x-engine-kv";

/// Field with the origin in response documents and stream chunks of engines with disaggregated
/// prefill.
pub(crate) const KV_ORIGIN_FIELD: &str = "engine_kv";

/// Origins, from best to worst.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum KvOrigin {
    /// Computed by this engine.
    Computed,
    /// Fetched from another engine while the blocks were leased to this request.
    Fetched,
    /// Fetched after the other engine had released the blocks, before they were overwritten.
    Stale,
    /// Contents of another prompt.
    Mismatch,
}

const LABELS: [(KvOrigin, &str); 4] = [
    (KvOrigin::Computed, "computed"),
    (KvOrigin::Fetched, "fetched"),
    (KvOrigin::Stale, "stale"),
    (KvOrigin::Mismatch, "mismatch"),
];

/// The worst origin so far among the choices of a response.
#[derive(Clone, Debug, Default)]
pub(crate) struct WorstOrigin(Arc<AtomicU8>);

impl WorstOrigin {
    pub(crate) fn record(&self, origin: KvOrigin) {
        self.0.fetch_max(origin as u8, Ordering::Relaxed);
    }

    pub(crate) fn label(&self) -> &'static str {
        let now = self.0.load(Ordering::Relaxed);
        LABELS
            .iter()
            .find(|(origin, _)| *origin as u8 == now)
            .map_or("computed", |(_, label)| label)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn worst_origin_of_all_choices_is_reported() {
        let worst_origin = WorstOrigin::default();
        let mut labels = vec![worst_origin.label()];
        for origin in [
            KvOrigin::Fetched,
            KvOrigin::Computed,
            KvOrigin::Stale,
            KvOrigin::Mismatch,
            KvOrigin::Fetched,
        ] {
            worst_origin.record(origin);
            labels.push(worst_origin.label());
        }
        assert_eq!(
            labels,
            [
                "computed", "fetched", "fetched", "stale", "mismatch", "mismatch"
            ]
        );
    }
}
