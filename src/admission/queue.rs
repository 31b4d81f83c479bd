//! The queue itself, as a value: who waits, and who goes next. It knows neither time nor workers; it is told when a request
//! came, and asks for each one it would let go whether there is room for it. Between classes it is deficit round robin,
//! inside a class the order of its policy, and a request that finds no room stops only its own lane.

use std::sync::Arc;
use std::time::Instant;

use super::classes::{ClassId, Classes, LimitKind};
use super::lanes::{Lanes, Pending};
use super::policy::Place;
use super::rounds::Rounds;
use super::turn::{Entry, Lane};

/// Most tokens that one request counts for. Lengths may be guesses from what a client says of itself, and no guess may make
/// a sum overflow.
const MOST_TOKENS: u64 = 1 << 40;

/// Where one stands in the queue; finds it again without a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Ticket {
    class: ClassId,
    lane: Lane,
    place: Place,
}

/// No more may wait in a class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Full {
    /// Of what there is too much.
    pub kind: LimitKind,
    /// How much waits.
    pub current: u64,
    /// How much may wait, for all workers together.
    pub limit: u64,
}

/// All that wait.
#[derive(Debug)]
pub struct Queue<T> {
    classes: Arc<Classes>,
    lanes: Vec<Lanes<T>>,
    rounds: Rounds,
    start: Instant,
    number: u64,
}

impl<T> Queue<T> {
    /// An empty queue. Nothing may come before `start`.
    pub fn new(classes: Arc<Classes>, start: Instant) -> Self {
        let rounds = Rounds::new(classes.iter().map(|class| class.quantum).collect());
        let lanes = classes.iter().map(|_| Lanes::default()).collect();
        Self {
            classes,
            lanes,
            rounds,
            start,
            number: 0,
        }
    }

    /// Whether no more may wait in a class; one request may cross a limit, the next is told so.
    pub fn full(&self, class: ClassId, workers: usize) -> Option<Full> {
        let pending = self.lanes[class.at()].pending();
        self.classes
            .get(class)
            .limits
            .iter()
            .find_map(|(kind, per_worker)| {
                let current = match kind {
                    LimitKind::Requests => pending.requests,
                    LimitKind::PromptTokens => pending.prompt_tokens,
                    LimitKind::CachedTokens => pending.cached_tokens,
                };
                let limit = per_worker?.saturating_mul(workers as u64);
                (current >= limit).then_some(Full {
                    kind,
                    current,
                    limit,
                })
            })
    }

    /// Lets one wait, whatever the limits say.
    pub fn push(&mut self, mut entry: Entry<T>) -> Ticket {
        entry.turn.prompt_tokens = entry.turn.prompt_tokens.min(MOST_TOKENS);
        entry.turn.cached_tokens = entry.turn.cached_tokens.min(entry.turn.prompt_tokens);
        let class = entry.class;
        let arrived = entry.arrived.saturating_duration_since(self.start);
        let place = Place {
            strict_priority: entry.turn.strict_priority,
            score: self.classes.get(class).policy.score(&entry.turn, arrived),
            number: self.number,
        };
        self.number += 1;
        let ticket = Ticket {
            class,
            lane: entry.turn.lane,
            place,
        };
        self.lanes[class.at()].push(place, entry);
        ticket
    }

    /// Takes one out, wherever it stands; `None` if it has gone.
    pub fn remove(&mut self, ticket: Ticket) -> Option<Entry<T>> {
        let class = ticket.class.at();
        let entry = self.lanes[class].remove(ticket.place, ticket.lane)?;
        if self.lanes[class].is_empty() {
            self.rounds.emptied(class);
        }
        Some(entry)
    }

    /// Whether it still waits.
    pub fn contains(&self, ticket: Ticket) -> bool {
        self.lanes[ticket.class.at()].contains(ticket.place, ticket.lane)
    }

    /// The next one to go, with what `attempt` made of it. Where that is nothing there is no room for this one: its lane is
    /// blocked, now and until [`Queue::reopen`]. `None`: everything that waits is blocked.
    pub fn next<R>(
        &mut self,
        mut attempt: impl FnMut(&mut Entry<T>) -> Option<R>,
    ) -> Option<(Entry<T>, R)> {
        loop {
            let plan = self.rounds.plan(|class| cost(&self.lanes[class]))?;
            let lanes = &mut self.lanes[plan.class];
            let (place, entry) = lanes.first_mut()?;
            let Some(made) = attempt(entry) else {
                lanes.block_first();
                continue;
            };
            let ticket = Ticket {
                class: ClassId(plan.class),
                lane: entry.turn.lane,
                place,
            };
            self.rounds.commit(plan, |class| cost(&self.lanes[class]));
            return Some((self.remove(ticket)?, made));
        }
    }

    /// Forgets who was blocked: there may be room now.
    pub fn reopen(&mut self) {
        self.lanes.iter_mut().for_each(Lanes::reopen);
    }

    /// How much waits in a class.
    pub fn pending(&self, class: ClassId) -> Pending {
        self.lanes[class.at()].pending()
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.lanes
            .iter()
            .map(|lanes| lanes.pending().requests as usize)
            .sum()
    }

    /// Whether nobody waits.
    pub fn is_empty(&self) -> bool {
        self.lanes.iter().all(Lanes::is_empty)
    }
}

fn cost<T>(lanes: &Lanes<T>) -> Option<u64> {
    lanes.first().map(|(_, entry)| entry.turn.cost())
}

#[cfg(test)]
mod tests;
