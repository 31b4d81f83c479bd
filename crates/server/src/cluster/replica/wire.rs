//! Conversion between events and messages.
//!
//! The size of a message is limited, so it contains the hashes of only some blocks of a very long
//! prompt (named blocks). For the remaining, omitted blocks it contains their number. The receiver
//! treats them as blocks that no other prompt shares.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;
use warmroute_core::block::tracking::random_sequences;
use warmroute_core::block::{LocalHash, SequenceHash};
use warmroute_core::load::{
    BookingEnd, BookingId, LoadBooking, PromptSequences, ReservationEvent, ReservationState,
};
use warmroute_core::router::RoutedPrompts;
use warmroute_core::sessions::{BindingVersion, SessionKey, SessionUpdate};
use warmroute_core::worker::{BlockSize, RankSlot, WorkerId, WorkerRank};

use super::ReplicaEvent;
use crate::proto::replica as proto;
use crate::proto::replica::Event;
use crate::proto::replica::event::Event as Any;
use crate::tracking_hash::TrackingKey;

/// Slot of an unknown worker, and of a decoded booking before the slot of its worker is looked up.
pub(super) const UNKNOWN_SLOT: RankSlot = RankSlot(u32::MAX);

/// Maximum number of blocks reserved by one peer. A block counts once per reservation.
pub(super) const MAX_BLOCKS_PER_PEER: usize = if cfg!(test) { 1 << 18 } else { 1 << 22 };

/// Maximum number of omitted blocks of a reservation, enough for a prompt of 2 million tokens. It
/// limits the memory that a message of a few bytes can allocate.
pub(super) const MAX_OMITTED_BLOCKS: u64 = 1 << 17;

/// Maximum number of output blocks of one response.
const MAX_OUTPUT_BLOCKS: u64 = 1 << 20;

/// Encodes an event with at most `max_named` named blocks.
pub(super) fn encode_event(
    event: &ReplicaEvent,
    max_named: usize,
    key: Option<&TrackingKey>,
) -> Event {
    let any = match event {
        ReplicaEvent::Load(ReservationEvent::Booked { id, bookings: all }) => {
            Any::Booked(proto::Reservation {
                id: id.0,
                bookings: encode_bookings(all, max_named),
                ..proto::Reservation::default()
            })
        }
        ReplicaEvent::Load(ReservationEvent::FirstToken(id)) => Any::FirstToken(id.0),
        ReplicaEvent::Load(ReservationEvent::OutputBlocks {
            id,
            count,
            fraction,
        }) => Any::OutputBlocks(proto::OutputBlocks {
            id: id.0,
            count: *count as u64,
            fraction: *fraction,
        }),
        ReplicaEvent::Load(ReservationEvent::Moved { id, to }) => {
            let mut remaining = max_named;
            Any::Moved(proto::Moved {
                id: id.0,
                to: to.as_ref().map(|to| encode_booking(to, &mut remaining)),
            })
        }
        ReplicaEvent::Load(ReservationEvent::Released(id)) => Any::Released(id.0),
        ReplicaEvent::Session(update) => {
            encode_binding(update, Any::SessionBound, Any::SessionEnded)
        }
        ReplicaEvent::StoredResponse(update) => {
            encode_binding(update, Any::ResponseBound, Any::ResponseEnded)
        }
        ReplicaEvent::Overloaded(worker, remaining) => Any::Overloaded(proto::Overloaded {
            worker: worker.0,
            milliseconds: remaining.as_millis() as u64,
        }),
        ReplicaEvent::FirstToken(name) => Any::FirstTokenOf(name.clone()),
        ReplicaEvent::Routed(routed) => {
            Any::Routed(encrypt_hashes(self::encode_routed(routed, max_named), key))
        }
    };
    Event { event: Some(any) }
}

