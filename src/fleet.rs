//! Who serves right now: an immutable snapshot that the rest of the program swaps whole. Each worker rank has a slot, a
//! small dense number, so that the index, the load table and the choice work on arrays. `reconcile` is the only place
//! where two memberships are compared; discovery always sends the full desired set.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::worker::{ModelName, Role, Slot, Worker, WorkerId, WorkerRank};

/// One worker rank and its slot.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct Member {
    /// Its number in the tables of the core.
    pub slot: Slot,
    /// Which worker and which of its ranks.
    pub rank: WorkerRank,
    /// The worker it belongs to.
    pub worker: Arc<Worker>,
}

/// All known workers at an instant.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    generation: u64,
    workers: BTreeMap<WorkerId, Arc<Worker>>,
    by_slot: Vec<Option<Member>>,
    by_rank: HashMap<WorkerRank, Slot>,
    by_model: BTreeMap<ModelName, Serving>,
    kinds: Kinds,
}

/// Who serves a model.
#[derive(Clone, Debug, Default)]
struct Serving {
    slots: Vec<Slot>,
    kinds: Kinds,
}

/// What some of several workers are. Known beforehand, so that a decision need not look at every worker to find out that
/// all do both phases and take requests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Kinds {
    /// There for prefills only.
    pub prefill: bool,
    /// There for decodes.
    pub decode: bool,
    /// Taking no new requests.
    pub draining: bool,
}

impl Kinds {
    /// Of some workers.
    pub fn of<'a>(workers: impl IntoIterator<Item = &'a Worker>) -> Self {
        let mut kinds = Self::default();
        workers.into_iter().for_each(|worker| kinds.see(worker));
        kinds
    }

    fn see(&mut self, worker: &Worker) {
        self.prefill |= worker.role == Role::Prefill;
        self.decode |= worker.role == Role::Decode;
        self.draining |= worker.draining;
    }

    /// Whether all do both phases and take requests.
    pub fn is_plain(self) -> bool {
        self == Self::default()
    }
}

/// A new snapshot and what it changes. A worker that moved is in both `removed` and `added`.
#[derive(Clone, Debug)]
pub struct Reconciled {
    /// The new snapshot.
    pub fleet: Fleet,
    /// Ranks that begin to exist, in slots nobody held before.
    pub added: Vec<Member>,
    /// Ranks that end, as they were.
    pub removed: Vec<Member>,
    /// Ranks that stay in their slot with a worker that changed in something that does not make it another worker.
    pub kept_changed: Vec<Member>,
}

impl Fleet {
    /// Nobody, generation 0.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Counts the reconciliations that changed something.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Whether nobody serves.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// Workers in the order of their ids.
    pub fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.workers.values()
    }

    /// One worker.
    pub fn worker(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.workers.get(&id)
    }

    /// Worker ranks in the order of their slots.
    pub fn members(&self) -> impl Iterator<Item = &Member> {
        self.by_slot.iter().flatten()
    }

    /// Who holds a slot.
    pub fn member(&self, slot: Slot) -> Option<&Member> {
        self.by_slot.get(slot.at())?.as_ref()
    }

    /// The slot of a worker rank.
    pub fn slot(&self, rank: WorkerRank) -> Option<Slot> {
        self.by_rank.get(&rank).copied()
    }

    /// The slots of all ranks that serve a model, whatever their role, in ascending order.
    pub fn serving(&self, model: &ModelName) -> &[Slot] {
        self.by_model
            .get(model)
            .map_or(&[], |serving| &serving.slots)
    }

    /// What those are who serve a model, or anything.
    pub fn kinds(&self, model: Option<&ModelName>) -> Kinds {
        match model {
            Some(model) => self
                .by_model
                .get(model)
                .map_or_else(Kinds::default, |serving| serving.kinds),
            None => self.kinds,
        }
    }

    /// Length that a table indexed by slot needs: the highest slot and one.
    pub fn slots(&self) -> usize {
        self.by_slot.len()
    }

    /// The snapshot that holds exactly `desired`, and the difference. If an id occurs twice, its first worker counts.
    pub fn reconcile(&self, desired: Vec<Worker>) -> Reconciled {
        let mut wanted: BTreeMap<WorkerId, Worker> = BTreeMap::new();
        for worker in desired {
            wanted.entry(worker.id).or_insert(worker);
        }
        let mut diff = Reconciled {
            fleet: self.clone(),
            added: vec![],
            removed: vec![],
            kept_changed: vec![],
        };
        let same = |old: &Worker| {
            wanted
                .get(&old.id)
                .is_some_and(|worker| Identity::of(worker) == Identity::of(old))
        };
        let stays: BTreeSet<WorkerId> = self
            .workers()
            .filter(|old| same(old))
            .map(|old| old.id)
            .collect();
        for member in self
            .members()
            .filter(|member| !stays.contains(&member.rank.worker))
        {
            diff.fleet.by_slot[member.slot.at()] = None;
            diff.removed.push(member.clone());
        }
        // A slot freed just now may still be written to by whoever has not heard of it: it rests for one generation.
        let mut vacant = Vacant {
            resting: diff.removed.iter().map(|member| member.slot).collect(),
            next: 0,
        };
        let mut workers = BTreeMap::new();
        for (id, worker) in wanted {
            let kept = self
                .workers
                .get(&id)
                .filter(|old| stays.contains(&old.id))
                .cloned();
            let worker = match kept {
                Some(old) if *old == worker => old,
                Some(_) => diff.refresh(Arc::new(worker)),
                None => diff.admit(Arc::new(worker), &mut vacant),
            };
            workers.insert(id, worker);
        }
        diff.fleet.workers = workers;
        if !(diff.added.is_empty() && diff.removed.is_empty() && diff.kept_changed.is_empty()) {
            diff.fleet.generation += 1;
            diff.fleet.tabulate();
        }
        diff
    }

    fn tabulate(&mut self) {
        while self.by_slot.last().is_some_and(Option::is_none) {
            self.by_slot.pop();
        }
        self.by_rank.clear();
        self.by_model.clear();
        self.kinds = Kinds::default();
        for member in self.by_slot.iter().flatten() {
            self.by_rank.insert(member.rank, member.slot);
            let serving = self
                .by_model
                .entry(member.worker.model.clone())
                .or_default();
            serving.slots.push(member.slot);
            serving.kinds.see(&member.worker);
            self.kinds.see(&member.worker);
        }
    }
}

