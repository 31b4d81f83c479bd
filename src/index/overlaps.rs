//! What a query answers: per slot, how many blocks of a prompt are cached, tier by tier. The answer is an array by slot
//! that the caller keeps and reuses; building a map per query was measured to cost more than the search itself.

use serde::{Deserialize, Serialize};

use super::owners::Owners;
use super::seats::{Seat, Seats};
use super::trie::Trie;
use crate::block::LocalHash;
use crate::tier::Tier;
use crate::worker::Slot;

/// Blocks of one prompt on one worker rank: leading blocks on the device, then what each slower tier adds beyond the
/// one before it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct TierBlocks {
    /// Leading blocks on the device.
    pub device: u32,
    /// Then in host memory.
    pub host: u32,
    /// Then on disk.
    pub disk: u32,
    /// Then in external storage.
    pub external: u32,
}

impl TierBlocks {
    /// Both together, where a request holds several prompts.
    pub fn plus(self, other: TierBlocks) -> TierBlocks {
        TierBlocks {
            device: self.device + other.device,
            host: self.host + other.host,
            disk: self.disk + other.disk,
            external: self.external + other.external,
        }
    }

    /// Blocks in all tiers, unweighted.
    pub fn total(self) -> u32 {
        self.device + self.host + self.disk + self.external
    }

    /// Blocks in device terms: what a slower tier holds counts by its weight.
    pub fn effective(self, host_weight: f64, disk_weight: f64) -> f64 {
        f64::from(self.device)
            + f64::from(self.host) * host_weight
            + (f64::from(self.disk) + f64::from(self.external)) * disk_weight
    }

    /// Only the first so many blocks.
    pub fn cut(self, most: u32) -> TierBlocks {
        let mut left = most;
        let mut first = |blocks: u32| {
            let kept = blocks.min(left);
            left -= kept;
            kept
        };
        let (device, host) = (first(self.device), first(self.host));
        TierBlocks { device, host, disk: first(self.disk), external: first(self.external) }
    }

    /// With so many leading blocks on the device, if they are more: these cover the beginning of what the slower tiers
    /// add, and only what lies beyond stays theirs.
    pub fn raised(self, device: u32) -> TierBlocks {
        let mut reached = self.device.max(device);
        let mut end = self.device;
        let mut beyond = |blocks: u32| {
            end += blocks;
            let added = end.saturating_sub(reached);
            reached += added;
            added
        };
        let (host, disk, external) = (beyond(self.host), beyond(self.disk), beyond(self.external));
        TierBlocks { device: self.device.max(device), host, disk, external }
    }

    fn of_mut(&mut self, tier: Tier) -> &mut u32 {
        match tier {
            Tier::Device => &mut self.device,
            Tier::HostPinned => &mut self.host,
            Tier::Disk => &mut self.disk,
            Tier::External => &mut self.external,
        }
    }
}

/// The answer to one query, and the scratch to compute the next without allocating. Clearing costs as much as was found.
#[derive(Clone, Debug, Default)]
pub struct Overlaps {
    by_slot: Vec<TierBlocks>,
    found: Vec<Slot>,
    /// Slots whose blocks are of use only beside what cache groups hold, a bit each.
    needy: Vec<u64>,
    by_seat: Vec<Progress>,
    walked: Vec<Seat>,
}

/// How far one seat's prefix reaches during a walk.
#[derive(Clone, Copy, Debug, Default)]
struct Progress {
    /// Blocks so far. A seat that is not among the owners of a run stays behind and never catches up.
    reached: u32,
    /// The tier it stands in; there is no way back to a faster one.
    tier: Tier,
    blocks: TierBlocks,
}

impl Overlaps {
    /// Nothing found yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What a slot has cached; zero if it was not found.
    pub fn get(&self, slot: Slot) -> TierBlocks {
        self.by_slot.get(slot.at()).copied().unwrap_or_default()
    }

    /// The slots that have anything cached, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, TierBlocks)> {
        self.found.iter().map(|&slot| (slot, self.by_slot[slot.at()]))
    }

    /// Raises what is found to what another answer finds on the device. Slots of models with cache groups stay: that a
    /// prompt was there says nothing of what the groups have kept of it.
    pub fn raise(&mut self, other: &Overlaps) {
        for (slot, blocks) in other.iter().filter(|(_, blocks)| blocks.device > 0) {
            if self.is_needy(slot) {
                continue;
            }
            if self.by_slot.len() <= slot.at() {
                self.by_slot.resize(slot.at() + 1, TierBlocks::default());
            }
            let mine = &mut self.by_slot[slot.at()];
            // Entries that are found are never zero.
            if mine.total() == 0 {
                self.found.push(slot);
            }
            *mine = mine.raised(blocks.device);
        }
    }

    fn is_needy(&self, slot: Slot) -> bool {
        self.needy.get(slot.at() / 64).is_some_and(|bits| bits & (1 << (slot.at() % 64)) != 0)
    }

    pub(super) fn clear(&mut self) {
        for slot in self.found.drain(..) {
            self.by_slot[slot.at()] = TierBlocks::default();
        }
        self.needy.clear();
    }

    /// The next `blocks` blocks after `start` have these owners. Says whether any prefix still reaches their end.
    pub(super) fn advance(&mut self, start: u32, blocks: u32, owners: &Owners) -> bool {
        let mut any = false;
        for (seat, tiers) in owners.iter() {
            if self.by_seat.len() <= seat.at() {
                self.by_seat.resize(seat.at() + 1, Progress::default());
            }
            let progress = &mut self.by_seat[seat.at()];
            if progress.reached != start {
                continue;
            }
            let Some(tier) = tiers.from(progress.tier) else { continue };
            if start == 0 {
                self.walked.push(seat);
            }
            progress.tier = tier;
            progress.reached += blocks;
            *progress.blocks.of_mut(tier) += blocks;
            any = true;
        }
        any
    }

    /// Shortens what was found on seats with needs to what all their cache groups can serve.
    pub(super) fn limit(&mut self, trie: &Trie, locals: &[LocalHash], seats: &Seats, most: u32) {
        let mut path: Option<Vec<_>> = None;
        let by_seat = &mut self.by_seat;
        self.walked.retain(|&seat| {
            let Some(needs) = seats.needs(seat) else { return true };
            let progress = &mut by_seat[seat.at()];
            let path = path.get_or_insert_with(|| trie.path(locals).collect());
            let held = path.iter().map(|(run, owners)| (run.clone(), owners.layers(seat)));
            let device = needs.reusable(held, progress.blocks.device.min(most));
            if device < progress.blocks.device {
                // What lies lower continues a prefix that cannot be reused so far.
                progress.blocks = TierBlocks { device, ..TierBlocks::default() };
            }
            let found = progress.blocks.total() > 0;
            if !found {
                *progress = Progress::default();
            }
            found
        });
    }

    /// Ends a walk: from seats to slots, leaving out the seats that nobody sits on any more.
    pub(super) fn settle(&mut self, seats: &Seats) {
        for slot in seats.needy() {
            if self.needy.len() <= slot.at() / 64 {
                self.needy.resize(slot.at() / 64 + 1, 0);
            }
            self.needy[slot.at() / 64] |= 1 << (slot.at() % 64);
        }
        for seat in self.walked.drain(..) {
            let progress = std::mem::take(&mut self.by_seat[seat.at()]);
            let Some(slot) = seats.slot(seat) else { continue };
            if self.by_slot.len() <= slot.at() {
                self.by_slot.resize(slot.at() + 1, TierBlocks::default());
            }
            self.by_slot[slot.at()] = progress.blocks;
            self.found.push(slot);
        }
    }
}
