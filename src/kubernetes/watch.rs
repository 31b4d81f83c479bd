//! Lists and watches the InferencePool and the pods of each pool. Failures are retried without
//! limit and do not change the fleet.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::Instant;
use warmroute_core::worker::Worker;
use warmroute_metrics::Metrics;
use warmroute_server::fleet::discovery::config::WorkerConfig;
use warmroute_server::fleet::discovery::kubernetes::{KubernetesConfig, PodsConfig};
use warmroute_server::fleet::discovery::worker_set::{WorkerSetTracker, warn_about_new};
use warmroute_server::fleet::discovery::{DiscoverySourceHealth, WorkerModel};

use super::client::{ApiClient, ObjectQuery};
use super::error::RequestError;
use super::inspect::inspect;
use super::objects::{self, InferencePool, Pod};
use super::pool::{PoolMembership, PoolPods};
use super::reflector::{ObjectReflector, WatchHealth, WatchUpdate};
use super::store::ObjectStore;

/// Window in which changes are combined into one update.
const COALESCE_WINDOW: Duration = Duration::from_millis(20);

/// Watches the pools and reports each new fleet. The first one is reported when any pool is known.
pub async fn watch(
    config: KubernetesConfig,
    models: Vec<WorkerModel>,
    metrics: Arc<Metrics>,
    mut on_fleet: impl FnMut(Vec<Worker>),
) -> anyhow::Result<Infallible> {
    let client = ApiClient::new(&config);
    let (workers_tx, mut workers_rx) = mpsc::unbounded_channel();
    let pools = config.pools.iter().enumerate().map(|(at, pool)| {
        let watch = PoolWatch::new(pool, &client, &metrics);
        let workers_tx = workers_tx.clone();
        watch.run(move |workers| _ = workers_tx.send((at, workers)))
    });
    let reporting = async {
        let mut all: Vec<Vec<WorkerConfig>> = vec![Vec::new(); config.pools.len()];
        let mut tracker = WorkerSetTracker::new("kubernetes", models);
        while let Some((at, workers)) = workers_rx.recv().await {
            all[at] = workers;
            tracker
                .update(all.concat())
                .into_iter()
                .for_each(&mut on_fleet);
        }
    };
    tokio::select! {
        _ = join_all(pools) => anyhow::bail!("the watches of Kubernetes have ended"),
        () = reporting => anyhow::bail!("the watches of Kubernetes have ended"),
    }
}

/// Lists the workers once. Fails if any pool cannot be read.
pub async fn list_workers(
    config: &KubernetesConfig,
    models: &[WorkerModel],
) -> anyhow::Result<Vec<Worker>> {
    let report = inspect(config, models, config.watch_timeout.get()).await;
    match report
        .pools
        .iter()
        .find_map(|pool| Some((pool, pool.failure.as_ref()?)))
    {
        Some((pool, failure)) => anyhow::bail!("pool {}: {}", pool.title, failure.message()),
        None => Ok(report.workers),
    }
}

/// Returns the next update. Never completes without a reflector.
async fn next<K>(reflector: &mut Option<ObjectReflector<K>>) -> WatchUpdate<K>
where
    K: DeserializeOwned + Send + 'static,
{
    match reflector {
        Some(reflector) => reflector.next().await,
        None => std::future::pending().await,
    }
}

/// Reason why the InferencePool cannot be used or selects no pods.
enum PoolProblem {
    /// The current workers stay in use.
    WorkersKept(String),
    /// The current workers were removed.
    WorkersRemoved(String),
}

/// State of the list and watch of one pool.
struct PoolWatch<'a> {
    pool: &'a PodsConfig,
    client: &'a ApiClient,
    /// `None` if the pool is configured by a selector.
    pools: Option<ObjectReflector<InferencePool>>,
    /// `None` while the selector is unknown.
    pods: Option<ObjectReflector<Pod>>,
    membership: Option<PoolMembership>,
    pool_problem: Option<PoolProblem>,
    inference_pools: ObjectStore<InferencePool>,
    /// Last logged error, until every watch works again.
    reported_error: Option<RequestError>,
    pool_pods: PoolPods,
    health: DiscoverySourceHealth,
    unusable: Vec<String>,
}

impl<'a> PoolWatch<'a> {
    fn new(pool: &'a PodsConfig, client: &'a ApiClient, metrics: &Arc<Metrics>) -> Self {
        let query = |name: &String| ObjectQuery {
            resource: objects::inference_pools(),
            namespace: pool.namespace.clone(),
            labels: None,
            fields: Some(format!("metadata.name={name}")),
        };
        let mut watch = Self {
            pool,
            client,
            pools: pool
                .name
                .as_ref()
                .map(|name| ObjectReflector::new(client.clone(), query(name))),
            pods: None,
            membership: None,
            pool_problem: None,
            inference_pools: ObjectStore::default(),
            reported_error: None,
            pool_pods: PoolPods::default(),
            health: DiscoverySourceHealth::new(format!("kubernetes {}", pool.title()), metrics),
            unusable: Vec::new(),
        };
        if let Some(membership) = PoolMembership::from_config(pool) {
            watch.select(membership);
        }
        watch
    }

