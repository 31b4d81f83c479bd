//! Health of all worker ranks as a function of the outcomes of their requests and of time.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::time::{Duration, Instant};

use super::evidence::FailureEvidence;
use super::outcome::RequestOutcome;
use super::peer_group::PeerGroupRecord;
use super::rank::{RankRecord, RankState};
use super::report::{HealthChange, HealthSignal, HealthTransition, PeerGroup, RankHealthReport};
use super::waiting::WaitingRequest;
use super::{HealthRules, HealthState};
use crate::block::SequenceHash;
use crate::worker::{WorkerId, WorkerRank};

/// Maximum time for which a failed request stays booked.
const MAX_HOLD_TIME: Duration = Duration::from_secs(10);

/// Hold time of a failed request until the group has completed its first request.
const INITIAL_HOLD_TIME: Duration = Duration::from_secs(3);

/// Health of all ranks.
#[derive(Debug, Default)]
pub(crate) struct HealthModel {
    /// Running ejections keep their end if the rules change.
    pub(crate) rules: HealthRules,
    pub(super) ranks: HashMap<WorkerRank, RankRecord>,
    pub(super) groups: HashMap<PeerGroup, PeerGroupRecord>,
    pub(super) last_ticket: u64,
    /// Ranks that are suspect or ejected.
    pub(super) avoided: BTreeSet<WorkerRank>,
}

/// Outcome of one request at a rank.
#[derive(Clone, Copy, Debug)]
pub(super) struct OutcomeReport<'a> {
    pub(super) rank: WorkerRank,
    pub(super) outcome: RequestOutcome,
    /// Sequence hashes of the prompt.
    pub(super) prompt: &'a [SequenceHash],
}

impl HealthModel {
    /// Replaces the set of ranks. Records of remaining ranks are kept.
    pub(super) fn set_members(
        &mut self,
        members: impl Iterator<Item = (WorkerRank, PeerGroup)>,
        now: Instant,
    ) {
        let mut previous = std::mem::take(&mut self.ranks);
        self.groups.values_mut().for_each(|group| {
            group.members.clear();
            group.with_evidence.clear();
        });
        for (rank, group) in members {
            let record = previous
                .remove(&rank)
                .filter(|record| record.group == group)
                .unwrap_or_else(|| RankRecord::new(group.clone(), now));
            let group = self.groups.entry(group).or_default();
            group.members.insert(rank);
            if record.evidence.is_some() {
                group.with_evidence.insert(rank);
            }
            self.ranks.insert(rank, record);
        }
        self.groups.retain(|_, group| !group.members.is_empty());
        self.update_avoided();
    }

    /// Returns whether all ranks are in service, and no prompt avoids one.
    pub(super) fn is_clear(&self) -> bool {
        let mut groups = self.groups.values();
        self.avoided.is_empty() && groups.all(|group| group.with_evidence.is_empty())
    }

    pub(super) fn health(&self, rank: WorkerRank, now: Instant) -> HealthState {
        self.ranks
            .get(&rank)
            .map_or(HealthState::Healthy, |record| record.health(now))
    }

    /// Returns the ranks that are not in service, or on which this prompt failed. If another rank
    /// delivers the prompt, it is not at fault.
    pub(super) fn avoided_ranks(
        &self,
        prompt: &[SequenceHash],
        now: Instant,
    ) -> BTreeMap<WorkerRank, HealthState> {
        let groups = self.groups.values();
        let with_evidence = groups.flat_map(|group| &group.with_evidence);
        self.avoided
            .iter()
            .chain(with_evidence)
            .filter_map(|rank| Some((*rank, self.ranks.get(rank)?.health_for(prompt, now))))
            .filter(|(_, health)| *health != HealthState::Healthy)
            .collect()
    }

