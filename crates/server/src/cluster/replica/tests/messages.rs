//! Tests of the messages between replicas.

use super::*;

#[test]
fn long_prompt_counts_fully_within_message_limit() {
    let mut network = ReplicaNetwork::new(2, 1);
    network
        .replicas
        .iter_mut()
        .for_each(|replica| replica.outbox.set_max_bytes(16 * 1024));
    let blocks: Vec<u64> = (0..5000).collect();
    (0..20).for_each(|_| network.replicas[0].book(1, &blocks));
    let batches = network.replicas[0].batches();
    assert!(batches.len() > 5);
    assert!(batches.iter().all(|batch| batch.encoded_len() <= 16 * 1024));
    let parts = network.replicas[0].outbox.snapshot(&[]);
    assert!(parts.len() > 5 && parts.iter().all(|part| part.encoded_len() <= 16 * 1024));
    network.converge();
    let load = network.replicas[1].loads()[1];
    // Named blocks are shared between the reservations, omitted blocks are not.
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
        content_time: None,
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
        let mut decoded = decode(Event::decode(&bytes[..]).unwrap()).unwrap();
        if let ReplicaEvent::Load(ReservationEvent::Booked { bookings, .. }) = &mut decoded {
            bookings[0].slot = replica.booking(2, &[]).slot;
        }
        if let ReplicaEvent::Load(ReservationEvent::Moved { to: Some(to), .. }) = &mut decoded {
            to.slot = replica.booking(2, &[]).slot;
        }
        assert_eq!(decoded, sent);
    }
}

#[test]
fn bindings_round_trip_in_their_table() {
    let session = Arc::new(SessionKey {
        model: None,
        tenant: Some("t".into()),
        group: false,
        id: "resp_1".into(),
    });
    let version = BindingVersion {
        version: 3,
        router: 7,
    };
    let updates = [
        SessionUpdate::Bound {
            session: session.clone(),
            target: rank(2),
            version,
        },
        SessionUpdate::Ended { session, version },
    ];
    for update in updates {
        for sent in [
            ReplicaEvent::Session(update.clone()),
            ReplicaEvent::StoredResponse(update.clone()),
        ] {
            let bytes = wire::encode_event(&sent, 100, None).encode_to_vec();
            assert_eq!(decode(Event::decode(&bytes[..]).unwrap()), Some(sent));
        }
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
    let round_trip = |max_named| {
        let event = wire::encode_event(&ReplicaEvent::Routed(routed.clone()), max_named, None);
        match decode(event) {
            Some(ReplicaEvent::Routed(routed)) => routed,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(round_trip(100), routed);
    assert_eq!(
        round_trip(1).prompts,
        [vec![LocalHash(1)], vec![]],
        "the prompts are not truncated to the limit"
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
    let routed_event = ReplicaEvent::Routed(routed.clone());
    let own_key = key("a", 7);
    let event = wire::encode_event(&routed_event, 100, Some(&own_key));
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
    assert_ne!(
        hashes[0], hashes[2],
        "equal blocks have equal encrypted hashes"
    );
    assert_ne!(
        event,
        wire::encode_event(&routed_event, 100, Some(&own_key)),
        "two messages use the same nonce"
    );
    let decode_with = |key: Option<&TrackingKey>| {
        wire::decode_event(
            event.clone(),
            &mut BlockNamer::new(&mut SmallRng::seed_from_u64(1), key),
        )
    };
    assert_eq!(decode_with(Some(&own_key)), Some(routed_event.clone()));
    assert_eq!(
        (decode_with(None), decode_with(Some(&key("b", 7)))),
        (None, None)
    );
    assert_ne!(decode_with(Some(&key("a", 8))), Some(routed_event));
}
