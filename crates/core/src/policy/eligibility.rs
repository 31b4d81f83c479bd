//! Eligibility of the members of a fleet for one request. The choice and its explanation share one
//! function, so they cannot disagree. Three rules depend on all members together and never exclude
//! the last one. An affinity that cannot be met is ignored, and so is an adapter that no worker has
//! loaded. If no worker is healthy, all of them count as healthy, because a wrong health verdict
//! must not be worse than none.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::sync::Arc;

use serde::Serialize;

use super::{EndpointSubset, WorkerPin};
use crate::fleet::FleetMember;
use crate::worker::{
    DpRank, TransferEnforcement, Worker, WorkerId, WorkerRank, WorkerRole, topology_taint,
};

/// Demands of a request on its worker. The default demands only the role.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Constraints {
    /// Phases to run: [`WorkerRole::Prefill`] admits prefill workers only, the other roles admit
    /// all other workers.
    pub role: WorkerRole,
    /// The only admissible worker.
    pub pin: Option<WorkerPin>,
    /// Pool of the request; its workers carry a taint with the pool name.
    pub pool: Option<Arc<str>>,
    /// Admissible workers; an empty set admits none.
    pub allowed: Option<BTreeSet<WorkerId>>,
    /// Endpoints that a gateway allows; an empty subset admits none.
    pub endpoints: Option<EndpointSubset>,
    /// Taints that the worker must carry.
    pub required_taints: BTreeSet<String>,
    /// Taints that reduce the cost of a worker, or increase it if the weight is negative.
    pub preferred_taints: BTreeMap<String, f64>,
    /// Hard affinity: while this rank is eligible, all others are excluded.
    pub bound_rank: Option<WorkerRank>,
    /// Rank whose engine stores the state that the request refers to, such as an earlier response.
    /// While the engine is reachable, all others are excluded, because they would reject the request.
    pub storing_rank: Option<WorkerRank>,
    /// LoRA adapter of the request. Workers that have loaded it exclude the others.
    pub adapter: Option<String>,
}

/// Availability of a member. If several apply, the last one counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum WorkerAvailability {
    /// Accepts requests.
    Ready,
    /// Overloaded.
    Overloaded,
    /// Ejected after failed requests.
    Unhealthy,
    /// Draining or not ready. Applies to pinned requests as well.
    Unavailable,
}

/// Reason why a member is not a candidate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum ExclusionReason<'c> {
    /// The worker does not run this phase.
    OtherRole,
    /// The pin names another worker.
    NotPinned,
    /// The pin names another rank of the worker, or no rank of several.
    WrongRank,
    /// The worker is not in the allow-list.
    NotAllowed,
    /// The worker is not in the pool of the request.
    OtherPool(&'c str),
    /// The endpoint is not in Envoy's subset.
    NotInSubset,
    /// The worker lacks a required taint.
    MissingTaint(&'c str),
    /// The worker is draining or not ready.
    Unavailable,
    /// The worker is overloaded.
    Overloaded,
    /// The worker is ejected, and others are healthy.
    Unhealthy,
    /// The state that the request refers to is stored at another rank.
    StoredElsewhere,
    /// The session is bound to another rank.
    BoundElsewhere,
    /// Other workers have loaded the adapter.
    NoAdapter,
}

impl fmt::Display for ExclusionReason<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            ExclusionReason::OtherRole => "does not run this phase",
            ExclusionReason::NotPinned => "the request is pinned to another worker",
            ExclusionReason::WrongRank => "is not the rank the request is pinned to",
            ExclusionReason::NotAllowed => "is not among the allowed workers",
            ExclusionReason::OtherPool(pool) => return write!(f, "is not of the pool `{pool}`"),
            ExclusionReason::NotInSubset => "is not in Envoy's subset",
            ExclusionReason::MissingTaint(taint) => {
                return write!(f, "lacks the required taint `{taint}`");
            }
            ExclusionReason::Unavailable => "accepts no requests",
            ExclusionReason::Overloaded => "is overloaded",
            ExclusionReason::Unhealthy => "is unhealthy",
            ExclusionReason::StoredElsewhere => "another worker rank stores the response",
            ExclusionReason::BoundElsewhere => "the session is bound to another worker rank",
            ExclusionReason::NoAdapter => "has not loaded the adapter, and others have",
        })
    }
}

