//! Replica sync over a network that loses and duplicates messages: all replicas converge once it
//! works again.

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
use warmroute_core::load::{
    BookingEnd, LoadBooking, LoadListener, LoadTracker, PromptSequences, RankLoad, Reservation,
    ReservationEvent,
};
use warmroute_core::router::RoutedPrompts;
use warmroute_core::sessions::{
    SessionEntry, SessionMove, SessionName, SessionRecording, SessionRules, SessionStore,
};
use warmroute_core::worker::{BlockSize, DpRank, RankSlot, WorkerId, WorkerRank};

use super::mirror::{LocalView, MAX_BLOCKS_OF_ALL_PEERS, MAX_BLOCKS_PER_PEER, ReservationMirror};
use super::outbox::ReplicaOutbox;
use super::peers::{PeerAction, PeerChange, PeerTable};
use super::proto::{Batch, Event, SnapshotPart};
use super::wire::BlockNamer;
use super::{ReplicaEvent, ReplicaId, proto, wire};
use crate::tracking_hash::TrackingKey;

const LEASE: Duration = Duration::from_secs(5);
const RANKS: u64 = 4;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

/// Records the changes of reservations.
struct EventLog(Arc<Mutex<Vec<ReservationEvent>>>);

impl LoadListener for EventLog {
    fn wants_reservation_events(&self) -> bool {
        true
    }

    fn on_reservation_event(&self, event: ReservationEvent) {
        self.0.lock().push(event);
    }
}

/// One replica, with different slots for the same ranks.
struct Replica {
    id: ReplicaId,
    load: Arc<LoadTracker>,
    sessions: Arc<SessionStore>,
    news: Arc<Mutex<Vec<ReservationEvent>>>,
    own: ReplicaOutbox,
    peers: PeerTable,
    held: Vec<Reservation>,
    first: u64,
    /// Number of known ranks.
    known: u64,
    generation: u64,
    random: SmallRng,
    /// Sessions that this replica closes.
    sees_to: BTreeMap<String, WorkerRank>,
}

impl Replica {
    fn new(number: u64, clock: &Arc<Mutex<Instant>>) -> Self {
        // Unordered ids, so that a new replica may have the lowest one.
        let id = ReplicaId(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let of_load = clock.clone();
        let news = Arc::<Mutex<Vec<ReservationEvent>>>::default();
        let log = Arc::new(EventLog(news.clone()));
        let load = LoadTracker::with_listener(move || *of_load.lock(), log);
        let of_sessions = clock.clone();
        let sessions = SessionStore::with_listener(
            SessionRules::default(),
            move || *of_sessions.lock(),
            SessionRecording {
                moves: true,
                updates_by: Some(id.0),
            },
            Arc::new(()),
        );
        let own = ReplicaOutbox::new(id, format!("r{number}"));
        let peers = PeerTable::new(id, LEASE);
        let random = SmallRng::seed_from_u64(number);
        let mut replica = Self {
            id,
            load,
            sessions,
            news,
            own,
            peers,
            held: Vec::new(),
            first: number % RANKS,
            known: 0,
            generation: 0,
            random,
            sees_to: BTreeMap::new(),
        };
        replica.learn(RANKS);
        replica
    }

    /// Slot of a rank, different for each replica.
    fn slot(first: u64, worker: u64) -> RankSlot {
        RankSlot(((worker + first) % RANKS) as u32)
    }

    fn learn(&mut self, known: u64) {
        (self.known..known).for_each(|worker| {
            self.load
                .open_slot(Self::slot(self.first, worker), rank(worker))
        });
        self.known = self.known.max(known);
        self.generation += 1;
    }

    /// Moves all ranks to other slots.
    fn rearrange(&mut self) {
        (0..self.known).for_each(|worker| self.load.close_slot(Self::slot(self.first, worker)));
        self.first += 1;
        let known = std::mem::take(&mut self.known);
        self.learn(known);
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
            end: if blocks.len() % 5 == 4 {
                BookingEnd::FirstToken
            } else {
                BookingEnd::RequestEnd
            },
        }
    }

