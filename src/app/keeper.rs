//! Keeps the running parts in step with the fleet: every desired set of workers becomes one diff, and of that diff event
//! sources are stopped and started, load rows opened and closed, and Envoy is told. New members are
//! opened before they are published and old ones closed after, so that no request can choose a rank without a row.

use std::collections::{HashMap, HashSet};
use std::path::PathBuf;
use std::sync::Arc;

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tracing::{info, warn};

use super::announcer::Announcer;
use super::followed::{self, Followed, task_name};
use super::learn::{Asked, Said};
use super::workers::{AllGiven, Desired, Media};
use crate::api::Feed;
use crate::config::Config;
use crate::entrance::Entrance;
use crate::fleet::{Fleet, Member};
use crate::kv_events::{SharedResync, SourceSpec};
use crate::learned::{Agreed, Given, Learned, Mismatch};
use crate::lifecycle::{self, Readiness, ReadyGuard};
use crate::metrics::{Metrics, RankLabels};
use crate::router::{AllLearned, Router, RouterSettings};
use crate::takeover::Takeover;
use crate::worker::{ModelName, Role, Worker, WorkerId, WorkerRank};

pub(super) struct Keeper {
    router: Arc<Router>,
    entrance: Arc<Entrance>,
    feed: Arc<Feed>,
    metrics: Arc<Metrics>,
    readiness: Readiness,
    sources: HashMap<WorkerRank, Source>,
    initial_workers: Option<(usize, ReadyGuard)>,
    /// The initial workers that were not asked for their settings yet.
    unasked: Option<Unasked>,
    sources_deadline: Instant,
    announcer: Announcer,
    media: Arc<Media>,
    said: watch::Receiver<Arc<Said>>,
    /// What was said when the last set was made.
    heard: Arc<Said>,
    given: Arc<AllGiven>,
    resync: SharedResync,
    max_event_message: usize,
    takeover: Option<Arc<Takeover>>,
    snapshot: Option<PathBuf>,
    /// The last set, as it was wanted.
    wanted: Option<Desired>,
}

/// Whom the keeper works with.
pub(super) struct Parts {
    pub(super) entrance: Arc<Entrance>,
    pub(super) feed: Arc<Feed>,
    pub(super) metrics: Arc<Metrics>,
    /// What engines say of themselves.
    pub(super) said: watch::Receiver<Arc<Said>>,
    /// What becomes of blocks when batches are lost.
    pub(super) resync: SharedResync,
    /// Who tells Envoy.
    pub(super) announcer: Announcer,
    /// Where what is cached is copied from at the start.
    pub(super) takeover: Option<Arc<Takeover>>,
}

/// Initial workers whose event sources may still be learned.
struct Unasked {
    workers: HashSet<Asked>,
    /// Held until no worker is left.
    ready: ReadyGuard,
}

/// One running event source.
struct Source {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl Keeper {
    pub(super) fn new(config: &Config, parts: Parts, readiness: Readiness) -> Self {
        let Parts {
            entrance,
            feed,
            metrics,
            said,
            resync,
            announcer,
            takeover,
        } = parts;
        let least = config.readiness.min_initial_workers as usize;
        let prefill = if config.disaggregation.enforce {
            ", and prefill workers (`disaggregation.enforce`)"
        } else {
            ""
        };
        let guard = readiness.wait_for(format!("initial workers: at least {least}{prefill}"));
        Self {
            router: entrance.router().clone(),
            entrance,
            feed,
            metrics,
            sources: HashMap::new(),
            initial_workers: Some((least, guard)),
            unasked: None,
            sources_deadline: Instant::now() + config.readiness.event_sources_deadline.get(),
            announcer,
            media: Arc::default(),
            said,
            heard: Arc::default(),
            given: Arc::default(),
            resync,
            max_event_message: config.kv_events.max_message.bytes(),
            takeover,
            snapshot: config
                .takeover
                .as_ref()
                .and_then(|takeover| takeover.file.clone()),
            wanted: None,
            readiness,
        }
    }

