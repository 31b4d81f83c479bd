use super::super::{EngineEvent, EventBatch, ExtraKey, StoredEvent, WireError, decode};
use super::{BatchLimit, BatchReader, EVENTS, HASHES, KEYS, KEYS_PER_BLOCK, SPARE_LISTS, TOKENS};

const NIL: u8 = 0xc0;
const ONE: u8 = 0x01;

/// Returns the head of an array; it may announce up to 2^32 elements.
fn array(elements: usize) -> Vec<u8> {
    [&[0xdd], &u32::try_from(elements).unwrap().to_be_bytes()[..]].concat()
}

fn repeated(element: &[u8], elements: usize) -> Vec<u8> {
    [array(elements), element.repeat(elements)].concat()
}

/// Returns a batch of encoded events.
fn batch(events: &[Vec<u8>]) -> Vec<u8> {
    [
        vec![0x93, ONE],
        array(events.len()),
        events.concat(),
        vec![NIL],
    ]
    .concat()
}

/// Returns a store event in the array encoding.
fn stored(hashes: &[u8], tokens: &[u8], extra_keys: &[u8]) -> Vec<u8> {
    let head = &b"\x99\xabBlockStored"[..];
    [
        head,
        hashes,
        &[NIL],
        tokens,
        &[ONE, NIL, NIL, NIL],
        extra_keys,
    ]
    .concat()
}

/// Returns a store event in the map encoding, with the extra keys before the hashes.
fn stored_map(hashes: &[u8], tokens: &[u8], extra_keys: &[u8]) -> Vec<u8> {
    let fields: [(&[u8], &[u8]); 5] = [
        (b"\xaaextra_keys", extra_keys),
        (b"\xacblock_hashes", hashes),
        (b"\xa9token_ids", tokens),
        (b"\xaablock_size", &[ONE]),
        (b"\xa4type", b"\xabBlockStored"),
    ];
    [
        vec![0x85],
        fields
            .iter()
            .flat_map(|(name, value)| [*name, *value].concat())
            .collect(),
    ]
    .concat()
}

/// Reads a batch without decoding its fields.
fn check(payload: &[u8]) -> Result<(), WireError> {
    let mut reader = BatchReader::new(payload);
    reader.read_array_length("batch")?;
    reader.read_raw()?;
    for _ in 0..reader.event_count()? {
        reader.event()?;
    }
    Ok(())
}

fn limit(payload: &[u8]) -> Option<BatchLimit> {
    match decode(payload) {
        Err(WireError::TooLarge(limit)) => Some(limit),
        _ => None,
    }
}

/// Reproduces a payload that made a process grow from 24 to 966 MiB.
#[test]
fn twenty_million_nil_extra_keys_are_rejected() {
    let keys = repeated(&[NIL], 20_000_000);
    for event in [
        stored(&[0x91, ONE], &[0x91, ONE], &keys),
        stored_map(&[0x91, ONE], &[0x91, ONE], &keys),
    ] {
        assert_eq!(limit(&batch(&[event])), Some(BatchLimit::ExtraKeys));
    }
}

#[test]
fn every_limit_is_exact() {
    let store = |hashes: usize, tokens: usize, keys: Vec<u8>| {
        batch(&[stored(
            &repeated(&[ONE], hashes),
            &repeated(&[ONE], tokens),
            &keys,
        )])
    };
    let keys = |lists: usize, keys: usize| repeated(&repeated(&[NIL], keys), lists);
    let full_lists = KEYS / KEYS_PER_BLOCK;
    let cleared = b"\x91\xb0AllBlocksCleared".to_vec();
    let cases = [
        (
            batch(&vec![cleared.clone(); EVENTS]),
            batch(&vec![cleared; EVENTS + 1]),
            BatchLimit::Events,
        ),
        (
            store(HASHES, 1, vec![NIL]),
            store(HASHES + 1, 1, vec![NIL]),
            BatchLimit::Hashes,
        ),
        (
            store(1, TOKENS, vec![NIL]),
            store(1, TOKENS + 1, vec![NIL]),
            BatchLimit::Tokens,
        ),
        (
            store(7, 1, keys(7 + SPARE_LISTS, 1)),
            store(7, 1, keys(8 + SPARE_LISTS, 1)),
            BatchLimit::ExtraKeys,
        ),
        (
            batch(&vec![stored(&[0x90], &[0x90], &keys(16, 0)); KEYS / 16]),
            batch(&vec![stored(&[0x90], &[0x90], &keys(16, 0)); KEYS / 16 + 1]),
            BatchLimit::ExtraKeys,
        ),
        (
            store(1, 1, keys(1, KEYS_PER_BLOCK)),
            store(1, 1, keys(1, KEYS_PER_BLOCK + 1)),
            BatchLimit::ExtraKeys,
        ),
        (
            store(full_lists + 1, 1, keys(full_lists, KEYS_PER_BLOCK)),
            store(full_lists + 1, 1, keys(full_lists + 1, KEYS_PER_BLOCK)),
            BatchLimit::ExtraKeys,
        ),
    ];
    for (largest, too_large, expected) in cases {
        assert!(
            check(&largest).is_ok(),
            "{expected:?}: {:?}",
            check(&largest).err()
        );
        assert_eq!(limit(&too_large), Some(expected));
    }
}

