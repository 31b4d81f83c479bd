//! Start, supervision and shutdown. Readiness is a set of guards, one for each step that must end before traffic is
//! accepted; the service is ready when none is left. Background tasks run under [`supervise`], which reports every failure.
//! Draining is a token everybody watches and a deadline somebody keeps.

pub mod config;
pub mod folder;
pub mod follow;

use std::collections::BTreeSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::metrics::{Metrics, TaskLabel};

/// What is pending once the end has begun.
const DRAINING: &str = "draining";

/// What still has to happen before traffic may come, by name.
#[derive(Clone)]
pub struct Readiness {
    pending: watch::Sender<BTreeSet<String>>,
}

/// One step that readiness waits for. Dropping it ends the wait; only [`Self::done`] and [`Self::give_up`] log the outcome.
pub struct ReadyGuard {
    name: String,
    readiness: Readiness,
    since: Instant,
    outcome: StepOutcome,
}

/// How a step of readiness ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepOutcome {
    Complete,
    TimedOut,
    /// The task that held it was dropped, for example because the start failed.
    Dropped,
}

impl ReadyGuard {
    /// Something else has to happen next. At no moment in between is nothing pending: whoever waits for that takes the
    /// first.
    #[must_use]
    pub fn then(self, name: impl Into<String>) -> Self {
        let next = self.readiness.wait_for(name);
        self.done();
        next
    }

    /// The step is complete.
    pub fn done(mut self) {
        self.outcome = StepOutcome::Complete;
    }

    /// The deadline of the step has passed; the service becomes ready without it.
    pub fn give_up(mut self) {
        self.outcome = StepOutcome::TimedOut;
    }
}

impl Drop for ReadyGuard {
    fn drop(&mut self) {
        self.readiness.pending.send_modify(|pending| {
            // While the process drains, guards are dropped with their owners.
            if !pending.remove(&self.name) || pending.contains(DRAINING) {
                return;
            }
            let waited = format!("{:.1}s", self.since.elapsed().as_secs_f64());
            match self.outcome {
                StepOutcome::Complete => info!(step = self.name, waited, "startup: step complete"),
                StepOutcome::TimedOut => {
                    warn!(
                        step = self.name,
                        waited, "startup: gave up waiting; becoming ready without this step"
                    );
                }
                StepOutcome::Dropped => {}
            }
        });
    }
}

impl Default for Readiness {
    fn default() -> Self {
        Self {
            pending: watch::Sender::new(BTreeSet::new()),
        }
    }
}

impl Readiness {
    /// Registers something that has to happen first.
    pub fn wait_for(&self, name: impl Into<String>) -> ReadyGuard {
        let name = name.into();
        self.pending.send_modify(|pending| {
            pending.insert(name.clone());
        });
        ReadyGuard {
            name,
            readiness: self.clone(),
            since: Instant::now(),
            outcome: StepOutcome::Dropped,
        }
    }

    /// What is still pending, in order.
    pub fn pending(&self) -> Vec<String> {
        self.pending.borrow().iter().cloned().collect()
    }

    /// Whether nothing is pending.
    pub fn is_ready(&self) -> bool {
        self.pending.borrow().is_empty()
    }

    /// Tells of every change.
    pub fn changes(&self) -> watch::Receiver<BTreeSet<String>> {
        self.pending.subscribe()
    }

    /// Whether the end has begun.
    pub fn is_draining(&self) -> bool {
        self.pending.borrow().contains(DRAINING)
    }

    /// Whether nothing has to happen first any more, also when the end has begun.
    pub fn was_reached(&self) -> bool {
        self.pending.borrow().iter().all(|step| step == DRAINING)
    }

    /// Says that no new traffic should come, from now on.
    pub fn drain(&self) {
        self.pending.send_modify(|pending| {
            pending.insert(DRAINING.to_owned());
        });
    }
}

/// Runs a task that is meant to run for ever, again and again, until the token is cancelled: with back-off and jitter
/// between tries, one log line per change of state and a gauge that shows it.
pub async fn supervise<F, Fut>(name: &str, metrics: &Metrics, stop: CancellationToken, mut task: F)
where
    F: FnMut() -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    let label = TaskLabel {
        task: name.to_owned(),
    };
    let up = metrics.task_up.get_or_create_owned(&label);
    drop(metrics.task_restarts.get_or_create(&label));
    let mut backoff = Backoff::default();
    loop {
        up.set(1);
        let began = tokio::time::Instant::now();
        let ended = tokio::select! {
            () = stop.cancelled() => break,
            ended = AssertUnwindSafe(task()).catch_unwind() => ended.unwrap_or_else(|_| Err(anyhow::anyhow!("it panicked"))),
        };
        up.set(0);
        // The parts that a task works with may end before the task does.
        if stop.is_cancelled() {
            break;
        }
        if began.elapsed() > Backoff::MOST {
            backoff = Backoff::default();
        }
        let wait = backoff.next(rand::random());
        match ended {
            Ok(()) => warn!(task = name, ?wait, "task ended; starting it again"),
            Err(error) => warn!(
                task = name,
                ?wait,
                error = format!("{error:#}"),
                "task failed; starting it again"
            ),
        }
        metrics.task_restarts.get_or_create(&label).inc();
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(wait) => {}
        }
    }
    up.set(0);
}

