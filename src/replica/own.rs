//! What this replica tells. It keeps its own live reservations, so that it can say at any time how everything stands, and
//! numbers its batches, so that others see when they have missed one.

use std::collections::{BTreeMap, HashMap};

use prost::Message as _;

use super::proto::event::Event as Any;
use super::proto::{Batch, Event, SnapshotPart};
use super::{ReplicaId, Told, wire};
use crate::block::tracking::Key;
use crate::load::{BookingId, Live, News};

/// Most bytes of a message, if the server does not want less.
const MOST_BYTES: usize = 512 * 1024;

/// What a message has beside its events.
const ENVELOPE: usize = 4 * 1024;

/// What this replica has booked, and what of it is still to be told.
#[derive(Debug)]
pub struct Own {
    id: ReplicaId,
    name: String,
    key: Option<Key>,
    most_bytes: usize,
    /// Of the last batch with events.
    sequence: u64,
    draining: bool,
    live: BTreeMap<BookingId, Live>,
    untold: Untold,
    batches: Vec<Batch>,
}

/// Events of the next batch.
#[derive(Debug, Default)]
struct Untold {
    events: Vec<Event>,
    bytes: usize,
    /// Where in it blocks of an answer were told last, so that more of them need no event of their own.
    outputs: HashMap<BookingId, usize>,
}

impl Own {
    /// The state of a replica without bookings.
    pub fn new(id: ReplicaId, name: String) -> Self {
        let most_bytes = MOST_BYTES - ENVELOPE;
        let (live, untold, batches) = (BTreeMap::new(), Untold::default(), Vec::new());
        Self {
            id,
            name,
            key: None,
            most_bytes,
            sequence: 0,
            draining: false,
            live,
            untold,
            batches,
        }
    }

    /// Encrypts the block hashes of routed prompts with a key that all replicas have.
    #[must_use]
    pub fn with_key(self, key: Option<Key>) -> Self {
        Self { key, ..self }
    }

    /// Makes no message of more than so many bytes, as far as that can be.
    pub(super) fn limit(&mut self, bytes: usize) {
        self.most_bytes = bytes.min(MOST_BYTES).saturating_sub(ENVELOPE).max(ENVELOPE);
    }

    /// Says from now on that we are about to leave; whether that is news.
    pub(super) fn drain(&mut self) -> bool {
        !std::mem::replace(&mut self.draining, true)
    }

    /// Something happened here.
    pub fn note(&mut self, told: &Told) {
        if let Told::Load(news) = told {
            self.follow(news);
            if self.joins(news) {
                return;
            }
        }
        let event = wire::event(told, self.most_named(), self.key.as_ref());
        let bytes = event.encoded_len() + 8;
        if self.untold.bytes + bytes > self.most_bytes {
            self.close();
        }
        if let Told::Load(News::OutputBlocks { id, .. }) = told {
            self.untold.outputs.insert(*id, self.untold.events.len());
        }
        self.untold.bytes += bytes;
        self.untold.events.push(event);
    }

    /// The batches that are to be told now.
    pub fn batches(&mut self) -> Vec<Batch> {
        self.close();
        std::mem::take(&mut self.batches)
    }

    /// A sign of life.
    pub fn sign(&self) -> Batch {
        let (replica, name, sequence, draining) =
            (self.id.0, self.name.clone(), self.sequence, self.draining);
        Batch {
            replica,
            name,
            sequence,
            draining,
            ..Batch::default()
        }
    }

    /// How everything stands at the last batch. What is not told yet has to be told first.
    pub fn snapshot(&self, beside: &[Told]) -> Vec<SnapshotPart> {
        let named = self.most_named();
        let alive = self
            .live
            .iter()
            .map(|(id, live)| wire::alive(*id, live, named));
        let events = alive.chain(
            beside
                .iter()
                .map(|told| wire::event(told, named, self.key.as_ref())),
        );
        let new = |part| SnapshotPart {
            replica: self.id.0,
            sequence: self.sequence,
            part,
            ..SnapshotPart::default()
        };
        let (mut parts, mut current, mut bytes) = (Vec::new(), new(0), 0);
        for event in events {
            let more = event.encoded_len() + 8;
            if bytes + more > self.most_bytes {
                let next = new(current.part + 1);
                parts.push(std::mem::replace(&mut current, next));
                bytes = 0;
            }
            bytes += more;
            current.events.push(event);
        }
        current.last = true;
        parts.push(current);
        parts
    }

    /// Reservations of this replica that are alive.
    pub(super) fn len(&self) -> usize {
        self.live.len()
    }

    #[cfg(test)]
    pub(super) fn alive(&self) -> impl Iterator<Item = &Live> {
        self.live.values()
    }

    /// Blocks that one event can name: half a message of them.
    fn most_named(&self) -> usize {
        self.most_bytes / 2 / size_of::<u64>()
    }

    fn follow(&mut self, news: &News) {
        match news {
            News::Booked { id, bookings } => {
                self.live.insert(*id, Live::new(bookings.clone()));
            }
            News::Released(id) => {
                self.live.remove(id);
            }
            News::FirstToken(id) | News::OutputBlocks { id, .. } | News::Moved { id, .. } => {
                if let Some(live) = self.live.get_mut(id) {
                    live.apply(news);
                }
            }
        }
    }

    /// Whether it is told by what is to be told already.
    fn joins(&mut self, news: &News) -> bool {
        let News::OutputBlocks {
            id,
            count,
            fraction,
        } = news
        else {
            return false;
        };
        let Some(event) = self
            .untold
            .outputs
            .get(id)
            .and_then(|at| self.untold.events.get_mut(*at))
        else {
            return false;
        };
        match &mut event.event {
            // Where all count in part from now on, so do those before.
            Some(Any::OutputBlocks(told)) if fraction.is_some() || told.fraction.is_none() => {
                told.count += *count as u64;
                told.fraction = *fraction;
                true
            }
            _ => false,
        }
    }

    fn close(&mut self) {
        let Untold { events, .. } = std::mem::take(&mut self.untold);
        if !events.is_empty() {
            self.sequence += 1;
            self.batches.push(Batch {
                events,
                ..self.sign()
            });
        }
    }
}
