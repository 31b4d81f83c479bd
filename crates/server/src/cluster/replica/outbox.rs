//! Events that this replica publishes.
//!
//! The outbox stores the live reservations, so that a snapshot can be sent at any time. It numbers
//! the batches, so that peers detect missing ones.

use std::collections::{BTreeMap, HashMap};

use prost::Message as _;
use warmroute_core::load::{BookingId, ReservationEvent, ReservationState};

use super::{ReplicaEvent, ReplicaId, wire};
use crate::proto::replica::event::Event as Any;
use crate::proto::replica::{Batch, Event, SnapshotPart};
use crate::tracking_hash::TrackingKey;

/// Maximum message size, unless the server allows less.
const MAX_MESSAGE_BYTES: usize = 512 * 1024;

/// Number of bytes reserved for the fields besides the events.
const ENVELOPE_BYTES: usize = 4 * 1024;

/// Live reservations and unsent events of this replica.
#[derive(Debug)]
pub struct ReplicaOutbox {
    id: ReplicaId,
    name: String,
    key: Option<TrackingKey>,
    max_bytes: usize,
    /// Sequence number of the last batch with events.
    sequence: u64,
    draining: bool,
    reservations: BTreeMap<BookingId, ReservationState>,
    pending: PendingBatch,
    batches: Vec<Batch>,
}

/// Events of the next batch.
#[derive(Debug, Default)]
struct PendingBatch {
    events: Vec<Event>,
    bytes: usize,
    /// Index of the last output-block event of each booking. Further output blocks are merged into
    /// it.
    outputs: HashMap<BookingId, usize>,
}

impl ReplicaOutbox {
    /// Creates an outbox without reservations. `key` encrypts the block hashes of routed prompts.
    /// All replicas use the same key.
    pub fn new(id: ReplicaId, name: String, key: Option<TrackingKey>) -> Self {
        Self {
            id,
            name,
            key,
            max_bytes: MAX_MESSAGE_BYTES - ENVELOPE_BYTES,
            sequence: 0,
            draining: false,
            reservations: BTreeMap::new(),
            pending: PendingBatch::default(),
            batches: Vec::new(),
        }
    }

    /// Sets the maximum message size.
    pub(super) fn set_max_bytes(&mut self, bytes: usize) {
        self.max_bytes = bytes
            .min(MAX_MESSAGE_BYTES)
            .saturating_sub(ENVELOPE_BYTES)
            .max(ENVELOPE_BYTES);
    }

    /// Marks the replica as draining in all further messages. Returns true for the first call.
    pub(super) fn set_draining(&mut self) -> bool {
        !std::mem::replace(&mut self.draining, true)
    }

    /// Records a local event.
    pub fn record(&mut self, event: &ReplicaEvent) {
        if let ReplicaEvent::Load(event) = event {
            self.update_reservations(event);
            if self.try_merge(event) {
                return;
            }
        }
        let message = wire::encode_event(event, self.max_named_blocks(), self.key.as_ref());
        let bytes = message.encoded_len() + 8;
        if self.pending.bytes + bytes > self.max_bytes {
            self.close_batch();
        }
        if let ReplicaEvent::Load(ReservationEvent::OutputBlocks { id, .. }) = event {
            self.pending.outputs.insert(*id, self.pending.events.len());
        }
        self.pending.bytes += bytes;
        self.pending.events.push(message);
    }

    /// Returns the batches to publish.
    pub fn take_batches(&mut self) -> Vec<Batch> {
        self.close_batch();
        std::mem::take(&mut self.batches)
    }

    /// Returns a heartbeat.
    pub fn heartbeat(&self) -> Batch {
        let replica = self.id.0;
        let name = self.name.clone();
        let sequence = self.sequence;
        let draining = self.draining;
        Batch {
            replica,
            name,
            sequence,
            draining,
            ..Batch::default()
        }
    }

    /// Returns a snapshot as of the last batch. All pending events must be published before the
    /// call.
    pub fn snapshot(&self, other_events: &[ReplicaEvent]) -> Vec<SnapshotPart> {
        let named = self.max_named_blocks();
        let reservations = self
            .reservations
            .iter()
            .map(|(id, state)| wire::encode_reservation(*id, state, named));
        let events = reservations.chain(
            other_events
                .iter()
                .map(|event| wire::encode_event(event, named, self.key.as_ref())),
        );
        let new_part = |part| SnapshotPart {
            replica: self.id.0,
            sequence: self.sequence,
            part,
            ..SnapshotPart::default()
        };
        let mut parts = Vec::new();
        let mut current = new_part(0);
        let mut bytes = 0;
        for event in events {
            let size = event.encoded_len() + 8;
            if bytes + size > self.max_bytes {
                let next = new_part(current.part + 1);
                parts.push(std::mem::replace(&mut current, next));
                bytes = 0;
            }
            bytes += size;
            current.events.push(event);
        }
        current.last = true;
        parts.push(current);
        parts
    }

    /// Returns the number of live reservations.
    pub(super) fn len(&self) -> usize {
        self.reservations.len()
    }

    #[cfg(test)]
    pub(super) fn reservations(&self) -> impl Iterator<Item = &ReservationState> {
        self.reservations.values()
    }

    /// Returns the maximum number of block hashes in one event, which fill half a message.
    fn max_named_blocks(&self) -> usize {
        self.max_bytes / 2 / size_of::<u64>()
    }

    fn update_reservations(&mut self, event: &ReservationEvent) {
        match event {
            ReservationEvent::Booked { id, bookings } => {
                self.reservations
                    .insert(*id, ReservationState::new(bookings.clone()));
            }
            ReservationEvent::Released(id) => {
                self.reservations.remove(id);
            }
            ReservationEvent::FirstToken(id)
            | ReservationEvent::OutputBlocks { id, .. }
            | ReservationEvent::Moved { id, .. } => {
                if let Some(state) = self.reservations.get_mut(id) {
                    state.apply(event);
                }
            }
        }
    }

    /// Merges the event into a pending one, and returns whether that was possible.
    fn try_merge(&mut self, event: &ReservationEvent) -> bool {
        let ReservationEvent::OutputBlocks {
            id,
            count,
            fraction,
        } = event
        else {
            return false;
        };
        let Some(event) = self
            .pending
            .outputs
            .get(id)
            .and_then(|index| self.pending.events.get_mut(*index))
        else {
            return false;
        };
        match &mut event.event {
            // A fraction applies to all output blocks, including earlier ones.
            Some(Any::OutputBlocks(pending))
                if fraction.is_some() || pending.fraction.is_none() =>
            {
                pending.count += *count as u64;
                pending.fraction = *fraction;
                true
            }
            _ => false,
        }
    }

    fn close_batch(&mut self) {
        let PendingBatch { events, .. } = std::mem::take(&mut self.pending);
        if !events.is_empty() {
            self.sequence += 1;
            self.batches.push(Batch {
                events,
                ..self.heartbeat()
            });
        }
    }
}
