//! The index kept elsewhere: what a server of it says of a request's prompts takes the place of our own index, and how it
//! believes the event sources takes the place of our own table of them, so that a decision is the one that the server would
//! have made. Who gets no answer goes by what was routed before.

use std::collections::HashSet;
use std::sync::Arc;

use arc_swap::ArcSwapOption;

use super::Router;
use super::prepared::Prepared;
use super::sources::Trusted;
use crate::block::BlockHashes;
use crate::fleet::{Fleet, Member};
use crate::index::{Grouped, Overlaps, TierBlocks};
use crate::trust::{Because, Standing, Trust};
use crate::worker::{ModelName, Slot, WorkerRank};

/// What of a request's prompts is cached where, as somebody else says who follows the engines' events.
#[derive(Clone, Debug, Default)]
pub enum Remote {
    /// Nobody was asked. Without an index of our own that is as if nobody had answered.
    #[default]
    NotAsked,
    /// This was answered.
    Told(Arc<RemoteAnswer>),
    /// Nobody answered; this was known of the worker ranks before.
    Away(Arc<RemoteRanks>),
}

/// An answer of a server of the index.
#[derive(Clone, Debug, Default)]
pub struct RemoteAnswer {
    /// How it believes the event sources.
    pub ranks: Arc<RemoteRanks>,
    /// Per prompt of the request, who has anything of it cached.
    pub prompts: Vec<Vec<(WorkerRank, TierBlocks)>>,
}

/// What a server of the index says of a worker rank whose events it follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RemoteRank {
    /// Whose.
    pub rank: WorkerRank,
    /// How far its event source can be believed.
    pub standing: Standing,
    /// Whether its cache has several groups, so that a prompt that was there says nothing of what these have kept of it.
    pub grouped: bool,
}

/// What a server of the index says of all of them.
#[derive(Clone, Debug, Default)]
pub struct RemoteRanks {
    rows: Vec<RemoteRank>,
    standings: Arc<Trusted>,
    /// The same while nobody says how far they can be believed: only the sizes of the engines' blocks hold on.
    sizes: Arc<Trusted>,
    grouped: HashSet<WorkerRank>,
}

impl RemoteRanks {
    /// What is said of these.
    pub fn new(mut rows: Vec<RemoteRank>) -> Self {
        rows.sort_unstable_by_key(|row| row.rank);
        let unbelieved = |standing: Standing| Standing {
            engine_block_size: standing.engine_block_size,
            ..Standing::default()
        };
        Self {
            standings: Arc::new(rows.iter().map(|row| (row.rank, row.standing)).collect()),
            sizes: Arc::new(
                rows.iter()
                    .map(|row| (row.rank, unbelieved(row.standing)))
                    .collect(),
            ),
            grouped: rows
                .iter()
                .filter(|row| row.grouped)
                .map(|row| row.rank)
                .collect(),
            rows,
        }
    }

    /// Each of them, by worker and rank.
    pub fn rows(&self) -> &[RemoteRank] {
        &self.rows
    }

    fn is_followed(&self, rank: WorkerRank) -> bool {
        let standing = self.standings.standing(rank);
        standing.trust != Trust::Absent
            || !matches!(standing.because, None | Some(Because::NoSource))
    }
}

/// Which predictions are worth something beside what else is known of a prompt.
#[derive(Clone, Copy)]
pub(super) enum Known<'a> {
    /// Our own index, or what it would have said; each predictor is kept for the ranks that it is for.
    Own,
    /// An answer about these.
    Told(&'a RemoteRanks, &'a Fleet),
    /// Nothing.
    Away,
}

impl Known<'_> {
    /// Whether what was routed to a silent rank is worth something.
    pub(super) fn is_silent(self, slot: Slot) -> bool {
        match self {
            Known::Own | Known::Away => true,
            Known::Told(ranks, fleet) => fleet
                .member(slot)
                .is_some_and(|member| !ranks.is_followed(member.rank)),
        }
    }

    /// Whether what was routed to a rank is worth something until its event has come.
    pub(super) fn is_telling(self, slot: Slot) -> bool {
        match self {
            Known::Own => true,
            Known::Told(ranks, fleet) => fleet.member(slot).is_some_and(|member| {
                ranks.is_followed(member.rank) && !ranks.grouped.contains(&member.rank)
            }),
            Known::Away => false,
        }
    }
}

/// What is said of all ranks, while nothing of it changes.
#[derive(Debug, Default)]
pub(super) struct Saying(ArcSwapOption<Said>);

#[derive(Debug)]
struct Said {
    generation: u64,
    trust: Arc<Trusted>,
    grouped: Grouped,
    ranks: Arc<RemoteRanks>,
}

impl Router {
    /// Keeps no index: what is cached where is said by the requests.
    #[must_use]
    pub fn without_index(mut self) -> Self {
        self.remote = true;
        self.predictions.everywhere = true;
        self
    }