/// Encodes the current state of a reservation.
pub(super) fn encode_reservation(
    id: BookingId,
    state: &ReservationState,
    max_named: usize,
) -> Event {
    let booked = proto::Reservation {
        id: id.0,
        bookings: encode_bookings(&state.bookings, max_named),
        has_first_token: state.has_first_token,
        discounted_blocks: state.discounted_blocks as u64,
        fraction: state.fraction.unwrap_or_default(),
        full_blocks: state.full_blocks as u64,
    };
    Event {
        event: Some(Any::Booked(booked)),
    }
}

/// Encodes the bookings of a reservation, which together have at most `max_named` named blocks.
fn encode_bookings(all: &[LoadBooking], max_named: usize) -> Vec<proto::Booking> {
    let mut remaining = max_named;
    all.iter()
        .map(|booking| encode_booking(booking, &mut remaining))
        .collect()
}

fn encode_booking(booking: &LoadBooking, remaining: &mut usize) -> proto::Booking {
    let mut prompt = |hashes: &Arc<[SequenceHash]>| {
        let named = hashes.len().min(*remaining);
        *remaining -= named;
        let blocks = hashes[..named].iter().map(|hash| hash.0).collect();
        proto::Prompt {
            blocks,
            omitted_blocks: (hashes.len() - named) as u64,
        }
    };
    proto::Booking {
        worker: booking.rank.worker.0,
        rank: booking.rank.rank.0,
        prompts: booking
            .sequences
            .prompts()
            .iter()
            .map(&mut prompt)
            .collect(),
        prompt_tokens: booking.prompt_tokens,
        cached_tokens: booking.cached_tokens,
        track_prefill: booking.track_prefill,
        prefill_microseconds: booking.prefill_time.map(|time| time.as_micros() as u64),
        until_first_token: booking.end == BookingEnd::FirstToken,
    }
}

/// Encodes routed prompts. Prompts that exceed the limit are truncated to a prefix.
fn encode_routed(routed: &RoutedPrompts, max_named: usize) -> proto::Routed {
    let mut remaining = max_named;
    let prompt = |locals: &Vec<LocalHash>| {
        let named = locals.len().min(remaining);
        remaining -= named;
        proto::LocalBlocks {
            hashes: locals[..named].iter().map(|hash| hash.0).collect(),
        }
    };
    proto::Routed {
        worker: routed.rank.worker.0,
        rank: routed.rank.rank.0,
        block_size: routed.block_size.0.get(),
        prompts: routed.prompts.iter().map(prompt).collect(),
        ..proto::Routed::default()
    }
}

/// Encrypts the hashes of a message. Without encryption, any reader of the message could compute
/// the hashes of a known prompt and compare them.
fn encrypt_hashes(mut routed: proto::Routed, key: Option<&TrackingKey>) -> proto::Routed {
    if let Some(key) = key {
        let nonce: [u8; TrackingKey::NONCE] = rand::random();
        key.apply_keystream(&nonce, hashes_mut(&mut routed));
        (routed.key_id, routed.nonce) = (key.id().to_owned(), nonce.to_vec());
    }
    routed
}

/// Decrypts the hashes of a message; `None` if they are encrypted with another key.
fn decrypt_hashes(mut routed: proto::Routed, key: Option<&TrackingKey>) -> Option<proto::Routed> {
    if routed.key_id.is_empty() {
        return Some(routed);
    }
    let key = key.filter(|key| key.id() == routed.key_id)?;
    let nonce: [u8; TrackingKey::NONCE] = std::mem::take(&mut routed.nonce).try_into().ok()?;
    key.apply_keystream(&nonce, hashes_mut(&mut routed));
    Some(routed)
}

fn hashes_mut(routed: &mut proto::Routed) -> impl Iterator<Item = &mut u64> {
    routed
        .prompts
        .iter_mut()
        .flat_map(|prompt| &mut prompt.hashes)
}

/// Encodes the update of a session or stored response, as the message of its table.
fn encode_binding(
    update: &SessionUpdate,
    bound: impl FnOnce(proto::SessionBound) -> Any,
    ended: impl FnOnce(proto::SessionEnded) -> Any,
) -> Any {
    match update {
        SessionUpdate::Bound {
            session: key,
            target,
            version: stamp,
        } => bound(proto::SessionBound {
            session: Some(encode_session(key)),
            worker: target.worker.0,
            rank: target.rank.0,
            version: stamp.version,
            router: stamp.router,
        }),
        SessionUpdate::Ended {
            session: key,
            version: stamp,
        } => ended(proto::SessionEnded {
            session: Some(encode_session(key)),
            version: stamp.version,
            router: stamp.router,
        }),
    }
}

