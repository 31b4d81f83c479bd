//! From what names hold to what the tries know: a content is held as long as any of its names holds it.

use super::{Place, RankWriter, Scratch};
use crate::index::owners::{Layer, Layers};
use crate::index::trie::{BlockId, Hold, Trie};

impl RankWriter {
    /// Enters what was won in one shard.
    pub(super) fn grant(&mut self, trie: &mut Trie, shard: usize, scratch: &mut Scratch) {
        for layer in layers(&scratch.won) {
            let mut here = Vec::new();
            scratch.won.retain(|&(place, won)| {
                let taken = won == layer && usize::from(place.shard) == shard;
                here.extend(taken.then_some(place));
                !taken
            });
            here.sort_unstable_by_key(|place| trie.home(place.block));
            scratch.granted.clear();
            for place in here {
                // A place may have been won twice, by two names.
                let held = scratch.granted.last() == Some(&place.block);
                if held || trie.layers(place.block, self.seat).has(layer) {
                    *self.aliases.entry((place, layer)).or_insert(0) += 1;
                } else {
                    scratch.granted.push(place.block);
                }
            }
            self.count(layer, scratch.granted.len() as i64);
            trie.mark_all(
                &scratch.granted,
                Hold {
                    seat: self.seat,
                    layer,
                },
                true,
            );
        }
    }

    /// Enters what was won in shards that are not locked.
    pub(super) fn grant_elsewhere(&mut self, scratch: &mut Scratch) {
        let index = self.index.clone();
        while let Some(&(place, _)) = scratch.won.first() {
            let shard = usize::from(place.shard);
            let mut trie = index.shards[shard].write();
            self.grant(&mut trie, shard, scratch);
        }
    }

    /// Enters one thing that a name has won.
    pub(super) fn gain(&mut self, trie: &mut Trie, place: Place, layer: Layer) {
        if trie.layers(place.block, self.seat).has(layer) {
            *self.aliases.entry((place, layer)).or_insert(0) += 1;
        } else {
            trie.mark(
                place.block,
                1,
                Hold {
                    seat: self.seat,
                    layer,
                },
                true,
            );
            self.count(layer, 1);
        }
    }

    /// Lets go of what was lost in one shard.
    pub(super) fn release(&mut self, trie: &mut Trie, shard: usize, scratch: &mut Scratch) {
        for layer in layers(&scratch.lost) {
            self.gather(shard, layer, scratch);
            self.let_go(trie, shard, layer, &scratch.granted);
        }
    }

    /// Lets go of what was lost in shards that are not locked.
    pub(super) fn release_elsewhere(&mut self, scratch: &mut Scratch) {
        let index = self.index.clone();
        while let Some(&(place, layer)) = scratch.lost.first() {
            let shard = usize::from(place.shard);
            // Most events speak of one layer.
            self.gather(shard, layer, scratch);
            let mut trie = index.shards[shard].write();
            self.let_go(&mut trie, shard, layer, &scratch.granted);
            self.release(&mut trie, shard, scratch);
        }
    }

    /// Collects what nobody holds any more of what was lost of one layer in one shard.
    fn gather(&mut self, shard: usize, layer: Layer, scratch: &mut Scratch) {
        let Scratch {
            lost,
            granted: gone,
            ..
        } = scratch;
        gone.clear();
        lost.retain(|&(place, lost_layer)| {
            let here = lost_layer == layer && usize::from(place.shard) == shard;
            if here && (self.aliases.is_empty() || !self.has_other_name(place, layer)) {
                gone.push(place.block);
            }
            !here
        });
        let rows = gone
            .windows(2)
            .filter(|pair| pair[0].0.abs_diff(pair[1].0) != 1)
            .count();
        if rows > gone.len() / 4 {
            gone.sort_unstable();
        }
        if let Some(tier) = layer.tier() {
            self.tally.add_blocks(tier, -(gone.len() as i64));
        }
    }

    fn let_go(&self, trie: &mut Trie, shard: usize, layer: Layer, gone: &[BlockId]) {
        // Under the lock of the trie: whoever hears of a block by an answer looks there whether it is held.
        self.tally.doubts.lock().left_all(
            gone.iter().map(|&block| Place {
                shard: shard as u8,
                block,
            }),
            layer,
        );
        trie.release(
            gone,
            Hold {
                seat: self.seat,
                layer,
            },
        );
    }

    /// Takes one name off a content; whether another is left.
    fn has_other_name(&mut self, place: Place, layer: Layer) -> bool {
        let Some(others) = self.aliases.get_mut(&(place, layer)) else {
            return false;
        };
        *others -= 1;
        if *others == 0 {
            self.aliases.remove(&(place, layer));
        }
        true
    }

    pub(super) fn count(&self, layer: Layer, by: i64) {
        if let Some(tier) = layer.tier() {
            self.tally.add_blocks(tier, by);
        }
        if let Ok(count) = u64::try_from(by) {
            self.tally.doubts.lock().entered(layer, count);
        }
    }
}

/// The layers that a list speaks of.
fn layers(list: &[(Place, Layer)]) -> impl Iterator<Item = Layer> + use<> {
    list.iter()
        .fold(Layers::NONE, |layers, (_, layer)| layers.with(*layer))
        .iter()
}
