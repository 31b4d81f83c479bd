//! Health of one rank: its evidence, its state, and the requests that wait at it.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::evidence::{EvidenceSummary, FailureEvidence};
use super::outcome::RequestOutcome;
use super::report::{HealthChange, HealthSignal, PeerGroup};
use super::waiting::WaitingRequest;
use super::{HealthRules, HealthState};
use crate::block::SequenceHash;

/// Duration of the first ejection.
const BASE_EJECTION_TIME: Duration = Duration::from_secs(1);

/// Maximum duration of an ejection, however often a probe failed.
const MAX_EJECTION_TIME: Duration = Duration::from_secs(20);

/// Maximum number of ejections of one rank that health checks end early before a request succeeds.
/// The endpoint of a crash-looping engine passes its health check now and then.
const MAX_EARLY_ENDS: u32 = 3;

/// A suspect rank is avoided for this time, unless an outcome of its peers decides earlier.
const MAX_SUSPECT_TIME: Duration = Duration::from_secs(5);

/// A probe that has been due for this time is forced onto the next request, unless the last health
/// check failed.
const MAX_PROBE_DELAY: Duration = Duration::from_secs(5);

/// A request that repeats or continues a failed prompt within this time may be a retry.
const RETRY_WINDOW: Duration = Duration::from_secs(10);

/// Share of the score at the suspicion below which the suspicion is withdrawn.
const WITHDRAWAL_SHARE: f64 = 0.75;

#[derive(Debug)]
pub(super) struct RankRecord {
    pub(super) group: PeerGroup,
    pub(super) state: RankState,
    /// Time of the last change of `state`.
    pub(super) since: Instant,
    pub(super) evidence: Option<FailureEvidence>,
    pub(super) unreachable_in_a_row: u32,
    /// Number of failed requests by kind, since the rank joined.
    pub(super) failures: BTreeMap<RequestOutcome, u64>,
    pub(super) waiting: HashMap<u64, WaitingRequest>,
    /// Time of the last output or completed response.
    pub(super) progress_at: Option<Instant>,
    pub(super) signals: BTreeSet<HealthSignal>,
}

#[derive(Debug)]
pub(super) enum RankState {
    InService,
    /// Avoided until `until`, or until the score falls below `threshold`.
    Suspect {
        until: Instant,
        threshold: f64,
    },
    Ejected(RankEjection),
}

#[derive(Debug)]
pub(super) struct RankEjection {
    pub(super) cause: RequestOutcome,
    /// The rank returns if the score falls below this value, because its peers fail as well.
    pub(super) threshold: f64,
    pub(super) until: Instant,
    pub(super) period: Duration,
    /// Ticket of the running probe.
    pub(super) probe: Option<u64>,
    /// Whether the last health check failed.
    pub(super) is_down: bool,
    /// Number of times a health check ended this ejection early.
    pub(super) early_ends: u32,
}

impl RankRecord {
    pub(super) fn new(group: PeerGroup, now: Instant) -> Self {
        Self {
            group,
            state: RankState::InService,
            since: now,
            evidence: None,
            unreachable_in_a_row: 0,
            failures: BTreeMap::new(),
            waiting: HashMap::new(),
            progress_at: None,
            signals: BTreeSet::new(),
        }
    }

    pub(super) fn health(&self, now: Instant) -> HealthState {
        match &self.state {
            RankState::InService => HealthState::Healthy,
            RankState::Suspect { .. } => HealthState::Suspect,
            RankState::Ejected(ejection) => ejection.health(now),
        }
    }

    /// Returns the health for a request. If its prompt failed on a healthy rank, the rank is suspect
    /// for it. If a probe is due and the request may be a retry, the rank is ejected for it.
    pub(super) fn health_for(&self, prompt: &[SequenceHash], now: Instant) -> HealthState {
        let health = self.health(now);
        let evidence = self.evidence.as_ref();
        let Some(failed_at) = evidence.and_then(|held| held.last_failure_time(prompt)) else {
            return health;
        };
        let may_be_retry = now.saturating_duration_since(failed_at) < RETRY_WINDOW;
        match health {
            HealthState::Healthy => HealthState::Suspect,
            HealthState::ProbeDue | HealthState::ProbeForced if may_be_retry => {
                HealthState::Ejected
            }
            _ => health,
        }
    }

    /// Removes the evidence of a rank in service if it has expired. Returns whether it had.
    pub(super) fn remove_expired_evidence(&mut self, now: Instant) -> bool {
        let is_expired = matches!(self.state, RankState::InService)
            && self
                .evidence
                .as_ref()
                .is_some_and(|held| held.is_expired(now));
        if is_expired {
            self.evidence = None;
        }
        is_expired
    }

    pub(super) fn ejection_mut(&mut self) -> Option<&mut RankEjection> {
        match &mut self.state {
            RankState::Ejected(ejection) => Some(ejection),
            RankState::InService | RankState::Suspect { .. } => None,
        }
    }

    /// Returns whether the rank is avoided for another reason than its connections.
    pub(super) fn is_avoided_for_application_failures(&self) -> bool {
        match &self.state {
            RankState::InService => false,
            RankState::Suspect { .. } => true,
            RankState::Ejected(ejection) => ejection.cause != RequestOutcome::Unreachable,
        }
    }

    pub(super) fn score(&self) -> f64 {
        self.evidence.as_ref().map_or(0.0, FailureEvidence::score)
    }

    pub(super) fn summary(&self) -> EvidenceSummary {
        let evidence = self.evidence.as_ref();
        evidence.map(FailureEvidence::summary).unwrap_or_default()
    }

