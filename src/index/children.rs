//! What follows a run: from the local hash of the next block to the run that begins with it. Most runs have no child or
//! one, a shared system prompt has very many; the two want different containers.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::block::LocalHash;

/// From this many on, a map.
const MANY: usize = 16;

/// A map whose keys are hashes already.
pub(super) type Mixed<K, V> = HashMap<K, V, BuildHasherDefault<Mix>>;

/// Children of a run, by their first block.
#[derive(Debug)]
pub(super) enum Children {
    Few(Vec<(LocalHash, u32)>),
    Many(Mixed<LocalHash, u32>),
}

impl Default for Children {
    fn default() -> Self {
        Self::Few(Vec::new())
    }
}

impl Children {
    pub(super) fn one(local: LocalHash, run: u32) -> Self {
        Self::Few(vec![(local, run)])
    }

    pub(super) fn get(&self, local: LocalHash) -> Option<u32> {
        match self {
            Self::Few(list) => list.iter().find(|(first, _)| *first == local).map(|(_, run)| *run),
            Self::Many(map) => map.get(&local).copied(),
        }
    }

    pub(super) fn set(&mut self, local: LocalHash, run: u32) {
        match self {
            Self::Few(list) => {
                if let Some(entry) = list.iter_mut().find(|(first, _)| *first == local) {
                    entry.1 = run;
                } else if list.len() < MANY {
                    list.push((local, run));
                } else {
                    let mut map: Mixed<_, _> = list.drain(..).collect();
                    map.insert(local, run);
                    *self = Self::Many(map);
                }
            }
            Self::Many(map) => {
                map.insert(local, run);
            }
        }
    }

    pub(super) fn remove(&mut self, local: LocalHash) {
        match self {
            Self::Few(list) => list.retain(|(first, _)| *first != local),
            Self::Many(map) => {
                map.remove(&local);
                if map.len() <= MANY / 2 {
                    *self = Self::Few(map.drain().collect());
                }
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::Few(list) => list.len(),
            Self::Many(map) => map.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The child, if there is exactly one.
    pub(super) fn only(&self) -> Option<u32> {
        match self {
            Self::Few(list) if list.len() == 1 => Some(list[0].1),
            _ => None,
        }
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = u32> {
        let (few, many) = match self {
            Self::Few(list) => (Some(list.iter().map(|(_, run)| *run)), None),
            Self::Many(map) => (None, Some(map.values().copied())),
        };
        few.into_iter().flatten().chain(many.into_iter().flatten())
    }
}

/// Spreads a hash over all bits: tests and some engines number their blocks 1, 2, 3.
pub(super) fn mix(hash: u64) -> u64 {
    let spread = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    spread ^ (spread >> 32)
}

/// The hasher of keys that are one `u64`.
#[derive(Debug, Default)]
pub(super) struct Mix(u64);

impl Hasher for Mix {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.write_u64(u64::from(byte));
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = mix(self.0 ^ value);
    }
}
