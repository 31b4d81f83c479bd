use proptest::prelude::*;
use warmroute_property_tests::property_config;

use super::*;
use crate::block::{EngineHash, LocalHash, StorageTier};
use crate::index::layers::LayerSet;
use crate::index::salts::{SaltRef, SaltRow};
use crate::index::{GroupNeed, KvEvent, PrefixIndex, RankWriter, StoredBlock};
use crate::worker::{DpRank, RankSlot, WorkerId, WorkerRank};

fn stored(parent: Option<u64>, hashes: &[u64], tier: StorageTier) -> KvEvent {
    let blocks = hashes.iter().map(|&hash| StoredBlock {
        engine: EngineHash(hash),
        local: LocalHash(hash % 100),
    });
    KvEvent::Stored {
        parent: parent.map(EngineHash),
        blocks: blocks.collect(),
        tier,
    }
}

fn removed(hashes: &[u64]) -> KvEvent {
    KvEvent::Removed {
        blocks: hashes.iter().copied().map(EngineHash).collect(),
        tier: StorageTier::Device,
    }
}

/// Fills a rank with every kind of content: a hole, several tiers, hashes and copies, stale blocks,
/// orphans and groups.
fn fill(writer: &mut RankWriter) {
    let need = GroupNeed::Trailing {
        blocks: 2,
        stride: 1.try_into().unwrap(),
    };
    for event in [
        stored(None, &[1, 2, 3, 4, 5], StorageTier::Device),
        stored(Some(2), &[7, 8], StorageTier::Device),
        stored(None, &[101, 102], StorageTier::Device),
        stored(None, &[1, 2], StorageTier::HostPinned),
        stored(None, &[1], StorageTier::HostPinned),
        stored(Some(50), &[51, 52], StorageTier::Disk),
        stored(Some(50), &[51], StorageTier::Disk),
        removed(&[3, 7]),
        KvEvent::GroupStored {
            group: 4,
            need,
            blocks: [4, 5, 5, 90].map(EngineHash).to_vec(),
        },
    ] {
        writer.apply(&event);
    }
    writer.record_gap();
    writer.apply(&stored(Some(4), &[5, 6], StorageTier::Device));
}

fn rank(number: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(number),
        rank: DpRank(1),
    }
}