    /// Enters a state. Returns the evidence so far.
    pub(super) fn enter(&mut self, state: RankState, now: Instant) -> EvidenceSummary {
        self.state = state;
        self.since = now;
        self.summary()
    }

    /// Returns the next state according to the evidence, if it differs. `may_avoid` states whether
    /// enough peers remain in service.
    pub(super) fn next_state(
        &self,
        rules: HealthRules,
        may_avoid: bool,
        now: Instant,
    ) -> Option<StateTransition> {
        let failures = f64::from(rules.consecutive_failures);
        let limit = if self.signals.is_empty() {
            failures
        } else {
            failures.min(1.0)
        };
        let evidence = self.evidence.as_ref()?;
        let score = evidence.score();
        let is_proven = score >= limit && may_avoid;
        let cause = evidence.summary().failures.most_frequent()?;
        let ejected = |cause, threshold| StateTransition {
            state: RankState::Ejected(RankEjection::new(cause, threshold, now)),
            change: HealthChange::Ejected(BASE_EJECTION_TIME),
        };
        let returned = |change| StateTransition {
            state: RankState::InService,
            change,
        };
        match &self.state {
            RankState::InService if f64::from(self.unreachable_in_a_row) >= limit => {
                Some(ejected(RequestOutcome::Unreachable, 0.0))
            }
            RankState::InService if is_proven && evidence.have_peers_delivered() => {
                Some(ejected(cause, WITHDRAWAL_SHARE * limit))
            }
            RankState::InService if is_proven && !evidence.have_peers_failed() => {
                Some(StateTransition {
                    state: RankState::suspect(limit, now),
                    change: HealthChange::Suspected,
                })
            }
            RankState::Suspect { threshold, .. } if score < *threshold => {
                Some(returned(HealthChange::Cleared))
            }
            RankState::Suspect { threshold, .. } if evidence.have_peers_delivered() => {
                Some(ejected(cause, *threshold))
            }
            RankState::Suspect { until, .. } if *until <= now => {
                Some(returned(HealthChange::Cleared))
            }
            RankState::Ejected(ejection) if score < ejection.threshold => {
                Some(returned(HealthChange::Readmitted))
            }
            _ => None,
        }
    }
}

/// Next state of a rank.
pub(super) struct StateTransition {
    pub(super) state: RankState,
    pub(super) change: HealthChange,
}

impl RankState {
    /// Creates the state of a rank whose evidence has this score.
    pub(super) fn suspect(score: f64, now: Instant) -> Self {
        RankState::Suspect {
            until: add_saturating(now, MAX_SUSPECT_TIME),
            threshold: WITHDRAWAL_SHARE * score,
        }
    }
}

impl RankEjection {
    fn new(cause: RequestOutcome, threshold: f64, now: Instant) -> Self {
        Self {
            cause,
            threshold,
            until: add_saturating(now, BASE_EJECTION_TIME),
            period: BASE_EJECTION_TIME,
            probe: None,
            is_down: false,
            early_ends: 0,
        }
    }

    fn health(&self, now: Instant) -> HealthState {
        if self.probe.is_some() {
            return HealthState::Probing;
        }
        match now.checked_duration_since(self.until) {
            None => HealthState::Ejected,
            Some(delay) if delay >= MAX_PROBE_DELAY && !self.is_down => HealthState::ProbeForced,
            Some(_) => HealthState::ProbeDue,
        }
    }

    /// Doubles the ejection time after a failed probe, within these limits.
    pub(super) fn extend(&mut self, min_time: Duration, now: Instant) -> HealthChange {
        let doubled = self.period.saturating_mul(2);
        self.period = doubled.max(min_time).min(MAX_EJECTION_TIME);
        self.until = add_saturating(now, self.period);
        HealthChange::EjectionExtended(self.period)
    }

    /// Handles a health check. Returns whether it ends the ejection.
    pub(super) fn on_health_check(&mut self, is_healthy: bool, now: Instant) -> bool {
        let is_restarted = is_healthy && self.is_down && self.early_ends < MAX_EARLY_ENDS;
        let has_ended = is_restarted && self.can_health_check_end();
        if has_ended {
            self.until = self.until.min(now);
            if self.early_ends == 0 {
                self.period = self.period.min(BASE_EJECTION_TIME);
            }
            self.early_ends += 1;
        }
        self.is_down = !is_healthy;
        has_ended
    }

    /// Returns whether a health check can end the ejection: the worker was down, so that a passed
    /// check shows a restart.
    pub(super) fn can_health_check_end(&self) -> bool {
        matches!(
            self.cause,
            RequestOutcome::Unreachable | RequestOutcome::ServerError
        )
    }

    /// Returns whether the outcome of a probe confirms the ejection. A rejected request or reported
    /// overload shows that the worker is alive.
    pub(super) fn is_confirmed_by(&self, outcome: RequestOutcome) -> bool {
        match outcome {
            RequestOutcome::Rejected => !matches!(
                self.cause,
                RequestOutcome::Unreachable
                    | RequestOutcome::NoResponse
                    | RequestOutcome::NoContent
            ),
            RequestOutcome::Overloaded => self.cause == RequestOutcome::Overloaded,
            _ => outcome.is_failure(),
        }
    }
}

/// Adds a period. If the sum exceeds the range of the clock, the period ends at once.
fn add_saturating(now: Instant, period: Duration) -> Instant {
    now.checked_add(period).unwrap_or(now)
}
