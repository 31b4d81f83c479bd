//! Naive model of a predictor: per rank, every block by its whole path, evicted one at a time.

use std::collections::BTreeMap;

type Path = Vec<u8>;

#[derive(Clone, Copy, Debug)]
pub(super) struct Block {
    /// Expiry step, then number of the use.
    stamp: (u64, u64),
    leases: u32,
}

/// State before a use.
#[derive(Clone, Copy, Debug)]
pub(super) struct UseSnapshot {
    known: usize,
    stamp: (u64, u64),
}

#[derive(Debug)]
pub(super) struct Model {
    max_blocks: u64,
    leases: bool,
    ttl: u64,
    blocks: BTreeMap<Path, Block>,
    /// Per path, the number of blocks generated after it, and the stamp of the release.
    generated: BTreeMap<Path, (u64, (u64, u64))>,
    growing: u64,
    uses: u64,
    pub(super) evicted: u64,
    pub(super) expired: u64,
    pub(super) refused: u64,
}

impl Model {
    pub(super) fn new(max_blocks: u64, leases: bool, ttl: u64) -> Self {
        let blocks = BTreeMap::new();
        let generated = BTreeMap::new();
        Self {
            max_blocks,
            leases,
            ttl,
            blocks,
            generated,
            growing: 0,
            uses: 0,
            evicted: 0,
            expired: 0,
            refused: 0,
        }
    }

    fn stamp(&mut self, now: u64) -> (u64, u64) {
        self.uses += 1;
        ((now + self.ttl).div_ceil(100), self.uses)
    }

    /// Records a prompt. Returns the number of blocks held, and the state before.
    pub(super) fn record(&mut self, path: &[u8], now: u64) -> (usize, UseSnapshot) {
        let stamp = self.stamp(now);
        let known = self.overlap(path);
        let held = self.generated.is_empty() && self.blocks.values().all(|block| block.leases > 0);
        let full = held && self.blocks() + self.generated() >= self.max_blocks;
        self.refused += if full { (path.len() - known) as u64 } else { 0 };
        let path = if full { &path[..known] } else { path };
        if let Some((count, _)) = self.generated.get_mut(&path[..known]) {
            *count -= (*count).min((path.len() - known) as u64);
            self.generated.retain(|_, (count, _)| *count > 0);
        }
        for end in 1..=path.len() {
            let block = self
                .blocks
                .entry(path[..end].to_vec())
                .or_insert(Block { stamp, leases: 0 });
            block.stamp = stamp;
            block.leases += u32::from(self.leases);
        }
        self.make_room();
        (path.len(), UseSnapshot { known, stamp })
    }

    /// Removes the blocks that only this use has added.
    pub(super) fn revoke(
        &mut self,
        path: &[u8],
        before_use: UseSnapshot,
        generated: u64,
        now: u64,
    ) {
        let UseSnapshot { known, stamp } = before_use;
        let leases = u32::from(self.leases);
        let exclusive = |end: &usize| {
            let block = self.blocks[&path[..*end]];
            block.stamp == stamp
                && block.leases == leases
                && !self.generated.contains_key(&path[..*end])
        };
        let reached = self.overlap(path);
        let exclusive: Vec<usize> = (known + 1..=reached).rev().take_while(exclusive).collect();
        let follows = |other: &Path| other.len() > reached && other.starts_with(&path[..reached]);
        let exclusive = if self.blocks.keys().any(follows) {
            Vec::new()
        } else {
            exclusive
        };
        self.release_only(path, generated, now);
        exclusive
            .iter()
            .for_each(|end| _ = self.blocks.remove(&path[..*end]));
        self.make_room();
    }

    pub(super) fn grow(&mut self, count: u64) {
        if self.leases {
            self.growing += count;
            self.make_room();
        }
    }

    pub(super) fn release(&mut self, path: &[u8], generated: u64, now: u64) {
        if !self.leases {
            return;
        }
        let stamp = self.release_only(path, generated, now);
        if generated > 0 {
            let entry = self.generated.entry(path.to_vec()).or_default();
            *entry = (entry.0 + generated, stamp);
        }
        self.make_room();
    }

    fn release_only(&mut self, path: &[u8], generated: u64, now: u64) -> (u64, u64) {
        if !self.leases {
            return (0, 0);
        }
        let stamp = self.stamp(now);
        for end in 1..=path.len() {
            let block = self.blocks.get_mut(&path[..end]).unwrap();
            block.leases -= 1;
            if block.leases == 0 {
                block.stamp = stamp;
            }
        }
        self.growing -= generated;
        stamp
    }

    pub(super) fn expire(&mut self, now: u64) {
        if !self.leases {
            let before = self.blocks();
            self.blocks.retain(|_, block| block.stamp.0 * 100 > now);
            self.expired += before - self.blocks();
        }
    }

    fn make_room(&mut self) {
        while self.blocks() + self.generated() > self.max_blocks {
            let free = self.blocks.iter().filter(|(_, block)| block.leases == 0);
            let blocks = free
                .map(|(path, block)| (block.stamp, usize::MAX - path.len(), path.clone(), false));
            let generated = self.generated.iter();
            let generated = generated.map(|(path, (_, stamp))| {
                (*stamp, usize::MAX - path.len() - 1, path.clone(), true)
            });
            let oldest = blocks.chain(generated).min();
            self.evicted += u64::from(oldest.is_some());
            match oldest {
                None => return,
                Some((_, _, path, false)) => {
                    self.blocks.remove(&path);
                }
                Some((_, _, path, true)) => {
                    self.generated.get_mut(&path).unwrap().0 -= 1;
                    self.generated.retain(|_, (count, _)| *count > 0);
                }
            }
        }
    }

    pub(super) fn leases(&self) -> bool {
        self.leases
    }

    pub(super) fn blocks(&self) -> u64 {
        self.blocks.len() as u64
    }

    pub(super) fn generated(&self) -> u64 {
        self.growing + self.generated.values().map(|(count, _)| count).sum::<u64>()
    }

    pub(super) fn overlap(&self, path: &[u8]) -> usize {
        (1..=path.len())
            .take_while(|&end| self.blocks.contains_key(&path[..end]))
            .count()
    }

    /// Iterates over all blocks.
    pub(super) fn paths(&self) -> impl Iterator<Item = &Path> {
        self.blocks.keys()
    }

    /// Returns whether the parent of every block is present.
    pub(super) fn has_all_parents(&self) -> bool {
        let before =
            |path: &Path| path.len() == 1 || self.blocks.contains_key(&path[..path.len() - 1]);
        let after = |path: &Path| path.is_empty() || self.blocks.contains_key(path);
        self.blocks.keys().all(before) && self.generated.keys().all(after)
    }
}