    /// Whether the index is kept elsewhere.
    pub fn is_remote(&self) -> bool {
        self.remote
    }

    /// What our index says of prompts, for somebody who has none: of those who serve the model, or of all.
    pub fn answer(&self, model: Option<&ModelName>, prompts: &[BlockHashes]) -> RemoteAnswer {
        let mut table = self.scratch.take();
        let answer = loop {
            let fleet = self.fleet.load_full();
            // Standings first, as in a decision of ours.
            let ranks = self.ranks(&fleet);
            let found = prompts.iter().map(|hashes| {
                self.index.overlaps(hashes, &mut table);
                found(&table, &fleet, model)
            });
            let prompts = found.collect();
            // Of another fleet the slots are others'.
            if self.fleet.load().generation() == fleet.generation() {
                break RemoteAnswer { ranks, prompts };
            }
        };
        self.scratch.give([table]);
        answer
    }

    /// How we believe the event sources; the same value as long as nothing changes.
    fn ranks(&self, fleet: &Fleet) -> Arc<RemoteRanks> {
        let (trust, grouped, generation) = (
            self.sources.table(),
            self.index.grouped(),
            fleet.generation(),
        );
        let same = |said: &Arc<Said>| {
            said.generation == generation
                && Arc::ptr_eq(&said.trust, &trust)
                && said.grouped.is_same(&grouped)
        };
        if let Some(said) = self.saying.0.load_full().filter(same) {
            return said.ranks.clone();
        }
        let row = |(rank, standing)| {
            let grouped = fleet.slot(rank).is_some_and(|slot| grouped.has(slot));
            RemoteRank {
                rank,
                standing,
                grouped,
            }
        };
        let ranks = Arc::new(RemoteRanks::new(trust.iter().map(row).collect()));
        let said = Said {
            generation,
            trust,
            grouped,
            ranks: ranks.clone(),
        };
        self.saying.0.store(Some(Arc::new(said)));
        ranks
    }

    /// What everybody has cached of a prompt, or should have; which one of the request's it is counts where somebody else
    /// was asked.
    pub(super) fn cached_where(
        &self,
        (nth, hashes): (usize, &BlockHashes),
        remote: &Remote,
        fleet: &Fleet,
    ) -> Overlaps {
        let mut table = self.scratch.take();
        let known = match remote {
            Remote::Told(answer) => {
                let found = answer.prompts.get(nth).map_or(&[][..], Vec::as_slice);
                table.take_over(
                    found
                        .iter()
                        .filter_map(|(rank, blocks)| Some((fleet.slot(*rank)?, *blocks))),
                );
                Known::Told(&answer.ranks, fleet)
            }
            Remote::NotAsked if !self.remote => {
                self.index.overlaps(hashes, &mut table);
                Known::Own
            }
            Remote::NotAsked | Remote::Away(_) => {
                table.take_over([]);
                Known::Away
            }
        };
        if self.predictions.any() {
            let mut other = self.scratch.take();
            self.predictions
                .raise(hashes, (&mut table, &mut other), known);
            self.scratch.give([other]);
        }
        table
    }

    /// How far event sources can be believed, by whoever says what is cached.
    pub(super) fn trusted(&self, remote: &Remote) -> Arc<Trusted> {
        match remote {
            Remote::Told(answer) => answer.ranks.standings.clone(),
            Remote::Away(ranks) => ranks.sizes.clone(),
            Remote::NotAsked if self.remote => Arc::default(),
            Remote::NotAsked => self.sources.table(),
        }
    }

    /// Whether what a worker rank has cached is only guessed.
    pub(super) fn is_guessed(&self, prepared: &Prepared, chosen: &Member) -> bool {
        let says_nothing = match &prepared.request.remote {
            Remote::Told(answer) => !answer.ranks.is_followed(chosen.rank),
            remote => {
                self.is_away(remote) || chosen.worker.event_source(chosen.rank.rank).is_none()
            }
        };
        says_nothing && self.predictions.without_events.is_some()
    }

    /// Whether nobody says what is cached.
    pub(super) fn is_away(&self, remote: &Remote) -> bool {
        match remote {
            Remote::NotAsked => self.remote,
            Remote::Told(_) => false,
            Remote::Away(_) => true,
        }
    }
}

fn found(
    table: &Overlaps,
    fleet: &Fleet,
    model: Option<&ModelName>,
) -> Vec<(WorkerRank, TierBlocks)> {
    let of_rank = |(slot, blocks): (Slot, TierBlocks)| {
        let member = fleet
            .member(slot)
            .filter(|member| model.is_none_or(|model| member.worker.model == *model))?;
        (blocks.total() > 0).then_some((member.rank, blocks))
    };
    let mut found: Vec<_> = table.iter().filter_map(of_rank).collect();
    found.sort_unstable_by_key(|(rank, _)| *rank);
    found
}