/// Reason why no member is eligible.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum EligibilityError {
    /// The pinned worker does not exist in this role.
    #[error("the request is pinned to worker {0}, which does not exist in this role")]
    PinUnknown(WorkerId),
    /// The pinned worker does not have that rank.
    #[error("the request is pinned to rank {rank} of worker {worker}, which has no such rank")]
    PinRankUnknown {
        /// Pinned worker.
        worker: WorkerId,
        /// Missing rank.
        rank: DpRank,
    },
    /// The pin names no rank, and the worker has several.
    #[error(
        "the request is pinned to worker {worker}, which has {ranks} ranks, but names none of them"
    )]
    PinRankMissing {
        /// Pinned worker.
        worker: WorkerId,
        /// Number of its ranks.
        ranks: u32,
    },
    /// The pinned worker is not in the allow-list.
    #[error("the request is pinned to worker {0}, which is not among the allowed workers")]
    PinnedWorkerNotAllowed(WorkerId),
    /// The pinned worker is overloaded.
    #[error("the request is pinned to worker {0}, which is overloaded")]
    PinnedWorkerOverloaded(WorkerId),
    /// All workers that meet the demands are overloaded.
    #[error("all eligible workers are overloaded")]
    AllEligibleWorkersOverloaded,
    /// No worker meets the demands.
    #[error("no worker is eligible")]
    NoEndpoints,
}

/// Returns the eligible members, in order. `members` should contain all that serve the model.
pub fn eligible_members<'a>(
    members: &[&'a FleetMember],
    constraints: &Constraints,
    availability: impl Fn(&FleetMember) -> WorkerAvailability,
) -> Result<Vec<&'a FleetMember>, EligibilityError> {
    // Usually there are no demands and no exclusions, and then nothing has to be compared.
    let is_narrowed = constraints.storing_rank.is_some()
        || constraints.bound_rank.is_some()
        || constraints.adapter.is_some()
        || members.is_empty();
    if !is_narrowed
        && members
            .iter()
            .all(|member| constraints.exclusion_of(member, &availability).is_none())
    {
        return Ok(members.to_vec());
    }
    let exclusions = exclusion_reasons(members, constraints, availability);
    let candidates: Vec<_> = members
        .iter()
        .zip(&exclusions)
        .filter(|(_, exclusion)| exclusion.is_none())
        .map(|(member, _)| *member)
        .collect();
    if candidates.is_empty() {
        Err(eligibility_error(members, constraints, &exclusions))
    } else {
        Ok(candidates)
    }
}

/// Returns, for each member, the reason of its exclusion, or `None` if it is eligible.
pub fn exclusion_reasons<'c>(
    members: &[&FleetMember],
    constraints: &'c Constraints,
    availability: impl Fn(&FleetMember) -> WorkerAvailability,
) -> Vec<Option<ExclusionReason<'c>>> {
    let mut exclusions: Vec<_> = members
        .iter()
        .map(|member| constraints.exclusion_of(member, &availability))
        .collect();
    readmit_unhealthy(&mut exclusions);
    let is_storing = |member: &FleetMember| Some(member.rank) == constraints.storing_rank;
    if constraints.storing_rank.is_some() {
        // An overloaded engine may still serve the request. Any other engine cannot.
        exclude_others(
            members,
            &mut exclusions,
            ExclusionReason::StoredElsewhere,
            &[ExclusionReason::Overloaded],
            is_storing,
        );
    }
    let mut eligible = members.iter().zip(&exclusions);
    let serves_stored =
        eligible.any(|(member, exclusion)| exclusion.is_none() && is_storing(member));
    if let Some(adapter) = constraints.adapter.as_ref().filter(|_| !serves_stored) {
        // Engines without the adapter answer 404.
        exclude_others(
            members,
            &mut exclusions,
            ExclusionReason::NoAdapter,
            &[ExclusionReason::Overloaded, ExclusionReason::Unhealthy],
            |member| member.worker.adapters.contains(adapter),
        );
    }
    if let Some(bound_rank) = constraints.bound_rank {
        exclude_others(
            members,
            &mut exclusions,
            ExclusionReason::BoundElsewhere,
            &[],
            |member| member.rank == bound_rank,
        );
    }
    exclusions
}

