//! What the other replicas tell. Of each peer either everything up to some batch is known, or something is missing and it was
//! asked for the whole; what it tells meanwhile is kept until the whole is there.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use prost::Message as _;
use rand::Rng;
use serde::Serialize;

use super::mirror::{Mirror, ReservationTotals, World};
use super::proto::event::Event as Any;
use super::proto::{Batch, Event, SnapshotPart};
use super::wire::Names;
use super::{ReplicaId, Told, wire};
use crate::load::{BookingId, Live, News};
use crate::sessions::Use;

/// Most peers.
const MOST_PEERS: usize = 128;

/// Most batches that are kept while the whole is waited for. Who tells more meanwhile is asked once more.
const MOST_LATER: usize = 1024;

/// Most parts of an answer.
const MOST_PARTS: u32 = 4096;

/// Most memory of snapshots and batches that are kept, over all peers, until the last part of a snapshot is there.
const MOST_PENDING_BYTES: usize = if cfg!(test) { 1 << 20 } else { 256 << 20 };

/// Who has not answered for so long is asked again.
const PATIENCE: Duration = Duration::from_secs(1);

/// All peers.
#[derive(Debug)]
pub struct Peers {
    own: ReplicaId,
    lease: Duration,
    looked: Option<Instant>,
    peers: BTreeMap<ReplicaId, Peer>,
    /// Since when somebody is gone whose bonds of sessions may be nobody's now.
    bereft: Option<Instant>,
}

/// What is to be done next.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wish {
    /// Ask that peer for everything.
    Ask(ReplicaId),
    /// Say that we are here.
    Sign,
}

/// What changed, for the log and the measures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Noted {
    /// A peer is there.
    Came(ReplicaId, String),
    /// It missed something of it.
    Gap(ReplicaId),
    /// Everything of it is known.
    Level(ReplicaId, usize),
    /// It said goodbye.
    Left(ReplicaId, String),
    /// Nothing was heard of it for too long; so many of its reservations do not count any more.
    Silent(ReplicaId, String, usize),
}

/// What came of a message.
#[derive(Debug, Default)]
pub struct Outcome {
    /// Messages to send.
    pub wishes: Vec<Wish>,
    /// Changes for the log and the metrics.
    pub noted: Vec<Noted>,
}

#[derive(Debug)]
struct Peer {
    name: String,
    heard: Instant,
    draining: bool,
    standing: Standing,
    mirror: Mirror,
}

#[derive(Debug)]
enum Standing {
    /// Everything up to this batch is known.
    Level { last: u64 },
    /// It was asked for everything.
    Behind(Behind),
}

#[derive(Debug)]
struct Behind {
    asked: Instant,
    /// What came of the answer so far.
    parts: Vec<Event>,
    next_part: u32,
    of: u64,
    later: Vec<Batch>,
    /// Memory of the parts and of the later batches.
    bytes: usize,
}

/// A peer, as it is shown.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct Shown {
    replica: ReplicaId,
    name: String,
    /// Whether everything that it told is known.
    level: bool,
    reservations: usize,
    /// Of these, on workers that are not known here.
    on_unknown_workers: usize,
    /// Reservations that are not counted, because they or their blocks exceed a limit.
    refused: u64,
    heard_ms_ago: u128,
}

impl Peers {
    /// Starts without peers. A peer that sends nothing for `lease` is silent.
    pub fn new(own: ReplicaId, lease: Duration) -> Self {
        Self {
            own,
            lease,
            looked: None,
            peers: BTreeMap::new(),
            bereft: None,
        }
    }

    /// A batch of a peer.
    pub fn hear(
        &mut self,
        batch: Batch,
        world: &World<'_>,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Outcome {
        let (from, mut outcome) = (ReplicaId(batch.replica), Outcome::default());
        if from == self.own {
            return outcome;
        }
        if batch.leaving {
            outcome.noted.extend(
                self.peers
                    .remove(&from)
                    .map(|peer| Noted::Left(from, peer.name)),
            );
            self.bereft.get_or_insert(now);
            return outcome;
        }
        outcome.wishes.extend(batch.hello.then_some(Wish::Sign));
        if !self.peers.contains_key(&from) {
            if self.peers.len() >= MOST_PEERS {
                return outcome;
            }
            outcome.noted.push(Noted::Came(from, batch.name.clone()));
            outcome.wishes.push(Wish::Ask(from));
            let standing = Standing::Behind(Behind::new(now));
            let peer = Peer {
                name: batch.name.clone(),
                heard: now,
                draining: false,
                standing,
                mirror: Mirror::default(),
            };
            self.peers.insert(from, peer);
        }
        let room = self.room();
        self.count_others(from);
        let Some(peer) = self.peers.get_mut(&from) else {
            return outcome;
        };
        peer.heard = now;
        peer.draining |= batch.draining;
        if !peer.hear(batch, world, rng, room) {
            outcome.noted.push(Noted::Gap(from));
            outcome.wishes.push(Wish::Ask(from));
            peer.standing.fall_behind(now);
        }
        outcome
    }

