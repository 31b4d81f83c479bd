//! Who may be chosen for a request at all. One function judges every member by the same rules, for the choice and for the
//! explanation of it, so that the two cannot disagree. Three rules look at all members together and never leave nobody:
//! an affinity that cannot be kept does not count, an adapter that nobody has does not either, and when nobody is healthy
//! everybody is: a wrong verdict about health must not be worse than none.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::{Pin, Subset};
use crate::fleet::Member;
use crate::worker::{DpRank, Enforcement, Role, Worker, WorkerId, WorkerRank, topology_taint};

/// What a request demands of whoever serves it. The default demands nothing but the role.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraints {
    /// The phases that are to be done: [`Role::Prefill`] takes prefill workers only, the others take everybody else.
    pub role: Role,
    /// The only worker that will do.
    pub pin: Option<Pin>,
    /// The pool that the request is for; its workers have a taint that says so.
    pub pool: Option<Arc<str>>,
    /// The workers that will do; an empty list is nobody.
    pub allowed: Option<BTreeSet<WorkerId>>,
    /// The endpoints that a gateway allows; an empty subset is nobody.
    pub endpoints: Option<Subset>,
    /// Taints without which nobody will do.
    pub required_taints: BTreeSet<String>,
    /// Taints that make a worker cheaper, or dearer where the weight is negative.
    pub preferred_taints: BTreeMap<String, f64>,
    /// Hard affinity: while this rank is eligible, nobody else is.
    pub exclusive: Option<WorkerRank>,
    /// The LoRA adapter that is asked for; who has it goes before who has not.
    pub adapter: Option<String>,
}

/// What the caller knows of a member right now. Where several hold, the last of them counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It takes requests.
    Ready,
    /// It has too much to do.
    Overloaded,
    /// Its answers were errors.
    Unhealthy,
    /// It takes no requests: it drains, or it is not ready yet. Holds for pins as well.
    Unavailable,
}

/// Why a member is not a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Excluded<'c> {
    /// It does not do the phases that are asked for.
    OtherRole,
    /// The pin names another worker.
    NotPinned,
    /// The pin names another rank of the worker, or none of several.
    WrongRank,
    /// It is not in the allow-list.
    NotAllowed,
    /// It is not of the pool that the request is for.
    OtherPool(&'c str),
    /// It is not in Envoy's subset.
    NotInSubset,
    /// It lacks a taint.
    MissingTaint(&'c str),
    /// It takes no requests.
    Unavailable,
    /// It has too much to do.
    Overloaded,
    /// Its answers were errors, and others are healthy.
    Unhealthy,
    /// The session is bound to another.
    OtherAffinity,
    /// Others have the adapter.
    NoAdapter,
}

impl fmt::Display for Excluded<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Excluded::OtherRole => "does not do this phase",
            Excluded::NotPinned => "the request is pinned to another worker",
            Excluded::WrongRank => "is not the rank the request is pinned to",
            Excluded::NotAllowed => "is not among the allowed workers",
            Excluded::OtherPool(pool) => return write!(f, "is not of the pool `{pool}`"),
            Excluded::NotInSubset => "is not in Envoy's subset",
            Excluded::MissingTaint(taint) => {
                return write!(f, "lacks the required taint `{taint}`");
            }
            Excluded::Unavailable => "takes no requests",
            Excluded::Overloaded => "is overloaded",
            Excluded::Unhealthy => "is unhealthy",
            Excluded::OtherAffinity => "the session is bound to another worker rank",
            Excluded::NoAdapter => "has not loaded the adapter, and others have",
        })
    }
}

/// Why there is no candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Ineligible {
    /// The pinned worker does not exist, or not in this role.
    #[error("the request is pinned to worker {0}, which is not known to serve this")]
    PinUnknown(WorkerId),
    /// The pinned worker does not have that rank.
    #[error("the request is pinned to rank {rank} of worker {worker}, which has no such rank")]
    PinRankUnknown {
        /// The worker.
        worker: WorkerId,
        /// The rank it lacks.
        rank: DpRank,
    },
    /// The pin names no rank, and the worker has several.
    #[error(
        "the request is pinned to worker {worker}, which has {ranks} ranks, but names none of them"
    )]
    PinRankMissing {
        /// The worker.
        worker: WorkerId,
        /// How many ranks it has.
        ranks: u32,
    },
    /// The pinned worker is not in the allow-list.
    #[error("the request is pinned to worker {0}, which is not among the allowed workers")]
    PinnedWorkerNotAllowed(WorkerId),
    /// The pinned worker has too much to do.
    #[error("the request is pinned to worker {0}, which is overloaded")]
    PinnedWorkerOverloaded(WorkerId),
    /// Somebody would do, but everybody who would has too much to do.
    #[error("all eligible workers are overloaded")]
    AllEligibleWorkersOverloaded,
    /// Nobody will do.
    #[error("no worker is eligible")]
    NoEndpoints,
}