/// Returns the sum of the weights of the preferred taints that a worker carries.
#[inline]
pub fn taint_preference(constraints: &Constraints, worker: &Worker) -> f64 {
    // Few requests have preferences, so the common case is inlined.
    if constraints.preferred_taints.is_empty() {
        0.0
    } else {
        sum_preferred_taints(constraints, worker)
    }
}

fn sum_preferred_taints(constraints: &Constraints, worker: &Worker) -> f64 {
    let carried = constraints
        .preferred_taints
        .iter()
        .filter(|(taint, _)| worker.has_taint(taint));
    // `sum` would return -0.0 for an empty iterator.
    carried.fold(0.0, |sum, (_, weight)| sum + weight)
}

/// The prefill worker requires a decode worker in its topology domain but does not report its own.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the prefill worker {worker} requires a decode worker in its own {domain}, but does not report \
    its own topology"
)]
pub struct MissingTopologyError {
    /// Prefill worker.
    pub worker: WorkerId,
    /// Topology domain.
    pub domain: String,
}

impl Constraints {
    /// Adds the demands of the prefill worker's KV transfer on the decode worker.
    pub fn add_transfer_demands(&mut self, prefill: &Worker) -> Result<(), MissingTopologyError> {
        let Some(transfer) = &prefill.kv_transfer else {
            return Ok(());
        };
        let domain = &transfer.domain;
        let unknown = || MissingTopologyError {
            worker: prefill.id,
            domain: domain.clone(),
        };
        let taint = topology_taint(domain, prefill.topology.get(domain).ok_or_else(unknown)?);
        match transfer.enforcement {
            TransferEnforcement::Required => drop(self.required_taints.insert(taint)),
            TransferEnforcement::Preferred(weight) => {
                *self.preferred_taints.entry(taint).or_insert(0.0) += weight
            }
        }
        Ok(())
    }

    /// Returns whether only role and availability can exclude a member.
    pub fn admits_all(&self) -> bool {
        self.pin.is_none()
            && self.allowed.is_none()
            && self.required_taints.is_empty()
            && self.pool.is_none()
            && self.endpoints.is_none()
            && self.storing_rank.is_none()
            && self.bound_rank.is_none()
            && self.adapter.is_none()
    }

    /// Returns whether the gateway allows a worker, by pool and endpoint.
    pub fn allows(&self, worker: &Worker) -> bool {
        let of_pool = self
            .pool
            .as_ref()
            .is_none_or(|pool| worker.is_in_pool(pool));
        of_pool
            && self
                .endpoints
                .as_ref()
                .is_none_or(|subset| subset.contains(worker.endpoint))
    }

    /// Returns the reason that excludes one member by itself.
    fn exclusion_of(
        &self,
        member: &FleetMember,
        availability: &impl Fn(&FleetMember) -> WorkerAvailability,
    ) -> Option<ExclusionReason<'_>> {
        let worker = &*member.worker;
        if (self.role == WorkerRole::Prefill) != (worker.role == WorkerRole::Prefill) {
            return Some(ExclusionReason::OtherRole);
        }
        if let Some(pin) = self.pin {
            if pin.worker != worker.id {
                return Some(ExclusionReason::NotPinned);
            }
            if !pin_matches(pin, member) {
                return Some(ExclusionReason::WrongRank);
            }
        }
        if self
            .allowed
            .as_ref()
            .is_some_and(|allowed| !allowed.contains(&worker.id))
        {
            return Some(ExclusionReason::NotAllowed);
        }
        if let Some(pool) = self.pool.as_deref().filter(|pool| !worker.is_in_pool(pool)) {
            return Some(ExclusionReason::OtherPool(pool));
        }
        if self
            .endpoints
            .as_ref()
            .is_some_and(|subset| !subset.contains(worker.endpoint))
        {
            return Some(ExclusionReason::NotInSubset);
        }
        if let Some(taint) = self
            .required_taints
            .iter()
            .find(|taint| !worker.has_taint(taint))
        {
            return Some(ExclusionReason::MissingTaint(taint));
        }
        match availability(member) {
            WorkerAvailability::Ready => None,
            WorkerAvailability::Overloaded => Some(ExclusionReason::Overloaded),
            WorkerAvailability::Unhealthy => Some(ExclusionReason::Unhealthy),
            WorkerAvailability::Unavailable => Some(ExclusionReason::Unavailable),
        }
    }
}

