//! What a query answers: per slot, how many blocks of a prompt are cached, tier by tier. The answer is an array that the
//! caller keeps and reuses; building a map per query was measured to cost more than the search itself. Where all is on the
//! device, as nearly always, only a number per seat is written, and where all seats hold a run, for 64 of them at once.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::owners::{Layers, Owners, ones, unpack};
use super::seats::{Plan, Seat};
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
        TierBlocks {
            device,
            host,
            disk: first(self.disk),
            external: first(self.external),
        }
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
        TierBlocks {
            device: self.device.max(device),
            host,
            disk,
            external,
        }
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

/// The answer to one query, and the scratch to compute the next without allocating. It is kept by seat, as it was found,
/// and costs as much as was found; most of it for 64 seats at a time.
#[derive(Clone, Debug, Default)]
pub struct Overlaps {
    /// Whose seats these are.
    plan: Option<Arc<Plan>>,
    /// Seats with anything found, a bit each.
    walked: Vec<u64>,
    /// Where these are not zero.
    words: Vec<u32>,
    /// Blocks so far, of those that were walked. A seat that is not among the owners of a run stays behind and never
    /// catches up.
    reached: Vec<u32>,
    /// Of the seats that were walked, those that hold some blocks in slower tiers only.
    slower: Vec<u64>,
    /// How far each of these got.
    by_tier: Vec<ByTier>,
    /// What another answer found on slots without a seat.
    beside: Vec<TierBlocks>,
    found_beside: Vec<Slot>,
}

/// A prefix that lies in several tiers, or not in the fastest.
#[derive(Clone, Copy, Debug, Default)]
struct ByTier {
    /// The tier it ends in; there is no way back to a faster one.
    tier: Tier,
    blocks: TierBlocks,
}

impl Overlaps {
    /// Nothing found yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// What a slot has cached; zero if it was not found, as it is with most.
    #[inline]
    pub fn get(&self, slot: Slot) -> TierBlocks {
        match self.seat(slot) {
            Some(seat) if !has(&self.walked, seat) => TierBlocks::default(),
            Some(seat) => self.at(seat),
            None => self.beside.get(slot.at()).copied().unwrap_or_default(),
        }
    }

    /// The slots that have anything cached, in no particular order.
    pub fn iter(&self) -> impl Iterator<Item = (Slot, TierBlocks)> {
        let plan = self.plan.as_deref();
        let seated = self
            .walked_seats()
            .filter_map(move |seat| Some((plan?.slot(seat)?, self.at(seat))));
        seated.chain(
            self.found_beside
                .iter()
                .map(|&slot| (slot, self.beside[slot.at()])),
        )
    }

    /// Raises what is found to what another answer finds on the device. Slots of models with cache groups stay: that a
    /// prompt was there says nothing of what the groups have kept of it.
    pub fn raise(&mut self, other: &Overlaps) {
        self.raise_where(other, |_| true);
    }

    /// The same for some slots only.
    pub fn raise_where(&mut self, other: &Overlaps, may: impl Fn(Slot) -> bool) {
        for (slot, blocks) in other
            .iter()
            .filter(|(slot, blocks)| blocks.device > 0 && may(*slot))
        {
            let raised = self.get(slot).raised(blocks.device);
            match self.seat(slot) {
                Some(seat)
                    if self
                        .plan
                        .as_ref()
                        .is_some_and(|plan| plan.needs(seat).is_some()) => {}
                Some(seat) => self.put(seat, raised),
                None => self.put_beside(slot, raised),
            }
        }
    }

    /// Takes over what somebody else found, in place of whatever was found here.
    pub fn take_over(&mut self, found: impl IntoIterator<Item = (Slot, TierBlocks)>) {
        self.clear();
        self.plan = None;
        found
            .into_iter()
            .filter(|(_, blocks)| blocks.total() > 0)
            .for_each(|(slot, found)| self.put_beside(slot, found));
    }

    fn put_beside(&mut self, slot: Slot, blocks: TierBlocks) {
        if self.beside.len() <= slot.at() {
            self.beside.resize(slot.at() + 1, TierBlocks::default());
        }
        // Entries that are found are never zero.
        if self.beside[slot.at()].total() == 0 {
            self.found_beside.push(slot);
        }
        self.beside[slot.at()] = blocks;
    }

