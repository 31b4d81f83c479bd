use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::entries::HashEntry;
use super::*;
use crate::index::ids::BlockId;

fn mapped(number: u32) -> MappedBlock {
    MappedBlock {
        location: BlockLocation {
            shard: number as u8,
            block: BlockId(number),
        },
        layers: LayerSet::of(crate::block::StorageTier::Device),
    }
}

/// Generates hashes that are close together or far apart. Many of them have the same home bucket in
/// a small map.
fn hashes() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..40u64,
        (0..40u64).prop_map(|at| at << 32),
        (0..40u64).prop_map(|at| u64::MAX - at)
    ]
}

proptest! {
    #![proptest_config(property_config(2_000))]

    #[test]
    fn engine_map_matches_std_map(steps in vec((hashes(), any::<u32>(), 0..4u8), 0..200)) {
        let mut map = EngineBlockMap::default();
        let mut model = HashMap::new();
        for (hash, number, kind) in steps {
            let engine = EngineHash(hash);
            match kind {
                0 => {
                    map.insert(engine, mapped(number));
                    model.insert(hash, mapped(number));
                }
                1 => {
                    map.reserve(1);
                    let mut entries = Vec::new();
                    map.insert_unlocated([engine].into_iter(), mapped(number).layers, &mut entries);
                    prop_assert_eq!(entries.is_empty(), model.contains_key(&hash));
                    for at in entries {
                        map.set_location(at, mapped(number).location);
                        model.insert(hash, mapped(number));
                    }
                }
                _ => {
                    let found = map.find(engine);
                    prop_assert_eq!(found.map(|(_, mapped)| mapped), model.remove(&hash));
                    if let Some((at, _)) = found {
                        map.set_layers(at, LayerSet::NONE);
                    }
                    map.shrink();
                }
            }
            prop_assert_eq!(map.len(), model.len());
            prop_assert_eq!(map.get(engine), model.get(&hash).copied());
        }
        for (hash, mapped) in &model {
            prop_assert_eq!(map.get(EngineHash(*hash)), Some(*mapped));
        }
        prop_assert_eq!(map.iter().map(|(engine, mapped)| (engine.0, mapped)).collect::<HashMap<_, _>>(), model);
    }
}

#[test]
fn map_returns_memory_and_needs_few_bytes() {
    let mut map = EngineBlockMap::default();
    for hash in 0..10_000u32 {
        map.insert(EngineHash(u64::from(hash)), mapped(hash));
        let slots: usize = map
            .partitions
            .iter()
            .map(|partition| partition.table.len() * 2 * SLOTS_PER_BUCKET)
            .sum();
        assert!(
            slots <= map.len() * 5 / 2 + 4 * SLOTS_PER_BUCKET * map.partitions.len(),
            "{slots} slots for {}",
            map.len()
        );
    }
    assert_eq!(size_of::<HashEntry>(), 14);
    for hash in 0..9_990 {
        let (at, _) = map.find(EngineHash(hash)).unwrap();
        map.set_layers(at, LayerSet::NONE);
        map.shrink();
    }
    assert!(
        map.partitions.len() == 1 && map.partitions[0].table.len() <= 16,
        "{}",
        map.partitions[0].table.len()
    );
    assert!((9_990..10_000).all(|hash| map.get(EngineHash(u64::from(hash))) == Some(mapped(hash))));
}

#[test]
fn missing_hash_in_small_map_ends_probe() {
    let mut hash = 1_u64;
    let mut next = || {
        hash = hash
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        EngineHash(hash)
    };
    for count in (1..60).cycle().take(6_000) {
        let mut map = EngineBlockMap::default();
        (0..count).for_each(|number| map.insert(next(), mapped(number)));
        assert!(!map.contains(next()), "{count} hashes");
    }
}
