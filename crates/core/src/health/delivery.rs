//! Models of which no rank delivers. No rank is at fault then, so none changes its health.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use super::model::HealthModel;
use super::outcome::{FailureCounts, RequestOutcome};
use super::peer_group::DeliveryGap;
use super::report::PeerGroup;
use crate::worker::{WorkerId, WorkerRank};

/// If this number of ranks has failed in a row, the other ranks of a large group count as failing.
const MAX_FAILED_RANKS: usize = 8;

/// Group of which no rank delivers.
#[derive(Clone, Debug, PartialEq)]
pub struct FailingPeerGroup {
    /// Model and phase.
    pub group: PeerGroup,
    /// Number of its ranks.
    pub ranks: usize,
    /// Number of ranks that answer neither requests nor queries.
    pub unreachable: usize,
    /// Failures since the last delivery, by kind.
    pub failures: FailureCounts,
}

/// Change of the deliveries of a group.
#[derive(Clone, Debug, PartialEq)]
pub enum DeliveryTransition {
    /// No rank of the group delivers.
    Stopped(FailingPeerGroup),
    /// The group delivers again, after this time.
    Resumed(PeerGroup, Duration),
}

impl HealthModel {
    /// Counts the outcome of a request at a rank.
    pub(super) fn count(&mut self, rank: WorkerRank, outcome: RequestOutcome, now: Instant) {
        let Some(record) = self.ranks.get_mut(&rank) else {
            return;
        };
        let Some(group) = self.groups.get_mut(&record.group) else {
            return;
        };
        if outcome == RequestOutcome::Delivered {
            group.gap = None;
        } else if outcome.is_failure() {
            *record.failures.entry(outcome).or_default() += 1;
            group
                .gap
                .get_or_insert_with(|| DeliveryGap::new(now))
                .add(rank, outcome);
        }
    }

    /// Updates which groups deliver. Returns the changes since the last call.
    pub(crate) fn update_deliveries(
        &mut self,
        unreachable: &BTreeMap<WorkerId, Duration>,
        now: Instant,
    ) -> Vec<DeliveryTransition> {
        let failing = self.failing_groups(unreachable, now);
        let mut changes = Vec::new();
        for (group, group_record) in &mut self.groups {
            let found = failing.iter().find(|failing| failing.group == *group);
            match (group_record.failing_since, found) {
                (None, Some(found)) => {
                    group_record.failing_since = Some(now);
                    changes.push(DeliveryTransition::Stopped(found.clone()));
                }
                (Some(since), None) => {
                    group_record.failing_since = None;
                    let elapsed = now.saturating_duration_since(since);
                    changes.push(DeliveryTransition::Resumed(group.clone(), elapsed));
                }
                _ => {}
            }
        }
        changes
    }

    /// Returns the groups in which no rank delivers. A group that failed requests stays failing until
    /// one is delivered. `unreachable` are the workers that answer neither requests nor queries.
    pub(crate) fn failing_groups(
        &self,
        unreachable: &BTreeMap<WorkerId, Duration>,
        now: Instant,
    ) -> Vec<FailingPeerGroup> {
        let is_unreachable = |rank: &&WorkerRank| unreachable.contains_key(&rank.worker);
        let groups = self.groups.iter().filter_map(|(group, group_record)| {
            let members = &group_record.members;
            let silent = members.iter().filter(is_unreachable).count();
            let gap = group_record.gap.as_ref();
            let has_failed = |gap: &DeliveryGap| {
                let fails = |rank| {
                    gap.ranks.contains(rank) || self.avoided.contains(rank) || is_unreachable(&rank)
                };
                gap.is_long(now)
                    && (gap.ranks.len() >= MAX_FAILED_RANKS || members.iter().all(fails))
            };
            let was_failing = gap.is_some() && group_record.failing_since.is_some();
            let is_failing = silent == members.len() || was_failing || gap.is_some_and(has_failed);
            is_failing.then(|| FailingPeerGroup {
                group: group.clone(),
                ranks: members.len(),
                unreachable: silent,
                failures: gap.map(|gap| gap.failures.clone()).unwrap_or_default(),
            })
        });
        groups.collect()
    }
}
