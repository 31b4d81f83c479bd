//! Event sources of the workers: one task per rank.

use std::sync::Arc;

use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use warmroute_core::fleet::FleetMember;
use warmroute_core::worker::WorkerRank;
use warmroute_engines::kv_events::SourceSpec;
use warmroute_runtime::lifecycle;

use super::FleetController;
use crate::app::fleet_source::SettingsByModel;
use crate::app::source_task::{SourceTask, task_labels};

/// A running event source.
pub(super) struct SourceHandle {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl FleetController {
    /// Replaces the settings of the models. Event sources with changed media tokens restart,
    /// because earlier events were read with the old tokens.
    pub(super) async fn set_models(&mut self, models: Arc<SettingsByModel>) {
        let before = std::mem::replace(&mut self.models, models.clone());
        let fleet = self.router.fleet();
        for member in fleet.members() {
            let media = |models: &SettingsByModel| Some(models.get(&member.worker.model)?.media);
            if media(&before) != media(&models) && self.sources.contains_key(&member.rank) {
                self.stop_source(member.rank).await;
                self.start_source(member);
            }
        }
    }

    /// Starts the event source of a rank, if it has one.
    pub(super) fn start_source(&mut self, member: &FleetMember) {
        let Some(source) = member
            .worker
            .event_source(member.rank.rank)
            .filter(|_| !self.router.has_remote_index())
        else {
            return;
        };
        let spec = SourceSpec {
            rank: member.rank,
            worker_name: member.worker.display_name(),
            source: source.clone(),
            engine: format!(
                "{} {}",
                member.worker.model.as_str(),
                member.worker.endpoint
            ),
            block_size: member.worker.block_size,
            media: self
                .models
                .get(&member.worker.model)
                .map(|model| model.media)
                .unwrap_or_default(),
            resync: self.parts.resync.clone(),
            max_message: self.max_event_message,
        };
        // A worker that joins later does not affect readiness: it is routed by load until its
        // events have caught up.
        let starting = self.initial_workers.is_some() || self.pending_settings.is_some();
        let ready = starting.then(|| {
            self.readiness
                .begin_step(format!("event source of worker rank {}", member.rank))
        });
        let stop = CancellationToken::new();
        let source_task = SourceTask {
            spec,
            member: member.clone(),
            router: self.router.clone(),
            writers: self.parts.writers.clone(),
            metrics: self.parts.metrics.clone(),
            deadline: self.sources_deadline,
            // Peers have no more events than this process of a worker that joins later.
            warm_start: self
                .parts
                .warm_start
                .clone()
                .filter(|_| starting)
                .map(|warm_start| {
                    let ready = self
                        .readiness
                        .begin_step(format!("warm start of worker rank {}", member.rank));
                    (warm_start, ready)
                }),
        };
        let task = tokio::spawn(source_task.run(ready, stop.clone()));
        self.sources
            .insert(member.rank, SourceHandle { stop, task });
    }

    /// Stops an event source and waits for its end, after which its slot receives no late events.
    pub(super) async fn stop_source(&mut self, rank: WorkerRank) {
        let Some(source) = self.sources.remove(&rank) else {
            return;
        };
        source.stop.cancel();
        let _ended = source.task.await;
        self.router.sources().remove(rank);
        lifecycle::remove_task_metrics(&task_labels(rank), &self.parts.metrics);
    }
}
