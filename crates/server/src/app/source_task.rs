//! Task of one event source: performs its warm start, applies its events to the index, and
//! publishes its freshness.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info, warn};
use warmroute_core::fleet::FleetMember;
use warmroute_core::freshness::{IndexFreshness, SourceLink, SourceStatus, StaleReason};
use warmroute_core::router::Router;
use warmroute_core::worker::WorkerRank;
use warmroute_engines::kv_events::{self, RankSink, SourceMonitor, SourceSpec};
use warmroute_metrics::{Metrics, TaskLabels};
use warmroute_runtime::lifecycle::{ReadyGuard, supervise};

use crate::api::{RankWriters, RegisteredWriter};
use crate::cluster::warm_start::{self, WarmStart};

/// Maximum interval between checks for silent sources. With a thousand sources, frequent checks
/// would take most of the idle CPU time.
const MAX_CHECK_INTERVAL: Duration = Duration::from_secs(5);
/// Minimum interval between these checks.
const MIN_CHECK_INTERVAL: Duration = Duration::from_millis(100);

/// Returns the labels of the task in metrics.
pub(super) fn task_labels(rank: WorkerRank) -> TaskLabels {
    TaskLabels::of_rank("kv_events", rank)
}

/// Writes the snapshots of the index and of the learned latency for the next start.
pub(super) fn save_snapshot(file: &Path, writers: &RankWriters, router: &Router) {
    if let Err(problem) = warm_start::write_latency(file, &router.load().latency_snapshot()) {
        warn!(
            problem = format!("{problem:#}"),
            "warm start: learned latency not written"
        );
    }
    // Without a connected source, the blocks of a rank may have changed.
    let connected = writers
        .ranks()
        .into_iter()
        .filter(|rank| router.source_status(*rank).is_attached());
    let ranks = connected
        .filter_map(|rank| writers.dump_rank(rank))
        .filter(|dump| dump.position().is_some());
    match warm_start::write_snapshot(file, ranks) {
        Ok(0) => {
            info!(file = %file.display(), "warm start: nothing to write to the snapshot")
        }
        Ok(ranks) => {
            info!(file = %file.display(), ranks, "warm start: snapshot written")
        }
        Err(problem) => warn!(
            problem = format!("{problem:#}"),
            "warm start: snapshot not written"
        ),
    }
}

/// One event source and the consumers of its state.
pub(super) struct SourceTask {
    pub(super) spec: SourceSpec,
    pub(super) member: FleetMember,
    pub(super) router: Arc<Router>,
    pub(super) writers: Arc<RankWriters>,
    pub(super) metrics: Arc<Metrics>,
    pub(super) deadline: Instant,
    /// Warm start of the source, with its startup step.
    pub(super) warm_start: Option<(Arc<WarmStart>, ReadyGuard)>,
}

impl SourceTask {
    /// Runs the source until it is stopped.
    pub(super) async fn run(mut self, ready: Option<ReadyGuard>, stop: CancellationToken) {
        let (state, states) = watch::channel(SourceLink::Connecting);
        let monitor = SourceMonitor::default();
        self.router
            .sources()
            .register(self.spec.rank, monitor.source().clone());
        let task = task_labels(self.spec.rank);
        // Only at the first start: after a failure, the copy is older than the engine's events.
        let mut warm_start = self.warm_start.take();
        let source = supervise(task, &self.metrics, stop, || {
            let spec = self.spec.clone();
            let metrics = self.metrics.clone();
            let state = state.clone();
            let (writer, sink) = self.open_sink();
            let warm_start = warm_start.take();
            // The blocks of the previous connection have been removed from the index.
            monitor.reset();
            let detached = DetachGuard(state.clone());
            let monitor = monitor.clone();
            async move {
                let _detached = detached;
                if let Some((warm_start, ready)) = warm_start {
                    if let Some(dump) = warm_start.fetch(&spec).await {
                        tokio::task::spawn_blocking(move || writer.restore(&dump)).await?;
                    }
                    // The result was logged, so the end of the step is not.
                    drop(ready);
                }
                kv_events::run(spec, sink, metrics, state, monitor).await;
                Ok(())
            }
        });
        tokio::select! {
            () = source => {}
            () = self.follow_state(states, &monitor, ready) => {}
        }
    }

