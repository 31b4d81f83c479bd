//! Rules that hold for the worker list of every discovery source.
//!
//! A source may answer with an empty list by mistake: a DNS server without its zone, a selector
//! with a typing error, a file from a failed template. The last workers of a model and role are
//! therefore removed only when the source has listed none for a while. Workers that drain are
//! removed at once, because Kubernetes announced their end. The number of ranks has a limit.
//!
//! Pure: the clock is an argument.

use std::collections::HashSet;
use std::time::Duration;

use tokio::time::Instant;
use tracing::{info, warn};
use warmroute_core::worker::{ModelName, Worker, WorkerEndpoint, WorkerId, WorkerRole};

use super::WorkerModel;

/// Minimum time without workers before the last workers of a model and role are removed.
pub const REMOVAL_GRACE_PERIOD: Duration = Duration::from_secs(30);
/// Maximum number of worker ranks of a fleet.
pub const MAX_RANKS: usize = 8192;

/// Workers that share a model and a role.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
struct WorkerGroup {
    model: ModelName,
    role: WorkerRole,
}

impl WorkerGroup {
    fn of(worker: &Worker) -> Self {
        Self {
            model: worker.model.clone(),
            role: worker.role,
        }
    }
}

/// Workers that stay in use although the source no longer lists them.
#[derive(Debug)]
struct RetainedGroup {
    group: WorkerGroup,
    workers: Vec<Worker>,
    until: Instant,
}

/// Applies the rules to the successive worker lists of the configured source.
#[derive(Debug, Default)]
pub struct WorkerListFilter {
    reported: Vec<Worker>,
    retained: Vec<RetainedGroup>,
    /// Workers in use.
    current: Vec<Worker>,
    /// Number of ranks beyond the limit in the last list.
    excess: usize,
}

impl WorkerListFilter {
    /// Accepts a complete list of the source. Returns the workers to use.
    ///
    /// `grace_period` is the time after which the source has answered again. Workers of a model
    /// that is not in `models` are removed at once.
    pub fn update(
        &mut self,
        reported: Vec<Worker>,
        models: &[WorkerModel],
        grace_period: Duration,
        now: Instant,
    ) -> Vec<Worker> {
        self.reported = reported;
        let listed: HashSet<WorkerGroup> = self.reported.iter().map(WorkerGroup::of).collect();
        let is_gone = |group: &WorkerGroup| {
            !listed.contains(group) && models.iter().any(|model| model.name == group.model)
        };
        self.retained.retain(|retained| is_gone(&retained.group));
        let active = self.current.iter().filter(|worker| !worker.draining);
        let groups: HashSet<WorkerGroup> = active.map(WorkerGroup::of).collect();
        for group in groups.into_iter().filter(is_gone) {
            if self.retained.iter().any(|retained| retained.group == group) {
                continue;
            }
            let members = self.current.iter().filter(|worker| !worker.draining);
            let members = members.filter(|worker| WorkerGroup::of(worker) == group);
            let workers = without_replaced(&self.reported, members);
            if workers.is_empty() {
                continue;
            }
            warn!(
                model = group.model.as_str(),
                role = group.role.as_str(),
                workers = workers.len(),
                seconds = grace_period.as_secs(),
                "discovery source lists no workers; current workers are kept for a grace period"
            );
            self.retained.push(RetainedGroup {
                group,
                workers,
                until: now + grace_period,
            });
        }
        self.apply()
    }

    /// Returns the time of the next [`Self::remove_expired`].
    pub fn next_due(&self) -> Option<Instant> {
        self.retained.iter().map(|retained| retained.until).min()
    }

    /// Removes the workers that no list contained during the grace period. Returns the workers to
    /// use.
    pub fn remove_expired(&mut self, now: Instant) -> Vec<Worker> {
        self.retained.retain(|retained| {
            let is_due = retained.until <= now;
            if is_due {
                info!(
                    model = retained.group.model.as_str(),
                    role = retained.group.role.as_str(),
                    workers = retained.workers.len(),
                    "grace period expired; workers removed"
                );
            }
            !is_due
        });
        self.apply()
    }

    fn apply(&mut self) -> Vec<Worker> {
        let retained = self.retained.iter().flat_map(|retained| &retained.workers);
        let mut workers = without_replaced(&self.reported, retained);
        workers.extend(self.reported.iter().cloned());
        self.current = self.limit(workers);
        self.current.clone()
    }

    /// Drops the workers beyond the maximum number of ranks. Workers in use have precedence, then
    /// lower ids.
    fn limit(&mut self, mut workers: Vec<Worker>) -> Vec<Worker> {
        let ranks = |worker: &Worker| worker.ranks.size.get() as usize;
        let found: usize = workers.iter().map(ranks).sum();
        let excess = found.saturating_sub(MAX_RANKS);
        if excess > 0 {
            let used: HashSet<WorkerId> = self.current.iter().map(|worker| worker.id).collect();
            workers.sort_by_key(|worker| (!used.contains(&worker.id), worker.id));
            let mut free = MAX_RANKS;
            workers.retain(|worker| {
                let fits = ranks(worker) <= free;
                free -= if fits { ranks(worker) } else { 0 };
                fits
            });
        }
        if excess > 0 && excess != self.excess {
            warn!(
                ranks = found,
                limit = MAX_RANKS,
                workers = workers.len(),
                "discovery source lists too many worker ranks; the excess is not used"
            );
        }
        self.excess = excess;
        workers
    }
}

/// Returns the workers whose id and address do not belong to a listed worker.
fn without_replaced<'a>(
    listed: &[Worker],
    workers: impl Iterator<Item = &'a Worker>,
) -> Vec<Worker> {
    let ids: HashSet<WorkerId> = listed.iter().map(|worker| worker.id).collect();
    let endpoints: HashSet<WorkerEndpoint> = listed.iter().map(|worker| worker.endpoint).collect();
    workers
        .filter(|worker| !ids.contains(&worker.id) && !endpoints.contains(&worker.endpoint))
        .cloned()
        .collect()
}

#[cfg(test)]
mod tests;