    /// Returns the health of all ranks that are not in service, have failed recently, or may be
    /// failing according to a signal.
    pub(crate) fn report(&self, now: Instant) -> Vec<RankHealthReport> {
        let row = |(rank, record): (&WorkerRank, &RankRecord)| RankHealthReport {
            rank: *rank,
            health: record.health(now),
            age_seconds: now.saturating_duration_since(record.since).as_secs(),
            next_probe_seconds: match &record.state {
                RankState::Ejected(ejection) => {
                    Some(ejection.until.saturating_duration_since(now).as_secs())
                }
                RankState::InService | RankState::Suspect { .. } => None,
            },
            evidence: record.summary(),
            signals: record.signals.clone(),
        };
        let is_noted = |(_, record): &(&WorkerRank, &RankRecord)| {
            record.evidence.is_some()
                || !record.signals.is_empty()
                || !matches!(record.state, RankState::InService)
        };
        let mut rows: Vec<_> = self.ranks.iter().filter(is_noted).map(row).collect();
        rows.sort_by_key(|row| row.rank);
        rows
    }

    /// Returns the number of failed requests of each rank by kind.
    pub(crate) fn failed_requests(&self) -> Vec<(WorkerRank, RequestOutcome, u64)> {
        let ranks = self.ranks.iter();
        ranks
            .flat_map(|(rank, record)| {
                let counts = record.failures.iter();
                counts.map(|(kind, count)| (*rank, *kind, *count))
            })
            .collect()
    }

    /// Registers a request that is sent to a rank. `estimate` is the estimated time to its first
    /// content, if known. Returns its ticket. If `must_probe`, returns `None` unless the probe of
    /// the rank is due.
    pub(super) fn start(
        &mut self,
        rank: WorkerRank,
        estimate: Option<Duration>,
        must_probe: bool,
        now: Instant,
    ) -> Option<u64> {
        let ticket = self.last_ticket + 1;
        let Some(record) = self.ranks.get_mut(&rank) else {
            return (!must_probe).then_some(ticket);
        };
        let is_due = record.health(now).is_probe_due();
        if must_probe && !is_due {
            return None;
        }
        self.last_ticket = ticket;
        if let Some(group) = self.groups.get_mut(&record.group) {
            group.add_request(now);
        }
        if let Some(ejection) = record.ejection_mut().filter(|_| is_due) {
            ejection.probe = Some(ticket);
        }
        if let Some(estimate) = estimate {
            let waiting = WaitingRequest::new(estimate, now);
            record.waiting.insert(ticket, waiting);
        }
        Some(ticket)
    }

    /// Records the response headers of a request.
    pub(super) fn on_response(&mut self, rank: WorkerRank, ticket: u64) {
        let record = self.ranks.get_mut(&rank);
        let waiting = record.and_then(|record| record.waiting.get_mut(&ticket));
        if let Some(waiting) = waiting {
            waiting.has_response = true;
        }
    }

    /// Records the outcome of a registered request.
    pub(super) fn finish(
        &mut self,
        ticket: u64,
        report: OutcomeReport<'_>,
        now: Instant,
    ) -> Vec<HealthTransition> {
        let Some(record) = self.ranks.get_mut(&report.rank) else {
            return Vec::new();
        };
        let waiting = record.waiting.get(&ticket).copied();
        // Without any delivery, the responses may not be observed at all.
        let group = self.groups.get(&record.group);
        let is_late = group
            .map(|group| group.content_times)
            .filter(|times| times.is_observed())
            .zip(waiting)
            .is_some_and(|(times, waiting)| waiting.is_cancelled_late(times, now));
        let is_overdue = waiting.is_some_and(|waiting| waiting.is_overdue);
        if report.outcome == RequestOutcome::Cancelled && !is_late && !is_overdue {
            self.abandon(report.rank, ticket);
            return Vec::new();
        }
        record.waiting.remove(&ticket);
        if report.outcome == RequestOutcome::Delivered
            && let Some(waiting) = waiting
            && let Some(group) = self.groups.get_mut(&record.group)
        {
            let elapsed = now.saturating_duration_since(waiting.sent_at);
            group.content_times.add(elapsed, waiting.estimate);
        }
        if record
            .ejection_mut()
            .is_some_and(|ejection| ejection.probe == Some(ticket))
        {
            return self.finish_probe(report, now);
        }
        // The failure of an overdue request was counted when it became overdue.
        if is_overdue && report.outcome != RequestOutcome::Delivered {
            let record = self.ranks.get_mut(&report.rank);
            if let Some(evidence) = record.and_then(|record| record.evidence.as_mut()) {
                evidence.add_overdue_prompt(report.prompt, now);
            }
            return Vec::new();
        }
        self.record(report, now)
    }

