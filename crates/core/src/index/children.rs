//! Children of a run: the local hash of the next block mapped to the run that begins with it. Most
//! runs have at most one child, which is stored inline. A shared system prompt has very many, which
//! are stored in a map.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::block::LocalHash;

/// Number of children from which a map is used.
const MAP_THRESHOLD: usize = 16;

/// Map whose keys are already hashes.
pub(super) type U64HashMap<K, V> = HashMap<K, V, BuildHasherDefault<U64Hasher>>;

/// Children of a run, by their first block.
#[derive(Debug, Default)]
pub(super) enum RunChildren {
    #[default]
    None,
    One(LocalHash, u32),
    Few(Vec<(LocalHash, u32)>),
    Many(Box<U64HashMap<LocalHash, u32>>),
}

impl RunChildren {
    pub(super) fn single(local: LocalHash, run: u32) -> Self {
        Self::One(local, run)
    }

    pub(super) fn get(&self, local: LocalHash) -> Option<u32> {
        match self {
            Self::None => None,
            Self::One(first, run) => (*first == local).then_some(*run),
            Self::Few(list) => list
                .iter()
                .find(|(first, _)| *first == local)
                .map(|(_, run)| *run),
            Self::Many(map) => map.get(&local).copied(),
        }
    }

    pub(super) fn set(&mut self, local: LocalHash, run: u32) {
        match self {
            Self::None => *self = Self::One(local, run),
            Self::One(first, known) if *first == local => *known = run,
            Self::One(first, known) => *self = Self::Few(vec![(*first, *known), (local, run)]),
            Self::Few(list) => {
                if let Some(entry) = list.iter_mut().find(|(first, _)| *first == local) {
                    entry.1 = run;
                } else if list.len() < MAP_THRESHOLD {
                    list.push((local, run));
                } else {
                    let mut map: Box<U64HashMap<_, _>> = Box::new(list.drain(..).collect());
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
            Self::One(first, _) if *first == local => *self = Self::None,
            Self::None | Self::One(..) => {}
            Self::Few(list) => {
                list.retain(|(first, _)| *first != local);
                if let [(first, run)] = list[..] {
                    *self = Self::One(first, run);
                }
            }
            Self::Many(map) => {
                map.remove(&local);
                if map.len() <= MAP_THRESHOLD / 2 {
                    *self = Self::Few(map.drain().collect());
                }
            }
        }
    }

    pub(super) fn len(&self) -> usize {
        match self {
            Self::None => 0,
            Self::One(..) => 1,
            Self::Few(list) => list.len(),
            Self::Many(map) => map.len(),
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        matches!(self, Self::None)
    }

    /// Returns the child if there is exactly one.
    pub(super) fn only_child(&self) -> Option<u32> {
        match self {
            Self::One(_, run) => Some(*run),
            _ => None,
        }
    }

    pub(super) fn runs(&self) -> impl Iterator<Item = u32> {
        let (one, few, many) = match self {
            Self::None => (None, None, None),
            Self::One(_, run) => (Some(*run), None, None),
            Self::Few(list) => (None, Some(list.iter().map(|(_, run)| *run)), None),
            Self::Many(map) => (None, None, Some(map.values().copied())),
        };
        one.into_iter()
            .chain(few.into_iter().flatten())
            .chain(many.into_iter().flatten())
    }
}

/// Spreads a hash over all bits. Tests and some engines number their blocks 1, 2, 3.
pub(super) fn mix(hash: u64) -> u64 {
    let spread = hash.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    spread ^ (spread >> 32)
}

/// Hasher of keys that are one `u64`.
#[derive(Debug, Default)]
pub(super) struct U64Hasher(u64);

impl Hasher for U64Hasher {
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
