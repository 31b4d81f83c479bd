//! Health of the workers. Envoy's `override_host` sends a request to the named host regardless of its health, so warmroute
//! must not choose a dead worker. A worker with several failed answers in a row is ejected for a while. Then one request at a
//! time probes it; if the probe fails, the next ejection lasts twice as long. A health check that passes after a failed one
//! ends the ejection early. Any success resets the state. While all workers are healthy, this costs the read of one number.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use parking_lot::{Mutex, RwLock};
use serde::Serialize;

use crate::schedule::Standing;
use crate::worker::WorkerId;

/// Rests of one worker that health checks end until a request succeeds. The endpoint of an engine that restarts again and
/// again passes now and then.
const MOST_EARLY_ENDS: u32 = 3;

/// When a worker is taken out, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HealthRules {
    /// Failures in a row that take a worker out; 0 takes none out, ever.
    pub failures: u32,
    /// How long it is out the first time.
    pub first: Duration,
    /// How long at most, however often a probe failed.
    pub most: Duration,
}

impl Default for HealthRules {
    fn default() -> Self {
        Self {
            failures: 3,
            first: Duration::from_secs(1),
            most: Duration::from_secs(60),
        }
    }
}

/// What became of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// The worker computed an answer.
    Success,
    /// The answer does not show the worker's health: the request was refused as invalid, or needed no computation.
    Inconclusive,
    /// Nobody answered, or the answer was an error of the worker's own.
    Failure,
    /// The worker said that it has too much to do. That tells nothing about its health, neither way.
    Overloaded,
}

impl Outcome {
    /// What a status of the worker's own means. For a 503 that Envoy made because nobody answered, say
    /// [`Outcome::Failure`].
    pub fn of_status(status: u16) -> Self {
        match status {
            429 | 503 | 529 => Outcome::Overloaded,
            500.. => Outcome::Failure,
            200..300 => Outcome::Success,
            _ => Outcome::Inconclusive,
        }
    }
}

/// How a worker is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Condition {
    /// It answers.
    Well,
    /// It was out for long enough: whoever claims the probe may try it.
    Due,
    /// It is out, or being tried.
    Out,
}

impl From<Condition> for Standing {
    /// One that may be tried is a candidate like all others. If it is chosen, the probe has to be claimed; if somebody
    /// else was quicker, it counts as unhealthy, and the choice is made again.
    fn from(condition: Condition) -> Self {
        match condition {
            Condition::Well | Condition::Due => Standing::Ready,
            Condition::Out => Standing::Unhealthy,
        }
    }
}

/// What a report changed, for logs and metrics.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// The worker is out, for so long.
    TakenOut(Duration),
    /// A probe failed; the worker stays out, for so long.
    KeptOut(Duration),
    /// The worker answers again.
    Back,
}

/// The health of all workers.
#[derive(Debug, Default)]
pub struct Health {
    rules: RwLock<HealthRules>,
    /// How many workers are in the table.
    troubled: AtomicUsize,
    table: Mutex<Table>,
}

/// Only workers whose last answer was a failure.
#[derive(Debug, Default)]
struct Table {
    troubles: HashMap<WorkerId, Trouble>,
    tickets: u64,
}

#[derive(Debug, Default)]
struct Trouble {
    failures: u32,
    out: Option<Out>,
}

#[derive(Debug)]
struct Out {
    until: Instant,
    period: Duration,
    /// The ticket of the probe that is under way.
    probe: Option<u64>,
    /// Whether the last health check failed.
    is_down: bool,
    /// How often a health check has ended a rest since the worker went out.
    early_ends: u32,
}

impl Out {
    fn condition(&self, now: Instant) -> Condition {
        if self.probe.is_none() && self.until <= now {
            Condition::Due
        } else {
            Condition::Out
        }
    }
}

/// The right to try a worker that is out. Dropping it without a verdict lets the next request try.
#[derive(Debug)]
#[must_use = "dropping a probe gives it back"]
pub struct Probe {
    health: Arc<Health>,
    worker: WorkerId,
    ticket: u64,
}

impl Health {
    /// Everybody is well.
    pub fn new(rules: HealthRules) -> Arc<Self> {
        Arc::new(Self {
            rules: RwLock::new(rules),
            ..Self::default()
        })
    }

    /// Judges by other rules from now on. Who is out stays out until it was to be tried.
    pub fn set_rules(&self, rules: HealthRules) {
        *self.rules.write() = rules;
    }

    /// Tells what became of a request that was not a probe.
    pub fn report(&self, worker: WorkerId, outcome: Outcome, now: Instant) -> Option<Change> {
        match outcome {
            Outcome::Success => self.forgive(worker),
            Outcome::Failure => self.blame(worker, now),
            Outcome::Overloaded | Outcome::Inconclusive => None,
        }
    }

    /// Records the result of a health check of an ejected worker. The first passed check after a failed one ends the ejection:
    /// the next request may probe the worker. If no check has failed, a passed check has no effect, because requests fail
    /// nevertheless. Returns whether the ejection ended.
    pub fn checked(&self, worker: WorkerId, is_healthy: bool, now: Instant) -> bool {
        let first = self.rules.read().first;
        let mut table = self.table.lock();
        let Some(out) = table
            .troubles
            .get_mut(&worker)
            .and_then(|trouble| trouble.out.as_mut())
        else {
            return false;
        };
        let is_back = is_healthy && out.is_down && out.early_ends < MOST_EARLY_ENDS;
        if is_back {
            out.until = out.until.min(now);
            if out.early_ends == 0 {
                out.period = out.period.min(first);
            }
            out.early_ends += 1;
        }
        out.is_down = !is_healthy;
        is_back
    }