    pub(super) fn finish_probe(
        &mut self,
        report: OutcomeReport<'_>,
        now: Instant,
    ) -> Vec<HealthTransition> {
        if report.outcome == RequestOutcome::Delivered {
            return self.record(report, now);
        }
        self.count(report.rank, report.outcome, now);
        let Some(record) = self.ranks.get_mut(&report.rank) else {
            return Vec::new();
        };
        // Envoy repeats a request whose connection failed, so such a probe costs the client nothing.
        let group = self.groups.get(&record.group);
        let group = group.filter(|_| report.outcome != RequestOutcome::Unreachable);
        let min_time = group
            .map(PeerGroupRecord::min_probe_period)
            .unwrap_or_default();
        let evidence = record.summary();
        let Some(ejection) = record.ejection_mut() else {
            return Vec::new();
        };
        ejection.probe = None;
        if !ejection.is_confirmed_by(report.outcome) {
            return Vec::new();
        }
        vec![HealthTransition {
            rank: report.rank,
            change: ejection.extend(min_time, now),
            evidence,
        }]
    }

    /// Removes a registered request whose outcome is unknown. A probe becomes due again.
    pub(super) fn abandon(&mut self, rank: WorkerRank, ticket: u64) {
        let Some(record) = self.ranks.get_mut(&rank) else {
            return;
        };
        record.waiting.remove(&ticket);
        if let Some(ejection) = record.ejection_mut()
            && ejection.probe == Some(ticket)
        {
            ejection.probe = None;
        }
    }

    /// Records that a rank has generated output or completed a response.
    pub(crate) fn on_progress(&mut self, rank: WorkerRank, now: Instant) {
        if let Some(record) = self.ranks.get_mut(&rank) {
            record.progress_at = Some(now);
        }
    }

    /// Records the duration of a request that was delivered.
    pub(super) fn record_service_time(&mut self, rank: WorkerRank, time: Duration) {
        if let Some(record) = self.ranks.get(&rank)
            && let Some(group) = self.groups.get_mut(&record.group)
        {
            group.service_time.add(time);
        }
    }

    /// Returns the time for which a failed request stays booked on a rank: the expected service
    /// time. A rank that fails at once then does not appear less loaded than its peers. `None` if no
    /// evidence distinguishes the rank from its peers.
    pub(super) fn hold_time(&self, rank: WorkerRank) -> Option<Duration> {
        let record = self.ranks.get(&rank)?;
        let group = self.groups.get(&record.group)?;
        let has_evidence = group.members.len() > 1 && record.score() > 0.0;
        let service_time = group.service_time.get().unwrap_or(INITIAL_HOLD_TIME);
        has_evidence.then(|| service_time.min(MAX_HOLD_TIME))
    }

    /// Records the outcome of a request that is not registered.
    pub(super) fn record(
        &mut self,
        report: OutcomeReport<'_>,
        now: Instant,
    ) -> Vec<HealthTransition> {
        self.count(report.rank, report.outcome, now);
        let Some(record) = self.ranks.get(&report.rank) else {
            return Vec::new();
        };
        let group = record.group.clone();
        match report.outcome {
            RequestOutcome::Inconclusive => Vec::new(),
            RequestOutcome::Delivered => self.record_delivery(report, &group, now),
            _ if self.rules.consecutive_failures == 0 => Vec::new(),
            _ => self.record_failure(report, &group, now),
        }
    }

    fn record_delivery(
        &mut self,
        report: OutcomeReport<'_>,
        group: &PeerGroup,
        now: Instant,
    ) -> Vec<HealthTransition> {
        let mut changes = Vec::new();
        let rank = report.rank;
        if let Some(record) = self.ranks.get_mut(&rank) {
            record.unreachable_in_a_row = 0;
            record.progress_at = Some(now);
            let evidence = record.summary();
            let change = match record.state {
                RankState::InService => None,
                RankState::Suspect { .. } => Some(HealthChange::Cleared),
                RankState::Ejected(_) => Some(HealthChange::Readmitted),
            };
            if let Some(evidence) = &mut record.evidence {
                evidence.add_delivery();
            }
            if change.is_some() || record.score() <= 0.0 {
                record.evidence = None;
            }
            if let Some(change) = change {
                record.enter(RankState::InService, now);
                changes.push(HealthTransition {
                    rank,
                    change,
                    evidence,
                });
                self.update_avoided();
            }
        }
        changes.extend(self.apply_peer_outcome(report, group, now));
        changes
    }

