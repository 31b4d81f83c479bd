//! What is told, as messages. A message holds only so much, so the blocks of a very long prompt are not all named: those
//! after the named ones count as blocks that nobody shares.

use std::sync::Arc;
use std::time::Duration;

use rand::Rng;

use super::Told;
use super::mirror::MOST_BLOCKS;
use super::proto::event::Event as Any;
use super::proto::{self, Event};
use crate::block::tracking::{Key, unshared};
use crate::block::{LocalHash, SequenceHash};
use crate::load::{Booking, BookingId, Live, News, Sequences, Until};
use crate::router::Routed;
use crate::sessions::{SessionKey, Stamp, Word};
use crate::worker::{BlockSize, DpRank, Slot, WorkerId, WorkerRank};

/// The slot of somebody who is not here. Whoever books looks up the right one.
pub(super) const NOWHERE: Slot = Slot(u32::MAX);

/// Most blocks of a reservation that are not named: a prompt of 2 million tokens. It limits the memory for a count sent in a few
/// bytes.
pub(super) const MOST_UNNAMED: u64 = 1 << 17;

/// Most blocks of one answer.
const MOST_OUTPUT: u64 = 1 << 20;

/// What is told, with no more than so many blocks named.
pub(super) fn event(told: &Told, most_named: usize, key: Option<&Key>) -> Event {
    let any = match told {
        Told::Load(News::Booked { id, bookings: all }) => Any::Booked(proto::Booked {
            id: id.0,
            bookings: bookings(all, most_named),
            ..proto::Booked::default()
        }),
        Told::Load(News::FirstToken(id)) => Any::FirstToken(id.0),
        Told::Load(News::OutputBlocks {
            id,
            count,
            fraction,
        }) => Any::OutputBlocks(proto::OutputBlocks {
            id: id.0,
            count: *count as u64,
            fraction: *fraction,
        }),
        Told::Load(News::Moved { id, to }) => {
            let mut left = most_named;
            Any::Moved(proto::Moved {
                id: id.0,
                to: to.as_ref().map(|to| booking(to, &mut left)),
            })
        }
        Told::Load(News::Released(id)) => Any::Released(id.0),
        Told::Session(Word::Bound {
            session: key,
            target,
            stamp,
        }) => Any::SessionBound(proto::SessionBound {
            session: Some(session(key)),
            worker: target.worker.0,
            rank: target.rank.0,
            version: stamp.version,
            by: stamp.by,
        }),
        Told::Session(Word::Ended {
            session: key,
            stamp,
        }) => Any::SessionEnded(proto::SessionEnded {
            session: Some(session(key)),
            version: stamp.version,
            by: stamp.by,
        }),
        Told::Overloaded(worker, left) => Any::Overloaded(proto::Overloaded {
            worker: worker.0,
            milliseconds: left.as_millis() as u64,
        }),
        Told::FirstTokenOf(name) => Any::FirstTokenOf(name.clone()),
        Told::Routed(routed) => Any::Routed(sealed(self::routed(routed, most_named), key)),
    };
    Event { event: Some(any) }
}

/// A reservation as far as it has come.
pub(super) fn alive(id: BookingId, live: &Live, most_named: usize) -> Event {
    let booked = proto::Booked {
        id: id.0,
        bookings: bookings(&live.bookings, most_named),
        begun: live.begun,
        faded_blocks: live.faded as u64,
        fraction: live.fraction.unwrap_or_default(),
        whole_blocks: live.whole as u64,
    };
    Event {
        event: Some(Any::Booked(booked)),
    }
}

/// All bookings of a reservation, which share the names that a message has room for.
fn bookings(all: &[Booking], most_named: usize) -> Vec<proto::Booking> {
    let mut left = most_named;
    all.iter().map(|told| booking(told, &mut left)).collect()
}

