//! Candidate pools of a request: one for the decode or for both phases, and one for the prefill if
//! there are prefill workers. If no prefill worker can be chosen, the decode workers run the
//! prefill, unless the operator configured a rejection.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::request::{DecodeCapability, PhaseSelection, RouteRequest};
use super::route::RouteError;
use super::settings::{OverloadAction, RouterSettings};
use crate::fleet::{Fleet, FleetMember, WorkerKinds};
use crate::health::HealthState;
use crate::policy::{
    Constraints, EligibilityError, ExclusionReason, OverloadedWorkers, WorkerAvailability,
    eligible_members, exclusion_reasons,
};
use crate::worker::{ModelName, WorkerId, WorkerRank, WorkerRole};

/// Members that are overloaded or unhealthy at one instant.
#[derive(Clone, Debug, Default)]
pub(super) struct FleetAvailability {
    pub(super) overloaded: OverloadedWorkers,
    pub(super) unhealthy: BTreeMap<WorkerRank, HealthState>,
}

impl FleetAvailability {
    /// Returns the availability of a member. One whose probe is due counts as ready: the request
    /// that chooses it is the probe.
    pub(super) fn availability_of(&self, member: &FleetMember) -> WorkerAvailability {
        let health = self.unhealthy.get(&member.rank).copied();
        match health.map(WorkerAvailability::from) {
            _ if member.worker.draining => WorkerAvailability::Unavailable,
            Some(WorkerAvailability::Unhealthy) => WorkerAvailability::Unhealthy,
            _ if self.overloaded.contains(member.rank.worker) => WorkerAvailability::Overloaded,
            _ => WorkerAvailability::Ready,
        }
    }

    /// Returns whether no member is restricted.
    fn is_clear(&self) -> bool {
        self.unhealthy.is_empty() && self.overloaded.workers().is_empty()
    }

    /// Returns whether the next request must probe a member.
    pub(super) fn is_probe_forced(&self, member: &FleetMember) -> bool {
        self.unhealthy.get(&member.rank) == Some(&HealthState::ProbeForced)
    }

    /// Returns whether a member is healthy, accepts requests and is not overloaded.
    pub(super) fn is_unrestricted(&self, member: &FleetMember) -> bool {
        !self.unhealthy.contains_key(&member.rank)
            && self.availability_of(member) == WorkerAvailability::Ready
    }
}

/// Candidate pools of all phases.
#[derive(Debug)]
pub(super) struct PhasePools<'f> {
    /// Pool for the decode, or for both phases.
    pub(super) decode: Arc<CandidatePool<'f>>,
    /// Pool for the prefill; `None` if the decode worker runs it.
    pub(super) prefill: Option<Arc<CandidatePool<'f>>>,
    /// Whether any worker of the model is a prefill worker, eligible or not.
    pub(super) has_prefill_workers: bool,
    pub(super) availability: FleetAvailability,
}

/// Candidates of one phase.
#[derive(Clone, Debug)]
pub(super) struct CandidatePool<'f> {
    pub(super) constraints: Constraints,
    pub(super) members: Vec<&'f FleetMember>,
}