    /// Follows the desired sets until their sender is gone or everything stops; then stops the sources.
    pub(super) async fn run(
        mut self,
        mut sets: mpsc::UnboundedReceiver<Desired>,
        stop: CancellationToken,
    ) {
        loop {
            let next = tokio::select! {
                () = stop.cancelled() => break,
                set = sets.recv() => set,
                Ok(()) = self.said.changed(), if self.wanted.is_some() => self.wanted.clone(),
                () = tokio::time::sleep_until(self.sources_deadline), if self.unasked.is_some() => {
                    self.started();
                    continue;
                }
            };
            let Some(mut desired) = next else { break };
            // Each set is complete, so only the newest counts.
            while let Ok(newer) = sets.try_recv() {
                desired = newer;
            }
            self.wanted = Some(desired.clone());
            self.read_media(desired.media).await;
            self.given = desired.given;
            let workers = self.complete(desired.workers);
            if self.announcer.tells()
                && let Some(rest) = without_leavers(&self.router.fleet(), &workers)
            {
                self.apply(rest).await;
            }
            self.apply(workers).await;
            self.look_who_is_unasked();
        }
        // Whoever ends while he starts knows less than the file.
        if let Some(file) = self.snapshot.take().filter(|_| self.takeover.is_none()) {
            let (feed, router) = (self.feed.clone(), self.router.clone());
            let left =
                tokio::task::spawn_blocking(move || followed::leave(&file, &feed, &router)).await;
            if let Err(problem) = left {
                warn!(%problem, "what is known is not left for the next start");
            }
        }
        let members: Vec<WorkerRank> = self.sources.keys().copied().collect();
        for rank in members {
            self.stop_source(rank).await;
        }
    }

    /// Fills in what engines say of themselves, and tells where that is not what is configured.
    fn complete(&mut self, mut workers: Vec<Worker>) -> Vec<Worker> {
        let said = self.said.borrow_and_update().clone();
        self.heard = said.clone();
        let before = self.router.sources().all_learned();
        let mut all = AllLearned::new();
        let mut by_model: HashMap<ModelName, Vec<&Learned>> = HashMap::new();
        for worker in &mut workers {
            let Some(learned) = said.learned.get(&(worker.id, worker.endpoint)) else {
                continue;
            };
            let mismatches = learned.fill(
                worker,
                self.given.get(&worker.model).unwrap_or(&Given::default()),
            );
            let known = before
                .get(&worker.id)
                .map(|(_, known)| &known[..])
                .unwrap_or_default();
            for mismatch in mismatches
                .iter()
                .filter(|mismatch| !known.contains(mismatch))
            {
                let Mismatch {
                    setting,
                    configured,
                    engine,
                } = mismatch;
                warn!(worker = %worker.id, setting, configured, engine, "the engine says otherwise than is configured");
            }
            by_model
                .entry(worker.model.clone())
                .or_default()
                .push(learned);
            all.insert(worker.id, (learned.clone(), mismatches));
        }
        let agreed = by_model
            .into_iter()
            .map(|(model, all)| (model, Agreed::of(all.into_iter())))
            .collect();
        self.router.sources().set_learned(all, agreed);
        workers
    }

    /// Reads events with their media from now on as `media` says; sources for which that is news begin again, because what
    /// they have told already was read otherwise.
    async fn read_media(&mut self, media: Arc<Media>) {
        let before = std::mem::replace(&mut self.media, media);
        let fleet = self.router.fleet();
        for member in fleet.members() {
            let model = &member.worker.model;
            if before.get(model) != self.media.get(model) && self.sources.contains_key(&member.rank)
            {
                self.stop_source(member.rank).await;
                self.start_source(member);
            }
        }
    }

