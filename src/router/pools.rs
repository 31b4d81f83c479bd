//! Who may do which phase of a request: the pool for the decode (or for both phases), and the pool for the prefill where
//! there is one. Where prefill workers serve the model the prefill is theirs; while none of them can be chosen the decode
//! workers do it themselves, unless the operator wants that refused.

use std::collections::BTreeMap;
use std::sync::Arc;

use super::answer::RouteError;
use super::question::{Decoders, RouteRequest, Step};
use super::settings::{RouterSettings, WhenOverloaded};
use crate::fleet::{Fleet, Kinds, Member};
use crate::health::Condition;
use crate::schedule::{
    Constraints, Excluded, Ineligible, Overloaded, Standing, eligible, verdicts,
};
use crate::worker::{Role, WorkerId};

/// What is known right now of workers that are not simply there.
#[derive(Clone, Debug, Default)]
pub(super) struct Standings {
    pub(super) overloaded: Overloaded,
    pub(super) unwell: BTreeMap<WorkerId, Condition>,
}

impl Standings {
    /// One that is due to be tried is let in: the request that chooses it is the probe.
    pub(super) fn of(&self, member: &Member) -> Standing {
        match self.unwell.get(&member.rank.worker) {
            _ if member.worker.draining => Standing::Unavailable,
            Some(Condition::Out) => Standing::Unhealthy,
            _ if self.overloaded.contains(member.rank.worker) => Standing::Overloaded,
            _ => Standing::Ready,
        }
    }
}

impl Standings {
    /// Whether nothing is known against anybody.
    fn are_clear(&self) -> bool {
        self.unwell.is_empty() && self.overloaded.workers().is_empty()
    }

    /// Whether nothing speaks against a member: it answers, takes requests and has not too much to do.
    pub(super) fn is_well(&self, member: &Member) -> bool {
        !self.unwell.contains_key(&member.rank.worker) && self.of(member) == Standing::Ready
    }
}

/// Who may do what.
#[derive(Debug)]
pub(super) struct Pools<'f> {
    /// Who may decode, or do both phases.
    pub(super) decode: Arc<Pool<'f>>,
    /// Who may do the prefill; none where whoever decodes does it.
    pub(super) prefill: Option<Arc<Pool<'f>>>,
    /// Whether anybody who serves the model does nothing but prefills, chosen or not.
    pub(super) has_prefills: bool,
    pub(super) standings: Standings,
}

/// The candidates of one phase.
#[derive(Clone, Debug)]
pub(super) struct Pool<'f> {
    pub(super) constraints: Constraints,
    pub(super) members: Vec<&'f Member>,
}

impl<'f> Pools<'f> {
    pub(super) fn find(
        fleet: &'f Fleet,
        request: &RouteRequest,
        settings: &RouterSettings,
        standings: impl FnOnce(&[&'f Member]) -> Standings,
    ) -> Result<Self, RouteError> {
        let members = serving(fleet, request)?;
        let standings = standings(&members);
        Self::among(
            (&members, fleet.kinds(request.model.as_ref())),
            request,
            settings,
            standings,
        )
    }

    /// The same among members that serve the model, and are of these kinds.
    pub(super) fn among(
        (members, kinds): (&[&'f Member], Kinds),
        request: &RouteRequest,
        settings: &RouterSettings,
        standings: Standings,
    ) -> Result<Self, RouteError> {
        if !members
            .iter()
            .any(|member| request.constraints.lists(&member.worker))
        {
            return Err(RouteError::Unsatisfied);
        }
        // Who has had its prefill is not turned away any more.
        let takes_over = matches!(request.step, Step::Decode(_));
        let turned_away = settings.when_all_overloaded == WhenOverloaded::Reject
            || request.priority.is_sheddable();
        let rejects = turned_away && request.has_prompt() && !takes_over;
        let rules = Rules {
            settings,
            standings: &standings,
            rejects,
            kinds,
        };
        let prefill = rules.prefill(members, request)?;
        let apart = prefill.is_some() || takes_over;
        let role = if apart {
            Role::Decode
        } else {
            Role::Aggregated
        };
        let mut decode = rules.pool(
            members,
            Constraints {
                role,
                ..request.constraints.clone()
            },
        )?;
        if apart
            && decode
                .members
                .iter()
                .any(|member| member.worker.role == Role::Decode)
        {
            decode
                .members
                .retain(|member| member.worker.role == Role::Decode);
        }
        if !apart && request.has_prompt() && request.decoders == Decoders::OnlyDecode {
            decode
                .members
                .retain(|member| member.worker.role != Role::Decode);
            if decode.members.is_empty() {
                return Err(RouteError::NoPrefill);
            }
        }
        decode.bind(request);
        let (decode, prefill) = (Arc::new(decode), prefill.map(Arc::new));
        Ok(Self {
            decode,
            prefill,
            has_prefills: kinds.prefill,
            standings,
        })
    }
}

impl Pool<'_> {
    /// Soft affinity: the session's last worker rank, if it is still a candidate.
    fn bind(&mut self, request: &RouteRequest) {
        let Some(bound) = request.affinity else {
            return;
        };
        if self.members.iter().any(|member| member.rank == bound) {
            self.members.retain(|member| member.rank == bound);
            self.constraints.exclusive = Some(bound);
        }
    }

    /// Narrows the pool to who satisfies further demands; none where nobody does.
    pub(super) fn narrowed(&self, constraints: Constraints) -> Option<Self> {
        let members = eligible(&self.members, &constraints, |_| Standing::Ready).ok()?;
        Some(Self {
            constraints,
            members,
        })
    }
}

struct Rules<'a> {
    settings: &'a RouterSettings,
    standings: &'a Standings,
    /// Whether nobody is chosen while everybody is overloaded.
    rejects: bool,
    /// Of all who serve the model.
    kinds: Kinds,
}

impl Rules<'_> {
    fn pool<'f>(
        &self,
        members: &[&'f Member],
        constraints: Constraints,
    ) -> Result<Pool<'f>, RouteError> {
        let plain = self.kinds.is_plain() && constraints.role != Role::Prefill;
        if plain && self.standings.are_clear() && constraints.admit_all() && !members.is_empty() {
            return Ok(Pool {
                constraints,
                members: members.to_vec(),
            });
        }
        let found = eligible(members, &constraints, |member| self.standings.of(member));
        let relaxed = |error| match error {
            Ineligible::AllEligibleWorkersOverloaded | Ineligible::PinnedWorkerOverloaded(_)
                if !self.rejects =>
            {
                eligible(members, &constraints, |member| {
                    match self.standings.of(member) {
                        Standing::Overloaded => Standing::Ready,
                        standing => standing,
                    }
                })
            }
            _ => Err(error),
        };
        let members = found
            .or_else(relaxed)
            .map_err(|error| RouteError::of(error, &constraints))?;
        Ok(Pool {
            constraints,
            members,
        })
    }

