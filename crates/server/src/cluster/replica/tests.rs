//! Tests of replica sync over a simulated network. After the network has lost and duplicated
//! messages and recovered, all replicas converge.

mod convergence;
mod limits;
mod messages;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::prelude::*;
use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;
use warmroute_core::block::{LocalHash, SequenceHash};
use warmroute_core::fleet::FleetMember;
use warmroute_core::load::{
    BookingEnd, LoadBooking, LoadListener, LoadTracker, PromptSequences, RankLoad, Reservation,
    ReservationEvent,
};
use warmroute_core::router::RoutedPrompts;
use warmroute_core::sessions::{
    BindingVersion, SessionEntry, SessionKey, SessionMove, SessionName, SessionRecording,
    SessionRules, SessionStore, SessionUpdate,
};
use warmroute_core::worker::{BlockSize, RankSlot, Worker, WorkerEndpoint, WorkerId, WorkerRank};

use super::mirror::{LocalView, MAX_BLOCKS_OF_ALL_PEERS, ReservationMirror};
use super::outbox::ReplicaOutbox;
use super::peers::{PeerAction, PeerChange, PeerTable};
use super::wire::{BlockNamer, MAX_BLOCKS_PER_PEER};
use super::{ReplicaEvent, ReplicaId, wire};
use crate::proto::replica as proto;
use crate::proto::replica::{Batch, Event, SnapshotPart};
use crate::tracking_hash::TrackingKey;

const LEASE: Duration = Duration::from_secs(5);
const RANKS: u64 = 4;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank::new(worker, 0)
}

/// Listener that records the changes of reservations.
struct EventLog(Arc<Mutex<Vec<ReservationEvent>>>);

impl LoadListener for EventLog {
    fn wants_reservation_events(&self) -> bool {
        true
    }

    fn on_reservation_event(&self, event: ReservationEvent) {
        self.0.lock().push(event);
    }
}

/// One replica. The replicas use different slots for the same ranks.
struct Replica {
    id: ReplicaId,
    load: Arc<LoadTracker>,
    sessions: Arc<SessionStore>,
    events: Arc<Mutex<Vec<ReservationEvent>>>,
    outbox: ReplicaOutbox,
    peers: PeerTable,
    held: Vec<Reservation>,
    /// Offset between the number of a worker and its slot.
    first: u64,
    /// Number of known ranks.
    known: u64,
    random: SmallRng,
    /// Sessions that this replica has to close.
    owned_sessions: BTreeMap<String, WorkerRank>,
}