    pub(super) fn clear(&mut self) {
        for word in self.words.drain(..) {
            self.walked[word as usize] = 0;
            if let Some(slower) = self.slower.get_mut(word as usize) {
                *slower = 0;
            }
        }
        for slot in self.found_beside.drain(..) {
            self.beside[slot.at()] = TierBlocks::default();
        }
    }

    /// The next `blocks` blocks after `start` have these owners. Says whether any prefix still reaches their end.
    pub(super) fn advance(&mut self, start: u32, blocks: u32, owners: &Owners) -> bool {
        let mut any = false;
        if let Some(bits) = owners.bits() {
            any = if start == 0 {
                self.begin_all(blocks, bits)
            } else {
                self.advance_all(start, blocks, bits)
            };
        }
        for &word in owners.words() {
            let (seat, layers) = unpack(word);
            any |= if start == 0 {
                self.begin(seat, layers, blocks)
            } else {
                self.step(seat, layers, start, blocks)
            };
        }
        any
    }

    /// Shortens what was found on seats with needs to what all their cache groups can serve.
    pub(super) fn limit(&mut self, trie: &Trie, locals: &[LocalHash], seats: &Plan, most: u32) {
        let mut path: Option<Vec<_>> = None;
        let needy: Vec<Seat> = self
            .walked_seats()
            .filter(|seat| seats.needs(*seat).is_some())
            .collect();
        for seat in needy {
            let Some(needs) = seats.needs(seat) else {
                continue;
            };
            let found = self.at(seat);
            let path = path.get_or_insert_with(|| trie.path(locals).collect());
            let held = path
                .iter()
                .map(|(run, owners)| (run.clone(), owners.layers(seat)));
            let device = needs.reusable(held, found.device.min(most));
            if device < found.device {
                // What lies lower continues a prefix that cannot be reused so far.
                self.put(
                    seat,
                    TierBlocks {
                        device,
                        ..TierBlocks::default()
                    },
                );
            }
        }
    }

    /// Ends a walk: from now on the seats are those of this plan.
    pub(super) fn settle(&mut self, plan: &Arc<Plan>) {
        if !self
            .plan
            .as_ref()
            .is_some_and(|known| Arc::ptr_eq(known, plan))
        {
            self.plan = Some(plan.clone());
        }
    }

    fn seat(&self, slot: Slot) -> Option<Seat> {
        self.plan.as_ref()?.seat(slot)
    }

    fn walked_seats(&self) -> impl Iterator<Item = Seat> {
        self.words.iter().flat_map(|&word| {
            ones(self.walked[word as usize]).map(move |bit| Seat(word * 64 + bit))
        })
    }

    /// What was found at a seat that was walked.
    fn at(&self, seat: Seat) -> TierBlocks {
        if has(&self.slower, seat) {
            return self.by_tier[seat.at()].blocks;
        }
        TierBlocks {
            device: self.reached[seat.at()],
            ..TierBlocks::default()
        }
    }

    /// Replaces what was found at a seat.
    fn put(&mut self, seat: Seat, blocks: TierBlocks) {
        if blocks.total() == 0 {
            if let Some(bits) = self.walked.get_mut(seat.at() / 64) {
                *bits &= !(1 << (seat.at() % 64));
            }
            return;
        }
        let word = seat.at() / 64;
        if self.walked.get(word).is_some_and(|bits| *bits == 0)
            && self.words.contains(&(word as u32))
        {
            // All that was found among these has been taken back.
            self.walked[word] = 1 << (seat.at() % 64);
        }
        self.enter(seat);
        self.reached[seat.at()] = blocks.total();
        if blocks.device < blocks.total() || has(&self.slower, seat) {
            *self.by_tier(seat) = ByTier {
                tier: Tier::Device,
                blocks,
            };
        }
    }

    fn enter(&mut self, seat: Seat) {
        let at = seat.at() / 64;
        self.fit(at + 1);
        if self.walked[at] == 0 {
            self.words.push(at as u32);
        }
        self.walked[at] |= 1 << (seat.at() % 64);
    }

