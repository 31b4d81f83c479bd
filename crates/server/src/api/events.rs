//! Conversions between KV events and proto messages. An index can be exported as events and rebuilt
//! from them.

use std::num::NonZeroU32;

use warmroute_core::block::{EngineHash, LocalHash, StorageTier};
use warmroute_core::index::{GroupNeed, KvEvent, StoredBlock};

use crate::proto::router as pb;
use crate::proto::router::event::Change;

impl From<KvEvent> for pb::Event {
    fn from(event: KvEvent) -> Self {
        let change = match event {
            KvEvent::Stored {
                parent,
                blocks,
                tier,
            } => Change::Stored(pb::Stored {
                parent: parent.map(|parent| parent.0),
                blocks: blocks.iter().map(stored_block_to_proto).collect(),
                tier: tier_to_proto(tier).into(),
            }),
            KvEvent::Removed { blocks, tier } => Change::Removed(pb::Removed {
                blocks: hashes_to_proto(&blocks),
                tier: tier_to_proto(tier).into(),
            }),
            KvEvent::GroupStored {
                group,
                need,
                blocks,
            } => {
                let need = match need {
                    GroupNeed::Trailing { blocks, stride } => Some(pb::GroupNeed {
                        blocks,
                        stride: stride.get(),
                    }),
                    GroupNeed::Unknown => None,
                };
                Change::GroupStored(pb::GroupStored {
                    group,
                    need,
                    blocks: hashes_to_proto(&blocks),
                })
            }
            KvEvent::GroupRemoved { group, blocks } => Change::GroupRemoved(pb::GroupRemoved {
                group,
                blocks: hashes_to_proto(&blocks),
            }),
            KvEvent::Cleared => Change::Cleared(pb::Cleared {}),
        };
        Self {
            change: Some(change),
        }
    }
}

/// Error for a message that is not a valid event.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum InvalidEventError {
    /// No change, or a change of a later protocol version.
    #[error("the event has no known change")]
    UnknownChange,
    /// No tier, or a tier of a later protocol version.
    #[error("the event has no known tier")]
    UnknownTier,
    /// A stride of 0.
    #[error("the stride of a cache group is 0")]
    ZeroStride,
}

impl TryFrom<pb::Event> for KvEvent {
    type Error = InvalidEventError;

    fn try_from(event: pb::Event) -> Result<Self, InvalidEventError> {
        Ok(
            match event.change.ok_or(InvalidEventError::UnknownChange)? {
                Change::Stored(stored) => KvEvent::Stored {
                    parent: stored.parent.map(EngineHash),
                    tier: tier_from_proto(stored.tier())?,
                    blocks: stored
                        .blocks
                        .into_iter()
                        .map(stored_block_from_proto)
                        .collect(),
                },
                Change::Removed(removed) => KvEvent::Removed {
                    tier: tier_from_proto(removed.tier())?,
                    blocks: hashes_from_proto(removed.blocks),
                },
                Change::GroupStored(pb::GroupStored {
                    group,
                    need,
                    blocks,
                }) => {
                    let need = match need {
                        None => GroupNeed::Unknown,
                        Some(pb::GroupNeed { blocks, stride }) => GroupNeed::Trailing {
                            blocks,
                            stride: NonZeroU32::new(stride).ok_or(InvalidEventError::ZeroStride)?,
                        },
                    };
                    KvEvent::GroupStored {
                        group,
                        need,
                        blocks: hashes_from_proto(blocks),
                    }
                }
                Change::GroupRemoved(pb::GroupRemoved { group, blocks }) => KvEvent::GroupRemoved {
                    group,
                    blocks: hashes_from_proto(blocks),
                },
                Change::Cleared(pb::Cleared {}) => KvEvent::Cleared,
            },
        )
    }
}

fn stored_block_to_proto(block: &StoredBlock) -> pb::StoredBlock {
    pb::StoredBlock {
        engine_hash: block.engine.0,
        local_hash: block.local.0,
    }
}

fn stored_block_from_proto(block: pb::StoredBlock) -> StoredBlock {
    StoredBlock {
        engine: EngineHash(block.engine_hash),
        local: LocalHash(block.local_hash),
    }
}

fn hashes_to_proto(blocks: &[EngineHash]) -> Vec<u64> {
    blocks.iter().map(|block| block.0).collect()
}

fn hashes_from_proto(blocks: Vec<u64>) -> Vec<EngineHash> {
    blocks.into_iter().map(EngineHash).collect()
}

fn tier_to_proto(tier: StorageTier) -> pb::Tier {
    match tier {
        StorageTier::Device => pb::Tier::Device,
        StorageTier::HostPinned => pb::Tier::Host,
        StorageTier::Disk => pb::Tier::Disk,
        StorageTier::External => pb::Tier::External,
    }
}

fn tier_from_proto(tier: pb::Tier) -> Result<StorageTier, InvalidEventError> {
    match tier {
        pb::Tier::Unspecified => Err(InvalidEventError::UnknownTier),
        pb::Tier::Device => Ok(StorageTier::Device),
        pb::Tier::Host => Ok(StorageTier::HostPinned),
        pb::Tier::Disk => Ok(StorageTier::Disk),
        pb::Tier::External => Ok(StorageTier::External),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn events_round_trip_through_proto() {
        let a = EngineHash(u64::MAX);
        let b = EngineHash(2);
        let stored = |parent, tier| KvEvent::Stored {
            parent,
            blocks: vec![StoredBlock {
                engine: b,
                local: LocalHash(3),
            }],
            tier,
        };
        let need = GroupNeed::Trailing {
            blocks: 4,
            stride: NonZeroU32::MIN,
        };
        let mut events = vec![
            stored(None, StorageTier::Device),
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
        events.extend(StorageTier::ALL.map(|tier| stored(Some(a), tier)));
        events.extend(StorageTier::ALL.map(|tier| KvEvent::Removed {
            blocks: vec![a],
            tier,
        }));
        for event in events {
            assert_eq!(KvEvent::try_from(pb::Event::from(event.clone())), Ok(event));
        }
    }

    #[test]
    fn invalid_events_are_rejected() {
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
            (pb::Event { change: None }, InvalidEventError::UnknownChange),
            (removed(0), InvalidEventError::UnknownTier),
            (removed(99), InvalidEventError::UnknownTier),
            (group, InvalidEventError::ZeroStride),
        ];
        for (event, error) in cases {
            assert_eq!(KvEvent::try_from(event.clone()), Err(error), "{event:?}");
        }
    }
}