fn decode_bound(bound: proto::SessionBound) -> Option<SessionUpdate> {
    Some(SessionUpdate::Bound {
        session: Arc::new(session_key(bound.session?)),
        target: worker_rank(bound.worker, bound.rank),
        version: BindingVersion {
            version: bound.version,
            router: bound.router,
        },
    })
}

fn decode_ended(ended: proto::SessionEnded) -> Option<SessionUpdate> {
    Some(SessionUpdate::Ended {
        session: Arc::new(session_key(ended.session?)),
        version: BindingVersion {
            version: ended.version,
            router: ended.router,
        },
    })
}

fn encode_session(key: &SessionKey) -> proto::Session {
    proto::Session {
        model: key.model.as_deref().map(str::to_owned),
        tenant: key.tenant.as_deref().map(str::to_owned),
        id: key.id.to_string(),
        group: key.group,
    }
}

/// Returns an upper estimate of the memory of decoded events in bytes. An empty list element is
/// encoded in two bytes but occupies a whole struct, and its contents occupy their encoded size.
/// The factor 2 accounts for the spare capacity of lists.
pub(super) fn decoded_bytes(events: &[Event], encoded: usize) -> usize {
    let lists: usize = events
        .iter()
        .filter_map(|event| event.event.as_ref())
        .map(list_bytes)
        .sum();
    2 * (size_of_val(events) + lists + encoded)
}

/// Returns the bytes of the list elements of an event.
fn list_bytes(event: &Any) -> usize {
    let booking = |booking: &proto::Booking| size_of_val::<[_]>(&booking.prompts);
    match event {
        Any::Booked(booked) => {
            size_of_val::<[_]>(&booked.bookings)
                + booked.bookings.iter().map(booking).sum::<usize>()
        }
        Any::Moved(moved) => moved.to.as_ref().map_or(0, booking),
        Any::Routed(routed) => size_of_val::<[_]>(&routed.prompts),
        _ => 0,
    }
}

/// State for decoding one message: the source of random hashes for omitted blocks, and the key of
/// encrypted hashes.
pub(super) struct BlockNamer<'r, R> {
    random: &'r mut R,
    key: Option<&'r TrackingKey>,
    /// Remaining omitted blocks of the message.
    remaining: u64,
    /// Remaining omitted blocks of the current reservation.
    remaining_of_reservation: u64,
}

impl<'r, R: Rng> BlockNamer<'r, R> {
    pub(super) fn new(random: &'r mut R, key: Option<&'r TrackingKey>) -> Self {
        Self {
            random,
            key,
            remaining: MAX_BLOCKS_PER_PEER as u64,
            remaining_of_reservation: 0,
        }
    }

    fn begin_reservation(&mut self) {
        self.remaining_of_reservation = MAX_OMITTED_BLOCKS.min(self.remaining);
    }

    fn random_names(&mut self, count: u64) -> Arc<[SequenceHash]> {
        let count = count.min(self.remaining_of_reservation);
        self.remaining_of_reservation -= count;
        self.remaining -= count;
        random_sequences(count as usize, self.random)
    }
}