    /// Makes room for the seats of so many words.
    fn fit(&mut self, words: usize) {
        if self.walked.len() < words {
            self.walked.resize(words, 0);
            self.reached.resize(words * 64, 0);
        }
    }

    fn by_tier(&mut self, seat: Seat) -> &mut ByTier {
        if self.slower.len() <= seat.at() / 64 {
            self.slower.resize(seat.at() / 64 + 1, 0);
            self.by_tier
                .resize(self.slower.len() * 64, ByTier::default());
        }
        self.slower[seat.at() / 64] |= 1 << (seat.at() % 64);
        &mut self.by_tier[seat.at()]
    }

    /// The first blocks lie in these layers at a seat.
    fn begin(&mut self, seat: Seat, layers: Layers, blocks: u32) -> bool {
        let Some(tier) = layers.from(Tier::Device) else {
            return false;
        };
        self.enter(seat);
        self.reached[seat.at()] = blocks;
        if tier != Tier::Device {
            let mut by_tier = ByTier {
                tier,
                ..ByTier::default()
            };
            *by_tier.blocks.of_mut(tier) = blocks;
            *self.by_tier(seat) = by_tier;
        }
        true
    }

    /// The first blocks lie on the device at all these seats.
    fn begin_all(&mut self, blocks: u32, bits: &[u64]) -> bool {
        self.fit(bits.len());
        for (at, &bits) in bits.iter().enumerate().filter(|(_, bits)| **bits != 0) {
            self.words.push(at as u32);
            self.walked[at] = bits;
            // What is written for the others is never read.
            self.reached[at * 64..][..64].fill(blocks);
        }
        true
    }

    /// A seat that has come to `start` holds the next blocks in these layers.
    fn step(&mut self, seat: Seat, layers: Layers, start: u32, blocks: u32) -> bool {
        if !has(&self.walked, seat) || self.reached[seat.at()] != start {
            return false;
        }
        let slower = has(&self.slower, seat);
        let from = if slower {
            self.by_tier[seat.at()].tier
        } else {
            Tier::Device
        };
        let Some(tier) = layers.from(from) else {
            return false;
        };
        self.reached[seat.at()] += blocks;
        if slower || tier != Tier::Device {
            let by_tier = self.by_tier(seat);
            if !slower {
                by_tier.blocks = TierBlocks {
                    device: start,
                    ..TierBlocks::default()
                };
            }
            by_tier.tier = tier;
            *by_tier.blocks.of_mut(tier) += blocks;
        }
        true
    }

    /// All these seats hold the next blocks on the device.
    fn advance_all(&mut self, start: u32, blocks: u32, bits: &[u64]) -> bool {
        let mut any = false;
        for &at in &self.words {
            let at = at as usize;
            let slower = self.slower.get(at).copied().unwrap_or(0);
            let both = self.walked[at] & bits.get(at).copied().unwrap_or(0) & !slower;
            let reached = &mut self.reached[at * 64..][..64];
            if both != 0
                && both == self.walked[at]
                && ones(both).all(|bit| reached[bit as usize] == start)
            {
                reached.fill(start + blocks);
                any = true;
                continue;
            }
            for bit in ones(both) {
                let reached = &mut reached[bit as usize];
                if *reached == start {
                    *reached += blocks;
                    any = true;
                }
            }
            for bit in ones(self.walked[at] & bits.get(at).copied().unwrap_or(0) & slower) {
                any |= self.by_tier[at * 64 + bit as usize].advance(
                    start,
                    blocks,
                    &mut reached[bit as usize],
                );
            }
        }
        any
    }
}

impl ByTier {
    /// The next blocks lie on the device.
    fn advance(&mut self, start: u32, blocks: u32, reached: &mut u32) -> bool {
        let goes_on = *reached == start && self.tier == Tier::Device;
        if goes_on {
            *reached += blocks;
            self.blocks.device += blocks;
        }
        goes_on
    }
}

fn has(bits: &[u64], seat: Seat) -> bool {
    bits.get(seat.at() / 64)
        .is_some_and(|bits| bits & (1 << (seat.at() % 64)) != 0)
}
