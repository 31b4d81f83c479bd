use std::collections::HashMap;

use proptest::collection::vec;
use proptest::prelude::*;

use super::*;
use crate::index::trie::BlockId;

fn named(number: u32) -> Named {
    Named {
        place: Place {
            shard: number as u8,
            block: BlockId(number),
        },
        layers: Layers::one(crate::tier::Tier::Device),
    }
}

/// Names that lie close together or far apart, many of them with the same seats in a small map.
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
    fn names_are_what_a_map_says(steps in vec((names(), any::<u32>(), 0..4u8), 0..200)) {
        let (mut all, mut model) = (Names::default(), HashMap::new());
        for (name, number, kind) in steps {
            let engine = EngineHash(name);
            match kind {
                0 => {
                    all.set(engine, named(number));
                    model.insert(name, named(number));
                }
                1 => {
                    all.reserve(1);
                    let mut begun = Vec::new();
                    all.begin_all([engine].into_iter(), named(number).layers, &mut begun);
                    prop_assert_eq!(begun.is_empty(), model.contains_key(&name));
                    for at in begun {
                        all.place(at, named(number).place);
                        model.insert(name, named(number));
                    }
                }
                _ => {
                    let found = all.seek(engine);
                    prop_assert_eq!(found.map(|(_, named)| named), model.remove(&name));
                    if let Some((at, _)) = found {
                        all.hold(at, Layers::NONE);
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
fn a_name_costs_few_bytes_and_memory_is_given_back() {
    let mut all = Names::default();
    for name in 0..10_000u32 {
        all.set(EngineHash(u64::from(name)), named(name));
        let slots: usize = all
            .shelves
            .iter()
            .map(|shelf| shelf.table.len() * 2 * WIDTH)
            .sum();
        assert!(
            slots <= all.len() * 5 / 2 + 4 * WIDTH * all.shelves.len(),
            "{slots} slots for {}",
            all.len()
        );
    }
    assert_eq!(size_of::<Entry>(), 14);
    for name in 0..9_990 {
        let (at, _) = all.seek(EngineHash(name)).unwrap();
        all.hold(at, Layers::NONE);
        all.shrink();
    }
    assert!(
        all.shelves.len() == 1 && all.shelves[0].table.len() <= 16,
        "{}",
        all.shelves[0].table.len()
    );
    assert!((9_990..10_000).all(|name| all.get(EngineHash(u64::from(name))) == Some(named(name))));
}

#[test]
fn names_of_one_seat_find_room_behind_it_however_many_they_are() {
    let mut all = Names::default();
    let alike: Vec<_> = (0u64..)
        .filter(|name| mix(*name) >> 56 == 255)
        .take(150)
        .map(EngineHash)
        .collect();
    for (at, name) in alike.iter().enumerate() {
        all.set(*name, named(at as u32));
    }
    let gone = [3, 0, 149, 7, 8, 9, 10, 148, 71, 72, 73];
    for gone in gone {
        let (at, _) = all.seek(alike[gone]).unwrap();
        all.hold(at, Layers::NONE);
        assert!(!all.has(alike[gone]));
    }
    let left = (0..150)
        .filter(|at| all.get(alike[*at]) == Some(named(*at as u32)))
        .count();
    assert_eq!((left, all.len()), (139, 139));
}

#[test]
fn a_name_that_is_not_there_is_looked_for_once_around_a_small_map() {
    let mut name = 1_u64;
    let mut next = || {
        name = name
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        EngineHash(name)
    };
    for count in (1..60).cycle().take(6_000) {
        let mut all = Names::default();
        (0..count).for_each(|number| all.set(next(), named(number)));
        assert!(!all.has(next()), "{count} names");
    }
}

#[test]
fn where_nothing_was_entered_nothing_is_found() {
    let mut all = Names::default();
    all.divide(4);
    (0..100).for_each(|name| {
        all.fetch(EngineHash(name));
        assert_eq!(all.get(EngineHash(name)), None);
    });
}
