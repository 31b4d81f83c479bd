//! From the ids that a request names to the pin of each phase.

use serde::Serialize;

use crate::worker::{DpRank, Role, WorkerId};

/// A request's own choice of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Pin {
    /// The worker.
    pub worker: WorkerId,
    /// The rank; may be missing where the worker has only one.
    pub rank: Option<DpRank>,
}

/// The ids that a request names, by its headers or its body.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct NamedWorkers {
    /// The worker of whatever phase has none of its own.
    pub worker: Option<WorkerId>,
    /// The worker of the prefill.
    pub prefill_worker: Option<WorkerId>,
    /// The worker of the decode, and of requests that one worker serves alone.
    pub decode_worker: Option<WorkerId>,
    /// The rank inside the worker.
    pub rank: Option<DpRank>,
    /// The rank inside the worker of the prefill.
    pub prefill_rank: Option<DpRank>,
}

impl NamedWorkers {
    /// How protocols without optional fields write that no rank is named.
    pub const NO_RANK: DpRank = DpRank(u32::MAX);

    /// The pin of a phase.
    pub fn pin(&self, role: Role) -> Option<Pin> {
        let rank = |rank: Option<DpRank>| rank.filter(|rank| *rank != Self::NO_RANK);
        let (worker, rank) = match role {
            Role::Prefill => {
                // Headers have one name for the general worker and the decode worker. Who decodes is not meant to
                // prefill for itself by the way of another.
                let general = self
                    .worker
                    .filter(|worker| self.decode_worker != Some(*worker));
                (
                    self.prefill_worker.or(general),
                    rank(self.prefill_rank).or(rank(self.rank)),
                )
            }
            Role::Decode | Role::Aggregated => {
                (self.decode_worker.or(self.worker), rank(self.rank))
            }
        };
        worker.map(|worker| Pin { worker, rank })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_phase_takes_its_own_id_before_the_general_one() {
        let id = |id| Some(WorkerId(id));
        let rank = |rank| Some(DpRank(rank));
        let pin = |worker, rank| {
            Some(Pin {
                worker: WorkerId(worker),
                rank,
            })
        };
        let none = NamedWorkers::default();
        let general = NamedWorkers {
            worker: id(1),
            rank: rank(4),
            ..none
        };
        let header = NamedWorkers {
            decode_worker: id(1),
            ..general
        };
        let both = NamedWorkers {
            prefill_worker: id(2),
            ..header
        };
        let ranked = NamedWorkers {
            prefill_rank: rank(5),
            ..both
        };
        let unset = NamedWorkers {
            rank: Some(NamedWorkers::NO_RANK),
            prefill_rank: rank(u32::MAX),
            ..both
        };
        for (named, prefill, decode) in [
            (none, None, None),
            (
                NamedWorkers {
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
                (named.pin(Role::Prefill), named.pin(Role::Decode)),
                (prefill, decode),
                "{named:?}"
            );
            assert_eq!(named.pin(Role::Aggregated), decode, "{named:?}");
        }
    }
}