fn booking(booking: &Booking, left: &mut usize) -> proto::Booking {
    let mut prompt = |hashes: &Arc<[SequenceHash]>| {
        let named = hashes.len().min(*left);
        *left -= named;
        let blocks = hashes[..named].iter().map(|hash| hash.0).collect();
        proto::Prompt {
            blocks,
            unnamed: (hashes.len() - named) as u64,
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
        until_first_token: booking.until == Until::FirstToken,
    }
}

/// Of what a message has no room for, the beginning is told: that is a prefix, too.
fn routed(routed: &Routed, most_named: usize) -> proto::Routed {
    let mut left = most_named;
    let prompt = |locals: &Vec<LocalHash>| {
        let named = locals.len().min(left);
        left -= named;
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

/// Encrypts the hashes of a message. With plain hashes, any reader could test for a known prompt by the public formula.
fn sealed(mut routed: proto::Routed, key: Option<&Key>) -> proto::Routed {
    if let Some(key) = key {
        let nonce: [u8; Key::NONCE] = rand::random();
        key.apply_keystream(&nonce, hashes(&mut routed));
        (routed.key_id, routed.nonce) = (key.id().to_owned(), nonce.to_vec());
    }
    routed
}

/// Decrypts the hashes of a message; `None` if they are encrypted with another key.
fn opened(mut routed: proto::Routed, key: Option<&Key>) -> Option<proto::Routed> {
    if routed.key_id.is_empty() {
        return Some(routed);
    }
    let key = key.filter(|key| key.id() == routed.key_id)?;
    let nonce: [u8; Key::NONCE] = std::mem::take(&mut routed.nonce).try_into().ok()?;
    key.apply_keystream(&nonce, hashes(&mut routed));
    Some(routed)
}

fn hashes(routed: &mut proto::Routed) -> impl Iterator<Item = &mut u64> {
    routed
        .prompts
        .iter_mut()
        .flat_map(|prompt| &mut prompt.hashes)
}

fn session(key: &SessionKey) -> proto::Session {
    proto::Session {
        model: key.model.as_deref().map(str::to_owned),
        tenant: key.tenant.as_deref().map(str::to_owned),
        id: key.id.to_string(),
        group: key.group,
    }
}

/// Upper estimate of the memory of decoded events. An empty list element has two encoded bytes but takes a whole struct in memory.
/// The content of an element takes its encoded size. Lists grow by doubling.
pub(super) fn decoded_bytes(events: &[Event], encoded: usize) -> usize {
    let lists: usize = events
        .iter()
        .filter_map(|event| event.event.as_ref())
        .map(list_bytes)
        .sum();
    2 * (size_of_val(events) + lists + encoded)
}

/// Bytes of the elements of the lists in an event.
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

/// Reads one message: names its blocks that have no names, and decrypts its hashes.
pub(super) struct Names<'r, R> {
    random: &'r mut R,
    key: Option<&'r Key>,
    /// Unnamed blocks that the message may still have.
    left: u64,
    /// Unnamed blocks that the current reservation may still have.
    left_of_reservation: u64,
}

impl<'r, R: Rng> Names<'r, R> {
    pub(super) fn new(random: &'r mut R, key: Option<&'r Key>) -> Self {
        Self {
            random,
            key,
            left: MOST_BLOCKS as u64,
            left_of_reservation: 0,
        }
    }

    fn begin_reservation(&mut self) {
        self.left_of_reservation = MOST_UNNAMED.min(self.left);
    }

    fn make(&mut self, count: u64) -> Arc<[SequenceHash]> {
        let count = count.min(self.left_of_reservation);
        self.left_of_reservation -= count;
        self.left -= count;
        unshared(count as usize, self.random)
    }
}

/// What an event says; `None` where it says nothing that we know.
pub(super) fn told(event: Event, names: &mut Names<'_, impl Rng>) -> Option<Told> {
    Some(match event.event? {
        Any::Booked(told) => {
            let (id, live) = live(told, names);
            Told::Load(News::Booked {
                id,
                bookings: live.bookings,
            })
        }
        Any::FirstToken(id) => Told::Load(News::FirstToken(BookingId(id))),
        Any::OutputBlocks(told) => Told::Load(News::OutputBlocks {
            id: BookingId(told.id),
            count: told.count.min(MOST_OUTPUT) as usize,
            fraction: told.fraction,
        }),
        Any::Moved(told) => {
            names.begin_reservation();
            Told::Load(News::Moved {
                id: BookingId(told.id),
                to: told.to.map(|to| booking_of(to, names)),
            })
        }
        Any::Released(id) => Told::Load(News::Released(BookingId(id))),
        Any::SessionBound(told) => Told::Session(Word::Bound {
            session: Arc::new(key(told.session?)),
            target: rank(told.worker, told.rank),
            stamp: Stamp {
                version: told.version,
                by: told.by,
            },
        }),
        Any::SessionEnded(told) => Told::Session(Word::Ended {
            session: Arc::new(key(told.session?)),
            stamp: Stamp {
                version: told.version,
                by: told.by,
            },
        }),
        Any::FirstTokenOf(name) => Told::FirstTokenOf(name),
        Any::Routed(told) => {
            let told = opened(told, names.key)?;
            let prompt =
                |prompt: proto::LocalBlocks| prompt.hashes.into_iter().map(LocalHash).collect();
            Told::Routed(Routed {
                rank: rank(told.worker, told.rank),
                block_size: BlockSize::new(told.block_size)?,
                prompts: told.prompts.into_iter().map(prompt).collect(),
            })
        }
        Any::Overloaded(told) => Told::Overloaded(
            WorkerId(told.worker),
            Duration::from_millis(told.milliseconds),
        ),
    })
}

/// A reservation as far as it had come.
pub(super) fn live(told: proto::Booked, names: &mut Names<'_, impl Rng>) -> (BookingId, Live) {
    names.begin_reservation();
    let bookings = told
        .bookings
        .into_iter()
        .map(|told| booking_of(told, names))
        .collect();
    let count = |blocks: u64| blocks.min(MOST_OUTPUT) as usize;
    let live = Live {
        bookings,
        begun: told.begun,
        faded: count(told.faded_blocks),
        fraction: (told.faded_blocks > 0).then_some(told.fraction),
        whole: count(told.whole_blocks),
    };
    (BookingId(told.id), live)
}

fn booking_of(told: proto::Booking, names: &mut Names<'_, impl Rng>) -> Booking {
    let mut prompt = |told: proto::Prompt| -> Arc<[SequenceHash]> {
        let unnamed = names.make(told.unnamed);
        told.blocks
            .into_iter()
            .map(SequenceHash)
            .chain(unnamed.iter().copied())
            .collect()
    };
    Booking {
        slot: NOWHERE,
        rank: rank(told.worker, told.rank),
        sequences: Sequences::of(told.prompts.into_iter().map(&mut prompt).collect()),
        prompt_tokens: told.prompt_tokens,
        cached_tokens: told.cached_tokens,
        track_prefill: told.track_prefill,
        prefill_time: told.prefill_microseconds.map(Duration::from_micros),
        until: if told.until_first_token {
            Until::FirstToken
        } else {
            Until::End
        },
    }
}

fn rank(worker: u64, rank: u32) -> WorkerRank {
    WorkerRank {
        worker: WorkerId(worker),
        rank: DpRank(rank),
    }
}

fn key(told: proto::Session) -> SessionKey {
    SessionKey {
        model: told.model.map(Into::into),
        tenant: told.tenant.map(Into::into),
        group: told.group,
        id: told.id.into(),
    }
}
