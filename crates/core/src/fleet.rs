//! Fleet: an immutable snapshot of all workers that is replaced as a whole.
//!
//! Each worker rank has a slot, a small dense number, so the index, the load table and the cost
//! functions work on arrays. `reconcile` is the only place that compares two memberships, because
//! discovery always sends the full desired set.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use serde::ser::{Serialize, SerializeStruct, Serializer};

use crate::worker::{ModelName, RankSlot, Worker, WorkerId, WorkerRank, WorkerRole};

/// Worker rank and its slot.
#[derive(Clone, Debug, PartialEq, serde::Serialize)]
pub struct FleetMember {
    /// Index in the tables of the core.
    pub slot: RankSlot,
    /// Worker id and rank.
    pub rank: WorkerRank,
    /// Worker of the rank.
    pub worker: Arc<Worker>,
}

/// All known workers at an instant.
#[derive(Clone, Debug, Default)]
pub struct Fleet {
    generation: u64,
    workers: BTreeMap<WorkerId, Arc<Worker>>,
    by_slot: Vec<Option<FleetMember>>,
    by_rank: HashMap<WorkerRank, RankSlot>,
    by_model: BTreeMap<ModelName, ModelMembers>,
    kinds: WorkerKinds,
}

/// Ranks that serve a model.
#[derive(Clone, Debug, Default)]
struct ModelMembers {
    slots: Vec<RankSlot>,
    kinds: WorkerKinds,
}

/// Summary of several workers. It is precomputed, so that a decision does not have to scan all
/// workers to learn that all of them are aggregated and none is draining.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WorkerKinds {
    /// Some serve only prefills.
    pub prefill: bool,
    /// Some serve only decodes.
    pub decode: bool,
    /// Some accept no new requests.
    pub draining: bool,
}

impl WorkerKinds {
    /// Summarizes workers.
    pub fn from_workers<'a>(workers: impl IntoIterator<Item = &'a Worker>) -> Self {
        let mut kinds = Self::default();
        workers.into_iter().for_each(|worker| kinds.add(worker));
        kinds
    }

    fn add(&mut self, worker: &Worker) {
        self.prefill |= worker.role == WorkerRole::Prefill;
        self.decode |= worker.role == WorkerRole::Decode;
        self.draining |= worker.draining;
    }

    /// Returns whether all workers are aggregated and none is draining.
    pub fn is_uniform(self) -> bool {
        self == Self::default()
    }
}

/// New snapshot and the difference to the previous one. A worker that moved is in both `removed`
/// and `added`.
#[derive(Clone, Debug)]
pub struct FleetDiff {
    /// The new snapshot.
    pub fleet: Fleet,
    /// Ranks that were added, in slots that were free before.
    pub added: Vec<FleetMember>,
    /// Ranks that were removed, with their previous state.
    pub removed: Vec<FleetMember>,
    /// Ranks that keep their slot, and whose worker changed in a property that is not part of its
    /// identity.
    pub updated: Vec<FleetMember>,
}

impl Fleet {
    /// Creates a fleet without workers, with generation 0.
    pub fn empty() -> Self {
        Self::default()
    }

    /// Returns the number of reconciliations that changed something.
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether the fleet has no workers.
    pub fn is_empty(&self) -> bool {
        self.workers.is_empty()
    }

    /// Iterates over the workers in the order of their ids.
    pub fn workers(&self) -> impl Iterator<Item = &Arc<Worker>> {
        self.workers.values()
    }

    /// Returns a worker.
    pub fn worker(&self, id: WorkerId) -> Option<&Arc<Worker>> {
        self.workers.get(&id)
    }

    /// Returns the name of a worker for logs.
    pub fn display_name(&self, id: WorkerId) -> Option<String> {
        self.worker(id).map(|worker| worker.display_name())
    }

    /// Iterates over the worker ranks in the order of their slots.
    pub fn members(&self) -> impl Iterator<Item = &FleetMember> {
        self.by_slot.iter().flatten()
    }

    /// Returns the worker rank in a slot.
    pub fn member(&self, slot: RankSlot) -> Option<&FleetMember> {
        self.by_slot.get(slot.index())?.as_ref()
    }

    /// Returns the slot of a worker rank.
    pub fn slot(&self, rank: WorkerRank) -> Option<RankSlot> {
        self.by_rank.get(&rank).copied()
    }

    /// Returns the slots of all ranks that serve a model, in ascending order, whatever their role.
    pub fn slots_serving(&self, model: &ModelName) -> &[RankSlot] {
        self.by_model
            .get(model)
            .map_or(&[], |serving| &serving.slots)
    }

    /// Summarizes the workers that serve a model, or all workers.
    pub fn kinds(&self, model: Option<&ModelName>) -> WorkerKinds {
        match model {
            Some(model) => self
                .by_model
                .get(model)
                .map_or_else(WorkerKinds::default, |serving| serving.kinds),
            None => self.kinds,
        }
    }

