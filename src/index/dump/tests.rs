use proptest::prelude::*;

use super::*;
use crate::block::{EngineHash, LocalHash};
use crate::index::salts::{SaltRow, Salted};
use crate::index::{GroupNeed, KvEvent, PrefixIndex, RankWriter, StoredBlock};
use crate::tier::Tier;
use crate::worker::{DpRank, Slot, WorkerId, WorkerRank};

fn stored(parent: Option<u64>, names: &[u64], tier: Tier) -> KvEvent {
    let blocks = names.iter().map(|&name| StoredBlock {
        engine: EngineHash(name),
        local: LocalHash(name % 100),
    });
    KvEvent::Stored {
        parent: parent.map(EngineHash),
        blocks: blocks.collect(),
        tier,
    }
}

fn removed(names: &[u64]) -> KvEvent {
    KvEvent::Removed {
        blocks: names.iter().copied().map(EngineHash).collect(),
        tier: Tier::Device,
    }
}

/// A rank with everything there is: a gap, several tiers, names and copies, doubts, blocks that wait, groups.
fn fill(writer: &mut RankWriter) {
    let need = GroupNeed::Last {
        blocks: 2,
        stride: 1.try_into().unwrap(),
    };
    for event in [
        stored(None, &[1, 2, 3, 4, 5], Tier::Device),
        stored(Some(2), &[7, 8], Tier::Device),
        stored(None, &[101, 102], Tier::Device),
        stored(None, &[1, 2], Tier::HostPinned),
        stored(None, &[1], Tier::HostPinned),
        stored(Some(50), &[51, 52], Tier::Disk),
        stored(Some(50), &[51], Tier::Disk),
        removed(&[3, 7]),
        KvEvent::GroupStored {
            group: 4,
            need,
            blocks: [4, 5, 5, 90].map(EngineHash).to_vec(),
        },
    ] {
        writer.apply(&event);
    }
    writer.doubt();
    writer.apply(&stored(Some(4), &[5, 6], Tier::Device));
}

fn rank(number: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(number),
        rank: DpRank(1),
    }
}

/// A dump of two ranks.
fn bytes() -> Vec<u8> {
    let index = PrefixIndex::new();
    let mut writers = [index.join(Slot(0)), index.join(Slot(1))];
    fill(&mut writers[0]);
    writers[1].apply(&stored(None, &[1, 2, 3], Tier::Device));
    let mut bytes = Vec::new();
    begin(&mut bytes).unwrap();
    for (number, writer) in writers.iter().enumerate() {
        writer.dump(rank(number as u64), &mut bytes).unwrap();
    }
    end(&mut bytes, 2).unwrap();
    bytes
}

fn read(bytes: &[u8]) -> Result<Vec<RankDump>, DumpError> {
    Reader::new(bytes)?.collect()
}

/// A dump without the order of its blocks, which depends on how the tries came to be.
pub(crate) fn content(dump: &RankDump) -> impl PartialEq + std::fmt::Debug + use<> {
    let mut paths: Vec<Vec<LocalHash>> = Vec::new();
    for block in &dump.blocks {
        let mut path = block
            .parent
            .map(|parent| paths[parent as usize].clone())
            .unwrap_or_default();
        path.push(block.local);
        paths.push(path);
    }
    let name = |name: &PlacedName| (name.engine, paths[name.block as usize].clone(), name.copies);
    let mut names: Vec<_> = dump.names.iter().map(name).collect();
    names.sort_by_key(|(engine, ..)| *engine);
    paths.sort();
    let salt = |row: &SaltRow| match row.salt {
        Salted::By(number) => (*row, Some(dump.salts.names[number as usize].clone())),
        _ => (*row, None),
    };
    // Numbers of salts depend on the order in which they are met.
    let salts = dump.salts.rows.iter().map(salt).map(|(row, name)| {
        (
            row.engine,
            row.salt == Salted::Unknown,
            name,
            row.copies,
            row.doubted,
        )
    });
    let salts = (dump.salts.used, dump.salts.full, salts.collect::<Vec<_>>());
    (
        names,
        paths,
        dump.waiting.clone(),
        dump.groups.clone(),
        dump.shares.clone(),
        salts,
    )
}

#[test]
fn a_dump_brings_back_what_was_held() {
    let dumps = read(&bytes()).unwrap();
    assert_eq!(
        dumps.iter().map(RankDump::rank).collect::<Vec<_>>(),
        [rank(0), rank(1)]
    );
    let index = PrefixIndex::new();
    let mut filled = index.join(Slot(0));
    fill(&mut filled);
    let mut restored = index.join(Slot(1));
    restored.restore(&dumps[0]);
    let counts = |slot: usize| index.stats().slots[slot].counts;
    assert_eq!(counts(0), counts(1));
    assert_eq!((counts(0).device, counts(0).waiting), (6, 2));
    assert_eq!(
        content(&restored.portrait(rank(0))),
        content(&filled.portrait(rank(0)))
    );
}

