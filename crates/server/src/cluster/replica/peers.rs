//! State received from the other replicas.
//!
//! For each peer, either all batches up to a sequence number were applied, or batches are missing
//! and a snapshot was requested. Batches that arrive in the meantime are deferred until the
//! snapshot is complete.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use prost::Message as _;
use rand::Rng;
use serde::Serialize;
use warmroute_core::load::{BookingId, ReservationEvent, ReservationState};
use warmroute_core::sessions::UpdateKind;

use super::mirror::{LocalView, ReservationMirror, ReservationTotals};
use super::wire::BlockNamer;
use super::{ReplicaEvent, ReplicaId, wire};
use crate::proto::replica::event::Event as Any;
use crate::proto::replica::{Batch, Event, SnapshotPart};

/// Maximum number of peers.
const MAX_PEERS: usize = 128;

/// Maximum number of batches deferred during a snapshot transfer. If a peer sends more batches, the
/// snapshot is requested again.
const MAX_DEFERRED_BATCHES: usize = 1024;

/// Maximum number of parts of a snapshot.
const MAX_SNAPSHOT_PARTS: u32 = 4096;

/// Maximum memory in bytes of incomplete snapshots and deferred batches of all peers.
const MAX_PENDING_BYTES: usize = if cfg!(test) { 1 << 20 } else { 256 << 20 };

/// Time without a snapshot part after which the snapshot is requested again.
const SNAPSHOT_TIMEOUT: Duration = Duration::from_secs(1);

/// Table of all peers.
#[derive(Debug)]
pub struct PeerTable {
    own_id: ReplicaId,
    lease: Duration,
    last_tick: Option<Instant>,
    peers: BTreeMap<ReplicaId, PeerReplica>,
    /// Time of the departure of a peer whose sessions may have no owner.
    orphaned_since: Option<Instant>,
}

/// Action requested by the state machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerAction {
    /// Request a snapshot from the peer.
    FetchSnapshot(ReplicaId),
    /// Send a heartbeat.
    SendHeartbeat,
}

/// Change for logs and metrics.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PeerChange {
    /// A peer joined.
    Joined(ReplicaId, String),
    /// Messages of a peer were lost.
    Gap(ReplicaId),
    /// The snapshot of a peer is complete, with its number of reservations.
    Synced(ReplicaId, usize),
    /// A peer left.
    Left(ReplicaId, String),
    /// A peer sent no message for the lease. Its reservations, of this number, were dropped.
    TimedOut(ReplicaId, String, usize),
}

/// Result of handling a message or a tick.
#[derive(Debug, Default)]
pub struct PeerUpdate {
    /// Messages to send.
    pub actions: Vec<PeerAction>,
    /// Changes for the log and the metrics.
    pub changes: Vec<PeerChange>,
}

#[derive(Debug)]
struct PeerReplica {
    name: String,
    last_received: Instant,
    draining: bool,
    state: PeerState,
    mirror: ReservationMirror,
}

#[derive(Debug)]
enum PeerState {
    /// All batches up to `last` were applied.
    Synced { last: u64 },
    /// A snapshot was requested.
    CatchingUp(SnapshotFetch),
}

#[derive(Debug)]
struct SnapshotFetch {
    requested_at: Instant,
    /// Received parts of the snapshot.
    parts: Vec<Event>,
    next_part: u32,
    sequence: u64,
    deferred: Vec<Batch>,
    /// Memory of the parts and the deferred batches.
    bytes: usize,
}

/// Status of a peer on the status page.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub(super) struct PeerStatus {
    replica: ReplicaId,
    name: String,
    /// True if all batches of the peer were applied.
    synced: bool,
    reservations: usize,
    /// Number of reservations on workers that are unknown to this replica.
    on_unknown_workers: usize,
    /// Number of reservations that were ignored because of a limit.
    ignored_reservations: u64,
    last_message_seconds_ago: f64,
}