    /// How a worker is.
    pub fn standing(&self, worker: WorkerId, now: Instant) -> Condition {
        if self.all_well() {
            return Condition::Well;
        }
        let table = self.table.lock();
        let out = table
            .troubles
            .get(&worker)
            .and_then(|trouble| trouble.out.as_ref());
        out.map_or(Condition::Well, |out| out.condition(now))
    }

    /// Everybody who is not well. Empty, and for nothing, when all are.
    pub fn unwell(&self, now: Instant) -> BTreeMap<WorkerId, Condition> {
        if self.all_well() {
            return BTreeMap::new();
        }
        let table = self.table.lock();
        let out = table
            .troubles
            .iter()
            .filter_map(|(worker, trouble)| Some((*worker, trouble.out.as_ref()?)));
        out.map(|(worker, out)| (worker, out.condition(now)))
            .collect()
    }

    /// The right to try a worker that is [`Condition::Due`]; only one exists at a time.
    pub fn claim_probe(self: &Arc<Self>, worker: WorkerId, now: Instant) -> Option<Probe> {
        let mut table = self.table.lock();
        let ticket = table.tickets;
        let out = table.troubles.get_mut(&worker)?.out.as_mut()?;
        if out.condition(now) != Condition::Due {
            return None;
        }
        out.probe = Some(ticket);
        table.tickets += 1;
        Some(Probe {
            health: self.clone(),
            worker,
            ticket,
        })
    }

    /// A worker left; one that comes back under its id is well.
    pub fn forget(&self, worker: WorkerId) {
        self.retain(|known| known != worker);
    }

    /// Forgets all workers but the known ones. Late reports of workers that left make entries again, so this should be
    /// called with every change of the fleet.
    pub fn retain(&self, known: impl Fn(WorkerId) -> bool) {
        let mut table = self.table.lock();
        table.troubles.retain(|worker, _| known(*worker));
        self.count(&table);
    }

    fn all_well(&self) -> bool {
        self.troubled.load(Ordering::Acquire) == 0
    }

    fn count(&self, table: &Table) {
        self.troubled.store(table.troubles.len(), Ordering::Release);
    }

    fn forgive(&self, worker: WorkerId) -> Option<Change> {
        if self.all_well() {
            return None;
        }
        let mut table = self.table.lock();
        let trouble = table.troubles.remove(&worker)?;
        self.count(&table);
        trouble.out.map(|_| Change::Back)
    }

    fn blame(&self, worker: WorkerId, now: Instant) -> Option<Change> {
        let rules = *self.rules.read();
        if rules.failures == 0 {
            return None;
        }
        let mut table = self.table.lock();
        let trouble = table.troubles.entry(worker).or_default();
        trouble.failures = trouble.failures.saturating_add(1);
        // Requests that were under way when the worker went out fail with it; only a probe makes it worse.
        let goes_out = trouble.out.is_none() && trouble.failures >= rules.failures;
        let change = goes_out.then(|| {
            let period = rules.first.min(rules.most);
            trouble.out = Some(Out {
                until: after(now, period),
                period,
                probe: None,
                is_down: false,
                early_ends: 0,
            });
            Change::TakenOut(period)
        });
        self.count(&table);
        change
    }
}

impl Probe {
    /// The worker that is tried.
    pub fn worker(&self) -> WorkerId {
        self.worker
    }

    /// Tells what became of the probe. Without a verdict about health the probe is given back.
    pub fn report(self, outcome: Outcome, now: Instant) -> Option<Change> {
        match outcome {
            Outcome::Success if self.is_under_way() => self.health.forgive(self.worker),
            Outcome::Failure => self.fail(now),
            _ => None,
        }
    }

    fn fail(&self, now: Instant) -> Option<Change> {
        let most = self.health.rules.read().most;
        self.settle(|out| {
            out.period = out.period.saturating_mul(2).min(most);
            out.until = after(now, out.period);
            Change::KeptOut(out.period)
        })
    }

    fn is_under_way(&self) -> bool {
        let table = self.health.table.lock();
        let out = table
            .troubles
            .get(&self.worker)
            .and_then(|trouble| trouble.out.as_ref());
        out.is_some_and(|out| out.probe == Some(self.ticket))
    }

    /// Ends the probe, if it is still under way: the worker may have been forgotten, and tried anew, since.
    fn settle<T>(&self, verdict: impl FnOnce(&mut Out) -> T) -> Option<T> {
        let mut table = self.health.table.lock();
        let out = table.troubles.get_mut(&self.worker)?.out.as_mut()?;
        if out.probe != Some(self.ticket) {
            return None;
        }
        out.probe = None;
        Some(verdict(out))
    }
}

impl Drop for Probe {
    fn drop(&mut self) {
        self.settle(|_| ());
    }
}

/// A length of time that reaches beyond the clock ends at once.
fn after(now: Instant, period: Duration) -> Instant {
    now.checked_add(period).unwrap_or(now)
}

#[cfg(test)]
mod tests;
