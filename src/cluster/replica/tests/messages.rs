//! Messages of replicas.

use super::*;

#[test]
fn long_prompt_counts_fully_within_message_limit() {
    let mut site = Site::new(2, 1);
    site.replicas
        .iter_mut()
        .for_each(|replica| replica.own.set_max_bytes(16 * 1024));
    let blocks: Vec<u64> = (0..5000).collect();
    (0..20).for_each(|_| site.replicas[0].book(1, &blocks));
    let batches = site.replicas[0].batches();
    assert!(batches.len() > 5);
    assert!(batches.iter().all(|batch| batch.encoded_len() <= 16 * 1024));
    let parts = site.replicas[0].own.snapshot(&[]);
    assert!(parts.len() > 5 && parts.iter().all(|part| part.encoded_len() <= 16 * 1024));
    site.heal();
    let load = site.replicas[1].loads()[1];
    // Named blocks are shared, the others are not.
    let named = 12 * 1024 / 2 / 8;
    assert_eq!(load.active_blocks, named + 20 * (5000 - named));
    assert_eq!(load.active_requests, 20);
}

fn decode(event: Event) -> Option<ReplicaEvent> {
    let mut rng = SmallRng::seed_from_u64(1);
    let mut namer = BlockNamer::new(&mut rng, None);
    wire::decode_event(event, &mut namer)
}

#[test]
fn messages_round_trip() {
    let replica = Replica::new(1, &Arc::new(Mutex::new(Instant::now())));
    let booking = LoadBooking {
        prefill_time: Some(Duration::from_millis(5)),
        ..replica.booking(2, &[1, 2])
    };
    let id = warmroute_core::load::BookingId(7);
    let all = [
        ReservationEvent::Booked {
            id,
            bookings: vec![booking.clone()],
        },
        ReservationEvent::FirstToken(id),
        ReservationEvent::OutputBlocks {
            id,
            count: 3,
            fraction: Some(0.25),
        },
        ReservationEvent::Moved {
            id,
            to: Some(booking),
        },
        ReservationEvent::Moved { id, to: None },
        ReservationEvent::Released(id),
    ];
    for event in all {
        let sent = ReplicaEvent::Load(event);
        let bytes = wire::encode_event(&sent, 100, None).encode_to_vec();
        let mut back = decode(Event::decode(&bytes[..]).unwrap()).unwrap();
        if let ReplicaEvent::Load(ReservationEvent::Booked { bookings, .. }) = &mut back {
            bookings[0].slot = replica.booking(2, &[]).slot;
        }
        if let ReplicaEvent::Load(ReservationEvent::Moved { to: Some(to), .. }) = &mut back {
            to.slot = replica.booking(2, &[]).slot;
        }
        assert_eq!(back, sent);
    }
}

#[test]
fn routed_prompts_are_truncated_to_the_limit() {
    let prompts = vec![vec![LocalHash(1), LocalHash(2)], vec![LocalHash(3)]];
    let routed = RoutedPrompts {
        rank: rank(2),
        block_size: BlockSize::new(16).unwrap(),
        prompts,
    };
    let back = |most_named| {
        let event = wire::encode_event(&ReplicaEvent::Routed(routed.clone()), most_named, None);
        match decode(event) {
            Some(ReplicaEvent::Routed(routed)) => routed,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(back(100), routed);
    assert_eq!(
        back(1).prompts,
        [vec![LocalHash(1)], vec![]],
        "as much of it as there is room for"
    );
    assert_eq!(decode(Event::default()), None);
}

#[test]
fn routed_hashes_are_readable_with_the_key_only() {
    let key = |id: &str, byte| TrackingKey::new(id, [byte; TrackingKey::LEN]);
    let prompts = vec![vec![LocalHash(1), LocalHash(2)], vec![LocalHash(1)]];
    let routed = RoutedPrompts {
        rank: rank(2),
        block_size: BlockSize::new(16).unwrap(),
        prompts,
    };
    let told = ReplicaEvent::Routed(routed.clone());
    let ours = key("a", 7);
    let event = wire::encode_event(&told, 100, Some(&ours));
    let Some(proto::event::Event::Routed(sent)) = &event.event else {
        panic!("{event:?}")
    };
    let hashes: Vec<u64> = sent
        .prompts
        .iter()
        .flat_map(|prompt| prompt.hashes.clone())
        .collect();
    assert!(
        hashes.iter().all(|hash| ![1, 2].contains(hash)),
        "{hashes:?}"
    );
    assert_ne!(hashes[0], hashes[2], "equal blocks look different");
    assert_ne!(
        event,
        wire::encode_event(&told, 100, Some(&ours)),
        "every message has its own nonce"
    );
    let read = |key: Option<&TrackingKey>| {
        wire::decode_event(
            event.clone(),
            &mut BlockNamer::new(&mut SmallRng::seed_from_u64(1), key),
        )
    };
    assert_eq!(read(Some(&ours)), Some(told.clone()));
    assert_eq!((read(None), read(Some(&key("b", 7)))), (None, None));
    assert_ne!(read(Some(&key("a", 8))), Some(told));
}