impl Replica {
    fn new(number: u64, clock: &Arc<Mutex<Instant>>) -> Self {
        // The ids are not ordered by number, so a new replica can have the lowest id.
        let id = ReplicaId(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let load_clock = clock.clone();
        let events = Arc::<Mutex<Vec<ReservationEvent>>>::default();
        let log = Arc::new(EventLog(events.clone()));
        let load = LoadTracker::with_listener(move || *load_clock.lock(), log);
        let session_clock = clock.clone();
        let sessions = SessionStore::with_listener(
            SessionRules::default(),
            move || *session_clock.lock(),
            SessionRecording {
                moves: true,
                updates_by: Some(id.0),
            },
            Arc::new(()),
        );
        let outbox = ReplicaOutbox::new(id, format!("r{number}"), None);
        let peers = PeerTable::new(id, LEASE);
        let random = SmallRng::seed_from_u64(number);
        let mut replica = Self {
            id,
            load,
            sessions,
            events,
            outbox,
            peers,
            held: Vec::new(),
            first: number % RANKS,
            known: 0,
            random,
            owned_sessions: BTreeMap::new(),
        };
        replica.open_ranks(RANKS);
        replica
    }

    /// Returns the slot of a rank, which depends on the replica.
    fn slot(first: u64, worker: u64) -> RankSlot {
        RankSlot(((worker + first) % RANKS) as u32)
    }

    fn member(first: u64, worker: u64) -> FleetMember {
        let block_size = BlockSize::new(16).unwrap();
        let endpoint = WorkerEndpoint(([10, 0, 0, worker as u8], 8000).into());
        FleetMember {
            slot: Self::slot(first, worker),
            rank: rank(worker),
            worker: Worker::new(WorkerId(worker), endpoint, "m".into(), block_size).into(),
        }
    }

    /// Opens slots for the ranks up to `known`.
    fn open_ranks(&mut self, known: u64) {
        (self.known..known).for_each(|worker| {
            self.load.join(&Self::member(self.first, worker));
        });
        self.known = self.known.max(known);
    }

    /// Moves all ranks to other slots.
    fn move_slots(&mut self) {
        (0..self.known).for_each(|worker| self.load.leave(&Self::member(self.first, worker)));
        self.first += 1;
        let known = std::mem::take(&mut self.known);
        self.open_ranks(known);
    }

    fn booking(&self, worker: u64, blocks: &[u64]) -> LoadBooking {
        LoadBooking {
            slot: Self::slot(self.first, worker),
            rank: rank(worker),
            sequences: blocks
                .iter()
                .map(|block| SequenceHash(*block))
                .collect::<PromptSequences>(),
            prompt_tokens: blocks.len() as u64 * 16 + 5,
            cached_tokens: 16,
            track_prefill: true,
            prefill_time: None,
            content_time: None,
            end: if blocks.len() % 5 == 4 {
                BookingEnd::FirstToken
            } else {
                BookingEnd::RequestEnd
            },
        }
    }

    fn book(&mut self, worker: u64, blocks: &[u64]) {
        let booking = self.booking(worker, blocks);
        let booked = self.load.book_with(|_| Ok::<_, ()>((vec![booking], ())));
        self.held.push(booked.unwrap().0);
    }

    fn move_reservation(&mut self, index: usize, worker: u64) {
        let first = self.first;
        let to = |booking: &LoadBooking| LoadBooking {
            slot: Self::slot(first, worker),
            rank: rank(worker),
            ..booking.clone()
        };
        self.held[index].relocate(|_, booking| Some(to(booking)));
    }

    /// Returns the pending batches.
    fn batches(&mut self) -> Vec<Batch> {
        let load_events = std::mem::take(&mut *self.events.lock());
        let session_updates = self.sessions.take_updates();
        let events = load_events
            .into_iter()
            .map(ReplicaEvent::Load)
            .chain(session_updates.into_iter().map(ReplicaEvent::Session));
        events.for_each(|event| self.outbox.record(&event));
        self.outbox.take_batches()
    }

    fn receive(&mut self, message: &Sent, now: Instant) -> (Vec<PeerAction>, Vec<PeerChange>) {
        let first = self.first;
        let known = self.known;
        let view = LocalView {
            load: &self.load,
            slot: &|rank| (rank.worker.0 < known).then(|| Self::slot(first, rank.worker.0)),
            key: None,
            sessions: Some(&self.sessions),
            stored_responses: None,
            on_overloaded: &|_, _| (),
            on_first_token: &|_| (),
            on_booked: &|_| (),
            on_routed: &|_| (),
        };
        let outcome = match message {
            // Messages are encoded and decoded, as on a real network.
            Sent::Batch(batch) => {
                let batch = Batch::decode(&batch.encode_to_vec()[..]).unwrap();
                self.peers.on_batch(batch, &view, now, &mut self.random)
            }
            Sent::Part(part) => {
                let part = SnapshotPart::decode(&part.encode_to_vec()[..]).unwrap();
                self.peers
                    .on_snapshot_part(part, &view, now, &mut self.random)
            }
            Sent::Tick => {
                let outcome = self.peers.tick(&view, now);
                if self.peers.should_adopt_sessions(now) {
                    self.sessions
                        .take_over_orphans(|router| self.peers.contains(ReplicaId(router)));
                }
                outcome
            }
        };
        self.apply_session_moves();
        (outcome.actions, outcome.changes)
    }

    fn apply_session_moves(&mut self) {
        for session_move in self.sessions.take_moves() {
            match session_move {
                SessionMove::Bound(binding) | SessionMove::TakenOver(binding) => {
                    assert_eq!(self.owned_sessions.insert(binding.id, binding.target), None)
                }
                SessionMove::Unbound(binding) | SessionMove::HandedOver(binding) => {
                    assert_eq!(
                        self.owned_sessions.remove(&binding.id),
                        Some(binding.target)
                    );
                }
            }
        }
    }

    fn loads(&self) -> Vec<RankLoad> {
        let mut loads = self.load.snapshot();
        loads.sort_by_key(|load| load.rank);
        loads.iter_mut().for_each(|load| load.slot = RankSlot(0));
        loads
    }
}

/// Input of a replica: a message of a peer or a timer tick.
enum Sent {
    Batch(Batch),
    Part(SnapshotPart),
    Tick,
}

/// All replicas and the network between them.
struct ReplicaNetwork {
    replicas: Vec<Replica>,
    clock: Arc<Mutex<Instant>>,
    /// Number of replicas started so far.
    started: u64,
    /// Whether messages are lost or duplicated.
    lossy: bool,
    random: SmallRng,
    changes: Vec<PeerChange>,
}

impl ReplicaNetwork {
    fn new(replicas: u64, seed: u64) -> Self {
        let clock = Arc::new(Mutex::new(Instant::now()));
        let all = (1..=replicas)
            .map(|number| Replica::new(number, &clock))
            .collect();
        let random = SmallRng::seed_from_u64(seed);
        Self {
            replicas: all,
            clock,
            started: replicas,
            lossy: false,
            random,
            changes: Vec::new(),
        }
    }

