//! What the index must say, by the simplest means: per rank a map from name to whole prefix and copies.

use std::collections::{BTreeMap, BTreeSet};

use crate::block::{EngineHash, LocalHash};
use crate::index::{BlockCounts, KvEvent, Outcome, TierBlocks};
use crate::tier::Tier;

#[derive(Clone, Debug, Default)]
pub(super) struct Name {
    pub(super) path: Vec<LocalHash>,
    copies: [u64; 4],
    doubted: [bool; 4],
}

#[derive(Clone, Debug, Default)]
pub(super) struct Rank {
    pub(super) names: BTreeMap<EngineHash, Name>,
}

impl Rank {
    pub(super) fn apply(&mut self, event: &KvEvent) -> Outcome {
        match event {
            KvEvent::Cleared => {
                self.names.clear();
                Outcome::Ok
            }
            KvEvent::Removed { blocks, tier } => {
                let mut outcome = Outcome::Ok;
                for engine in blocks {
                    match self.names.get_mut(engine).filter(|name| name.copies[*tier as usize] > 0) {
                        None => outcome = Outcome::BlockNotFound,
                        Some(name) => {
                            name.copies[*tier as usize] -= 1;
                            if name.copies[*tier as usize] == 0 {
                                name.doubted[*tier as usize] = false;
                            }
                        }
                    }
                    self.names.retain(|_, name| name.copies.iter().any(|copies| *copies > 0));
                }
                outcome
            }
            KvEvent::Stored { parent, blocks, tier } => {
                let mut path = match parent {
                    None => Vec::new(),
                    Some(parent) => match self.names.get(parent) {
                        None => return Outcome::ParentNotFound,
                        Some(name) => name.path.clone(),
                    },
                };
                let mut outcome = if blocks.is_empty() { Outcome::Ok } else { Outcome::DuplicateStore };
                for block in blocks {
                    path.push(block.local);
                    let name = self.names.entry(block.engine).or_default();
                    if name.path != path {
                        *name = Name { path: path.clone(), ..Name::default() };
                    }
                    let tier = *tier as usize;
                    if name.copies[tier] == 0 {
                        outcome = Outcome::Ok;
                    }
                    name.copies[tier] = if name.doubted[tier] { 1 } else { name.copies[tier] + 1 };
                    name.doubted[tier] = false;
                }
                outcome
            }
        }
    }

    pub(super) fn doubt(&mut self) {
        for name in self.names.values_mut() {
            for tier in 0..4 {
                name.doubted[tier] = name.copies[tier] > 0;
            }
        }
    }

    pub(super) fn overlap(&self, prompt: &[LocalHash]) -> TierBlocks {
        let holds = |blocks: usize, tier: Tier| {
            self.names.values().any(|name| name.path == prompt[..blocks] && name.copies[tier as usize] > 0)
        };
        let mut reached = 0;
        let mut counts = [0u32; 4];
        for tier in Tier::ALL {
            while reached < prompt.len() && holds(reached + 1, tier) {
                reached += 1;
                counts[tier as usize] += 1;
            }
        }
        TierBlocks { device: counts[0], host: counts[1], disk: counts[2], external: counts[3] }
    }

    pub(super) fn counts(&self) -> BlockCounts {
        let held = |tier: usize| {
            let held = self.names.values().filter(|name| name.copies[tier] > 0).map(|name| &name.path);
            held.collect::<BTreeSet<_>>().len() as u64
        };
        let copies = self.names.values().flat_map(|name| name.copies).sum();
        BlockCounts { device: held(0), host: held(1), disk: held(2), external: held(3), copies }
    }
}