#[test]
fn the_events_of_a_dump_lead_to_the_same_state_but_for_doubts() {
    let dump = read(&bytes()).unwrap().remove(0);
    let index = PrefixIndex::new();
    let mut writer = index.join(Slot(0));
    let mut told = std::collections::HashSet::new();
    for event in dump.events() {
        if let KvEvent::Stored {
            parent: Some(parent),
            tier,
            ..
        } = &event
        {
            assert!(
                told.contains(parent) || *tier == Tier::Disk,
                "{parent:?} comes after what follows it"
            );
        }
        if let KvEvent::Stored { blocks, .. } = &event {
            told.extend(blocks.iter().map(|block| block.engine));
        }
        writer.apply(&event);
    }
    let mut certain = dump.clone();
    certain
        .names
        .iter_mut()
        .for_each(|name| name.copies.doubted = [false; 4]);
    certain
        .waiting
        .iter_mut()
        .for_each(|name| name.copies.doubted = [false; 4]);
    certain
        .shares
        .iter_mut()
        .for_each(|share| share.doubted = false);
    assert_eq!(content(&writer.portrait(rank(0))), content(&certain));
}

#[test]
fn what_is_no_dump_or_of_another_version_is_named() {
    assert!(matches!(read(b"{}"), Err(DumpError::Truncated)));
    assert!(matches!(read(b"{\"version\": 1}"), Err(DumpError::Magic)));
    let mut newer = bytes();
    newer[8] = 3;
    assert!(matches!(read(&newer), Err(DumpError::Version(3))));
    assert!(matches!(
        read(&[bytes(), vec![0]].concat()),
        Err(DumpError::Malformed(_))
    ));
    let mut lost = Vec::new();
    begin(&mut lost).unwrap();
    end(&mut lost, 1).unwrap();
    assert!(matches!(read(&lost), Err(DumpError::Malformed(_))));
}

#[test]
fn a_length_that_is_only_claimed_reserves_nothing() {
    let mut huge = Vec::new();
    begin(&mut huge).unwrap();
    huge.extend([Kind::Rank as u8, 0xff, 0xff, 0xff, 0xff]);
    assert!(matches!(
        read(&huge),
        Err(DumpError::Malformed("a frame is too long"))
    ));
}

#[test]
fn sound_frames_that_contradict_one_another_are_refused() {
    let mut sound = read(&bytes()).unwrap().remove(0);
    let row = |engine| SaltRow {
        engine: EngineHash(engine),
        salt: Salted::By(0),
        copies: [1; 4],
        doubted: [false; 4],
    };
    sound.salts.names.push("tenant".into());
    sound.salts.rows = vec![row(1), row(2)];
    type Damage = fn(&mut RankDump);
    let cases: [(&str, Damage); 10] = [
        ("a salt without a name", |dump| {
            dump.salts.rows[0].salt = Salted::By(1)
        }),
        ("salts are not in the order of names", |dump| {
            dump.salts.rows.swap(0, 1)
        }),
        ("a block in front of its parent", |dump| {
            dump.blocks[0].parent = Some(3)
        }),
        ("a name without a block", |dump| {
            dump.names.last_mut().unwrap().block = 99
        }),
        ("names are not in the order of blocks", |dump| {
            dump.names[0].block = 5
        }),
        ("a name that stands twice", |dump| {
            dump.names[1].engine = dump.names[0].engine
        }),
        ("a name without a copy", |dump| {
            dump.names[0].copies = Copies::default()
        }),
        ("a device block without a place", |dump| {
            dump.waiting[0].copies.counts[0] = 1
        }),
        ("a share of no group", |dump| dump.shares[0].group = 1),
        ("groups that cannot be told apart", |dump| {
            dump.groups.push(dump.groups[0])
        }),
    ];
    for (problem, damage) in cases {
        let mut dump = sound.clone();
        damage(&mut dump);
        let mut bytes = Vec::new();
        begin(&mut bytes).unwrap();
        dump.write(&mut bytes).unwrap();
        end(&mut bytes, 1).unwrap();
        match read(&bytes) {
            Err(DumpError::Malformed(found)) => assert_eq!(found, problem),
            other => panic!("{problem}: {other:?}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn no_damage_goes_unnoticed(at in any::<prop::sample::Index>(), flip in 1..=255u8, cut in any::<bool>()) {
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
    fn arbitrary_bytes_after_a_sound_head_are_an_error(tail in prop::collection::vec(any::<u8>(), 0..200)) {
        let mut dump = Vec::new();
        begin(&mut dump).unwrap();
        dump.extend(tail);
        prop_assert!(read(&dump).is_err());
    }
}

static BYTES: std::sync::OnceLock<Vec<u8>> = std::sync::OnceLock::new();