impl<'f> PhasePools<'f> {
    pub(super) fn find(
        fleet: &'f Fleet,
        request: &RouteRequest,
        settings: &RouterSettings,
        availability: impl FnOnce(&[&'f FleetMember]) -> FleetAvailability,
    ) -> Result<Self, RouteError> {
        let members = serving(fleet, request)?;
        let availability = availability(&members);
        let kinds = fleet.kinds(request.model.as_ref());
        Self::find_among(&members, kinds, request, settings, availability)
    }

    /// Finds the pools among members that serve the model and are of these kinds.
    pub(super) fn find_among(
        members: &[&'f FleetMember],
        kinds: WorkerKinds,
        request: &RouteRequest,
        settings: &RouterSettings,
        availability: FleetAvailability,
    ) -> Result<Self, RouteError> {
        if !members
            .iter()
            .any(|member| request.constraints.allows(&member.worker))
        {
            return Err(RouteError::Unsatisfied);
        }
        // A request whose prefill is complete is not rejected any more.
        let has_completed_prefill = matches!(request.phases, PhaseSelection::Decode(_));
        let may_reject = settings.when_all_overloaded == OverloadAction::Reject
            || request.priority.is_sheddable();
        let selector = PoolSelector {
            settings,
            availability: &availability,
            rejects_overloaded: may_reject && request.has_prompt() && !has_completed_prefill,
            kinds,
        };
        let prefill = selector.prefill(members, request)?;
        let is_disaggregated = prefill.is_some() || has_completed_prefill;
        let role = if is_disaggregated {
            WorkerRole::Decode
        } else {
            WorkerRole::Aggregated
        };
        let mut decode = selector.pool(
            members,
            Constraints {
                role,
                ..request.constraints.clone()
            },
        )?;
        if is_disaggregated {
            decode.prefer_decode_workers();
        } else if request.has_prompt() && request.decode_capability == DecodeCapability::DecodeOnly
        {
            decode.remove_decode_workers()?;
        }
        decode.apply_affinity(request);
        Ok(Self {
            decode: Arc::new(decode),
            prefill: prefill.map(Arc::new),
            has_prefill_workers: kinds.prefill,
            availability,
        })
    }
}

impl CandidatePool<'_> {
    /// Returns the model of the pool's members. A pool is never empty.
    pub(super) fn model(&self) -> &ModelName {
        &self.members[0].worker.model
    }

    /// Narrows the pool to its decode workers, if it has any.
    fn prefer_decode_workers(&mut self) {
        let is_decode = |member: &&FleetMember| member.worker.role == WorkerRole::Decode;
        if self.members.iter().any(is_decode) {
            self.members.retain(is_decode);
        }
    }

    /// Removes decode workers, which cannot compute prompts.
    fn remove_decode_workers(&mut self) -> Result<(), RouteError> {
        self.members
            .retain(|member| member.worker.role != WorkerRole::Decode);
        if self.members.is_empty() {
            return Err(RouteError::NoPrefill);
        }
        Ok(())
    }

    /// Applies soft affinity: narrows the pool to the session's last rank, if it is a candidate.
    fn apply_affinity(&mut self, request: &RouteRequest) {
        let Some(bound) = request.affinity else {
            return;
        };
        if self.members.iter().any(|member| member.rank == bound) {
            self.members.retain(|member| member.rank == bound);
            self.constraints.bound_rank = Some(bound);
        }
    }

    /// Narrows the pool by further demands. Returns `None` if no member meets them.
    pub(super) fn narrowed(&self, constraints: Constraints) -> Option<Self> {
        let members =
            eligible_members(&self.members, &constraints, |_| WorkerAvailability::Ready).ok()?;
        Some(Self {
            constraints,
            members,
        })
    }
}

struct PoolSelector<'a> {
    settings: &'a RouterSettings,
    availability: &'a FleetAvailability,
    /// Whether a request is rejected if all candidates are overloaded.
    rejects_overloaded: bool,
    /// Kinds of all workers of the model.
    kinds: WorkerKinds,
}

impl PoolSelector<'_> {
    fn pool<'f>(
        &self,
        members: &[&'f FleetMember],
        constraints: Constraints,
    ) -> Result<CandidatePool<'f>, RouteError> {
        let is_plain = self.kinds.is_uniform() && constraints.role != WorkerRole::Prefill;
        if is_plain
            && self.availability.is_clear()
            && constraints.admits_all()
            && !members.is_empty()
        {
            return Ok(CandidatePool {
                constraints,
                members: members.to_vec(),
            });
        }
        let found = eligible_members(members, &constraints, |member| {
            self.availability.availability_of(member)
        });
        let admit_overloaded = |error| match error {
            EligibilityError::AllEligibleWorkersOverloaded
            | EligibilityError::PinnedWorkerOverloaded(_)
                if !self.rejects_overloaded =>
            {
                eligible_members(members, &constraints, |member| {
                    match self.availability.availability_of(member) {
                        WorkerAvailability::Overloaded => WorkerAvailability::Ready,
                        availability => availability,
                    }
                })
            }
            _ => Err(error),
        };
        let members = found
            .or_else(admit_overloaded)
            .map_err(|error| RouteError::from_eligibility(error, &constraints))?;
        Ok(CandidatePool {
            constraints,
            members,
        })
    }

    fn prefill<'f>(
        &self,
        members: &[&'f FleetMember],
        request: &RouteRequest,
    ) -> Result<Option<CandidatePool<'f>>, RouteError> {
        let own_pin = request
            .prefill_pin
            .filter(|_| request.prefill_pin != request.constraints.pin);
        let is_required_by_model = members.iter().any(|member| {
            self.settings
                .prefill_required_models
                .contains(&member.worker.model)
        });
        // Aggregated workers compute the prompt unless the model requires a prefill worker.
        if own_pin.is_none() && !self.kinds.prefill && !self.kinds.decode && !is_required_by_model {
            return Ok(None);
        }
        if !request.has_prompt()
            || matches!(
                request.phases,
                PhaseSelection::Decode(_) | PhaseSelection::Local(_)
            )
        {
            return Ok(None);
        }
        let failed: &[WorkerId] = match &request.phases {
            PhaseSelection::PrefillFirst { failed } | PhaseSelection::Retry { failed } => failed,
            PhaseSelection::Both | PhaseSelection::Decode(_) | PhaseSelection::Local(_) => &[],
        };
        let members: Vec<&'f FleetMember> = members
            .iter()
            .copied()
            .filter(|member| !failed.contains(&member.rank.worker))
            .collect();
        let has_roles = members
            .iter()
            .any(|member| member.worker.role != WorkerRole::Aggregated);
        let is_required =
            self.settings.disaggregation.enforce && (has_roles || is_required_by_model);
        let prefill_workers = || {
            members
                .iter()
                .filter(|member| member.worker.role == WorkerRole::Prefill)
        };
        let is_allowed = |member: &&&'f FleetMember| request.constraints.allows(&member.worker);
        // If the gateway does not allow the pinned worker, the client is not at fault.
        if own_pin.is_some_and(|pin| {
            prefill_workers().any(|member| member.worker.id == pin.worker && !is_allowed(&member))
        }) {
            return Err(RouteError::Unsatisfied);
        }
        let pool = prefill_workers()
            .any(|member| is_allowed(&member))
            .then(|| self.pool(&members, prefill_constraints(request)));
        match (pool, own_pin) {
            (Some(Ok(pool)), _) => Ok(Some(pool)),
            // An invalid prefill pin is always the client's error. A pin that covers every phase
            // is not `own_pin` and applies to the other phases only.
            (Some(Err(error @ RouteError::Pin(_))), Some(_)) => Err(error),
            (None, Some(pin)) => Err(RouteError::Pin(EligibilityError::PinUnknown(pin.worker))),
            (Some(Err(error @ RouteError::Overloaded(_))), _) if is_required => Err(error),
            _ if is_required => Err(RouteError::NoPrefill),
            _ => Ok(None),
        }
    }
}