    fn record_failure(
        &mut self,
        report: OutcomeReport<'_>,
        group: &PeerGroup,
        now: Instant,
    ) -> Vec<HealthTransition> {
        let OutcomeReport {
            rank,
            outcome,
            prompt,
        } = report;
        if outcome.is_application_failure() && outcome != RequestOutcome::Overloaded {
            if self.is_faulty_prompt(group, prompt) {
                return Vec::new();
            }
            let withdrawn = self.withdraw_prompt(rank, group, prompt);
            if !withdrawn.is_empty() {
                return self.evaluate_all(withdrawn, now);
            }
        }
        let group_record = self.groups.get(group);
        let history = group_record.map(|group| group.history).unwrap_or_default();
        let Some(record) = self.ranks.get_mut(&rank) else {
            return Vec::new();
        };
        if outcome == RequestOutcome::Unreachable {
            record.unreachable_in_a_row = record.unreachable_in_a_row.saturating_add(1);
        }
        record.remove_expired_evidence(now);
        record
            .evidence
            .get_or_insert_with(|| FailureEvidence::new(history, now))
            .add_failure(outcome, prompt, now);
        if let Some(group) = self.groups.get_mut(group) {
            group.with_evidence.insert(rank);
        }
        let mut changes = self.evaluate_all(vec![rank], now);
        changes.extend(self.apply_peer_outcome(report, group, now));
        changes
    }

    /// Handles the passage of time: overdue requests, suspicions that end, and evidence that expires.
    /// Must be called several times per second.
    pub(super) fn on_tick(&mut self, now: Instant) -> Vec<HealthTransition> {
        let mut changes = Vec::new();
        let ranks: Vec<WorkerRank> = self.ranks.keys().copied().collect();
        for rank in ranks {
            changes.extend(self.mark_overdue(rank, now));
            let Some(record) = self.ranks.get_mut(&rank) else {
                continue;
            };
            if matches!(record.state, RankState::Suspect { .. }) {
                changes.extend(self.evaluate(rank, now));
            } else if record.remove_expired_evidence(now)
                && let Some(group) = self.groups.get_mut(&record.group)
            {
                group.with_evidence.remove(&rank);
            }
        }
        changes
    }

    /// Records whether a signal indicates a failing worker. While a signal is set, one failed
    /// request suffices to eject a rank.
    pub(crate) fn set_signal(&mut self, worker: WorkerId, signal: HealthSignal, is_failing: bool) {
        let ranks = self.ranks.iter_mut();
        for (_, record) in ranks.filter(|(rank, _)| rank.worker == worker) {
            if is_failing {
                record.signals.insert(signal);
            } else {
                record.signals.remove(&signal);
            }
        }
    }

    /// Records the result of a health check of an ejected worker. The first passed check after a
    /// failed one ends the ejection, and the next request may probe the worker. A rank that failed
    /// although its endpoint answers is not affected. Returns whether an ejection ended.
    pub(super) fn on_health_check(
        &mut self,
        worker: WorkerId,
        is_healthy: bool,
        now: Instant,
    ) -> bool {
        let mut has_ended = false;
        let ranks = self.ranks.iter_mut();
        for (_, record) in ranks.filter(|(rank, _)| rank.worker == worker) {
            let Some(ejection) = record.ejection_mut() else {
                continue;
            };
            has_ended |= ejection.on_health_check(is_healthy, now);
        }
        has_ended
    }

    pub(super) fn update_avoided(&mut self) {
        let ranks = self.ranks.iter();
        self.avoided = ranks
            .filter(|(_, record)| !matches!(record.state, RankState::InService))
            .map(|(rank, _)| *rank)
            .collect();
    }
}