    /// Returns the length of a table indexed by slot.
    pub fn slots(&self) -> usize {
        self.by_slot.len()
    }

    /// Returns the snapshot of exactly the `desired` workers, and the difference. If an id occurs
    /// twice, its first worker counts.
    pub fn reconcile(&self, desired: Vec<Worker>) -> FleetDiff {
        let mut desired_by_id: BTreeMap<WorkerId, Worker> = BTreeMap::new();
        for worker in desired {
            desired_by_id.entry(worker.id).or_insert(worker);
        }
        let mut diff = FleetDiff {
            fleet: self.clone(),
            added: vec![],
            removed: vec![],
            updated: vec![],
        };
        let same = |old: &Worker| {
            desired_by_id
                .get(&old.id)
                .is_some_and(|worker| WorkerIdentity::of(worker) == WorkerIdentity::of(old))
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
            diff.fleet.by_slot[member.slot.index()] = None;
            diff.removed.push(member.clone());
        }
        // A task that has not seen the removal yet may still write to the slot, so it stays free
        // for one generation.
        let mut allocator = SlotAllocator {
            resting: diff.removed.iter().map(|member| member.slot).collect(),
            next: 0,
        };
        let mut workers = BTreeMap::new();
        for (id, worker) in desired_by_id {
            let kept = self
                .workers
                .get(&id)
                .filter(|old| stays.contains(&old.id))
                .cloned();
            let worker = match kept {
                Some(old) if *old == worker => old,
                Some(_) => diff.update_worker(Arc::new(worker)),
                None => diff.add_worker(Arc::new(worker), &mut allocator),
            };
            workers.insert(id, worker);
        }
        diff.fleet.workers = workers;
        if !(diff.added.is_empty() && diff.removed.is_empty() && diff.updated.is_empty()) {
            diff.fleet.generation += 1;
            diff.fleet.rebuild_tables();
        }
        diff
    }

    fn rebuild_tables(&mut self) {
        while self.by_slot.last().is_some_and(Option::is_none) {
            self.by_slot.pop();
        }
        self.by_rank.clear();
        self.by_model.clear();
        self.kinds = WorkerKinds::default();
        for member in self.by_slot.iter().flatten() {
            self.by_rank.insert(member.rank, member.slot);
            let serving = self
                .by_model
                .entry(member.worker.model.clone())
                .or_default();
            serving.slots.push(member.slot);
            serving.kinds.add(&member.worker);
            self.kinds.add(&member.worker);
        }
    }
}

impl FleetDiff {
    /// Returns the ranks that were removed from one slot and added in another.
    pub fn moved_ranks(&self) -> BTreeSet<WorkerRank> {
        let added: BTreeSet<_> = self.added.iter().map(|member| member.rank).collect();
        let removed = self.removed.iter().map(|member| member.rank);
        removed.filter(|rank| added.contains(rank)).collect()
    }

    fn update_worker(&mut self, worker: Arc<Worker>) -> Arc<Worker> {
        for rank in worker.ranks.iter() {
            let Some(slot) = self.fleet.slot(WorkerRank {
                worker: worker.id,
                rank,
            }) else {
                continue;
            };
            let Some(member) = self.fleet.by_slot[slot.index()].as_mut() else {
                continue;
            };
            member.worker = worker.clone();
            self.updated.push(member.clone());
        }
        worker
    }

    fn add_worker(&mut self, worker: Arc<Worker>, allocator: &mut SlotAllocator) -> Arc<Worker> {
        for rank in worker.ranks.iter() {
            let slot = allocator.allocate(&mut self.fleet.by_slot);
            let member = FleetMember {
                slot,
                rank: WorkerRank {
                    worker: worker.id,
                    rank,
                },
                worker: worker.clone(),
            };
            self.fleet.by_slot[slot.index()] = Some(member.clone());
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

/// Identity of a worker. If any of it changes, its cache, load and event stream are no longer
/// known.
#[derive(PartialEq, Eq)]
struct WorkerIdentity<'a> {
    endpoint: crate::worker::WorkerEndpoint,
    model: &'a ModelName,
    block_size: crate::worker::BlockSize,
    ranks: crate::worker::RankRange,
    event_sources: &'a [crate::worker::EventSource],
}

impl<'a> WorkerIdentity<'a> {
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

/// Allocates the lowest free slots.
struct SlotAllocator {
    resting: BTreeSet<RankSlot>,
    next: u32,
}

impl SlotAllocator {
    fn allocate(&mut self, by_slot: &mut Vec<Option<FleetMember>>) -> RankSlot {
        loop {
            let slot = RankSlot(self.next);
            self.next += 1;
            if slot.index() >= by_slot.len() {
                by_slot.resize(slot.index() + 1, None);
            }
            if by_slot[slot.index()].is_none() && !self.resting.contains(&slot) {
                return slot;
            }
        }
    }
}

#[cfg(test)]
mod tests;
