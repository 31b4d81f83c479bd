//! Going on in the place of another reader, and being gone on from: the index and the position in the events change
//! together, so that whoever copies both can begin right behind what is in the copy.

use super::Feed;
use crate::index::{Position, Taught};
use crate::lifecycle::aside;
use crate::trust::Trust;
use crate::worker::BlockSize;

impl Feed {
    /// Changes the index and the position together, for whoever copies both.
    pub(super) fn moving<T>(&mut self, change: impl FnOnce(&mut Self) -> T) -> T {
        let position = self.sink.position.clone();
        // Whoever copies the rank takes long, and these threads serve others, too.
        let mut position = position
            .try_lock()
            .unwrap_or_else(|| aside(|| position.lock()));
        let outcome = change(self);
        *position = self.position();
        outcome
    }

    /// Where another reader could go on. Nowhere, while the events say nothing that could be used.
    fn position(&self) -> Option<Position> {
        let standing = self.witness.standing();
        if standing.trust == Trust::Absent {
            return None;
        }
        let ((seq, digest), taught) = self.sequencer.applied().zip(self.normalizer.taught())?;
        let engine = standing.engine_block_size.map(|size| size.0.get());
        let taught = Taught {
            engine,
            dropped: self.dropped,
            ..taught
        };
        Some(Position {
            seq,
            digest: digest.0,
            reading: self.reading,
            live: true,
            taught,
        })
    }

    /// Whether this is where another reader was a moment ago, so that the number of the next batch tells if any is missing.
    /// Asked once.
    pub(in crate::kv_events) fn takes_over(&mut self) -> bool {
        let Some(from) = self.resumed.take() else {
            return false;
        };
        let engine = from.taught.engine.and_then(BlockSize::new);
        self.witness
            .note(|source| engine.into_iter().for_each(|engine| source.sized(engine)));
        self.moving(Self::settle_doubts);
        from.live
    }
}
