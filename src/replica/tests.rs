//! Replicas over a network that loses and repeats messages: whatever happens, once it is whole again all count the same.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use proptest::prelude::*;
use prost::Message as _;
use rand::SeedableRng as _;
use rand::rngs::SmallRng;

use super::mirror::{MOST_BLOCKS, MOST_BLOCKS_OF_ALL_PEERS, Mirror, World};
use super::own::Own;
use super::peers::{Noted, Peers, Wish};
use super::proto::{Batch, Event, SnapshotPart};
use super::wire::Names;
use super::{ReplicaId, Told, wire};
use crate::block::tracking::Key;
use crate::block::{LocalHash, SequenceHash};
use crate::load::{Booking, LoadTracker, News, RankLoad, Reservation, Sequences, Until};
use crate::router::Routed;
use crate::sessions::{Entry, Moved, SessionName, SessionRules, Sessions};
use crate::worker::{BlockSize, DpRank, Slot, WorkerId, WorkerRank};

const LEASE: Duration = Duration::from_secs(5);
const RANKS: u64 = 4;

fn rank(worker: u64) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(0),
    }
}

/// One replica, with slots of its own for the same ranks.
struct Replica {
    id: ReplicaId,
    load: Arc<LoadTracker>,
    sessions: Arc<Sessions>,
    news: Arc<Mutex<Vec<News>>>,
    own: Own,
    peers: Peers,
    held: Vec<Reservation>,
    first: u64,
    /// Ranks below are known.
    known: u64,
    generation: u64,
    random: SmallRng,
    /// The sessions whose ends it sees to.
    sees_to: BTreeMap<String, WorkerRank>,
}

