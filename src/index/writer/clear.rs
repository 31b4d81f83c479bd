//! Clearing a rank, and leaving the index.

use super::{Place, RankWriter};
use crate::index::seats::Seat;

/// Blocks that a long change enters in a trie or takes out of it before it lets readers in.
pub(super) const SWEEP: usize = 256;

impl RankWriter {
    /// One step for readers: they stop reporting the seat. Then the blocks are taken out bit by bit.
    pub(super) fn clear(&mut self) {
        let left = self.seat;
        self.seat = self.index.seats.write().renew(left);
        self.tally.reset();
        self.untold = None;
        self.left = Default::default();
        self.counts = Default::default();
        self.extra.clear();
        self.aliases.clear();
        self.waiting = Default::default();
        // Taught again by the next events, or not, if it is another model now.
        self.groups = None;
        self.sweep(left);
    }

    /// Takes a seat that nobody sits on any more out of all tries.
    fn sweep(&mut self, left: Seat) {
        let names = std::mem::take(&mut self.names);
        let mut places: Vec<Place> = names.iter().map(|(_, named)| named.place).collect();
        drop(names);
        places.sort_unstable();
        for shard in places.chunk_by(|a, b| a.shard == b.shard) {
            for some in shard.chunks(SWEEP) {
                let mut trie = self.index.shards[usize::from(some[0].shard)].write();
                some.iter().for_each(|place| trie.evict(place.block, left));
            }
        }
        self.index.seats.write().free(left);
    }
}

impl Drop for RankWriter {
    fn drop(&mut self) {
        self.index.seats.write().leave(self.seat);
        self.sweep(self.seat);
    }
}