    fn book(&mut self, worker: u64, blocks: &[u64]) {
        let booking = self.booking(worker, blocks);
        let held = self.load.book_with(|_| Ok::<_, ()>(vec![booking])).unwrap();
        self.held.push(held);
    }

    fn moved(&mut self, at: usize, worker: u64) {
        let first = self.first;
        let to = |booking: &LoadBooking| LoadBooking {
            slot: Self::slot(first, worker),
            rank: rank(worker),
            ..booking.clone()
        };
        self.held[at].relocate(|_, booking| Some(to(booking)));
    }

    /// Returns the pending batches.
    fn batches(&mut self) -> Vec<Batch> {
        let news = std::mem::take(&mut *self.news.lock());
        let words = self.sessions.take_updates();
        let told = news
            .into_iter()
            .map(ReplicaEvent::Load)
            .chain(words.into_iter().map(ReplicaEvent::Session));
        told.for_each(|told| self.own.record(&told));
        self.own.take_batches()
    }

    fn hear(&mut self, message: &Sent, now: Instant) -> (Vec<PeerAction>, Vec<PeerChange>) {
        let first = self.first;
        let known = self.known;
        let view = LocalView {
            load: &self.load,
            generation: self.generation,
            slot: &|rank| (rank.worker.0 < known).then(|| Self::slot(first, rank.worker.0)),
            key: None,
            sessions: Some(&self.sessions),
            on_overloaded: &|_, _| (),
            on_first_token: &|_| (),
            on_booked: &|_| (),
            on_routed: &|_| (),
        };
        let outcome = match message {
            // Encoded, as on the network.
            Sent::Batch(batch) => {
                let batch = Batch::decode(&batch.encode_to_vec()[..]).unwrap();
                self.peers.on_batch(batch, &view, now, &mut self.random)
            }
            Sent::Part(part) => {
                let part = SnapshotPart::decode(&part.encode_to_vec()[..]).unwrap();
                self.peers
                    .on_snapshot_part(part, &view, now, &mut self.random)
            }
            Sent::Look => {
                let outcome = self.peers.tick(&view, now);
                if self.peers.should_adopt_sessions(now) {
                    self.sessions
                        .take_over_orphans(|by| self.peers.contains(ReplicaId(by)));
                }
                outcome
            }
        };
        self.follow();
        (outcome.actions, outcome.changes)
    }