/// Returns the demands of a request on its prefill worker.
pub(super) fn prefill_constraints(request: &RouteRequest) -> Constraints {
    Constraints {
        role: WorkerRole::Prefill,
        pin: request.prefill_pin,
        pool: request.constraints.pool.clone(),
        endpoints: request.constraints.endpoints.clone(),
        required_taints: request.constraints.required_taints.clone(),
        preferred_taints: request.constraints.preferred_taints.clone(),
        adapter: request.constraints.adapter.clone(),
        ..Constraints::default()
    }
}

/// Returns, for each member, the reason why it cannot run the phase.
pub(super) fn exclusions<'c>(
    members: &[&FleetMember],
    constraints: &'c Constraints,
    availability: &FleetAvailability,
) -> Vec<Option<ExclusionReason<'c>>> {
    exclusion_reasons(members, constraints, |member| {
        availability.availability_of(member)
    })
}

/// Returns the members that serve the model of a request.
pub(super) fn serving<'f>(
    fleet: &'f Fleet,
    request: &RouteRequest,
) -> Result<Vec<&'f FleetMember>, RouteError> {
    let members: Vec<&FleetMember> = match &request.model {
        Some(model) => fleet
            .slots_serving(model)
            .iter()
            .filter_map(|slot| fleet.member(*slot))
            .collect(),
        None => fleet.members().collect(),
    };
    match (members.is_empty(), fleet.is_empty()) {
        (false, _) => Ok(members),
        (true, true) => Err(RouteError::NoFleet.for_gateway(&request.constraints)),
        (true, false) => Err(RouteError::NoCandidate.for_gateway(&request.constraints)),
    }
}
