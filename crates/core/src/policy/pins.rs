//! Worker ids named by a request, resolved to a pin per phase.

use serde::Serialize;

use crate::worker::{DpRank, WorkerId, WorkerRole};

/// Worker that a request is pinned to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct WorkerPin {
    /// Worker id.
    pub worker: WorkerId,
    /// Data-parallel rank; optional if the worker has only one.
    pub rank: Option<DpRank>,
}

/// Worker ids that a request names in headers or body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RequestedWorkers {
    /// Worker of every phase without an id of its own.
    pub worker: Option<WorkerId>,
    /// Worker of the prefill.
    pub prefill_worker: Option<WorkerId>,
    /// Worker of the decode, or of both phases.
    pub decode_worker: Option<WorkerId>,
    /// Rank inside the worker.
    pub rank: Option<DpRank>,
    /// Rank inside the prefill worker.
    pub prefill_rank: Option<DpRank>,
}

impl RequestedWorkers {
    /// Value for "no rank" in protocols without optional fields.
    pub const NO_RANK: DpRank = DpRank(u32::MAX);

    /// Returns the pin of a phase.
    pub fn pin(&self, role: WorkerRole) -> Option<WorkerPin> {
        let rank = |rank: Option<DpRank>| rank.filter(|rank| *rank != Self::NO_RANK);
        let pin = |worker: Option<WorkerId>, rank| worker.map(|worker| WorkerPin { worker, rank });
        match role {
            WorkerRole::Prefill => {
                // Headers use one name for the general and the decode worker. The decode worker
                // must not also be pinned as a remote prefill worker.
                let general = self
                    .worker
                    .filter(|worker| self.decode_worker != Some(*worker));
                let own_rank = rank(self.prefill_rank).or(rank(self.rank));
                pin(self.prefill_worker.or(general), own_rank)
            }
            WorkerRole::Decode | WorkerRole::Aggregated => {
                pin(self.decode_worker.or(self.worker), rank(self.rank))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn phase_id_takes_precedence_over_general_id() {
        let id = |id| Some(WorkerId(id));
        let rank = |rank| Some(DpRank(rank));
        let pin = |worker, rank| {
            Some(WorkerPin {
                worker: WorkerId(worker),
                rank,
            })
        };
        let none = RequestedWorkers::default();
        let general = RequestedWorkers {
            worker: id(1),
            rank: rank(4),
            ..none
        };
        let header = RequestedWorkers {
            decode_worker: id(1),
            ..general
        };
        let both = RequestedWorkers {
            prefill_worker: id(2),
            ..header
        };
        let ranked = RequestedWorkers {
            prefill_rank: rank(5),
            ..both
        };
        let unset = RequestedWorkers {
            rank: Some(RequestedWorkers::NO_RANK),
            prefill_rank: rank(u32::MAX),
            ..both
        };
        for (named, prefill, decode) in [
            (none, None, None),
            (
                RequestedWorkers {
                    rank: rank(4),
                    ..none
                },
                None,
                None,
            ),
            (general, pin(1, rank(4)), pin(1, rank(4))),
            (header, None, pin(1, rank(4))),
            (both, pin(2, rank(4)), pin(1, rank(4))),
            (ranked, pin(2, rank(5)), pin(1, rank(4))),
            (unset, pin(2, None), pin(1, None)),
        ] {
            assert_eq!(
                (
                    named.pin(WorkerRole::Prefill),
                    named.pin(WorkerRole::Decode)
                ),
                (prefill, decode),
                "{named:?}"
            );
            assert_eq!(named.pin(WorkerRole::Aggregated), decode, "{named:?}");
        }
    }
}