#[test]
fn limits_hold_over_all_events_of_a_batch() {
    let half = stored(&repeated(&[ONE], HASHES / 2 + 1), &[0x91, ONE], &[NIL]);
    assert!(decode(&batch(std::slice::from_ref(&half))).is_ok());
    assert_eq!(
        limit(&batch(&[half.clone(), half])),
        Some(BatchLimit::Hashes)
    );
}

#[test]
fn multimodal_objects_and_unknown_tails_are_limited() {
    let blocks = repeated(&[NIL], 1_000_000);
    let removed = [&b"\x94\xacBlockRemoved\x91\x01\xc0"[..], &blocks].concat();
    assert_eq!(limit(&batch(&[removed])), Some(BatchLimit::ExtraKeys));
    let objects = [
        &b"\x91\x81\xaamm_objects"[..],
        &repeated(b"\x91\x01", KEYS_PER_BLOCK + 1),
    ]
    .concat();
    let stored = [
        &b"\x9a\xabBlockStored\x91\x01\xc0\x91\x01\x01\xc0\xc0\xc0\xc0"[..],
        &objects,
    ]
    .concat();
    assert_eq!(limit(&batch(&[stored])), Some(BatchLimit::ExtraKeys));
}

#[test]
fn truncated_payload_is_malformed_and_not_too_large() {
    let whole = batch(&[stored(&repeated(&[ONE], 9), &repeated(&[ONE], 9), &[NIL])]);
    assert!(decode(&whole).is_ok());
    for length in 0..whole.len() {
        assert!(
            matches!(
                decode(&whole[..length]),
                Err(WireError::Truncated | WireError::Malformed(_))
            ),
            "{length}"
        );
    }
}

/// Returns the number of allocated heap bytes.
fn heap(batch: &EventBatch) -> usize {
    let events = batch.events.capacity() * size_of::<EngineEvent>();
    events + batch.events.iter().map(heap_of_event).sum::<usize>()
}

fn heap_of_event(event: &EngineEvent) -> usize {
    match event {
        EngineEvent::Stored(stored) => {
            let StoredEvent {
                hashes,
                tokens,
                extra_keys,
                media,
                ..
            } = &**stored;
            let text = |key: &ExtraKey| match key {
                ExtraKey::Text(text) | ExtraKey::Media(text) => text.capacity(),
                ExtraKey::Other => 0,
            };
            let list = |keys: &Vec<ExtraKey>| {
                keys.capacity() * size_of::<ExtraKey>() + keys.iter().map(text).sum::<usize>()
            };
            let media = media
                .iter()
                .flatten()
                .map(|block| 24 + block.capacity() * 8)
                .sum::<usize>();
            size_of::<StoredEvent>()
                + hashes.capacity() * 8
                + tokens.ids.capacity() * 4
                + extra_keys.capacity() * 24
                + extra_keys.iter().map(list).sum::<usize>()
                + media
        }
        EngineEvent::Removed { hashes, .. } => hashes.capacity() * 8,
        EngineEvent::Cleared { .. } | EngineEvent::Ignored | EngineEvent::Skipped(_) => 0,
    }
}

#[test]
fn decoded_batches_are_bounded_by_their_wire_size() {
    let one = |hashes, tokens, keys: Vec<u8>| {
        stored(&repeated(&[ONE], hashes), &repeated(&[ONE], tokens), &keys)
    };
    let worst = [
        ("hashes", batch(&[one(HASHES, 1, vec![NIL])])),
        (
            "nil keys",
            batch(&[one(HASHES, 1, repeated(&[NIL], HASHES))]),
        ),
        (
            "keys",
            batch(&[one(HASHES, 1, repeated(&[0x91, NIL], KEYS))]),
        ),
        ("stores", batch(&vec![one(1, 1, vec![NIL]); EVENTS])),
        (
            "stores with spare lists",
            batch(&vec![
                one(1, 1, repeated(&[NIL], SPARE_LISTS));
                KEYS / SPARE_LISTS
            ]),
        ),
        (
            "all",
            batch(&[one(HASHES, TOKENS, repeated(&[0x91, NIL], KEYS))]),
        ),
    ];
    for (name, payload) in worst {
        let taken = heap(&decode(&payload).unwrap());
        println!(
            "{name}: {} KiB on the wire, {} KiB decoded",
            payload.len() >> 10,
            taken >> 10
        );
        assert!(taken <= 24 * payload.len() && taken <= 180 << 20, "{name}");
    }
}
