//! Memory for the state of replica peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use warmroute::load::LoadTracker;
use warmroute::replica::{Batch, Noted, Peers, ReplicaId, SnapshotPart, World};
use warmroute::worker::{DpRank, Slot, WorkerId, WorkerRank};

use crate::{MIB, measure, mix};

/// Reservations that all peers may have.
const RESERVATIONS: u64 = 1 << 18;
/// Blocks that the reservations of all peers may have.
const RESERVED: u64 = 1 << 24;
/// Memory of snapshots and batches that are kept until a snapshot is complete.
const PENDING: u64 = 256 * MIB;

struct PeersFixture {
    load: Arc<LoadTracker>,
    peers: Peers,
    random: SmallRng,
}

impl PeersFixture {
    fn new() -> Self {
        let peers = Peers::new(ReplicaId(0), Duration::from_secs(3600));
        let load = LoadTracker::new(Instant::now);
        load.open(
            Slot(0),
            WorkerRank {
                worker: WorkerId(1),
                rank: DpRank(0),
            },
        );
        Self {
            load,
            peers,
            random: SmallRng::seed_from_u64(1),
        }
    }

    fn receive(&mut self, message: &[u8]) {
        let batch = Batch::decode(message).unwrap();
        self.peers
            .hear(batch, &world(&self.load), Instant::now(), &mut self.random);
    }

    /// Answers with a snapshot without reservations.
    fn complete_snapshot(&mut self, replica: u64) {
        let snapshot = SnapshotPart {
            replica,
            sequence: 1,
            last: true,
            ..SnapshotPart::default()
        };
        let outcome = self.peers.take(
            snapshot,
            &world(&self.load),
            Instant::now(),
            &mut self.random,
        );
        assert!(
            outcome.noted.contains(&Noted::Level(ReplicaId(replica), 0)),
            "{outcome:?}"
        );
    }
}

fn world(load: &Arc<LoadTracker>) -> World<'_> {
    World {
        load,
        generation: 0,
        slot: &|_| Some(Slot(0)),
        key: None,
        sessions: None,
        overloaded: &|_, _| (),
        first_token: &|_| (),
        routed: &|_| (),
        booked: &|_| (),
    }
}

/// A field with a length.
fn field(number: u8, content: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    let mut length = content.len();
    while length >= 0x80 {
        out.push(length as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend(content);
    out
}

/// A batch of events.
fn batch(replica: u64, sequence: u8, events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x09];
    out.extend(replica.to_le_bytes());
    out.extend([3 << 3, sequence]);
    events.iter().for_each(|event| out.extend(field(4, event)));
    out
}

/// Batches of empty events, which take two bytes in a message, from as many peers as there may be.
#[test]
fn batches_that_await_snapshots() {
    measure("replicas::batches_that_await_snapshots", 1, || {
        let mut peers = PeersFixture::new();
        let events = vec![Vec::new(); 20_000];
        for sequence in 1..10 {
            (1..=128).for_each(|replica| peers.receive(&batch(replica, sequence, &events)));
        }
        // Without a limit: 128 peers, 9 batches, 20,000 events of more than 100 bytes.
        (PENDING, peers)
    });
}

/// Reservations whose blocks are not named, in messages of 30 bytes, from eight peers. Four of them exhaust the limit of all peers.
#[test]
fn reserved_blocks_of_all_peers() {
    let prompt = field(3, &[2 << 3, 0xff, 0xff, 0xff, 0x7f]);
    let booking = field(2, &[&[1 << 3, 1][..], &prompt].concat());
    let booked = |id: u8| field(1, &[&[1 << 3, id][..], &booking].concat());
    measure("replicas::reserved_blocks_of_all_peers", 24, || {
        let mut peers = PeersFixture::new();
        for replica in 1..=8 {
            peers.receive(&batch(replica, 1, &[]));
            peers.complete_snapshot(replica);
            for id in 2..100 {
                let message = batch(replica, id, &[booked(id)]);
                assert!(message.len() < 40, "{}", message.len());
                peers.receive(&message);
            }
        }
        (RESERVED, peers)
    });
}

/// Reservations of one block from one peer.
#[test]
fn reservations_of_short_prompts() {
    measure("replicas::reservations_of_short_prompts", 1024, || {
        let mut peers = PeersFixture::new();
        peers.receive(&batch(1, 1, &[]));
        peers.complete_snapshot(1);
        let of_batch = RESERVATIONS / 64;
        for number in 0..65 {
            let events: Vec<_> = (number * of_batch..(number + 1) * of_batch)
                .map(short_reservation)
                .collect();
            peers.receive(&batch(1, number as u8 + 2, &events));
        }
        (RESERVATIONS, peers)
    });
}

/// A reservation with one block.
fn short_reservation(id: u64) -> Vec<u8> {
    let number = |mut value: u64| {
        let mut out = Vec::new();
        while value >= 0x80 {
            out.push(value as u8 | 0x80);
            value >>= 7;
        }
        out.push(value as u8);
        out
    };
    let prompt = field(3, &field(1, &mix(id).to_le_bytes()));
    let booking = field(2, &[&[1 << 3, 1][..], &prompt].concat());
    field(1, &[&[1 << 3][..], &number(id), &booking].concat())
}