/// The members that may be chosen, in their order. All members that serve the model should be given.
pub fn eligible<'a>(
    members: &[&'a Member],
    constraints: &Constraints,
    standing: impl Fn(&Member) -> Standing,
) -> Result<Vec<&'a Member>, Ineligible> {
    // Usually nothing is demanded and nobody excluded, and then nothing has to be weighed.
    let narrows =
        constraints.exclusive.is_some() || constraints.adapter.is_some() || members.is_empty();
    if !narrows
        && members
            .iter()
            .all(|member| constraints.judge(member, &standing).is_none())
    {
        return Ok(members.to_vec());
    }
    let verdicts = verdicts(members, constraints, standing);
    let candidates: Vec<_> = members
        .iter()
        .zip(&verdicts)
        .filter(|(_, verdict)| verdict.is_none())
        .map(|(member, _)| *member)
        .collect();
    if candidates.is_empty() {
        Err(ineligible(members, constraints, &verdicts))
    } else {
        Ok(candidates)
    }
}

/// For each member why it may not be chosen, or `None` where it may.
pub fn verdicts<'c>(
    members: &[&Member],
    constraints: &'c Constraints,
    standing: impl Fn(&Member) -> Standing,
) -> Vec<Option<Excluded<'c>>> {
    let mut verdicts: Vec<_> = members
        .iter()
        .map(|member| constraints.judge(member, &standing))
        .collect();
    keep_the_healthy(&mut verdicts);
    if let Some(exclusive) = constraints.exclusive {
        narrow(members, &mut verdicts, Excluded::OtherAffinity, |member| {
            member.rank == exclusive
        });
    }
    if let Some(adapter) = &constraints.adapter {
        narrow(members, &mut verdicts, Excluded::NoAdapter, |member| {
            member.worker.adapters.contains(adapter)
        });
    }
    verdicts
}

/// Sum of the weights of the preferred taints that a worker carries.
#[inline]
pub fn preference(constraints: &Constraints, worker: &Worker) -> f64 {
    // Hardly a request prefers anything; then nobody needs to be asked what he carries.
    if constraints.preferred_taints.is_empty() {
        0.0
    } else {
        preferred(constraints, worker)
    }
}

fn preferred(constraints: &Constraints, worker: &Worker) -> f64 {
    let carried = constraints
        .preferred_taints
        .iter()
        .filter(|(taint, _)| worker.carries(taint));
    // Not `sum`, which is -0 for nothing.
    carried.fold(0.0, |sum, (_, weight)| sum + weight)
}

/// A prefill worker demands a place that it does not say it has.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the prefill worker {worker} demands a decode worker of its own {domain}, but does not say where it stands"
)]
pub struct PlaceUnknown {
    /// The worker.
    pub worker: WorkerId,
    /// The topology domain.
    pub domain: String,
}

impl Constraints {
    /// Adds what the worker that does the prefill demands of the one that decodes.
    pub fn follow(&mut self, prefill: &Worker) -> Result<(), PlaceUnknown> {
        let Some(transfer) = &prefill.kv_transfer else {
            return Ok(());
        };
        let domain = &transfer.domain;
        let unknown = || PlaceUnknown {
            worker: prefill.id,
            domain: domain.clone(),
        };
        let taint = topology_taint(domain, prefill.topology.get(domain).ok_or_else(unknown)?);
        match transfer.enforcement {
            Enforcement::Required => drop(self.required_taints.insert(taint)),
            Enforcement::Preferred(weight) => {
                *self.preferred_taints.entry(taint).or_insert(0.0) += weight
            }
        }
        Ok(())
    }

    /// Whether nobody is excluded but for the role and how he stands.
    pub fn admit_all(&self) -> bool {
        let (named, taints) = (
            self.pin.is_none() && self.allowed.is_none(),
            self.required_taints.is_empty(),
        );
        named
            && taints
            && self.pool.is_none()
            && self.endpoints.is_none()
            && self.exclusive.is_none()
            && self.adapter.is_none()
    }

    /// Whether the gateway allows a worker: it is of the pool, and among the endpoints.
    pub fn lists(&self, worker: &Worker) -> bool {
        let of_pool = self.pool.as_ref().is_none_or(|pool| worker.is_of(pool));
        of_pool
            && self
                .endpoints
                .as_ref()
                .is_none_or(|subset| subset.contains(worker.endpoint))
    }