    async fn apply(&mut self, desired: Vec<Worker>) {
        let before = self.router.fleet();
        let change = before.reconcile(desired);
        let fleet = Arc::new(change.fleet);
        // Sources first: only when the old ones have ended can a bound socket or a slot be used again.
        for member in &change.removed {
            self.stop_source(member.rank).await;
        }
        for member in &change.added {
            self.router.load().open(member.slot, member.rank);
            self.router.predictions().open(member);
            self.start_source(member);
        }
        self.refit(&before, &change.kept_changed);
        if !before.is_empty() && !change.added.is_empty() && self.announcer.tells() {
            // Envoy sends to nobody it has not heard of. So it hears of newcomers while they are not yet chosen; those
            // who leave stay in the list until nobody chooses them any more.
            let told = self.announcer.tell(before.workers().chain(fleet.workers()));
            self.announcer.heard(told).await;
        }
        self.router.publish(fleet.clone());
        self.feed.publish(&fleet);
        // Nobody is chosen who is not among those that Envoy has; that it still has others does no harm.
        let _told = self.announcer.tell(fleet.workers());
        for member in &change.removed {
            self.router.load().close(member.slot);
            self.router.predictions().close(member);
            self.metrics
                .forget_rank(&RankLabels::new(member.rank, Some(member.worker.role)));
        }
        if let Some(sessions) = self.entrance.sessions() {
            sessions.retain(|worker| fleet.worker(worker).is_some());
        }
        // Whoever waits may have a worker now.
        self.entrance.admission().nudge();
        if fleet.generation() != before.generation() {
            let (added, removed) = (change.added.len(), change.removed.len());
            info!(
                generation = fleet.generation(),
                workers = fleet.workers().count(),
                added,
                removed,
                "fleet changed"
            );
        }
        self.metrics.workers.set(fleet.workers().count() as i64);
        self.metrics.fleet_generation.set(fleet.generation() as i64);
        let found = fleet.workers().count();
        let lacks_prefill = lacks_prefill(&fleet, &self.router.settings());
        let suffice = |least: usize| found >= least && (least == 0 || !lacks_prefill);
        if let Some((_, guard)) = self.initial_workers.take_if(|(least, _)| suffice(*least)) {
            let workers = fleet
                .workers()
                .map(|worker| (worker.id, worker.endpoint))
                .collect();
            let ready = guard.then("settings of the initial workers");
            self.unasked = Some(Unasked { workers, ready });
        }
    }

    /// Lets readiness go on when every initial worker was asked for its settings, whatever it answered: an event source
    /// that only it knew of is among those that are waited for by now.
    fn look_who_is_unasked(&mut self) {
        let Some(unasked) = &mut self.unasked else {
            return;
        };
        let fleet = self.router.fleet();
        let said = &self.heard;
        let is_there = |asked: &Asked| {
            fleet
                .worker(asked.0)
                .is_some_and(|worker| worker.endpoint == asked.1)
        };
        unasked
            .workers
            .retain(|asked| is_there(asked) && !said.off && !said.asked.contains(asked));
        if unasked.workers.is_empty() || Instant::now() >= self.sources_deadline {
            self.started();
        }
    }

    /// Whoever comes from now on is no initial worker.
    fn started(&mut self) {
        if let Some(Unasked { workers, ready }) = self.unasked.take() {
            if workers.is_empty() {
                ready.done()
            } else {
                ready.give_up()
            }
        }
        self.takeover = None;
    }

    /// What a worker can hold decides what is believed to be left there.
    fn refit(&self, before: &Fleet, changed: &[Member]) {
        let blocks = |member: &Member| member.worker.capacity.total_kv_blocks;
        let other = |member: &&Member| {
            before
                .member(member.slot)
                .is_none_or(|old| blocks(old) != blocks(member))
        };
        for member in changed.iter().filter(other) {
            self.router.predictions().refit(member);
            self.router.limit_blocks(member);
        }
    }

    fn start_source(&mut self, member: &Member) {
        let Some(source) = member
            .worker
            .event_source(member.rank.rank)
            .filter(|_| !self.router.is_remote())
        else {
            return;
        };
        let spec = SourceSpec {
            rank: member.rank,
            source: source.clone(),
            engine: format!(
                "{} {}",
                member.worker.model.as_str(),
                member.worker.endpoint
            ),
            block_size: member.worker.block_size,
            media: self
                .media
                .get(&member.worker.model)
                .copied()
                .unwrap_or_default(),
            resync: self.resync.clone(),
            max_message: self.max_event_message,
        };
        // Who joins later is chosen when its events have caught up or by load, and is no reason to take traffic away.
        let starting = self.initial_workers.is_some() || self.unasked.is_some();
        let ready = starting.then(|| {
            self.readiness
                .wait_for(format!("event source of worker rank {}", member.rank))
        });
        let stop = CancellationToken::new();
        let followed = Followed {
            spec,
            member: member.clone(),
            router: self.router.clone(),
            feed: self.feed.clone(),
            metrics: self.metrics.clone(),
            deadline: self.sources_deadline,
            // Who joins later is heard from the beginning by all.
            takeover: self.takeover.clone().filter(|_| starting).map(|takeover| {
                let ready = self
                    .readiness
                    .wait_for(format!("what is known of worker rank {}", member.rank));
                (takeover, ready)
            }),
        };
        let task = tokio::spawn(followed.run(ready, stop.clone()));
        self.sources.insert(member.rank, Source { stop, task });
    }