impl PeerTable {
    /// Creates an empty table. A peer that sends no message for `lease` times out.
    pub fn new(own_id: ReplicaId, lease: Duration) -> Self {
        Self {
            own_id,
            lease,
            last_tick: None,
            peers: BTreeMap::new(),
            orphaned_since: None,
        }
    }

    /// Handles a batch.
    pub fn on_batch(
        &mut self,
        batch: Batch,
        view: &LocalView<'_>,
        now: Instant,
        rng: &mut impl Rng,
    ) -> PeerUpdate {
        let from = ReplicaId(batch.replica);
        let mut outcome = PeerUpdate::default();
        if from == self.own_id {
            return outcome;
        }
        if batch.leaving {
            outcome.changes.extend(
                self.peers
                    .remove(&from)
                    .map(|peer| PeerChange::Left(from, peer.name)),
            );
            self.orphaned_since.get_or_insert(now);
            return outcome;
        }
        outcome
            .actions
            .extend(batch.hello.then_some(PeerAction::SendHeartbeat));
        if !self.peers.contains_key(&from) {
            if self.peers.len() >= MAX_PEERS {
                return outcome;
            }
            outcome
                .changes
                .push(PeerChange::Joined(from, batch.name.clone()));
            outcome.actions.push(PeerAction::FetchSnapshot(from));
            let state = PeerState::CatchingUp(SnapshotFetch::new(now));
            let peer = PeerReplica {
                name: batch.name.clone(),
                last_received: now,
                draining: false,
                state,
                mirror: ReservationMirror::default(),
            };
            self.peers.insert(from, peer);
        }
        let free_bytes = self.free_pending_bytes();
        self.count_others(from);
        let Some(peer) = self.peers.get_mut(&from) else {
            return outcome;
        };
        peer.last_received = now;
        peer.draining |= batch.draining;
        if !peer.apply_batch(batch, view, rng, free_bytes) {
            outcome.changes.push(PeerChange::Gap(from));
            outcome.actions.push(PeerAction::FetchSnapshot(from));
            peer.state.start_fetch(now);
        }
        outcome
    }

    /// Handles a part of a snapshot.
    pub fn on_snapshot_part(
        &mut self,
        part: SnapshotPart,
        view: &LocalView<'_>,
        now: Instant,
        rng: &mut impl Rng,
    ) -> PeerUpdate {
        let from = ReplicaId(part.replica);
        let mut outcome = PeerUpdate::default();
        let free_bytes = self.free_pending_bytes();
        self.count_others(from);
        let Some(peer) = self.peers.get_mut(&from) else {
            return outcome;
        };
        peer.last_received = now;
        let PeerState::CatchingUp(fetch) = &mut peer.state else {
            return outcome;
        };
        let Some((events, last)) = fetch.collect(part, now, free_bytes) else {
            return outcome;
        };
        let deferred = std::mem::take(&mut fetch.deferred);
        peer.apply_snapshot(events, view, rng);
        peer.state = PeerState::Synced { last };
        let mut synced = true;
        for batch in deferred {
            synced = synced && peer.apply_batch(batch, view, rng, free_bytes);
        }
        if synced {
            outcome
                .changes
                .push(PeerChange::Synced(from, peer.mirror.len()));
        } else {
            outcome.changes.push(PeerChange::Gap(from));
            outcome.actions.push(PeerAction::FetchSnapshot(from));
            peer.state.start_fetch(now);
        }
        outcome
    }

    /// Passes the totals of all other peers to the mirror of a peer, for the limits that all peers
    /// share.
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

    /// Returns the bytes available for incomplete snapshots.
    fn free_pending_bytes(&self) -> usize {
        MAX_PENDING_BYTES.saturating_sub(self.pending_bytes())
    }

