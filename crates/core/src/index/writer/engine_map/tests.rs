use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::index::ids::BlockId;

fn named(number: u32) -> MappedBlock {
    MappedBlock {
        location: BlockLocation {
            shard: number as u8,
            block: BlockId(number),
        },
        layers: LayerSet::of(crate::block::StorageTier::Device),
    }
}

/// Hashes that are close together or far apart. Many of them have the same home bucket in a small
/// map.
fn names() -> impl Strategy<Value = u64> {
    prop_oneof![
        0..40u64,
        (0..40u64).prop_map(|at| at << 32),
        (0..40u64).prop_map(|at| u64::MAX - at)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn engine_map_matches_std_map(steps in vec((names(), any::<u32>(), 0..4u8), 0..200)) {
        let mut all = EngineBlockMap::default();
        let mut model = HashMap::new();
        for (name, number, kind) in steps {
            let engine = EngineHash(name);
            match kind {
                0 => {
                    all.insert(engine, named(number));
                    model.insert(name, named(number));
                }
                1 => {
                    all.reserve(1);
                    let mut begun = Vec::new();
                    all.insert_unlocated([engine].into_iter(), named(number).layers, &mut begun);
                    prop_assert_eq!(begun.is_empty(), model.contains_key(&name));
                    for at in begun {
                        all.set_location(at, named(number).location);
                        model.insert(name, named(number));
                    }
                }
                _ => {
                    let found = all.find(engine);
                    prop_assert_eq!(found.map(|(_, named)| named), model.remove(&name));
                    if let Some((at, _)) = found {
                        all.set_layers(at, LayerSet::NONE);
                    }
                    all.shrink();
                }
            }
            prop_assert_eq!(all.len(), model.len());
            prop_assert_eq!(all.get(engine), model.get(&name).copied());
        }
        for (name, named) in &model {
            prop_assert_eq!(all.get(EngineHash(*name)), Some(*named));
        }
        prop_assert_eq!(all.iter().map(|(engine, named)| (engine.0, named)).collect::<HashMap<_, _>>(), model);
    }
}

#[test]
fn map_returns_memory_and_needs_few_bytes() {
    let mut all = EngineBlockMap::default();
    for name in 0..10_000u32 {
        all.insert(EngineHash(u64::from(name)), named(name));
        let slots: usize = all
            .partitions
            .iter()
            .map(|partition| partition.table.len() * 2 * SLOTS_PER_BUCKET)
            .sum();
        assert!(
            slots <= all.len() * 5 / 2 + 4 * SLOTS_PER_BUCKET * all.partitions.len(),
            "{slots} slots for {}",
            all.len()
        );
    }
    assert_eq!(size_of::<HashEntry>(), 14);
    for name in 0..9_990 {
        let (at, _) = all.find(EngineHash(name)).unwrap();
        all.set_layers(at, LayerSet::NONE);
        all.shrink();
    }
    assert!(
        all.partitions.len() == 1 && all.partitions[0].table.len() <= 16,
        "{}",
        all.partitions[0].table.len()
    );
    assert!((9_990..10_000).all(|name| all.get(EngineHash(u64::from(name))) == Some(named(name))));
}

#[test]
fn hashes_of_one_home_bucket_overflow() {
    let mut all = EngineBlockMap::default();
    let alike: Vec<_> = (0u64..)
        .filter(|name| mix(*name) >> 56 == 255)
        .take(150)
        .map(EngineHash)
        .collect();
    for (at, name) in alike.iter().enumerate() {
        all.insert(*name, named(at as u32));
    }
    let gone = [3, 0, 149, 7, 8, 9, 10, 148, 71, 72, 73];
    for gone in gone {
        let (at, _) = all.find(alike[gone]).unwrap();
        all.set_layers(at, LayerSet::NONE);
        assert!(!all.contains(alike[gone]));
    }
    let left = (0..150)
        .filter(|at| all.get(alike[*at]) == Some(named(*at as u32)))
        .count();
    assert_eq!((left, all.len()), (139, 139));
}

#[test]
fn missing_hash_in_small_map_ends_probe() {
    let mut name = 1_u64;
    let mut next = || {
        name = name
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        EngineHash(name)
    };
    for count in (1..60).cycle().take(6_000) {
        let mut all = EngineBlockMap::default();
        (0..count).for_each(|number| all.insert(next(), named(number)));
        assert!(!all.contains(next()), "{count} names");
    }
}

#[test]
fn empty_map_finds_nothing() {
    let mut all = EngineBlockMap::default();
    all.repartition(4);
    (0..100).for_each(|name| {
        all.prefetch(EngineHash(name));
        assert_eq!(all.get(EngineHash(name)), None);
    });
}