/// Returns a dump of two ranks.
fn bytes() -> Vec<u8> {
    let index = PrefixIndex::new();
    let mut writers = [
        index.create_writer(RankSlot(0)),
        index.create_writer(RankSlot(1)),
    ];
    fill(&mut writers[0]);
    writers[1].apply(&stored(None, &[1, 2, 3], StorageTier::Device));
    let mut bytes = Vec::new();
    write_header(&mut bytes).unwrap();
    for (number, writer) in writers.iter().enumerate() {
        let dump = writer.snapshot(rank(number as u64));
        dump.write(&mut bytes).unwrap();
    }
    write_end(&mut bytes, 2).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<Vec<RankDump>, DumpError> {
    DumpReader::new(bytes)?.collect()
}

#[test]
fn restored_dump_equals_original() {
    let dumps = read(&bytes()).unwrap();
    assert_eq!(
        dumps.iter().map(RankDump::rank).collect::<Vec<_>>(),
        [rank(0), rank(1)]
    );
    let index = PrefixIndex::new();
    let mut filled = index.create_writer(RankSlot(0));
    fill(&mut filled);
    let mut restored = index.create_writer(RankSlot(1));
    restored.restore(&dumps[0]);
    let counts = |slot: usize| index.stats().slots[slot].counts;
    assert_eq!(counts(0), counts(1));
    assert_eq!((counts(0).device, counts(0).waiting), (6, 2));
    assert_eq!(
        order_free_content(&restored.snapshot(rank(0))),
        order_free_content(&filled.snapshot(rank(0)))
    );
}

#[test]
fn replayed_dump_restores_all_but_staleness() {
    let dump = read(&bytes()).unwrap().remove(0);
    let index = PrefixIndex::new();
    let mut writer = index.create_writer(RankSlot(0));
    let mut stored_hashes = std::collections::HashSet::new();
    for event in dump.events() {
        if let KvEvent::Stored {
            parent: Some(parent),
            tier,
            ..
        } = &event
        {
            assert!(
                stored_hashes.contains(parent) || *tier == StorageTier::Disk,
                "{parent:?} is stored after its children"
            );
        }
        if let KvEvent::Stored { blocks, .. } = &event {
            stored_hashes.extend(blocks.iter().map(|block| block.engine));
        }
        writer.apply(&event);
    }
    let mut confirmed = dump.clone();
    confirmed
        .hashes
        .iter_mut()
        .for_each(|row| row.copies.stale = LayerSet::NONE);
    confirmed
        .orphans
        .iter_mut()
        .for_each(|row| row.copies.stale = LayerSet::NONE);
    confirmed
        .shares
        .iter_mut()
        .for_each(|share| share.is_stale = false);
    assert_eq!(
        order_free_content(&writer.snapshot(rank(0))),
        order_free_content(&confirmed)
    );
}

#[test]
fn foreign_file_or_version_is_an_error() {
    assert!(matches!(read(b"{}"), Err(DumpError::Truncated)));
    assert!(matches!(read(b"{\"version\": 1}"), Err(DumpError::Magic)));
    let mut other = bytes();
    for version in [VERSION - 1, VERSION + 1] {
        other[8] = version as u8;
        let error = read(&other).unwrap_err().to_string();
        let expected = format!("the dump has format version {version}, but only version 4");
        assert!(error.starts_with(&expected), "{error}");
    }
    assert!(matches!(
        read(&[bytes(), vec![0]].concat()),
        Err(DumpError::Malformed(_))
    ));
    let mut lost = Vec::new();
    write_header(&mut lost).unwrap();
    write_end(&mut lost, 1).unwrap();
    assert!(matches!(read(&lost), Err(DumpError::Malformed(_))));
}

#[test]
fn record_above_maximum_length_is_rejected() {
    let mut huge = Vec::new();
    write_header(&mut huge).unwrap();
    huge.extend((MAX_RECORD_BYTES + 1).to_le_bytes());
    assert!(matches!(
        read(&huge),
        Err(DumpError::Malformed("a record is too long"))
    ));
}

#[test]
fn inconsistent_records_are_rejected() {
    let mut valid = read(&bytes()).unwrap().remove(0);
    let row = |engine| SaltRow {
        engine: EngineHash(engine),
        salt: SaltRef::Named(0),
        copies: [1; 4],
        stale: LayerSet::NONE,
    };
    valid.salts.names.push("tenant".into());
    valid.salts.rows = vec![row(1), row(2)];
    type Damage = fn(&mut RankDump);
    let cases: [(&str, Damage); 11] = [
        ("a block refers to a missing salt", |dump| {
            dump.salts.rows[0].salt = SaltRef::Named(1)
        }),
        ("salts are not in the order of engine hashes", |dump| {
            dump.salts.rows.swap(0, 1)
        }),
        ("a block precedes its parent", |dump| {
            dump.blocks[0].parent = Some(3)
        }),
        ("an engine hash refers to a missing block", |dump| {
            dump.hashes.last_mut().unwrap().block = 99
        }),
        ("engine hashes are not in the order of blocks", |dump| {
            dump.hashes[0].block = 5
        }),
        ("an engine hash occurs twice", |dump| {
            dump.hashes[1].engine = dump.hashes[0].engine
        }),
        ("an engine hash has no copy", |dump| {
            dump.hashes[0].copies = CopyCounts::default()
        }),
        ("a tier without copies is marked stale", |dump| {
            dump.hashes[0].copies.stale = LayerSet::of(StorageTier::External)
        }),
        ("an orphan is stored on the device", |dump| {
            dump.orphans[0].copies.counts[0] = 1
        }),
        (
            "a group share refers to a missing group or has no copy",
            |dump| dump.shares[0].group = 1,
        ),
        ("the cache groups are not distinct, or too many", |dump| {
            dump.groups.push(dump.groups[0])
        }),
    ];
    for (problem, damage) in cases {
        let mut dump = valid.clone();
        damage(&mut dump);
        let mut bytes = Vec::new();
        write_header(&mut bytes).unwrap();
        dump.write(&mut bytes).unwrap();
        write_end(&mut bytes, 1).unwrap();
        match read(&bytes) {
            Err(DumpError::Malformed(found)) => assert_eq!(found, problem),
            other => panic!("{problem}: {other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(property_config(10_000))]

    #[test]
    fn every_corrupted_byte_is_detected(at in any::<prop::sample::Index>(), flip in 1..=255u8, cut in any::<bool>()) {
        let mut dump = BYTES.get_or_init(bytes).clone();
        let at = at.index(dump.len());
        if cut {
            dump.truncate(at);
        } else {
            dump[at] ^= flip;
        }
        prop_assert!(read(&dump).is_err());
    }

    #[test]
    fn damaged_record_with_valid_checksum_is_harmless(at in any::<prop::sample::Index>(), flip in 1..=255u8) {
        let dump = read(BYTES.get_or_init(bytes)).unwrap().remove(0);
        let mut payload = postcard::to_stdvec(&DumpRecord::Rank(dump)).unwrap();
        let at = at.index(payload.len());
        payload[at] ^= flip;
        if let Ok(ranks) = read(&dump_of(&payload)) {
            let index = PrefixIndex::new();
            ranks.iter().for_each(|dump| index.create_writer(RankSlot(0)).restore(dump));
        }
    }

    #[test]
    fn arbitrary_rank_record_is_an_error(payload in prop::collection::vec(any::<u8>(), 0..200)) {
        let is_end = payload.first() == Some(&1);
        prop_assert!(is_end || read(&dump_of(&payload)).is_err());
    }
}

/// Returns a dump with one record and without an end.
fn dump_of(payload: &[u8]) -> Vec<u8> {
    let mut dump = Vec::new();
    write_header(&mut dump).unwrap();
    dump.extend((payload.len() as u64).to_le_bytes());
    dump.extend(payload);
    dump.extend(xxh3_64(payload).to_le_bytes());
    dump
}

static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
