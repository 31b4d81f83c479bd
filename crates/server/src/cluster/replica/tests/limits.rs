//! Tests of the limits on the memory for the state of peers.

use super::*;

/// Returns a view without ranks and with empty callbacks.
fn empty_view(load: &Arc<LoadTracker>) -> LocalView<'_> {
    LocalView {
        load,
        slot: &|_| None,
        key: None,
        sessions: None,
        stored_responses: None,
        on_overloaded: &|_, _| (),
        on_first_token: &|_| (),
        on_routed: &|_| (),
        on_booked: &|_| (),
    }
}

/// Returns a reservation of worker 1 with this prompt.
fn reservation_of(id: u64, prompt: proto::Prompt) -> proto::Reservation {
    let booking = proto::Booking {
        worker: 1,
        prompts: vec![prompt],
        ..Default::default()
    };
    proto::Reservation {
        id,
        bookings: vec![booking],
        ..Default::default()
    }
}

/// Returns a booking with this number of omitted blocks.
fn booking_event(id: u64, omitted_blocks: u64) -> Event {
    let prompt = proto::Prompt {
        blocks: Vec::new(),
        omitted_blocks,
    };
    let booked = reservation_of(id, prompt);
    Event {
        event: Some(proto::event::Event::Booked(booked)),
    }
}

#[test]
fn each_reservation_of_a_snapshot_has_omitted_blocks() {
    let mut random = SmallRng::seed_from_u64(1);
    let mut namer = BlockNamer::new(&mut random, None);
    let mut blocks =
        |omitted_blocks| match wire::decode_event(booking_event(1, omitted_blocks), &mut namer) {
            Some(ReplicaEvent::Load(ReservationEvent::Booked { bookings, .. })) => bookings
                .iter()
                .flat_map(|booking| booking.sequences.prompts())
                .map(|prompt| prompt.len())
                .sum::<usize>(),
            other => panic!("{other:?}"),
        };
    assert_eq!([blocks(100_000), blocks(100_000)], [100_000, 100_000]);
    assert_eq!(
        blocks(u64::MAX),
        MAX_BLOCKS_PER_PEER - 200_000,
        "the omitted blocks of the whole message are not limited"
    );
    assert_eq!(blocks(1), 0);
}

#[test]
fn omitted_blocks_of_a_peer_are_bounded() {
    let load = LoadTracker::new(Instant::now);
    let mut random = SmallRng::seed_from_u64(1);
    let view = empty_view(&load);
    let mut mirror = ReservationMirror::default();
    for id in 0..1_000 {
        let event = booking_event(id, u64::MAX);
        assert!(event.encoded_len() < 60);
        mirror.apply(
            wire::decode_event(event, &mut BlockNamer::new(&mut random, None)).unwrap(),
            &view,
        );
        assert!(
            mirror.totals().blocks <= MAX_BLOCKS_PER_PEER,
            "{}",
            mirror.totals().blocks
        );
    }
    assert_eq!(
        (mirror.totals().blocks, mirror.len(), mirror.ignored()),
        (MAX_BLOCKS_PER_PEER, 2, 998)
    );
    mirror.apply(
        ReplicaEvent::Load(ReservationEvent::Released(warmroute_core::load::BookingId(
            0,
        ))),
        &view,
    );
    assert_eq!(mirror.totals().blocks, MAX_BLOCKS_PER_PEER / 2);
    let moved = proto::Moved {
        id: 1,
        to: Some(booking_of(&booking_event(1, u64::MAX))),
    };
    let moved = Event {
        event: Some(proto::event::Event::Moved(moved)),
    };
    mirror.apply(
        wire::decode_event(moved, &mut BlockNamer::new(&mut random, None)).unwrap(),
        &view,
    );
    assert_eq!(
        mirror.totals().blocks,
        MAX_BLOCKS_PER_PEER / 2,
        "a moved reservation counts with its previous blocks"
    );
    mirror.replace(Vec::new(), &view);
    assert_eq!((mirror.totals().blocks, mirror.len()), (0, 0));
}