    fn follow(&mut self) {
        for moved in self.sessions.take_moves() {
            match moved {
                SessionMove::Bound(stay) | SessionMove::TakenOver(stay) => {
                    assert_eq!(self.sees_to.insert(stay.id, stay.target), None)
                }
                SessionMove::Unbound(stay) | SessionMove::HandedOver(stay) => {
                    assert_eq!(self.sees_to.remove(&stay.id), Some(stay.target));
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

enum Sent {
    Batch(Batch),
    Part(SnapshotPart),
    Look,
}

/// All replicas and the network between them.
struct Site {
    replicas: Vec<Replica>,
    clock: Arc<Mutex<Instant>>,
    started: u64,
    /// Messages are lost or duplicated.
    lossy: bool,
    random: SmallRng,
    noted: Vec<PeerChange>,
}

impl Site {
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
            noted: Vec::new(),
        }
    }

    fn now(&self) -> Instant {
        *self.clock.lock()
    }

    fn pass(&self, time: Duration) {
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

    fn deliver(&mut self, at: usize, message: &Sent) {
        for _ in 0..self.copies() {
            let now = self.now();
            let (wishes, noted) = self.replicas[at].hear(message, now);
            self.noted.extend(noted);
            wishes.into_iter().for_each(|wish| self.fulfil(at, &wish));
        }
    }

    fn fulfil(&mut self, at: usize, wish: &PeerAction) {
        match wish {
            PeerAction::SendHeartbeat => {
                let sign = self.replicas[at].own.heartbeat();
                self.spread(at, vec![sign]);
            }
            PeerAction::FetchSnapshot(peer) => {
                let Some(asked) = self.replicas.iter().position(|replica| replica.id == *peer)
                else {
                    return;
                };
                if self.copies() == 0 {
                    return;
                }
                self.tell(asked);
                let asked = &self.replicas[asked];
                let sessions: Vec<ReplicaEvent> = asked
                    .sessions
                    .snapshot_updates()
                    .into_iter()
                    .map(ReplicaEvent::Session)
                    .collect();
                for part in asked.own.snapshot(&sessions) {
                    self.deliver(at, &Sent::Part(part));
                }
            }
        }
    }

    fn tell(&mut self, at: usize) {
        let batches = self.replicas[at].batches();
        self.spread(at, batches);
    }

    fn spread(&mut self, from: usize, batches: Vec<Batch>) {
        for batch in batches {
            let message = Sent::Batch(batch);
            (0..self.replicas.len()).for_each(|at| self.deliver(at, &message));
            let _ = from;
        }
    }

    /// Restores the network and delivers until all replicas are synced.
    fn heal(&mut self) {
        self.lossy = false;
        for _ in 0..16 {
            for at in 0..self.replicas.len() {
                self.tell(at);
                let sign = self.replicas[at].own.heartbeat();
                self.spread(at, vec![sign]);
                self.deliver(at, &Sent::Look);
            }
            self.pass(Duration::from_millis(1200));
        }
    }

    /// Expected load.
    fn truth(&self) -> Vec<RankLoad> {
        let first = Replica::new(0, &self.clock);
        let slot_first = first.first;
        let load = first.load.clone();
        let all: Vec<Reservation> = self
            .replicas
            .iter()
            .flat_map(|replica| replica.own.reservations())
            .map(|live| {
                let mut live = live.clone();
                let located = |booking: &mut LoadBooking| {
                    booking.slot = Replica::slot(slot_first, booking.rank.worker.0)
                };
                live.bookings.iter_mut().for_each(located);
                load.mirror(&live).unwrap()
            })
            .collect();
        let loads = first.loads();
        drop(all);
        loads
    }
}

/// Step at one of the replicas.
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
    Tell,
    Pass(u64),
    Restart,
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..RANKS, 0..3_u64, 1..12_u64).prop_map(|(worker, prompt, blocks)| Step::Book { worker, prompt, blocks }),
        2 => any::<usize>().prop_map(Step::FirstToken),
        2 => (any::<usize>(), 1..4_usize, prop::option::of(0.0..1.0)).prop_map(|(at, count, of)| Step::Output(at, count, of)),
        1 => (any::<usize>(), 0..RANKS).prop_map(|(at, worker)| Step::Move(at, worker)),
        2 => any::<usize>().prop_map(Step::Release),
        2 => (0..5_u64, 0..RANKS).prop_map(|(id, worker)| Step::Session(id, worker)),
        5 => Just(Step::Tell),
        1 => (1..2000_u64).prop_map(Step::Pass),
        1 => Just(Step::Restart),
    ]
}

fn perform(site: &mut Site, at: usize, step: &Step) {
    let at = at % site.replicas.len();
    let replica = &mut site.replicas[at];
    let held = replica.held.len().max(1);
    match *step {
        Step::Book {
            worker,
            prompt,
            blocks,
        } => {
            let blocks: Vec<u64> = (0..blocks).map(|block| prompt * 1000 + block).collect();
            replica.book(worker, &blocks);
        }
        Step::FirstToken(nth) => replica
            .held
            .get_mut(nth % held)
            .into_iter()
            .for_each(|held| _ = held.on_first_token()),
        Step::Output(nth, count, of) => {
            replica
                .held
                .get_mut(nth % held)
                .into_iter()
                .for_each(|held| held.add_output_blocks(count, of));
        }
        Step::Move(nth, worker) if !replica.held.is_empty() => replica.moved(nth % held, worker),
        Step::Release(nth) if !replica.held.is_empty() => {
            drop(replica.held.swap_remove(nth % held))
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
        Step::Tell => site.tell(at),
        Step::Pass(millis) => site.pass(Duration::from_millis(millis)),
        Step::Restart => {
            site.started += 1;
            site.replicas[at] = Replica::new(site.started, &site.clock);
        }
        Step::Move(..) | Step::Release(_) => {}
    }
}
