use rand::rngs::SmallRng;
use rand::{RngExt, SeedableRng};

use super::*;

fn cache(limit: usize) -> Arc<PromptCache> {
    PromptCache::new(limit, Arc::new(Metrics::new()))
}

fn piece(tokens: u32) -> SharedCachedValue {
    Arc::new((0..tokens).collect::<Vec<u32>>())
}

fn pieces(names: impl IntoIterator<Item = u128>, tokens: u32) -> Vec<(u128, SharedCachedValue)> {
    names
        .into_iter()
        .map(|name| (name, piece(tokens)))
        .collect()
}

fn known(cache: &PromptCache, names: &[u128]) -> usize {
    cache.find_leading::<Vec<u32>>(names).len()
}

#[test]
fn stored_pieces_are_found_up_to_gap() {
    let cache = cache(1 << 20);
    let names: Vec<u128> = (1..=200).collect();
    assert_eq!(known(&cache, &names), 0);
    cache.store(&[], pieces((1..=200).filter(|name| *name != 131), 3));
    for (asked, found) in [
        (&names[..], 130),
        (&names[..128], 128),
        (&names[..64], 64),
        (&names[130..], 0),
        (&[], 0),
    ] {
        assert_eq!(known(&cache, asked), found);
    }
    cache.store(&names[..130], pieces([131], 3));
    assert_eq!(known(&cache, &names), 200);
    assert_eq!(
        cache.find_leading::<Vec<u64>>(&names).len(),
        0,
        "tokens are not returned as values of another type"
    );
}

#[test]
fn eviction_starts_at_end_of_oldest_prompt() {
    let room = 8 * entry_bytes(&*piece(10));
    let cache = cache(room);
    let (old, new): (Vec<u128>, Vec<u128>) = ((1..=2).collect(), (11..=12).collect());
    cache.store(&[], pieces(old.clone(), 10));
    cache.store(&[], pieces(new.clone(), 10));
    for name in 100..104 {
        cache.store(&[], pieces([name], 10));
    }
    cache.store(&old, vec![]);
    for (more, left_of_new) in [(104, 1), (105, 0)] {
        cache.store(&[], pieces([more], 10));
        assert_eq!((known(&cache, &old), known(&cache, &new)), (2, left_of_new));
    }
    assert_eq!(cache.bytes(), room);
}

#[test]
fn one_prompt_cannot_evict_all_others() {
    let cache = cache(100 * entry_bytes(&*piece(10)));
    let others: Vec<u128> = (1..=25).collect();
    cache.store(&[], pieces(others.clone(), 10));
    let long: Vec<u128> = (1000..9000).collect();
    for _ in 0..3 {
        cache.store(&[], pieces(long.clone(), 10));
    }
    assert_eq!((known(&cache, &others), known(&cache, &long)), (25, 25));
    cache.store(&[], vec![(7777, piece(2000))]);
    assert_eq!(known(&cache, &[7777]), 0, "one piece is too long");
}

#[test]
fn cache_limit_holds_and_can_change() {
    let cache = cache(100_000);
    let mut random = SmallRng::seed_from_u64(5);
    std::thread::scope(|scope| {
        for _ in 0..4 {
            let cache = &cache;
            let mut random = SmallRng::seed_from_u64(random.random());
            scope.spawn(move || {
                for _ in 0..2000 {
                    let names: Vec<u128> = (0..random.random_range(1..40))
                        .map(|_| random.random_range(0..5000))
                        .collect();
                    let found = known(cache, &names);
                    let length = random.random_range(0..100);
                    cache.store(
                        &names[..found],
                        pieces(names[found..].iter().copied(), length),
                    );
                    assert!(cache.bytes() <= 100_000);
                    // Resizes happen concurrently with lookups and with each other.
                    if random.random_bool(0.01) {
                        cache.resize(random.random_range(10_000..=100_000));
                    }
                }
            });
        }
    });
    cache.resize(100_000);
    let table = cache.table.lock();
    let held: usize = table
        .entries
        .iter()
        .filter_map(|entry| entry.value.as_deref())
        .map(entry_bytes)
        .sum();
    assert_eq!(
        (held, table.positions.len()),
        (table.bytes, table.entries.len() - 1 - table.free.len())
    );
    drop(table);
    for limit in [50_000, 400, 0] {
        cache.resize(limit);
        assert!(cache.bytes() <= limit);
    }
    cache.store(&[], pieces([1], 1));
    assert_eq!(cache.bytes(), 0);
    cache.resize(1000);
    cache.store(&[], pieces([1], 0));
    assert_eq!(cache.bytes(), 0, "more than a quarter of all");
    cache.resize(1 << 20);
    cache.store(&[], pieces([1], 1));
    assert_eq!(known(&cache, &[1]), 1);
}

#[test]
fn entry_overhead_covers_grown_tables() {
    // A vector that has just grown has space for twice its entries. A map has space for 16/7 of
    // them, plus one byte each. The free list is at most as long as the entries. An `Arc` has two
    // counts. Its allocation and that of its list have headers and rounding.
    let entry = 2 * (size_of::<PromptCacheEntry>() + size_of::<u32>());
    let place = (size_of::<(u128, u32)>() + 1) * 16 / 7;
    assert!(
        entry + place + 16 + 16 + 32 <= ENTRY_OVERHEAD_BYTES,
        "{entry} + {place}"
    );
}
