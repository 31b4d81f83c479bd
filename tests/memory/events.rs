//! Memory of the KV event state of a rank and of one decoded batch.

use warmroute::block::EngineHash;
use warmroute::kv_events::wire::{self, Event, Stored, Tokens};
use warmroute::kv_events::{Converted, Filtered, MediaTokens, Normalizer};
use warmroute::worker::BlockSize;

use crate::{MIB, measure, mix};

/// Salts that are remembered of a rank.
const SALTS: u64 = 1 << 22;
/// Bytes of salts that are remembered of a rank.
const SALT_BYTES: u64 = 1 << 28;
/// Parts of blocks that are remembered of a rank whose blocks are smaller than those of the model.
const PARTS: u64 = 1 << 21;

/// A prompt of blocks with one token each.
fn prompt(from: u64, count: u64, salt: Option<String>) -> Event {
    let hashes = (from..from + count).map(|at| EngineHash(mix(at))).collect();
    let tokens = Tokens {
        ids: (from..from + count).map(|at| at as u32).collect(),
        bigrams: false,
    };
    Event::Stored(Box::new(Stored {
        hashes,
        tokens,
        block_size: 1,
        cache_salt: salt,
        ..Stored::default()
    }))
}

fn normalizer(block_size: usize) -> Normalizer {
    Normalizer::new(
        BlockSize::new(block_size as u32).unwrap(),
        MediaTokens::default(),
    )
}

/// A block that follows another one, whose salt is inherited.
fn follows(parent: u64) -> Event {
    let Event::Stored(stored) = prompt(1 << 50, 1, None) else {
        unreachable!("a store")
    };
    Event::Stored(Box::new(Stored {
        parent: Some(EngineHash(mix(parent))),
        ..*stored
    }))
}

#[test]
fn blocks_with_salts() {
    measure("events::blocks_with_salts", 320, || {
        let mut normalizer = normalizer(1);
        for from in (0..SALTS + 64).step_by(64) {
            normalizer.convert(&prompt(from, 64, Some("tenant".to_owned())));
        }
        assert!(matches!(
            normalizer.convert(&follows(SALTS - 1)),
            Converted::Event(_)
        ));
        let beyond = normalizer.convert(&follows(SALTS + 1));
        assert!(
            matches!(beyond, Converted::Filtered(Filtered::AmbiguousSalt)),
            "{beyond:?}"
        );
        (SALTS, normalizer)
    });
}

#[test]
fn bytes_of_salts() {
    measure("events::bytes_of_salts", 2, || {
        let mut normalizer = normalizer(1);
        let most = SALT_BYTES / 4096;
        for at in 0..most + 1 {
            normalizer.convert(&prompt(at, 1, Some(format!("{at:0>4096}"))));
        }
        assert!(matches!(
            normalizer.convert(&follows(most - 1)),
            Converted::Event(_)
        ));
        let beyond = normalizer.convert(&follows(most));
        assert!(
            matches!(beyond, Converted::Filtered(Filtered::AmbiguousSalt)),
            "{beyond:?}"
        );
        (SALT_BYTES, normalizer)
    });
}

#[test]
fn parts_of_blocks() {
    measure("events::parts_of_blocks", 640, || {
        // Two parts make a block.
        let mut normalizer = normalizer(2);
        for from in (0..PARTS).step_by(64) {
            normalizer.convert(&prompt(from, 64, None));
        }
        let beyond = normalizer.convert(&prompt(PARTS, 1, None));
        let Converted::Regrouped(events, outcome) = beyond else {
            panic!("{beyond:?}")
        };
        assert_eq!((events.len(), outcome.as_str()), (0, "too_many_waiting"));
        (PARTS, normalizer)
    });
}

/// A batch with as many blocks, tokens, lists and keys as it may have.
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
    // One key per block, a text of one letter.
    (0..blocks).for_each(|_| batch.extend([0x91, 0xa1, b'k']));
    batch.push(0xc0);
    batch
}

#[test]
fn decoded_batch() {
    measure("events::decoded_batch", MIB, || {
        let batch = wire::decode(&largest_batch(1 << 20)).unwrap();
        let error = wire::decode(&largest_batch((1 << 20) + 1)).unwrap_err();
        assert!(matches!(error, wire::WireError::TooLarge(_)), "{error}");
        // The messages themselves are 2 times 30 MiB.
        (240, batch)
    });
}