    fn now(&self) -> Instant {
        *self.clock.lock()
    }

    fn advance(&self, time: Duration) {
        *self.clock.lock() += time;
    }

    /// Returns the number of delivered copies of a message.
    fn copies(&mut self) -> usize {
        match self.random.random_range(0..10) {
            0..3 if self.lossy => 0,
            3 if self.lossy => 2,
            _ => 1,
        }
    }

    fn deliver(&mut self, replica: usize, message: &Sent) {
        for _ in 0..self.copies() {
            let now = self.now();
            let (actions, changes) = self.replicas[replica].receive(message, now);
            self.changes.extend(changes);
            for action in actions {
                self.perform_action(replica, &action);
            }
        }
    }

    fn perform_action(&mut self, replica: usize, action: &PeerAction) {
        match action {
            PeerAction::SendHeartbeat => {
                let heartbeat = self.replicas[replica].outbox.heartbeat();
                self.publish(vec![heartbeat]);
            }
            PeerAction::FetchSnapshot(id) => {
                let Some(peer) = self.replicas.iter().position(|replica| replica.id == *id) else {
                    return;
                };
                if self.copies() == 0 {
                    return;
                }
                self.publish_pending(peer);
                let peer = &self.replicas[peer];
                let sessions: Vec<ReplicaEvent> = peer
                    .sessions
                    .snapshot_updates()
                    .into_iter()
                    .map(ReplicaEvent::Session)
                    .collect();
                for part in peer.outbox.snapshot(&sessions) {
                    self.deliver(replica, &Sent::Part(part));
                }
            }
        }
    }

    /// Publishes the pending batches of a replica.
    fn publish_pending(&mut self, replica: usize) {
        let batches = self.replicas[replica].batches();
        self.publish(batches);
    }

    /// Delivers batches to all replicas, including the sender.
    fn publish(&mut self, batches: Vec<Batch>) {
        for batch in batches {
            let message = Sent::Batch(batch);
            (0..self.replicas.len()).for_each(|replica| self.deliver(replica, &message));
        }
    }

    /// Restores the network and exchanges messages until all replicas are synced.
    fn converge(&mut self) {
        self.lossy = false;
        for _ in 0..16 {
            for replica in 0..self.replicas.len() {
                self.publish_pending(replica);
                let heartbeat = self.replicas[replica].outbox.heartbeat();
                self.publish(vec![heartbeat]);
                self.deliver(replica, &Sent::Tick);
            }
            self.advance(Duration::from_millis(1200));
        }
    }