/// Decodes an event. Returns `None` for an unknown event.
pub(super) fn decode_event(
    event: Event,
    namer: &mut BlockNamer<'_, impl Rng>,
) -> Option<ReplicaEvent> {
    Some(match event.event? {
        Any::Booked(booked) => {
            let (id, state) = decode_reservation(booked, namer);
            ReplicaEvent::Load(ReservationEvent::Booked {
                id,
                bookings: state.bookings,
            })
        }
        Any::FirstToken(id) => ReplicaEvent::Load(ReservationEvent::FirstToken(BookingId(id))),
        Any::OutputBlocks(blocks) => ReplicaEvent::Load(ReservationEvent::OutputBlocks {
            id: BookingId(blocks.id),
            count: blocks.count.min(MAX_OUTPUT_BLOCKS) as usize,
            fraction: blocks.fraction,
        }),
        Any::Moved(moved) => {
            namer.begin_reservation();
            ReplicaEvent::Load(ReservationEvent::Moved {
                id: BookingId(moved.id),
                to: moved.to.map(|to| decode_booking(to, namer)),
            })
        }
        Any::Released(id) => ReplicaEvent::Load(ReservationEvent::Released(BookingId(id))),
        Any::SessionBound(bound) => ReplicaEvent::Session(decode_bound(bound)?),
        Any::SessionEnded(ended) => ReplicaEvent::Session(decode_ended(ended)?),
        Any::ResponseBound(bound) => ReplicaEvent::StoredResponse(decode_bound(bound)?),
        Any::ResponseEnded(ended) => ReplicaEvent::StoredResponse(decode_ended(ended)?),
        Any::FirstTokenOf(name) => ReplicaEvent::FirstToken(name),
        Any::Routed(routed) => {
            let routed = decrypt_hashes(routed, namer.key)?;
            let prompt =
                |prompt: proto::LocalBlocks| prompt.hashes.into_iter().map(LocalHash).collect();
            ReplicaEvent::Routed(RoutedPrompts {
                rank: worker_rank(routed.worker, routed.rank),
                block_size: BlockSize::new(routed.block_size)?,
                prompts: routed.prompts.into_iter().map(prompt).collect(),
            })
        }
        Any::Overloaded(mark) => ReplicaEvent::Overloaded(
            WorkerId(mark.worker),
            Duration::from_millis(mark.milliseconds),
        ),
    })
}

/// Decodes the state of a reservation.
pub(super) fn decode_reservation(
    booked: proto::Reservation,
    namer: &mut BlockNamer<'_, impl Rng>,
) -> (BookingId, ReservationState) {
    namer.begin_reservation();
    let bookings = booked
        .bookings
        .into_iter()
        .map(|booking| decode_booking(booking, namer))
        .collect();
    let count = |blocks: u64| blocks.min(MAX_OUTPUT_BLOCKS) as usize;
    let state = ReservationState {
        bookings,
        has_first_token: booked.has_first_token,
        discounted_blocks: count(booked.discounted_blocks),
        fraction: (booked.discounted_blocks > 0).then_some(booked.fraction),
        full_blocks: count(booked.full_blocks),
    };
    (BookingId(booked.id), state)
}

fn decode_booking(booking: proto::Booking, namer: &mut BlockNamer<'_, impl Rng>) -> LoadBooking {
    let mut prompt = |prompt: proto::Prompt| -> Arc<[SequenceHash]> {
        let omitted_blocks = namer.random_names(prompt.omitted_blocks);
        prompt
            .blocks
            .into_iter()
            .map(SequenceHash)
            .chain(omitted_blocks.iter().copied())
            .collect()
    };
    LoadBooking {
        slot: UNKNOWN_SLOT,
        rank: worker_rank(booking.worker, booking.rank),
        sequences: PromptSequences::from_prompts(
            booking.prompts.into_iter().map(&mut prompt).collect(),
        ),
        prompt_tokens: booking.prompt_tokens,
        cached_tokens: booking.cached_tokens,
        track_prefill: booking.track_prefill,
        prefill_time: booking.prefill_microseconds.map(Duration::from_micros),
        content_time: None,
        end: if booking.until_first_token {
            BookingEnd::FirstToken
        } else {
            BookingEnd::RequestEnd
        },
    }
}

fn worker_rank(worker: u64, rank: u32) -> WorkerRank {
    WorkerRank::new(worker, rank)
}

fn session_key(session: proto::Session) -> SessionKey {
    SessionKey {
        model: session.model.map(Into::into),
        tenant: session.tenant.map(Into::into),
        group: session.group,
        id: session.id.into(),
    }
}
