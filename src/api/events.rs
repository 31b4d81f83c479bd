//! Changes of a cache as messages, there and back: the index can be told to somebody else, and be built from what was
//! told.

use std::num::NonZeroU32;

use super::pb;
use super::pb::event::Change;
use crate::block::{EngineHash, LocalHash};
use crate::index::{GroupNeed, KvEvent, StoredBlock};
use crate::tier::Tier;

impl From<KvEvent> for pb::Event {
    fn from(event: KvEvent) -> Self {
        let change = match event {
            KvEvent::Stored {
                parent,
                blocks,
                tier,
            } => Change::Stored(pb::Stored {
                parent: parent.map(|parent| parent.0),
                blocks: blocks.iter().map(stored_block).collect(),
                tier: tier_to(tier).into(),
            }),
            KvEvent::Removed { blocks, tier } => Change::Removed(pb::Removed {
                blocks: numbers(&blocks),
                tier: tier_to(tier).into(),
            }),
            KvEvent::GroupStored {
                group,
                need,
                blocks,
            } => {
                let need = match need {
                    GroupNeed::Last { blocks, stride } => Some(pb::GroupNeed {
                        blocks,
                        stride: stride.get(),
                    }),
                    GroupNeed::Unknown => None,
                };
                Change::GroupStored(pb::GroupStored {
                    group,
                    need,
                    blocks: numbers(&blocks),
                })
            }
            KvEvent::GroupRemoved { group, blocks } => Change::GroupRemoved(pb::GroupRemoved {
                group,
                blocks: numbers(&blocks),
            }),
            KvEvent::Cleared => Change::Cleared(pb::Cleared {}),
        };
        Self {
            change: Some(change),
        }
    }
}

/// A message that says no event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NoEvent {
    /// It says nothing, or something that a later version knows.
    #[error("the event says no change that is known")]
    Change,
    /// A tier that a later version knows, or none.
    #[error("the event names no tier that is known")]
    Tier,
    /// A stride of 0.
    #[error("the blocks of a cache group cover nothing")]
    Stride,
}

impl TryFrom<pb::Event> for KvEvent {
    type Error = NoEvent;

    fn try_from(event: pb::Event) -> Result<Self, NoEvent> {
        Ok(match event.change.ok_or(NoEvent::Change)? {
            Change::Stored(stored) => KvEvent::Stored {
                parent: stored.parent.map(EngineHash),
                tier: tier_of(stored.tier())?,
                blocks: stored.blocks.into_iter().map(block_of).collect(),
            },
            Change::Removed(removed) => KvEvent::Removed {
                tier: tier_of(removed.tier())?,
                blocks: names(removed.blocks),
            },
            Change::GroupStored(pb::GroupStored {
                group,
                need,
                blocks,
            }) => {
                let need = match need {
                    None => GroupNeed::Unknown,
                    Some(pb::GroupNeed { blocks, stride }) => GroupNeed::Last {
                        blocks,
                        stride: NonZeroU32::new(stride).ok_or(NoEvent::Stride)?,
                    },
                };
                KvEvent::GroupStored {
                    group,
                    need,
                    blocks: names(blocks),
                }
            }
            Change::GroupRemoved(pb::GroupRemoved { group, blocks }) => KvEvent::GroupRemoved {
                group,
                blocks: names(blocks),
            },
            Change::Cleared(pb::Cleared {}) => KvEvent::Cleared,
        })
    }
}

fn stored_block(block: &StoredBlock) -> pb::StoredBlock {
    pb::StoredBlock {
        engine_hash: block.engine.0,
        local_hash: block.local.0,
    }
}

fn block_of(block: pb::StoredBlock) -> StoredBlock {
    StoredBlock {
        engine: EngineHash(block.engine_hash),
        local: LocalHash(block.local_hash),
    }
}

fn numbers(blocks: &[EngineHash]) -> Vec<u64> {
    blocks.iter().map(|block| block.0).collect()
}

fn names(blocks: Vec<u64>) -> Vec<EngineHash> {
    blocks.into_iter().map(EngineHash).collect()
}

fn tier_to(tier: Tier) -> pb::Tier {
    match tier {
        Tier::Device => pb::Tier::Device,
        Tier::HostPinned => pb::Tier::Host,
        Tier::Disk => pb::Tier::Disk,
        Tier::External => pb::Tier::External,
    }
}

fn tier_of(tier: pb::Tier) -> Result<Tier, NoEvent> {
    match tier {
        pb::Tier::Unspecified => Err(NoEvent::Tier),
        pb::Tier::Device => Ok(Tier::Device),
        pb::Tier::Host => Ok(Tier::HostPinned),
        pb::Tier::Disk => Ok(Tier::Disk),
        pb::Tier::External => Ok(Tier::External),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_event_comes_back_as_it_was() {
        let (a, b) = (EngineHash(u64::MAX), EngineHash(2));
        let stored = |parent, tier| KvEvent::Stored {
            parent,
            blocks: vec![StoredBlock {
                engine: b,
                local: LocalHash(3),
            }],
            tier,
        };
        let need = GroupNeed::Last {
            blocks: 4,
            stride: NonZeroU32::MIN,
        };
        let mut events = vec![
            stored(None, Tier::Device),
            KvEvent::GroupStored {
                group: 1,
                need,
                blocks: vec![a, b],
            },
            KvEvent::GroupStored {
                group: 2,
                need: GroupNeed::Unknown,
                blocks: vec![],
            },
            KvEvent::GroupRemoved {
                group: 1,
                blocks: vec![b],
            },
            KvEvent::Cleared,
        ];
        events.extend(Tier::ALL.map(|tier| stored(Some(a), tier)));
        events.extend(Tier::ALL.map(|tier| KvEvent::Removed {
            blocks: vec![a],
            tier,
        }));
        for event in events {
            assert_eq!(KvEvent::try_from(pb::Event::from(event.clone())), Ok(event));
        }
    }

    #[test]
    fn what_says_nothing_is_no_event() {
        let removed = |tier| pb::Event {
            change: Some(Change::Removed(pb::Removed {
                blocks: vec![1],
                tier,
            })),
        };
        let need = Some(pb::GroupNeed {
            blocks: 1,
            stride: 0,
        });
        let group = pb::Event {
            change: Some(Change::GroupStored(pb::GroupStored {
                group: 0,
                need,
                blocks: vec![],
            })),
        };
        let cases = [
            (pb::Event { change: None }, NoEvent::Change),
            (removed(0), NoEvent::Tier),
            (removed(99), NoEvent::Tier),
            (group, NoEvent::Stride),
        ];
        for (event, error) in cases {
            assert_eq!(KvEvent::try_from(event.clone()), Err(error), "{event:?}");
        }
    }
}
