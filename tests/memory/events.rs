//! Memory of the KV event state of a rank and of one decoded batch.

use warmroute_core::block::EngineHash;
use warmroute_core::worker::BlockSize;
use warmroute_engines::kv_events::wire::{self, EngineEvent, EventTokens, StoredEvent};
use warmroute_engines::kv_events::{ConvertedEvent, EventNormalizer, FilterReason, MediaTokens};

use crate::{MIB, measure, mix};

/// Maximum number of salts per rank.
const SALTS: u64 = 1 << 22;
/// Maximum number of salt bytes per rank.
const SALT_BYTES: u64 = 1 << 28;
/// Maximum number of block parts per rank, if its blocks are smaller than those of the model.
const PARTS: u64 = 1 << 21;

/// Returns an event with a prompt of one-token blocks.
fn prompt(from: u64, count: u64, salt: Option<String>) -> EngineEvent {
    let hashes = (from..from + count).map(|at| EngineHash(mix(at))).collect();
    let tokens = EventTokens {
        ids: (from..from + count).map(|at| at as u32).collect(),
        bigrams: false,
    };
    EngineEvent::Stored(Box::new(StoredEvent {
        hashes,
        tokens,
        block_size: 1,
        cache_salt: salt,
        ..StoredEvent::default()
    }))
}

fn normalizer(block_size: usize) -> EventNormalizer {
    EventNormalizer::new(
        BlockSize::new(block_size as u32).unwrap(),
        MediaTokens::default(),
    )
}

/// Returns an event with a block that follows another one and inherits its salt.
fn follows(parent: u64) -> EngineEvent {
    let EngineEvent::Stored(stored) = prompt(1 << 50, 1, None) else {
        unreachable!("a store")
    };
    EngineEvent::Stored(Box::new(StoredEvent {
        parent: Some(EngineHash(mix(parent))),
        ..*stored
    }))
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn blocks_with_salts() {
    measure("events::blocks_with_salts", 320, || {
        let mut normalizer = normalizer(1);
        for from in (0..SALTS + 64).step_by(64) {
            normalizer.convert(&prompt(from, 64, Some("tenant".to_owned())));
        }
        assert!(matches!(
            normalizer.convert(&follows(SALTS - 1)),
            ConvertedEvent::Event(_)
        ));
        let beyond = normalizer.convert(&follows(SALTS + 1));
        assert!(
            matches!(
                beyond,
                ConvertedEvent::Filtered(FilterReason::AmbiguousSalt)
            ),
            "{beyond:?}"
        );
        (SALTS, normalizer)
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn bytes_of_salts() {
    measure("events::bytes_of_salts", 2, || {
        let mut normalizer = normalizer(1);
        let most = SALT_BYTES / 4096;
        for at in 0..most + 1 {
            normalizer.convert(&prompt(at, 1, Some(format!("{at:0>4096}"))));
        }
        assert!(matches!(
            normalizer.convert(&follows(most - 1)),
            ConvertedEvent::Event(_)
        ));
        let beyond = normalizer.convert(&follows(most));
        assert!(
            matches!(
                beyond,
                ConvertedEvent::Filtered(FilterReason::AmbiguousSalt)
            ),
            "{beyond:?}"
        );
        (SALT_BYTES, normalizer)
    });
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn parts_of_blocks() {
    measure("events::parts_of_blocks", 640, || {
        // Two parts make one block.
        let mut normalizer = normalizer(2);
        for from in (0..PARTS).step_by(64) {
            normalizer.convert(&prompt(from, 64, None));
        }
        let beyond = normalizer.convert(&prompt(PARTS, 1, None));
        let ConvertedEvent::IndexEvents(events, outcome) = beyond else {
            panic!("{beyond:?}")
        };
        assert_eq!((events.len(), outcome.as_str()), (0, "too_many_waiting"));
        (PARTS, normalizer)
    });
}

/// Returns a batch with the maximum numbers of blocks, tokens, lists and keys.
fn largest_batch(blocks: usize) -> Vec<u8> {
    let length = |kind: u8, length: usize| [&[kind][..], &(length as u32).to_be_bytes()].concat();
    let mut batch = vec![0x93, 0xcb];
    batch.extend(1.0_f64.to_be_bytes());
    batch.extend([0x91, 0x99, 0xab]);
    batch.extend(b"BlockStored");
    batch.extend(length(0xdd, blocks));
    (0..blocks as u64).for_each(|at| batch.extend([&[0xcf][..], &mix(at).to_be_bytes()].concat()));
    batch.push(0xc0);
    batch.extend(length(0xdd, 1 << 24));
    batch.resize(batch.len() + (1 << 24), 7);
    batch.extend([0x10, 0xc0, 0xa3]);
    batch.extend(b"GPU");
    batch.push(0xc0);
    batch.extend(length(0xdd, blocks));
    // One key per block: a text of one letter.
    (0..blocks).for_each(|_| batch.extend([0x91, 0xa1, b'k']));
    batch.push(0xc0);
    batch
}

#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn decoded_batch() {
    measure("events::decoded_batch", MIB, || {
        let batch = wire::decode(&largest_batch(1 << 20)).unwrap();
        let error = wire::decode(&largest_batch((1 << 20) + 1)).unwrap_err();
        assert!(matches!(error, wire::WireError::TooLarge(_)), "{error}");
        // The messages themselves take 60 MiB.
        (240, batch)
    });
}