    /// Returns the load that every replica must have after convergence.
    fn expected_loads(&self) -> Vec<RankLoad> {
        let reference = Replica::new(0, &self.clock);
        let first = reference.first;
        let load = reference.load.clone();
        let all: Vec<Reservation> = self
            .replicas
            .iter()
            .flat_map(|replica| replica.outbox.reservations())
            .map(|state| {
                let mut state = state.clone();
                let locate = |booking: &mut LoadBooking| {
                    booking.slot = Replica::slot(first, booking.rank.worker.0)
                };
                state.bookings.iter_mut().for_each(locate);
                load.mirror(&state).unwrap()
            })
            .collect();
        let loads = reference.loads();
        drop(all);
        loads
    }
}

/// A step that one of the replicas performs.
#[derive(Clone, Debug)]
enum Step {
    Book {
        worker: u64,
        prompt: u64,
        blocks: u64,
    },
    FirstToken(usize),
    Output(usize, usize, Option<f64>),
    Move(usize, u64),
    Release(usize),
    Session(u64, u64),
    Publish,
    Advance(u64),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..RANKS, 0..3_u64, 1..12_u64).prop_map(|(worker, prompt, blocks)| Step::Book { worker, prompt, blocks }),
        2 => any::<usize>().prop_map(Step::FirstToken),
        2 => (any::<usize>(), 1..4_usize, prop::option::of(0.0..1.0)).prop_map(|(index, count, fraction)| Step::Output(index, count, fraction)),
        1 => (any::<usize>(), 0..RANKS).prop_map(|(index, worker)| Step::Move(index, worker)),
        2 => any::<usize>().prop_map(Step::Release),
        2 => (0..5_u64, 0..RANKS).prop_map(|(id, worker)| Step::Session(id, worker)),
        5 => Just(Step::Publish),
        1 => (1..2000_u64).prop_map(Step::Advance),
        1 => Just(Step::Restart),
    ]
}

fn perform_step(network: &mut ReplicaNetwork, replica: usize, step: &Step) {
    let replica_index = replica % network.replicas.len();
    let replica = &mut network.replicas[replica_index];
    let count = replica.held.len().max(1);
    match *step {
        Step::Book {
            worker,
            prompt,
            blocks,
        } => {
            let blocks: Vec<u64> = (0..blocks).map(|block| prompt * 1000 + block).collect();
            replica.book(worker, &blocks);
        }
        Step::FirstToken(index) => replica
            .held
            .get_mut(index % count)
            .into_iter()
            .for_each(|held| _ = held.on_first_token()),
        Step::Output(index, blocks, fraction) => {
            replica
                .held
                .get_mut(index % count)
                .into_iter()
                .for_each(|held| held.add_output_blocks(blocks, fraction));
        }
        Step::Move(index, worker) if !replica.held.is_empty() => {
            replica.move_reservation(index % count, worker)
        }
        Step::Release(index) if !replica.held.is_empty() => {
            drop(replica.held.swap_remove(index % count))
        }
        Step::Session(id, worker) => {
            let id = format!("s{id}");
            let name = SessionName {
                id: &id,
                parent: None,
                model: Some("m"),
                tenant: None,
            };
            match replica.sessions.enter(name) {
                Ok(SessionEntry::First(binding)) => drop(binding.bind(rank(worker))),
                Ok(SessionEntry::Bound(mut hold)) => hold.rebind(rank(worker)),
                other => panic!("{other:?}"),
            }
        }
        Step::Publish => network.publish_pending(replica_index),
        Step::Advance(millis) => network.advance(Duration::from_millis(millis)),
        Step::Restart => {
            network.started += 1;
            network.replicas[replica_index] = Replica::new(network.started, &network.clock);
        }
        Step::Move(..) | Step::Release(_) => {}
    }
}
