//! Comparison of a rank with its peers, the other ranks of its peer group.

use std::time::Instant;

use super::evidence::PromptEnd;
use super::model::{HealthModel, OutcomeReport};
use super::outcome::RequestOutcome;
use super::rank::{RankRecord, RankState};
use super::report::{HealthChange, HealthTransition, PeerGroup};
use crate::block::SequenceHash;
use crate::worker::WorkerRank;

/// Maximum number of remembered prompts per group that fail on several ranks.
const MAX_FAULTY_PROMPTS: usize = 256;

impl HealthModel {
    /// Adds an outcome of one rank to the history of its group and to the evidence against its
    /// peers.
    pub(super) fn apply_peer_outcome(
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
        let Some(group_record) = self.groups.get_mut(group) else {
            return Vec::new();
        };
        group_record.history.add(outcome);
        if group_record.with_evidence.is_empty() {
            return Vec::new();
        }
        let ranks = &mut self.ranks;
        group_record.with_evidence.retain(|with_evidence| {
            let evidence = ranks
                .get(with_evidence)
                .and_then(|record| record.evidence.as_ref());
            evidence.is_some()
        });
        let peers: Vec<WorkerRank> = group_record
            .with_evidence
            .iter()
            .copied()
            .filter(|with_evidence| *with_evidence != rank)
            .collect();
        for peer in &peers {
            let record = ranks.get_mut(peer);
            if let Some(evidence) = record.and_then(|record| record.evidence.as_mut()) {
                evidence.add_peer_outcome(outcome, prompt);
            }
        }
        self.evaluate_all(peers, now)
    }

    pub(super) fn is_faulty_prompt(&self, group: &PeerGroup, prompt: &[SequenceHash]) -> bool {
        self.groups.get(group).is_some_and(|group| {
            group
                .faulty_prompts
                .iter()
                .any(|faulty| faulty.is_continued_by(prompt))
        })
    }

    /// Removes the failures of a prompt from the evidence against the peers of a rank, on which it
    /// failed now as well. Returns these peers.
    pub(super) fn withdraw_prompt(
        &mut self,
        rank: WorkerRank,
        group: &PeerGroup,
        prompt: &[SequenceHash],
    ) -> Vec<WorkerRank> {
        let (Some(end), Some(group)) = (PromptEnd::new(prompt), self.groups.get_mut(group)) else {
            return Vec::new();
        };
        let mut withdrawn = Vec::new();
        for peer in group.with_evidence.iter().filter(|peer| **peer != rank) {
            let record = self.ranks.get_mut(peer);
            let evidence = record.and_then(|record| record.evidence.as_mut());
            if evidence.is_some_and(|evidence| evidence.withdraw_prompt(prompt)) {
                withdrawn.push(*peer);
            }
        }
        if !withdrawn.is_empty() {
            group.faulty_prompts.push_back(end);
            if group.faulty_prompts.len() > MAX_FAULTY_PROMPTS {
                group.faulty_prompts.pop_front();
            }
        }
        withdrawn
    }

    pub(super) fn evaluate_all(
        &mut self,
        ranks: Vec<WorkerRank>,
        now: Instant,
    ) -> Vec<HealthTransition> {
        let evaluate = |rank| self.evaluate(rank, now);
        ranks.into_iter().filter_map(evaluate).collect()
    }

    /// Changes the state of a rank according to its evidence.
    pub(super) fn evaluate(&mut self, rank: WorkerRank, now: Instant) -> Option<HealthTransition> {
        let may_avoid = self.may_avoid_another(rank);
        let rules = self.rules;
        let record = self.ranks.get_mut(&rank)?;
        let transition = record.next_state(rules, may_avoid, now)?;
        let evidence = record.enter(transition.state, now);
        self.update_avoided();
        Some(HealthTransition {
            rank,
            change: transition.change,
            evidence,
        })
    }

    /// Returns whether another rank may be avoided for its answers: at most half of a group.
    pub(super) fn may_avoid_another(&self, rank: WorkerRank) -> bool {
        let Some(group) = self
            .ranks
            .get(&rank)
            .and_then(|record| self.groups.get(&record.group))
        else {
            return false;
        };
        let is_avoided = |rank: &&WorkerRank| {
            self.ranks
                .get(*rank)
                .is_some_and(RankRecord::is_avoided_for_application_failures)
        };
        let avoided = group.members.iter().filter(is_avoided).count();
        avoided < group.members.len() / 2
    }

    /// Counts the overdue requests of a rank as failures, if the rank has made no progress since
    /// they became due. One of them is enough to avoid the rank.
    pub(super) fn mark_overdue(&mut self, rank: WorkerRank, now: Instant) -> Vec<HealthTransition> {
        let Some(record) = self.ranks.get_mut(&rank) else {
            return Vec::new();
        };
        // Without any delivery, the responses may not be observed at all.
        let group = self.groups.get(&record.group);
        let times = group.map(|group| group.content_times);
        let Some(times) = times.filter(|times| times.is_observed()) else {
            return Vec::new();
        };
        let progress_at = record.progress_at;
        let mut overdue = Vec::new();
        for (ticket, waiting) in &mut record.waiting {
            if waiting.mark_if_overdue(progress_at, times, now) {
                overdue.push((*ticket, waiting.has_response));
            }
        }
        let mut changes = Vec::new();
        for (ticket, has_response) in overdue {
            let outcome = if has_response {
                RequestOutcome::NoContent
            } else {
                RequestOutcome::NoResponse
            };
            let report = OutcomeReport {
                rank,
                outcome,
                prompt: &[],
            };
            let is_probe = self
                .ranks
                .get_mut(&rank)
                .and_then(RankRecord::ejection_mut)
                .is_some_and(|ejection| ejection.probe == Some(ticket));
            changes.extend(if is_probe {
                self.finish_probe(report, now)
            } else {
                self.record(report, now)
            });
            changes.extend(self.suspect_silent(rank, now));
        }
        changes
    }

    /// Avoids a rank with an overdue request until its peers show whether they deliver.
    fn suspect_silent(&mut self, rank: WorkerRank, now: Instant) -> Option<HealthTransition> {
        if !self.may_avoid_another(rank) {
            return None;
        }
        let record = self.ranks.get_mut(&rank)?;
        if record.evidence.is_none() || !matches!(record.state, RankState::InService) {
            return None;
        }
        let evidence = record.enter(RankState::suspect(record.score(), now), now);
        self.update_avoided();
        Some(HealthTransition {
            rank,
            change: HealthChange::Suspected,
            evidence,
        })
    }
}