/// Returns whether a pin to the member's worker covers this rank.
fn pin_matches(pin: WorkerPin, member: &FleetMember) -> bool {
    pin.rank
        .map_or(member.worker.ranks.size.get() == 1, |rank| {
            rank == member.rank.rank
        })
}

/// Readmits unhealthy members if health is the only obstacle to serving. A healthy member that is
/// only overloaded shows that the health verdicts are plausible; then waiting for it is better.
fn readmit_unhealthy(exclusions: &mut [Option<ExclusionReason<'_>>]) {
    if exclusions
        .iter()
        .any(|exclusion| matches!(exclusion, None | Some(ExclusionReason::Overloaded)))
    {
        return;
    }
    for exclusion in exclusions
        .iter_mut()
        .filter(|exclusion| **exclusion == Some(ExclusionReason::Unhealthy))
    {
        *exclusion = None;
    }
}

/// Excludes all members but the selected ones, if any of those is eligible. If none is, the selected
/// members that are excluded for the first possible of the `tolerated` reasons count as eligible.
fn exclude_others<'c>(
    members: &[&FleetMember],
    exclusions: &mut [Option<ExclusionReason<'c>>],
    reason: ExclusionReason<'c>,
    tolerated: &[ExclusionReason<'c>],
    is_selected: impl Fn(&FleetMember) -> bool,
) {
    let exists = |sought: &Option<ExclusionReason<'c>>| {
        let mut all = members.iter().zip(exclusions.iter());
        all.any(|(member, exclusion)| exclusion == sought && is_selected(member))
    };
    let mut states = std::iter::once(None).chain(tolerated.iter().copied().map(Some));
    let Some(accepted) = states.find(exists) else {
        return;
    };
    for (member, exclusion) in members.iter().zip(exclusions) {
        if !is_selected(member) {
            *exclusion = exclusion.or(Some(reason));
        } else if *exclusion == accepted {
            *exclusion = None;
        }
    }
}

/// Returns the demand that no member meets.
fn eligibility_error(
    members: &[&FleetMember],
    constraints: &Constraints,
    exclusions: &[Option<ExclusionReason<'_>>],
) -> EligibilityError {
    let overloaded = exclusions.contains(&Some(ExclusionReason::Overloaded));
    // If the gateway allows no member, the pin is not at fault.
    if !members
        .iter()
        .any(|member| constraints.allows(&member.worker))
    {
        return EligibilityError::NoEndpoints;
    }
    let Some(pin) = constraints.pin else {
        return if overloaded {
            EligibilityError::AllEligibleWorkersOverloaded
        } else {
            EligibilityError::NoEndpoints
        };
    };
    let worker = pin.worker;
    if constraints
        .allowed
        .as_ref()
        .is_some_and(|allowed| !allowed.contains(&worker))
    {
        return EligibilityError::PinnedWorkerNotAllowed(worker);
    }
    if overloaded {
        return EligibilityError::PinnedWorkerOverloaded(worker);
    }
    let is_other_worker = |exclusion: &Option<ExclusionReason<'_>>| {
        matches!(
            exclusion,
            Some(ExclusionReason::OtherRole | ExclusionReason::NotPinned)
        )
    };
    let pinned = members
        .iter()
        .zip(exclusions)
        .find(|(_, exclusion)| !is_other_worker(exclusion));
    let Some((member, _)) = pinned else {
        return EligibilityError::PinUnknown(worker);
    };
    if !constraints.allows(&member.worker) {
        return EligibilityError::NoEndpoints;
    }
    let ranks = member.worker.ranks;
    match pin.rank {
        Some(rank) if !ranks.contains(rank) => EligibilityError::PinRankUnknown { worker, rank },
        None if ranks.size.get() > 1 => EligibilityError::PinRankMissing {
            worker,
            ranks: ranks.size.get(),
        },
        _ => EligibilityError::NoEndpoints,
    }
}

#[cfg(test)]
mod tests;
