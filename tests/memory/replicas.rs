//! Memory of the state of replica peers.

use std::sync::Arc;
use std::time::{Duration, Instant};

use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use warmroute_core::load::LoadTracker;
use warmroute_core::worker::RankSlot;
use warmroute_server::cluster::replica::{
    Batch, LocalView, PeerChange, PeerTable, ReplicaId, SnapshotPart,
};

use crate::{MIB, load_tracker, measure, mix};

/// Maximum number of reservations of all peers.
const RESERVATIONS: u64 = 1 << 18;
/// Maximum number of blocks in the reservations of all peers.
const RESERVED: u64 = 1 << 24;
/// Maximum memory of snapshots, and of batches that wait for the end of a snapshot.
const PENDING: u64 = 256 * MIB;

struct PeersFixture {
    load: Arc<LoadTracker>,
    peers: PeerTable,
    random: SmallRng,
}

impl PeersFixture {
    fn new() -> Self {
        let peers = PeerTable::new(ReplicaId(0), Duration::from_secs(3600));
        Self {
            load: load_tracker(),
            peers,
            random: SmallRng::seed_from_u64(1),
        }
    }

    fn receive(&mut self, message: &[u8]) {
        let batch = Batch::decode(message).unwrap();
        self.peers.on_batch(
            batch,
            &local_view(&self.load),
            Instant::now(),
            &mut self.random,
        );
    }

    /// Delivers a snapshot without reservations.
    fn complete_snapshot(&mut self, replica: u64) {
        let snapshot = SnapshotPart {
            replica,
            sequence: 1,
            last: true,
            ..SnapshotPart::default()
        };
        let outcome = self.peers.on_snapshot_part(
            snapshot,
            &local_view(&self.load),
            Instant::now(),
            &mut self.random,
        );
        assert!(
            outcome
                .changes
                .contains(&PeerChange::Synced(ReplicaId(replica), 0)),
            "{outcome:?}"
        );
    }
}

fn local_view(load: &Arc<LoadTracker>) -> LocalView<'_> {
    LocalView {
        load,
        slot: &|_| Some(RankSlot(0)),
        key: None,
        sessions: None,
        stored_responses: None,
        on_overloaded: &|_, _| (),
        on_first_token: &|_| (),
        on_routed: &|_| (),
        on_booked: &|_| (),
    }
}

/// Encodes a length-delimited Protobuf field.
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

/// Encodes a batch of events.
fn batch(replica: u64, sequence: u8, events: &[Vec<u8>]) -> Vec<u8> {
    let mut out = vec![0x09];
    out.extend(replica.to_le_bytes());
    out.extend([3 << 3, sequence]);
    events.iter().for_each(|event| out.extend(field(4, event)));
    out
}

/// Receives batches of empty events, which take two bytes in a message, from the maximum number of
/// peers.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn batches_pending_snapshots() {
    measure("replicas::batches_pending_snapshots", 1, || {
        let mut peers = PeersFixture::new();
        let events = vec![Vec::new(); 20_000];
        for sequence in 1..10 {
            (1..=128).for_each(|replica| peers.receive(&batch(replica, sequence, &events)));
        }
        // Without the limit, 128 peers would store 9 batches of 20,000 events with more than 100
        // bytes each.
        (PENDING, peers)
    });
}

/// Receives reservations without block hashes, in messages of 30 bytes, from eight peers. Four
/// peers suffice to reach the limit of all peers.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn reserved_blocks_of_all_peers() {
    let prompt = field(3, &[2 << 3, 0xff, 0xff, 0xff, 0x7f]);
    let booking = field(2, &[&[1 << 3, 1][..], &prompt].concat());
    let booked = |id: u8| field(1, &[&[1 << 3, id][..], &booking].concat());
    measure("replicas::reserved_blocks_of_all_peers", 16, || {
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

/// Receives reservations of one block from one peer.
#[test]
#[cfg_attr(not(long_tests), ignore = "long: set WARMROUTE_LONG_TESTS=1")]
fn reservations_of_short_prompts() {
    measure("replicas::reservations_of_short_prompts", 1024, || {
        let mut peers = PeersFixture::new();
        peers.receive(&batch(1, 1, &[]));
        peers.complete_snapshot(1);
        let batch_size = RESERVATIONS / 64;
        for number in 0..65 {
            let events: Vec<_> = (number * batch_size..(number + 1) * batch_size)
                .map(short_reservation)
                .collect();
            peers.receive(&batch(1, number as u8 + 2, &events));
        }
        (RESERVATIONS, peers)
    });
}

/// Encodes a reservation with one block.
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
