//! Startup, supervision and shutdown.
//!
//! Readiness is a set of guards, one for each startup step. The service is ready when no guard is
//! left. Background tasks run under [`supervise`], which reports every failure. Draining is
//! represented by a pending step that never completes.

pub mod config;
pub mod directory;
pub mod file_watcher;

use std::collections::BTreeSet;
use std::future::Future;
use std::panic::AssertUnwindSafe;
use std::time::{Duration, Instant};

use futures_util::FutureExt as _;
use tokio::runtime::{Handle, RuntimeFlavor};
use tokio::sync::watch;
use tokio::time::{Interval, MissedTickBehavior};
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use crate::causes::describe_failure;
use warmroute_metrics::{Metrics, TaskLabels};
use warmroute_settings::format_elapsed;

/// Name of the pending step while the process drains.
const DRAINING: &str = "draining";

/// Set of named steps that must end before the process accepts traffic.
#[derive(Clone)]
pub struct Readiness {
    pending: watch::Sender<BTreeSet<String>>,
}

/// One startup step. Dropping the guard ends the step; only [`Self::complete`] and
/// [`Self::give_up`] log the outcome.
pub struct ReadyGuard {
    name: String,
    readiness: Readiness,
    since: Instant,
    outcome: StepOutcome,
}

/// Outcome of a startup step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StepOutcome {
    Complete,
    TimedOut,
    /// The owner of the guard was dropped, for example because startup failed.
    Dropped,
}

impl ReadyGuard {
    /// Ends this step and begins the next one. At least one of them is pending at every moment, so
    /// a waiting task cannot observe readiness in between.
    #[must_use]
    pub fn then(self, name: impl Into<String>) -> Self {
        let next = self.readiness.begin_step(name);
        self.complete();
        next
    }

    /// Ends the step successfully.
    pub fn complete(mut self) {
        self.outcome = StepOutcome::Complete;
    }

    /// Ends the step because its deadline has passed. The service becomes ready without it.
    pub fn give_up(mut self) {
        self.outcome = StepOutcome::TimedOut;
    }
}