    /// Part of what a peer was asked for.
    pub fn take(
        &mut self,
        part: SnapshotPart,
        world: &World<'_>,
        now: Instant,
        rng: &mut impl Rng,
    ) -> Outcome {
        let (from, mut outcome) = (ReplicaId(part.replica), Outcome::default());
        let room = self.room();
        self.count_others(from);
        let Some(peer) = self.peers.get_mut(&from) else {
            return outcome;
        };
        peer.heard = now;
        let Standing::Behind(behind) = &mut peer.standing else {
            return outcome;
        };
        let Some((events, last)) = behind.collect(part, now, room) else {
            return outcome;
        };
        let later = std::mem::take(&mut behind.later);
        peer.replace(events, world, rng);
        peer.standing = Standing::Level { last };
        let mut is_level = true;
        for batch in later {
            is_level = is_level && peer.hear(batch, world, rng, room);
        }
        if is_level {
            outcome.noted.push(Noted::Level(from, peer.mirror.len()));
        } else {
            outcome.noted.push(Noted::Gap(from));
            outcome.wishes.push(Wish::Ask(from));
            peer.standing.fall_behind(now);
        }
        outcome
    }

    /// Counts what all peers but one have reserved, for the limits that all peers share.
    fn count_others(&mut self, id: ReplicaId) {
        let mut others = ReservationTotals::default();
        for (_, peer) in self.peers.iter().filter(|(other, _)| **other != id) {
            let totals = peer.mirror.totals();
            others.reservations += totals.reservations;
            others.blocks += totals.blocks;
        }
        if let Some(peer) = self.peers.get_mut(&id) {
            peer.mirror.set_others(others);
        }
    }

    /// Bytes that may still be kept until snapshots are complete.
    fn room(&self) -> usize {
        MOST_PENDING_BYTES.saturating_sub(self.pending_bytes())
    }

    pub(super) fn pending_bytes(&self) -> usize {
        let bytes = |peer: &Peer| match &peer.standing {
            Standing::Behind(behind) => behind.bytes,
            Standing::Level { .. } => 0,
        };
        self.peers.values().map(bytes).sum()
    }

    #[cfg(test)]
    pub(super) fn blocks_by_peer(&self) -> Vec<usize> {
        self.peers
            .values()
            .map(|peer| peer.mirror.totals().blocks)
            .collect()
    }

    /// Time goes by.
    pub fn look(&mut self, world: &World<'_>, now: Instant) -> Outcome {
        let mut outcome = Outcome::default();
        let since = self
            .looked
            .replace(now)
            .map(|looked| now.saturating_duration_since(looked));
        if since.is_some_and(|since| since > self.lease / 2) {
            // We were not there ourselves, so nobody can have been heard.
            self.peers.values_mut().for_each(|peer| peer.heard = now);
        }
        let silent = |peer: &Peer| now.saturating_duration_since(peer.heard) > self.lease;
        for (id, peer) in self.peers.extract_if(.., |_, peer| silent(peer)) {
            outcome
                .noted
                .push(Noted::Silent(id, peer.name, peer.mirror.len()));
            self.bereft.get_or_insert(now);
        }
        for (id, peer) in &mut self.peers {
            peer.mirror.settle(world);
            if let Standing::Behind(behind) = &mut peer.standing
                && now.saturating_duration_since(behind.asked) > PATIENCE
            {
                behind.asked = now;
                outcome.wishes.push(Wish::Ask(*id));
            }
        }
        outcome
    }

    /// Whether everything is known that those told of whom we know.
    pub(super) fn are_level(&self) -> bool {
        self.peers
            .values()
            .all(|peer| matches!(peer.standing, Standing::Level { .. }))
    }

    /// Whether it is for us to see to what those have left behind who are gone: of those who are there, for the one with the
    /// lowest number, and for all others if that one, which may never have known of it, has not done it two leases later. It is
    /// answered with yes once.
    pub(super) fn inherit(&mut self, now: Instant) -> bool {
        let is_first = self.peers.keys().all(|peer| self.own < *peer);
        let is_due = |since: &mut Instant| {
            is_first || now.saturating_duration_since(*since) > self.lease * 2
        };
        self.bereft.take_if(is_due).is_some()
    }