    pub(super) fn pending_bytes(&self) -> usize {
        let bytes = |peer: &PeerReplica| match &peer.state {
            PeerState::CatchingUp(fetch) => fetch.bytes,
            PeerState::Synced { .. } => 0,
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

    /// Detects peers that timed out, and repeats snapshot requests.
    pub fn tick(&mut self, view: &LocalView<'_>, now: Instant) -> PeerUpdate {
        let mut outcome = PeerUpdate::default();
        let since = self
            .last_tick
            .replace(now)
            .map(|last_tick| now.saturating_duration_since(last_tick));
        if since.is_some_and(|since| since > self.lease / 2) {
            // This process was suspended and could not receive messages, so no peer has timed out.
            self.peers
                .values_mut()
                .for_each(|peer| peer.last_received = now);
        }
        let is_silent =
            |peer: &PeerReplica| now.saturating_duration_since(peer.last_received) > self.lease;
        for (id, peer) in self.peers.extract_if(.., |_, peer| is_silent(peer)) {
            outcome
                .changes
                .push(PeerChange::TimedOut(id, peer.name, peer.mirror.len()));
            self.orphaned_since.get_or_insert(now);
        }
        for (id, peer) in &mut self.peers {
            peer.mirror.book_waiting(view);
            if let PeerState::CatchingUp(fetch) = &mut peer.state
                && now.saturating_duration_since(fetch.requested_at) > SNAPSHOT_TIMEOUT
            {
                fetch.requested_at = now;
                outcome.actions.push(PeerAction::FetchSnapshot(*id));
            }
        }
        outcome
    }

    /// Returns whether all peers are synced.
    pub(super) fn are_synced(&self) -> bool {
        self.peers
            .values()
            .all(|peer| matches!(peer.state, PeerState::Synced { .. }))
    }

    /// Returns true once if this replica adopts the sessions of departed peers.
    ///
    /// The remaining replica with the lowest id adopts them immediately. All others do so two
    /// leases later, in case that replica did not know the departed peer.
    pub(super) fn should_adopt_sessions(&mut self, now: Instant) -> bool {
        let is_first = self.peers.keys().all(|peer| self.own_id < *peer);
        let is_due = |since: &mut Instant| {
            is_first || now.saturating_duration_since(*since) > self.lease * 2
        };
        self.orphaned_since.take_if(is_due).is_some()
    }

    /// Returns the number of peers that are not draining.
    pub(super) fn remaining(&self) -> usize {
        self.peers.values().filter(|peer| !peer.draining).count()
    }

    pub(super) fn contains(&self, peer: ReplicaId) -> bool {
        self.peers.contains_key(&peer)
    }

    pub(super) fn len(&self) -> usize {
        self.peers.len()
    }

    /// Returns the number of reservations of all peers.
    pub(super) fn reservations(&self) -> usize {
        self.peers.values().map(|peer| peer.mirror.len()).sum()
    }

    pub(super) fn statuses(&self, now: Instant) -> Vec<PeerStatus> {
        let status = |(id, peer): (&ReplicaId, &PeerReplica)| PeerStatus {
            replica: *id,
            name: peer.name.clone(),
            synced: matches!(peer.state, PeerState::Synced { .. }),
            reservations: peer.mirror.len(),
            on_unknown_workers: peer.mirror.waiting(),
            ignored_reservations: peer.mirror.ignored(),
            last_message_seconds_ago: now
                .saturating_duration_since(peer.last_received)
                .as_secs_f64(),
        };
        self.peers.iter().map(status).collect()
    }
}

impl PeerReplica {
    /// Applies or defers a batch. Returns false if earlier batches are missing.
    fn apply_batch(
        &mut self,
        batch: Batch,
        view: &LocalView<'_>,
        rng: &mut impl Rng,
        free_bytes: usize,
    ) -> bool {
        let has_events = !batch.events.is_empty();
        match &mut self.state {
            PeerState::CatchingUp(fetch) => {
                if has_events {
                    fetch.defer(batch, free_bytes);
                }
                true
            }
            // A heartbeat contains the number of the last batch.
            PeerState::Synced { last } if !has_events => batch.sequence <= *last,
            PeerState::Synced { last } if batch.sequence == last.saturating_add(1) => {
                *last = batch.sequence;
                let mut namer = BlockNamer::new(rng, view.key);
                for event in batch
                    .events
                    .into_iter()
                    .filter_map(|event| wire::decode_event(event, &mut namer))
                {
                    if let ReplicaEvent::Load(ReservationEvent::Booked { bookings, .. }) = &event {
                        bookings
                            .iter()
                            .for_each(|booking| (view.on_booked)(booking));
                    }
                    self.mirror.apply(event, view);
                }
                true
            }
            PeerState::Synced { last } => batch.sequence <= *last,
        }
    }

    fn apply_snapshot(&mut self, events: Vec<Event>, view: &LocalView<'_>, rng: &mut impl Rng) {
        let mut bookings: Vec<(BookingId, ReservationState)> = Vec::new();
        let mut other_events: Vec<ReplicaEvent> = Vec::new();
        let mut namer = BlockNamer::new(rng, view.key);
        for event in events {
            match event.event {
                Some(Any::Booked(booked)) => {
                    bookings.push(wire::decode_reservation(booked, &mut namer))
                }
                _ => other_events.extend(wire::decode_event(event, &mut namer)),
            }
        }
        self.mirror.replace(bookings, view);
        for event in other_events {
            let (table, update) = match event {
                ReplicaEvent::Session(update) => (view.sessions, update),
                ReplicaEvent::StoredResponse(update) => (view.stored_responses, update),
                event => {
                    self.mirror.apply(event, view);
                    continue;
                }
            };
            if let Some(table) = table {
                table.apply_update(update, UpdateKind::Snapshot);
            }
        }
    }
}

impl PeerState {
    /// Starts a new snapshot transfer.
    fn start_fetch(&mut self, now: Instant) {
        *self = PeerState::CatchingUp(SnapshotFetch::new(now));
    }
}

impl SnapshotFetch {
    fn new(requested_at: Instant) -> Self {
        Self {
            requested_at,
            parts: Vec::new(),
            next_part: 0,
            sequence: 0,
            deferred: Vec::new(),
            bytes: 0,
        }
    }

    /// Defers a batch. A batch beyond the limits is dropped, and the next batch reveals the gap.
    fn defer(&mut self, batch: Batch, free_bytes: usize) {
        let bytes = wire::decoded_bytes(&batch.events, batch.encoded_len());
        if self.deferred.len() < MAX_DEFERRED_BATCHES && bytes <= free_bytes {
            self.bytes += bytes;
            self.deferred.push(batch);
        }
    }

    /// Adds a part. After the last part, returns the events of the snapshot and its sequence
    /// number.
    ///
    /// The first part restarts the transfer, because the snapshot may have been requested twice.
    fn collect(
        &mut self,
        part: SnapshotPart,
        now: Instant,
        free_bytes: usize,
    ) -> Option<(Vec<Event>, u64)> {
        if part.part == 0 {
            (self.next_part, self.sequence) = (0, part.sequence);
            self.parts.clear();
            self.bytes = self
                .deferred
                .iter()
                .map(|batch| wire::decoded_bytes(&batch.events, batch.encoded_len()))
                .sum();
        }
        let bytes = wire::decoded_bytes(&part.events, part.encoded_len());
        if part.part != self.next_part
            || part.sequence != self.sequence
            || part.part >= MAX_SNAPSHOT_PARTS
            || bytes > free_bytes
        {
            return None;
        }
        self.bytes += bytes;
        self.next_part += 1;
        self.requested_at = now;
        self.parts.extend(part.events);
        part.last
            .then(|| (std::mem::take(&mut self.parts), self.sequence))
    }
}