    /// Reports the workers after each change of the pool or its pods.
    async fn run(mut self, mut on_workers: impl FnMut(Vec<WorkerConfig>)) {
        let mut due: Option<Instant> = None;
        loop {
            let wait = async {
                match due {
                    Some(due) => tokio::time::sleep_until(due).await,
                    None => std::future::pending().await,
                }
            };
            let may_have_changed = tokio::select! {
                update = next(&mut self.pools) => self.on_pool(update),
                update = next(&mut self.pods) => self.on_pods(update),
                () = wait => {
                    due = None;
                    self.workers().into_iter().for_each(&mut on_workers);
                    false
                }
            };
            self.report_health();
            if may_have_changed {
                due.get_or_insert_with(|| Instant::now() + COALESCE_WINDOW);
            }
        }
    }

    fn on_pool(&mut self, update: WatchUpdate<InferencePool>) -> bool {
        let WatchUpdate::Changed(change) = update else {
            return false;
        };
        self.inference_pools.apply(change);
        let unreadable = self
            .inference_pools
            .unreadable()
            .next()
            .map(|object| object.reason.clone());
        let membership = self
            .inference_pools
            .objects()
            .values()
            .next()
            .map(PoolMembership::from_pool);
        match (unreadable, membership) {
            (Some(reason), _) => {
                // The last selector stays in use.
                let problem = format!("the InferencePool cannot be read: {reason}");
                self.pool_problem = Some(PoolProblem::WorkersKept(problem));
            }
            (None, Some(Some(membership))) => self.select(membership),
            (None, Some(None)) => self.clear("the InferencePool has no selector"),
            (None, None) => self.clear("there is no such InferencePool"),
        }
        true
    }

    fn on_pods(&mut self, update: WatchUpdate<Pod>) -> bool {
        let WatchUpdate::Changed(change) = update else {
            return false;
        };
        self.pool_pods.apply(change);
        true
    }

    /// Publishes the health of the watches, or the first problem.
    fn report_health(&mut self) {
        let none = WatchHealth::Starting;
        let pools = self
            .pools
            .as_ref()
            .map_or(&WatchHealth::Up, ObjectReflector::health);
        let pods = self.pods.as_ref().map_or(&none, ObjectReflector::health);
        match (pools, &self.pool_problem, pods) {
            (WatchHealth::Failed(error), ..) | (_, None, WatchHealth::Failed(error)) => {
                if !self
                    .reported_error
                    .as_ref()
                    .is_some_and(|reported| error.has_cause_of(reported))
                {
                    self.health.mark_failed(&error.to_string());
                    self.reported_error = Some(error.clone());
                }
                return;
            }
            (_, Some(PoolProblem::WorkersRemoved(problem)), _) => self.health.mark_removed(problem),
            (_, Some(PoolProblem::WorkersKept(problem)), _) => self.health.mark_failed(problem),
            (WatchHealth::Up, None, WatchHealth::Up) => self.health.mark_up(),
            _ => return,
        }
        self.reported_error = None;
    }

    /// Changes selector and ports. The current pods stay until the new list is received.
    fn select(&mut self, membership: PoolMembership) {
        self.pool_problem = None;
        let selector = membership.label_selector();
        if self.pods.is_none()
            || self
                .membership
                .as_ref()
                .map(PoolMembership::label_selector)
                .as_ref()
                != Some(&selector)
        {
            let query = ObjectQuery {
                resource: objects::pods(),
                namespace: self.pool.namespace.clone(),
                labels: Some(selector),
                fields: None,
            };
            self.pods = Some(ObjectReflector::new(self.client.clone(), query));
        }
        self.membership = Some(membership);
    }

    /// Stops the watch of the pods and removes their workers.
    fn clear(&mut self, reason: &str) {
        let removed_before = matches!(self.pool_problem, Some(PoolProblem::WorkersRemoved(_)));
        let removed = self.pool_pods.clear() || removed_before;
        let problem = if removed {
            PoolProblem::WorkersRemoved
        } else {
            PoolProblem::WorkersKept
        };
        self.pool_problem = Some(problem(reason.to_owned()));
        self.membership = None;
        self.pods = None;
    }

    fn workers(&mut self) -> Option<Vec<WorkerConfig>> {
        let membership = self.membership.clone().unwrap_or_default();
        let (workers, unusable) = self.pool_pods.workers(&membership, self.pool)?;
        warn_about_new(&mut self.unusable, unusable);
        Some(workers)
    }
}