    /// Those who will be there when we are gone.
    pub(super) fn heirs(&self) -> usize {
        self.peers.values().filter(|peer| !peer.draining).count()
    }

    pub(super) fn knows(&self, peer: ReplicaId) -> bool {
        self.peers.contains_key(&peer)
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Reservations of all of them.
    pub(super) fn reservations(&self) -> usize {
        self.peers.values().map(|peer| peer.mirror.len()).sum()
    }

    pub(super) fn shown(&self, now: Instant) -> Vec<Shown> {
        let shown = |(id, peer): (&ReplicaId, &Peer)| Shown {
            replica: *id,
            name: peer.name.clone(),
            level: matches!(peer.standing, Standing::Level { .. }),
            reservations: peer.mirror.len(),
            on_unknown_workers: peer.mirror.waiting(),
            refused: peer.mirror.refused(),
            heard_ms_ago: now.saturating_duration_since(peer.heard).as_millis(),
        };
        self.peers.iter().map(shown).collect()
    }
}

impl Peer {
    /// Takes a batch; whether nothing is missing before it, or it is waited for already.
    fn hear(&mut self, batch: Batch, world: &World<'_>, rng: &mut impl Rng, room: usize) -> bool {
        let has_events = !batch.events.is_empty();
        match &mut self.standing {
            Standing::Behind(behind) => {
                if has_events {
                    behind.keep(batch, room);
                }
                true
            }
            // A sign of life tells the last one.
            Standing::Level { last } if !has_events => batch.sequence <= *last,
            Standing::Level { last } if batch.sequence == last.saturating_add(1) => {
                *last = batch.sequence;
                let mut names = Names::new(rng, world.key);
                for told in batch
                    .events
                    .into_iter()
                    .filter_map(|event| wire::told(event, &mut names))
                {
                    if let Told::Load(News::Booked { bookings, .. }) = &told {
                        bookings.iter().for_each(|booking| (world.booked)(booking));
                    }
                    self.mirror.apply(told, world);
                }
                true
            }
            Standing::Level { last } => batch.sequence <= *last,
        }
    }

    fn replace(&mut self, events: Vec<Event>, world: &World<'_>, rng: &mut impl Rng) {
        let mut bookings: Vec<(BookingId, Live)> = Vec::new();
        let mut beside: Vec<Told> = Vec::new();
        let mut names = Names::new(rng, world.key);
        for event in events {
            match event.event {
                Some(Any::Booked(told)) => bookings.push(wire::live(told, &mut names)),
                _ => beside.extend(wire::told(event, &mut names)),
            }
        }
        self.mirror.replace(bookings, world);
        for told in beside {
            match (told, world.sessions) {
                (Told::Session(word), Some(sessions)) => sessions.take(word, Use::Sometime),
                (told, _) => self.mirror.apply(told, world),
            }
        }
    }
}

impl Standing {
    /// It is asked for everything, now.
    fn fall_behind(&mut self, now: Instant) {
        *self = Standing::Behind(Behind::new(now));
    }
}

impl Behind {
    fn new(asked: Instant) -> Self {
        Self {
            asked,
            parts: Vec::new(),
            next_part: 0,
            of: 0,
            later: Vec::new(),
            bytes: 0,
        }
    }

    /// Keeps a batch for later. Where there are too many, what comes after shows that some are missing.
    fn keep(&mut self, batch: Batch, room: usize) {
        let bytes = wire::decoded_bytes(&batch.events, batch.encoded_len());
        if self.later.len() < MOST_LATER && bytes <= room {
            self.bytes += bytes;
            self.later.push(batch);
        }
    }

    /// Everything and the batch up to which it is, once the last part is there. The first part of an answer begins anew,
    /// because the peer may have been asked twice.
    fn collect(
        &mut self,
        part: SnapshotPart,
        now: Instant,
        room: usize,
    ) -> Option<(Vec<Event>, u64)> {
        if part.part == 0 {
            (self.next_part, self.of) = (0, part.sequence);
            self.parts.clear();
            self.bytes = self
                .later
                .iter()
                .map(|batch| wire::decoded_bytes(&batch.events, batch.encoded_len()))
                .sum();
        }
        let bytes = wire::decoded_bytes(&part.events, part.encoded_len());
        if part.part != self.next_part
            || part.sequence != self.of
            || part.part >= MOST_PARTS
            || bytes > room
        {
            return None;
        }
        self.bytes += bytes;
        self.next_part += 1;
        self.asked = now;
        self.parts.extend(part.events);
        part.last
            .then(|| (std::mem::take(&mut self.parts), self.of))
    }
}