impl Reconciled {
    fn refresh(&mut self, worker: Arc<Worker>) -> Arc<Worker> {
        for rank in worker.ranks.iter() {
            let Some(slot) = self.fleet.slot(WorkerRank {
                worker: worker.id,
                rank,
            }) else {
                continue;
            };
            let Some(member) = self.fleet.by_slot[slot.at()].as_mut() else {
                continue;
            };
            member.worker = worker.clone();
            self.kept_changed.push(member.clone());
        }
        worker
    }

    fn admit(&mut self, worker: Arc<Worker>, vacant: &mut Vacant) -> Arc<Worker> {
        for rank in worker.ranks.iter() {
            let slot = vacant.take(&mut self.fleet.by_slot);
            let member = Member {
                slot,
                rank: WorkerRank {
                    worker: worker.id,
                    rank,
                },
                worker: worker.clone(),
            };
            self.fleet.by_slot[slot.at()] = Some(member.clone());
            self.added.push(member);
        }
        worker
    }
}

impl Serialize for Fleet {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut fleet = serializer.serialize_struct("Fleet", 2)?;
        fleet.serialize_field("generation", &self.generation)?;
        fleet.serialize_field("members", &self.members().collect::<Vec<_>>())?;
        fleet.end()
    }
}

/// What makes a worker the same worker. A change of any of it means that what we know of its cache, its load and its
/// event stream no longer holds.
#[derive(PartialEq, Eq)]
struct Identity<'a> {
    endpoint: crate::worker::Endpoint,
    model: &'a ModelName,
    block_size: crate::worker::BlockSize,
    ranks: crate::worker::Ranks,
    event_sources: &'a [crate::worker::EventSource],
}

impl<'a> Identity<'a> {
    fn of(worker: &'a Worker) -> Self {
        Self {
            endpoint: worker.endpoint,
            model: &worker.model,
            block_size: worker.block_size,
            ranks: worker.ranks,
            event_sources: &worker.event_sources,
        }
    }
}

/// Gives out the lowest vacant slots.
struct Vacant {
    resting: BTreeSet<Slot>,
    next: u32,
}

impl Vacant {
    fn take(&mut self, by_slot: &mut Vec<Option<Member>>) -> Slot {
        loop {
            let slot = Slot(self.next);
            self.next += 1;
            if slot.at() >= by_slot.len() {
                by_slot.resize(slot.at() + 1, None);
            }
            if by_slot[slot.at()].is_none() && !self.resting.contains(&slot) {
                return slot;
            }
        }
    }
}

#[cfg(test)]
mod tests;