/// Drops the measures of a task that will not come back under this name.
pub fn forget(name: &str, metrics: &Metrics) {
    let label = TaskLabel {
        task: name.to_owned(),
    };
    metrics.task_up.remove(&label);
    metrics.task_restarts.remove(&label);
}

/// Exponential back-off with full jitter.
#[derive(Debug)]
pub struct Backoff {
    ceiling: Duration,
}

impl Default for Backoff {
    fn default() -> Self {
        Self {
            ceiling: Self::LEAST,
        }
    }
}

impl Backoff {
    /// Ceiling of the first wait.
    pub const LEAST: Duration = Duration::from_millis(100);
    /// Ceiling of the longest wait.
    pub const MOST: Duration = Duration::from_secs(5);

    /// The next wait; `random` is in 0..1.
    pub fn next(&mut self, random: f64) -> Duration {
        let wait = self.ceiling.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0);
        self.ceiling = (self.ceiling * 2).min(Self::MOST);
        wait
    }
}

/// Does what takes long and cannot wait elsewhere. Where the thread serves others, too, another one serves them meanwhile.
pub fn aside<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_takes_long_is_done_wherever_it_is_asked_and_others_are_served_meanwhile() {
        assert_eq!(aside(|| 7), 7);
        let single = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        assert_eq!(single.block_on(async { aside(|| 7) }), 7);
        let one = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .unwrap();
        let (tell, told) = std::sync::mpsc::channel();
        let work = one.spawn(async move { aside(|| told.recv_timeout(Duration::from_secs(20))) });
        one.spawn(async move { tell.send(7).unwrap() });
        assert_eq!(one.block_on(work).unwrap(), Ok(7));
    }

    #[test]
    fn a_dropped_guard_is_ready_and_draining_is_not() {
        let readiness = Readiness::default();
        let fleet = readiness.wait_for("fleet");
        let tokenizer = readiness.wait_for("tokenizer qwen");
        assert_eq!(readiness.pending(), ["fleet", "tokenizer qwen"]);
        drop(fleet);
        drop(tokenizer);
        assert!(readiness.pending().is_empty());
        readiness.drain();
        assert_eq!(readiness.pending(), ["draining"]);
    }

    #[test]
    fn from_one_step_to_the_next_nobody_sees_that_all_is_done() {
        let readiness = Readiness::default();
        let first = readiness.wait_for("start");
        let begun = std::sync::Barrier::new(2);
        let last = std::thread::scope(|scope| {
            let watching = scope.spawn(|| {
                begun.wait();
                while readiness.pending() != ["end"] {
                    assert!(!readiness.pending().is_empty(), "nothing is pending");
                }
            });
            begun.wait();
            let steps = (0..20_000).fold(first, |guard, step| guard.then(format!("step {step}")));
            let last = steps.then("end");
            watching.join().unwrap();
            last
        });
        drop(last);
        assert!(readiness.pending().is_empty());
    }

    #[test]
    fn back_off_grows_to_its_ceiling_and_no_further() {
        let mut backoff = Backoff::default();
        let waits: Vec<u128> = (0..8).map(|_| backoff.next(1.0).as_millis()).collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(Backoff::default().next(0.0).as_millis(), 50);
    }

    #[tokio::test]
    async fn a_failing_task_is_started_again_until_it_is_stopped() {
        let metrics = Metrics::new();
        let stop = CancellationToken::new();
        let mut tries = 0;
        let inner = stop.clone();
        supervise("test", &metrics, stop, || {
            tries += 1;
            if tries == 3 {
                inner.cancel();
            }
            let panics = tries == 1;
            async move {
                assert!(!panics, "a panic is a failure like another");
                Err(anyhow::anyhow!("no"))
            }
        })
        .await;
        assert_eq!(tries, 3);
        let label = TaskLabel {
            task: "test".to_owned(),
        };
        assert!(metrics.task_restarts.get_or_create(&label).get() >= 2);
        assert_eq!(metrics.task_up.get_or_create(&label).get(), 0);
    }
}