    /// What one member is excluded for, by itself.
    fn judge(
        &self,
        member: &Member,
        standing: &impl Fn(&Member) -> Standing,
    ) -> Option<Excluded<'_>> {
        let worker = &*member.worker;
        if (self.role == Role::Prefill) != (worker.role == Role::Prefill) {
            return Some(Excluded::OtherRole);
        }
        if let Some(pin) = self.pin {
            if pin.worker != worker.id {
                return Some(Excluded::NotPinned);
            }
            if !means(pin, member) {
                return Some(Excluded::WrongRank);
            }
        }
        if self
            .allowed
            .as_ref()
            .is_some_and(|allowed| !allowed.contains(&worker.id))
        {
            return Some(Excluded::NotAllowed);
        }
        if let Some(pool) = self.pool.as_deref().filter(|pool| !worker.is_of(pool)) {
            return Some(Excluded::OtherPool(pool));
        }
        if self
            .endpoints
            .as_ref()
            .is_some_and(|subset| !subset.contains(worker.endpoint))
        {
            return Some(Excluded::NotInSubset);
        }
        if let Some(taint) = self
            .required_taints
            .iter()
            .find(|taint| !worker.carries(taint))
        {
            return Some(Excluded::MissingTaint(taint));
        }
        match standing(member) {
            Standing::Ready => None,
            Standing::Overloaded => Some(Excluded::Overloaded),
            Standing::Unhealthy => Some(Excluded::Unhealthy),
            Standing::Unavailable => Some(Excluded::Unavailable),
        }
    }
}

/// Whether a pin to the member's worker means this rank of it.
fn means(pin: Pin, member: &Member) -> bool {
    pin.rank
        .map_or(member.worker.ranks.size.get() == 1, |rank| {
            rank == member.rank.rank
        })
}

/// Lets the unhealthy in where nobody would serve but for their health. One that is healthy and only overloaded says that
/// verdicts can be trusted; then it is better to wait for it.
fn keep_the_healthy(verdicts: &mut [Option<Excluded<'_>>]) {
    if verdicts
        .iter()
        .any(|verdict| matches!(verdict, None | Some(Excluded::Overloaded)))
    {
        return;
    }
    for verdict in verdicts
        .iter_mut()
        .filter(|verdict| **verdict == Some(Excluded::Unhealthy))
    {
        *verdict = None;
    }
}

/// Excludes all but some, if any of those is left.
fn narrow<'c>(
    members: &[&Member],
    verdicts: &mut [Option<Excluded<'c>>],
    why: Excluded<'c>,
    keep: impl Fn(&Member) -> bool,
) {
    if members
        .iter()
        .zip(verdicts.iter())
        .any(|(member, verdict)| verdict.is_none() && keep(member))
    {
        for (member, verdict) in members.iter().zip(verdicts) {
            *verdict = verdict.or_else(|| (!keep(member)).then_some(why));
        }
    }
}

/// Names what left nobody.
fn ineligible(
    members: &[&Member],
    constraints: &Constraints,
    verdicts: &[Option<Excluded<'_>>],
) -> Ineligible {
    let overloaded = verdicts.contains(&Some(Excluded::Overloaded));
    // Where the gateway allows nobody, no other pin would do.
    if !members
        .iter()
        .any(|member| constraints.lists(&member.worker))
    {
        return Ineligible::NoEndpoints;
    }
    let Some(pin) = constraints.pin else {
        return if overloaded {
            Ineligible::AllEligibleWorkersOverloaded
        } else {
            Ineligible::NoEndpoints
        };
    };
    let worker = pin.worker;
    if constraints
        .allowed
        .as_ref()
        .is_some_and(|allowed| !allowed.contains(&worker))
    {
        return Ineligible::PinnedWorkerNotAllowed(worker);
    }
    if overloaded {
        return Ineligible::PinnedWorkerOverloaded(worker);
    }
    let foreign = |verdict: &Option<Excluded<'_>>| {
        matches!(verdict, Some(Excluded::OtherRole | Excluded::NotPinned))
    };
    let own = members
        .iter()
        .zip(verdicts)
        .find(|(_, verdict)| !foreign(verdict));
    let Some((member, _)) = own else {
        return Ineligible::PinUnknown(worker);
    };
    if !constraints.lists(&member.worker) {
        return Ineligible::NoEndpoints;
    }
    let ranks = member.worker.ranks;
    match pin.rank {
        Some(rank) if !ranks.contains(rank) => Ineligible::PinRankUnknown { worker, rank },
        None if ranks.size.get() > 1 => Ineligible::PinRankMissing {
            worker,
            ranks: ranks.size.get(),
        },
        _ => Ineligible::NoEndpoints,
    }
}

#[cfg(test)]
mod tests;