impl Drop for ReadyGuard {
    fn drop(&mut self) {
        self.readiness.pending.send_modify(|pending| {
            // During draining, guards are dropped with their owners, which is not logged.
            if !pending.remove(&self.name) || pending.contains(DRAINING) {
                return;
            }
            let waited = format_elapsed(self.since.elapsed());
            match self.outcome {
                StepOutcome::Complete => info!(step = self.name, waited, "startup: step complete"),
                StepOutcome::TimedOut => {
                    warn!(
                        step = self.name,
                        waited, "startup: step timed out; readiness no longer waits for it"
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
    /// Adds a startup step.
    pub fn begin_step(&self, name: impl Into<String>) -> ReadyGuard {
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

    /// Returns the names of the pending steps, sorted.
    pub fn pending(&self) -> Vec<String> {
        self.pending.borrow().iter().cloned().collect()
    }

    /// Returns whether no step is pending.
    pub fn is_ready(&self) -> bool {
        self.pending.borrow().is_empty()
    }

    /// Returns a receiver of the pending steps.
    pub fn subscribe(&self) -> watch::Receiver<BTreeSet<String>> {
        self.pending.subscribe()
    }

    /// Returns whether the process is draining.
    pub fn is_draining(&self) -> bool {
        self.pending.borrow().contains(DRAINING)
    }

    /// Returns whether startup is complete, even if the process is draining.
    pub fn is_started(&self) -> bool {
        self.pending.borrow().iter().all(|step| step == DRAINING)
    }

    /// Starts draining: the process reports not ready from now on.
    pub fn drain(&self) {
        self.pending.send_modify(|pending| {
            pending.insert(DRAINING.to_owned());
        });
    }
}

/// Returns periodic ticks. After a late tick, the next one follows a full period later.
pub fn ticks(period: Duration) -> Interval {
    let mut ticks = tokio::time::interval(period);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks
}

/// Runs a task and restarts it with jittered backoff when it ends, until the token is cancelled.
/// Each state change is logged once, and a gauge shows the state.
pub async fn supervise<F, Fut>(
    labels: impl Into<TaskLabels>,
    metrics: &Metrics,
    stop: CancellationToken,
    mut task: F,
) where
    F: FnMut() -> Fut,
    Fut: Future<Output = anyhow::Result<()>>,
{
    let labels = labels.into();
    if labels.worker_id.is_none() {
        drop(metrics.process.task_restarts.get_or_create(&labels));
    }
    let mut backoff = JitteredBackoff::default();
    loop {
        report_running(&labels, metrics);
        let began = tokio::time::Instant::now();
        let ended = tokio::select! {
            () = stop.cancelled() => break,
            ended = AssertUnwindSafe(task()).catch_unwind() => {
                ended.unwrap_or_else(|_| Err(anyhow::anyhow!("the task panicked")))
            }
        };
        metrics.process.task_up.get_or_create(&labels).set(0);
        // Resources of a task may be dropped before the task ends, so its error is not reported
        // after the stop.
        if stop.is_cancelled() {
            break;
        }
        if began.elapsed() > JitteredBackoff::MAX {
            backoff = JitteredBackoff::default();
        }
        let wait = backoff.next_delay(rand::random());
        log_restart(&labels, wait, ended);
        metrics.process.task_restarts.get_or_create(&labels).inc();
        tokio::select! {
            () = stop.cancelled() => break,
            () = tokio::time::sleep(wait) => {}
        }
    }
    metrics.process.task_up.get_or_create(&labels).set(0);
}

/// Reports that a task runs. Hundreds of ranks have one task each, so a task of a rank has a series
/// only while it does not run.
fn report_running(labels: &TaskLabels, metrics: &Metrics) {
    let up = &metrics.process.task_up;
    if labels.worker_id.is_none() {
        up.get_or_create(labels).set(1);
    } else {
        up.remove(labels);
    }
}

fn log_restart(labels: &TaskLabels, wait: Duration, ended: anyhow::Result<()>) {
    let TaskLabels {
        task,
        worker_id,
        dp_rank,
    } = labels;
    let wait = format_elapsed(wait);
    match ended {
        Ok(()) => warn!(task, worker_id, dp_rank, wait, "task ended; restarting it"),
        Err(error) => {
            let error = describe_failure(&error);
            warn!(
                task,
                worker_id, dp_rank, wait, error, "task failed; restarting it"
            );
        }
    }
}

/// Removes the metrics of a task that will not run again with these labels.
pub fn remove_task_metrics(labels: &TaskLabels, metrics: &Metrics) {
    metrics.process.task_up.remove(labels);
    metrics.process.task_restarts.remove(labels);
}

/// Exponential backoff with equal jitter: a delay is between half of the upper bound and the upper
/// bound.
#[derive(Debug)]
pub struct JitteredBackoff {
    ceiling: Duration,
}

impl Default for JitteredBackoff {
    fn default() -> Self {
        Self { ceiling: Self::MIN }
    }
}

impl JitteredBackoff {
    /// Upper bound of the first delay.
    pub const MIN: Duration = Duration::from_millis(100);
    /// Upper bound of every delay.
    pub const MAX: Duration = Duration::from_secs(5);

    /// Returns the next delay. `random` is in 0..1.
    pub fn next_delay(&mut self, random: f64) -> Duration {
        let wait = self.ceiling.mul_f64(0.5 + random.clamp(0.0, 1.0) / 2.0);
        self.ceiling = (self.ceiling * 2).min(Self::MAX);
        wait
    }
}

/// Runs blocking work on the current thread. On a multi-threaded runtime, another thread takes over
/// its tasks.
pub fn run_blocking<T>(work: impl FnOnce() -> T) -> T {
    match Handle::try_current().map(|runtime| runtime.runtime_flavor()) {
        Ok(RuntimeFlavor::MultiThread) => tokio::task::block_in_place(work),
        _ => work(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocking_work_does_not_stall_other_tasks() {
        assert_eq!(run_blocking(|| 7), 7);
        let single = tokio::runtime::Builder::new_current_thread()
            .build()
            .unwrap();
        assert_eq!(single.block_on(async { run_blocking(|| 7) }), 7);
        let one = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .build()
            .unwrap();
        let (done_tx, done_rx) = std::sync::mpsc::channel();
        let work = one
            .spawn(async move { run_blocking(|| done_rx.recv_timeout(Duration::from_secs(20))) });
        one.spawn(async move { done_tx.send(7).unwrap() });
        assert_eq!(one.block_on(work).unwrap(), Ok(7));
    }

    #[test]
    fn dropped_guard_is_ready_and_draining_is_not() {
        let readiness = Readiness::default();
        let fleet = readiness.begin_step("fleet");
        let tokenizer = readiness.begin_step("tokenizer qwen");
        assert_eq!(readiness.pending(), ["fleet", "tokenizer qwen"]);
        drop(fleet);
        drop(tokenizer);
        assert!(readiness.pending().is_empty());
        readiness.drain();
        assert_eq!(readiness.pending(), ["draining"]);
    }

    #[test]
    fn next_step_begins_before_previous_ends() {
        let readiness = Readiness::default();
        let first = readiness.begin_step("start");
        let barrier = std::sync::Barrier::new(2);
        let last = std::thread::scope(|scope| {
            let watcher = scope.spawn(|| {
                barrier.wait();
                while readiness.pending() != ["end"] {
                    assert!(!readiness.pending().is_empty(), "no step is pending");
                }
            });
            barrier.wait();
            let steps = (0..20_000).fold(first, |guard, step| guard.then(format!("step {step}")));
            let last = steps.then("end");
            watcher.join().unwrap();
            last
        });
        drop(last);
        assert!(readiness.pending().is_empty());
    }

    #[test]
    fn backoff_grows_to_its_maximum() {
        let mut backoff = JitteredBackoff::default();
        let waits: Vec<u128> = (0..8)
            .map(|_| backoff.next_delay(1.0).as_millis())
            .collect();
        assert_eq!(waits, [100, 200, 400, 800, 1600, 3200, 5000, 5000]);
        assert_eq!(JitteredBackoff::default().next_delay(0.0).as_millis(), 50);
    }

    #[tokio::test]
    async fn failing_task_restarts_until_stopped() {
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
                assert!(!panics, "a panic is handled like an error");
                Err(anyhow::anyhow!("no"))
            }
        })
        .await;
        assert_eq!(tries, 3);
        let labels = TaskLabels::from("test");
        assert!(metrics.process.task_restarts.get_or_create(&labels).get() >= 2);
        assert_eq!(metrics.process.task_up.get_or_create(&labels).get(), 0);
    }

    #[tokio::test]
    async fn running_rank_task_has_no_series() {
        let metrics = Metrics::new();
        let stop = CancellationToken::new();
        let labels = TaskLabels {
            task: "kv_events",
            worker_id: Some(7),
            dp_rank: Some(0),
        };
        let has_series = |name: &str| {
            let page = metrics
                .render(warmroute_metrics::TextFormat::Prometheus, |_| {})
                .unwrap();
            page.contains(&format!("{name}{{task=\"kv_events\",worker_id=\"7\""))
        };
        let mut tries = 0;
        supervise(labels, &metrics, stop.clone(), || {
            tries += 1;
            assert!(!has_series("task_up"), "the task runs");
            assert_eq!(has_series("task_restarts_total"), tries > 1);
            if tries == 2 {
                stop.cancel();
            }
            async { Ok(()) }
        })
        .await;
        assert_eq!(tries, 2);
        assert!(has_series("task_up"), "the task does not run");
    }
}