impl Replica {
    fn new(number: u64, clock: &Arc<Mutex<Instant>>) -> Self {
        // In no order, so that a newcomer may be the first of all.
        let id = ReplicaId(number.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        let of_load = clock.clone();
        let load = LoadTracker::new(move || *of_load.lock());
        let of_sessions = clock.clone();
        let sessions = Sessions::new(SessionRules::default(), move || *of_sessions.lock());
        sessions.on_word(id.0, || ());
        sessions.on_move(|| ());
        let news = Arc::<Mutex<Vec<News>>>::default();
        let heard = news.clone();
        load.on_news(move |news| heard.lock().push(news));
        let (own, peers) = (Own::new(id, format!("r{number}")), Peers::new(id, LEASE));
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

    /// The slot of a rank, unlike that of the others.
    fn slot(first: u64, worker: u64) -> Slot {
        Slot(((worker + first) % RANKS) as u32)
    }

    fn learn(&mut self, known: u64) {
        (self.known..known)
            .for_each(|worker| self.load.open(Self::slot(self.first, worker), rank(worker)));
        self.known = self.known.max(known);
        self.generation += 1;
    }

    /// All ranks leave, and come again at other slots.
    fn rearrange(&mut self) {
        (0..self.known).for_each(|worker| self.load.close(Self::slot(self.first, worker)));
        self.first += 1;
        let known = std::mem::take(&mut self.known);
        self.learn(known);
    }

    fn booking(&self, worker: u64, blocks: &[u64]) -> Booking {
        Booking {
            slot: Self::slot(self.first, worker),
            rank: rank(worker),
            sequences: blocks
                .iter()
                .map(|block| SequenceHash(*block))
                .collect::<Sequences>(),
            prompt_tokens: blocks.len() as u64 * 16 + 5,
            cached_tokens: 16,
            track_prefill: true,
            prefill_time: None,
            until: if blocks.len() % 5 == 4 {
                Until::FirstToken
            } else {
                Until::End
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
        let to = |booking: &Booking| Booking {
            slot: Self::slot(first, worker),
            rank: rank(worker),
            ..booking.clone()
        };
        self.held[at].relocate(|_, booking| Some(to(booking)));
    }

    /// What it says, having gathered it.
    fn batches(&mut self) -> Vec<Batch> {
        let news = std::mem::take(&mut *self.news.lock());
        let words = self.sessions.words();
        let told = news
            .into_iter()
            .map(Told::Load)
            .chain(words.into_iter().map(Told::Session));
        told.for_each(|told| self.own.note(&told));
        self.own.batches()
    }

    fn hear(&mut self, message: &Sent, now: Instant) -> (Vec<Wish>, Vec<Noted>) {
        let (first, known) = (self.first, self.known);
        let world = World {
            load: &self.load,
            generation: self.generation,
            slot: &|rank| (rank.worker.0 < known).then(|| Self::slot(first, rank.worker.0)),
            key: None,
            sessions: Some(&self.sessions),
            overloaded: &|_, _| (),
            first_token: &|_| (),
            booked: &|_| (),
            routed: &|_| (),
        };
        let outcome = match message {
            // As bytes, as they come.
            Sent::Batch(batch) => {
                let batch = Batch::decode(&batch.encode_to_vec()[..]).unwrap();
                self.peers.hear(batch, &world, now, &mut self.random)
            }
            Sent::Part(part) => {
                let part = SnapshotPart::decode(&part.encode_to_vec()[..]).unwrap();
                self.peers.take(part, &world, now, &mut self.random)
            }
            Sent::Look => {
                let outcome = self.peers.look(&world, now);
                if self.peers.inherit(now) {
                    self.sessions.inherit(|by| self.peers.knows(ReplicaId(by)));
                }
                outcome
            }
        };
        self.follow();
        (outcome.wishes, outcome.noted)
    }

    fn follow(&mut self) {
        for moved in self.sessions.moves() {
            match moved {
                Moved::Came(stay) | Moved::Inherited(stay) => {
                    assert_eq!(self.sees_to.insert(stay.id, stay.target), None)
                }
                Moved::Left(stay) | Moved::HandedOver(stay) => {
                    assert_eq!(self.sees_to.remove(&stay.id), Some(stay.target));
                }
            }
        }
    }

    fn loads(&self) -> Vec<RankLoad> {
        let mut loads = self.load.snapshot();
        loads.sort_by_key(|load| load.rank);
        loads.iter_mut().for_each(|load| load.slot = Slot(0));
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
    /// How many of ten messages are lost, and how many come twice.
    lossy: bool,
    random: SmallRng,
    noted: Vec<Noted>,
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

    /// How often a message arrives.
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

    fn fulfil(&mut self, at: usize, wish: &Wish) {
        match wish {
            Wish::Sign => {
                let sign = self.replicas[at].own.sign();
                self.spread(at, vec![sign]);
            }
            Wish::Ask(peer) => {
                let Some(asked) = self.replicas.iter().position(|replica| replica.id == *peer)
                else {
                    return;
                };
                if self.copies() == 0 {
                    return;
                }
                self.tell(asked);
                let asked = &self.replicas[asked];
                let sessions: Vec<Told> = asked
                    .sessions
                    .all_words()
                    .into_iter()
                    .map(Told::Session)
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

    /// The network is whole again, and everybody has had the time to find out.
    fn heal(&mut self) {
        self.lossy = false;
        for _ in 0..16 {
            for at in 0..self.replicas.len() {
                self.tell(at);
                let sign = self.replicas[at].own.sign();
                self.spread(at, vec![sign]);
                self.deliver(at, &Sent::Look);
            }
            self.pass(Duration::from_millis(1200));
        }
    }

    /// What everybody should count.
    fn truth(&self) -> Vec<RankLoad> {
        let first = Replica::new(0, &self.clock);
        let (slot_first, load) = (first.first, first.load.clone());
        let all: Vec<Reservation> = self
            .replicas
            .iter()
            .flat_map(|replica| replica.own.alive())
            .map(|live| {
                let mut live = live.clone();
                let located = |booking: &mut Booking| {
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

/// Something that happens at one of the replicas.
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
            .for_each(|held| _ = held.first_token()),
        Step::Output(nth, count, of) => {
            replica
                .held
                .get_mut(nth % held)
                .into_iter()
                .for_each(|held| held.output_blocks(count, of));
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
                Ok(Entry::First(binding)) => drop(binding.bind(rank(worker))),
                Ok(Entry::Bound(mut hold)) => hold.rebind(rank(worker)),
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

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn once_the_network_is_whole_all_count_the_same(
        steps in prop::collection::vec((0..3_usize, step()), 1..80),
        seed in any::<u64>(),
        lossy in any::<bool>(),
    ) {
        let mut site = Site::new(3, seed);
        site.lossy = lossy;
        for (at, step) in &steps {
            perform(&mut site, *at, step);
        }
        site.heal();
        let truth = site.truth();
        let targets = |replica: &Replica, id: u64| {
            let id = format!("s{id}");
            replica.sessions.target(SessionName { id: &id, parent: None, model: Some("m"), tenant: None })
        };
        // Of blocks that count in part, how many do depends on who else held them at that moment.
        let partly = steps.iter().any(|(_, step)| matches!(step, Step::Output(_, _, Some(_))));
        let loads = |mut loads: Vec<RankLoad>| {
            loads.iter_mut().filter(|_| partly).for_each(|load| load.active_blocks = 0);
            loads
        };
        for replica in &site.replicas {
            prop_assert!(replica.peers.are_level());
            prop_assert_eq!(loads(replica.loads()), loads(truth.clone()));
            // Of a session whose replica died before all had heard of it, some may not know until it is used again.
            let certain = !lossy || !steps.iter().any(|(_, step)| matches!(step, Step::Restart));
            for id in (0..5).filter(|_| certain) {
                prop_assert_eq!(targets(replica, id), targets(&site.replicas[0], id), "session {}", id);
            }
        }
        for id in (0..5).filter(|_| !lossy || !steps.iter().any(|(_, step)| matches!(step, Step::Restart))) {
            let there = targets(&site.replicas[0], id);
            let seen = site.replicas.iter().filter_map(|replica| replica.sees_to.get(&format!("s{id}")));
            prop_assert_eq!(seen.copied().collect::<Vec<_>>(), there.into_iter().collect::<Vec<_>>(), "session {}", id);
        }
        // And when all has ended, nothing is left.
        site.replicas.iter_mut().for_each(|replica| replica.held.clear());
        site.heal();
        for replica in &site.replicas {
            prop_assert!(replica.loads().iter().all(|load| (load.active_blocks, load.active_requests) == (0, 0)));
            prop_assert_eq!(replica.peers.reservations(), 0);
        }
    }
}

#[test]
fn without_losses_nobody_is_asked_twice() {
    let mut site = Site::new(3, 1);
    site.heal();
    site.noted.clear();
    for turn in 0..200_usize {
        perform(
            &mut site,
            turn,
            &Step::Book {
                worker: turn as u64 % RANKS,
                prompt: 1,
                blocks: 3,
            },
        );
        site.tell(turn % 3);
    }
    assert_eq!(site.noted, []);
    assert_eq!(
        site.replicas[0].peers.reservations() + site.replicas[0].held.len(),
        200
    );
}

#[test]
fn a_peer_that_falls_silent_loses_its_reservations_and_has_them_again_when_it_is_back() {
    let mut site = Site::new(2, 1);
    site.replicas[1].book(2, &[1, 2, 3]);
    site.heal();
    let (of, silent) = (
        site.replicas[1].id,
        Noted::Silent(site.replicas[1].id, "r2".to_owned(), 1),
    );
    let active = |site: &Site| site.replicas[0].loads()[2].active_blocks;
    assert_eq!(active(&site), 3);
    for _ in 0..6 {
        site.pass(LEASE / 5);
        site.deliver(0, &Sent::Look);
    }
    assert_eq!((active(&site), site.noted.last()), (0, Some(&silent)));
    let sign = site.replicas[1].own.sign();
    site.deliver(0, &Sent::Batch(sign));
    assert_eq!(
        (active(&site), site.noted.last()),
        (3, Some(&Noted::Level(of, 1)))
    );
    // One that says goodbye loses them at once.
    let leaving = Batch {
        leaving: true,
        ..site.replicas[1].own.sign()
    };
    site.deliver(0, &Sent::Batch(leaving));
    assert_eq!(
        (active(&site), site.noted.last()),
        (0, Some(&Noted::Left(of, "r2".to_owned())))
    );
}

#[test]
fn what_is_booked_on_a_worker_that_is_not_known_yet_counts_as_soon_as_it_is() {
    let clock = Arc::new(Mutex::new(Instant::now()));
    let mut site = Site::new(2, 1);
    site.clock = clock.clone();
    let late = Replica {
        known: 0,
        ..Replica::new(9, &clock)
    };
    (0..RANKS).for_each(|worker| late.load.close(Replica::slot(late.first, worker)));
    site.replicas[1] = late;
    site.replicas[0].book(3, &[1, 2]);
    site.replicas[0].held[0].output_blocks(2, None);
    site.heal();
    assert_eq!(site.replicas[1].loads(), []);
    site.replicas[1].learn(RANKS);
    site.deliver(1, &Sent::Look);
    assert_eq!(site.replicas[1].loads(), site.truth());
}

#[test]
fn what_is_booked_counts_on_whichever_slot_its_worker_has_and_wherever_it_goes() {
    let mut site = Site::new(2, 1);
    site.replicas[0].book(2, &[1, 2, 3]);
    site.heal();
    site.replicas[1].rearrange();
    assert_eq!(site.replicas[1].loads()[2].active_requests, 0);
    site.deliver(1, &Sent::Look);
    assert_eq!(site.replicas[1].loads(), site.truth());
    // By a snapshot, too.
    site.replicas[1].rearrange();
    let behind = Batch {
        sequence: 99,
        ..site.replicas[0].own.sign()
    };
    site.deliver(1, &Sent::Batch(behind));
    assert_eq!(site.replicas[1].loads(), site.truth());
    // To a worker that is not known yet.
    let mut late = Replica {
        known: 0,
        ..Replica::new(9, &site.clock)
    };
    (0..RANKS).for_each(|worker| late.load.close(Replica::slot(late.first, worker)));
    late.learn(3);
    site.replicas[1] = late;
    site.heal();
    site.replicas[0].moved(0, 3);
    site.heal();
    assert!(
        site.replicas[1]
            .loads()
            .iter()
            .all(|load| load.active_requests == 0)
    );
    site.replicas[1].learn(RANKS);
    site.deliver(1, &Sent::Look);
    assert_eq!(site.replicas[1].loads(), site.truth());
}

#[test]
fn whoever_was_not_there_itself_takes_nobody_for_silent() {
    let mut site = Site::new(2, 1);
    site.replicas[1].book(2, &[1]);
    site.heal();
    site.pass(LEASE * 3);
    site.deliver(0, &Sent::Look);
    assert_eq!(site.replicas[0].loads()[2].active_blocks, 1);
}

#[test]
fn a_prompt_too_long_to_be_named_counts_whole_and_a_message_holds_no_more_than_it_may() {
    let mut site = Site::new(2, 1);
    site.replicas
        .iter_mut()
        .for_each(|replica| replica.own.limit(16 * 1024));
    let blocks: Vec<u64> = (0..5000).collect();
    (0..20).for_each(|_| site.replicas[0].book(1, &blocks));
    let batches = site.replicas[0].batches();
    assert!(batches.len() > 5);
    assert!(batches.iter().all(|batch| batch.encoded_len() <= 16 * 1024));
    let parts = site.replicas[0].own.snapshot(&[]);
    assert!(parts.len() > 5 && parts.iter().all(|part| part.encoded_len() <= 16 * 1024));
    site.heal();
    let load = site.replicas[1].loads()[1];
    // What is named is shared by all, the rest by nobody.
    let named = 12 * 1024 / 2 / 8;
    assert_eq!(load.active_blocks, named + 20 * (5000 - named));
    assert_eq!(load.active_requests, 20);
}

#[test]
fn what_comes_out_of_a_message_is_what_went_in() {
    let replica = Replica::new(1, &Arc::new(Mutex::new(Instant::now())));
    let booking = Booking {
        prefill_time: Some(Duration::from_millis(5)),
        ..replica.booking(2, &[1, 2])
    };
    let id = crate::load::BookingId(7);
    let all = [
        News::Booked {
            id,
            bookings: vec![booking.clone()],
        },
        News::FirstToken(id),
        News::OutputBlocks {
            id,
            count: 3,
            fraction: Some(0.25),
        },
        News::Moved {
            id,
            to: Some(booking),
        },
        News::Moved { id, to: None },
        News::Released(id),
    ];
    for news in all {
        let told = Told::Load(news);
        let event = Event::decode(&wire::event(&told, 100, None).encode_to_vec()[..]).unwrap();
        let mut back = wire::told(
            event,
            &mut Names::new(&mut SmallRng::seed_from_u64(1), None),
        )
        .unwrap();
        if let Told::Load(News::Booked { bookings, .. }) = &mut back {
            bookings[0].slot = replica.booking(2, &[]).slot;
        }
        if let Told::Load(News::Moved { to: Some(to), .. }) = &mut back {
            to.slot = replica.booking(2, &[]).slot;
        }
        assert_eq!(back, told);
    }
    let prompts = vec![vec![LocalHash(1), LocalHash(2)], vec![LocalHash(3)]];
    let routed = Routed {
        rank: rank(2),
        block_size: BlockSize::new(16).unwrap(),
        prompts,
    };
    let back = |most_named| {
        let event = wire::event(&Told::Routed(routed.clone()), most_named, None);
        match wire::told(
            event,
            &mut Names::new(&mut SmallRng::seed_from_u64(1), None),
        ) {
            Some(Told::Routed(routed)) => routed,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(back(100), routed);
    assert_eq!(
        back(1).prompts,
        [vec![LocalHash(1)], vec![]],
        "as much of it as there is room for"
    );
    assert_eq!(
        wire::told(
            Event::default(),
            &mut Names::new(&mut SmallRng::seed_from_u64(1), None)
        ),
        None
    );
}

#[test]
fn routed_hashes_are_readable_with_the_key_only() {
    let key = |id: &str, byte| Key::new(id, [byte; Key::LEN]);
    let prompts = vec![vec![LocalHash(1), LocalHash(2)], vec![LocalHash(1)]];
    let routed = Routed {
        rank: rank(2),
        block_size: BlockSize::new(16).unwrap(),
        prompts,
    };
    let told = Told::Routed(routed.clone());
    let ours = key("a", 7);
    let event = wire::event(&told, 100, Some(&ours));
    let Some(super::proto::event::Event::Routed(sent)) = &event.event else {
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
        wire::event(&told, 100, Some(&ours)),
        "every message has its own nonce"
    );
    let read = |key: Option<&Key>| {
        wire::told(
            event.clone(),
            &mut Names::new(&mut SmallRng::seed_from_u64(1), key),
        )
    };
    assert_eq!(read(Some(&ours)), Some(told.clone()));
    assert_eq!((read(None), read(Some(&key("b", 7)))), (None, None));
    assert_ne!(read(Some(&key("a", 8))), Some(told));
}

/// A `World` without ranks and with callbacks that do nothing.
fn empty_world(load: &Arc<LoadTracker>) -> World<'_> {
    World {
        load,
        generation: 0,
        slot: &|_| None,
        key: None,
        sessions: None,
        overloaded: &|_, _| (),
        first_token: &|_| (),
        routed: &|_| (),
        booked: &|_| (),
    }
}

fn unnamed(id: u64, unnamed: u64) -> Event {
    let prompt = super::proto::Prompt {
        blocks: Vec::new(),
        unnamed,
    };
    let booking = super::proto::Booking {
        worker: 1,
        prompts: vec![prompt],
        ..Default::default()
    };
    let booked = super::proto::Booked {
        id,
        bookings: vec![booking],
        ..Default::default()
    };
    Event {
        event: Some(super::proto::event::Event::Booked(booked)),
    }
}

#[test]
fn each_reservation_of_a_snapshot_has_unnamed_blocks() {
    let mut random = SmallRng::seed_from_u64(1);
    let mut names = Names::new(&mut random, None);
    let mut blocks = |unnamed_blocks| match wire::told(unnamed(1, unnamed_blocks), &mut names) {
        Some(Told::Load(News::Booked { bookings, .. })) => bookings
            .iter()
            .flat_map(|booking| booking.sequences.prompts())
            .map(|prompt| prompt.len())
            .sum::<usize>(),
        other => panic!("{other:?}"),
    };
    assert_eq!([blocks(100_000), blocks(100_000)], [100_000, 100_000]);
    assert_eq!(
        blocks(u64::MAX),
        MOST_BLOCKS - 200_000,
        "the whole message is bounded, too"
    );
    assert_eq!(blocks(1), 0);
}

#[test]
fn unnamed_blocks_of_a_peer_are_bounded() {
    let (load, mut random) = (LoadTracker::new(Instant::now), SmallRng::seed_from_u64(1));
    let (world, mut mirror) = (empty_world(&load), Mirror::default());
    for id in 0..1_000 {
        let event = unnamed(id, u64::MAX);
        assert!(event.encoded_len() < 60);
        mirror.apply(
            wire::told(event, &mut Names::new(&mut random, None)).unwrap(),
            &world,
        );
        assert!(
            mirror.totals().blocks <= MOST_BLOCKS,
            "{}",
            mirror.totals().blocks
        );
    }
    assert_eq!(
        (mirror.totals().blocks, mirror.len(), mirror.refused()),
        (MOST_BLOCKS, 2, 998)
    );
    mirror.apply(
        Told::Load(News::Released(crate::load::BookingId(0))),
        &world,
    );
    assert_eq!(mirror.totals().blocks, MOST_BLOCKS / 2);
    let to_more = super::proto::Moved {
        id: 1,
        to: Some(booking_of(&unnamed(1, u64::MAX))),
    };
    let moved = Event {
        event: Some(super::proto::event::Event::Moved(to_more)),
    };
    mirror.apply(
        wire::told(moved, &mut Names::new(&mut random, None)).unwrap(),
        &world,
    );
    assert_eq!(
        mirror.totals().blocks,
        MOST_BLOCKS / 2,
        "a moved reservation is counted by what it is now"
    );
    mirror.replace(Vec::new(), &world);
    assert_eq!((mirror.totals().blocks, mirror.len()), (0, 0));
}

#[test]
fn blocks_of_all_peers_are_bounded() {
    let load = LoadTracker::new(Instant::now);
    let mut random = SmallRng::seed_from_u64(1);
    let world = empty_world(&load);
    let now = Instant::now();
    let mut peers = Peers::new(ReplicaId(0), LEASE);
    let mut receive = |replica, ids: std::ops::Range<u64>| {
        let events = ids.map(|id| unnamed(id, u64::MAX)).collect();
        peers.hear(
            Batch {
                replica,
                sequence: 1,
                ..Batch::default()
            },
            &world,
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
        peers.take(snapshot, &world, now, &mut random);
        peers.blocks_by_peer()
    };
    let of_one = MOST_BLOCKS;
    let left = MOST_BLOCKS_OF_ALL_PEERS - of_one;
    assert_eq!(receive(1, 0..10), [of_one]);
    assert_eq!(receive(2, 0..10), [of_one, left]);
    assert_eq!(receive(3, 0..10), [of_one, left, 0]);
    peers.hear(
        Batch {
            replica: 1,
            leaving: true,
            ..Batch::default()
        },
        &world,
        now,
        &mut random,
    );
    assert_eq!(peers.blocks_by_peer(), [left, 0]);
}

#[test]
fn known_reservations_of_a_snapshot_have_limits() {
    let load = LoadTracker::new(Instant::now);
    let world = empty_world(&load);
    let mut mirror = Mirror::default();
    let mut random = SmallRng::seed_from_u64(1);
    let mut named = |id: u64| {
        let blocks = (0..MOST_BLOCKS as u64 / 4)
            .map(|block| id << 32 | block)
            .collect();
        let prompt = super::proto::Prompt { blocks, unnamed: 0 };
        let booking = super::proto::Booking {
            worker: 1,
            prompts: vec![prompt],
            ..Default::default()
        };
        let booked = super::proto::Booked {
            id,
            bookings: vec![booking],
            ..Default::default()
        };
        wire::live(booked, &mut Names::new(&mut random, None))
    };
    mirror.replace((1..=4).map(&mut named).collect(), &world);
    assert_eq!(mirror.totals().blocks, MOST_BLOCKS);
    // New reservations stand before those that are known.
    mirror.replace([5, 6, 1, 2, 3, 4].map(&mut named).into(), &world);
    assert_eq!((mirror.totals().blocks, mirror.refused()), (MOST_BLOCKS, 2));
}

fn booking_of(event: &Event) -> super::proto::Booking {
    match &event.event {
        Some(super::proto::event::Event::Booked(booked)) => booked.bookings[0].clone(),
        other => panic!("{other:?}"),
    }
}

#[test]
fn batches_awaiting_snapshots_are_bounded() {
    let (load, mut random) = (LoadTracker::new(Instant::now), SmallRng::seed_from_u64(1));
    let (world, now) = (empty_world(&load), Instant::now());
    let mut peers = Peers::new(ReplicaId(0), LEASE);
    for sequence in 1..40 {
        for replica in 1..20 {
            let name = "x".repeat(10_000);
            let event = Event {
                event: Some(super::proto::event::Event::FirstTokenOf(name)),
            };
            let batch = Batch {
                replica,
                sequence,
                events: vec![event],
                ..Batch::default()
            };
            peers.hear(batch, &world, now, &mut random);
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
    let (load, mut random) = (LoadTracker::new(Instant::now), SmallRng::seed_from_u64(1));
    let (world, now) = (empty_world(&load), Instant::now());
    let mut peers = Peers::new(ReplicaId(0), LEASE);
    let events = || vec![Event::default(); 1000];
    let encoded = Batch {
        events: events(),
        ..Batch::default()
    }
    .encoded_len();
    for sequence in 1..100 {
        peers.hear(
            Batch {
                replica: 1,
                sequence,
                events: events(),
                ..Batch::default()
            },
            &world,
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
