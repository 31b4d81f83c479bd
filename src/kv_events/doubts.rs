//! When doubts have gone. Batches that are lost leave blocks of which nobody knows whether they are still there. Each is
//! certain again when the engine stores it once more or removes it. What is left of them after as much was stored as the
//! cache has room for was either in use all the time or is gone: an engine evicts what was used longest ago. It is taken for
//! gone then, because a block too few costs one computation and a block too many costs one with every request.

use crate::worker::BlockSize;

/// What the index says of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Held {
    /// Blocks.
    pub blocks: u64,
    /// Those that may be gone.
    pub doubted: u64,
    /// Blocks of the engine that its cache has room for, where that is known.
    pub total: Option<u64>,
}

/// What is to be done about doubts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Due {
    Nothing,
    /// Count them again.
    Count,
    /// Take what is left for gone.
    Forget,
}

/// Doubts of one rank and what happened since they began.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Doubts {
    doubted: u64,
    /// Blocks stored or removed since the last count.
    touched: u64,
    /// So many of these before counting again can show that no doubt is left.
    wait: u64,
    /// Blocks stored since the doubts began.
    stored: u64,
    /// What the cache has room for.
    room: u64,
}

impl Doubts {
    /// Events were lost.
    pub(super) fn begin(&mut self, held: Held, room: u64) {
        *self = Self { room: room.max(held.blocks), ..Self::default() };
        self.counted(held);
    }

    pub(super) fn counted(&mut self, held: Held) {
        self.doubted = held.doubted;
        self.touched = 0;
        // Counting looks at all blocks, so it has to be worth it.
        self.wait = held.doubted.max(held.blocks / 1024);
    }

    pub(super) fn end(&mut self) {
        *self = Self::default();
    }

    pub(super) fn stored(&mut self, blocks: u64) {
        self.stored += blocks;
        self.touched += blocks;
    }

    pub(super) fn removed(&mut self, blocks: u64) {
        self.touched += blocks;
    }

    pub(super) fn due(&self) -> Due {
        if self.doubted == 0 {
            Due::Nothing
        } else if self.stored >= self.room {
            Due::Forget
        } else if self.touched >= self.wait {
            Due::Count
        } else {
            Due::Nothing
        }
    }
}

/// What a cache has room for, in blocks of ours; where it is not known, twice what it holds.
pub(super) fn room(engine: Option<BlockSize>, ours: BlockSize, held: Held) -> u64 {
    let engine = engine.unwrap_or(ours).tokens() as u64;
    match held.total {
        Some(total) => total.saturating_mul(engine) / ours.tokens() as u64,
        None => held.blocks.saturating_mul(2),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn doubts_are_counted_when_they_may_be_gone_and_end_with_a_whole_cache_of_new_blocks() {
        let mut doubts = Doubts::default();
        doubts.stored(1_000);
        assert_eq!(doubts.due(), Due::Nothing, "nothing is doubted");
        let held = |blocks, doubted| Held { blocks, doubted, total: None };
        doubts.begin(held(100, 100), 300);
        doubts.stored(60);
        doubts.removed(39);
        assert_eq!(doubts.due(), Due::Nothing);
        doubts.removed(1);
        assert_eq!(doubts.due(), Due::Count);
        doubts.counted(held(120, 30));
        doubts.stored(30);
        assert_eq!(doubts.due(), Due::Count);
        doubts.counted(held(120, 10));
        doubts.stored(210);
        assert_eq!(doubts.due(), Due::Forget);
        doubts.end();
        assert_eq!(doubts.due(), Due::Nothing);
    }

    #[test]
    fn room_is_told_in_our_blocks() {
        let size = |tokens| BlockSize::new(tokens).unwrap();
        let held = |total| Held { blocks: 50, doubted: 50, total };
        assert_eq!(room(Some(size(32)), size(16), held(Some(100))), 200);
        assert_eq!(room(Some(size(8)), size(16), held(Some(100))), 50);
        assert_eq!(room(None, size(16), held(None)), 100);
    }
}