#[test]
fn blocks_of_all_peers_are_bounded() {
    let load = LoadTracker::new(Instant::now);
    let mut random = SmallRng::seed_from_u64(1);
    let view = empty_view(&load);
    let now = Instant::now();
    let mut peers = PeerTable::new(ReplicaId(0), LEASE);
    let mut receive = |replica, ids: std::ops::Range<u64>| {
        let events = ids.map(|id| booking_event(id, u64::MAX)).collect();
        peers.on_batch(
            Batch {
                replica,
                sequence: 1,
                ..Batch::default()
            },
            &view,
            now,
            &mut random,
        );
        let snapshot = SnapshotPart {
            replica,
            sequence: 1,
            last: true,
            events,
            ..SnapshotPart::default()
        };
        peers.on_snapshot_part(snapshot, &view, now, &mut random);
        peers.blocks_by_peer()
    };
    let one_peer = MAX_BLOCKS_PER_PEER;
    let rest = MAX_BLOCKS_OF_ALL_PEERS - one_peer;
    assert_eq!(receive(1, 0..10), [one_peer]);
    assert_eq!(receive(2, 0..10), [one_peer, rest]);
    assert_eq!(receive(3, 0..10), [one_peer, rest, 0]);
    peers.on_batch(
        Batch {
            replica: 1,
            leaving: true,
            ..Batch::default()
        },
        &view,
        now,
        &mut random,
    );
    assert_eq!(peers.blocks_by_peer(), [rest, 0]);
}

#[test]
fn known_reservations_of_a_snapshot_have_limits() {
    let load = LoadTracker::new(Instant::now);
    let view = empty_view(&load);
    let mut mirror = ReservationMirror::default();
    let mut random = SmallRng::seed_from_u64(1);
    let mut reservation = |id: u64| {
        let blocks = (0..MAX_BLOCKS_PER_PEER as u64 / 4)
            .map(|block| id << 32 | block)
            .collect();
        let prompt = proto::Prompt {
            blocks,
            omitted_blocks: 0,
        };
        wire::decode_reservation(
            reservation_of(id, prompt),
            &mut BlockNamer::new(&mut random, None),
        )
    };
    mirror.replace((1..=4).map(&mut reservation).collect(), &view);
    assert_eq!(mirror.totals().blocks, MAX_BLOCKS_PER_PEER);
    // The snapshot contains new reservations before known ones.
    mirror.replace([5, 6, 1, 2, 3, 4].map(&mut reservation).into(), &view);
    assert_eq!(
        (mirror.totals().blocks, mirror.ignored()),
        (MAX_BLOCKS_PER_PEER, 2)
    );
}

fn booking_of(event: &Event) -> proto::Booking {
    match &event.event {
        Some(proto::event::Event::Booked(booked)) => booked.bookings[0].clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn batches_awaiting_snapshots_are_bounded() {
    let load = LoadTracker::new(Instant::now);
    let mut random = SmallRng::seed_from_u64(1);
    let view = empty_view(&load);
    let now = Instant::now();
    let mut peers = PeerTable::new(ReplicaId(0), LEASE);
    for sequence in 1..40 {
        for replica in 1..20 {
            let name = "x".repeat(10_000);
            let event = Event {
                event: Some(proto::event::Event::FirstTokenOf(name)),
            };
            let batch = Batch {
                replica,
                sequence,
                events: vec![event],
                ..Batch::default()
            };
            peers.on_batch(batch, &view, now, &mut random);
        }
    }
    assert!(
        (900 << 10..=1 << 20).contains(&peers.pending_bytes()),
        "{}",
        peers.pending_bytes()
    );
}

#[test]
fn empty_events_awaiting_snapshots_count_their_memory() {
    let load = LoadTracker::new(Instant::now);
    let mut random = SmallRng::seed_from_u64(1);
    let view = empty_view(&load);
    let now = Instant::now();
    let mut peers = PeerTable::new(ReplicaId(0), LEASE);
    let events = || vec![Event::default(); 1000];
    let encoded = Batch {
        events: events(),
        ..Batch::default()
    }
    .encoded_len();
    for sequence in 1..100 {
        peers.on_batch(
            Batch {
                replica: 1,
                sequence,
                events: events(),
                ..Batch::default()
            },
            &view,
            now,
            &mut random,
        );
    }
    let [part, pending] = [
        wire::decoded_bytes(&events(), encoded),
        peers.pending_bytes(),
    ];
    assert!(
        part >= 1000 * size_of::<Event>() && encoded < 2100,
        "{part}, {encoded}"
    );
    assert!(
        pending <= 1 << 20 && pending + part + 100 > 1 << 20,
        "{pending}"
    );
}