    /// Connects the events of the rank to the index. Dropping the sink removes the rank from the
    /// index.
    fn open_sink(&self) -> (Arc<RegisteredWriter>, RankSink) {
        let slot = self.member.slot;
        let writer = Arc::new(
            self.writers
                .register(self.spec.rank, self.router.index().create_writer(slot)),
        );
        // The capacity may have become known after the source started.
        let fleet = self.router.fleet();
        let current = fleet
            .member(slot)
            .filter(|member| member.rank == self.member.rank);
        self.router
            .set_block_limits(current.unwrap_or(&self.member));
        let loss_writer = writer.clone();
        let reconcile_writer = writer.clone();
        let position = writer.position().clone();
        let apply_writer = writer.clone();
        let sink = RankSink {
            apply: Box::new(move |event| apply_writer.apply(event)),
            record_loss: Box::new(move || loss_writer.mark_lossy()),
            reconcile: Box::new(move || reconcile_writer.reconcile()),
            position,
        };
        (writer, sink)
    }

    /// Publishes the state of the source to the router. Ends the startup step when the source has
    /// caught up or the deadline has passed.
    async fn follow_state(
        &self,
        mut states: watch::Receiver<SourceLink>,
        monitor: &SourceMonitor,
        mut ready: Option<ReadyGuard>,
    ) {
        let mut next_check = Instant::now();
        loop {
            let live = *states.borrow_and_update() == SourceLink::Attached;
            self.publish_status(monitor.status());
            if live {
                // The change of the freshness was logged, so the end of the step is not.
                drop(ready.take());
            }
            tokio::select! {
                changed = states.changed() => if changed.is_err() { std::future::pending::<()>().await },
                () = tokio::time::sleep_until(self.deadline), if ready.is_some() => {
                    if let Some(ready) = ready.take() {
                        ready.give_up();
                    }
                }
                () = monitor.changed() => {}
                () = tokio::time::sleep_until(next_check) => {
                    self.check_silence(monitor);
                    next_check = Instant::now() + self.check_interval();
                }
            }
        }
    }

    /// Returns the interval between checks for silence: a fraction of the time after which a source
    /// counts as silent.
    fn check_interval(&self) -> Duration {
        let silence_after = self.router.settings().freshness.silence_after;
        (silence_after / 4).clamp(MIN_CHECK_INTERVAL, MAX_CHECK_INTERVAL)
    }

    /// Publishes the freshness to the router, and logs changes. Only a source with usable events is
    /// logged at level info. The events that lead to other states are logged with their cause where
    /// they occur.
    fn publish_status(&self, status: SourceStatus) {
        let rank = self.spec.rank;
        let before = self.router.source_status(rank);
        self.router.set_source_status(rank, status);
        if (before.freshness, before.reason) == (status.freshness, status.reason) {
            return;
        }
        let name = &self.spec.worker_name;
        let freshness = status.freshness.as_str();
        let reason = status.reason.map(StaleReason::as_str);
        match status.freshness {
            IndexFreshness::Exact | IndexFreshness::Incomplete => {
                info!(%rank, name, freshness, reason, "KV event source freshness changed")
            }
            _ => debug!(%rank, name, freshness, reason, "KV event source freshness changed"),
        }
    }

    /// Reconnects a source that has become silent, because its connection may be dead without an
    /// error.
    fn check_silence(&self, monitor: &SourceMonitor) {
        let rules = self.router.settings().freshness;
        let was_silent = monitor.source().lock().is_silent();
        // Responses may have resolved stale blocks since the last batch.
        monitor.update(|source| {
            let stale = self.router.index().stale_block_count(self.member.slot);
            if let Some(stale) = stale {
                source.set_stale_blocks(stale);
            }
            source.check_silence(std::time::Instant::now(), &rules);
        });
        if !was_silent && monitor.source().lock().is_silent() {
            warn!(
                rank = %self.spec.rank,
                name = self.spec.worker_name,
                "KV event source is silent although requests completed; reconnecting"
            );
            monitor.request_reconnect();
        }
    }
}

/// Resets the state to connecting on drop, because the index then contains no blocks of the rank.
struct DetachGuard(watch::Sender<SourceLink>);

impl Drop for DetachGuard {
    fn drop(&mut self) {
        self.0.send_replace(SourceLink::Connecting);
    }
}