    /// Stops a source and waits for it: only then is its slot free of late events.
    async fn stop_source(&mut self, rank: WorkerRank) {
        let Some(source) = self.sources.remove(&rank) else {
            return;
        };
        source.stop.cancel();
        let _ended = source.task.await;
        self.router.sources().forget(rank);
        lifecycle::forget(&task_name(rank), &self.metrics);
    }
}

/// Where a change both adds and removes workers, its first half: nobody new, and none of those who leave. Newcomers are
/// not chosen before Envoy knows them, and for so long nobody should be sent to a worker that is gone. `None` where that
/// would leave a model without anybody: then a worker that may still be there is better than none.
fn without_leavers(before: &Fleet, desired: &[Worker]) -> Option<Vec<Worker>> {
    let change = before.reconcile(desired.to_vec());
    if change.added.is_empty() || change.removed.is_empty() {
        return None;
    }
    let gone: HashSet<WorkerId> = change
        .removed
        .iter()
        .map(|member| member.rank.worker)
        .collect();
    let stays = |worker: &&Worker| before.worker(worker.id).is_some() && !gone.contains(&worker.id);
    let rest: Vec<Worker> = desired.iter().filter(stays).cloned().collect();
    let replaced = |left: &Member| {
        let like =
            |worker: &Worker| worker.model == left.worker.model && worker.role == left.worker.role;
        rest.iter().any(like)
    };
    change.removed.iter().all(replaced).then_some(rest)
}

/// Whether `disaggregation.enforce` would refuse the requests of a model, because the model has no prefill worker.
fn lacks_prefill(fleet: &Fleet, settings: &RouterSettings) -> bool {
    let has_prefill = |model: &ModelName| {
        fleet
            .workers()
            .any(|worker| worker.model == *model && worker.role == Role::Prefill)
    };
    let decoded = fleet
        .workers()
        .filter(|worker| worker.role == Role::Decode)
        .map(|worker| &worker.model);
    settings.disaggregation.enforce
        && settings
            .enforced
            .iter()
            .chain(decoded)
            .any(|model| !has_prefill(model))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn workers(list: &[(u64, &str)]) -> Vec<Worker> {
        let mut models: Vec<&str> = list.iter().map(|(_, model)| *model).collect();
        models.sort_unstable();
        models.dedup();
        let models: Vec<String> = models
            .iter()
            .map(|model| format!("{{name: {model}}}"))
            .collect();
        let list = list.iter().map(|(id, model)| {
            let port = 8000 + id % 1000;
            format!(
                "{{id: {}, model: {model}, endpoint: '127.0.0.1:{port}'}}",
                id / 1000
            )
        });
        let (models, list) = (models.join(", "), list.collect::<Vec<_>>().join(", "));
        let text = format!("models: [{models}]\nworkers: [{list}]\n");
        let config =
            Config::parse(std::path::Path::new("warmroute.yaml"), text.as_bytes()).unwrap();
        match config.worker_source() {
            crate::config::WorkerSource::Fixed(workers) => workers,
            source => panic!("{source:?}"),
        }
    }

    #[test]
    fn those_who_leave_go_before_newcomers_come_unless_somebody_would_be_left_without() {
        // The id in thousands, and the port.
        let before = workers(&[(1001, "m"), (2002, "m"), (9009, "n")]);
        let fleet = Fleet::empty().reconcile(before).fleet;
        type Case<'a> = (&'a [(u64, &'a str)], Option<&'a [u64]>);
        let cases: [Case<'_>; 6] = [
            (&[(1001, "m"), (3003, "m"), (9009, "n")], Some(&[1, 9])),
            // One that moved leaves and comes.
            (&[(1001, "m"), (2005, "m"), (9009, "n")], Some(&[1, 9])),
            (&[(1001, "m"), (9009, "n")], None),
            (&[(1001, "m"), (2002, "m"), (3003, "m"), (9009, "n")], None),
            (&[(3003, "m"), (4004, "m"), (9009, "n")], None),
            (&[(1001, "m"), (2002, "m"), (8008, "n")], None),
        ];
        for (desired, expected) in cases {
            let rest = without_leavers(&fleet, &workers(desired));
            let ids = rest.map(|rest| rest.iter().map(|worker| worker.id.0).collect::<Vec<_>>());
            assert_eq!(ids.as_deref(), expected, "{desired:?}");
        }
    }
}