    fn prefill<'f>(
        &self,
        members: &[&'f Member],
        request: &RouteRequest,
    ) -> Result<Option<Pool<'f>>, RouteError> {
        let own_pin = request
            .prefill_pin
            .filter(|_| request.prefill_pin != request.constraints.pin);
        let enforced_by_model = members
            .iter()
            .any(|member| self.settings.enforced.contains(&member.worker.model));
        // Aggregated workers compute the prompt unless the model requires a prefill worker.
        if own_pin.is_none() && !self.kinds.prefill && !self.kinds.decode && !enforced_by_model {
            return Ok(None);
        }
        if !request.has_prompt() || matches!(request.step, Step::Decode(_) | Step::Together(_)) {
            return Ok(None);
        }
        let failed: &[WorkerId] = match &request.step {
            Step::PrefillFirst { failed } | Step::Anew { failed } => failed,
            Step::Both | Step::Decode(_) | Step::Together(_) => &[],
        };
        let left: Vec<&'f Member> = members
            .iter()
            .copied()
            .filter(|member| !failed.contains(&member.rank.worker))
            .collect();
        let members = &left[..];
        let apart = members
            .iter()
            .any(|member| member.worker.role != Role::Aggregated);
        let enforce = self.settings.disaggregation.enforce && (apart || enforced_by_model);
        let prefills = || {
            members
                .iter()
                .filter(|member| member.worker.role == Role::Prefill)
        };
        let listed = |member: &&&'f Member| request.constraints.lists(&member.worker);
        // A pin to somebody whom the gateway does not allow is no mistake of the client's.
        if own_pin.is_some_and(|pin| {
            prefills().any(|member| member.worker.id == pin.worker && !listed(&member))
        }) {
            return Err(RouteError::Unsatisfied);
        }
        let exists = prefills().any(|member| listed(&member));
        match (
            exists.then(|| self.pool(members, for_prefill(request))),
            own_pin,
        ) {
            (Some(Ok(pool)), _) => Ok(Some(pool)),
            // A pin that cannot be kept is the client's mistake, whatever else could be done. Where it named a worker for
            // every phase, it is meant for the others only.
            (Some(Err(error @ RouteError::Pin(_))), Some(_)) => Err(error),
            (None, Some(pin)) => Err(RouteError::Pin(Ineligible::PinUnknown(pin.worker))),
            (Some(Err(error @ RouteError::Overloaded(_))), _) if enforce => Err(error),
            _ if enforce => Err(RouteError::NoPrefill),
            _ => Ok(None),
        }
    }
}

/// What a request demands of whoever does its prefill.
pub(super) fn for_prefill(request: &RouteRequest) -> Constraints {
    Constraints {
        role: Role::Prefill,
        pin: request.prefill_pin,
        pool: request.constraints.pool.clone(),
        endpoints: request.constraints.endpoints.clone(),
        required_taints: request.constraints.required_taints.clone(),
        preferred_taints: request.constraints.preferred_taints.clone(),
        adapter: request.constraints.adapter.clone(),
        ..Constraints::default()
    }
}

/// For each member why it may not do the phase.
pub(super) fn excluded<'c>(
    members: &[&Member],
    constraints: &'c Constraints,
    standings: &Standings,
) -> Vec<Option<Excluded<'c>>> {
    verdicts(members, constraints, |member| standings.of(member))
}

/// Everybody who serves the model of a request.
pub(super) fn serving<'f>(
    fleet: &'f Fleet,
    request: &RouteRequest,
) -> Result<Vec<&'f Member>, RouteError> {
    let members: Vec<&Member> = match &request.model {
        Some(model) => fleet
            .serving(model)
            .iter()
            .filter_map(|slot| fleet.member(*slot))
            .collect(),
        None => fleet.members().collect(),
    };
    match (members.is_empty(), fleet.is_empty()) {
        (false, _) => Ok(members),
        (true, true) => Err(RouteError::NoFleet.under(&request.constraints)),
        (true, false) => Err(RouteError::NoCandidate.under(&request.constraints)),
    }
}
